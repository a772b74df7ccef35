"""The conditions of every test: one torch thread, checked shapes and types, the same arithmetic on every CPU.

A plugin of its own (see conftest.py): pytest-xdist's controller runs no test, and imports none of this.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import shape_checks
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from trials import tried_once
from warm_start import WarmPopen, warm

from rlhf import plugins
from rlhf.algorithms.presets import PRESETS
from rlhf.section import Choice, Named
from rlhf.training.session import Recorder

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def first_calls_are_checked() -> None:
    """Check shapes and types in every test again."""
    shape_checks.begin_test()


@pytest.fixture(scope="session", autouse=True)
def bfloat16_on_every_cpu() -> Iterator[None]:
    """Runs in bfloat16 compute in it on a CPU that emulates its products too: the suite says the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.runtime.device.cpu_gains_by_bfloat16", lambda: True)
        yield


@pytest.fixture(scope="session", autouse=True)
def wide_norms() -> Iterator[None]:
    """Norms of float64 models in float64: transformers' round to float32, and all that follows to 1e-7."""
    with pytest.MonkeyPatch.context() as patch:
        for norm in (
            LlamaRMSNorm,
            MistralRMSNorm,
            Olmo2RMSNorm,
            Phi3RMSNorm,
            Qwen2RMSNorm,
            Qwen3RMSNorm,
            Gemma3RMSNorm,
        ):
            patch.setattr(norm, "forward", _wide(norm.forward))
        yield


def _wide(plain: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        if hidden.dtype != torch.float64:
            return plain(self, hidden)
        gemma = type(self) is Gemma3RMSNorm
        weight, eps = (1.0 + self.weight, self.eps) if gemma else (self.weight, self.variance_epsilon)
        normed: Tensor = weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps))
        return normed

    return forward


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Leave out syncs that only a power cut would need: a tenth of the time of small runs, and more on a busy disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # a closed or foreign descriptor is an error still
        yield


@pytest.fixture(autouse=True)
def close_recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the files of every run that a test opened: a test that breaks a run off cannot do it itself."""
    opened: list[Recorder] = []
    begin = Recorder.__init__

    def remember(self: Recorder, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(Recorder, "__init__", remember)
    yield
    for recorder in opened:
        recorder.close()


STARTING_RUNS = ("evaluation", "plugins", "reward_model")  # folders of tests that start runs


@pytest.fixture(autouse=True)
def fast_ways_are_tried_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Try the fast ways once for all models of a kind, for every start of a run."""
    with tried_once() if request.path.parent.name in STARTING_RUNS else nullcontext():
        yield


@pytest.fixture(scope="session")
def warm_process() -> Iterator[None]:
    """Let the process from which others are started end with the tests."""
    yield
    WarmPopen.close()


@pytest.fixture
def warm_start(warm_process: None) -> Iterator[None]:
    """Start `python -m rlhf …` without seconds of imports: a process of its own, for a test that needs no new one."""
    with warm():
        yield


@pytest.fixture
def nothing_stays_registered() -> Iterator[None]:
    """Forget the classes that a test's plug-ins register: other tests of the same process look at all members."""
    for package in ("rlhf.algorithms", "rlhf.rewards", "rlhf.suites", "rlhf.guard.alarms"):
        importlib.import_module(package)  # a family that is founded later would not be put back
    families = [family for base in (Choice, Named) for family in base.__subclasses__() if "members" in vars(family)]
    tables: list[dict[str, Any]] = [*(family.members for family in families), PRESETS, plugins._loaded]
    before = [dict(table) for table in tables]
    yield
    for name in set(plugins._loaded) - set(before[-1]):
        sys.modules.pop(name, None)
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)

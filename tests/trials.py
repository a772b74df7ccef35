"""Trials of fast paths, which a process of tests makes once for all models that are built alike.

Every run tries on a few rows whether its models do without padding and agree with the written-out pass: ten forward
passes for a model and a question, a tenth of a small run on a CPU and a fifth of one on the pretend device. The models
of runs in tests differ in their weights, which change no answer. Tests of the trials themselves do not use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn

from rlhf.models import logprobs
from rlhf.models.kernels import packing
from rlhf.models.kernels.llama import forward

TRIALS: tuple[tuple[ModuleType, str], ...] = (
    (packing, "_find_unsupported_reason"),
    (packing, "_find_varlen_reason"),
    (forward, "_matches_modules"),
    (logprobs, "_find_unsupported_reason"),
)
PASSED = ("", True)  # no reason against it, or the same numbers; a trial that failed is made again
_passed: dict[tuple[Any, ...], Any] = {}


@contextmanager
def tried_once() -> Iterator[None]:
    """Make no trial again that a model of the same kind has passed."""
    with ExitStack() as patches:
        for module, name in TRIALS:
            patches.enter_context(mock.patch.object(module, name, _remembered(module, name)))
        yield


def _remembered(module: ModuleType, name: str) -> Callable[..., Any]:
    trial = getattr(module, name)

    def answer(model: nn.Module, *more: Any) -> Any:
        key = (module.__name__, name, *more, *_kind(model))
        if key in _passed:
            return _passed[key]
        answered = trial(model, *more)
        if answered in PASSED:
            _passed[key] = answered
        return answered

    return answer


def _kind(model: nn.Module) -> tuple[Any, ...]:
    """Everything on which a trial may depend but the numbers: modules and sizes, settings, dtypes, devices, mode."""
    settings = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}  # type: ignore[union-attr,operator]
    weights = tuple((weight.dtype, weight.device.type, hasattr(weight, "ds_id")) for weight in model.parameters())
    implementation = getattr(model.config, "_attn_implementation", None)
    return model.training, str(model), str(settings), implementation, weights

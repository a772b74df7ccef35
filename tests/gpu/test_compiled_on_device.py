"""policy.compile on a GPU."""

from __future__ import annotations

import pytest
import torch
from pretend import PretendDevice
from tiny_models import tiny

from rlhf.models.backbone import body_of
from rlhf.models.kernels.llama import compiled as trial
from rlhf.models.kernels.llama.compiled import compile_layers


def test_without_triton_layers_stay_eager_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, pretend: PretendDevice
) -> None:
    monkeypatch.setattr(trial.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(trial, "compiled", lambda: pytest.fail("compiled without Triton"))
    body = body_of(tiny(dtype=torch.float32).to("cuda"))
    assert compile_layers(body, torch.float32) == "layers are not compiled: a GPU needs Triton, which is not installed"
    assert pretend.problems == []

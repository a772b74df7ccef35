"""The trials of the quick ways at thirty layers of trained weights: rounding passes, a mistake does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from real_model import real_model
from tiny_models import completions_of
from torch import Tensor

from rlhf.config.weights import LoraConfig
from rlhf.models.backbone import add_lora, body_of
from rlhf.models.kernels import attention as rows
from rlhf.models.kernels import packing
from rlhf.models.kernels.llama import elementwise
from rlhf.models.kernels.llama import families as layers
from rlhf.models.kernels.llama import forward as lean
from rlhf.models.kernels.llama.families import Norm, norm_of
from rlhf.models.kernels.llama.forward import supports_fused
from rlhf.models.kernels.packing import packing_unsupported_reason
from rlhf.models.logprobs import completion_outputs


@pytest.fixture
def body(shared: Path) -> Any:
    """SmolLM2 without its head, a new object: trials are remembered by object."""
    return copy.copy(real_model(shared).model)


def test_rounding_is_no_mistake(body: Any) -> None:
    assert packing_unsupported_reason(body) == ""
    assert supports_fused(body)


@pytest.mark.slow
def test_nor_under_autocast_and_with_adapters(shared: Path, body: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert packing_unsupported_reason(body) == ""
        assert supports_fused(body)
    adapted = body_of(add_lora(copy.deepcopy(real_model(shared)), LoraConfig(r=4)))
    assert packing_unsupported_reason(adapted) == ""
    assert supports_fused(adapted)


def test_odd_tokens_are_no_mistake_either(monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    """The first ids of SmolLM2 are special or were never trained: there float32 itself is off by 1e-4 and more."""
    monkeypatch.setattr(
        packing, "probe_tokens", lambda _: [[torch.tensor(row) for row in side] for side in packing.PROBE_TOKENS]
    )
    assert packing_unsupported_reason(body) == ""
    assert supports_fused(body)


def test_log_probabilities_of_text_agree(shared: Path) -> None:
    model = real_model(shared)
    generator = torch.Generator().manual_seed(0)
    text = [torch.randint(1_000, 40_000, (n,), generator=generator).tolist() for n in (9, 30, 17, 21, 5)]
    batch = completions_of([text[0], text[0], text[1]], [text[2], text[3], text[4]])
    fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
    with torch.no_grad():
        quick, padded = (
            completion_outputs(model, *fields, temperature=1.0, packing=packing).logprobs for packing in ("auto", "off")
        )
    torch.testing.assert_close(quick, padded, rtol=0, atol=1e-3)


def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rows._attention
    monkeypatch.setattr(rows, "_attention", lambda q, k, v, **more: plain(q, k, v.roll(1, dims=0), **more))


def missing_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rows._attention
    monkeypatch.setattr(rows, "_attention", lambda q, k, v, **more: plain(q, k, v, **{**more, "scale": 1.0}))


@pytest.mark.parametrize("mistake", quick([leak, missing_scale], [leak]))
def test_a_mistake_of_rows_is_caught(
    monkeypatch: pytest.MonkeyPatch, body: Any, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mistake(monkeypatch)
    assert "other numbers" in packing_unsupported_reason(body)


def wrong_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = elementwise.rotate
    monkeypatch.setattr(elementwise, "rotate", lambda heads, cos, sin, **more: plain(heads, cos, -sin, **more))


def no_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mistake this small a float32 pass of thirty layers still shows more than of rounding."""
    plain = elementwise._inverse_rms
    monkeypatch.setattr(elementwise, "_inverse_rms", lambda x, eps: plain(x, 100 * eps))


def forgotten_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lean.layer_forward

    def skip_one(layer: Any, x: Tensor, **more: Any) -> Tensor:
        return x if layer.self_attn.layer_idx == 17 else plain(layer, x, **more)

    monkeypatch.setattr(lean, "layer_forward", skip_one)


def stale_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_weight(module: Any) -> Norm:
        return norm_of(module)._replace(weight=torch.ones_like(module.weight))

    monkeypatch.setattr(layers, "norm_of", without_weight)
    monkeypatch.setattr(lean, "norm_of", without_weight)


@pytest.mark.parametrize("mistake", quick([wrong_rotation, no_epsilon, forgotten_layer, stale_norm], [no_epsilon]))
def test_a_mistake_of_the_written_out_layers_is_caught(
    monkeypatch: pytest.MonkeyPatch, body: Any, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mistake(monkeypatch)
    assert packing_unsupported_reason(body) == ""
    assert not supports_fused(body)

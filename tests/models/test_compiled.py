"""Layers for torch.compile (policy.compile): the numbers of eager ones, and a reason wherever they stay eager."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_llama_forward import adapted, gradients
from test_packing import BATCHES
from tiny_models import tiny
from torch import Tensor

from rlhf.models.backbone import body_of
from rlhf.models.kernels.llama import compiled as trial
from rlhf.models.kernels.llama.compiled import PLAIN, compile_layers
from rlhf.models.kernels.llama.elementwise import EAGER, Elementwise
from rlhf.models.kernels.llama.forward import supports_fused, use_functions
from rlhf.models.logprobs import COMPILED, of_bodies

FOR_REAL = Path(__file__).with_name("compile_for_real.py")  # in a process without the tests' checks of shapes


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def arguments(name: str, dtype: torch.dtype = torch.float64) -> list[tuple[Any, ...]]:
    """Arguments of the functions with this name: 70 rows, 6 wide, of 3 heads of which only a part is rotated."""
    x, weight, inverse, gradient = (
        numbers(70, 6, seed=1),
        numbers(6, seed=2),
        numbers(70, 1, seed=3),
        numbers(70, 6, seed=4),
    )
    heads, cos, sin = numbers(70, 3, 6, seed=5, dtype=dtype), numbers(70, 1, 2, seed=6), numbers(70, 1, 2, seed=7)
    low = (numbers(70, 6, seed=seed, dtype=dtype) for seed in (8, 9, 10))
    d_value, gates, ups = low
    return {
        "normalize": [(x, weight, 1e-3, dtype)],
        "renormalize": [(x, inverse, weight, dtype)],
        "norm_backward": [(gradient, x, weight, inverse, None, True), (gradient, x, weight, inverse, x, False)],
        "rope": [(heads, cos, sin, dtype)],
        "rope_backward": [(heads, cos, sin, dtype)],
        "gate": [(gates, ups, "silu"), (gates, ups, "gelu_pytorch_tanh")],
        "gate_backward": [(d_value, gates, ups, "silu", True), (d_value, gates, ups, "gelu_pytorch_tanh", False)],
    }[name]


def call(functions: Elementwise, name: str, given: Sequence[Any]) -> list[Tensor | None]:
    copies = [part.clone() if isinstance(part, Tensor) else part for part in given]
    result = getattr(functions, name)(*copies)
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", Elementwise._fields)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_functions_are_the_eager_ones(name: str, dtype: torch.dtype) -> None:
    close = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
    for given in arguments(name, dtype):
        for ours, right in zip(call(PLAIN, name, given), call(EAGER, name, given), strict=True):
            assert (ours is None) == (right is None)
            if ours is not None and right is not None:
                assert ours.dtype == right.dtype
                torch.testing.assert_close(ours, right, **close)


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "gemma3_text", "adapted"])
def test_layers_of_them_have_the_same_values_and_gradients(family: str) -> None:
    model = adapted("llama") if family == "adapted" else tiny(family)
    right, right_d = gradients(model, BATCHES["shared"])
    assert use_functions(body_of(model), PLAIN)
    ours, ours_d = gradients(model, BATCHES["shared"])
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)
    for name, expected in right_d.items():
        torch.testing.assert_close(ours_d[name], expected, rtol=0, atol=1e-11)


def as_if_compiled(patch: pytest.MonkeyPatch, functions: Elementwise, *, graphs: int = 1) -> None:
    patch.setattr(trial, "compiled", lambda: functions)
    patch.setattr(trial, "count_graphs", lambda: graphs)


def lines(model: Any) -> list[str]:
    bodies = [body_of(model)]
    return of_bodies(bodies, packing="auto").with_compiled(bodies, "float64", wanted=True).lines()


def test_a_run_says_that_its_layers_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_compiled(monkeypatch, PLAIN)
    assert lines(tiny()) == ["optimizations on: no padding, written-out layers, compiled layers"]
    assert lines(adapted("qwen3")) == ["optimizations on: no padding, written-out layers, compiled layers"]


def test_a_run_that_does_not_ask_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "compiled", lambda: pytest.fail("compiled unasked"))
    bodies = [body_of(tiny())]
    assert COMPILED not in of_bodies(bodies, packing="auto").with_compiled(bodies, "float64", wanted=False).ways


def test_a_reference_kept_in_16_bits_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_compiled(monkeypatch, PLAIN)
    body = body_of(tiny(dtype=torch.float32)).requires_grad_(False)
    assert supports_fused(body)
    for module in body.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(torch.bfloat16)
    assert compile_layers(body, torch.bfloat16) == ""


def no_compiler(*_: Any) -> Any:
    raise RuntimeError("No working C++ compiler found\nin any of these places")


def half_a_gradient(*given: Any) -> Any:
    """A mistake that no state shows."""
    value, d_gates, d_ups = PLAIN.gate_backward(*given)
    return value, d_gates, d_ups / 2


@pytest.mark.parametrize(
    ("functions", "graphs", "reason"),
    [
        (PLAIN._replace(normalize=no_compiler), 1, "torch.compile failed: RuntimeError: No working C++ compiler found"),
        (PLAIN._replace(gate_backward=half_a_gradient), 1, "on a few rows they gave other numbers"),
        (PLAIN._replace(rope=lambda heads, *_: heads), 1, "on a few rows they gave other numbers"),
        (PLAIN, 0, "torch.compile did nothing, as if TORCHDYNAMO_DISABLE were set"),
    ],
)
def test_what_cannot_be_compiled_stays_eager_and_is_said(
    monkeypatch: pytest.MonkeyPatch, functions: Elementwise, graphs: int, reason: str
) -> None:
    model = tiny()
    right, _ = gradients(model, BATCHES["alone"])
    as_if_compiled(monkeypatch, functions, graphs=graphs)
    line, explanation = lines(model)
    assert line == "optimizations on: no padding, written-out layers; off: compiled layers"
    assert explanation == f"layers are not compiled: {reason}"
    assert torch.equal(gradients(model, BATCHES["alone"])[0], right)


def test_modules_that_are_not_written_out_are_not_compiled() -> None:
    reason = "layers are not compiled: they are not written out"
    assert compile_layers(body_of(tiny("gpt2")), torch.float64) == reason
    assert lines(tiny("gpt2"))[1:] == [reason]


@pytest.mark.slow
def test_torch_compiles_them_once_for_all_lengths_and_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOR_REAL), str(tmp_path)], capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["resumed"] == {"compiled": True, "continued_at": 3, "difference": 0.0}
    for case in result["cases"]:
        assert case["reason"] == "", case
        assert case["graphs"] > 0, case
        assert case["graphs_for_other_lengths"] == 0, case
        assert 0 < case["error"] < case["limit"], case

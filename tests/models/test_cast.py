"""Products in 16 bits on a CPU: batches of different lengths ask for the same shapes."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_packing import BATCHES, fields
from tiny_models import tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.models.backbone import CausalLM, body_of
from rlhf.models.kernels import cast
from rlhf.models.kernels.cast import HALF_DTYPES, ROW_MULTIPLE, cast_weight, pad_rows_for_onednn, weights_cast_once
from rlhf.models.kernels.llama.forward import supports_fused
from rlhf.models.logprobs import completion_outputs


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_rows_of_zeros_below(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 3, requires_grad=True)
    padded = pad_rows_for_onednn(x, dtype)
    assert padded.dtype == dtype
    assert len(padded) == (64 if rows <= 64 else 128)
    assert torch.equal(padded[:rows], x.to(dtype))
    assert not padded[rows:].any()
    padded.float().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(rows, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_numbers_are_left_alone(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, dtype=dtype)
    assert pad_rows_for_onednn(x, dtype) is x


class Products(TorchDispatchMode):
    """The shapes of the products in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "linear") and tensors[-1].dtype in HALF_DTYPES:
            self.shapes.add((name, *(tuple(each.shape) for each in tensors)))
        return func(*args, **(kwargs or {}))


def products(batch: Any) -> set[tuple[Any, ...]]:
    model = tiny(dtype=torch.float32)
    assert supports_fused(body_of(model))
    completion_outputs(model, *fields(batch), temperature=1.0)  # the trials of a new model
    with Products() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = completion_outputs(model, *fields(batch), temperature=1.0)
        outputs.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return seen.shapes


def test_batches_of_other_lengths_ask_for_the_same_shapes() -> None:
    batch = BATCHES["shared"]
    some = batch.rows(slice(0, len(batch) - 1))
    assert int(batch.completion_mask.sum()) != int(some.completion_mask.sum())
    whole, part = products(batch), products(some)
    assert whole == part
    assert len(whole) > 5
    assert all(any(size % ROW_MULTIPLE == 0 for shape in shapes for size in shape) for _, *shapes in whole)


class Casts(TorchDispatchMode):
    """Counts the tensors of each shape that are cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_to_copy" and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def micro_batches(model: CausalLM, *, count: int) -> None:
    """Add up the gradient of `count` passes in bfloat16."""
    for _ in range(count):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = completion_outputs(model, *fields(BATCHES["alone"]), temperature=1.0)
        outputs.logprobs.sum().backward()


def test_each_weight_is_cast_once_an_optimizer_step() -> None:
    model = tiny(dtype=torch.float32)
    body: Any = body_of(model)
    assert supports_fused(body)
    micro_batches(model, count=1)  # the trials of a new model
    down = tuple(body.layers[0].mlp.down_proj.weight.shape)
    with Casts() as casts, weights_cast_once():
        micro_batches(model, count=3)
    assert casts.shapes[down] == len(body.layers)
    with Casts() as casts:
        micro_batches(model, count=3)
    assert casts.shapes[down] == len(body.layers) * 3 * 2  # in each pass, forward and backward


def test_parts_of_a_fused_weight_are_cast_once_too() -> None:
    """They are other views in each pass. Of a model 16 wide: query, key and value have 16, 8 and 8 rows."""
    model = tiny("phi3", dtype=torch.float32)
    body: Any = body_of(model)
    assert supports_fused(body)
    micro_batches(model, count=1)
    with Casts() as casts, weights_cast_once():
        micro_batches(model, count=3)
    assert casts.shapes[8, 16] == 2 * len(body.layers)
    assert casts.shapes[24, 16] == 2 * len(body.layers)  # gate and up


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_kept_casts_leave_the_gradient_as_it_is(family: str) -> None:
    model = tiny(family, dtype=torch.float32)
    gradients = []
    for scope in (nullcontext, weights_cast_once):
        model.zero_grad()
        with scope():
            micro_batches(model, count=2)
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_changed_weight_is_cast_again() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with weights_cast_once():
        first = cast_weight(weight, torch.bfloat16)
        assert cast_weight(weight, torch.bfloat16) is first
        with weights_cast_once():  # the outermost counts
            assert cast_weight(weight, torch.bfloat16) is first
        assert cast_weight(weight, torch.bfloat16) is first
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(cast_weight(weight, torch.bfloat16), torch.full((2, 2), 2.0, dtype=torch.bfloat16))
    assert cast_weight(weight, torch.bfloat16) is not cast_weight(weight, torch.bfloat16)
    assert cast_weight(weight, torch.float32) is weight


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_that_an_optimizer_changed_is_cast_again(fused: bool) -> None:
    """A fused optimizer does not raise the version of the weights that it changes."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=fused)
    weight.grad = torch.ones(2, 2)
    with weights_cast_once():
        before = cast_weight(weight, torch.bfloat16).clone()
        optimizer.step()
        after = cast_weight(weight, torch.bfloat16)
    assert not torch.equal(weight, torch.ones(2, 2))
    assert torch.equal(after, weight.bfloat16())
    assert not torch.equal(after, before)


def test_no_hook_of_the_context_stays_with_the_optimizers() -> None:
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    before = dict(hooks)
    with weights_cast_once(), weights_cast_once():
        assert len(hooks) == len(before) + 1
    assert dict(hooks) == before


def test_the_context_may_end_in_another_thread_while_a_weight_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler beside the update opens and closes it too; here it ends between two looks at the kept copies."""
    weight = torch.randn(4, 4)

    class Weight(Tensor):
        @property
        def shape(self) -> Any:  # read after the first look
            monkeypatch.setattr(cast, "_CASTS", None)
            return super().shape

    monkeypatch.setattr(cast, "_CASTS", {})
    assert torch.equal(cast_weight(weight.as_subclass(Weight), torch.bfloat16), weight.bfloat16())

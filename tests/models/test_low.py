"""Products in 16 bits on a CPU: batches of different lengths ask for the same shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rows import BATCHES, fields
from tiny_models import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.models.backbone import body_of
from rlhf.models.lean import is_lean
from rlhf.models.logprobs import completion_outputs
from rlhf.models.low import MULTIPLE, SHORT, low_rows


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_rows_of_zeros_below(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 3, requires_grad=True)
    found = low_rows(x, dtype)
    assert found.dtype == dtype
    assert len(found) == (64 if rows <= 64 else 128)
    assert torch.equal(found[:rows], x.to(dtype))
    assert not found[rows:].any()
    found.float().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(rows, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_numbers_are_left_alone(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, dtype=dtype)
    assert low_rows(x, dtype) is x


class Products(TorchDispatchMode):
    """The shapes of the products in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "linear") and tensors[-1].dtype in SHORT:
            self.shapes.add((name, *(tuple(each.shape) for each in tensors)))
        return func(*args, **(kwargs or {}))


def products(batch: Any) -> set[tuple[Any, ...]]:
    model = tiny(dtype=torch.float32)
    assert is_lean(body_of(model))
    completion_outputs(model, *fields(batch), temperature=1.0)  # what is found out once about a model
    with Products() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        found = completion_outputs(model, *fields(batch), temperature=1.0)
        found.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return seen.shapes


def test_batches_of_other_lengths_ask_for_the_same_shapes() -> None:
    batch = BATCHES["shared"]
    some = batch.rows(slice(0, len(batch) - 1))
    assert int(batch.completion_mask.sum()) != int(some.completion_mask.sum())
    whole, part = products(batch), products(some)
    assert whole == part
    assert len(whole) > 5
    assert all(any(size % MULTIPLE == 0 for shape in shapes for size in shape) for _, *shapes in whole)

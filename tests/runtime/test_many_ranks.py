"""A step of several processes is the step of one: the processes are threads here, which talk through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf.algo.masked import Mean
from rlhf.batching import Batch, Number
from rlhf.config.sections import OptimizerConfig
from rlhf.errors import CheckpointError, RankLost
from rlhf.evaluation.evaluate import evaluate_loss
from rlhf.runtime import distributed as ranks_module
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.engine import LocalModel
from rlhf.tracking.checkpoint import Checkpoints
from rlhf.training.micro_batches import gather_metrics
from rlhf.training.step import LossBatch, optimizer_step

T = TypeVar("T")


@dataclass
class Table:
    """The place of the threads' messages."""

    world: int
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=20)


class Threads(Distributed):
    """One of several threads."""

    def __init__(self, rank: int, table: Table) -> None:
        super().__init__(rank, table.world)
        self.table = table

    def gather(self, value: T) -> list[T]:
        self.table.values[self.rank] = value
        self.table.barrier.wait()
        values = [self.table.values[rank] for rank in range(self.world)]
        self.table.barrier.wait()
        return values

    def from_main(self, value: T) -> T:
        return self.gather(value)[0]

    def start_sum(self, gradients: Sequence[Tensor]) -> Callable[[], None]:
        gathered = self.gather([gradient.clone() for gradient in gradients])

        def finish() -> None:
            for mine, all_of_it in zip(gradients, zip(*gathered, strict=True), strict=True):
                mine.copy_(sum(all_of_it[1:], start=all_of_it[0]))

        return finish


def in_all(world: int, work: Callable[[Distributed], T]) -> list[T]:
    """The results of `work` in each of so many processes."""
    table = Table(world)
    with ThreadPoolExecutor(world) as pool:
        return [one.result() for one in [pool.submit(work, Threads(rank, table)) for rank in range(world)]]


@dataclass(frozen=True, kw_only=True)
class Points(Batch):
    x: Float[Tensor, "B D"]
    y: Float[Tensor, " B"]


@dataclass
class Squares:
    """The mean square error; `spoiled` names a row, by its y, whose loss is no number."""

    module: nn.Module
    spoiled: float | None = None
    metric: str = "loss/policy"

    def denominators(self, batch: Points) -> dict[str, float]:
        return {"policy": float(len(batch))}

    def terms(self, micro: Points) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        errors = (self.module(micro.x).squeeze(-1) - micro.y) ** 2
        if self.spoiled is not None:
            errors = torch.where(micro.y == self.spoiled, torch.nan, errors)
        return {"policy": errors.sum()}, {self.metric: Mean.of(errors)}


class HeldOut(Squares):
    """The same error, with its rows."""

    row_values: dict[str, Tensor]

    def terms(self, micro: Points) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        errors = (self.module(micro.x).squeeze(-1) - micro.y) ** 2
        self.row_values = {"loss": errors.detach()}
        return {"policy": errors.sum()}, {self.metric: Mean.of(errors)}


def points(rows: int) -> Points:
    draw = torch.Generator().manual_seed(rows)
    return Points(x=torch.randn(rows, 3, generator=draw).double(), y=torch.arange(float(rows)).double())


def step(
    ranks: Distributed, rows: int, *, spoiled: float | None = None, size: int = 2
) -> tuple[Tensor, dict[str, float]]:
    """The weights after two steps on so many rows, and the last step's metrics."""
    module = nn.Linear(3, 1).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    config = OptimizerConfig(optimizer="sgd", lr=0.1, max_grad_norm=0.5)
    trained = LocalModel("policy", module, config, terms=["policy"], ranks=ranks)
    part = LossBatch(points(rows), Squares(module, spoiled))
    for _ in range(2):
        metrics = optimizer_step([part], [trained], micro_batch_size=size, lr_factor=1.0, ranks=ranks)
    return torch.cat([p.detach().flatten() for p in module.parameters()]), metrics.values()


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("world", [2, 3])
def test_the_number_of_processes_cannot_change_a_step_nor_its_metrics(world: int, rows: int) -> None:
    """Ragged shares and processes without a row too."""
    alone, numbers = step(SINGLE_PROCESS, rows)
    for weights, metrics in in_all(world, lambda ranks: step(ranks, rows)):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-12)
        assert metrics == pytest.approx(numbers, abs=1e-12)


@pytest.mark.parametrize("rows", [4, 7, 8])
def test_passes_of_the_same_rows_give_the_same_bits_in_one_process_and_two(rows: int) -> None:
    """Gradients, loss and metrics, if each process has one pass."""
    half = -(-rows // 2)
    alone, numbers = step(SINGLE_PROCESS, rows, size=half)
    for weights, metrics in in_all(2, lambda ranks: step(ranks, rows, size=half)):
        assert torch.equal(weights, alone)
        assert metrics == numbers


def test_the_total_loss_of_two_parts_has_the_same_bits_in_one_process_and_two() -> None:
    """Two passes of the policy's loss, then two of the critic's; each process has one of each."""
    losses: list[list[Number]] = [[0.1], [0.2], [0.3], [0.7]]
    assert (0.1 + 0.3) + (0.2 + 0.7) != 0.1 + 0.2 + 0.3 + 0.7
    totals = in_all(2, lambda ranks: gather_metrics([{}] * 2, losses[ranks.rank :: 2], ranks)[1])
    assert totals == [0.1 + 0.2 + 0.3 + 0.7] * 2


def test_held_out_losses_have_the_same_bits_in_any_number_of_processes() -> None:
    """Their sums go over the batches in order, whichever process has read them."""
    torch.manual_seed(0)
    module = nn.Linear(3, 1).double()

    def measured(ranks: Distributed) -> tuple[dict[str, float], dict[str, list[float]]]:
        rows: dict[str, list[float]] = {}
        batches = [points(count) for count in (5, 5, 4, 4, 2)]
        return evaluate_loss(batches, HeldOut(module, metric="loss/sft"), ranks, rows=rows), rows

    alone = measured(SINGLE_PROCESS)
    assert len(alone[1]["loss"]) == 20
    for world in (2, 3):
        assert in_all(world, measured) == [alone] * world


def test_a_nan_in_the_rows_of_one_process_keeps_all_from_stepping() -> None:
    before, _ = step(SINGLE_PROCESS, 5, spoiled=0.0)
    for weights, metrics in in_all(2, lambda ranks: step(ranks, 5, spoiled=4.0)):  # the second process has it
        assert torch.equal(weights, before)
        assert metrics["skipped/nonfinite"] == 1.0


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_rows_that_are_dealt_come_back_in_their_order(rows: int) -> None:
    batch = points(rows)

    def twice(ranks: Distributed) -> tuple[list[float], list[float]]:
        doubled = ranks.spread(batch, lambda part: Points(x=part.x, y=2 * part.y))
        (tripled,) = ranks.map_rows_to_tensors(batch, lambda part: (3 * part.y,))
        return doubled.y.tolist(), tripled.tolist()

    expected = [2.0 * row for row in range(rows)], [3.0 * row for row in range(rows)]
    assert in_all(3, twice) == [expected] * 3


def test_one_answer_for_all() -> None:
    assert in_all(3, lambda ranks: ranks.any(ranks.rank == 2)) == [True] * 3
    assert in_all(3, lambda ranks: ranks.any(False)) == [False] * 3
    assert in_all(3, lambda ranks: ranks.largest(float(ranks.rank))) == [2.0] * 3
    assert in_all(3, lambda ranks: ranks.on_main(lambda: ranks.rank + 7)) == [7] * 3


def test_what_fails_in_one_process_is_told_to_all() -> None:
    def fails(ranks: Distributed) -> str:
        def work() -> None:
            if ranks.rank == 1:
                raise CheckpointError("the disk is full")

        with pytest.raises(CheckpointError) as caught:
            ranks.all_succeed(work)
        return str(caught.value)

    assert in_all(3, fails) == ["the disk is full"] * 3


def test_a_process_that_is_gone_is_told_from_a_full_disk_or_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("Connection closed by peer")

    for name in ("all_gather_object", "broadcast_object_list", "all_reduce"):
        monkeypatch.setattr(ranks_module.dist, name, gone)
    ranks = Distributed(0, 2)
    for talk in (lambda: ranks.any(True), lambda: ranks.from_main(1), lambda: ranks.add_gradients([torch.ones(1)])):
        with pytest.raises(RankLost, match=r"another rank .*same command continues.*closed by peer"):
            talk()
    with pytest.raises(RankLost):
        Checkpoints(tmp_path, keep=1, ranks=ranks).save(1, lambda _: None)

    def full(*_args: object, **_kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ranks_module.dist, "all_reduce", full)
    with pytest.raises(torch.OutOfMemoryError):
        ranks.add_gradients([torch.ones(1)])


def test_gradients_are_added_up_once_each_in_messages_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has ten times the gradients of this one: their sum is eleven times, not the mean."""
    sizes = list[int]()

    def add_those_of_the_other(flat: Tensor, *, async_op: bool) -> SimpleNamespace:
        assert async_op
        sizes.append(flat.numel())
        return SimpleNamespace(wait=lambda: flat.add_(10 * flat.clone()))

    monkeypatch.setattr(ranks_module.dist, "all_reduce", add_those_of_the_other)
    monkeypatch.setattr(ranks_module, "GRADIENT_BUCKET", 7)
    gradients = [torch.arange(float(n)).view(shape) for n, shape in ((4, (2, 2)), (3, (3,)), (8, (2, 4)), (1, (1,)))]
    before = [gradient.clone() for gradient in gradients]
    Distributed(0, 2).add_gradients(gradients)
    assert sizes == [7, 8, 1]
    for new, old in zip(gradients, before, strict=True):
        assert torch.equal(new, 11 * old)

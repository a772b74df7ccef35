"""Rows of a minibatch as micro-batches over the ranks, and the numbers of all micro-batches together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from rlhf.algo.masked import Mean
from rlhf.batching import Batch, Number, read_numbers
from rlhf.runtime.distributed import Distributed
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.tracking.metrics import Metrics
from rlhf.types import Completions, Demonstrations, PreferencePairs


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward and backward pass; `counts` is False for a dummy pass that keeps the ranks in step."""

    rows: Batch
    counts: bool


def split_into_micro_batches(
    batch: Batch, fitting: AdaptiveMicroBatch, size: int, ranks: Distributed
) -> list[MicroBatch]:
    """Split this rank's share of the rows into passes, as many on every rank: passes of a sharded model are collective.

    A rank that runs out of rows repeats one of them in passes that do not count.
    """
    share = ranks.share(len(batch))
    local = batch.rows(share.rows[: share.live])
    passes = [MicroBatch(local.rows(rows), True) for rows in fitting.cut(local, size) if len(rows)]
    largest = ranks.largest(float(len(passes))) if fitting.tokens else -(-len(share.rows) // size)
    missing = int(largest) - len(passes)
    return passes + [MicroBatch(batch.rows(share.rows[-1:]), False)] * missing


def read_numbers_once(
    means: Sequence[Mapping[str, Mean]], losses: list[list[Number]], norms: list[Number]
) -> tuple[list[dict[str, Mean]], list[list[Number]], list[float]]:
    """Return the numbers of an optimizer step as Python's, for which the host waits once."""
    sums = [number for named in means for mean in named.values() for number in (mean.total, mean.weight)]
    numbers = iter(read_numbers([*sums, *(loss for terms in losses for loss in terms), *norms]))
    read = [{name: Mean(next(numbers), next(numbers)) for name in named} for named in means]
    return read, [[next(numbers) for _ in terms] for terms in losses], list(numbers)


def gather_metrics(
    means: list[dict[str, Mean]], losses: list[list[Number]], ranks: Distributed
) -> tuple[Metrics, float]:
    """Sum the metrics and the losses over micro-batches and ranks, with the same result on each rank.

    The first losses of all ranks come first, then the second ones: in the order of one process if each part of an
    optimizer step is one pass on each rank.
    """
    metrics = Metrics()
    for named in means:
        metrics.update(named)
    gathered = ranks.gather((metrics.means(), [float(sum(terms)) for terms in losses]))
    merged = Metrics()
    for rank_means, _ in gathered:
        merged.update(rank_means)
    return merged, sum(chain.from_iterable(zip_longest(*(totals for _, totals in gathered), fillvalue=0.0)))


def count_tokens(batch: Batch) -> int:
    """Count the tokens that a pass over the batch reads; a pair reads its prompt twice."""
    if isinstance(batch, PreferencePairs):
        return int(2 * batch.prompt_mask.sum() + batch.chosen_mask.sum() + batch.rejected_mask.sum())
    assert isinstance(batch, Demonstrations | Completions)
    return int(batch.prompt_mask.sum() + batch.completion_mask.sum())

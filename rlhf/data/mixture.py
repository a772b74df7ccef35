"""Batches from several sources with exact quotas, read into memory or streamed; each computed from seed and step alone.

Every source is an endless sequence of rows: its rows in the order of one epoch after another. Which source the next row
comes from is a function of the row's number (`QuotaSchedule`), and which row of the source that is, of the seed and
of how many rows were drawn from it before. So batch k is a function of seed and k, after any earlier reads; a run
that continues needs no saved order. A checkpoint keeps the place of a streamed source in its files; this saves
reading them again from the beginning, and changes no row.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhf.config.data import DatasetConfig
from rlhf.data.datasets import Entry, HasPrompt, RowPipeline, RowSet, digest_of, epoch_order
from rlhf.data.files import Cursor, LazyDataset, missing_shards
from rlhf.data.formats import RowFormat
from rlhf.data.rows import BadRow, DataRow, RowCounts
from rlhf.runtime.seeding import derive_seed

T = TypeVar("T", bound=HasPrompt)
S = TypeVar("S", bound=RowSet[Any])


class MemorySource(Generic[T]):
    """A source whose rows are in memory, in a new permutation each epoch."""

    def __init__(self, entries: Sequence[Entry[T]], skips: RowCounts, seed: int) -> None:
        self.entries, self.skips, self.seed = entries, skips, seed

    def __len__(self) -> int:
        return len(self.entries)

    def row(self, position: int) -> Entry[T]:
        """Return the row at `position` of the endless sequence."""
        return self.entries[epoch_order(len(self), 1, self.seed, position + 1)[0]]

    def has(self, position: int) -> bool:
        """Return whether `position` is in the first epoch."""
        return position < len(self)

    def digest(self) -> str:
        """Return the digest of the encoded rows."""
        return digest_of(self.entries)

    def skipped(self, rows: int) -> int:
        """Count the rows left out: all at once, when the source was read."""
        return self.skips.skipped if rows else 0

    def reseeded(self, seed: int) -> MemorySource[T]:
        """Return the same rows in another order."""
        return MemorySource(self.entries, self.skips, seed)


@dataclass(frozen=True)
class BlockStart:
    """The beginning of a block of a streamed source: its number, the usable and skipped rows before it, its cursor."""

    number: int = 0
    usable: int = 0
    skipped: int = 0
    cursor: Cursor = field(default_factory=Cursor)


@dataclass(frozen=True)
class Block(Generic[T]):
    """The usable rows of consecutive lines of a source, and the start of the next block; None after the last one."""

    start: BlockStart
    rows: tuple[Entry[T], ...]
    skipped: int
    next: BlockStart | None


_ALL_BLOCKS = 2**62  # more than there are
KEPT_BLOCKS = 2  # encoded blocks in memory: a batch may cross from one to the next, and a sampler may be a step ahead
KEPT_STARTS = 8  # known places to read on from; before the first of them a source is read again from its beginning


def _block_order(rows: int, seed: int, epoch: int, block: int) -> list[int]:
    draw = random.Random(f"{seed}/{epoch}/{block}").random  # the same in every version of Python, unlike shuffle()
    keys = [draw() for _ in range(rows)]
    return sorted(range(rows), key=keys.__getitem__)


class StreamedSource(Generic[T]):
    """A source that is read and tokenized as it is needed; memory holds KEPT_BLOCKS blocks of it.

    Each `block_size` consecutive lines are a block. An epoch is the blocks in the order of the files, the usable rows
    of each in a permutation computed from seed, epoch and block. The format of each file follows from its first rows.
    """

    def __init__(
        self, config: DatasetConfig, pipeline: RowPipeline[T, Any], *, name: str, seed: int, block_size: int
    ) -> None:
        """Find the files; none of them is read yet.

        Raises:
            DataError: the data set is missing, or of a kind that cannot be streamed.
        """
        self.config, self.pipeline, self.name = config, pipeline, name
        self.seed, self.block_size = seed, block_size
        self.counts = RowCounts(f"{name}: {config.path}", fatal=config.bad_rows == "error")
        self.report: Callable[[str], None] = lambda _: None
        self._data = LazyDataset(config)
        self._formats: dict[str, RowFormat[T]] = {}
        self._starts: OrderedDict[int, BlockStart] = OrderedDict({0: BlockStart()})
        self._blocks: OrderedDict[int, Block[T]] = OrderedDict()
        self._orders: OrderedDict[tuple[int, int], list[int]] = OrderedDict()  # of the blocks, by epoch and number
        self._length: int | None = None
        self._total_skipped = 0  # of an epoch, once its length is known
        self._counted = 0  # blocks whose rows are in `counts`

    def __len__(self) -> int:
        return self._length or 0

    def reseeded(self, seed: int) -> StreamedSource[T]:
        """Return the same rows in another order, read apart."""
        other = StreamedSource(self.config, self.pipeline, name=self.name, seed=seed, block_size=self.block_size)
        other._counted = _ALL_BLOCKS  # these rows are reported once
        return other

    def row(self, position: int) -> Entry[T]:
        """Return the row at `position` of the endless sequence.

        Raises:
            DataError: a file cannot be read, a malformed row is fatal, or no row is usable.
        """
        epoch, block, offset = self._locate(position)
        return block.rows[self._order(epoch, block)[offset]]

    def has(self, position: int) -> bool:
        """Return whether `position` is in the first epoch; reads as far as it takes to know."""
        return self._locate(position)[0] == 0

    def digest(self) -> str:
        """Return the digest of the files."""
        return self._data.digest()

    def skipped(self, rows: int) -> int:
        """Count the rows left out in the blocks that were read for the first `rows` usable ones, epochs included."""
        if rows == 0:
            return 0
        epoch, block, _ = self._locate(rows - 1)
        if epoch == 0:
            return block.start.skipped + block.skipped
        return self._total_skipped

    def state(self, position: int) -> dict[str, Any]:
        """Return where to read on from for the row at `position`, for a checkpoint."""
        offset = position % self._length if self._length else position
        starts = [start for start in self._starts.values() if start.usable <= offset]
        nearest = max(starts, key=lambda start: start.number)
        return {
            "files": self._data.fingerprint(),
            "block_size": self.block_size,
            "start": asdict(nearest),
            "length": self._length,
            "total_skipped": self._total_skipped if self._length else 0,
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Resume from a checkpoint; return False and restart if the files changed."""
        if state.get("files") != self._data.fingerprint() or state.get("block_size") != self.block_size:
            return False
        start = dict(state["start"])
        cursor = Cursor(**start.pop("cursor"))
        self._remember(BlockStart(**start, cursor=cursor))
        self._length = state["length"]
        self._total_skipped = int(state["total_skipped"])
        self._counted = start["number"] if self._length is None else _ALL_BLOCKS
        return True

    def _locate(self, position: int) -> tuple[int, Block[T], int]:
        """Return the epoch of a position, its block, and its offset in the block."""
        if self._length is None:
            block = self._find(position)
            if block is not None:
                return 0, block, position - block.start.usable
            assert self._length is not None, "the end of the source gives its length"
        epoch, offset = divmod(position, self._length)
        block = self._find(offset)
        assert block is not None, f"{self.name} has row {offset} of {self._length}"
        return epoch, block, offset - block.start.usable

    def _find(self, offset: int) -> Block[T] | None:
        """Return the block with the usable row `offset` of an epoch; None if the epoch has fewer rows."""
        start: BlockStart | None = max(
            (start for start in self._starts.values() if start.usable <= offset), key=lambda start: start.number
        )
        while start is not None:
            block = self._block(start)
            if offset < start.usable + len(block.rows):
                return block
            start = block.next
        return None

    def _block(self, start: BlockStart) -> Block[T]:
        block = self._blocks.get(start.number)
        if block is None:
            block = self._read(start)
            self._blocks[start.number] = block
            while len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        if block.next is not None:
            self._remember(block.next)
        return block

    def _order(self, epoch: int, block: Block[T]) -> list[int]:
        """Return the permutation of a block's rows in an epoch."""
        key = (epoch, block.start.number)
        if key not in self._orders:
            self._orders[key] = _block_order(len(block.rows), self.seed, *key)
            while len(self._orders) > KEPT_BLOCKS:
                self._orders.popitem(last=False)
        return self._orders[key]

    def _remember(self, start: BlockStart) -> None:
        self._starts[start.number] = start
        while len(self._starts) > KEPT_STARTS:
            del self._starts[next(number for number in self._starts if number > 0)]  # 0 is the beginning

    def _read(self, start: BlockStart) -> Block[T]:
        """Read and encode a block; at the end of the source, note its length and report its rows."""
        counts = RowCounts(self.counts.source, fatal=self.counts.fatal)
        rows, following = self._data.read(start.cursor, self.block_size, counts)
        limit = None if self.config.limit is None else self.config.limit - start.usable
        usable = tuple(self.pipeline.encode(self._parse(rows, start.cursor.file, counts), counts, limit=limit))
        skipped, used = counts.skipped, start.usable + len(usable)
        is_first_time = start.number >= self._counted
        if is_first_time and start.number == 0:
            for note in missing_shards(place for _, place in self._data.files if isinstance(place, Path)):
                self.report(f"{self.counts.source}: {note}")
        if is_first_time:
            self._counted = start.number + 1
            self._report(counts)
        if following is None or (limit is not None and len(usable) == limit):
            self._end(used, start.skipped + skipped, tell=is_first_time)
            return Block(start, usable, skipped, None)
        after = BlockStart(start.number + 1, used, start.skipped + skipped, following)
        return Block(start, usable, skipped, after)

    def _report(self, counts: RowCounts) -> None:
        """Add the counts of a block, and report the reasons for which no row was skipped before."""
        known = set(self.counts.counts)
        self.counts.merge(counts)
        if set(self.counts.counts) - known:
            self.report(f"{self.counts.source}, so far: {self.counts.skipped:,} rows skipped: {self.counts.reasons()}")

    def _end(self, length: int, skipped: int, *, tell: bool) -> None:
        if length == 0:
            self.counts.require_rows()
        if self._length is None and tell:
            is_whole = self.counts.used == length  # a resumed run has no reasons for rows skipped before
            total = f"{self.counts.source}: {length:,} rows used, {skipped:,} skipped"
            self.report(f"{self.counts.summary() if is_whole else total}. Read to its end")
        self._length, self._total_skipped = length, skipped

    def _parse(self, rows: Sequence[DataRow], file: int, counts: RowCounts) -> Any:
        for row in rows:
            if row.file not in self._formats:
                self._formats = {row.file: self.pipeline.use.choose_format(self._data.head(file), row.file)}
            try:
                yield row, self._formats[row.file].read(row.values, turns=self.pipeline.makes_turns)
            except BadRow as bad:
                counts.add(row, bad.reason, bad.detail)


RowSource = MemorySource[T] | StreamedSource[T]
"""One source of a mixture: an endless sequence of encoded rows, epoch after epoch."""


class MixedStream(Generic[T, S]):
    """Endless batches of rows drawn from several sources by a QuotaSchedule."""

    def __init__(
        self,
        sources: Mapping[str, RowSource[T]],
        schedule: QuotaSchedule,
        rows_per_step: int,
        collect: Callable[[Sequence[Entry[T]], Sequence[str]], S],
        *,
        stops: bool = False,
    ) -> None:
        """Set the parts.

        Args:
            sources: the sources by name, in the order of the schedule's weights.
            schedule: which source each row comes from.
            collect: makes a data set of some rows, given the name of the source of each.
            stops: there is no batch that needs a second epoch of a source; `has_batch` says so.
        """
        self.sources, self.schedule = dict(sources), schedule
        self.rows_per_step, self.collect, self.stops = rows_per_step, collect, stops
        self._names = tuple(self.sources)
        self._lock = threading.Lock()  # completions may be sampled ahead in another thread

    @property
    def steps_per_epoch(self) -> float:
        """Return how many steps it takes to draw as many rows as all sources have; infinite if one is streamed."""
        if any(isinstance(source, StreamedSource) for source in self.sources.values()):
            return math.inf
        return sum(map(len, self.sources.values())) / self.rows_per_step

    def rows(self, step: int) -> S:
        """Return the rows of step `step`, counted from 1, as a data set of their own."""
        start = (step - 1) * self.rows_per_step
        return self._select(range(start, start + self.rows_per_step))

    def batch(self, step: int) -> Any:
        """Return the batch of step `step`."""
        return self.part(step, range(self.rows_per_step))

    def part(self, step: int, places: range) -> Any:
        """Return the rows at some places of the batch of a step."""
        start = (step - 1) * self.rows_per_step
        rows = self._select(range(start + places.start, start + places.stop))
        return rows.collate(list(range(len(rows))))

    def first(self, count: int) -> S:
        """Return the first rows of the mixture, as a data set, at most `count` and one epoch if its length is known."""
        known = self.steps_per_epoch * self.rows_per_step  # 13 / 23 · 23 is less than 13
        return self._select(range(round(min(count, known))))

    def names(self, step: int) -> tuple[str, ...]:
        """Return the name of the source of each row of a step."""
        start = (step - 1) * self.rows_per_step
        return tuple(self._names[self.schedule.source(n)] for n in range(start, start + self.rows_per_step))

    def has_batch(self, step: int) -> bool:
        """Return whether there is a batch of this step: always, unless a source that has ended stops the run."""
        return not self.ended(step)

    def ended(self, step: int) -> list[str]:
        """Return the sources that stop the run, as they have too few rows for the batch of a step."""
        if not self.stops:
            return []
        with self._lock:
            drawn = self._drawn(step).items()
            return [name for name, count in drawn if count > 0 and not self.sources[name].has(count - 1)]

    def metrics(self, step: int) -> dict[str, float]:
        """Return the rows drawn from each source and skipped in it, from the start of the run to the end of a step."""
        with self._lock:
            drawn = self._drawn(step)
            skipped = {name: self.sources[name].skipped(count) for name, count in drawn.items()}
        return {f"source/rows/{name}": float(count) for name, count in drawn.items()} | {
            f"source/skipped/{name}": float(count) for name, count in skipped.items()
        }

    def reseeded(self, seed: int) -> MixedStream[T, S]:
        """Return a stream of the same rows in another order; its sources begin again when they end."""
        sources = {name: source.reseeded(source_seed(seed, name)) for name, source in self.sources.items()}
        return MixedStream(sources, self.schedule, self.rows_per_step, self.collect)

    def report_to(self, report: Callable[[str], None]) -> None:
        """Send the remarks of streamed sources about their rows to `report`."""
        for source in self.sources.values():
            if isinstance(source, StreamedSource):
                source.report = report

    def digest(self) -> str:
        """Return a digest of the content of all sources."""
        parts = [f"{name} {source.digest()}" for name, source in self.sources.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def state(self, step: int) -> dict[str, Any]:
        """Return where the streamed sources are after a step, for a checkpoint."""
        with self._lock:
            drawn = self._drawn(step)
            return {
                name: source.state(drawn[name])
                for name, source in self.sources.items()
                if isinstance(source, StreamedSource)
            }

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Resume from the state of a checkpoint; return a warning for each source that has changed since."""
        changed = []
        for name, source in self.sources.items():
            if isinstance(source, StreamedSource) and name in state and not source.restore(state[name]):
                changed.append(
                    f"warning: the files of {name}, or its shuffle_buffer, are not those that the run began with: its "
                    "rows are counted again, and differ from an uninterrupted run's"
                )
        return changed

    def _drawn(self, step: int) -> dict[str, int]:
        rows = step * self.rows_per_step
        return {name: self.schedule.count(number, rows) for number, name in enumerate(self._names)}

    def _select(self, positions: Sequence[int]) -> S:
        entries, names = [], []
        with self._lock:
            for position in positions:
                number = self.schedule.source(position)
                name = self._names[number]
                entries.append(self.sources[name].row(self.schedule.count(number, position)))
                names.append(name)
        return self.collect(entries, names)


def source_seed(seed: int, name: str) -> int:
    """Derive the seed of a source's order, which does not depend on the other sources."""
    return derive_seed(seed, "source", name)


LONGEST_PERIOD = 65_536  # rows; shares that would need a longer one are rounded to multiples of 1 / LONGEST_PERIOD


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in proportion to `weights`, whose sum is the period of the schedule.

    Weights are read as the decimal numbers they are written as, so 0.7 and 0.3 are exactly 7 and 3. If the sum would
    exceed LONGEST_PERIOD, the shares are rounded to multiples of 1 / LONGEST_PERIOD by largest remainders, at least one
    to each source.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) <= LONGEST_PERIOD:
        return tuple(whole)
    shares = [Fraction(weight, sum(whole)) * (LONGEST_PERIOD - len(whole)) for weight in whole]
    rounded = [1 + int(share) for share in shares]
    remainders = sorted(range(len(shares)), key=lambda source: (int(shares[source]) - shares[source], source))
    for source in remainders[: LONGEST_PERIOD - sum(rounded)]:
        rounded[source] += 1
    return tuple(rounded)


@dataclass(frozen=True)
class QuotaSchedule:
    """The endless sequence of sources in which every source has its share, of any beginning and of any window.

    With k sources of shares w_1, …, w_k this is Tijdeman's sequence (1980, "The chairman assignment problem"): row
    n (from 1) goes to the source i for which, among those with

        n·w_i − x_i ≥ 1 / (2k − 2),         x_i: rows of source i among the first n − 1

    (1 − 1/(2k − 2) − (n·w_i − x_i)) / w_i is least, that is, whose deadline is first. Then for every source and every n

        |x_i(n) − n·w_i| ≤ 1 − 1 / (2k − 2),

    which no sequence can better for all weights; so in any window of L rows a source has L·w_i rows, with an
    error below two. After as many rows as the whole-number weights sum to, every quota is met exactly, and the sequence
    repeats: row n is a function of n alone.
    """

    weights: tuple[int, ...]

    @property
    def period(self) -> int:
        """Return the number of rows after which the sequence repeats."""
        return sum(self.weights)

    @cached_property
    def _sequence(self) -> bytes | tuple[int, ...]:
        sequence = _one_period(self.weights)
        return bytes(sequence) if len(self.weights) <= 256 else tuple(sequence)

    @cached_property
    def _places(self) -> tuple[list[int], ...]:
        """List, for each source, its positions in one period."""
        places: tuple[list[int], ...] = tuple([] for _ in self.weights)
        for position, source in enumerate(self._sequence):
            places[source].append(position)
        return places

    def source(self, position: int) -> int:
        """Return the source of the row at `position`, from 0."""
        return self._sequence[position % self.period]

    def count(self, source: int, rows: int) -> int:
        """Count the rows of `source` among the first `rows` ones."""
        periods, rest = divmod(rows, self.period)
        return periods * self.weights[source] + bisect_left(self._places[source], rest)


def _one_period(weights: Sequence[int]) -> list[int]:
    """Compute one period of the schedule in whole numbers: every quantity times its denominator."""
    if len(weights) == 1:
        return [0] * weights[0]
    total, k2 = sum(weights), 2 * len(weights) - 2
    drawn, sequence = [0] * len(weights), []
    for n in range(1, total + 1):
        behind = [k2 * (weight * n - total * count) for weight, count in zip(weights, drawn, strict=True)]
        best = -1
        for source, weight in enumerate(weights):
            if behind[source] < total:
                continue
            slack = (k2 - 1) * total - behind[source]  # over the weight: time to the deadline
            if best < 0 or slack * weights[best] < ((k2 - 1) * total - behind[best]) * weight:
                best = source
        drawn[best] += 1
        sequence.append(best)
    return sequence

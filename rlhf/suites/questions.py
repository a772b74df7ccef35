"""The questions of a suite, a model's sampled answers to them, and their figures with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rlhf.config.data import DatasetConfig
from rlhf.data.files import load_rows
from rlhf.data.rows import BadRow, DataRow, RowCounts
from rlhf.errors import DataError
from rlhf.suites.metrics import compute

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from rlhf.rewards.source import RewardSource
    from rlhf.suites.subject import Subject
    from rlhf.types import Completions

T = TypeVar("T")
MAX_NEW_TOKENS_KEY = "sampling.max_new_tokens"


@dataclass(frozen=True)
class Item(Generic[T]):
    """A usable row: its contents in the form that its suite reads, and the row itself."""

    value: T
    row: DataRow

    @property
    def file(self) -> str:
        """Return the name of the row's file, without folder and suffixes."""
        return Path(self.row.file).name.partition(".")[0]


def read_items(
    config: DatasetConfig,
    read: Callable[[Mapping[str, object]], T],
    *,
    columns: tuple[str, ...],
    what: str,
    deal_by: Callable[[Item[T]], str] | None = None,
) -> tuple[list[Item[T]], RowCounts]:
    """Read the usable rows of a data set, at most `config.limit`, and count the skipped ones.

    Args:
        read: parses the columns of a row; raises BadRow for an unusable one.
        columns: columns that at least one row must have.
        what: the name of the rows in messages.
        deal_by: the kind of an item, if a data set is sorted by it: the limit then takes kinds in turn.

    Raises:
        DataError: there is no file or no usable row, or a column is missing.
    """
    skips = RowCounts(config.path, fatal=config.bad_rows == "error")
    rows = load_rows(config, skips)
    if rows:
        _check_columns(config.path, rows, columns, what)
    items: list[Item[T]] = []
    for row in rows:
        if deal_by is None and config.limit is not None and len(items) >= config.limit:
            break
        try:
            items.append(Item(read(row.values), row))
        except BadRow as bad:
            skips.add(row, bad.reason, bad.detail)
    if deal_by is not None and config.limit is not None:
        items = dealt(items, deal_by, config.limit)
    skips.used = len(items)
    skips.require_rows()
    return items, skips


def dealt(items: Sequence[Item[T]], kind: Callable[[Item[T]], str], limit: int) -> list[Item[T]]:
    """Choose at most `limit` items, the first of every kind, then the second, and so on; their order stays."""
    counts: Counter[str] = Counter()
    turns: list[tuple[int, int]] = []
    for place, item in enumerate(items):
        turns.append((counts[kind(item)], place))
        counts[kind(item)] += 1
    return [items[place] for place in sorted(place for _, place in sorted(turns)[:limit])]


def _check_columns(path: str, rows: Sequence[DataRow], columns: Sequence[str], what: str) -> None:
    """Check that each of the columns is in at least one row.

    Raises:
        DataError: a column is in none.
    """
    names = {name for row in rows for name in row.values}
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(
            f"{path}: these are no {what}: there is no column {missing[0]!r} "
            f"(there are: {', '.join(sorted(names)) or 'none'}). Columns with other names can be renamed: "
            f"'dataset.columns={{{missing[0]}: their name}}'"
        )


def exclude(items: list[Item[T]], skips: RowCounts, why: Callable[[Item[T]], BadRow | None]) -> list[Item[T]]:
    """Drop, and count, the items for which `why` returns a reason.

    Raises:
        DataError: no item is left.
    """
    kept = []
    for item in items:
        bad = why(item)
        if bad is None:
            kept.append(item)
        else:
            skips.skip(item.row, bad.reason, bad.detail)
    skips.used = len(kept)
    skips.require_rows()
    return kept


def too_long(subject: Subject, tokens: int, room: int, *, of: str) -> BadRow | None:
    """Return the reason to leave out a prompt that exceeds the model's context; None if it fits.

    Args:
        tokens: the length of the prompt.
        room: the number of tokens that must fit after it.
        of: a name for these tokens, in the message.
    """
    if subject.context is None or tokens + room <= subject.context:
        return None
    return BadRow(f"longer than the model's context of {subject.context:,} tokens", f"{tokens:,}, and {room:,} of {of}")


@dataclass(frozen=True)
class Answers:
    """A model's answers, one for each question."""

    texts: list[str]
    lengths: list[float]
    truncated: list[bool]
    distinct_2: float

    def figures(self, *, seed: int) -> list[Estimate]:
        """Compute the mean length, the share of truncated answers and the distinct bigrams."""
        return [
            mean_estimate("length", self.lengths, "tokens of an answer, EOS included", seed=seed),
            share_estimate(
                "truncated", list(map(float, self.truncated)), "answers that reached sampling.max_new_tokens"
            ),
            Estimate(
                "distinct_2", self.distinct_2, None, None, len(self.texts), "none", "distinct bigrams of all answers"
            ),
        ]


def drop_too_long(subject: Subject, items: list[Item[T]], skips: RowCounts, text: Callable[[T], str]) -> list[Item[T]]:
    """Drop, and count, the questions that do not fit into the model's context with an answer.

    Raises:
        DataError: no question is left.
    """
    room = subject.sampling.max_new_tokens

    def reason(item: Item[T]) -> BadRow | None:
        return too_long(
            subject,
            len(subject.encoder.prompts([subject.render_question(text(item.value))])[0]),
            room,
            of=MAX_NEW_TOKENS_KEY,
        )

    return exclude(items, skips, reason)


def sample_answers(
    subject: Subject,
    questions: Sequence[str],
    *,
    key: int,
    greedy: bool,
    count: int = 1,
    pick: Callable[[Completions], Tensor] | None = None,
) -> Answers:
    """Answer every question once.

    With `pick`, sample `count` answers of each and keep those whose row indices it returns, one for each question.
    """
    from rlhf.evaluation.evaluate import completion_tokens

    prompts = [subject.render_question(question) for question in questions]
    ids = subject.encoder.prompts(prompts)
    texts = [rendered.prompt for rendered in prompts]
    completions = subject.sample(ids, texts, key=key, count=count, greedy=greedy and count == 1)
    if count > 1:
        assert pick is not None, "several answers, and nothing picks one"
        completions = completions.rows(pick(completions))
    tokens = completion_tokens(completions)
    return Answers(
        texts=subject.texts(completions),
        lengths=[float(len(row)) for row in tokens],
        truncated=[not finished for finished in completions.finished.tolist()],
        distinct_2=compute("distinct_n", predictions=[" ".join(map(str, ids)) for ids in tokens], n=[2])["distinct_2"],
    )


def pick_best(
    source: RewardSource, rows: Sequence[Mapping[str, object]], count: int
) -> Callable[[Completions], Int[Tensor, " Q"]]:
    """Make a function that picks the answer that `source` scores highest; the source reads the row of the question.

    An answer without a score (NaN) is below all others.
    """
    import torch

    from rlhf.evaluation.frontier import picks

    def pick(completions: Completions) -> Int[Tensor, " Q"]:
        references = tuple(dict(row) for row in rows for _ in range(count))
        scores = source(replace(completions, references=references, group_size=1)).values.view(-1, count)
        return picks(scores, count) + torch.arange(len(scores)) * count

    return pick


def groups(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the indices of each name, the names in order."""
    indices: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        indices.setdefault(name, []).append(i)
    return sorted(indices.items())


Method = Literal["wilson", "bootstrap", "normal", "none"]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval over `n` rows; no interval if the method is none."""

    name: str
    value: float
    low: float | None
    high: float | None
    n: int
    interval: Method
    meaning: str
    values: tuple[float, ...] = ()
    """One value per row, whose mean is the figure, NaN if the row has none; empty if the figure is no mean."""


@dataclass(frozen=True)
class NotMeasured:
    """A measure that the suite left out, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class SuiteResult:
    """The result of one suite on one model."""

    figures: tuple[Estimate, ...]
    n: int
    skipped: Mapping[str, int]
    left_out: tuple[NotMeasured, ...] = ()
    notes: tuple[str, ...] = ()
    groups: Mapping[str, tuple[Estimate, ...]] = field(default_factory=dict)
    examples: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        figures: Iterable[Estimate],
        skips: RowCounts,
        *,
        notes: Iterable[str] = (),
        left_out: Iterable[NotMeasured] = (),
        groups: Mapping[str, tuple[Estimate, ...]] | None = None,
        examples: Iterable[Mapping[str, Any]] = (),
    ) -> SuiteResult:
        """Build the result of the rows that were used, with a note of those that were skipped."""
        skipped, of_rows = skipped_and_notes(skips)
        return cls(
            tuple(figures), skips.used, skipped, tuple(left_out), (*of_rows, *notes), groups or {}, tuple(examples)
        )

    @property
    def rows(self) -> dict[str, list[float]]:
        """Return the values of every row, by figure: for paired differences between models."""
        return {figure.name: list(figure.values) for figure in self.figures if figure.values}

    def as_json(self) -> dict[str, Any]:
        """Convert the result to plain data, with the figures by name."""
        return {
            "n": self.n,
            "skipped": dict(self.skipped),
            "figures": _by_name(self.figures),
            "groups": {name: _by_name(figures) for name, figures in self.groups.items()},
            "left_out": [asdict(part) for part in self.left_out],
            "notes": list(self.notes),
            "examples": [dict(example) for example in self.examples],
            "rows": self.rows,
        }


def share_estimate(name: str, values: Sequence[float], meaning: str) -> Estimate:
    """Build the figure of a mean of values in [0, 1], one per independent row, with Wilson's interval."""
    result = compute("accuracy", predictions=values)
    return Estimate(
        name, result["accuracy"], result["low"], result["high"], len(values), "wilson", meaning, tuple(values)
    )


def pair_estimate(name: str, chosen: Sequence[float], rejected: Sequence[float], meaning: str) -> Estimate:
    """Build the figure of the share of pairs whose chosen side is higher; a tie counts half.

    A pair without both numbers (NaN) is left out.
    """
    rows = both_known(chosen, rejected)
    result = compute("pairwise_accuracy", predictions=[chosen[i] for i in rows], references=[rejected[i] for i in rows])
    outcomes = _at(rows, result["outcomes"], len(chosen))
    return Estimate(name, result["accuracy"], result["low"], result["high"], len(rows), "wilson", meaning, outcomes)


def win_rate_estimate(name: str, a: Sequence[float], b: Sequence[float], meaning: str, *, seed: int) -> Estimate:
    """Build the figure of the share of rows on which A is above B; a tie counts half.

    A row without both numbers (NaN) is left out.
    """
    rows = both_known(a, b)
    sides = {"predictions": [a[i] for i in rows], "references": [b[i] for i in rows]}
    result = compute("win_rate", **sides, bootstrap_seed=seed)
    outcomes = _at(rows, result["outcomes"], len(a))
    return Estimate(name, result["win_rate"], result["low"], result["high"], len(rows), "bootstrap", meaning, outcomes)


def both_known(a: Sequence[float], b: Sequence[float]) -> list[int]:
    """Return the rows on which both numbers are known."""
    return [i for i, pair in enumerate(zip(a, b, strict=True)) if not any(map(math.isnan, pair))]


def _at(rows: Sequence[int], outcomes: Sequence[float], total: int) -> tuple[float, ...]:
    """Return one value for each of all rows: the outcomes at these rows, and NaN elsewhere."""
    known = dict(zip(rows, outcomes, strict=True))
    return tuple(known.get(row, math.nan) for row in range(total))


def mean_estimate(name: str, values: Sequence[float], meaning: str, *, seed: int, shares: bool = False) -> Estimate:
    """Build the figure of a mean of any values, one per row, with its bootstrap interval over the rows.

    A row without a number (NaN) is left out. `shares` are from 0 to 1: if all are 0 or all are 1, the interval is
    Wilson's.
    """
    low, high = _bootstrap(values, seed, shares=shares)
    known = [value for value in values if not math.isnan(value)]
    return Estimate(name, fmean(known), low, high, len(known), "bootstrap", meaning, tuple(values))


def ratio_estimate(name: str, verdicts: Sequence[Sequence[bool]], meaning: str, *, seed: int) -> Estimate:
    """Build the figure of the share of positive verdicts, several per row, with its bootstrap interval over the rows.

    The share is a ratio of two sums, R = sum_i met_i / sum_i n_i. Its error is the error of the mean of the linearized
    values R + (met_i - R n_i) / mean(n), whose mean is R itself. If R is 0 or 1, the interval is Wilson's.
    """
    mean_count = sum(map(len, verdicts)) / len(verdicts)
    ratio = sum(map(sum, verdicts)) / (mean_count * len(verdicts))
    values = [ratio + (sum(row) - ratio * len(row)) / mean_count for row in verdicts]
    low, high = _bootstrap(values, seed, shares=True)
    return Estimate(name, ratio, low, high, len(verdicts), "bootstrap", meaning, tuple(values))


def _bootstrap(values: Sequence[float], seed: int, *, shares: bool) -> tuple[float, float]:
    """Compute the 95 % interval of the mean over resampled rows."""
    import torch

    from rlhf.evaluation.win_rate import bootstrap

    interval = bootstrap(torch.tensor(values, dtype=torch.float64), seed=seed, shares=shares)
    return interval.low, interval.high


def skipped_and_notes(skips: RowCounts) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the counts of skipped rows by reason, and a note that summarizes them if there are any."""
    notes = (skips.summary(),) if skips.skipped or skips.notes or skips.cut else ()
    return dict(sorted(skips.counts.items())), notes


def _by_name(figures: Sequence[Estimate]) -> dict[str, dict[str, Any]]:
    apart = ("name", "values")
    return {
        figure.name: {key: value for key, value in asdict(figure).items() if key not in apart} for figure in figures
    }

"""A run in one sentence and a row of tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlhf.evaluation.report_page import show
from rlhf.evaluation.report_record import Pair, Record
from rlhf.runtime.progress import duration, number

# (metric, how a sentence calls it, its unit): the first of these that the run has is its result.
HEADLINES: tuple[tuple[str, str, str], ...] = (
    ("eval/score", "Mean held-out score", ""),
    ("eval/rm_accuracy", "Accuracy on held-out pairs", ""),
    ("eval/loss", "Held-out loss", " nats per token"),
    ("score/mean", "Mean training score", ""),
    ("rm/accuracy", "Accuracy on training pairs", ""),
    ("loss/sft", "Training loss", " nats per token"),
    ("loss/total", "Training loss", ""),
)


@dataclass(frozen=True)
class Tile:
    """A number with what it is and, in small print, what it was or should be."""

    label: str
    value: str
    detail: str = ""


def verdict(record: Record) -> str:
    """What the run did, in plain words."""
    sentences = [_headline(record), _kl(record), _interval(record), _baselines(record)]
    return " ".join(sentence for sentence in sentences if sentence)


def headline_metric(record: Record) -> tuple[str, str, str] | None:
    """The row of HEADLINES that says what the run achieved; SFT is judged by its loss first."""
    rows = HEADLINES
    if "loss/sft" in record.series:
        rows = tuple(sorted(HEADLINES, key=lambda row: row[0] != "eval/loss"))
    return next((row for row in rows if record.points(row[0])), None)


def _headline(record: Record) -> str:
    chosen = headline_metric(record)
    if chosen is None:
        accuracy = record.card.get("accuracy")
        known = isinstance(accuracy, int | float)
        return f"Accuracy {show(accuracy)}." if known else f"{_steps(record)} logged; no score was measured yet."
    name, words, unit = chosen
    points = record.points(name)
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return f"{words} is {number(last)}{unit} at step {last_step}; it was measured once."
    start = "before" if first_step == 0 else f"at step {first_step}"
    end = "after" if last_step == record.last_step else f"at step {last_step}"
    change = f"went from {number(first)} ({start}) to {number(last)}{unit} ({end})"
    return f"{words} {change} over {_steps(record)}."


def _steps(record: Record) -> str:
    planned, plural = record.setting("schedule", "steps"), "" if record.last_step == 1 else "s"
    if isinstance(planned, int) and planned > record.last_step:
        return f"{record.last_step} of the {planned} planned steps"
    return f"{record.last_step} step{plural}"


def _kl(record: Record) -> str:
    value = final_kl(record)
    if value is None:
        return ""
    target = record.kl_target()
    aim = "" if target is None else f" (target {target:g})"
    return f"KL to the reference {number(value)} nats per sequence{aim}."


def final_kl(record: Record) -> float | None:
    """Nats per sequence: the last held-out measurement, else the training mean over the last fifth of the run."""
    held_out = record.points("eval/kl")
    if held_out:
        return held_out[-1][1]
    return record.series["kl/reference"].tail_mean() if "kl/reference" in record.series else None


def _interval(record: Record) -> str:
    low, high, count = (record.card.get(key) for key in ("accuracy_low", "accuracy_high", "n"))
    if not (isinstance(low, float) and isinstance(high, float) and isinstance(count, int)):
        return ""
    return f"95 % interval of the final accuracy: {low:.3f} to {high:.3f}, on {count:,} pairs."


def _baselines(record: Record) -> str:
    baselines = record.card.get("baselines")
    if not isinstance(baselines, Mapping):
        return ""
    named = []
    for name, value in baselines.items():
        accuracy = value.get("accuracy") if isinstance(value, Mapping) else value
        if isinstance(accuracy, int | float):
            named.append(f"{str(name).replace('_', ' ')} {number(accuracy)}")
    return f"Baselines on the same pairs: {', '.join(named)}." if named else ""


def tiles(record: Record) -> list[Tile]:
    """The key figures of the run; those that it does not have are left out."""
    found = [_headline_tile(record), *_kl_tiles(record)]
    for name, label in (
        ("eval/rm_loss", "Held-out pair loss, nats"),
        ("eval/perplexity", "Held-out perplexity"),
        ("eval/length", "Held-out length, tokens"),
        ("eval/finished", "Held-out finished"),
        ("eval/distinct_2", "Distinct bigrams"),
        ("eval/repetition", "Repeated 4-grams"),
        ("eval/reference_perplexity", "Perplexity under the reference"),
    ):
        found.append(_before_after_tile(record, name, label))
    if record.points("critic/explained_variance"):
        value = record.series["critic/explained_variance"].tail_mean()
        found.append(Tile("Explained variance", show(value), "mean of the last fifth"))
    found.append(_count_tile(record, "completion/count", "Completions sampled"))
    if any(value for _, value in record.points("skipped/nonfinite")):
        found.append(_count_tile(record, "skipped/nonfinite", "Optimizer steps skipped (NaN)"))
    return [tile for tile in [*found, *_machine_tiles(record.timings)] if tile is not None]


def _headline_tile(record: Record) -> Tile | None:
    chosen = headline_metric(record)
    return None if chosen is None else _before_after_tile(record, chosen[0], chosen[1])


def _before_after_tile(record: Record, name: str, label: str) -> Tile | None:
    points = record.points(name)
    if not points:
        return None
    return Tile(label, show(points[-1][1]), f"from {show(points[0][1])}" if len(points) > 1 else "")


def _kl_tiles(record: Record) -> list[Tile | None]:
    value, target = final_kl(record), record.kl_target()
    if value is None:
        return []
    found: list[Tile | None] = [Tile("KL to the reference, nats", show(value), _error(record, "eval/kl"))]
    if exact := record.points("eval/kl_exact"):
        found.append(Tile("The same, exact per token", show(exact[-1][1]), _error(record, "eval/kl_exact")))
    if target is not None and record.points("kl/reference"):
        tail = record.series["kl/reference"].tail_mean()
        found.append(Tile("KL in training, last fifth", show(tail), f"target {target:g}"))
    return found


def _error(record: Record, name: str) -> str:
    errors = record.points(f"{name}_se")
    return f"standard error {show(errors[-1][1])}" if errors else "per sequence"


def _count_tile(record: Record, name: str, label: str) -> Tile | None:
    points = record.points(name)
    return Tile(label, show(round(points[-1][1]))) if points else None


def _machine_tiles(timings: Sequence[Mapping[str, Any]]) -> list[Tile]:
    if not timings:
        return []
    seconds = sum(sum(v for v in row.get("seconds", {}).values() if v) for row in timings)
    found = [Tile("Time in logged phases", duration(seconds))]
    speeds = [row["tokens_per_second"] for row in timings if row.get("tokens_per_second")]
    if speeds:
        found.append(Tile("Tokens per second", f"{median(speeds):,.0f}", "median"))
    memory = [row["peak_memory_mb"] for row in timings if row.get("peak_memory_mb")]
    if memory:
        found.append(Tile("Peak memory", f"{max(memory):,.0f} MB", _by_phase(timings)))
    return found


def _by_phase(timings: Sequence[Mapping[str, Any]]) -> str:
    """The three phases that need most."""
    peaks: dict[str, float] = {}
    for row in timings:
        for name, peak in row.get("peak_memory_mb_by_phase", {}).items():
            peaks[name] = max(peak, peaks.get(name, 0.0))
    most = sorted(peaks, key=peaks.__getitem__, reverse=True)[:3]
    return ", ".join(f"{name} {peaks[name]:,.0f}" for name in most)


def comparison(pairs: Sequence[Pair]) -> str:
    """On how many of the prompts shown the score rose."""
    changes = [
        pair.after["score"] - pair.before["score"]
        for pair in pairs
        if pair.before and pair.after and None not in (pair.before.get("score"), pair.after.get("score"))
    ]
    if not changes:
        return ""
    higher, lower = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    same = len(changes) - higher - lower
    return (
        f"The score is higher after training on {higher} of {len(changes)} prompts, lower on {lower}, equal on {same}."
    )

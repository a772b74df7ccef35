"""The summary of a run at the top of its report: a few sentences and a row of tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlhf.evaluation.report_page import show
from rlhf.evaluation.report_record import Pair, Record
from rlhf.runtime.progress import duration, number

# (metric, its name in a sentence, its unit): the first of these that the run has is its headline.
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
    """A key figure: its label, its value and, in small print, its earlier or target value."""

    label: str
    value: str
    detail: str = ""


def verdict(record: Record) -> str:
    """Summarize the run in a few sentences."""
    sentences = [_headline(record), _kl(record), _interval(record), _baselines(record)]
    return " ".join(sentence for sentence in sentences if sentence)


def headline_metric(record: Record) -> tuple[str, str, str] | None:
    """Return the first row of HEADLINES that the run logged; for SFT the held-out loss comes first."""
    rows = HEADLINES
    if "loss/sft" in record.series:
        rows = tuple(sorted(HEADLINES, key=lambda row: row[0] != "eval/loss"))
    return next((row for row in rows if record.points(row[0])), None)


def _headline(record: Record) -> str:
    """Describe how the headline metric changed over the run."""
    headline = headline_metric(record)
    if headline is None:
        accuracy = record.card.get("accuracy")
        is_number = isinstance(accuracy, int | float)
        return f"Accuracy {show(accuracy)}." if is_number else f"{_steps(record)} logged; no score was measured yet."
    name, words, unit = headline
    points = record.points(name)
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return f"{words} is {number(last)}{unit} at step {last_step}; it was measured once."
    start = "before" if first_step == 0 else f"at step {first_step}"
    end = "after" if last_step == record.last_step else f"at step {last_step}"
    change = f"went from {number(first)} ({start}) to {number(last)}{unit} ({end})"
    return f"{words} {change} over {_steps(record)}."


def _steps(record: Record) -> str:
    """Describe the number of steps done, of those planned where the run is not complete."""
    planned, plural = record.setting("schedule", "steps"), "" if record.last_step == 1 else "s"
    if isinstance(planned, int) and planned > record.last_step:
        return f"{record.last_step} of the {planned} planned steps"
    return f"{record.last_step} step{plural}"


def _kl(record: Record) -> str:
    """Describe the final KL to the reference; empty where it was not measured."""
    value = final_kl(record)
    if value is None:
        return ""
    target = record.kl_target()
    aim = "" if target is None else f" (target {target:g})"
    return f"KL to the reference {number(value)} nats per sequence{aim}."


def final_kl(record: Record) -> float | None:
    """Return the final KL in nats per sequence: the last held-out value, else the training mean of the last fifth."""
    held_out = record.points("eval/kl")
    if held_out:
        return held_out[-1][1]
    return record.series["kl/reference"].tail_mean() if "kl/reference" in record.series else None


def _interval(record: Record) -> str:
    """Describe the interval of the final accuracy; empty where the report card has none."""
    low, high, count = (record.card.get(key) for key in ("accuracy_low", "accuracy_high", "n"))
    if not (isinstance(low, float) and isinstance(high, float) and isinstance(count, int)):
        return ""
    return f"95 % interval of the final accuracy: {low:.3f} to {high:.3f}, on {count:,} pairs."


def _baselines(record: Record) -> str:
    """Describe the accuracies of the baselines; empty where the report card has none."""
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
    """Build the tiles of the run's key figures, without those that the run lacks."""
    key_figures = [_headline_tile(record), *_kl_tiles(record)]
    for name, label in (
        ("eval/rm_loss", "Held-out pair loss, nats"),
        ("eval/perplexity", "Held-out perplexity"),
        ("eval/length", "Held-out length, tokens"),
        ("eval/finished", "Held-out finished"),
        ("eval/distinct_2", "Distinct bigrams"),
        ("eval/repetition", "Repeated 4-grams"),
        ("eval/reference_perplexity", "Perplexity under the reference"),
    ):
        key_figures.append(_before_after_tile(record, name, label))
    if record.points("critic/explained_variance"):
        value = record.series["critic/explained_variance"].tail_mean()
        key_figures.append(Tile("Explained variance", show(value), "mean of the last fifth"))
    key_figures.append(_count_tile(record, "completion/count", "Completions sampled"))
    if any(value for _, value in record.points("skipped/nonfinite")):
        key_figures.append(_count_tile(record, "skipped/nonfinite", "Optimizer steps skipped (NaN)"))
    return [tile for tile in [*key_figures, *_machine_tiles(record.timings)] if tile is not None]


def _headline_tile(record: Record) -> Tile | None:
    """Build the tile of the headline metric."""
    headline = headline_metric(record)
    return None if headline is None else _before_after_tile(record, headline[0], headline[1])


def _before_after_tile(record: Record, name: str, label: str) -> Tile | None:
    """Build a tile with the last value of a metric and its first value in small print."""
    points = record.points(name)
    if not points:
        return None
    return Tile(label, show(points[-1][1]), f"from {show(points[0][1])}" if len(points) > 1 else "")


def _kl_tiles(record: Record) -> list[Tile | None]:
    """Build the tiles of the KL: held-out, exact, and in training against its target."""
    value, target = final_kl(record), record.kl_target()
    if value is None:
        return []
    kl_tiles: list[Tile | None] = [Tile("KL to the reference, nats", show(value), _error_text(record, "eval/kl"))]
    if exact := record.points("eval/kl_exact"):
        kl_tiles.append(Tile("The same, exact per token", show(exact[-1][1]), _error_text(record, "eval/kl_exact")))
    if target is not None and record.points("kl/reference"):
        tail = record.series["kl/reference"].tail_mean()
        kl_tiles.append(Tile("KL in training, last fifth", show(tail), f"target {target:g}"))
    return kl_tiles


def _error_text(record: Record, name: str) -> str:
    """Describe the standard error of a metric; without one, say that the value is per sequence."""
    errors = record.points(f"{name}_se")
    return f"standard error {show(errors[-1][1])}" if errors else "per sequence"


def _count_tile(record: Record, name: str, label: str) -> Tile | None:
    """Build a tile with the last value of a counter."""
    points = record.points(name)
    return Tile(label, show(round(points[-1][1]))) if points else None


def _machine_tiles(timings: Sequence[Mapping[str, Any]]) -> list[Tile]:
    """Build the tiles of time, throughput and peak memory."""
    if not timings:
        return []
    seconds = sum(sum(v for v in row.get("seconds", {}).values() if v) for row in timings)
    machine_tiles = [Tile("Time in logged phases", duration(seconds))]
    speeds = [row["tokens_per_second"] for row in timings if row.get("tokens_per_second")]
    if speeds:
        machine_tiles.append(Tile("Tokens per second", f"{median(speeds):,.0f}", "median"))
    memory = [row["peak_memory_mb"] for row in timings if row.get("peak_memory_mb")]
    if memory:
        machine_tiles.append(Tile("Peak memory", f"{max(memory):,.0f} MB", _peak_phases(timings)))
    return machine_tiles


def _peak_phases(timings: Sequence[Mapping[str, Any]]) -> str:
    """List the three phases of the highest peak memory, with their peaks in MB."""
    peaks: dict[str, float] = {}
    for row in timings:
        for name, peak in row.get("peak_memory_mb_by_phase", {}).items():
            peaks[name] = max(peak, peaks.get(name, 0.0))
    most = sorted(peaks, key=peaks.__getitem__, reverse=True)[:3]
    return ", ".join(f"{name} {peaks[name]:,.0f}" for name in most)


def comparison(pairs: Sequence[Pair]) -> str:
    """Describe on how many of the shown prompts the score rose, fell or stayed the same."""
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

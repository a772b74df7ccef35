"""The HTML report of a run, from its run folder alone: verdict, curves, completions before and after, timings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf.evaluation.report_card import calibration_bins, card_tables
from rlhf.evaluation.report_charts import calibration_chart, chart_groups, timing_chart
from rlhf.evaluation.report_page import write_page
from rlhf.evaluation.report_record import Record, read_record
from rlhf.evaluation.report_summary import comparison, tiles, verdict
from rlhf.runtime.metrics import METRICS, MetricInfo
from rlhf.runtime.run_folder import RunFolder

FIRST_PAIRS = 8  # shown at first; the rest is collapsed


def write_report(run_dir: Path) -> Path:
    """Write report.html into the run folder and return its path.

    Raises:
        UserError: `run_dir` is not a folder, or has no logged step.
    """
    record = read_record(Path(run_dir))
    pairs, first_step, last_step = record.pairs()
    groups = chart_groups(record, METRICS)
    phases, timing = phase_table(record.timings), None
    if phases:
        timing = timing_chart(record.timings, [row["phase"] for row in phases])
    bins = calibration_bins(record.card)
    calibration = calibration_chart(bins) if bins else None
    charts = [chart for group in groups for chart in group.charts]
    return write_page(
        RunFolder(record.path).report,
        "run.html.j2",
        [*charts, *(chart for chart in (timing, calibration) if chart is not None)],
        title=record.name,
        facts=_facts(record),
        verdict=verdict(record),
        tiles=tiles(record),
        groups=groups,
        pairs=pairs,
        first_pairs=FIRST_PAIRS,
        before_step=first_step,
        after_step=last_step,
        held_out=any(sample.get("split") == "eval" for sample in record.samples),
        comparison=comparison(pairs),
        details=pair_details,
        card=card_tables(record.card),
        calibration=calibration,
        phases=phases,
        timing=timing,
        notes=_unique([*_nonfinite_notes(record), *record.notes]),
        glossary=_glossary(record, METRICS),
        config=_config_text(record),
    )


def pair_details(sample: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the (name, value) pairs shown below a completion: score, its parts, KL, length, whether it was cut off."""
    parts = sample.get("parts")
    rows = [("score", sample.get("score"))]
    rows += list(parts.items()) if isinstance(parts, Mapping) and len(parts) > 1 else []
    rows += [("KL", sample.get("kl")), ("tokens", sample.get("length"))]
    finished = sample.get("finished")
    return [(name, value) for name, value in rows if value is not None] + (
        [("cut off", "at the length limit")] if finished is False else []
    )


def phase_table(timings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compute total seconds, share of time and mean per logged step of each phase, longest first."""
    totals: dict[str, float] = {}
    for row in timings:
        for phase, seconds in row.get("seconds", {}).items():
            totals[phase] = totals.get(phase, 0.0) + (seconds or 0.0)
    total = sum(totals.values())
    return [
        {
            "phase": phase,
            "total": seconds,
            "share": seconds / total if total else 0.0,
            "mean": seconds / len(timings),
        }
        for phase, seconds in sorted(totals.items(), key=lambda item: -item[1])
    ]


def _facts(record: Record) -> list[tuple[str, str]]:
    """Return the facts under the title: algorithm, model, seed, commit, start time."""
    loss = record.setting("algorithm", "loss", "type")
    advantage = record.setting("algorithm", "advantage", "type")
    surrogate = record.setting("algorithm", "policy_loss", "type")
    online = f"{advantage}, {surrogate}" if advantage and surrogate else advantage
    facts = [
        ("algorithm", record.setting("algorithm", "preset") or loss or online),
        ("model", record.setting("policy", "model") or record.setting("model", "model")),
        ("seed", record.setting("run", "seed")),
        ("commit", record.setting("git_commit")),
    ]
    started = record.timings[0].get("time") if record.timings else None
    return [(name, str(value)) for name, value in [*facts, ("started", started)] if value is not None]


def _nonfinite_notes(record: Record) -> list[dict[str, Any]]:
    """Build a note for every metric that was NaN or infinite at some step."""
    notes = []
    for series in record.series.values():
        steps = [step for step, value in zip(series.steps, series.values, strict=True) if value is None]
        if steps:
            shown = ", ".join(map(str, steps[:5])) + (f" … ({len(steps)} in all)" if len(steps) > 5 else "")
            logged = "step" if len(steps) == 1 else "steps"
            notes.append({"step": steps[0], "text": f"{series.name} was NaN or infinite at {logged} {shown}"})
    return notes


def _unique(notes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the first note of each text: a resumed run repeats what it skipped."""
    first: dict[Any, dict[str, Any]] = {}
    for note in notes:
        first.setdefault(note.get("text"), note)
    return list(first.values())


def _glossary(record: Record, table: Mapping[str, MetricInfo]) -> list[MetricInfo]:
    """Return the description of every metric of the run."""
    return [table.get(name, MetricInfo(name, "", "not in the table of metrics")) for name in record.series]


def _config_text(record: Record) -> str:
    """Return the configuration of the run as YAML."""
    return yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True, width=88) if record.config else ""

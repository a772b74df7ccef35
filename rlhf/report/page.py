"""The report page of a run: its verdict, tiles, charts and samples in one HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rlhf.errors import UserError
from rlhf.report.charts import (
    Chart,
    Table,
    alarm_table,
    calibration_bins,
    calibration_chart,
    card_tables,
    chart_groups,
    overlay_groups,
    plotly_figure,
    stayed_zero,
    timing_chart,
)
from rlhf.report.record import Pair, Record, read_record
from rlhf.tracking.metrics import (
    MetricInfo,
    format_duration,
    format_megabytes,
    format_number,
    format_value,
    shown_in,
    table_of,
)
from rlhf.tracking.progress import printable
from rlhf.tracking.run_folder import RunFolder, write_atomically


def write_page(
    path: Path, template: str, drawn: Sequence[Chart], *, scripts: Sequence[str] = (), **context: Any
) -> Path:
    """Render `template`, which extends base.html.j2, with its charts into one self-contained file at `path`.

    Text is escaped by jinja2. In addition, the page's content security policy runs only the scripts with the hashes
    below and fetches nothing, so that a completion does no harm even if escaping fails.

    Args:
        path: the file to write.
        template: the name of the template.
        drawn: the charts that the template places.
        scripts: the names of further scripts of the templates folder.
        context: the variables of the template.
    """
    common = {"theme_js": _asset("theme.js"), "plotly_js": _plotly(), "page_js": _asset("page.js")}
    more = [_asset(name) for name in scripts]
    hashes = " ".join(f"'{_hash(script)}'" for script in [*common.values(), *more])
    page = (
        _environment()
        .get_template(template)
        .render(
            **context,
            **{name: Markup(script) for name, script in common.items()},
            more_scripts=list(map(Markup, more)),
            style=Markup(_asset("style.css")),
            script_hashes=Markup(hashes),
            figures={chart.key: plotly_figure(chart) for chart in drawn},
        )
    )
    write_atomically(path, page)
    return path


def is_page(path: Path) -> bool:
    """Return whether a file is a page that `write_page` wrote: base.html.j2 gives every page its figures."""
    return path.is_file() and b'<script type="application/json" id="figures">' in path.read_bytes()


@cache
def _environment() -> Environment:
    """Create the jinja2 environment, which keeps its compiled templates: autoescaping, strict about undefined names."""
    environment = Environment(
        loader=PackageLoader("rlhf.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters["show"] = format_value
    environment.filters["passages"] = passages
    return environment


def _printable(value: object) -> object:
    """Make control characters of a string printable: HTML does not allow them, and a model may write them."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _plotly() -> str:
    """Return the source of plotly.js: the bundle with lines and bars alone, a quarter of the whole."""
    script = _asset("vendor/plotly-basic-4.1.1.min.js")
    assert "</script" not in script.lower(), "this plotly.js cannot be embedded as it is"
    return script


def _asset(name: str) -> str:
    """Read a file of the templates folder."""
    return (files("rlhf.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash of a script in the form of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


@dataclass(frozen=True)
class Tile:
    """A key figure: its label, its value and, in small print, its earlier or target value."""

    label: str
    value: str
    detail: str = ""


def run_verdict(record: Record) -> str:
    """Summarize the run in a few sentences."""
    sentences = [
        *(_headline(record), _judge(record), _stop(record), _kl(record), _best(record)),
        *(_interval(record), _baselines(record), _rounded(record)),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def headline_metric(record: Record) -> tuple[MetricInfo, str] | None:
    """Return the first headline that the run logged, with its words; for SFT the held-out loss comes first."""
    headlines = [(info, place.title) for info, place in shown_in("headline")]
    if "loss/sft" in record.series:
        headlines.sort(key=lambda headline: headline[0].name != "eval/loss")
    return next((headline for headline in headlines if record.points(headline[0].name)), None)


def _headline(record: Record) -> str:
    """Describe how the headline metric changed over the run."""
    headline = headline_metric(record)
    if headline is None:
        accuracy = record.card.get("accuracy")
        is_number = isinstance(accuracy, int | float)
        return (
            f"Accuracy {format_value(accuracy)}."
            if is_number
            else f"{_steps(record)} logged; no score was measured yet."
        )
    info, words = headline
    unit = " nats per token" if info.unit == "nats" else ""
    points = record.points(info.name)
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return f"{words} is {format_number(last)}{unit} at step {last_step}; it was measured once."
    start = "before" if first_step == 0 else f"at step {first_step}"
    end = "after" if last_step == record.last_step else f"at step {last_step}"
    change = f"went from {format_number(first)} ({start}) to {format_number(last)}{unit} ({end})"
    return f"{words} {change} over {_steps(record)}."


def _judge(record: Record) -> str:
    """Describe who gives the held-out score; empty if the run has none."""
    if not record.points("eval/score"):
        return ""
    judge, reward = record.setting("eval", "source"), record.setting("reward", "source")
    if isinstance(judge, Mapping):
        return f"Its judge is eval.source: {describe_source(judge)}."
    if isinstance(reward, Mapping):
        return f"It is scored by the reward that it was trained on: {describe_source(reward)}."
    return ""


def describe_source(source: Mapping[str, Any]) -> str:
    """Describe a reward source in a few words: `reward model runs/rm`, `function my_rewards.py:score`."""
    kind = source.get("type")
    match kind:
        case "function":
            return f"function {source.get('target')}"
        case "model":
            return f"reward model {source.get('path')}"
        case "remote":
            return f"server {source.get('url')}"
        case "openai":
            return f"language model {source.get('model')}"
        case "ensemble":
            members = source.get("sources") or ()
            return f"{len(members)} sources ({source.get('how', 'mean')})"
        case "rules" if isinstance(source.get("source"), Mapping):
            return f"{describe_source(source['source'])}, with rules"
        case _:
            return str(kind)


def _steps(record: Record) -> str:
    """Describe the number of steps done, of those planned if the run is not complete."""
    planned, plural = record.planned_steps, "" if record.last_step == 1 else "s"
    if planned is not None and planned > record.last_step:
        return f"{record.last_step} of the {planned} planned steps"
    return f"{record.last_step} step{plural}"


def _stop(record: Record) -> str:
    """Describe which alarm stopped the run at its last step; empty if none stopped it, or it was over anyway."""
    planned = record.planned_steps
    is_complete = (record.path / "model").is_dir() if planned is None else record.last_step >= planned
    lines = [line for line in record.alarms if line.get("action") == "stop" and line.get("step") == record.last_step]
    if is_complete or not lines:
        return ""
    names = ", ".join(str(line.get("alarm")) for line in lines)
    return f"It was stopped there by the alarm{'' if len(lines) == 1 else 's'} {names}."


def _best(record: Record) -> str:
    """Describe the best checkpoint if it is not the last one; empty if the run keeps none."""
    step, headline = record.best_step, headline_metric(record)
    if step is None or step == record.last_step:
        return ""
    value = None if headline is None else dict(record.points(headline[0].name)).get(step)
    figure = "" if headline is None or value is None else f" ({headline[1].lower()} {format_number(value)})"
    export = ", which is the model that the run exports" if record.exports_best else ""
    return f"The best checkpoint is step {step}{figure}{export}."


def _kl(record: Record) -> str:
    """Describe the final KL to the reference; empty if it was not measured."""
    value = final_kl(record)
    if value is None:
        return ""
    target = record.kl_target()
    aim = "" if target is None else f" (target {target:g})"
    return f"KL to the reference {format_number(value)} nats per sequence{aim}."


def final_kl(record: Record) -> float | None:
    """Return the final KL in nats per sequence: the last held-out value, else the training mean of the last fifth."""
    held_out = record.points("eval/kl")
    if held_out:
        return held_out[-1][1]
    return record.series["kl/reference"].tail_mean() if "kl/reference" in record.series else None


def _interval(record: Record) -> str:
    """Describe the interval of the final accuracy; empty if the report card has none."""
    low, high, count = (record.card.get(key) for key in ("accuracy_low", "accuracy_high", "n"))
    if not (isinstance(low, float) and isinstance(high, float) and isinstance(count, int)):
        return ""
    return f"95 % interval of the final accuracy: {low:.3f} to {high:.3f}, on {count:,} pairs."


def _baselines(record: Record) -> str:
    """Describe the accuracies of the baselines; empty if the report card has none."""
    baselines = record.card.get("baselines")
    if not isinstance(baselines, Mapping):
        return ""
    named = []
    for name, value in baselines.items():
        accuracy = value.get("accuracy") if isinstance(value, Mapping) else value
        if isinstance(accuracy, int | float):
            named.append(f"{str(name).replace('_', ' ')} {format_number(accuracy)}")
    return f"Baselines on the same pairs: {', '.join(named)}." if named else ""


def _rounded(record: Record) -> str:
    """Describe the part of the training that the exported weights have lost; empty if they keep it."""
    export = record.export
    return "" if export is None or not export.is_rounded_away else f"Warning: {export.warning('model')}."


def tiles(record: Record) -> list[Tile]:
    """Build the tiles of the run's key figures, without those that the run lacks."""
    key_figures = [_headline_tile(record), *_kl_tiles(record)]
    key_figures += [_tile(record, info, place.title) for info, place in shown_in("tile")]
    return [tile for tile in [*key_figures, *_machine_tiles(record.timings)] if tile is not None]


def _headline_tile(record: Record) -> Tile | None:
    """Build the tile of the headline metric."""
    headline = headline_metric(record)
    return None if headline is None else _before_after_tile(record.points(headline[0].name), headline[1])


def _tile(record: Record, info: MetricInfo, label: str) -> Tile | None:
    """Build the tile of a metric: a counter's last value, a held-out metric's change, another's mean at the end."""
    points = record.points(info.name)
    if info.unit == "count":
        moved = any(value for _, value in points)
        return Tile(label, format_value(round(points[-1][1]))) if moved else None
    if info.name.startswith("eval/"):
        return _before_after_tile(points, label)
    if not points:
        return None
    return Tile(label, format_value(record.series[info.name].tail_mean()), "mean of the last fifth")


def _before_after_tile(points: Sequence[tuple[int, float]], label: str) -> Tile | None:
    """Build a tile with the last value of a metric and its first value in small print."""
    if not points:
        return None
    return Tile(label, format_value(points[-1][1]), f"from {format_value(points[0][1])}" if len(points) > 1 else "")


def _kl_tiles(record: Record) -> list[Tile | None]:
    """Build the tiles of the KL: held-out, exact, and in training against its target."""
    value, target = final_kl(record), record.kl_target()
    if value is None:
        return []
    kl_tiles: list[Tile | None] = [
        Tile("KL to the reference, nats", format_value(value), _error_text(record, "eval/kl"))
    ]
    if exact := record.points("eval/kl_exact"):
        kl_tiles.append(
            Tile("The same, exact per token", format_value(exact[-1][1]), _error_text(record, "eval/kl_exact"))
        )
    if target is not None and record.points("kl/reference"):
        tail = record.series["kl/reference"].tail_mean()
        kl_tiles.append(Tile("KL in training, last fifth", format_value(tail), f"target {target:g}"))
    return kl_tiles


def _error_text(record: Record, name: str) -> str:
    """Describe the standard error of a metric; without one, say that the value is per sequence."""
    errors = record.points(f"{name}_se")
    return f"standard error {format_value(errors[-1][1])}" if errors else "per sequence"


def _machine_tiles(timings: Sequence[Mapping[str, Any]]) -> list[Tile]:
    """Build the tiles of time, throughput and peak memory."""
    if not timings:
        return []
    seconds = sum(sum(v for v in row.get("seconds", {}).values() if v) for row in timings)
    machine_tiles = [Tile("Time in logged phases", format_duration(seconds))]
    speeds = [row["tokens_per_second"] for row in timings if row.get("tokens_per_second")]
    if speeds:
        machine_tiles.append(Tile("Tokens per second", f"{median(speeds):,.0f}", "median"))
    usd = sum(row.get("usd") or 0.0 for row in timings)
    if usd:
        machine_tiles.append(Tile("Cost", f"${usd:,.2f}", "cost.per_hour"))
    memory = [row["peak_memory_mb"] for row in timings if row.get("peak_memory_mb")]
    if memory:
        machine_tiles.append(Tile("Peak memory", format_megabytes(max(memory)), _peak_phases(timings)))
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


FIRST_PAIRS = 8  # shown at first; the rest is collapsed
FACTS = ("algorithm", "model", "seed")  # of each run laid over others
MOST_IN_TITLE = 4  # runs laid over each other whose names fit in the title


def write_overlay(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write a page with the curves of several runs laid over each other, and return its path.

    Args:
        run_dirs: the run folders, each with a logged step.
        path: the file to write.

    Raises:
        UserError: one of them is not a folder, or has no logged step.
    """
    records = dict(zip(distinct_names(run_dirs), map(read_record, run_dirs), strict=True))
    table = table_of(name for record in records.values() for name in record.series)
    groups = overlay_groups(records, table)
    rows = [
        (name, *(dict(_facts(record)).get(key, "") for key in FACTS), run_verdict(record))
        for name, record in records.items()
    ]
    return write_page(
        path,
        "overlay.html.j2",
        [chart for group in groups for chart in group.charts],
        title=" and ".join(records) if len(records) <= MOST_IN_TITLE else f"{len(records)} runs",
        runs=Table("Runs", ("run", *FACTS, "result"), rows),
        groups=groups,
        refresh=None,
    )


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Name folders by as many of their last parts as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"{paths[0]} is given twice: give different runs")


def write_report(run_dir: Path, *, refresh_s: int | None = None) -> Path:
    """Write report.html into the run folder and return its path; with `refresh_s` the open page reloads itself.

    Raises:
        UserError: `run_dir` is not a folder, or has no logged step.
    """
    record = read_record(Path(run_dir))
    pairs, first_step, last_step = record.pairs()
    table = table_of(record.series)
    groups = chart_groups(record, table)
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
        refresh=refresh_s,
        title=record.name,
        facts=_facts(record),
        verdict=run_verdict(record),
        tiles=tiles(record),
        groups=groups,
        zeros=stayed_zero(record),
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
        alarms=alarm_table(record.alarms),
        notes=_unique([*_nonfinite_notes(record), *record.notes]),
        glossary=[table.get(name, MetricInfo(name, "", "not in the table of metrics")) for name in record.series],
        config=yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True, width=88) if record.config else "",
    )


def pair_details(sample: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the (name, value) pairs shown below a completion: score, its parts, KL, length, whether it was cut off."""
    parts = sample.get("parts")
    rows = [("score", sample.get("score"))]
    rows += list(parts.items()) if isinstance(parts, Mapping) and len(parts) > 1 else []
    rows += [("KL", sample.get("kl")), ("tokens", sample.get("length"))]
    finished = sample.get("finished")
    if "stop" in sample:  # an episode
        return [(name, value) for name, value in [*rows, ("ended by", sample["stop"])] if value is not None]
    return [(name, value) for name, value in rows if value is not None] + (
        [("cut off", "at the length limit")] if finished is False else []
    )


Passage = tuple[str, str, str]  # of an episode: who wrote it, its text, and a remark


def passages(turns: Sequence[Mapping[str, Any]]) -> list[Passage]:
    """List the passages of an episode from the `turns` of its record."""
    return [(str(part["by"]), str(part["text"]), _remark(part)) for part in turns]


def _remark(part: Mapping[str, Any]) -> str:
    """Describe a part of an episode: the turn and reward of an action."""
    if part["by"] != "policy":
        return "environment: not learned from"
    return f"turn {part['turn']}, reward {format_value(part['reward'])}"


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

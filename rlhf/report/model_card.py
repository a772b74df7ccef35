"""The model card of a run in Markdown: the model, its data, its results, how to reproduce them, and the limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rlhf.report.page import final_kl, run_verdict
from rlhf.report.record import Record
from rlhf.tracking.metrics import format_interval, format_number, format_value, table_of
from rlhf.tracking.redact import redact_text

Z95 = 1.96
SHORTENED_TO = 2  # parts kept of an absolute path
_PATH = re.compile(r"(?<![\w./:~…])[/~][^\s,;()'\"]*/[^\s,;()'\"]*[^\s,;()'\".:]")  # an absolute one, in a sentence

_QUOTED = re.compile(r"""(?<!\w)(?:'(?:\\.|[^\\'])*'|"(?:\\.|[^\\"])*")(?!\w)""")  # as repr() writes a text


@dataclass(frozen=True)
class DataUsed:
    """A data set of a run; `rows` is None if they could not be counted, and `why` says so."""

    key: str
    path: str
    rows: int | None
    limit: int | None = None
    why: str = ""
    on_hub: bool = False
    part: tuple[float, float] | None = None
    """The part of the rows that was read, by the hashes of their prompts mapped to [0, 1); None: all."""


@dataclass(frozen=True)
class CardInputs:
    """The contents of a card besides the record of the run."""

    data: Sequence[DataUsed] = ()
    comparison: Mapping[str, Any] | None = None  # eval.json
    suites: Sequence[Mapping[str, Any]] = ()  # the files of evals/
    is_adapter: bool = False
    base_on_hub: bool = False
    quotes: bool = False  # keep the texts that notes of the run quote, which may be completions
    best: Mapping[str, Any] | None = None  # best.json, if the model is a best checkpoint rather than the last one


def model_card(record: Record, inputs: CardInputs) -> str:
    """Write the card: its front matter, then sections in Markdown.

    If the model is the best checkpoint, the card tells the measurements up to its step.
    """
    record = record.exported()
    sections = [
        _front_matter(record, inputs),
        f"# {_text(record.name)}\n\n{_text(_without_places(run_verdict(record)))}",
        "## Training\n\n" + _table(("", ""), _training_rows(record)),
        "## Data\n\n" + _table(("data", "from", "rows"), [_data_row(used) for used in inputs.data]),
        "## Results\n\n" + _results(record, inputs),
        _reproduction(record),
        "## Limits\n\n" + "\n".join(f"- {_text(limit)}" for limit in _limits(record, inputs)),
    ]
    return redact_text("\n\n".join(sections)) + "\n"


def _front_matter(record: Record, inputs: CardInputs) -> str:
    """Build the metadata that the hub reads; only names that exist on the hub are linked."""
    is_policy = record.setting("policy") is not None
    meta: dict[str, object] = {
        "library_name": "peft" if inputs.is_adapter else "transformers",
        "pipeline_tag": "text-generation" if is_policy else "text-classification",
        "tags": ["rlhf", _algorithm(record)],
    }
    if inputs.base_on_hub:
        meta["base_model"] = _base_model(record)
    if datasets := sorted({used.path for used in inputs.data if used.on_hub}):
        meta["datasets"] = datasets
    return f"---\n{yaml.safe_dump(meta, sort_keys=False, allow_unicode=True)}---"


def _training_rows(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the facts of the training: model, algorithm, reward, KL, length, seed, machine."""
    yield "base model", f"`{shorten(_base_model(record))}`"
    yield "algorithm", _algorithm(record)
    yield "reward", _reward(record)
    yield "judge of the evaluation", _judge(record)
    yield "KL to the reference", _kl(record)
    planned = record.planned_steps
    unfinished = f" of {planned:,}" if planned is not None and planned > record.last_step else ""
    yield "steps", f"{record.last_step:,}{unfinished}"
    yield "seed", format_value(record.setting("run", "seed"))
    rank = record.setting("policy", "lora", "r") or record.setting("model", "lora", "r")
    rank = rank if record.export is None or record.export.rank is None else record.export.rank
    yield "trained weights", "all" if rank is None else f"adapters of rank {rank}"
    yield "exported weights", _exported(record)


def _exported(record: Record) -> str:
    """Describe the dtype of the exported weights, and the share of the change by training that they keep."""
    export = record.export
    if export is None:
        return "it is not known how much of the training their dtype keeps"
    if export.change_kept is None:
        return f"{export.dtype}; it is not known how much of the training this dtype keeps"
    return f"{export.dtype}, which keeps {export.change_kept:.1%} of the change that training made"


def _algorithm(record: Record) -> str:
    """Return the preset, or the kinds of loss or advantage, or `reward model`."""
    algorithm = record.setting("algorithm")
    if not isinstance(algorithm, Mapping):
        return "reward-model"
    names = [record.setting("algorithm", section, "type") for section in ("loss", "advantage", "policy_loss")]
    return str(algorithm.get("preset") or ", ".join(str(name) for name in names if name))


def _base_model(record: Record) -> str:
    """Return the model that the run started from."""
    return str(record.setting("policy", "model") or record.setting("model", "model"))


def _reward(record: Record) -> str:
    """Describe where the training scores came from."""
    return _source(record.setting("reward", "source"), missing="none: it was trained on data alone")


def _judge(record: Record) -> str:
    """Describe where the scores of held-out completions came from."""
    return _source(record.setting("eval", "source"), missing="the reward that it was trained on, if any")


def _source(source: Any, *, missing: str) -> str:
    """Describe a source of scores by its kind and its path, address or function."""
    if not isinstance(source, Mapping):
        return missing
    place = next((source[key] for key in ("path", "target", "url", "model") if source.get(key)), None)
    return str(source.get("type")) + ("" if place is None else f" `{shorten(str(place))}`")


def _kl(record: Record) -> str:
    """Describe the final KL, with its 95 % interval if a standard error was measured."""
    value, target = final_kl(record), record.kl_target()
    if value is None:
        return "not measured"
    aim = "" if target is None else f", target {target:g}"
    return f"{_with_error(record, 'eval/kl', value)} nats per sequence{aim}"


def _with_error(record: Record, name: str, value: float) -> str:
    """Format a value, with its 95 % interval if the run logged its standard error."""
    errors = record.points(f"{name}_se")
    if not errors:
        return format_number(value)
    half = Z95 * errors[-1][1]
    return format_interval(value, value - half, value + half)


def _data_row(used: DataUsed) -> tuple[str, str, str]:
    """Describe a data set in a row of the table."""
    rows = used.why if used.rows is None else f"{used.rows:,}"
    if used.part is not None and used.rows is not None:
        low, high = used.part
        rows = f"about {high - low:.0%} of {rows} (part {low:g} to {high:g} by the prompt's hash)"
    limit = "" if used.limit is None else f" (the first {used.limit:,} usable ones)"
    return used.key, f"`{shorten(used.path)}`", rows + limit


def _results(record: Record, inputs: CardInputs) -> str:
    """Write the tables of results, or say that nothing was measured."""
    tables = [
        _metric_table(record),
        _comparison_table(inputs.comparison),
        _report_card_table(record.card),
        *(_suite_table(suite) for suite in inputs.suites),
    ]
    written = [table for table in tables if table]
    return "\n\n".join(written) if written else "Nothing was measured on held-out data."


def _metric_table(record: Record) -> str:
    """Write the held-out metrics before and after training."""
    rows, table = [], table_of(record.series)
    for name in record.series:
        points = record.points(name)
        if name.startswith("eval/") and not name.endswith("_se") and points:
            info = table.get(name)
            before = format_number(points[0][1]) if len(points) > 1 else ""
            after = _with_error(record, name, points[-1][1])
            rows.append((f"`{name}`", before, after, info.unit if info else "", info.meaning if info else ""))
    if not rows:
        return ""
    head = ("held-out metric", "before", "after [95 %]", "unit", "meaning")
    return _table(head, rows)


def _comparison_table(comparison: Mapping[str, Any] | None) -> str:
    """Write the intervals of `rlhf eval`."""
    if comparison is None:
        return ""
    names = {
        "win_rate": "win rate",
        "length_controlled": "win rate at equal length",
        "difference": "mean score difference",
    }
    rows = [(label, _interval(comparison[key])) for key, label in names.items() if comparison.get(key)]
    pairwise = comparison.get("pairwise")
    if isinstance(pairwise, Mapping):
        rows.append((f"win rate by {pairwise['judge']}", _interval(pairwise["win_rate"])))
    other = "its start" if comparison.get("against") == "start" else f"`{shorten(str(comparison.get('against')))}`"
    return _table((f"against {other}, {comparison['prompts']:,} held-out prompts", "[95 %]"), rows) if rows else ""


def _interval(value: Mapping[str, Any]) -> str:
    """Format a value with its interval, if it has one."""
    if value.get("low") is None or value.get("high") is None:
        return format_value(value["value"])
    return format_interval(value["value"], value["low"], value["high"])


def _report_card_table(card: Mapping[str, Any]) -> str:
    """Write the accuracy of a reward model beside its baselines."""
    if "accuracy" not in card:
        return ""
    own = {"accuracy": card["accuracy"], "low": card.get("accuracy_low"), "high": card.get("accuracy_high")}
    rows = [
        (str(name).replace("_", " "), _interval({**entry, "value": entry["accuracy"]}))
        for name, entry in {"this model": own, **card.get("baselines", {})}.items()
    ]
    return _table((f"accuracy on {format_value(card.get('n'))} held-out pairs", "[95 %]"), rows)


def _suite_table(suite: Mapping[str, Any]) -> str:
    """Write the figures of `rlhf eval --suite`."""
    rows = [
        (f"`{name}`", _interval(figure), format_value(figure.get("n")), str(figure.get("meaning", "")))
        for name, figure in suite.get("figures", {}).items()
    ]
    return _table((f"suite {suite.get('suite')}", "[95 %]", "rows", "meaning"), rows) if rows else ""


def _reproduction(record: Record) -> str:
    """Write the command, the versions and the configuration."""
    verb = "train" if record.setting("policy") is not None else "reward"
    commit = record.setting("git_commit")
    config = {key: value for key, value in record.config.items() if key not in ("versions", "git_commit")}
    versions = record.setting("versions") or {}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    text = yaml.safe_dump(_shorten_all(config), sort_keys=False, allow_unicode=True, width=100)
    fence = "`" * max(3, 1 + max((len(run) for run in text.split() if set(run) == {"`"}), default=0))
    code = f"at commit `{commit}`" if commit else "at an unknown commit"
    return "\n\n".join(
        [
            "## How to reproduce",
            f"With the code {code}, and the configuration below in `config.yaml`:",
            f"    rlhf {verb} config.yaml",
            f"Versions: {installed or 'unknown'}.",
            "Absolute paths are shortened to their last two components, and keys and passwords are replaced by ***.",
            f"{fence}yaml\n{text}{fence}",
        ]
    )


def _limits(record: Record, inputs: CardInputs) -> Iterator[str]:
    """Yield the limits that the numbers do not show."""
    yield f"One run with one seed ({format_value(record.setting('run', 'seed'))}): another seed gives other numbers."
    planned = record.planned_steps
    if inputs.best is not None:
        yield (
            f"It is the best checkpoint of the run, from step {inputs.best['step']:,}, chosen by the best "
            f"{inputs.best['by']} of {inputs.best['rows']:,} held-out rows: its score on these rows is optimistic."
        )
    elif record.exports_best:
        yield (
            f"It is the best checkpoint of the run, from step {record.last_step:,}. The best of several evaluations "
            "is too good by chance: report scores on prompts that chose nothing."
        )
    elif planned is not None and record.last_step < planned:
        yield f"The run has {record.last_step:,} of {planned:,} steps."
    judged_by_reward = record.setting("reward", "source") is not None and record.setting("eval", "source") is None
    if judged_by_reward and record.points("eval/score"):
        yield (
            "Held-out scores come from the reward that the model was trained on. They rise too when the model exploits "
            "its faults."
        )
    if final_kl(record) is None and record.setting("policy") is not None:
        yield "The KL to the reference was not measured, so how far the model moved is not known."
    if inputs.comparison is None and record.setting("policy") is not None:
        yield "There is no comparison with the start model with intervals (`rlhf eval`)."
    if not inputs.suites and record.setting("policy") is not None:
        yield "No benchmark was run on it (`rlhf eval --suite`)."
    finished = record.points("eval/finished")
    if finished and finished[-1][1] < 1:
        yield f"{1 - finished[-1][1]:.1%} of the held-out completions were cut off at the length limit."
    yield "Intervals cover the choice of held-out rows, not the training."
    if record.export is not None and record.export.is_rounded_away:
        yield record.export.warning("model")
    for note in dict.fromkeys(str(note.get("text")) for note in record.notes):
        text = note if inputs.quotes else _QUOTED.sub("…", note)
        yield f"Noted by the run: {_without_places(text)}"


def _without_places(text: str) -> str:
    """Shorten every absolute path in a text."""
    return _PATH.sub(lambda path: shorten(path[0]), text)


def shorten(path: str) -> str:
    """Shorten an absolute path to its last parts: the rest tells of somebody's machine, and nothing of the model."""
    if not path.startswith(("/", "~")):
        return path
    file, colon, function = path.partition(":")
    return "…/" + "/".join([part for part in file.split("/") if part][-SHORTENED_TO:]) + colon + function


def _shorten_all(value: Any) -> Any:
    """Shorten every absolute path in a tree of settings."""
    if isinstance(value, Mapping):
        return {key: _shorten_all(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shorten_all(entry) for entry in value]
    return shorten(value) if isinstance(value, str) else value


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_text(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _text(text: str) -> str:
    """Put a text on one line, without tags of HTML."""
    return " ".join(text.split()).replace("<", "&lt;")

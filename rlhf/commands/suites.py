"""rlhf eval --suite: a named alignment evaluation of a run's model, or of any causal LM."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlhf.build.context import model_folder
from rlhf.build.rewards import build_source
from rlhf.config.algorithm import ReferencedLoss
from rlhf.config.load import Tree, dump, expand_preset, merge, parse_overrides, read_yaml, validate
from rlhf.config.reward import RewardSourceConfig
from rlhf.config.sections import TrainConfig
from rlhf.errors import ConfigError, install_hint
from rlhf.evaluation.suites.figures import Figure, SuiteResult
from rlhf.evaluation.suites.gsm8k import run_gsm8k
from rlhf.evaluation.suites.hh import run_hh
from rlhf.evaluation.suites.lab import run_lab
from rlhf.evaluation.suites.persona import run_persona
from rlhf.evaluation.suites.settings import (
    Gsm8kSettings,
    HarnessSettings,
    HhSettings,
    LabSettings,
    PersonaSettings,
    SuiteSettings,
)
from rlhf.evaluation.suites.subject import Subject, load_subject
from rlhf.lab.build import with_lab
from rlhf.models.fingerprint import weights_fingerprint
from rlhf.runtime.engine import Engine
from rlhf.runtime.loggers import plain
from rlhf.runtime.run_folder import versions, write_aside

HARNESS = "lm-eval"
START = "start"
MAX_GROUPS = 40


@dataclass(frozen=True)
class Suite:
    """A suite: its settings, what --data is to it, and how it is run."""

    settings: type[SuiteSettings]
    data: str
    run: Callable[[Any, Subject, str], SuiteResult]
    data_key: str = "dataset.path"
    limit_key: str = "dataset.limit"
    default_data: str | None = None


def run_suite(
    target: str,
    name: str,
    *,
    data: str | None,
    limit: int | None,
    out: str | None,
    against: str,
    overrides: Sequence[str],
    console: Console,
) -> None:
    """Measure the model of a run, or in a model folder or under a hub id, by the suite `name`; print and write it.

    Args:
        target: run, folder or hub id.
        name: a suite, or lm-eval:TASK.
        data: the suite's data.
        limit: use only so many rows.
        out: the JSON file; None: evals/<suite>.json in the run's folder.
        against: the model to compare with; `start`: the reference of the run.
        overrides: key=value, over the run's own settings.
        console: where it reports.

    Raises:
        UserError: no such suite, setting, data or model.
    """
    suite, task = find_suite(name)
    settings = settings_of(suite, name, target, data=data, limit=limit, against=against, overrides=overrides)
    subject = _subject(settings, target)
    result = suite.run(settings, subject, task)
    _print(name, target, result, console)
    file = _file(target, name, out)
    if file is None:
        said = f"{target} is no run folder, so nothing was written; --out FILE writes what was found"
        console.print(Text(said), soft_wrap=True)
        return
    found = {
        "suite": name,
        "model": {"path": target, "weights": weights_fingerprint(subject.model)},
        **result.as_json(),
        "config": dump(settings),
        "versions": versions(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_aside(file, json.dumps(plain(found), indent=2, ensure_ascii=False) + "\n")
    console.print(Text(f"written to {file}"), soft_wrap=True)


def find_suite(name: str) -> tuple[Suite, str]:
    """The suite of that name, and of lm-eval:TASK the task.

    Raises:
        ConfigError: there is none, or lm-eval is not installed.
    """
    first, colon, task = name.partition(":")
    if first == HARNESS:
        if not task:
            raise ConfigError("--suite lm-eval needs a task, as in --suite lm-eval:arc_easy")
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(f"--suite lm-eval:… needs the package lm-eval: {install_hint('lm-eval')}")
    elif colon or name not in SUITES:
        near = difflib.get_close_matches(name, [*SUITES, f"{HARNESS}:TASK"], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(key for key in SUITES if key != HARNESS)
        raise ConfigError(f"--suite: {name!r} is not one of {known}, {HARNESS}:TASK{hint}")
    return SUITES[first], task


def settings_of(
    suite: Suite,
    name: str,
    target: str,
    *,
    data: str | None,
    limit: int | None,
    against: str,
    overrides: Sequence[str],
) -> SuiteSettings:
    """The suite's settings: its defaults < the run's own settings < the options < key=value.

    Raises:
        ConfigError: a key or a value is wrong, or the data is missing.
    """
    tree = _of_run(target, suite.settings)
    data = data or suite.default_data
    chosen = {suite.data_key: data, suite.limit_key: limit, "reference": None if against == START else against}
    for key, value in chosen.items():
        if value is None:
            continue
        if key.partition(".")[0] not in suite.settings.model_fields:
            raise ConfigError(f"--against: the suite {name} compares with no other model")
        tree = merge(tree, _branch(key, value))
    tree = merge(tree, parse_overrides(overrides))
    rows = suite.settings.model_fields.get("dataset")
    if rows is not None and rows.is_required() and not _has_path(tree.get("dataset")):
        raise ConfigError(f"the suite {name} needs data: --data PATH, {suite.data}")
    return with_lab(validate(suite.settings, tree))


def _of_run(target: str, kind: type[SuiteSettings]) -> Tree:
    """What the configuration of a run says of the suite's settings; nothing where `target` is no run."""
    if not (Path(target).expanduser() / "config.yaml").is_file():
        return {}
    tree = read_yaml(Path(target).expanduser())
    if "arms" in tree:
        raise ConfigError(f"{target} is the folder of a comparison: name one of the runs in it")
    if "model" in tree and "policy" not in tree:
        raise ConfigError(
            f"{target} is a reward model's run: it writes nothing. Name a policy's; rlhf eval {target} alone"
        )
    config = validate(TrainConfig, expand_preset(tree))
    loss = getattr(config.algorithm, "loss", None)
    source: RewardSourceConfig | None = config.eval.source or (config.reward.source if config.reward else None)
    settings = {
        "seed": config.run.seed,
        "device": config.run.device,
        "dtype": config.policy.dtype,
        "trust_remote_code": config.policy.trust_remote_code,
        "chat_template": config.data.chat_template,
        "sampling": {key: getattr(config.sampling, key) for key in ("max_new_tokens", "temperature", "batch_size")},
        "reference": config.reference.model or config.policy.model,
        "source": None if source is None else source.model_dump(mode="json"),
        "beta": loss.beta if isinstance(loss, ReferencedLoss) else None,
    }
    return {key: value for key, value in settings.items() if key in kind.model_fields and value is not None}


def _branch(key: str, value: object) -> Tree:
    first, dot, rest = key.partition(".")
    return {first: _branch(rest, value) if dot else value}


def _has_path(tree: object) -> bool:
    return isinstance(tree, Mapping) and bool(tree.get("path"))


def _subject(settings: SuiteSettings, path: str, *, like: Subject | None = None) -> Subject:
    """The model at `path`; one that is compared shares the encoder of the other."""
    return load_subject(
        model_folder(path),
        path=path,
        sampling=settings.sampling,
        chat_template=settings.chat_template,
        dtype=settings.dtype,
        device=_device(settings),
        rows_per_pass=settings.rows_per_pass,
        trust_remote_code=settings.trust_remote_code,
        encoder=None if like is None else like.encoder,
    )


def _reference(settings: HhSettings | LabSettings, subject: Subject) -> Subject | None:
    return None if settings.reference is None else _subject(settings, settings.reference, like=subject)


def _device(settings: SuiteSettings) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ConfigError("device: cuda, but there is no GPU here; set device=cpu or device=auto")
    return torch.device("cuda" if has_gpu and settings.device != "cpu" else "cpu")


def _hh(settings: HhSettings, subject: Subject, _: str) -> SuiteResult:
    source = settings.source
    scorer = None if source is None else build_source(source, subject.encoder.tokenizer, Engine(subject.device))
    return run_hh(settings, subject, reference=_reference(settings, subject), source=scorer)


def _persona(settings: PersonaSettings, subject: Subject, _: str) -> SuiteResult:
    return run_persona(settings, subject)


def _gsm8k(settings: Gsm8kSettings, subject: Subject, _: str) -> SuiteResult:
    return run_gsm8k(settings, subject)


def _lab(settings: LabSettings, subject: Subject, _: str) -> SuiteResult:
    return run_lab(settings, subject, reference=_reference(settings, subject))


def _harness(settings: HarnessSettings, subject: Subject, task: str) -> SuiteResult:
    found: SuiteResult = importlib.import_module("rlhf.evaluation.suites.harness").run_harness(settings, subject, task)
    return found


SUITES: dict[str, Suite] = {
    "hh": Suite(HhSettings, "preference pairs, as of Anthropic's HH: chosen and rejected transcripts", _hh),
    "persona": Suite(
        PersonaSettings,
        "yes/no items with question, answer_matching_behavior and answer_not_matching_behavior",
        _persona,
    ),
    "gsm8k": Suite(Gsm8kSettings, "problems with question and an answer that ends in #### and a number", _gsm8k),
    "lab": Suite(LabSettings, "prompts of the lab", _lab, default_data="lab:eval_prompts.jsonl"),
    HARNESS: Suite(HarnessSettings, "a folder of task files", _harness, data_key="include", limit_key="limit"),
}


def _file(target: str, name: str, out: str | None) -> Path | None:
    if out is not None:
        return Path(out).expanduser()
    run = Path(target).expanduser()
    return (
        run / "evals" / f"{name.replace(':', '-').replace('/', '-')}.json" if (run / "config.yaml").is_file() else None
    )


def _print(name: str, target: str, result: SuiteResult, console: Console) -> None:
    skipped = sum(result.skipped.values())
    rows = f"{result.n:,} rows, {skipped:,} skipped" if skipped else f"{result.n:,} rows"
    console.print(Text(f"{name} of {target}: {rows}"), soft_wrap=True)
    names = Column("figure", min_width=max((len(figure.name) for figure in result.figures), default=0))
    table = Table(names, "value", "95 % interval", "rows", "what it is", box=None, pad_edge=False)
    for figure in result.figures:
        table.add_row(
            *map(Text, (figure.name, _number(figure.value), _interval(figure), f"{figure.n:,}", figure.meaning))
        )
    if result.figures:
        console.print(table)
    if result.groups:
        _print_groups(result.groups, console)
    for part in result.left_out:
        console.print(Text(f"left out: {part.what}: {part.why}", style="yellow"), soft_wrap=True)
    for note in result.notes:
        console.print(Text(note), soft_wrap=True)


def _print_groups(groups: Mapping[str, Sequence[Figure]], console: Console) -> None:
    table = Table("of which", "figure", "value", "95 % interval", "rows", box=None, pad_edge=False)
    for name, figures in list(groups.items())[:MAX_GROUPS]:
        for figure in figures[:1]:
            table.add_row(*map(Text, (name, figure.name, _number(figure.value), _interval(figure), f"{figure.n:,}")))
    console.print(table)
    if len(groups) > MAX_GROUPS:
        console.print(Text(f"and {len(groups) - MAX_GROUPS:,} more"))


def _number(value: float) -> str:
    return f"{value:.4g}"


def _interval(figure: Figure) -> str:
    return "" if figure.low is None or figure.high is None else f"{figure.low:.3g} to {figure.high:.3g}"

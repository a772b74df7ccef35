"""Check the options and files of the verbs without importing torch, so that a mistake is told at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.comparison.plan import FIXED_SETTINGS, CellPlan
from rlhf.config.compare import START_FOLDER
from rlhf.config.data import PromptsConfig
from rlhf.config.files import Tree, branch_at, merge, parse_overrides
from rlhf.config.load import dump, load_chat_format, read_yaml, train_config, validate
from rlhf.config.sections import SamplingConfig, TrainConfig
from rlhf.data.paths import (
    DATA_PREFIXES,
    Lookups,
    check_files,
    check_out_dir,
    is_missing,
    missing,
    missing_data,
    missing_model,
)
from rlhf.errors import ConfigError, DataError, ModelError, UserError
from rlhf.lab.build import PREFIX, resolve_lab_paths
from rlhf.plugins import load_plugins
from rlhf.rewards.pair_judge import PairwiseJudge
from rlhf.suites.suite import Suite, find_suite

START = "start"


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The number of completions of each prompt, and the sampling options."""

    count: int = 1
    seed: int = 0
    greedy: bool = False
    top_p: float | None = None  # None: as in training
    raw: bool = False  # no chat template


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The system prompt and sampling options of the answers."""

    system: str | None = None
    temperature: float | None = None  # None, and no top_p either: the values in the model's own files
    top_p: float | None = None
    max_tokens: int = 512
    seed: int | None = None
    greedy: bool = False


def check_sampling(
    path: str,
    prompts: Sequence[str] | None,
    options: SampleOptions,
    *,
    max_new_tokens: int | None,
    temperature: float | None,
) -> SamplingConfig:
    """Return the sampling settings of the run in `path`, or the defaults, with the given values on top.

    Args:
        prompts: the texts to complete; None if they are in a file.

    Raises:
        UserError: a prompt or an option is invalid, or so is a setting of the run, or the model is missing.
    """
    if prompts is not None:
        _check_prompts(prompts)
    if options.count < 1:
        raise UserError(f"count is {options.count}: it has to be at least 1")
    _check_common(path, options)
    tree = read_yaml(path) if (Path(path) / "config.yaml").is_file() else {}
    settings = dict(tree.get("sampling") or {})
    if any(isinstance(value, Mapping) for value in settings.values()):
        load_plugins(tree)  # a server or a correction may be one of theirs
    if max_new_tokens is not None:
        settings["max_new_tokens"] = max_new_tokens
    if temperature is not None:
        settings["temperature"] = temperature
    if options.top_p is not None:
        settings["top_p"] = options.top_p
    return validate(SamplingConfig, settings)


def check_sampled_file(data: str | None, out: Path | None, limit: int | None) -> PromptsConfig | None:
    """Return the section of the prompts of `rlhf sample --data`; None without a file.

    Raises:
        UserError: an option lacks another one, the data are missing, or there is a file at `out` already.
    """
    if data is None or out is None:
        given = {"--data": data, "--out": out, "--limit": limit}
        if data is None and out is None and limit is None:
            return None
        raise UserError(
            f"{' and '.join(name for name, value in given.items() if value is not None)} alone: prompts of a file need "
            "--data and --out, as in --data prompts.jsonl --out completions.jsonl"
        )
    check_output_file("--out", out)
    if out.exists():
        raise UserError(f"--out {out} is there already: name another file, or remove it")
    if (problem := missing_data(data)) is not None:
        raise DataError(f"--data: {problem}")
    return validate(PromptsConfig, {"path": data} if limit is None else {"path": data, "limit": limit})


def check_chat(path: str, options: ChatOptions) -> SamplingConfig:
    """Return the sampling settings of a conversation.

    Raises:
        UserError: an option is invalid, or so is the chat format of the run, or the model is missing.
    """
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        raise UserError("--temperature must be > 0; use --greedy for deterministic decoding")
    if options.max_tokens < 1:
        raise UserError(f"--max-new-tokens is {options.max_tokens}: it must be at least 1")
    _check_common(path, options)
    return SamplingConfig(max_new_tokens=options.max_tokens)


def _check_prompts(prompts: Sequence[str]) -> None:
    """Check that there are prompts, and that each is a text that is not empty."""
    if not prompts:
        raise DataError("there are no prompts: give at least one")
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str):
            raise DataError(f"prompt {number} is a {type(prompt).__name__}: a prompt is a text")
        if not prompt:
            raise DataError(f"prompt {number} is empty: give it a text to complete")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"prompt {number} is not valid Unicode: give it in UTF-8") from error


def _check_common(path: str, options: SampleOptions | ChatOptions) -> None:
    """Check the options that samples and conversations share: how tokens are drawn, the model, and its chat format."""
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p is {options.top_p:g}: it has to be above 0 and at most 1")
    if options.seed is not None and not -(2**63) <= options.seed < 2**64:  # the seeds that torch takes
        raise UserError(f"seed is {options.seed}: it has to have at most 64 bits")
    check_model_path(path)
    load_chat_format(path)


def check_output_file(option: str, path: str | Path, *, is_ours: Callable[[Path], bool] | None = None) -> None:
    """Check that a file can be written at `path` without the loss of another.

    Args:
        option: the option that names the file.
        path: the file.
        is_ours: whether the command wrote a file that is there, which it may write again; None allows any file.

    Raises:
        UserError: a folder is there, or a file of somebody else.
    """
    if Path(path).is_dir():
        raise UserError(f"{option} {path} is a folder: name the file to write")
    is_there = Path(path).is_file() and Path(path).stat().st_size > 0  # an empty file and /dev/null lose nothing
    if is_ours is not None and is_there and not is_ours(Path(path)):
        raise UserError(
            f"{path} is there already, and this command did not write it: name another file with {option}, or remove it"
        )


def check_model_path(path: str) -> None:
    """Check that a run or a model folder exists; a possible hub id is not checked.

    Raises:
        ModelError: it does not exist.
    """
    if (problem := missing_model(path)) is not None:
        raise ModelError(problem)


def suite_settings(
    name: str,
    target: str,
    *,
    data: str | None,
    limit: int | None,
    against: str,
    overrides: Sequence[str],
) -> tuple[Suite, str]:
    """Resolve a suite's settings, in rising priority: its defaults, the run's settings, the options, key=value.

    Args:
        name: a suite, or lm-eval:TASK.
        target: a run, a model folder or a hub id.
        against: the model to compare with; `start` is the reference of the run.
        overrides: key=value settings on top of the run's own; `plugins=[FILE]` names the file of a suite of the user's,
            unless the configuration of the run lists it.

    Returns:
        The settings, and the task of lm-eval:TASK (empty for the other suites).

    Raises:
        UserError: the suite, a key or a value is invalid, or a file is missing.
    """
    check_model_path(target)
    config, given = _config_of_run(target), parse_overrides(overrides)
    load_plugins(given)
    given.pop("plugins", None)
    suite, task = find_suite(name)
    reference = None if against == START else against
    options = {suite.data_key: data, suite.limit_key: limit, "reference": reference}
    given = merge(_options_of(suite, name, options), given)
    tree = given if config is None else suite.complete(config, given)
    dataset = suite.model_fields.get("dataset")
    if dataset is not None and dataset.is_required() and not _has_path(tree.get("dataset")):
        raise ConfigError(f"the suite {name} needs data: --data PATH, {suite.data}")
    settings = validate(suite, tree)
    check_suite_files(settings, Lookups(prefix=PREFIX))
    return resolve_lab_paths(validate(suite, dump(settings))), task  # complete, so that defaults are resolved too


def _options_of(suite: type[Suite], name: str, options: Mapping[str, object]) -> Tree:
    """Return the settings that the command line's options stand for; options that were not given are left out."""
    tree: Tree = {}
    for key, value in options.items():
        if value is None:
            continue
        if key.partition(".")[0] not in suite.model_fields:
            raise ConfigError(f"--against: the suite {name} compares with no other model")
        tree = merge(tree, branch_at(key, value))
    return tree


def check_arm_files(plan: CellPlan, lookups: Lookups | None = None, *checks: Callable[[TrainConfig], None]) -> None:
    """Check the folders, files, models and data of suites that the arms of a comparison name.

    Args:
        lookups: earlier results for paths and hub ids.
        checks: further checks of each arm's configuration.

    Raises:
        ConfigError: something is missing or wrong, one line for each, with the comparison's key or the arm's name.
    """
    check_out_dir(str(plan.folder), "out_dir")
    lookups = Lookups() if lookups is None else lookups
    problems: dict[str, str] = {}  # problem -> the first arm that has it: most are common to all arms
    if plan.config.pairs is not None:
        _check_pair_judge(plan.config.pairs.judge, lookups)
    for cell in plan.untuned():
        train = cell.config.train
        calls = [partial(check_files, train, lookups), *(partial(check, train) for check in checks)]
        calls += [partial(_check_suite, name, settings, lookups) for name, settings in cell.config.suites.items()]
        for call in calls:
            try:
                call()
            except UserError as error:
                for problem in str(error).splitlines():
                    problems.setdefault(problem, cell.arm)
    if problems:
        raise ConfigError("\n".join(_with_key(problem, arm) for problem, arm in problems.items()))


def _with_key(problem: str, arm: str) -> str:
    """Return a problem under the comparison's key for it, or after the name of its arm."""
    for setting, key in FIXED_SETTINGS.items():
        if problem.startswith((f"{setting}.", f"{setting}:")):
            return key + problem.removeprefix(setting)
    if arm != START_FOLDER:
        return f"arms.{arm}: {problem}"
    return f"shared.{problem}" if problem.startswith("data.") else f"all arms: {problem}"


def _check_suite(name: str, settings: Mapping[str, Any], lookups: Lookups) -> None:
    try:
        check_suite_files(validate(find_suite(name)[0], dict(settings)), lookups)
    except UserError as error:
        raise ConfigError(f"suites.{name}: {error}") from error


def _check_pair_judge(judge: PairwiseJudge, lookups: Lookups) -> None:
    """Check the functions and models of a judge of pairs.

    Raises:
        UserError: one is missing or wrong.
    """
    judge.check()
    lines = [
        f"pairs.judge.{key}: {problem}" for key, path in judge.models() if (problem := lookups.missing_model(path))
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def check_suite_files(settings: Suite, lookups: Lookups) -> None:
    """Check that a suite's packages are installed and its files and models exist; hub ids of data are not checked.

    Args:
        settings: the suite.
        lookups: earlier results for models, and the files that are made later.

    Raises:
        ConfigError: a package is missing.
        DataError: a file or a folder is missing.
    """
    settings.check_installed()
    lines = [f"{key}: {problem}" for key, path in settings.models() if (problem := lookups.missing_model(path))]
    lines += [
        f"{key}: {missing(path)}"
        for key, path in settings.data_sets()
        if is_missing(path, DATA_PREFIXES) and not lookups.is_later(path)
    ]
    if lines:
        raise DataError("\n".join(lines))


def _config_of_run(target: str) -> TrainConfig | None:
    """Return the configuration of a policy's run, whose plug-ins are loaded; None if the target is no run."""
    if not (Path(target).expanduser() / "config.yaml").is_file():
        return None
    tree = read_yaml(Path(target).expanduser())
    if "arms" in tree:
        raise ConfigError(f"{target} is the folder of a comparison: name one of the runs in it")
    if "model" in tree and "policy" not in tree:
        raise ConfigError(
            f"{target} is a reward model's run: it writes nothing. Name a policy's; rlhf eval {target} alone"
        )
    return train_config(tree)


def _has_path(tree: object) -> bool:
    return isinstance(tree, Mapping) and bool(tree.get("path"))

"""Plan a comparison: one cell for each arm and seed, and for each trial of tuning, all checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.comparison.tuning.plan import plan_trials, reporting_prompts, tuning_prompts
from rlhf.config.compare import (
    START_FOLDER,
    UNTUNED,
    Arm,
    BestOfNArm,
    CellConfig,
    CompareConfig,
    Overrides,
    TrainedArm,
)
from rlhf.config.data import HELD_OUT
from rlhf.config.files import Tree, format_yaml, merge, merge_over
from rlhf.config.load import drop_unread, dump, read_yaml, train_config, validate
from rlhf.config.presets import drop_keys, keep_last_alternative, release_held_out
from rlhf.config.run import UNKNOWN_LENGTH
from rlhf.config.sections import RunConfiguration, TrainConfig
from rlhf.errors import ConfigError, command_or_call
from rlhf.guard.lint import check_settings
from rlhf.lab.build import resolve_lab_paths
from rlhf.plugins import load_plugins
from rlhf.rewards.source import Source
from rlhf.section import Section
from rlhf.suites.suite import Suite, find_suite
from rlhf.tracking.run_folder import differing_keys, write_atomically
from rlhf.tracking.same_run import MACHINE, SAVING, matches

Settings = dict[str, dict[str, Any]]


def suites_of(suites: Mapping[str, Tree], train: TrainConfig, proxy: Source | None, n: int | None) -> Settings:
    """Complete the settings of the suites for one cell.

    Args:
        suites: the settings that the comparison gives.
        train: the configuration of the cell's run; its seed, device, dtype, chat template, system message and sampling
            hold for the suites too, as in `rlhf eval`.
        proxy: the reward that is trained on, by which best-of-n picks.
        n: the n of a best-of-n arm, whose suites have to draw several answers and keep one; None otherwise.

    Raises:
        ConfigError: no such suite, or a setting is wrong; the message names it.
    """
    complete = {name: _settings(name, given, train) for name, given in suites.items()}
    if n is None:
        return complete
    picking = {name: settings for name, settings in complete.items() if "best_of" in _settings_class(name).model_fields}
    source = None if proxy is None else {"type": proxy.type, **proxy.model_dump(mode="json", exclude_unset=True)}
    return {name: {**settings, "best_of": n, "source": source} for name, settings in picking.items()}


def _settings_class(name: str) -> type[Suite]:
    try:
        return find_suite(name)[0]
    except ConfigError as error:
        raise ConfigError(str(error).replace("--suite", "suites")) from error


def _settings(name: str, given: Tree, train: TrainConfig) -> Tree:
    """Complete a suite's settings from the run's, and check them."""
    kind = _settings_class(name)
    try:
        return dump(validate(kind, kind.complete(train, given)))
    except ConfigError as error:
        raise ConfigError(f"suites.{name}: {error}") from error


CELL = "cell.yaml"

# The settings that the comparison fixes for all arms, and the key of the comparison that sets each of them.
FIXED_SETTINGS = {
    "policy.model": "start",
    "reward.source": "reward_source",
    "eval.source": "judge",
    "data.eval_prompts": "shared.data.eval_prompts",
    "schedule.steps": "budget",
    "schedule.epochs": "budget",
}
LENGTH = ("schedule.steps", "schedule.epochs")


@dataclass(frozen=True)
class Cell:
    """One arm, or one trial of its tuning, with one seed, and its folder."""

    folder: Path
    config: CellConfig

    @property
    def arm(self) -> str:
        """Return the name of the arm."""
        return self.config.arm

    @property
    def seed(self) -> int:
        """Return the seed."""
        return self.config.seed

    @property
    def label(self) -> str:
        """Return the cell's name where its progress is shown."""
        trial = self.config.trial
        return f"{self.arm}, {f'trial {trial.number}, ' if trial is not None else ''}seed {self.seed}"

    @property
    def run_folder(self) -> Path:
        """Return the run folder of a cell that trains: its own, but one for all rounds of a trial."""
        return self.folder if self.config.trial is None else self.folder.parent


@dataclass(frozen=True)
class CellPlan:
    """All cells of a comparison.

    They come seed after seed, the start model's before the arms', so that an unfinished comparison can already
    be evaluated, and a later seed finds the greedy answers of the start model.
    """

    config: CompareConfig
    folder: Path
    cells: list[Cell]
    trials: list[Cell] = field(default_factory=list)  # every round of every trial, of which few reach the last round

    def of(self, arm: str) -> list[Cell]:
        """Return the cells of an arm."""
        return [cell for cell in self.cells if cell.arm == arm]

    def untuned(self) -> list[Cell]:
        """Return the cells whose settings are known before tuning: all except the reported ones of tuned arms."""
        tuned = {cell.arm for cell in self.trials}
        return [*(cell for cell in self.cells if cell.arm not in tuned), *self.trials]


def plan_cells(config: CompareConfig, *, beside: Path, lab_files: bool = True, trials: bool = True) -> CellPlan:
    """Build the cells of a comparison, each with a complete configuration that has been validated.

    Args:
        config: the comparison.
        beside: a folder in which `base` is looked up if it is not found in the working folder.
        lab_files: whether the names of the lab's files become paths, for which missing ones are made.
        trials: whether to plan the trials of tuning too, if the comparison tunes.

    Raises:
        ConfigError: an arm is not a valid run, breaks a rule of `rlhf lint` whose level is error, or sets a key that
            the comparison fixes; the message names the arm.
    """
    shared = config.shared.tree()
    given = release_held_out(read_yaml(locate_base(config, beside)), shared)
    base = merge(keep_last_alternative(given, shared), shared)
    _refuse(config.shared, LENGTH, "shared")
    base = _held_out(base)
    base = merge(base, _common(config, base))
    arms: dict[str, Arm] = {START_FOLDER: TrainedArm(), **config.arms}
    folder = Path(config.out_dir)
    reported = base if config.tune is None else merge(base, reporting_prompts(config.tune, base))
    cells = [
        Cell(path, _cell(config, reported, name, arms[name], seed, path))
        for seed in config.seeds
        for name in arms
        for path in [folder / name / f"seed-{seed}"]
    ]
    for cell in cells[: len(arms)]:  # of the first seed
        _check_guard(cell)
    tuning = _trials(config, base, folder) if trials else []
    if lab_files:
        cells, tuning = [_with_lab_files(cell) for cell in cells], [_with_lab_files(cell) for cell in tuning]
    return CellPlan(config, folder, cells, tuning)


def _held_out(base: Tree) -> Tree:
    """Return the base with the prompts that all arms are judged on: by data.holdout, a part of the training prompts."""
    data = base.get("data", {})
    prompts, share = data.get("prompts"), data.get("holdout")
    if share is None or not prompts or prompts.get("part") or data.get("eval_prompts"):
        return base
    most = HELD_OUT["prompts"]
    judged = {**prompts, "part": [0.0, share], "limit": min(prompts.get("limit") or most, most)}
    return merge(base, {"data": {"prompts": {"part": [share, 1.0]}, "eval_prompts": judged}})


def _trials(config: CompareConfig, base: Tree, folder: Path) -> list[Cell]:
    """Build the cells of every trial of every trained arm; none if the comparison does not tune.

    Raises:
        ConfigError: the space is wrong, or a trial is no valid run or breaks a rule whose level is error.
    """
    if config.tune is None:
        return []
    build = partial(_cell, config, merge(drop_keys(base, ["data.eval_prompts"]), tuning_prompts(config.tune, base)))
    cells = [Cell(path, trial) for path, trial in plan_trials(config, config.tune, folder, build)]
    for cell in cells:
        trial = cell.config.trial
        if trial is not None and trial.round == 1 and cell.seed == config.tune.seeds[0]:
            _check_guard(cell, f", trial {trial.number} of its tuning" if trial.number else "")
    return cells


def _check_guard(cell: Cell, which: str = "") -> None:
    """Check the settings of a trained arm against the rules, and that no alarm can leave it without an end.

    Args:
        cell: a cell of the arm.
        which: which of its trials it is, for messages.

    Raises:
        ConfigError: a rule whose level is error is broken, or an alarm stops the run.
    """
    if cell.config.budget is None:
        return
    guard = cell.config.train.guard
    try:
        check_settings(cell.config.train)
    except ConfigError as error:
        raise ConfigError(f"arms.{cell.arm}{which}: {error}") from error
    if "stop" in (guard.on_alarm, *guard.alarms.values()):
        raise ConfigError(
            f"arms.{cell.arm}: an alarm that stops a run would leave the arm without a result: set guard.on_alarm to "
            "warn, lower_lr or raise_kl, or checkpoint.best.patience to end an arm that gets no better"
        )


def _with_lab_files(cell: Cell) -> Cell:
    """Replace the names of the lab's files by their paths, making files that do not exist."""
    train = cell.config.train
    try:
        if cell.config.budget is not None:
            train = resolve_lab_paths(train)
        else:  # by sections: the settings of a model that is only judged need not meet the rules of training
            sections = {name: value for name, value in train if isinstance(value, Section)}
            named = {name: resolve_lab_paths(section) for name, section in sections.items()}
            update = {name: section for name, section in named.items() if section is not sections[name]}
            train = train.model_copy(update=update) if update else train
        suites = {name: _with_lab_data(name, settings) for name, settings in cell.config.suites.items()}
    except ConfigError as error:
        raise ConfigError(f"arms.{cell.arm}: {error}") from error
    return replace(cell, config=cell.config.model_copy(update={"train": train, "suites": suites}))


def _with_lab_data(name: str, settings: Tree) -> Tree:
    """Replace `lab:` names in the complete settings of a suite by the paths of the files."""
    given = validate(_settings_class(name), dict(settings))
    resolved = resolve_lab_paths(given)
    return settings if resolved is given else dump(resolved)


def read_plan(config: CompareConfig, folder: Path) -> CellPlan:
    """Read the plan whose cells are in `folder` from their cell.yaml; the base is not read again."""
    twins = [UNTUNED] if config.tune is not None and config.tune.report_default else []
    names = [START_FOLDER, *(f"{arm}{ending}" for arm in config.arms for ending in ("", *twins))]
    folders = [folder / name / f"seed-{seed}" for name in names for seed in config.seeds]
    return CellPlan(config, folder, [read_cell(path) for path in folders if (path / CELL).is_file()])


def ensure_owner(cell: Cell) -> None:
    """Write cell.yaml if there is none or it differs in settings that may change.

    Raises:
        ConfigError: as `check_owner`.
    """
    check_owner(cell)
    path = cell.folder / CELL
    if not path.is_file() or read_cell(cell.folder).config != cell.config:
        cell.folder.mkdir(parents=True, exist_ok=True)
        content = cell.config.model_dump(mode="json", exclude_unset=True)
        write_atomically(path, format_yaml(content))


def check_owner(cell: Cell) -> None:
    """Check that the cell's folder has no cell.yaml, or one with the same settings.

    Suites may differ, as they change no result that is there; so may the settings of speed and memory (`MACHINE`) and
    of checkpoints (`SAVING`).

    Raises:
        ConfigError: the folder belongs to another comparison, or to another version of the package.
    """
    if not (cell.folder / CELL).is_file():
        return
    before = read_cell(cell.folder).config.model_copy(update={"suites": cell.config.suites})
    free = (*MACHINE, *SAVING)
    keys = [key for key in differing_keys(dump(before), dump(cell.config)) if not matches(_key_of_run(key), free)]
    if keys:
        raise ConfigError(
            f"{cell.folder} was made with other settings ({', '.join(keys[:6])}{', …' if len(keys) > 6 else ''}): "
            "choose another out_dir, or remove that folder to run it again"
        )


def _key_of_run(key: str) -> str:
    """Return the key that a setting of a cell has in the configuration of a run."""
    return key.removeprefix("train.").replace("proxy.", "reward.source.", 1)


def read_cell(folder: Path) -> Cell:
    """Read the cell in `folder` from its cell.yaml.

    Raises:
        ConfigError: it is not the folder of a cell.
    """
    tree = read_yaml(folder / CELL)
    load_plugins(tree["train"])
    return Cell(folder, validate(CellConfig, tree, trains=tree.get("budget") is not None))


def locate_base(config: CompareConfig, beside: Path) -> Path:
    """Return the file of the base: as it is named, or if that does not exist, in the folder `beside`."""
    path = Path(config.base)
    return path if path.exists() or not (beside / path).exists() else beside / path


def _common(config: CompareConfig, base: Tree) -> Tree:
    """Collect the settings that all arms share: start model, reward, judge, and the lab's preference data."""
    start, source, judge, data = config.start, config.reward_source, config.judge, Tree()
    if config.lab is not None:
        lab = Path(config.lab.folder)
        start = start or str(lab / "sft")
        data = {
            "preferences": {"path": str(lab / "preferences" / "train.jsonl")},
            "eval_preferences": {"path": str(lab / "preferences" / "eval.jsonl")},
        }
    settings: Tree = {"data": data} if data else {}
    settings["schedule"] = {"steps": 1, "epochs": None}
    if config.plugins:
        settings["plugins"] = list(dict.fromkeys([*base.get("plugins", []), *config.plugins]))
    if start is not None:
        settings["policy"] = {"model": start}
    if source is not None:
        settings["reward"] = {"source": source.model_dump(mode="json", exclude_unset=True)}
        settings["reward"]["source"]["type"] = source.type
    elif config.lab is not None:
        settings["reward"] = {"source": {"type": "model", "path": str(Path(config.lab.folder) / "rm")}}
    if judge is not None:
        settings["eval"] = {"source": {"type": judge.type, **judge.model_dump(mode="json", exclude_unset=True)}}
    elif not base.get("eval", {}).get("source"):
        own = "; judge={type: environment} judges by the rewards of the environment" if base.get("environment") else ""
        raise ConfigError(
            f"judge is missing: set judge, or eval.source in the base, to a source that no arm is trained on{own}"
        )
    if not base.get("data", {}).get("eval_prompts"):
        keys = "set data.eval_prompts in the base, or shared.data.eval_prompts.path"
        raise ConfigError(f"nothing to judge on: {command_or_call(keys, 'give held-out prompts, eval_prompts=')}")
    return settings


def _cell(config: CompareConfig, base: Tree, name: str, arm: Arm, seed: int, run_folder: Path) -> CellConfig:
    arm_settings = arm.tree() if isinstance(arm, TrainedArm) else Tree()
    if isinstance(arm, TrainedArm):
        _refuse(arm, tuple(FIXED_SETTINGS), f"arms.{name}")
    run = {"name": f"{name} seed {seed}", "seed": seed, "out_dir": str(run_folder)}
    tree = merge(merge_over(base, arm_settings), {"run": run})
    is_trained = isinstance(arm, TrainedArm) and name != START_FOLDER
    n = arm.n if isinstance(arm, BestOfNArm) else None
    try:
        complete = train_config(tree, trains=is_trained)
        train = (
            train_config(_with_length(drop_unread(tree, arm_settings, complete), config, arm_settings, complete))
            if is_trained
            else complete
        )
    except ConfigError as error:
        raise ConfigError(f"arms.{name}: {error}") from error
    _check_reference(complete, name)
    proxy = complete.reward.source if complete.reward is not None else None
    if isinstance(arm, BestOfNArm) and proxy is None:
        raise ConfigError(f"arms.{name}: best_of_n picks by a reward: set reward_source")
    settings = {
        "arm": name,
        "seed": seed,
        "train": train,
        "proxy": proxy,
        "budget": config.budget if is_trained else None,
        "best_of_n": arm if isinstance(arm, BestOfNArm) else None,
        "suites": suites_of(config.suites, train, proxy, n),
    }
    return validate(CellConfig, settings, trains=is_trained)


def _check_reference(train: TrainConfig, arm: str) -> None:
    """Check that no other model than the start is the reference: every KL is measured from the start."""
    reference, start = train.reference.model, train.policy.model
    if reference not in (None, start):
        raise ConfigError(
            f"arms.{arm}: reference.model={reference}, but every KL of a comparison is to the start model ({start}): "
            "set it to that model, or leave it out, also of the base"
        )


def _refuse(overrides: Overrides, keys: tuple[str, ...], where: str) -> None:
    tree = overrides.tree()
    for key in keys:
        section, _, name = key.partition(".")
        if name in tree.get(section, {}) and not _is_no_reward(tree[section][name]):
            raise ConfigError(
                f"{where}.{key} is the same for every arm: it is set by {FIXED_SETTINGS[key]} of the comparison"
            )


def _is_no_reward(value: object) -> bool:
    """Return whether a setting is a source that scores all completions alike: an arm may do without a reward."""
    member = Source.choices().get(str(value.get("type"))) if isinstance(value, Mapping) else None
    return member is not None and member.is_constant


def _with_length(tree: Tree, config: CompareConfig, arm_settings: Tree, train: TrainConfig) -> Tree:
    """Set the number of steps that the budget allows, and the evaluation interval.

    Raises:
        ConfigError: the budget does not allow a step, or a run of unknown length has a decay.
    """
    schedule = {key: value for key, value in tree.get("schedule", {}).items() if key != "epochs"}
    steps = UNKNOWN_LENGTH
    if config.budget.completions is not None:
        size = train.completions_per_step
        steps = config.budget.completions // size
        if not steps:
            raise ConfigError(
                f"one step has {size:,} completions, more than the whole budget of {config.budget.completions:,}: "
                "raise budget.completions, or lower batch.prompts_per_step"
            )
    elif train.schedule.decay != "constant":
        raise ConfigError(
            f"schedule.decay is {train.schedule.decay}, but with a budget in {config.budget.unit} the length of a run "
            "is not known before: use schedule.decay=constant, or a budget in completions"
        )
    settings = {**tree, "schedule": {**schedule, "steps": steps}}
    eval_settings = {**config.shared.eval, **arm_settings.get("eval", {})}
    if steps != UNKNOWN_LENGTH and "every" not in eval_settings:
        settings = merge(settings, {"eval": {"every": max(1, round(steps / config.evaluations))}})
    return settings


def trained_arms(plan: CellPlan) -> dict[str, RunConfiguration]:
    """Return the runs of a comparison's trained arms, one for all its seeds."""
    return {f"arms.{cell.arm}": cell.config.train for cell in plan.cells if cell.config.budget is not None}

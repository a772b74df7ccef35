"""From a comparison to its cells: one for each arm and seed, each checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlhf.compare.suite_settings import suites_of
from rlhf.config.compare import (
    START,
    Arm,
    BestOfNArm,
    CellConfig,
    CompareConfig,
    Overrides,
    TrainedArm,
    completions_of,
)
from rlhf.config.load import merge, override, read_yaml, train_config, validate, without_unread
from rlhf.config.sections import TrainConfig
from rlhf.errors import ConfigError
from rlhf.lab.build import with_lab
from rlhf.runtime.run_folder import differing_keys, write_aside

CELL = "cell.yaml"
ENDLESS = 1_000_000  # steps of a run whose length only the budget knows

# What the comparison fixes for all arms alike, and the key of the comparison that says it.
FIXED = {
    "policy.model": "start",
    "reward.source": "reward_source",
    "eval.source": "judge",
    "data.eval_prompts": "shared.data.eval_prompts",
    "schedule.steps": "budget",
    "schedule.epochs": "budget",
}
LENGTH = ("schedule.steps", "schedule.epochs")

Tree = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One arm with one seed, and its folder."""

    folder: Path
    config: CellConfig

    @property
    def arm(self) -> str:
        """The arm's name."""
        return self.config.arm

    @property
    def seed(self) -> int:
        """The cell's seed."""
        return self.config.seed


@dataclass(frozen=True)
class Plan:
    """Every cell of a comparison: the start model's first, then seed by seed, so that a part of it compares."""

    config: CompareConfig
    folder: Path
    cells: list[Cell]

    def of(self, arm: str) -> list[Cell]:
        """The cells of an arm."""
        return [cell for cell in self.cells if cell.arm == arm]


def make_plan(config: CompareConfig, *, beside: Path) -> Plan:
    """The cells, each as a whole run that is known to be valid.

    Args:
        config: the comparison.
        beside: a folder in which `base` is looked for besides the working folder.

    Raises:
        ConfigError: an arm is not a valid run, or sets what the comparison fixes; the message names the arm.
    """
    base = merge(_base(config, beside), config.shared.tree())
    _refuse(config.shared, LENGTH, "shared")
    base = merge(base, _common(config, base))
    arms: dict[str, Arm] = {START: TrainedArm(), **config.arms}
    folder = Path(config.out_dir)
    cells = [
        Cell(folder / name / f"seed-{seed}", _cell(config, base, name, arms[name], seed))
        for names in ([START], list(config.arms))
        for seed in config.seeds
        for name in names
    ]
    return Plan(config, folder, [_with_lab_files(cell) for cell in cells])


def _with_lab_files(cell: Cell) -> Cell:
    """Put the paths of the lab's files, made where they are not there, in place of their names."""
    try:
        train = with_lab(cell.config.train)
    except ConfigError as error:
        raise ConfigError(f"arms.{cell.arm}: {error}") from error
    return cell if train is cell.config.train else replace(cell, config=cell.config.model_copy(update={"train": train}))


def read_plan(config: CompareConfig, folder: Path) -> Plan:
    """The plan whose cells lie in `folder`, as they were made: the base is not read again."""
    names = [START, *config.arms]
    folders = [folder / name / f"seed-{seed}" for name in names for seed in config.seeds]
    return Plan(config, folder, [read_cell(path) for path in folders if (path / CELL).is_file()])


def claim(cell: Cell) -> None:
    """Write cell.yaml, or see that the one that is there says the same.

    Raises:
        ConfigError: the folder belongs to another comparison.
    """
    path = cell.folder / CELL
    content = cell.config.model_dump(mode="json", exclude_unset=True)
    if path.is_file():
        keys = differing_keys(read_yaml(path), content)
        if keys:
            raise ConfigError(
                f"{cell.folder} was made with other settings ({', '.join(keys[:6])}{', …' if len(keys) > 6 else ''}): "
                "choose another out_dir, or remove that folder to run it anew"
            )
        return
    cell.folder.mkdir(parents=True, exist_ok=True)
    write_aside(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def read_cell(folder: Path) -> Cell:
    """The cell whose folder this is.

    Raises:
        ConfigError: it is none.
    """
    return Cell(folder, validate(CellConfig, read_yaml(folder / CELL)))


def _base(config: CompareConfig, beside: Path) -> Tree:
    path = Path(config.base)
    return read_yaml(path if path.exists() or not (beside / path).exists() else beside / path)


def _common(config: CompareConfig, base: Tree) -> Tree:
    """What all arms share, as settings: start, reward, judge, the lab's pairs."""
    start, source, judge, data = config.start, config.reward_source, config.judge, Tree()
    if config.lab is not None:
        lab = Path(config.lab.folder)
        start = start or str(lab / "sft")
        data = {
            "preferences": {"path": str(lab / "preferences" / "train.jsonl")},
            "eval_preferences": {"path": str(lab / "preferences" / "eval.jsonl")},
        }
    found: Tree = {"data": data} if data else {}
    found["schedule"] = {"steps": 1, "epochs": None}
    if start is not None:
        found["policy"] = {"model": start}
    if source is not None:
        found["reward"] = {"source": source.model_dump(mode="json", exclude_unset=True)}
        found["reward"]["source"]["type"] = source.type
    elif config.lab is not None:
        found["reward"] = {"source": {"type": "model", "path": str(Path(config.lab.folder) / "rm")}}
    if judge is not None:
        found["eval"] = {"source": {"type": judge.type, **judge.model_dump(mode="json", exclude_unset=True)}}
    elif not base.get("eval", {}).get("source"):
        raise ConfigError(
            "judge is missing: set judge, or eval.source in the base, to a source that no arm is trained on"
        )
    if not base.get("data", {}).get("eval_prompts"):
        raise ConfigError("nothing to judge on: set data.eval_prompts in the base, or shared.data.eval_prompts.path")
    return found


def _cell(config: CompareConfig, base: Tree, name: str, arm: Arm, seed: int) -> CellConfig:
    own = arm.tree() if isinstance(arm, TrainedArm) else Tree()
    if isinstance(arm, TrainedArm):
        _refuse(arm, tuple(FIXED), f"arms.{name}")
    out_dir = str(Path(config.out_dir) / name / f"seed-{seed}")
    tree = merge(override(base, own), {"run": {"name": f"{name} seed {seed}", "seed": seed, "out_dir": out_dir}})
    is_trained = isinstance(arm, TrainedArm) and name != START
    n = arm.n if isinstance(arm, BestOfNArm) else None
    try:
        whole = train_config(tree)
        train = (
            train_config(_with_length(without_unread(tree, own, whole), config, own, whole)) if is_trained else whole
        )
    except ConfigError as error:
        raise ConfigError(f"arms.{name}: {error}") from error
    proxy = whole.reward.source if whole.reward is not None else None
    if isinstance(arm, BestOfNArm) and proxy is None:
        raise ConfigError(f"arms.{name}: best_of_n picks by a reward: set reward_source")
    return CellConfig(
        arm=name,
        seed=seed,
        train=train,
        proxy=proxy,
        budget=config.budget if is_trained else None,
        best_of_n=arm if isinstance(arm, BestOfNArm) else None,
        suites=suites_of(config.suites, train, proxy, n),
    )


def _refuse(overrides: Overrides, keys: tuple[str, ...], where: str) -> None:
    tree = overrides.tree()
    for key in keys:
        section, _, name = key.partition(".")
        if name in tree.get(section, {}):
            raise ConfigError(f"{where}.{key} is the same for every arm: it is set by {FIXED[key]} of the comparison")


def _with_length(tree: Tree, config: CompareConfig, own: Tree, train: TrainConfig) -> Tree:
    """With the steps that the budget allows, and how often it is evaluated on the way."""
    schedule = {key: value for key, value in tree.get("schedule", {}).items() if key != "epochs"}
    steps = ENDLESS
    if config.budget.completions is not None:
        steps = max(1, config.budget.completions // completions_of(train))
    elif train.schedule.decay != "constant":
        raise ConfigError(
            f"schedule.decay is {train.schedule.decay}, but with a budget in {config.budget.unit} the length of a run "
            "is not known before: use schedule.decay=constant, or a budget in completions"
        )
    found = {**tree, "schedule": {**schedule, "steps": steps}}
    says = {**config.shared.eval, **own.get("eval", {})}
    if steps != ENDLESS and "every" not in says:
        found = merge(found, {"eval": {"every": max(1, round(steps / config.evaluations))}})
    return found

"""compare: several algorithms from one model, on one budget and under one judge, from Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from rlhf.api.inputs import Inputs, Reward, Rows, nested, new_folder
from rlhf.commands.compare import run_compare
from rlhf.comparison.plan import make_plan
from rlhf.config.files import format_yaml
from rlhf.config.load import compare_config, read_yaml
from rlhf.config.overrides import Tree, merge
from rlhf.errors import ConfigError
from rlhf.tracking.run_folder import write_atomically
from rlhf.user_code import OBJECT


@dataclass(frozen=True)
class CompareResult:
    """What a comparison left behind."""

    folder: Path
    """The folder: results, report, and one run for each arm and seed."""
    complete: bool
    """Whether every arm was run; False if the comparison was stopped (`resume=True` goes on)."""

    @cached_property
    def results(self) -> dict[str, Any]:
        """Return the content of results.json: docs/compare.md describes it."""
        content: dict[str, Any] = json.loads((self.folder / "results.json").read_text(encoding="utf-8"))
        return content

    @cached_property
    def table(self) -> pd.DataFrame:
        """Return one row for each held-out prompt, arm and seed: the scores, KL and lengths."""
        return pd.read_parquet(self.folder / "results.parquet")

    @property
    def report(self) -> Path:
        """Return the path of the report: one HTML page."""
        return self.folder / "report.html"


def compare(
    model: Any,
    arms: Iterable[str] | Mapping[str, str | Mapping[str, Any]],
    *,
    completions: int | None = None,
    budget: Mapping[str, float] | None = None,
    prompts: Rows | None = None,
    eval_prompts: Rows | None = None,
    preferences: Rows | None = None,
    demonstrations: Rows | None = None,
    reward: Reward | None = None,
    judge: Reward | None = None,
    tokenizer: Any = None,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int = 1,
    tune: int | Mapping[str, Any] | None = None,
    config: str | Path | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> CompareResult:
    """Train several algorithms from one model on one budget, and judge them alike.

        rlhf.compare(model, ["ppo", "grpo", "dpo"], completions=1024, prompts=..., preferences=..., reward=...)

    Args:
        model: as in `train`.
        arms: presets; or names with a preset or settings each, such as {"best_of_n": {"type": "best_of_n", "n": 4}}.
        completions: the budget of each arm: completions sampled, or read from data.
        budget: another budget instead, such as {"tokens": 100_000}.
        prompts: what online arms sample for.
        eval_prompts: held-out prompts, on which all arms are judged.
        preferences: pairs for the arms that learn from pairs.
        demonstrations: rows for arms that run SFT.
        reward: the training reward, as in `train`. Arms run in processes of their own: a function has to be in a module
            or a .py file.
        judge: the reward that decides; None: the training reward.
        tokenizer: as in `train`.
        seeds: each arm is run once for each.
        jobs: arms that run at a time.
        tune: the trials that each arm is tuned with, or the settings of `tune` in a file; None: arms run as written.
        config: a base configuration of `rlhf train`, over which the arguments go.
        folder: the comparison's folder (default: runs/compare); taken ones as in `train`.
        resume: continue the comparison in `folder`.
        quiet: print nothing.
        **settings: settings of `rlhf train` for all arms.

    Raises:
        UserError: a setting, a model, the data or a reward is wrong. An arm that fails is not an error.
    """
    scorer = reward if judge is None else judge
    if scorer is None:
        raise ConfigError("a comparison needs a reward or a judge: the score that decides")
    wanted = Path(folder or "runs/compare").expanduser()
    inputs = Inputs(wanted if resume else new_folder(wanted), resume)
    sections = {
        "prompts": (prompts, "prompt"),
        "eval_prompts": (eval_prompts, "prompt"),
        "preferences": (preferences, None),
        "sft": (demonstrations, "text"),
    }
    data = {
        name: inputs.rows(name, rows, text=text)  # type: ignore[arg-type]
        for name, (rows, text) in sections.items()
        if rows is not None
    }
    base: Tree = {"algorithm": {"preset": "grpo"}, "policy": inputs.model(model, tokenizer), "data": data}
    if reward is not None:
        base["reward"] = {"source": _importable(inputs.reward(reward))}
    base = merge(merge(read_yaml(config) if config is not None else {}, base), nested(settings))
    comparison = compare_config(
        {
            "base": str(inputs.folder / "base.yaml"),
            "out_dir": str(inputs.folder),
            "judge": _importable(inputs.reward(scorer, "judge")),
            "budget": dict(budget) if budget is not None else {"completions": completions},
            "seeds": list(seeds),
            "jobs": jobs,
            "tune": dict(tune) if isinstance(tune, Mapping) else tune,
            "arms": _arms(arms),
        }
    )
    inputs.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(inputs.folder / "base.yaml", format_yaml(base))
    inputs.write()
    make_plan(comparison, beside=inputs.folder)
    complete = run_compare(comparison, beside=inputs.folder, console=Console(quiet=quiet))
    return CompareResult(inputs.folder, complete)


def _arms(arms: Iterable[str] | Mapping[str, str | Mapping[str, Any]]) -> Tree:
    named = arms if isinstance(arms, Mapping) else {name: name for name in arms}
    return {name: _arm(arm) if isinstance(arm, str) else dict(arm) for name, arm in named.items()}


def _arm(preset: str) -> Tree:
    return {"type": "best_of_n"} if preset == "best_of_n" else {"algorithm": {"preset": preset}}


def _importable(source: Tree) -> Tree:
    """Check that another process can import the functions of a source.

    Raises:
        ConfigError: one is a lambda, or defined in a notebook.
    """
    for member in [source, *source.get("sources", [])]:
        if str(member.get("target", "")).startswith(OBJECT):
            raise ConfigError(
                "rlhf.compare runs each arm in a process of its own, which cannot have a lambda or a function of a "
                "notebook: put the function into a .py file and give its path, reward='my_reward.py:score'"
            )
    return source

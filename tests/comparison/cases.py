"""Comparisons small enough for a test: tiny models, and cells run in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from runs import ppo_tree, quiet, write_rows
from trials import tried_once

from rlhf.api.comparing import run_compare
from rlhf.comparison.plan import Cell, CellPlan, plan_cells
from rlhf.comparison.scheduler import CellOutcome
from rlhf.comparison.trial import BY_VALUES, record_failure, run_cell
from rlhf.config.files import merge
from rlhf.config.load import compare_config
from rlhf.errors import UserError

PAIRS = [
    {"prompt": f"{c} {n}", "chosen": " good one", "rejected": " bad two"}
    for c in ("red", "blue")
    for n in ("one", "two")
]
GROUPS = {"sampling": {"completions_per_prompt": 4}, "batch": {"prompts_per_step": 4}}


def compare_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """ppo, grpo, dpo and best-of-n, two seeds, four steps of sixteen completions each."""
    base = ppo_tree(folder)
    judge = base["reward"]["source"]
    base["eval"]["source"] = {**judge, "target": judge["target"].replace("count_good", "count_words")}
    (folder / "base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    pairs = str(write_rows(folder / "pairs.jsonl", PAIRS * 4))
    tree: dict[str, Any] = {
        "name": "tiny",
        "base": str(folder / "base.yaml"),
        "out_dir": str(folder / "compare"),
        "seeds": [0, 1],
        "budget": {"completions": 64},
        "evaluations": 2,
        "shared": {"data": {"preferences": {"path": pairs}}},
        "arms": {
            "ppo": {},
            "grpo": {"algorithm": {"preset": "grpo"}, **GROUPS},
            "dpo": {"algorithm": {"preset": "dpo"}, "batch": {"prompts_per_step": 8}},
            "best_of_n": {"type": "best_of_n", "n": 2, "samples": 4},
        },
    }
    return merge(tree, changes)


def failing_arm(folder: Path) -> dict[str, Any]:
    """An arm that passes every check and fails in its first step, by a loss that raises."""
    body = "def loss(logprobs, old_logprobs, advantages, mask):\n    raise ValueError('no such thing')\n"
    (folder / "failing.py").write_text(body)
    section = {"type": "function", "target": f"{folder / 'failing.py'}:loss"}
    return {"algorithm": {"preset": "grpo", "policy_loss": section}, **GROUPS}


def plan_of(tree: dict[str, Any]) -> CellPlan:
    """Its cells."""
    return plan_cells(compare_config(tree), beside=Path())


def here(cell: Cell) -> CellOutcome:
    """The cell in this process."""
    try:
        with tried_once():
            return "done" if run_cell(cell, quiet()) else "interrupted"
    except UserError as error:
        record_failure(cell.folder, str(error), by_values=isinstance(error, BY_VALUES))
        return "failed"


@dataclass(frozen=True)
class Ended:
    """A cell that ran when it was started."""

    result: CellOutcome

    def outcome(self) -> CellOutcome:
        return self.result

    def stop(self) -> None:
        raise AssertionError("it does not run any more")

    kill = stop


def at_once(cell: Cell, place: int) -> Ended:
    """The cell in this process, to its end."""
    return Ended(here(cell))


def compared(tree: dict[str, Any]) -> bool:
    """The whole comparison in this process; False if it was interrupted."""
    return run_compare(compare_config(tree), beside=Path(), start=at_once)

"""A comparison of many arms that nobody ran: made-up judgments and curves, in the form of real ones."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cases import compare_tree, plan_of
from torch import Tensor

from rlhf.comparison.aggregate import CellResult, summarize
from rlhf.comparison.costs import Costs
from rlhf.comparison.plan import CellPlan
from rlhf.comparison.results import MEASURES, ComparisonResults, CurvePoint, Evaluation, Measures
from rlhf.comparison.trial import Judgment
from rlhf.config.compare import START_FOLDER
from rlhf.evaluation.frontier import kl_bound
from rlhf.evaluation.win_rate import LengthControlled, bootstrap_crossed

ARMS = (
    *("ppo", "grpo", "dpo", "best_of_n", "rloo", "reinforce_plus_plus", "remax", "dr_grpo", "dapo", "gspo", "cispo"),
    *("ppo_penalty", "reinforce", "a2c", "ipo", "ipo_per_token", "cdpo", "robust_dpo", "simpo", "kto", "orpo"),
    *("slic", "hinge", "online_dpo", "rejection_sampling"),
)
STEPS, PROMPTS = 10, 24
TEXT = (
    "The waiter was polite and the soup came hot. The bread was stale, though, and the music was far too loud for a "
    "quiet evening, so I will come back at noon."
)


def many(folder: Path, *, count: int = 25, seeds: int = 3) -> tuple[CellPlan, ComparisonResults, list[CellResult]]:
    """Plan, results and cells of `count` arms; the last arm failed, the one before games its reward."""
    tree = compare_tree(folder, seeds=list(range(seeds)), budget={"completions": 64 * STEPS})
    names = ARMS[:count]
    tree["arms"] = {name: tree["arms"].get(name, {}) for name in names}
    plan = plan_of(tree)
    cells = [_cell_result(plan, number, names) for number in range(len(plan.cells))]
    with patch("rlhf.comparison.aggregate.length_controlled_win_rate", _without_a_fit):
        return plan, summarize(plan, cells), cells


def _without_a_fit(wins: Tensor, longer: Tensor) -> LengthControlled:
    """The fit for each of 300 pairs takes long, and nothing here reads it."""
    return LengthControlled(**asdict(bootstrap_crossed(wins)), length_effect=0.0, extrapolated=False)


def _cell_result(plan: CellPlan, number: int, names: tuple[str, ...]) -> CellResult:
    cell = plan.cells[number]
    draw = random.Random(f"{cell.arm} {cell.seed}")
    place = names.index(cell.arm) if cell.arm != START_FOLDER else None
    if place == len(names) - 1 and len(names) > 4:
        return CellResult(
            cell=cell,
            judged=None,
            error="the process was ended by SIGKILL",
            evaluations=[],
            costs=None,
            suites={},
            peak_memory_mb=None,
        )
    best = 0.0 if place is None else 2.2 - 0.07 * place
    gaming = place == len(names) - 2
    rows = [_row(draw, best, row) for row in range(PROMPTS)]
    mean = sum(row["score"] for row in rows) / PROMPTS
    metrics = _measures(mean, mean * 0.9, 0.0 if place is None else 6.0 + place / 5, draw)
    costs = Costs(
        completions=64 * STEPS, generated_tokens=9000, trained_tokens=30000, flops=3e10, seconds=20.0 + number
    )
    evaluations = []
    if place is not None and cell.config.best_of_n is None:
        for step in range(STEPS + 1):
            up = 1 - math.exp(-3 * step / STEPS)
            down = 1.6 * max(0.0, step / STEPS - 0.5) if gaming else 0.0
            measures = _measures(best * up - down + 0.1 * draw.random(), best * up, (6 + place / 5) * up, draw)
            spent = Costs(completions=64 * step, generated_tokens=900 * step, flops=3e9 * step, seconds=2.0 * step)
            row = Evaluation(
                arm=cell.arm, seed=cell.seed, step=step, measures=Measures.of_metrics(measures), costs=spent
            )
            evaluations.append(row)
    if cell.config.best_of_n is not None:
        cell.folder.mkdir(parents=True, exist_ok=True)
        curve = [
            asdict(CurvePoint(n=float(n), kl=kl_bound(n), score=0.4 * math.log(n), proxy=0.5 * math.log(n)))
            for n in (1, 2, 4)
        ]
        (cell.folder / "draws.json").write_text(json.dumps({"curve": curve}))
    return CellResult(
        cell=cell,
        judged=Judgment(metrics, rows),
        error=None,
        evaluations=evaluations,
        costs=costs,
        suites={},
        peak_memory_mb=None,
    )


def _measures(score: float, proxy: float, kl: float, draw: random.Random) -> dict[str, float | None]:
    known = {
        "eval/score": score,
        "eval/proxy": proxy,
        "eval/kl": kl,
        "eval/length": 30 + 5 * draw.random(),
        "eval/distinct_2": 0.6 + 0.1 * draw.random(),
        "eval/finished": 0.99,
        "eval/score_std": 1.0,
    }
    return {key: known.get(key) for key in MEASURES.values()}


def _row(draw: random.Random, best: float, row: int) -> dict[str, Any]:
    text = TEXT[: draw.randint(40, len(TEXT))]
    return {
        **{"row": row, "prompt": f"A review of the restaurant, number {row}:", "completion": " " + text},
        **{"score": best + draw.gauss(0, 1), "proxy": best + draw.gauss(0, 1), "kl": 5 + draw.random()},
        **{"kl_exact": 5.0, "length": len(text.split()), "finished": True},
    }

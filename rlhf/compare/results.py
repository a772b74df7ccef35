"""Summarize a comparison from its folders alone: results.json and results.parquet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor

from rlhf.compare.costs import COSTS, Costs
from rlhf.compare.plan import Cell, Plan
from rlhf.compare.scheduler import failure_of
from rlhf.compare.trial import Judgment, read_curve, read_suites, summarize_suites
from rlhf.config.compare import START_FOLDER, BestOfNArm
from rlhf.evaluation.frontier import score_at_kl
from rlhf.evaluation.win_rate import Interval, bootstrap_crossed, length_controlled_win_rate, outcomes
from rlhf.tracking.run_folder import RunFolder, write_atomically
from rlhf.tracking.trackers import read_jsonl, to_json

SCHEMA = 1
RESULTS, TABLE = "results.json", "results.parquet"

MEASURES = {  # of a final model: name in results.json -> name in the metrics
    "score": "eval/score",
    "score_std": "eval/score_std",
    "proxy": "eval/proxy",
    "kl": "eval/kl",
    "kl_se": "eval/kl_se",
    "kl_exact": "eval/kl_exact",
    "kl_exact_se": "eval/kl_exact_se",
    "reference_perplexity": "eval/reference_perplexity",
    "length": "eval/length",
    "finished": "eval/finished",
    "distinct_1": "eval/distinct_1",
    "distinct_2": "eval/distinct_2",
    "distinct_3": "eval/distinct_3",
    "repetition": "eval/repetition",
    "entropy": "eval/entropy",
}

KLS = ("kl", "kl_se", "kl_exact", "kl_exact_se")

Json = dict[str, Any]


@dataclass(frozen=True)
class CellResult:
    """A cell and the content of its folder."""

    cell: Cell
    judged: Judgment | None
    error: str | None
    evaluations: list[Json]  # during training, in order; each with the costs so far
    costs: Costs | None
    suites: dict[str, Json]
    peak_memory_mb: float | None  # of the process that trained; None if nothing was trained

    @property
    def status(self) -> str:
        """Return the status of the cell: done, failed or unfinished."""
        return "done" if self.judged is not None else "failed" if self.error is not None else "unfinished"


def read_cells(plan: Plan) -> list[CellResult]:
    """Read the folder of every cell."""
    return [_read(cell) for cell in plan.cells]


def summarize(plan: Plan, cells: Sequence[CellResult]) -> Json:
    """Compute the content of results.json; docs/compare.md defines each key."""
    config = plan.config
    start = {
        result.cell.seed: result.judged
        for result in cells
        if result.cell.arm == START_FOLDER and result.judged is not None
    }
    start_suites = {
        result.cell.seed: result.suites
        for result in cells
        if result.cell.arm == START_FOLDER and result.judged is not None
    }
    assert start, "the start model is judged before any arm"
    spread = fmean(float(judged.column("score").std(correction=0)) for judged in start.values())
    arms = {name: [result for result in cells if result.cell.arm == name] for name in config.arms}
    level = config.equal_kl or _common_kl(arms)
    proxy = cells[0].cell.config.proxy
    judge = cells[0].cell.config.train.eval.source
    assert judge is not None
    return {
        "schema": SCHEMA,
        "name": config.name,
        "start": cells[0].cell.config.train.policy.model,
        "judge": judge.model_dump(mode="json"),
        "reward_source": proxy.model_dump(mode="json") if proxy is not None else None,
        "judge_is_trained_on": judge == proxy,
        "budget": {"unit": config.budget.unit, "limit": config.budget.limit},
        "seeds": list(config.seeds),
        "prompts": len(next(iter(start.values())).rows),
        "start_model": {
            **_measures([judged.metrics for judged in start.values()]),
            "spread": spread,
            "suites": summarize_suites(list(start_suites.values()), list(start_suites.values())),
        },
        "equal_kl": level,
        "arms": {
            name: _arm(name, arm_cells, start, spread, level) | {"suites": _suites(arm_cells, start_suites)}
            for name, arm_cells in arms.items()
        },
        "win_rates": _win_rates(arms),
        "evaluations": [row for result in cells for row in result.evaluations],
        "best_of_n": {name: curve for name, arm_cells in arms.items() if (curve := _curve(arm_cells))},
    }


def write_results(plan: Plan, results: Json, cells: Sequence[CellResult]) -> None:
    """Write results.json, and results.parquet with one row for each evaluation, final model and n of best-of-n."""
    write_atomically(plan.folder / RESULTS, json.dumps(to_json(results), indent=1, ensure_ascii=False) + "\n")
    columns = ("kind", "arm", "seed", "step", "n", *MEASURES, *Costs().record())
    rows = [{name: to_json(row.get(name)) for name in columns} for row in _table_rows(results, cells)]
    floats = set(columns) - {"kind", "arm", "seed", "step"}
    table = {
        name: [float(row[name]) if name in floats and row[name] is not None else row[name] for row in rows]
        for name in columns
    }
    temporary = plan.folder / f".{TABLE}.new"
    Dataset.from_dict(table).to_parquet(str(temporary))
    temporary.replace(plan.folder / TABLE)


def scores_of(cells: Sequence[CellResult], seeds: Sequence[int]) -> Float[Tensor, "S P"]:
    """Return the judge's score of every held-out prompt, one row for each seed."""
    return _column(cells, seeds, "score")


def _column(cells: Sequence[CellResult], seeds: Sequence[int], name: str) -> Float[Tensor, "S P"]:
    by_seed = {result.cell.seed: result.judged for result in cells if result.judged is not None}
    return torch.stack([by_seed[seed].column(name) for seed in seeds])


def common_seeds(*arms: Sequence[CellResult]) -> list[int]:
    """Return the seeds that all arms have finished."""
    done = [{result.cell.seed for result in cells if result.judged is not None} for cells in arms]
    return sorted(set.intersection(*done)) if done else []


def _read(cell: Cell) -> CellResult:
    costs = {row["step"]: row for row in read_jsonl(cell.folder / COSTS)}
    judged = Judgment.read(cell.folder)
    rows = []
    for metrics in RunFolder(cell.folder).read_metrics() if cell.config.budget is not None else []:
        if metrics.get("eval/score") is not None:
            spent = costs.get(metrics["step"], Costs().record())
            measures = {name: metrics.get(key) for name, key in MEASURES.items()}
            spent = {key: value for key, value in spent.items() if key != "step"}
            rows.append({"arm": cell.arm, "seed": cell.seed, "step": metrics["step"], **measures, **spent})
    return CellResult(
        cell=cell,
        judged=judged,
        error=failure_of(cell.folder),
        evaluations=with_known_kl(rows, judged.metrics if judged is not None else {}),
        costs=Costs.of(costs[max(costs)]) if costs else None,
        suites=read_suites(cell.folder),
        peak_memory_mb=max((row["peak_memory_mb"] for row in RunFolder(cell.folder).read_timings()), default=None),
    )


def with_known_kl(evaluations: list[Json], judged: Mapping[str, float | None]) -> list[Json]:
    """Fill in KLs that a run did not measure: 0 at its start, and at its end that of the judged model.

    Args:
        evaluations: of one run, in order.
        judged: the metrics of its final model; empty if it has not been judged.
    """
    if not evaluations:
        return evaluations
    first, *others = evaluations
    if first["step"] == 0 and first["kl"] is None:
        first = {**first, **dict.fromkeys(KLS, 0.0)}
    if others and others[-1]["kl"] is None:
        others[-1] = {**others[-1], **{name: judged.get(MEASURES[name]) for name in KLS}}
    return [first, *others]


def _arm(
    name: str, cells: Sequence[CellResult], start: Mapping[int, Judgment], spread: float, level: float | None
) -> Json:
    done = [result for result in cells if result.judged is not None]
    per_seed = [
        {
            "seed": result.cell.seed,
            "status": result.status,
            "error": result.error,
            "folder": f"{name}/seed-{result.cell.seed}",
            **_measures([result.judged.metrics] if result.judged is not None else []),
            "costs": result.costs.record() if result.costs is not None else None,
        }
        for result in cells
    ]
    arm_config = cells[0].cell.config
    algorithm = arm_config.train.algorithm
    summary: Json = {
        "type": "best_of_n" if arm_config.best_of_n is not None else "train",
        "preset": None if arm_config.best_of_n is not None else algorithm.preset,
        "n": arm_config.best_of_n.n if isinstance(arm_config.best_of_n, BestOfNArm) else None,
        "kl_is_bound": arm_config.best_of_n is not None,
        "status": _status(cells),
        "peak_memory_mb": max(
            (result.peak_memory_mb for result in cells if result.peak_memory_mb is not None), default=None
        ),
        "seeds": per_seed,
    }
    if not done:
        return summary
    seeds = [result.cell.seed for result in done]
    finals = scores_of(done, seeds)
    starts = torch.stack([start[seed].column("score") for seed in seeds])
    longer = _column(done, seeds, "length") - torch.stack([start[seed].column("length") for seed in seeds])
    gain = bootstrap_crossed(finals - starts)
    costs = [result.costs.record() for result in done if result.costs is not None]
    return summary | {
        **_measures([result.judged.metrics for result in done if result.judged is not None]),
        "gain": _interval(gain),
        "gain_in_std": {key: value / spread for key, value in _interval(gain).items()} if spread else None,
        "win_rate_over_start": _interval(bootstrap_crossed(outcomes(finals, starts))),
        "length_controlled_win_rate_over_start": _at_equal_length(outcomes(finals, starts), longer),
        "at_equal_kl": _at_equal_kl(done, level),
        "costs": {key: fmean(row[key] for row in costs) for key in costs[0]} if costs else None,
    }


def _suites(cells: Sequence[CellResult], start: Mapping[int, Mapping[str, Json]]) -> Json:
    done = [result for result in cells if result.judged is not None]
    return summarize_suites([result.suites for result in done], [start[result.cell.seed] for result in done])


def _status(cells: Sequence[CellResult]) -> str:
    statuses = {result.status for result in cells}
    return statuses.pop() if len(statuses) == 1 else "partly done" if "done" in statuses else "failed"


def _measures(metrics: Sequence[Mapping[str, float | None]]) -> Json:
    """Compute the means over seeds; null for what was not measured."""
    means: Json = {}
    for name, key in MEASURES.items():
        values = [value for row in metrics if (value := row.get(key)) is not None]
        means[name] = fmean(values) if values else None
    return means


def _points(result: CellResult) -> list[tuple[float, float]]:
    """Return the (KL, score) points of a cell: its evaluations, or best-of-n's curve."""
    if result.cell.config.best_of_n is not None:
        return [(point["kl"], point["score"]) for point in read_curve(result.cell.folder)]
    return [(row["kl"], row["score"]) for row in result.evaluations if row["kl"] is not None]


def _common_kl(arms: Mapping[str, Sequence[CellResult]]) -> float | None:
    """Return the highest KL in nats that every finished cell has reached; None if there is none above 0."""
    reached = [
        max(kl for kl, _ in points)
        for cells in arms.values()
        for result in cells
        if result.judged is not None and (points := _points(result))
    ]
    return min(reached) if reached and min(reached) > 0 else None


def _at_equal_kl(done: Sequence[CellResult], level: float | None) -> Json | None:
    if level is None:
        return None
    values = [score_at_kl(_points(result), level) for result in done]
    reached = [value for value in values if value is not None]
    return {
        "kl": level,
        "score": fmean(reached) if reached else None,
        "low": min(reached) if reached else None,
        "high": max(reached) if reached else None,
        "seeds": len(reached),
    }


def _win_rates(arms: Mapping[str, Sequence[CellResult]]) -> list[Json]:
    rates: dict[tuple[str, str], Json] = {}
    for a in arms:
        for b in arms:
            seeds = common_seeds(arms[a], arms[b])
            if a != b and seeds:
                left, right = scores_of(arms[a], seeds), scores_of(arms[b], seeds)
                longer = _column(arms[a], seeds, "length") - _column(arms[b], seeds, "length")
                wins, other = outcomes(left, right), rates.get((b, a))
                rates[a, b] = {
                    **{"a": a, "b": b, **_interval(bootstrap_crossed(wins))},
                    "length_controlled": _swapped(other) if other is not None else _at_equal_length(wins, longer),
                    "difference": _interval(bootstrap_crossed(left - right)),
                    "seeds": len(seeds),
                }
    return list(rates.values())


def _at_equal_length(wins: Float[Tensor, "S P"], longer: Float[Tensor, "S P"]) -> Json:
    return asdict(length_controlled_win_rate(wins, longer))


def _swapped(row: Json) -> Json:
    """Compute the length-controlled win rate of the same pair with its sides exchanged."""
    rate = row["length_controlled"]
    return {**rate, "value": 1 - rate["value"], "low": 1 - rate["high"], "high": 1 - rate["low"]}


def _interval(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _curve(cells: Sequence[CellResult]) -> list[dict[str, float]]:
    """Compute best-of-n's curve, the mean over seeds."""
    curves = [curve for result in cells if (curve := read_curve(result.cell.folder))]
    return [{key: fmean(point[key] for point in points) for key in points[0]} for points in zip(*curves, strict=False)]


def _table_rows(results: Json, cells: Sequence[CellResult]) -> list[Json]:
    rows = [{"kind": "evaluation", **row} for row in results["evaluations"]]
    for result in cells:
        if result.judged is not None:
            costs = (result.costs or Costs()).record()
            measures = _measures([result.judged.metrics])
            rows.append({"kind": "final", "arm": result.cell.arm, "seed": result.cell.seed, **measures, **costs})
        for point in read_curve(result.cell.folder):
            rows.append({"kind": "best_of_n", "arm": result.cell.arm, "seed": result.cell.seed, **point})
    return rows

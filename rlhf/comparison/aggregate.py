"""Compute the results of a comparison from its folders alone: results.json and results.parquet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor

from rlhf.comparison.costs import COSTS, Costs
from rlhf.comparison.inputs import FIXED, Readers, code_notes, first_readers, other_inputs, read_inputs
from rlhf.comparison.pairs import PAIRS
from rlhf.comparison.plan import Cell, CellPlan
from rlhf.comparison.results import (
    MEASURES,
    ArmBudget,
    ArmResult,
    ArmWinRate,
    ComparisonResults,
    CurvePoint,
    EqualKl,
    Evaluation,
    FinalModels,
    MeanCosts,
    Measures,
    SeedResult,
    StartModel,
    Status,
    SuiteDifference,
    Suites,
)
from rlhf.comparison.trial import (
    Judgment,
    SuiteScores,
    failure_of,
    paired_difference,
    read_curve,
    read_suites,
    suite_file,
    summarize_suites,
    unmeasured_suites,
)
from rlhf.comparison.tuning.run import read_tuning
from rlhf.config.compare import START_FOLDER, CellConfig, CompareConfig
from rlhf.evaluation.frontier import score_at_kl
from rlhf.evaluation.win_rate import (
    Interval,
    LengthControlled,
    bootstrap_crossed,
    length_controlled_win_rate,
    outcomes,
)
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import read_jsonl, to_json

TABLE = "results.parquet"
KLS = ("kl", "kl_se", "kl_exact", "kl_exact_se")


@dataclass(frozen=True)
class CellResult:
    """A cell and the content of its folder."""

    cell: Cell
    judged: Judgment | None
    error: str | None
    evaluations: list[Evaluation]  # during training, in order
    costs: Costs | None
    suites: dict[str, SuiteScores]
    peak_memory_mb: float | None  # of the process that trained; None if nothing was trained
    notes: tuple[str, ...] = ()  # caveats for the reader

    @property
    def status(self) -> Status:
        """Return the status of the cell: done, failed or unfinished."""
        return "failed" if self.error is not None else "done" if self.judged is not None else "unfinished"


def read_cells(plan: CellPlan) -> list[CellResult]:
    """Read the folder of every cell; one that cannot be compared with the start model has no judgment."""
    pairs = {PAIRS} if plan.config.pairs is not None else set()
    return comparable(same_inputs([_read(cell, pairs) for cell in plan.cells]))


def same_inputs(cells: Sequence[CellResult]) -> list[CellResult]:
    """Drop the judgments of cells whose weights or rows differ from the first cell's."""
    first = first_readers(result.cell for result in cells if result.judged is not None)
    return [_with_same_inputs(result, first) for result in cells]


def _with_same_inputs(result: CellResult, first: Readers) -> CellResult:
    if result.judged is None:
        return result
    for kind, path, label in other_inputs(read_inputs(result.cell.folder), first):
        if kind != "code":
            error = (
                f"{FIXED[kind].format(path)} were not the same as for {label}, so the two cannot be compared: choose "
                "another out_dir, or remove this folder to run it again"
            )
            return replace(result, judged=None, error=error)
    return result


def comparable(cells: Sequence[CellResult]) -> list[CellResult]:
    """Take away the judgments that cannot be paired with one of the start model, prompt by prompt.

    If the start model is not judged with the same seed yet, the cell is unfinished. If the cell was judged on
    other prompts, it has failed: an arm with its own sampling.max_new_tokens can leave out other prompts as too long.
    """
    starts = {result.cell.seed: result.judged for result in cells if result.cell.arm == START_FOLDER}
    return [_comparable(result, starts.get(result.cell.seed)) for result in cells]


def _comparable(result: CellResult, start: Judgment | None) -> CellResult:
    if result.judged is None:
        return result
    if start is None:
        return replace(result, judged=None)
    if result.judged.prompts == start.prompts:
        if (result.judged.column("score") - start.column("score")).isnan().all():
            error = "there is no held-out prompt on which a verifier of the judge applies to it and to the start model"
            return replace(result, judged=None, error=error)
        return result
    shared = sum(prompt == other for prompt, other in zip(result.judged.prompts, start.prompts, strict=False))
    error = (
        f"it read {len(result.judged.rows)} held-out prompts and the start model {len(start.rows)}, of which {shared} "
        "are the same row by row, so the two cannot be compared: if one left out prompts as too long, set "
        "data.eval_prompts.max_prompt_tokens in shared, and choose another out_dir"
    )
    return replace(result, judged=None, error=error)


def summarize(plan: CellPlan, cells: Sequence[CellResult]) -> ComparisonResults:
    """Compute the results of a comparison whose start model has been judged."""
    config, cell = plan.config, cells[0].cell.config
    start = _finished(cells, START_FOLDER)
    assert start, "the start model is judged before any arm"
    names = dict.fromkeys(result.cell.arm for result in cells if result.cell.arm != START_FOLDER)
    arms = {name: [result for result in cells if result.cell.arm == name] for name in names}
    level = config.equal_kl or _common_kl(arms)
    judge = cell.train.eval.source
    assert judge is not None
    start_model = _start_model(start)
    return ComparisonResults(
        name=config.name,
        start=cell.train.policy.model,
        judge=judge,
        reward_source=cell.proxy,
        judge_is_trained_on=judge == cell.proxy,
        budget=ArmBudget(unit=config.budget.unit, limit=config.budget.limit),
        seeds=tuple(config.seeds),
        prompts=len(_judgments(start)[0].rows),
        start_model=start_model,
        equal_kl=level,
        arms={name: _arm(name, arm_cells, start, start_model.spread, level) for name, arm_cells in arms.items()},
        win_rates=_win_rates(arms),
        suite_differences=tuple(_suite_differences(arms, start_model.suites)),
        evaluations=tuple(evaluation for result in cells for evaluation in result.evaluations),
        best_of_n={name: curve for name, arm_cells in arms.items() if (curve := _curve(arm_cells))},
        notes=(
            *(note for result in cells for note in result.notes),
            *code_notes([result.cell for result in cells if result.judged is not None]),
            *missing_suite_notes(cells),
            *missing_opponent_notes(config, cells),
            *sampling_notes(cells),
            *length_notes(cells),
        ),
        tuning=read_tuning(config, plan.folder, arms, [row["prompt"] for row in _judgments(start)[0].rows]),
    )


def missing_suite_notes(cells: Sequence[CellResult]) -> list[str]:
    """Return a note for each suite that judged cells have no result of: the suite's table leaves their arms out."""
    missing: dict[str, list[str]] = {}
    for result in cells:
        if result.judged is not None:
            for name in result.cell.config.suites:
                if not suite_file(result.cell.folder, name).is_file():
                    missing.setdefault(name, []).append(result.cell.label)
    return [
        f"{name} has no result for {'; '.join(labels)}. Its table shows only models with a result for every seed, "
        "beside the start model's. The same command measures it."
        for name, labels in missing.items()
    ]


def missing_opponent_notes(config: CompareConfig, cells: Sequence[CellResult]) -> list[str]:
    """Return a note of the opponents of `pairs` that no model was judged against, if there are any."""
    judged = {(result.cell.arm, result.cell.seed) for result in cells if result.judged is not None}
    against = [] if config.pairs is None else config.pairs.against
    missing = [name for name in against if not {(name, seed) for seed in config.seeds} <= judged]
    return [f"pairs: nothing was judged against {', '.join(missing)}: a seed of it is missing."] if missing else []


def sampling_notes(cells: Sequence[CellResult]) -> list[str]:
    """Return a note for each setting by which the judged completions of some models were sampled otherwise."""
    judged, notes = [result.cell for result in cells if result.judged is not None], []
    for key in ("temperature", "top_p", "top_k", "max_new_tokens"):
        arms: dict[str, dict[str, None]] = {}  # value -> arms
        for cell in judged:
            arms.setdefault(str(getattr(cell.config.train.sampling, key)), {})[cell.arm] = None
        if len(arms) > 1:
            values = "; ".join(f"{value} ({', '.join(names)})" for value, names in arms.items())
            notes.append(
                f"sampling.{key} of the judged completions: {values}. For one value set shared.sampling.{key}."
            )
    return notes


def length_notes(cells: Sequence[CellResult]) -> list[str]:
    """Return a note for each suite in which some models may answer at greater length than others."""
    lengths: dict[str, dict[int, dict[str, None]]] = {}  # suite -> sampling.max_new_tokens -> arms
    for result in cells:
        for name in result.suites.keys() & result.cell.config.suites.keys():
            if "truncated" not in result.suites[name].figures:  # the suite reads probabilities, and nothing is written
                continue
            length = result.cell.config.suites[name]["sampling"]["max_new_tokens"]
            lengths.setdefault(name, {}).setdefault(length, {})[result.cell.arm] = None
    return [
        f"{name}: answers have at most {', '.join(_length_of(arms, n) for n, arms in sorted(of.items()))}. For one "
        f"length set suites.{name}.sampling.max_new_tokens."
        for name, of in sorted(lengths.items())
        if len(of) > 1
    ]


def _length_of(arms: Iterable[str], tokens: int) -> str:
    return f"{tokens:,} tokens ({', '.join(arms)})"


def write_results(plan: CellPlan, results: ComparisonResults, cells: Sequence[CellResult]) -> None:
    """Write results.json, and results.parquet with one row for each evaluation, final model and n of best-of-n."""
    results.write(plan.folder)
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


def _finished(cells: Sequence[CellResult], arm: str) -> list[CellResult]:
    return [result for result in cells if result.cell.arm == arm and result.judged is not None]


def _judgments(cells: Sequence[CellResult]) -> list[Judgment]:
    return [result.judged for result in cells if result.judged is not None]


def _read(cell: Cell, pairs: Set[str]) -> CellResult:
    """Read the folder of a cell, with the results of its suites that have its settings, and of `pairs`."""
    costs = {row["step"]: Costs.of(row) for row in read_jsonl(cell.folder / COSTS)}
    judged = Judgment.read(cell.folder)
    metrics = RunFolder(cell.folder).read_metrics() if cell.config.budget is not None else []
    evaluations = _evaluations(cell, metrics, costs)
    unmeasured = unmeasured_suites(cell.config, cell.folder)
    reported = (cell.config.suites.keys() - unmeasured.keys()) | pairs
    return CellResult(
        cell=cell,
        judged=judged,
        error=failure_of(cell.folder),
        evaluations=with_known_kl(evaluations, judged.metrics if judged is not None else {}, _best_step(cell, metrics)),
        costs=costs[max(costs)] if costs else None,
        suites={name: scores for name, scores in read_suites(cell.folder).items() if name in reported},
        peak_memory_mb=max((row["peak_memory_mb"] for row in RunFolder(cell.folder).read_timings()), default=None),
        notes=tuple(
            f"{cell.label}: {path.relative_to(cell.folder)} was made with other settings than the comparison's, so it "
            "is left out. The comparison measures the suite when it runs again."
            for path in (suite_file(cell.folder, name) for name in unmeasured)
            if path.is_file()
        ),
    )


def _best_step(cell: Cell, metrics: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the step of the best checkpoint if a run ends with that; None if it ends with its last step."""
    best = cell.config.train.checkpoint.best
    steps = [int(row["best/step"]) for row in metrics if row.get("best/step") is not None]
    return steps[-1] if steps and best is not None and best.restore else None


def _evaluations(cell: Cell, metrics: Sequence[Mapping[str, Any]], costs: Mapping[int, Costs]) -> list[Evaluation]:
    """Return the evaluations among the metrics of a run."""
    return [
        Evaluation(
            arm=cell.arm,
            seed=cell.seed,
            step=row["step"],
            measures=Measures.of_metrics(row),
            costs=costs.get(row["step"], Costs()),
        )
        for row in metrics
        if row.get("eval/score") is not None
    ]


def with_known_kl(
    evaluations: list[Evaluation], judged: Mapping[str, float | None], step: int | None = None
) -> list[Evaluation]:
    """Fill in KLs that a run did not measure: 0 at its start, and the KL of the judged model.

    Args:
        evaluations: of one run, in order.
        judged: the metrics of its final model; empty if it has not been judged.
        step: the step of its final model; None: the last one.
    """
    end = evaluations[-1].step if evaluations and step is None else step
    known: dict[int | None, Mapping[str, float | None]] = {end: {name: judged.get(MEASURES[name]) for name in KLS}}
    known[0] = dict.fromkeys(KLS, 0.0)
    return [
        replace(row, measures=replace(row.measures, **known[row.step]))
        if row.measures.kl is None and row.step in known
        else row
        for row in evaluations
    ]


def _start_model(start: Sequence[CellResult]) -> StartModel:
    judged, suites = _judgments(start), [result.suites for result in start]
    return StartModel(
        measures=_mean_measures(judged),
        spread=fmean(_spread(judgment.column("score")) for judgment in judged),
        suites=summarize_suites(suites, suites),
    )


def _spread(scores: Float[Tensor, " P"]) -> float:
    """Compute the standard deviation of the scores that are known."""
    return float(scores[~scores.isnan()].std(correction=0))


def _arm(
    name: str, cells: Sequence[CellResult], start: Sequence[CellResult], spread: float, level: float | None
) -> ArmResult:
    config, done = cells[0].cell.config, _finished(cells, name)
    best_of_n = config.best_of_n
    peaks = [result.peak_memory_mb for result in cells if result.peak_memory_mb is not None]
    return ArmResult(
        type="train" if best_of_n is None else "best_of_n",
        preset=config.train.algorithm.preset if best_of_n is None else None,
        n=best_of_n.n if best_of_n is not None else None,
        kl_is_bound=best_of_n is not None,
        status=_status(cells),
        peak_memory_mb=max(peaks, default=None),
        eval_prompts=_eval_prompts(config),
        seeds=tuple(_seed(name, result, start) for result in cells),
        final=_final(done, start, spread, level) if done else None,
        suites=_suites(done, start),
    )


def _eval_prompts(config: CellConfig) -> int | None:
    """Return the most held-out prompts, the first of all, of an evaluation in training; None: all."""
    return config.train.eval.prompts if config.best_of_n is None else None


def _seed(name: str, result: CellResult, start: Sequence[CellResult]) -> SeedResult:
    return SeedResult(
        seed=result.cell.seed,
        status=result.status,
        error=result.error,
        folder=f"{name}/seed-{result.cell.seed}",
        measures=_mean_measures(_judgments([result])),
        costs=result.costs,
        suites=_suites([result], start) if result.judged is not None else {},
    )


def _final(done: Sequence[CellResult], start: Sequence[CellResult], spread: float, level: float | None) -> FinalModels:
    seeds = [result.cell.seed for result in done]
    finals, starts = scores_of(done, seeds), scores_of(start, seeds)
    wins = outcomes(finals, starts)
    longer = _column(done, seeds, "length") - _column(start, seeds, "length")
    gain = bootstrap_crossed(finals - starts)
    return FinalModels(
        measures=_mean_measures(_judgments(done)),
        gain=gain,
        gain_in_std=Interval(gain.value / spread, gain.low / spread, gain.high / spread) if spread else None,
        win_rate_over_start=bootstrap_crossed(wins, shares=True),
        length_controlled_win_rate_over_start=length_controlled_win_rate(wins, longer),
        at_equal_kl=_at_equal_kl(done, start, level) if level is not None else None,
        costs=_mean_costs([result.costs for result in done if result.costs is not None]),
    )


def _suites(done: Sequence[CellResult], start: Sequence[CellResult]) -> Suites:
    suites_of_start = {result.cell.seed: result.suites for result in start}
    return summarize_suites([result.suites for result in done], [suites_of_start[result.cell.seed] for result in done])


def _status(cells: Sequence[CellResult]) -> Status:
    statuses = {result.status for result in cells}
    return statuses.pop() if len(statuses) == 1 else "partly done" if "done" in statuses else "failed"


def _mean_measures(judged: Sequence[Judgment]) -> Measures:
    """Compute the means over seeds; None for a measure that a seed has no value of, which is no mean of the others."""
    means: dict[str, float | None] = {}
    for key in MEASURES.values():
        values = [value for judgment in judged if (value := judgment.metrics.get(key)) is not None]
        means[key] = fmean(values) if values and len(values) == len(judged) else None
    unjudged = sum(judgment.metrics.get(MEASURES["unjudged"]) or 0.0 for judgment in judged)  # absent if it is 0
    means[MEASURES["unjudged"]] = unjudged / len(judged) if unjudged else None
    return Measures.of_metrics(means)


def _mean_costs(costs: Sequence[Costs]) -> MeanCosts | None:
    if not costs:
        return None
    records = [cost.record() for cost in costs]
    return MeanCosts(**{key: fmean(record[key] for record in records) for key in records[0]})


def _points(result: CellResult) -> list[tuple[float, float]]:
    """Return the (KL, score) points of a cell: its evaluations, or best-of-n's curve."""
    if result.cell.config.best_of_n is not None:
        return [(point.kl, point.score) for point in read_curve(result.cell.folder)]
    measures = [evaluation.measures for evaluation in result.evaluations]
    return [(row.kl, row.score) for row in measures if row.kl is not None and row.score is not None]


def _common_kl(arms: Mapping[str, Sequence[CellResult]]) -> float | None:
    """Return the highest KL in nats that every finished cell has reached; None if there is none above 0."""
    reached = [
        max(kl for kl, _ in points)
        for cells in arms.values()
        for result in cells
        if result.judged is not None and (points := _points(result))
    ]
    return min(reached) if reached and min(reached) > 0 else None


def _at_equal_kl(done: Sequence[CellResult], start: Sequence[CellResult], level: float) -> EqualKl:
    reached = [(result.cell, score) for result in done if (score := score_at_kl(_points(result), level)) is not None]
    scores = [score for _, score in reached]
    gains = [
        score - float(scores_of(start, [cell.seed])[0, : _eval_prompts(cell.config)].nanmean())
        for cell, score in reached
    ]
    return EqualKl(
        kl=level,
        score=fmean(scores) if scores else None,
        gain=fmean(gains) if gains else None,
        low=min(scores, default=None),
        high=max(scores, default=None),
        seeds=len(scores),
    )


def _win_rates(arms: Mapping[str, Sequence[CellResult]]) -> tuple[ArmWinRate, ...]:
    """Compute the win rate of every ordered pair of arms that have finished a seed in common."""
    rates: dict[tuple[str, str], ArmWinRate] = {}
    for a in arms:
        for b in arms:
            seeds = common_seeds(arms[a], arms[b])
            if a != b and seeds and not (scores_of(arms[a], seeds) - scores_of(arms[b], seeds)).isnan().all():
                rates[a, b] = _win_rate((a, arms[a]), (b, arms[b]), seeds, swapped=rates.get((b, a)))
    return tuple(rates.values())


def _win_rate(
    a: tuple[str, Sequence[CellResult]],
    b: tuple[str, Sequence[CellResult]],
    seeds: Sequence[int],
    *,
    swapped: ArmWinRate | None,
) -> ArmWinRate:
    """Compute the win rate of a pair; if it is known with its sides swapped, no regression is fitted again."""
    (a_name, a_cells), (b_name, b_cells) = a, b
    a_scores, b_scores = scores_of(a_cells, seeds), scores_of(b_cells, seeds)
    wins = outcomes(a_scores, b_scores)
    if swapped is not None:
        length_controlled = _swap_sides(swapped.length_controlled)
    else:
        longer = _column(a_cells, seeds, "length") - _column(b_cells, seeds, "length")
        length_controlled = length_controlled_win_rate(wins, longer)
    return ArmWinRate(
        a=a_name,
        b=b_name,
        rate=bootstrap_crossed(wins, shares=True),
        length_controlled=length_controlled,
        difference=bootstrap_crossed(a_scores - b_scores),
        seeds=len(seeds),
    )


def _swap_sides(rate: LengthControlled) -> LengthControlled:
    """Compute the length-controlled win rate of the same pair with its sides exchanged."""
    return replace(rate, value=1 - rate.value, low=1 - rate.high, high=1 - rate.low)


def _suite_differences(arms: Mapping[str, Sequence[CellResult]], suites: Suites) -> Iterator[SuiteDifference]:
    """Compute the difference of every pair of arms in the first figure of each suite, on their common seeds."""
    first = {suite: next(iter(figures)) for suite, figures in suites.items() if figures}
    for suite, figure in first.items():
        measured = {
            name: {
                result.cell.seed: result.suites[suite] for result in _finished(cells, name) if suite in result.suites
            }
            for name, cells in arms.items()
        }
        for a, b in combinations(arms, 2):
            seeds = sorted(measured[a].keys() & measured[b].keys())
            scores_a, scores_b = ([measured[name][seed] for seed in seeds] for name in (a, b))
            difference = paired_difference(scores_a, scores_b, figure) if seeds else None
            if difference is not None:
                yield SuiteDifference(suite=suite, figure=figure, a=a, b=b, difference=difference, seeds=len(seeds))


def _curve(cells: Sequence[CellResult]) -> tuple[CurvePoint, ...]:
    """Compute best-of-n's curve, the mean over seeds."""
    curves = [curve for result in cells if (curve := read_curve(result.cell.folder))]
    return tuple(
        CurvePoint(
            n=fmean(point.n for point in points),
            kl=fmean(point.kl for point in points),
            score=fmean(point.score for point in points),
            proxy=fmean(point.proxy for point in points),
        )
        for points in zip(*curves, strict=False)
    )


def _table_rows(results: ComparisonResults, cells: Sequence[CellResult]) -> Iterator[dict[str, object]]:
    for evaluation in results.evaluations:
        yield {"kind": "evaluation", **evaluation.record()}
    for result in cells:
        of_cell = {"arm": result.cell.arm, "seed": result.cell.seed}
        if result.judged is not None:
            costs = (result.costs or Costs()).record()
            yield {"kind": "final", **of_cell, **_mean_measures([result.judged]).record(), **costs}
        for point in read_curve(result.cell.folder):
            yield {"kind": "best_of_n", **of_cell, **asdict(point)}

"""Run one cell of a comparison: train, judge the final model, run the suites.

All cells of one seed are judged with the same random numbers. The best-of-n arm trains nothing: it samples N
completions of every held-out prompt from the start model, scored by proxy and judge.
"""

from __future__ import annotations

import json
import math
import operator
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from rlhf.comparison.costs import (
    COSTS,
    Costs,
    CostTracker,
    Sizes,
    count_parameters,
    count_source_parameters,
    sampling_flops,
)
from rlhf.comparison.plan import Cell, read_cell
from rlhf.comparison.results import CurvePoint, SuiteFigure, Suites
from rlhf.config.compare import START_FOLDER, BestOfNArm, BudgetConfig, CellConfig
from rlhf.config.load import dump, validate
from rlhf.errors import ConfigError, DataError, DivergenceError, ModelError, UserError
from rlhf.evaluation.evaluate import count_unjudged, diversity, filled
from rlhf.evaluation.frontier import curve_sizes, expected_best, kl_bound, picks
from rlhf.evaluation.win_rate import Interval, bootstrap_crossed, independent_difference
from rlhf.factory.data import load_prompts_of_run
from rlhf.factory.evaluation import evaluate_model, evaluate_suite, load_model_for_suite, write_result
from rlhf.factory.models import build_tokenizer, make_decode
from rlhf.factory.rewards import build_source
from rlhf.factory.run import build_run
from rlhf.factory.sampler import Completer
from rlhf.models.folders import model_folder
from rlhf.report.terminal import Terminal
from rlhf.runtime.distributed import is_main_process, shutdown
from rlhf.runtime.engine import Engine, make_engine
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.sampler import sample_batches
from rlhf.suites.suite import Suite, find_suite
from rlhf.tracking.redact import redact_text
from rlhf.tracking.run_folder import write_atomically
from rlhf.tracking.trackers import encode_line, to_json
from rlhf.tracking.view import View
from rlhf.training.rollout import episode_record, part_record, turn_counts
from rlhf.types import Completions, Scores

JUDGED = "judged.json"


@dataclass(frozen=True)
class Judgment:
    """The content of judged.json: the mean metrics, and one record for each held-out prompt.

    A record has row, prompt, completion, score (the judge's), proxy (the trained-on reward's, if there is one),
    kl and kl_exact (in nats; for best-of-n, kl is null and kl_exact is absent), length (in tokens) and finished. A
    score is null if no verifier applies.
    """

    metrics: Mapping[str, float | None]
    rows: Sequence[Mapping[str, Any]]

    @property
    def prompts(self) -> list[str]:
        """Return the held-out prompts, in order."""
        return [str(row["prompt"]) for row in self.rows]

    def column(self, name: str) -> Float[Tensor, " P"]:
        """Return one number of every record, in the order of the prompts; NaN if it is null."""
        values = (row[name] for row in self.rows)
        return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)

    def write(self, folder: Path) -> None:
        """Write judged.json atomically: the cell is done once it exists."""
        content = {"metrics": to_json(self.metrics), "rows": to_json(list(self.rows))}
        write_atomically(folder / JUDGED, json.dumps(content, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Judgment | None:
        """Read judged.json; None if it does not exist."""
        path = folder / JUDGED
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(content["metrics"], content["rows"])


def judge_model(cell: CellConfig, path: str | None) -> Judgment:
    """Judge the model in `path` (None: the start model) on the cell's held-out prompts.

    Raises:
        UserError: a model, the data, the judge or the proxy is missing or unusable.
    """
    train = cell.train
    tokenizer_path = model_folder(path or train.policy.model)
    evaluation = evaluate_model(train, path, tokenizer_path)
    tokenizer = build_tokenizer(train.policy.model_copy(update={"model": tokenizer_path}))
    records = evaluation.records(make_decode(tokenizer), step=-1, split="judged", limit=len(evaluation.rollout))
    exact = evaluation.exact_kl.tolist()
    records = [{**record, "kl_exact": value} for record, value in zip(records, exact, strict=True)]
    metrics: dict[str, float | None] = dict(evaluation.metrics)
    if cell.proxy is not None:
        proxy = build_source(cell.proxy, tokenizer, make_engine(train.run), leaves_out=True)(evaluation.rollout)
        known = proxy.values[~proxy.values.isnan()].double()
        metrics["eval/proxy"] = float(known.mean()) if len(known) else None
        values = proxy.values.tolist()
        records = [{**record, "proxy": to_json(value)} for record, value in zip(records, values, strict=True)]
    return Judgment(metrics, records)


def _known(scores: Scores) -> Float[Tensor, " K"]:
    """Return the scores of the completions that a verifier applies to.

    Raises:
        NonFiniteScores: there are none.
    """
    return filled(scores).values[~scores.values.isnan()].double()


DRAWS = "draws.json"


@dataclass(frozen=True)
class BestOfNSamples:
    """All N samples of each of P prompts, with both scores."""

    completions: Completions  # N consecutive rows for each prompt
    gold: Scores
    proxy: Scores
    count: int

    def gold_table(self) -> Float[Tensor, "P N"]:
        """Return the judge's scores as a table [P, N]."""
        return self.gold.values.view(-1, self.count)

    def proxy_table(self) -> Float[Tensor, "P N"]:
        """Return the proxy's scores, by which the best sample is picked, as a table [P, N]."""
        return self.proxy.values.view(-1, self.count)


def run_best_of_n(cell: CellConfig, arm: BestOfNArm, folder: Path) -> Judgment:
    """Sample, pick and judge, and write draws.json (the curve over n) and costs.jsonl.

    The costs are of the n samples of each prompt that the arm needs; the others are for the curve alone.

    Raises:
        UserError: a model, the data, the judge or the proxy is missing or unusable.
    """
    train = cell.train
    engine = make_engine(train.run)
    completer = Completer(train.policy.model, train.sampling, engine.device, chat=train.data.chat_format)
    start = time.perf_counter()
    draws, seconds = _draw(cell, completer, arm, engine, start)
    used = draws.completions.rows(torch.arange(len(draws.completions)).view(-1, draws.count)[:, : arm.n].flatten())
    tokens = int(used.prompt_mask.sum() + used.completion_mask.sum())
    sizes = Sizes(policy=count_parameters(completer.model), reward=count_source_parameters(cell.proxy))
    cost = Costs(
        completions=len(used),
        generated_tokens=int(used.action_mask.sum()),
        flops=sampling_flops(sizes, tokens=tokens),
        seconds=seconds * arm.n / draws.count,
    )
    write_atomically(folder / COSTS, encode_line({"step": 0, **cost.record()}).decode())
    curve = curve_of(draws.gold_table(), draws.proxy_table())
    write_atomically(folder / DRAWS, json.dumps({"curve": [asdict(point) for point in curve]}) + "\n")
    return _judged(draws, arm, completer)


def read_curve(folder: Path) -> list[CurvePoint]:
    """Read the curve over n from draws.json; empty if the file does not exist."""
    path = folder / DRAWS
    if not path.is_file():
        return []
    return [CurvePoint(**point) for point in json.loads(path.read_text(encoding="utf-8"))["curve"]]


def curve_of(gold: Float[Tensor, "P N"], proxy: Float[Tensor, "P N"]) -> list[CurvePoint]:
    """Compute the expected judge's score and proxy of the best of n, and the bound on its KL, for a range of n."""
    return [
        CurvePoint(
            n=float(n),
            kl=kl_bound(n),
            score=float(expected_best(gold, proxy, n).nanmean()),
            proxy=float(expected_best(proxy, proxy, n).nanmean()),
        )
        for n in curve_sizes(gold.shape[1])
    ]


def _draw(
    cell: CellConfig, completer: Completer, arm: BestOfNArm, engine: Engine, start: float
) -> tuple[BestOfNSamples, float]:
    """Draw and score the samples.

    Returns:
        The samples, and the seconds of sampling and picking (judging is no cost of the arm).
    """
    train = cell.train
    held_out, judge = train.data.eval_prompts, train.eval.source
    if cell.proxy is None or judge is None or held_out is None:
        raise ConfigError("best of n needs a reward to pick by, a judge and held-out prompts: see docs/compare.md")
    prompts = load_prompts_of_run(held_out, train, completer.tokenizer, completer.model)
    key = derive_seed(cell.seed, "best of n")
    batches = list(prompts.batches(max(1, train.sampling.batch_size // arm.samples)))
    sampler = completer.player(train.environment, train.plugins)
    completions = sample_batches(sampler, batches, key=key, group_size=arm.samples)
    alone = replace(completions, group_size=1)  # a source may standardize within groups, as gdpo in training
    proxy = build_source(cell.proxy, completer.tokenizer, engine, leaves_out=True)(alone)
    seconds = time.perf_counter() - start
    gold = build_source(judge, completer.tokenizer, engine, leaves_out=True)(alone)
    return BestOfNSamples(completions, gold, proxy, arm.samples), seconds


def _judged(draws: BestOfNSamples, arm: BestOfNArm, completer: Completer) -> Judgment:
    proxy, bound = draws.proxy_table(), kl_bound(arm.n)
    best = picks(proxy, arm.n) + torch.arange(len(proxy)) * draws.count
    kept = draws.completions.rows(best)
    gold, picked = (Scores(values=scores.values[best], parts={}) for scores in (draws.gold, draws.proxy))
    decode = make_decode(completer.tokenizer)
    lengths = kept.action_mask.sum(dim=1)
    rows: Sequence[Mapping[str, object]] = [
        {
            "row": row,
            "prompt": kept.references[row]["prompt"],
            "completion": decode(kept.completion_ids[row][kept.completion_mask[row]].tolist()),
            "score": to_json(float(gold.values[row])),
            "parts": part_record(draws.gold.parts, int(best[row])),
            "proxy": to_json(float(picked.values[row])),
            "kl": None,  # not known for a single completion
            "length": int(lengths[row]),
            "finished": bool(kept.finished[row]),
            **episode_record(kept, row, decode),
        }
        for row in range(len(kept))
    ]
    metrics: dict[str, float | None] = {
        "eval/score": float(_known(gold).mean()),
        "eval/score_std": float(_known(gold).std(correction=0)),
        **count_unjudged(gold.values.isnan()),
        "eval/proxy": float(_known(picked).mean()),
        "eval/kl": bound,
        "eval/length": float(lengths.double().mean()),
        "eval/finished": float(kept.finished.double().mean()),
        **({"eval/turns": float(turn_counts(kept).double().mean())} if kept.has_episodes else {}),
        **diversity(kept),
    }
    return Judgment(metrics, rows)


INTERRUPTED = 3  # exit code of a cell that was stopped and has saved its state
FAILED = "failed.json"
BY_VALUES = (ConfigError, DivergenceError)  # the errors that another try of the same settings meets again


def cell_main(folder: Path) -> int:
    """Run the cell in `folder` as the main function of a process, with errors written to standard error.

    Returns:
        The exit code: 0 when the cell is done, 2 for a user error, INTERRUPTED when it was stopped.
    """
    try:
        return 0 if run_cell(read_cell(folder), Terminal(Console(quiet=not is_main_process()))) else INTERRUPTED
    except UserError as error:
        if isinstance(error, BY_VALUES) and is_main_process():
            record_failure(folder, str(error), by_values=True)
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        shutdown()


def record_failure(folder: Path, error: str, *, by_values: bool = False) -> None:
    """Write the error of a failed cell into its folder, for the report, without secrets such as a key in an address.

    Args:
        folder: of the cell.
        error: the error.
        by_values: the cell's settings are the cause, so that another try fails too.
    """
    content = {"error": redact_text(error), "by_values": by_values}
    write_atomically(folder / FAILED, json.dumps(content, ensure_ascii=False) + "\n")


def failure_of(folder: Path) -> str | None:
    """Return the error of a failed cell; None if it did not fail."""
    failure = _failure(folder)
    return None if failure is None else str(failure["error"])


def failed_by_its_values(folder: Path) -> bool:
    """Return whether a cell failed, and its settings are the cause."""
    return bool((_failure(folder) or {}).get("by_values"))


def _failure(folder: Path) -> dict[str, Any] | None:
    path = folder / FAILED
    failure: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return failure


def run_cell(cell: Cell, view: View) -> bool:
    """Train (if the cell trains), judge, run the suites and write judged.json; return False if interrupted and saved.

    A cell that was judged before runs the suites that it has no result of: suites may be added to a comparison.

    Raises:
        UserError: training or judging cannot go on, in the subclass that fits the cause.
    """
    config = cell.config
    trained = None if config.budget is None else str(cell.run_folder)
    if Judgment.read(cell.folder) is not None:
        if is_main_process():
            run_suites(config, cell.folder, trained)
        return True
    if config.best_of_n is not None:
        judged = run_best_of_n(config, config.best_of_n, cell.folder)
    elif config.budget is None:
        judged = judge_model(config, None)
    else:
        if not _train(cell, config.budget, view):
            return False
        judged = judge_model(config, trained)
    if is_main_process():
        run_suites(config, cell.folder, trained)
        judged.write(cell.folder)
    return True


def _train(cell: Cell, budget: BudgetConfig, view: View) -> bool:
    train = cell.config.train
    run = build_run(train, view)
    run.session.budget = CostTracker(cell.run_folder, run.run, train, budget)
    try:
        return run.train()
    finally:
        run.session.recorder.close()


FOLDER = "evals"


@dataclass(frozen=True)
class SuiteScores:
    """The scores of one suite on one model: its figures, and the number of every row for each figure that has one.

    A row that was left out has NaN. The examples are the answers that the suite kept, in its own form.
    """

    figures: Mapping[str, SuiteFigure]
    rows: Mapping[str, Sequence[float]]
    examples: Sequence[Mapping[str, Any]] = ()


def suite_file(folder: Path, name: str) -> Path:
    """Return the path of a suite's result in the folder of a cell."""
    return folder / FOLDER / f"{name}.json"


def run_suites(cell: CellConfig, folder: Path, path: str | None) -> None:
    """Run the suites of a cell that have no result yet, on the model in `path` (None: the start model)."""
    target = path or cell.train.policy.model
    for name, settings in unmeasured_suites(cell, folder).items():
        file = suite_file(folder, name)
        reused = _measured_before(cell, folder, file.name, settings)
        if reused is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, reused)
            continue
        try:
            subject = load_model_for_suite(settings, target)
            result = evaluate_suite(settings, subject, find_suite(name)[1])
        except (DataError, ModelError) as error:
            raise type(error)(f"suites.{name}: {error} (suites.{name}=null leaves it out)") from error
        write_result(file, name, target, result, settings, subject)


def unmeasured_suites(cell: CellConfig, folder: Path) -> dict[str, Suite]:
    """List the suites of a cell that have no result with their settings: name -> settings."""
    missing: dict[str, Suite] = {}
    for name, values in cell.suites.items():
        file, settings = suite_file(folder, name), validate(find_suite(name)[0], values)
        if not file.is_file() or not _is_result_of(settings, file.read_text(encoding="utf-8")):
            missing[name] = settings
    return missing


def _is_result_of(settings: Suite, text: str) -> bool:
    """Return whether a suite's result was made with these settings, or with others that change nothing."""
    wanted = dump(settings)
    unimportant = {key: wanted[key] for key in settings.without_effect}
    return {**json.loads(text)["config"], **unimportant} == wanted


def _measured_before(cell: CellConfig, folder: Path, name: str, settings: Suite) -> str | None:
    """Return the start model's result under another seed, if the suite's figures are the same under every seed."""
    if cell.arm != START_FOLDER or "seed" not in settings.without_effect:
        return None
    for path in sorted(folder.parent.glob(f"*/{FOLDER}/{name}")):
        text = path.read_text(encoding="utf-8")
        if _is_result_of(settings, text) and json.loads(text)["model"]["path"] == cell.train.policy.model:
            return text
    return None


def read_suites(folder: Path) -> dict[str, SuiteScores]:
    """Read the results that `run_suites` wrote for a cell: suite -> scores."""
    return {path.stem: _read_scores(path) for path in sorted((folder / FOLDER).glob("*.json"))}


def _read_scores(path: Path) -> SuiteScores:
    """Read a suite's scores without the figures that its answers do not have: no words have no distinct share."""
    content = json.loads(path.read_text(encoding="utf-8"))
    figures = {
        name: SuiteFigure(value=figure["value"], low=figure.get("low"), high=figure.get("high"))
        for name, figure in content["figures"].items()
        if figure["value"] is not None
    }
    rows = {name: [math.nan if value is None else value for value in row] for name, row in content["rows"].items()}
    return SuiteScores(figures, rows, content.get("examples", ()))


def summarize_suites(
    results: Sequence[Mapping[str, SuiteScores]], starts: Sequence[Mapping[str, SuiteScores]]
) -> Suites:
    """Summarize the suites of an arm over its seeds.

    Args:
        results: the suite scores of every finished seed.
        starts: the start model's, of the same seeds.

    Returns:
        For each suite and figure the mean over seeds, and the gain: the paired difference from the start model.
        Intervals are over prompts and seeds, for one seed the suite's own; None for a figure that has no number for
        each row.
    """
    names = [name for name in (results[0] if results else {}) if all(name in seed for seed in results)]
    return {name: _summarize([seed[name] for seed in results], [seed.get(name) for seed in starts]) for name in names}


def _summarize(results: Sequence[SuiteScores], starts: Sequence[SuiteScores | None]) -> dict[str, SuiteFigure]:
    figures = {}
    for name in (name for name in results[0].figures if all(name in result.figures for result in results)):
        low, high = _bounds(results, name)
        value = fmean(result.figures[name].value for result in results)
        figures[name] = SuiteFigure(value=value, low=low, high=high, gain=paired_difference(results, starts, name))
    return figures


def _bounds(results: Sequence[SuiteScores], name: str) -> tuple[float | None, float | None]:
    """Return the ends of a figure's interval."""
    if len(results) == 1:
        figure = results[0].figures[name]
        return figure.low, figure.high
    interval = _bootstrap([result.rows.get(name) for result in results])
    if interval is None:
        return None, None
    figures = [result.figures[name] for result in results]
    if interval.low == interval.high and all(figure.low is not None for figure in figures):
        # All rows are alike, so all resamples are; the seeds' own intervals, Wilson's, are wider.
        return min(figure.low or 0.0 for figure in figures), max(figure.high or 0.0 for figure in figures)
    return interval.low, interval.high


def _bootstrap(rows: Sequence[Sequence[float] | None]) -> Interval | None:
    """Compute the interval over seeds and rows; None unless every seed has a number for the same rows."""
    known = [row for row in rows if row is not None]
    if len(known) < len(rows) or any(len(row) != len(known[0]) for row in known):
        return None
    return bootstrap_crossed(torch.tensor(known, dtype=torch.float64))


def paired_difference(
    results: Sequence[SuiteScores], others: Sequence[SuiteScores | None], name: str
) -> Interval | None:
    """Compute the mean of `results` less `others` in a figure, seed by seed and row by row, and its interval.

    None unless both have a number for each row of every seed, and all seeds the same count of rows. If each side has
    one value in all rows, all resamples are alike: the interval is then made of the two sides' own.
    """
    after = [result.rows.get(name) for result in results]
    before = [other.rows.get(name) if other is not None else None for other in others]
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if a is not None and b is not None and len(a) == len(b)]
    if len(pairs) < len(after) or len({len(rows) for rows, _ in pairs}) > 1:
        return None
    differences = [torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64) for a, b in pairs]
    difference = bootstrap_crossed(torch.stack(differences))
    if math.isnan(difference.value):
        return None
    values = [{value for row in side for value in row if not math.isnan(value)} for side in zip(*pairs, strict=True)]
    sides = (results, [other for other in others if other is not None])
    has_figures = all(name in one.figures for side in sides for one in side)  # pairs against the start have none of it
    if has_figures and all(len(side) == 1 for side in values) and not all(map(operator.is_, results, others)):
        return independent_difference(*(_interval_of(side, name) for side in sides))
    return difference


def _interval_of(results: Sequence[SuiteScores], name: str) -> Interval:
    """Return the mean over seeds of a figure and its interval, without width if the figure has none."""
    value = fmean(result.figures[name].value for result in results)
    low, high = _bounds(results, name)
    return Interval(value, value if low is None else low, value if high is None else high)

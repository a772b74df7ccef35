"""Judge the final models of a comparison against each other, pair by pair: `pairs` in its file.

The completions come from judged.json, so that nothing is sampled again. The result of a model is a file among its
suites, evals/pairs.json, with a win rate for each opponent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.comparison.inputs import digest_of_judge
from rlhf.comparison.plan import Cell, CellPlan
from rlhf.comparison.trial import Judgment, suite_file
from rlhf.config.compare import PairsConfig
from rlhf.config.load import dump
from rlhf.factory.models import build_tokenizer
from rlhf.factory.rewards import build_source
from rlhf.models.folders import model_folder
from rlhf.rewards.pair_judge import PairVerdicts, Verdicts, mirrored
from rlhf.runtime.engine import make_engine
from rlhf.suites.questions import Estimate, NotMeasured, SuiteResult, mean_estimate, share_estimate
from rlhf.tracking.run_folder import write_atomically
from rlhf.tracking.trackers import to_json

PAIRS = "pairs"


def judge_pairs(plan: CellPlan) -> None:
    """Judge every finished cell against every opponent of its seed, and write evals/pairs.json of the cell.

    A cell whose file has the same settings, opponents, completions and judge, with its code and model, is not judged
    again. Other files are deleted first, so that none is left beside new ones if the judge fails.

    Raises:
        UserError: the judge cannot be built, or it fails.
    """
    config = plan.config.pairs
    if config is None:
        return
    judge: PairVerdicts | None = None
    digest = digest_of_judge(config.judge)
    finished = {
        (cell.arm, cell.seed): judged for cell in plan.cells if (judged := Judgment.read(cell.folder)) is not None
    }
    known = [name for name in config.against if all((name, seed) in finished for seed in plan.config.seeds)]
    waiting: list[tuple[Cell, Judgment, dict[str, Judgment]]] = []
    for cell in plan.cells:
        mine = finished.get((cell.arm, cell.seed))
        if mine is None:
            continue
        opponents = {name: other for name in known if (other := finished[name, cell.seed]).prompts == mine.prompts}
        if opponents and not _is_done(cell.folder, config, mine, opponents, digest):
            suite_file(cell.folder, PAIRS).unlink(missing_ok=True)
            waiting.append((cell, mine, opponents))
    for cell, mine, opponents in waiting:
        judge = judge or build_judge(config, cell)
        result = compare_with_opponents(mine, opponents, config, judge, seed=cell.seed)
        path = suite_file(cell.folder, PAIRS)
        settings = {"config": dump(config), "judge": digest, "against": list(opponents)}
        content = {"suite": PAIRS, **result.as_json(), **settings}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(to_json(content), indent=2, ensure_ascii=False) + "\n")


def build_judge(config: PairsConfig, cell: Cell) -> PairVerdicts:
    """Build the judge, with the tokenizer of the start model.

    Raises:
        UserError: it cannot be built.
    """
    train = cell.config.train
    folder = model_folder(train.policy.model)
    tokenizer = build_tokenizer(train.policy.model_copy(update={"model": folder}))
    engine = make_engine(train.run)
    return config.judge.build(tokenizer, lambda source: build_source(source, tokenizer, engine, leaves_out=True))


def _is_done(
    folder: Path, config: PairsConfig, mine: Judgment, opponents: Mapping[str, Judgment], digest: str | None
) -> bool:
    """Check whether a cell was judged by this judge with these settings, on these completions of both sides."""
    path = suite_file(folder, PAIRS)
    if not path.is_file():
        return False
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    judged = [(row["against"], row["completion"], row["other"]) for row in content["examples"]]
    texts = {name: _completions(other, config) for name, other in opponents.items()}
    pairs = [
        (name, *pair) for name, others in texts.items() for pair in zip(_completions(mine, config), others, strict=True)
    ]
    same_judge = digest is None or content.get("judge", digest) in (digest, None)
    return bool(same_judge and content["config"] == to_json(dump(config)) and judged == pairs)


def _completions(judgment: Judgment, config: PairsConfig) -> list[str]:
    """Return the completions that are shown to the judge."""
    return [str(row["completion"]) for row in judgment.rows[: config.limit]]


def compare_with_opponents(
    mine: Judgment,
    opponents: Mapping[str, Judgment],
    config: PairsConfig,
    judge: PairVerdicts,
    *,
    seed: int,
) -> SuiteResult:
    """Compute a model's win rate over each opponent, on the first `config.limit` prompts."""
    figures: list[Estimate] = []
    examples: list[dict[str, object]] = []
    disagreements: list[Estimate] = []
    left_out: list[NotMeasured] = []
    notes: list[str] = []
    prompts, texts = mine.prompts[: config.limit], _completions(mine, config)
    for name, opponent in opponents.items():
        others = _completions(opponent, config)
        verdicts = judge(prompts, texts, others)
        meaning = f"pairs won against {name}; a tie counts half"
        wins: list[float] = verdicts.wins.tolist()
        unjudged = sum(map(math.isnan, wins))
        if unjudged < len(wins):
            figures.append(mean_estimate(f"over_{name}", wins, meaning, seed=seed, shares=True))
            disagreements.append(_disagreement(name, verdicts))
        else:
            left_out.append(NotMeasured(f"over_{name}", "the judge applies to none of the pairs"))
        if unjudged:
            notes.append(f"the judge does not apply to {unjudged:,} of the pairs against {name}: they are left out")
        for i, outcome in enumerate(wins):
            examples.append(
                {
                    "prompt": prompts[i],
                    "completion": texts[i],
                    "against": name,
                    "other": others[i],
                    "shown_first": verdicts.straight[i],
                    "shown_second": verdicts.swapped[i],
                    "outcome": outcome,
                }
            )
    return SuiteResult(
        tuple(figures + disagreements), len(texts), {}, tuple(left_out), tuple(notes), examples=tuple(examples)
    )


def _disagreement(name: str, verdicts: Verdicts) -> Estimate:
    """Compute the share of pairs with an outcome on which the two orders disagree or an answer could not be read."""
    rows = zip(verdicts.straight, verdicts.swapped, verdicts.wins.tolist(), strict=True)
    flips = [
        float(straight is None or swapped is None or straight != mirrored(swapped))
        for straight, swapped, outcome in rows
        if not math.isnan(outcome)
    ]
    return share_estimate(f"disagree_{name}", flips, "pairs on which the two orders disagree: they count as ties")

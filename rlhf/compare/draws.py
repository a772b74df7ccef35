"""The best-of-n arm: N completions of every held-out prompt from the start model, scored by proxy and judge."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.build.completer import Completer
from rlhf.build.models import decoder
from rlhf.build.rewards import build_source
from rlhf.compare.costs import COSTS, Costs, Sizes, parameters_of, sampling_flops, source_parameters
from rlhf.compare.judge import Judged
from rlhf.config.compare import BestOfNArm, CellConfig
from rlhf.data.prompts import load_prompts
from rlhf.evaluation.best_of_n import curve_sizes, expected_best, kl_bound, picks
from rlhf.evaluation.diversity import diversity
from rlhf.models.backbone import context_length
from rlhf.runtime.engine import Engine, make_engine
from rlhf.runtime.loggers import encode_line
from rlhf.runtime.run_folder import write_aside
from rlhf.runtime.seeding import derive
from rlhf.types import Completions, Scores, concat

DRAWS = "draws.json"


@dataclass(frozen=True)
class Draws:
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


def run_best_of_n(cell: CellConfig, folder: Path) -> Judged:
    """Sample, pick and judge, and write draws.json (the curve over n) and costs.jsonl.

    Raises:
        UserError: a model, the data, the judge or the proxy is missing or unusable.
    """
    arm, train = cell.best_of_n, cell.train
    assert arm is not None
    engine = make_engine(train.run)
    completer = Completer(train.policy.model, train.sampling, engine.device, chat=train.data.chat_format)
    start = time.perf_counter()
    draws, seconds = _draw(cell, completer, arm, engine, start)
    tokens = int(draws.completions.prompt_mask.sum() + draws.completions.completion_mask.sum())
    sizes = Sizes(policy=parameters_of(completer.model), reward=source_parameters(cell.proxy))
    cost = Costs(
        completions=len(draws.completions),
        generated_tokens=int(draws.completions.completion_mask.sum()),
        flops=sampling_flops(sizes, tokens=tokens),
        seconds=seconds,
    )
    write_aside(folder / COSTS, encode_line({"step": 0, **cost.record()}).decode())
    curve = curve_of(draws.gold_table(), draws.proxy_table())
    write_aside(folder / DRAWS, json.dumps({"curve": curve}) + "\n")
    return _judged(draws, arm, completer)


def read_curve(folder: Path) -> list[dict[str, float]]:
    """Read the curve over n from draws.json; empty if the file does not exist."""
    path = folder / DRAWS
    if not path.is_file():
        return []
    curve: list[dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))["curve"]
    return curve


def curve_of(gold: Float[Tensor, "P N"], proxy: Float[Tensor, "P N"]) -> list[dict[str, float]]:
    """Compute the expected judge's score and proxy of the best of n, and the bound on its KL, for a range of n."""
    return [
        {
            "n": float(n),
            "kl": kl_bound(n),
            "score": float(expected_best(gold, proxy, n).mean()),
            "proxy": float(expected_best(proxy, proxy, n).mean()),
        }
        for n in curve_sizes(gold.shape[1])
    ]


def _draw(cell: CellConfig, completer: Completer, arm: BestOfNArm, engine: Engine, start: float) -> tuple[Draws, float]:
    """Draw and score the samples.

    Returns:
        The samples, and the seconds of sampling and picking (judging is no cost of the arm).
    """
    train = cell.train
    assert train.data.eval_prompts is not None
    assert cell.proxy is not None
    prompts = load_prompts(
        train.data.eval_prompts,
        completer.tokenizer,
        chat_template=train.data.chat_format,
        context=context_length(completer.model),
        max_new_tokens=train.sampling.max_new_tokens,
    )
    key = derive(cell.seed, "best of n")
    batches = prompts.batches(max(1, train.sampling.batch_size // arm.samples))
    completions = concat([completer.sampler.sample(batch, key=key, group_size=arm.samples) for batch in batches])
    proxy = build_source(cell.proxy, completer.tokenizer, engine)(completions)
    seconds = time.perf_counter() - start
    assert train.eval.source is not None
    gold = build_source(train.eval.source, completer.tokenizer, engine)(completions)
    return Draws(completions, gold, proxy, arm.samples), seconds


def _judged(draws: Draws, arm: BestOfNArm, completer: Completer) -> Judged:
    proxy, bound = draws.proxy_table(), kl_bound(arm.n)
    best = picks(proxy, arm.n) + torch.arange(len(proxy)) * draws.count
    kept, golds, proxies = draws.completions.rows(best), draws.gold.values[best], draws.proxy.values[best]
    decode = decoder(completer.tokenizer)
    lengths = kept.completion_mask.sum(dim=1)
    rows: Sequence[Mapping[str, object]] = [
        {
            "row": row,
            "prompt": kept.references[row]["prompt"],
            "completion": decode(kept.completion_ids[row][kept.completion_mask[row]].tolist()),
            "score": float(golds[row]),
            "proxy": float(proxies[row]),
            "kl": None,  # not known for a single completion
            "length": int(lengths[row]),
            "finished": bool(kept.finished[row]),
        }
        for row in range(len(kept))
    ]
    metrics: dict[str, float | None] = {
        "eval/score": float(golds.double().mean()),
        "eval/score_std": float(golds.double().std(correction=0)),
        "eval/proxy": float(proxies.double().mean()),
        "eval/kl": bound,
        "eval/length": float(lengths.double().mean()),
        "eval/finished": float(kept.finished.double().mean()),
        **diversity(kept),
    }
    return Judged(metrics, rows)

r"""Sample preference pairs from a model and a reward, so that DPO can train on the same reward as PPO without data.

    python scripts/sample_pairs.py CONFIG.yaml PAIRS.jsonl [--prompts N] [--completions 4] [--min-gap 0] \
      [section.key=value ...]

CONFIG is an online configuration of `rlhf train`: its policy.model answers its data.prompts with its sampling settings,
and its reward.source ranks the completions. The best and the worst completion of a prompt make its pair, empty ones
left out. Rows have `prompt`, `chosen`, `rejected`, `score_chosen` and `score_rejected`. Prompts whose completions all
have the same score give no pair, nor do those whose best and worst differ by no more than --min-gap; their number is
printed at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf.config.load import load_train
from rlhf.config.sections import OnlineConfig, TrainConfig
from rlhf.data.prompts import prompt_pipeline
from rlhf.errors import ConfigError, UserError
from rlhf.factory.rewards import build_source
from rlhf.factory.sampler import Completer
from rlhf.lab.build import resolve_lab_paths
from rlhf.models.backbone import context_length
from rlhf.references import MESSAGES
from rlhf.rewards.source import decode
from rlhf.runtime.engine import Engine
from rlhf.runtime.seeding import derive_seed

PROMPTS_AT_ONCE = 128


def pairs(
    config: TrainConfig, completions: int, limit: int | None, *, min_gap: float = 0.0
) -> Iterator[dict[str, Any] | None]:
    """Yield a pair for each prompt; None if no two nonempty completions differ in score by more than `min_gap`."""
    if not isinstance(config, OnlineConfig):
        raise ConfigError("pairs need data.prompts and reward.source: name an online configuration, such as PPO's")
    writer = Completer(config.policy.model, config.sampling, chat=config.data.chat_format)
    source = build_source(config.reward.source, writer.tokenizer, Engine(torch.device("cpu")))
    prompts = prompt_pipeline(
        config.data.prompts,
        writer.tokenizer,
        chat_template=config.data.chat_format,
        context=context_length(writer.model),
        max_new_tokens=config.sampling.max_new_tokens,
    ).load()
    sys.stderr.write(f"{prompts.skips.summary()}\n")
    selected = prompts.all() if limit is None else prompts.collate(range(min(limit, len(prompts))))
    key = derive_seed(config.run.seed, "sampled pairs")
    for batch in selected.split(PROMPTS_AT_ONCE):
        rollout = writer.sampler.sample(batch, key=key, group_size=completions)
        texts, scores = decode(rollout, writer.tokenizer), source(rollout).values.tolist()
        for start in range(0, len(rollout), completions):
            nonempty = [row for row in range(start, start + completions) if texts.completions[row]]
            if not nonempty:
                yield None
                continue
            best, worst = max(nonempty, key=scores.__getitem__), min(nonempty, key=scores.__getitem__)
            if scores[best] - scores[worst] <= min_gap:
                yield None
                continue
            yield {
                "prompt": texts.references[start].get(MESSAGES, texts.prompts[start]),
                "chosen": texts.completions[best],
                "rejected": texts.completions[worst],
                "score_chosen": scores[best],
                "score_rejected": scores[worst],
            }


def main(argv: Sequence[str] | None = None) -> int:
    """Sample completions, rank them and write the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--prompts", type=int, help="how many (default: all)")
    parser.add_argument("--completions", type=int, default=4, help="of each prompt, at least 2")
    parser.add_argument("--min-gap", type=float, default=0.0, help="scores of a pair differ by more than this")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    if args.completions < 2:
        parser.error("--completions: a pair needs at least 2")
    if args.prompts is not None and args.prompts < 1:
        parser.error("--prompts: at least 1")
    try:
        config = resolve_lab_paths(load_train(args.config, args.overrides))
        rows = list(pairs(config, args.completions, args.prompts, min_gap=args.min_gap))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    written = [row for row in rows if row is not None]
    args.pairs.parent.mkdir(parents=True, exist_ok=True)
    args.pairs.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written), encoding="utf-8")
    skipped = len(rows) - len(written)
    sys.stdout.write(
        f"{len(written)} pairs in {args.pairs}; {skipped} prompts gave none: their scores were too close\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

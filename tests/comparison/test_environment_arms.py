"""A comparison whose arms play episodes, best-of-n among them, under the environment as the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import compare_tree, compared

from rlhf.comparison.costs import COSTS
from rlhf.sampling.sampler import sample_batches
from rlhf.tracking.trackers import read_jsonl
from rlhf.types import Completions

ENVIRONMENT = Path(__file__).parents[1] / "environments" / "word_games.py"


def test_arms_play_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Completions] = []

    def recorded(*args: Any, **kwargs: Any) -> Completions:
        drawn.append(sample_batches(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr("rlhf.comparison.trial.sample_batches", recorded)
    tree: dict[str, Any] = compare_tree(tmp_path, seeds=[0], budget={"completions": 32}, evaluations=1)
    base = yaml.safe_load((tmp_path / "base.yaml").read_text())
    del base["reward"]
    base["environment"] = {"target": f"{ENVIRONMENT}:Colors", "max_turns": 3}
    base["eval"]["source"] = {"type": "environment"}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    del tree["arms"]["dpo"], tree["arms"]["ppo"]
    assert compared(tree)
    turns = {}
    for arm in ("start", "grpo", "best_of_n"):
        judged = json.loads((tmp_path / "compare" / arm / "seed-0" / "judged.json").read_text())
        assert len(judged["rows"]) == 20
        assert judged["metrics"]["eval/score"] == pytest.approx(sum(r["score"] for r in judged["rows"]) / 20)
        turns[arm] = judged["metrics"].get("eval/turns", 2)
    assert all(1 < count <= 3 for count in turns.values())
    assert judged["metrics"]["eval/score"] > 0  # the better of two episodes
    words = [len(row["completion"].split()) for row in judged["rows"]]  # one token each, the environment's included
    assert any(row["length"] < count for row, count in zip(judged["rows"], words, strict=True))
    (rows,) = drawn
    is_paid = torch.arange(len(rows)) % 4 < 2  # n: 2, samples: 4
    (cost,) = read_jsonl(tmp_path / "compare" / "best_of_n" / "seed-0" / COSTS)
    assert cost["generated_tokens"] == (rows.sampler_logprobs[is_paid] != 0).sum()  # an observation was not drawn
    assert cost["generated_tokens"] < rows.completion_mask[is_paid].sum()

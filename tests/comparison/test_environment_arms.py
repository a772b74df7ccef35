"""A comparison whose arms play episodes, best-of-n among them, under the environment as the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import compare_tree, compared

ENVIRONMENT = Path(__file__).parents[1] / "environments" / "word_games.py"


def test_arms_play_episodes(tmp_path: Path) -> None:
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

"""TRPO with adapters on SmolLM2 as published: the bound holds and the surrogate falls, with 49,152 words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from real_model import FOLDER
from runs import trained, write_rows

pytestmark = pytest.mark.slow
QUESTIONS = ("Tell me a joke.", "What is a tree?", "Name three colours.", "Why is the sky blue?")


def share_of_vowels(*, completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def test_two_steps_of_trpo(shared: Path, tmp_path: Path) -> None:
    tree = {
        "run": {"out_dir": str(tmp_path / "run"), "device": "cpu"},
        "data": {"prompts": {"path": str(write_rows(tmp_path / "p.jsonl", [{"prompt": q} for q in QUESTIONS]))}},
        "policy": {"model": str(shared / FOLDER), "lora": {"r": 8}},
        "reward": {"source": {"type": "function", "target": f"{__file__}:share_of_vowels"}},
        "sampling": {"completions_per_prompt": 4, "max_new_tokens": 16},
        "algorithm": {"preset": "trpo", "advantage": {"type": "group"}, "policy_loss": {"cg_iterations": 4}},
        "batch": {"prompts_per_step": 4, "epochs": 1},
        "schedule": {"steps": 2},
        "checkpoint": {"every": 0},
    }
    trained(tree)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "trust_region/kl" in row]
    assert len(steps) == 2
    assert all(row["trust_region/accepted"] == 1.0 for row in steps)
    assert all(0.1 * 0.01 < row["trust_region/kl"] <= 0.01 for row in steps)
    assert all(row["trust_region/improvement"] > 0 for row in steps)
    # Of the residual no more: iterations lower the error in the norm of the metric, and this one only in the end.
    assert all(isfinite(row["trust_region/cg_residual"]) for row in steps)

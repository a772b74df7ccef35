"""A rescue on a published chat model: GSM8K's questions, with the teacher's answers as hints."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from runs import trained, write_rows

SMOLLM2 = Path("models/smollm2-135m-instruct")
ROOT = Path(__file__).parents[2]


def last_number(*, completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """1 if the last number is the answer."""
    numbers = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in completions]
    return [float(row[-1:] == [reference["number"]]) for row, reference in zip(numbers, references, strict=True)]


def short_problems(path: Path, count: int) -> list[dict[str, str]]:
    """The problems with the shortest texts of the first thousand."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in islice(file, 1000)]
    problems.sort(key=lambda row: len(row["question"] + row["answer"]))
    return [{**row, "number": row["answer"].split("####")[1].strip()} for row in problems[:count]]


@pytest.mark.slow
def test_smollm2_is_given_hints_where_it_fails_and_failed_questions_come_back(shared: Path, tmp_path: Path) -> None:
    if not (ROOT / SMOLLM2).is_dir():
        pytest.skip(f"no {SMOLLM2}: python scripts/get_smollm2.py gets it")
    rows = short_problems(shared / "data" / "gsm8k" / "train.jsonl.gz", 8)
    tree: dict[str, Any] = {
        "run": {"out_dir": str(tmp_path / "run"), "device": "cpu"},
        "data": {"prompts": {"path": str(write_rows(tmp_path / "problems.jsonl", rows))}},
        "policy": {"model": str(ROOT / SMOLLM2), "lr": 1e-5, "lora": {"r": 4}},
        "reference": {"measure": False},
        "reward": {"source": {"type": "function", "target": f"{__file__}:last_number"}},
        "sampling": {"completions_per_prompt": 4, "max_new_tokens": 24},
        "algorithm": {
            "preset": "dr_grpo",
            "rescue": {
                "hints": [
                    {"column": "answer", "share": 0.5},
                    {"column": "number", "template": "{prompt}\n\nHint: the answer is {hint}. Say the answer only."},
                ]
            },
        },
        "batch": {"prompts_per_step": 4, "micro_batch_size": 4},
        "schedule": {"steps": 2},
        "checkpoint": {"every": 0},
    }
    trained(tree)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert lines[0]["rescue/failed"] > 0
    assert lines[0]["completion/count"] > 16  # hints were tried
    assert all(0 < line["rescue/weight"] < 2 for line in lines if "rescue/weight" in line)
    assert all(line["policy/first_ratio_deviation"] < 1e-4 for line in lines)
    assert lines[1]["rescue/replayed"] == min(2, lines[0]["rescue/waiting"])

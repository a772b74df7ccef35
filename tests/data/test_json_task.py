"""The generated JSON task: its answers get the best grade, and its splits share no key."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from rlhf.verifiers.strict_json import JsonGrader

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("flat", "arrays", "objects", "nested")


def generated(out: Path, split: str, *more: str) -> list[dict[str, object]]:
    command = [sys.executable, str(ROOT / "scripts" / "make_json_task.py"), str(out), "--split", split, *more]
    subprocess.run(command, check=True, capture_output=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_programs_answers_are_right(tmp_path: Path) -> None:
    rows = generated(tmp_path / "train.jsonl", "train", "--rows", "80", "--tiers", *TIERS)
    grade = JsonGrader().start()
    assert [row["tier"] for row in rows[:4]] == list(TIERS)
    for row in rows:
        grades = grade(str(row["answer"]), row)
        assert isinstance(grades, dict)
        assert grades["full"] == 1.0
        wordy = grade(f"Here it is: {row['answer']}", row)
        assert isinstance(wordy, dict)
        assert (wordy["right"], wordy["only"], wordy["full"]) == (1.0, 0.0, 0.0)


def test_the_splits_share_no_key(tmp_path: Path) -> None:
    def keys(value: object) -> set[str]:
        if not isinstance(value, dict):
            return set()
        inner = [
            keys(kind.get("object", kind.get("array", {}).get("object") if isinstance(kind.get("array"), dict) else {}))
            for kind in value.values()
            if isinstance(kind, dict)
        ]
        return set(value).union(*inner)

    splits = [
        {
            key
            for row in generated(tmp_path / f"{split}.jsonl", split, "--rows", "200", "--tiers", *TIERS)
            for key in keys(row["keys"])
        }
        for split in ("train", "tune", "test")
    ]
    for one, other in combinations(splits, 2):
        assert one
        assert not one & other


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_seed_gives_the_same_rows(seed: str, tmp_path: Path) -> None:
    rows = generated(tmp_path / "a.jsonl", "train", "--rows", "4", "--seed", seed)
    assert generated(tmp_path / "b.jsonl", "train", "--rows", "4", "--seed", seed) == rows

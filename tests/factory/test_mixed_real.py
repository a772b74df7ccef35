"""A mixed and streamed run on a model and data in their published form."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from real_model import FOLDER
from runs import trained_offline


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Could not find a config file")  # peft, of a GGUF file
def test_smollm2_learns_from_two_published_data_sets(shared: Path, tmp_path: Path) -> None:
    """Transcripts of HH-RLHF and questions of GSM8K, 3 to 1, both gzipped, two steps of four rows."""
    sources = {
        "hh": {"path": str(shared / "data/hh_rlhf_harmless/train.jsonl.gz"), "weight": 3},
        "math": {"path": str(shared / "data/gsm8k/train.jsonl.gz"), "weight": 1},
    }
    trained_offline(
        {
            "run": {"out_dir": str(tmp_path), "device": "cpu"},
            "data": {"sft": {"sources": sources, "stream": True, "shuffle_buffer": 64, "max_tokens": 192}},
            "policy": {"model": str(shared / FOLDER), "lr": 1e-4, "lora": {"r": 4}},
            "algorithm": {"preset": "sft"},
            "batch": {"prompts_per_step": 4, "micro_batch_size": 2},
            "schedule": {"steps": 2},
            "checkpoint": {"every": 0},
        }
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["source/rows/hh"], row["source/rows/math"]) for row in rows] == [(3.0, 1.0), (6.0, 2.0)]
    assert all(math.isfinite(row[f"source/loss/{name}"]) for row in rows for name in sources)
    assert rows[0]["source/skipped/hh"] > 0  # too long, or not as a pair should be

"""The memory in which a process loads its part of a model under ZeRO-3, by benchmarks/loading_memory.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sharded import ROOT, needs, start_ranks
from transformers import LlamaConfig, LlamaForCausalLM

PROCESSES = 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_process_needs_its_share_and_one_weight(tmp_path: Path) -> None:
    needs("zero3")
    config = LlamaConfig(
        vocab_size=16_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8
    )
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    script, out = ROOT / "benchmarks" / "loading_memory.py", tmp_path / "row.json"
    command = [sys.executable, str(script), "--worker", "split", str(tmp_path / "model"), str(out)]
    start_ranks(command, tmp_path, processes=PROCESSES, timeout_s=900.0)
    row = json.loads(out.read_text())
    assert row["share_mb"] > 60
    assert row["peak_mb"] <= 1.3 * row["share_mb"] + row["largest_weight_mb"], row

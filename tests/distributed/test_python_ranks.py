"""rlhf.train in the processes of a launcher, with rows, a model and a function that are objects of the script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import make_model
from sharded import start_ranks

from rlhf.tracking.run_folder import RunFolder

SCRIPT = """
import atexit, os, pathlib, time
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer
import rlhf
group_left = pathlib.Path(f"group-{os.environ['RANK']}")
atexit.register(lambda: group_left.write_text(str(distributed.is_initialized())))
time.sleep(2 * int(os.environ["RANK"]))  # the first process has written its rows long before
rlhf.train(
    AutoModelForCausalLM.from_pretrained("model"),
    "grpo",
    tokenizer=AutoTokenizer.from_pretrained("model"),
    prompts=["red one", "blue one", "red two", "blue two"] * 2000,
    reward=lambda completions: [float(len(c)) for c in completions],
    folder="run",
    steps=2,
    batch={"prompts_per_step": 4, "micro_batch_size": 4},
    sampling={"completions_per_prompt": 4, "max_new_tokens": 4},
    run={"device": "cpu"},
)
"""


def test_processes_share_a_folder_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    start_ranks([sys.executable, "script.py"], tmp_path, processes=2)
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    assert not list((tmp_path / "run").rglob(".*-[01]")), "no process leaves its own copy"
    assert [(tmp_path / f"group-{rank}").read_text() for rank in range(2)] == ["False"] * 2, "its threads end in order"
    assert RunFolder(tmp_path / "run").read_metrics()[-1]["step"] == 2
    assert ["step 2/2" in (tmp_path / f"log-{rank}").read_text() for rank in range(2)] == [True, False]
    with pytest.raises(AssertionError, match="run holds a run: give several processes another folder, or resume=True"):
        start_ranks([sys.executable, "script.py"], tmp_path, processes=2)

"""Two machines with unlike files or commands: the run stops before its first step and names what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import make_model, write_rows
from sharded import environment, free_port

ROWS = [{"prompt": f"{color} one", "completion": " good"} for color in ("red", "blue")] * 4


def host(folder: Path, out: Path, *, seed: int = 0, answer: str = " good", **settings: Any) -> Path:
    """The working folder of a machine, whose configuration names files in it."""
    folder.mkdir()
    make_model(folder / "model", seed=seed)
    write_rows(folder / "sft.jsonl", [{**row, "completion": answer} for row in ROWS])
    tree = {
        "run": {"out_dir": str(out), "device": "cpu"},
        "data": {"sft": {"path": "sft.jsonl"}},
        "policy": {"model": "model", "lr": 1e-3},
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": 4},
        "schedule": {"steps": 2},
        "sharding": "ddp",
        **settings,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder


def started(folders: list[Path]) -> tuple[list[int], str]:
    """The exit codes of one process for each folder, and the output of all."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(folders))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "rlhf", "train", "run.yaml"],
            cwd=folder,
            env=environment() | shared | {"RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [process.returncode for process in processes], " ".join("".join(outputs).split())


UNLIKE = {
    "rows": ({"answer": " bad"}, "data.sft: process 1 has read other content than process 0"),
    "weights": ({"seed": 1}, "policy.model: process 1 has read other content than process 0"),
    "settings": (
        {"schedule": {"steps": 3}},
        "process 1 has other settings than process 0 (schedule.steps: 2 → 3)",
    ),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_unlike_machines_train_nothing(tmp_path: Path, what: str) -> None:
    unlike, message = UNLIKE[what]
    out = tmp_path / "run"
    codes, output = started([host(tmp_path / "n0", out), host(tmp_path / "n1", out, **unlike)])
    assert codes == [2, 2], output
    assert f"error: {message}" in output
    assert not (out / "metrics.jsonl").exists()


def test_copies_of_the_files_on_every_machine_are_alike(tmp_path: Path) -> None:
    """The folder of the cache is each machine's own."""
    out = tmp_path / "run"
    hosts = [
        host(tmp_path / name, out, run={"out_dir": str(out), "device": "cpu", "cache_dir": str(tmp_path / name)})
        for name in ("n0", "n1")
    ]
    codes, output = started(hosts)
    assert codes == [0, 0], output
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((out / "complete.json").read_text())["step"] == 2

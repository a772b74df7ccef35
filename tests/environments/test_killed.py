"""A run that is killed in the middle of an episode continues to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
from test_episodes import tree


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_five_kills_change_nothing(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    settings = tree(tmp_path, "KilledAt", kwargs={"counter": str(counter)})
    settings["checkpoint"] = {"every": 1}
    settings["schedule"] = {"steps": 4}
    counter.write_text("0")
    whole = runs.trained(settings, f"run.out_dir={tmp_path / 'whole'}")
    assert -int(counter.read_text()) > 100
    for steps in (7, 45, 20, 60, 3):
        counter.write_text(str(steps))
        run = runs.online(settings)
        with pytest.raises(BaseException, match=r"^$") as caught:
            runs.train(run)
        assert type(caught.value).__name__ == "Killed"
        run.session.recorder.close()  # the lock of the folder, which dies with a process
    rest = runs.trained(settings)
    assert runs.largest_difference(runs.weights(whole.models.policy), runs.weights(rest.models.policy)) == 0.0
    assert whole.models.critic is not None
    assert rest.models.critic is not None
    assert runs.largest_difference(runs.weights(whole.models.critic), runs.weights(rest.models.critic)) == 0.0
    assert _lines(tmp_path / "whole", "metrics.jsonl") == _lines(tmp_path / "run", "metrics.jsonl")
    assert sum("env/return" in line for line in _lines(tmp_path / "run", "metrics.jsonl")) == 4
    assert all(line["seconds"]["environment"] > 0 for line in _lines(tmp_path / "whole", "timings.jsonl"))

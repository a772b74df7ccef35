"""A run that is killed in the middle of an episode continues to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
from test_episodes import tree


def _returns(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return list({line["step"]: line["env/return"] for line in lines if "env/return" in line}.values())


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
    returns = [_returns(tmp_path / name) for name in ("whole", "run")]
    assert returns[0] == returns[1]
    assert len(returns[0]) == 4

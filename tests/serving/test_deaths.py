"""Servers and trainers that die: the run has the same numbers as without it, or stops and can be continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from runs import largest_difference, make_model, online, ppo_tree, trained, weights
from servers import listening, served, service_of
from torch import Tensor

from rlhf.errors import SamplingError
from rlhf.sampling.service import PolicyService
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun

STEPS = ("schedule.steps=60", "checkpoint.every=0")
GRPO = ("algorithm.preset=grpo", "sampling.completions_per_prompt=4", "eval.every=0")


@pytest.fixture(autouse=True)
def looks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.sampling.pool.POLL_S", 0.05)


class Mortal:
    """A server that is killed in the middle of some requests, and is started again at once or never again."""

    def __init__(self, model: Path, *, dies_at: set[int], comes_back: bool = True) -> None:
        self.model, self.dies_at, self.comes_back = model, dies_at, comes_back
        self.service = service_of(model)
        self.asked, self.deaths, self.is_dead = 0, 0, False
        self.lock = threading.Lock()

    def answer(self, method: str, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.is_dead:
            raise ConnectionAbortedError
        if route == "/v1/completions":
            with self.lock:
                self.asked += 1
                dies = self.asked in self.dies_at
            if dies:
                self.service.answer(method, route, body)  # it has computed, and nobody gets it
                self.deaths += 1
                self.is_dead = not self.comes_back
                self.service = service_of(self.model)
                raise ConnectionAbortedError
        return self.service.answer(method, route, body)


def tree_of(folder: Path, model: Path, *urls: str, **server: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    once = {"epochs": 1, "minibatches": 1}  # updates are not under test
    return ppo_tree(folder, policy={"model": str(model)}, sampling=served(*urls, **server), batch=once)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights after a run whose one server lives."""
    folder = tmp_path_factory.mktemp("calm")
    model = make_model(folder / "model")
    with listening(service_of(model)) as url:
        return weights(trained(tree_of(folder / "run", model, url), *GRPO).models.policy)


def same(expected: dict[str, Tensor], run: OnlineRun) -> bool:
    return largest_difference(expected, weights(run.models.policy)) == 0.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_five_kills_in_mid_rollout_change_nothing(tmp_path: Path, calm: dict[str, Tensor]) -> None:
    model = make_model(tmp_path / "model")
    mortal = Mortal(model, dies_at={3, 6, 9, 13, 14})
    with listening(mortal) as url:
        hard = trained(tree_of(tmp_path / "hard", model, url), *GRPO)
    assert mortal.deaths == 5
    assert same(calm, hard)


def test_one_of_two_servers_dies_for_good(tmp_path: Path, calm: dict[str, Tensor]) -> None:
    model = make_model(tmp_path / "model")
    mortal = Mortal(model, dies_at={6}, comes_back=False)
    with listening(service_of(model)) as one, listening(mortal) as two:
        hard = trained(tree_of(tmp_path / "hard", model, one, two), *GRPO)
    assert mortal.deaths == 1
    assert same(calm, hard)
    assert hard.servers is not None
    assert [remote.is_alive for remote in hard.servers.remotes] == [True, False]


def test_a_run_without_a_server_is_saved_and_continues(tmp_path: Path, calm: dict[str, Tensor]) -> None:
    model = make_model(tmp_path / "model")
    mortal = Mortal(model, dies_at={8}, comes_back=False)
    with listening(mortal) as url:
        tree = tree_of(tmp_path / "hard", model, url, wait_s=1.0)
        run = online(tree, *GRPO)
        with pytest.raises(SamplingError, match=r"has answered for 1 s .*The run is saved at step 2"):
            train(run)
        run.session.recorder.close()
    del run
    with listening(service_of(model)) as url:
        again = trained(tree_of(tmp_path / "hard", model, url), *GRPO)
    assert same(calm, again)


def test_samples_of_older_weights_that_a_dead_server_leaves_out_are_noted(tmp_path: Path) -> None:
    """The run continues with newer samples: the weights that were to draw these are in no checkpoint."""
    model = make_model(tmp_path / "model")
    mortal = Mortal(model, dies_at={8}, comes_back=False)
    ahead = ("overlap.ahead=true", *GRPO)
    with listening(mortal) as url:
        run = online(tree_of(tmp_path / "hard", model, url, wait_s=1.0), *ahead)
        with pytest.raises(SamplingError, match=r"has answered for 1 s .*The run is saved at step 2"):
            train(run)
        run.session.recorder.close()
    folder = tmp_path / "hard" / "run"
    lines = (folder / "notes.jsonl").read_text().splitlines()
    (note,) = [json.loads(line)["text"] for line in lines if "overlap.ahead" in line]
    assert "no samples of step 3 by the weights of step 1" in note
    with listening(service_of(model)) as url:
        trained(tree_of(tmp_path / "hard", model, url), *ahead)
    ages = [json.loads(line).get("overlap/age") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [age for age in ages if age is not None][:3] == [0.0, 1.0, 0.0]


def test_a_push_that_breaks_half_way_stops_the_run_and_the_server(tmp_path: Path) -> None:
    class Breaks(PolicyService):
        pushes = 0

        def apply(self, tensors: Mapping[str, Tensor]) -> None:
            self.pushes += 1
            half = dict(list(tensors.items())[: len(tensors) // 2])
            super().apply(half if self.pushes == 2 else tensors)
            if self.pushes == 2:
                raise OSError("the disk has gone")

    model = make_model(tmp_path / "model")
    service = service_of(model, Breaks)
    with listening(service) as url:
        run = online(tree_of(tmp_path / "run", model, url), *GRPO)
        with pytest.raises(SamplingError, match=r"could not load the weights .*the disk has gone.*saved at step 1"):
            train(run)
        run.session.recorder.close()
        with pytest.raises(Exception, match="the last push broke"):
            service.answer("POST", "/v1/completions", {"prompt": [4, 5]})


def start_server(model: Path, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rlhf", "serve-policy", str(model), "--port", str(port), "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "sampling.server.urls" in line, line
    return process


@pytest.mark.slow
def test_real_processes_killed_five_times(tmp_path: Path) -> None:
    """SIGKILL at any moment, a new process in its place, on the same port."""
    model = make_model(tmp_path / "model")
    with listening(service_of(model)) as url:
        expected = weights(trained(tree_of(tmp_path / "calm", model, url), *GRPO, *STEPS).models.policy)
    with listening(service_of(model)) as url:
        port = int(url.rsplit(":", 1)[1])
    processes, over, kills = [start_server(model, port)], threading.Event(), [0]

    def kill() -> None:
        for _ in range(5):
            if over.wait(0.4):
                return
            processes[-1].send_signal(signal.SIGKILL)
            processes[-1].wait()
            kills[0] += 1
            processes.append(start_server(model, port))

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        hard = trained(tree_of(tmp_path / "hard", model, f"http://127.0.0.1:{port}"), *GRPO, *STEPS)
    finally:
        over.set()
        killer.join()
        for process in processes:
            process.kill()
            process.communicate()
    assert kills == [5], "the run ended before the last kill: give it more steps"
    assert same(expected, hard)

"""A reward that raises, hangs, returns too little, or whose server dies: a clear error, the run saved, nothing lost."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from quick import quick
from runs import count_good, largest_difference, online, ppo_tree, trained, weights
from torch import Tensor

from rlhf.config.files import merge
from rlhf.errors import RewardError
from rlhf.rewards.function import TimeLimitExceeded, run_with_timeout
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun
from rlhf.training.session import TrainState

FILES = ("metrics.jsonl", "samples.jsonl")
FAULTS: dict[int, str] = {}  # call, from 1 -> its fault
calls: list[int] = []


def faulty(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    calls.append(1)
    scores = count_good(prompts=prompts, completions=completions, references=references)
    match FAULTS.get(len(calls)):
        case "raises":
            raise ZeroDivisionError("no words")
        case "hangs":
            while True:
                with contextlib.suppress(Exception):  # a hanging function may well catch everything
                    time.sleep(60)
        case "too few":
            return scores[:-1]
        case _:
            return scores


def tree_of(folder: Path, name: str) -> dict[str, Any]:
    source = {"source": {"type": "function", "target": f"{__name__}:faulty", "timeout_s": 0.5}}
    run = {"out_dir": str(folder / name)}
    once = {"epochs": 1, "minibatches": 1}  # updates are not under test
    return ppo_tree(folder, reward=source, run=run, checkpoint={"every": 0}, batch=once)


@pytest.fixture(autouse=True)
def well() -> Iterator[None]:
    FAULTS.clear()
    calls.clear()
    yield
    FAULTS.clear()


SAID = {
    "raises": r"ZeroDivisionError: no words at .*faults\.py:\d+ \(called with \d+ completions; the first: '",
    "hangs": r"gave no answer in 0\.5 s \(called with \d+ completions; the first: '.*timeout_s",
    "too few": r"\d+ scores for \d+ completions; the first without one: '",
}
# Calls: the evaluation before step 1, steps 1 and 2, the evaluation, steps 3 and 4, the evaluation.
STEP_3, EVALUATION_2, EVALUATION_4 = 5, 4, 7


@dataclass(frozen=True)
class Whole:
    """A run in which nothing went wrong."""

    weights: dict[str, Tensor]
    state: TrainState
    files: dict[str, bytes]

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Whole:
        run = trained(tree)
        return cls(weights(run.models.policy), run.session.state, files_of(run))


def files_of(run: OnlineRun) -> dict[str, bytes]:
    return {name: (run.session.recorder.folder.path / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    FAULTS.clear()
    return Whole.of(tree_of(tmp_path_factory.mktemp("whole"), "whole"))


CASES = [
    ("raises", STEP_3, 2),
    ("hangs", STEP_3, 2),
    ("too few", STEP_3, 2),
    ("raises", EVALUATION_2, 2),
    ("raises", EVALUATION_4, 4),
]


@pytest.mark.parametrize(
    "fault, call, saved_at", quick(CASES, [case for case in CASES if case != ("raises", STEP_3, 2)])
)
def test_the_run_is_saved_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, whole: Whole, fault: str, call: int, saved_at: int
) -> None:
    calls.clear()  # of the whole run, if this test is the first
    FAULTS[call] = fault
    broken = online(tree_of(tmp_path, "broken"))
    with pytest.raises(RewardError, match=SAID[fault] + rf".*saved at step {saved_at}: the same command continues"):
        train(broken)
    broken.session.recorder.close()
    assert [path.name for path in broken.session.checkpoints.all()] == [f"step-{saved_at:06d}"]
    FAULTS.clear()
    resumed = trained(tree_of(tmp_path, "broken"))
    assert largest_difference(whole.weights, weights(resumed.models.policy)) == 0.0
    assert resumed.session.state == whole.state
    assert files_of(resumed) == whole.files
    final, _ = TrainState.read(resumed.session.checkpoints.all()[-1])
    assert final == whole.state


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    FAULTS[1] = "raises"
    run = online(tree_of(tmp_path, "run"))
    with pytest.raises(RewardError) as caught:
        train(run)
    assert "saved" not in str(caught.value)
    assert run.session.checkpoints.all() == []


class Dying:
    """A reward server that answers 500, or not at all, while it is ill."""

    def __init__(self) -> None:
        self.ill_from, self.ill_until, self.how = 10**9, 10**9, "500"
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked += 1
                if outer.ill_from <= outer.asked < outer.ill_until:
                    if outer.how == "500":
                        self.send_error(500)
                    else:
                        self.close_connection = True
                    return
                scores = count_good(prompts=[], completions=asked["completions"], references=[])
                body = json.dumps({"scores": scores}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/score"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dying]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    one = Dying()
    yield one
    one.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, not slept."""
    waited: list[float] = []
    monkeypatch.setattr("rlhf.rewards.http.time.sleep", waited.append)
    return waited


def remote_tree(folder: Path, name: str, server: Dying) -> dict[str, Any]:
    tree = merge(tree_of(folder, name), {"data": {"eval_prompts": None}})
    tree["reward"] = {"source": {"type": "remote", "url": server.url}}
    return tree


@pytest.fixture(scope="module")
def whole_remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        server = Dying()
        yield Whole.of(remote_tree(tmp_path_factory.mktemp("remote"), "whole", server))
        server.close()


@pytest.mark.parametrize("how", ["500", "silence"])
def test_a_server_that_is_away_for_a_minute_is_waited_for(
    tmp_path: Path, whole_remote: Whole, server: Dying, pauses: list[float], how: str
) -> None:
    server.ill_from, server.ill_until, server.how = 3, 10, how  # seven tries of step 3
    run = trained(remote_tree(tmp_path, "run", server))
    ours = [pause for pause in pauses if pause >= 0.5]  # other sleeps are shorter
    shares = [pause / longest for pause, longest in zip(ours, (1, 2, 4, 8, 16, 30, 30), strict=True)]
    assert all(0.5 <= share <= 1.0 for share in shares)
    assert len(set(shares)) == 7
    assert largest_difference(whole_remote.weights, weights(run.models.policy)) == 0.0


def test_one_that_stays_away_ends_in_a_saved_run(
    tmp_path: Path, whole_remote: Whole, server: Dying, pauses: list[float]
) -> None:
    server.ill_from = 3
    with pytest.raises(RewardError, match=r"no answer in 9 tries .*saved at step 2: the same command continues"):
        train(online(remote_tree(tmp_path, "run", server)))
    server.ill_from = 10**9
    resumed = trained(remote_tree(tmp_path, "run", server))
    assert resumed.session.resumed
    assert largest_difference(whole_remote.weights, weights(resumed.models.policy)) == 0.0
    assert files_of(resumed) == whole_remote.files


def test_what_takes_too_long_is_interrupted() -> None:
    began = time.monotonic()
    with pytest.raises(TimeLimitExceeded):
        run_with_timeout(0.1, lambda: time.sleep(30))
    with pytest.raises(TimeLimitExceeded):
        run_with_timeout(0.1, lambda: sum(1 for _ in iter(int, 1)))
    assert time.monotonic() - began < 5
    assert run_with_timeout(5.0, lambda: 3) == 3
    assert run_with_timeout(None, lambda: 4) == 4
    time.sleep(0.15)  # no alarm is left


def test_in_another_thread_too() -> None:
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(TimeLimitExceeded):
            pool.submit(run_with_timeout, 0.05, lambda: time.sleep(0.3)).result()
        assert pool.submit(run_with_timeout, 5.0, lambda: 3).result() == 3
        with pytest.raises(ZeroDivisionError):
            pool.submit(run_with_timeout, 5.0, lambda: 1 / 0).result()

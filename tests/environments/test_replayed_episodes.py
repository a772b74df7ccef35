"""Worker processes of environments: what they answer after one of them was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import word_games

from rlhf.environments.host import Act, Begin, HostReply
from rlhf.environments.pool import CHANGED, ENDED, EnvironmentPool
from rlhf.environments.protocol import Fault, StepResult

SAME, CHANGING, EXITING = 1, 2, 3


@contextmanager
def one_worker(counter: Path, counts: str) -> Iterator[EnvironmentPool]:
    """Run a worker with three episodes, of which one will end the process."""
    target = f"{word_games.__file__}:Counting"
    pool = EnvironmentPool(target, {"counter": str(counter), "counts": counts}, workers=1)
    prompts = {SAME: "same", CHANGING: "changing", EXITING: "exiting"}
    try:
        pool.run([Begin(episode, 5, {"prompt": prompt}) for episode, prompt in prompts.items()])
        yield pool
    finally:
        pool.stop()


def answer_to(pool: EnvironmentPool, episode: int) -> HostReply:
    (answer,) = pool.run([Act(episode, "red")])
    return answer


@pytest.mark.parametrize("counts", ["reset", "step"])
def test_an_episode_that_is_played_again_otherwise_is_a_fault(tmp_path: Path, counts: str) -> None:
    """Its first observation differs, or the answer to its first action; the other episode goes on."""
    with one_worker(tmp_path / "counter", counts) as pool:
        first = [answer_to(pool, episode) for episode in (SAME, CHANGING, EXITING)]
        assert isinstance(first[0], StepResult)
        assert isinstance(first[1], StepResult)
        assert first[2] == Fault(ENDED)
        second = [answer_to(pool, episode) for episode in (SAME, CHANGING)]
        assert isinstance(second[0], StepResult)
        assert second[0] != first[0]
        assert second[1] == Fault(CHANGED)


def test_an_episode_that_fails_when_it_is_played_again_tells_why(tmp_path: Path) -> None:
    with one_worker(tmp_path / "counter", "failure") as pool:
        for episode in (SAME, CHANGING, EXITING):
            answer_to(pool, episode)
        assert isinstance(answer_to(pool, SAME), StepResult)
        answer = answer_to(pool, CHANGING)
        assert isinstance(answer, Fault)
        assert "played once" in answer.reason


def test_an_episode_that_ends_the_process_when_it_is_played_again_takes_no_other_with_it(tmp_path: Path) -> None:
    with one_worker(tmp_path / "counter", "exit") as pool:
        for episode in (SAME, CHANGING, EXITING):
            answer_to(pool, episode)
        assert isinstance(answer_to(pool, SAME), StepResult)
        assert answer_to(pool, CHANGING) == Fault(ENDED)

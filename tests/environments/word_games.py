"""Environments over the eight words of tests/runs.py, some of which fail on purpose."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from word_rewards import golds


class CountGood:
    """One turn: the reward function of tests/runs.py as an environment."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", golds(action)[0], True, False, {}


class Colors:
    """Says a color in each turn and pays for it in the action that follows; a seed decides which."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.played, self.seed = 0, int(seed or 0)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.played += 1
        wanted = ("red", "blue")[(self.seed + self.played) % 2]
        reward = 0.25 * action.split().count(wanted) + 0.5 * action.split().count("good")
        return f"{wanted} one", reward, self.played == self.turns or "bad" in action, False, {}


class Limited(Colors):
    """Ends an episode after two turns by a limit of its own, also if the task is over at the same time."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, "bad" in action, self.played == 2, info


class Collector:
    """A class of tools whose reward is in the state of the instance."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def reset(self, prompt: str) -> None:
        self.count, self.fails = 0, self.fails and prompt == "red one"

    def collect(self) -> str:
        """Collect one more."""
        self.count += 1
        return "red one"

    def get_reward(self, answer: str) -> float:
        if self.fails:
            raise RuntimeError("no reward")
        return self.count + 0.5 * (answer == "")


class Killed(BaseException):
    """The process is gone: nothing is saved."""


class KilledAt(Colors):
    """Kills the process after the number of steps in a file, counted over all episodes."""

    def __init__(self, counter: str) -> None:
        super().__init__()
        self.counter = Path(counter)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        left = int(self.counter.read_text()) - 1
        self.counter.write_text(str(left))
        if left == 0:
            raise Killed
        return super().step(action)


class LateNumpy(Colors):
    """Draws its seed from numpy's global generator, which it imports at the reset."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        numpy = importlib.import_module("numpy")
        return super().reset(seed=int(numpy.random.randint(2)))


class Broken(Colors):
    """Fails in its second turn in the way that is asked for, for every `every`th episode (by the row's prompt)."""

    def __init__(self, how: str, turns: int = 3, prompt: str = "red one", log: str = "") -> None:
        super().__init__(turns)
        self.how, self.prompt, self.log = how, prompt, log

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        self.fails = options["prompt"] == self.prompt
        return super().reset(seed=seed, options=options)

    def close(self) -> None:
        if self.how == "close" and self.fails:
            raise RuntimeError("still open")
        if self.log:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write("closed\n")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        if not self.fails:
            return result
        match self.how:
            case "raise":
                raise RuntimeError("no more colors")
            case "hang":
                time.sleep(60)
            case "exit":
                os._exit(3)
            case "nan":
                return result[0], float("nan"), False, False, {}
            case "long":
                return " ".join(["red"] * 10_000), 0.5, False, False, {}
            case "four":
                return result[:4]  # type: ignore[return-value]
        return result


class Failing(Colors):
    """Fails always."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise RuntimeError("no more colors")


class Wordy(Colors):
    """Begins with a long observation, for every row or for those of one prompt."""

    def __init__(self, words: int, prompt: str | None = None, word: str = "red") -> None:
        super().__init__()
        self.words, self.prompt, self.word = words, prompt, word

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        assert options is not None
        is_long = self.prompt in (None, options["prompt"])
        return " ".join([self.word] * (self.words if is_long else 1)), {}


class Counting(Colors):
    """Is no function of seed, row and actions, for one prompt: what it counts in a file decides its answer."""

    def __init__(self, counter: str, counts: str) -> None:
        super().__init__()
        self.counter, self.counts = Path(counter), counts

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        self.prompt = options["prompt"]
        return self.counted("reset") if self.prompt == "changing" else "", super().reset(seed=seed)[1]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.prompt == "exiting":
            os._exit(3)
        observation, *rest = super().step(action)
        return (observation + self.counted("step") if self.prompt == "changing" else observation), *rest

    def counted(self, where: str) -> str:
        """Return what this call adds to the observation."""
        again = self.counter.exists()
        if where == "step":
            self.counter.touch()
        if again and self.counts == "failure":
            raise RuntimeError("it can be played once")
        if again and self.counts == "exit":
            os._exit(4)
        return " again" if again and self.counts == where else ""


class KillsTheTrainer(Colors):
    """Kills the process that trains at a reset or a step, as the file `armed` of a folder says; then it hangs."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.arrive("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.arrive("step")
        return super().step(action)

    def arrive(self, place: str) -> None:
        """Count a call of this place over all worker processes, and kill their parent at the number of `armed`."""
        armed = self.folder / "armed"
        if not armed.is_file() or armed.read_text().split()[0] != place:
            return
        with (self.folder / "workers").open("a", encoding="utf-8") as calls:
            calls.write(f"{os.getpid()}\n")
        if len((self.folder / "workers").read_text().splitlines()) >= int(armed.read_text().split()[1]):
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)

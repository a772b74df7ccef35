"""Episodes whose actions a server draws, turn by turn: the bits of episodes in this process, also if servers die."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from quick import quick
from runs import largest_difference, make_model, trained, weights
from servers import listening, served, service_of
from test_deaths import Mortal
from torch import Tensor

from rlhf.config.files import merge

sys.path.append(str(Path(__file__).parents[1] / "environments"))
from test_episodes import tree
from test_one_turn import metrics_of

PRESETS = {
    "ppo": ("algorithm.preset=ppo", "environment.truncation=bootstrap"),
    "grpo": ("algorithm.preset=grpo", "sampling.completions_per_prompt=4", "batch.prompts_per_step=4"),
    "lora": ("algorithm.preset=rloo", "sampling.completions_per_prompt=2", "policy.lora.r=2", "policy.lr=0.1"),
}
SERVER = ("server/",)


def play(folder: Path, model: Path, *overrides: str, **changes: Any) -> Any:
    folder.mkdir()
    settings = merge(tree(folder), {"policy": {"model": str(model)}, **changes})
    return trained(settings, *overrides)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Metrics of episodes too, but none of the clock or of servers."""
    lines = metrics_of(folder / "run")
    return [{name: value for name, value in line.items() if not name.startswith(SERVER)} for line in lines]


@pytest.mark.parametrize("name", quick(["ppo", "lora"], ["lora"]))
def test_served_episodes_are_the_episodes_bit_for_bit(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "model")
    here = play(tmp_path / "here", model, *PRESETS[name])
    service = service_of(model)
    with listening(service) as url:
        there = play(tmp_path / "there", model, *PRESETS[name], sampling=served(url))
    assert largest_difference(weights(here.models.policy), weights(there.models.policy)) == 0.0
    assert metrics(tmp_path / "here") == metrics(tmp_path / "there")
    samples = [(tmp_path / name / "run" / "samples.jsonl").read_bytes() for name in ("here", "there")]
    assert samples[0] == samples[1]
    assert b'"turn": 3' in samples[0]


class Counting:
    """A service that counts its requests."""

    def __init__(self, model: Path) -> None:
        self.service, self.loads, self.completions = service_of(model), 0, 0

    def answer(self, method: str, route: str, body: Any) -> dict[str, Any]:
        self.loads += route == "/collective_rpc"
        self.completions += route == "/v1/completions" and "rlhf" in body
        return self.service.answer(method, route, body)


def test_weights_are_pushed_once_a_step_and_not_once_a_turn(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    counting = Counting(model)
    with listening(counting) as url:  # type: ignore[arg-type]
        play(tmp_path / "run", model, *PRESETS["grpo"], sampling=served(url, canary={"prompts": 0}))
    assert counting.loads == 3  # steps; of the first, whose weights the server cannot know, too
    assert counting.completions > 2 * counting.loads


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights after episodes on two servers that live."""
    folder = tmp_path_factory.mktemp("calm")
    model = make_model(folder / "model")
    with listening(service_of(model)) as one, listening(service_of(model)) as two:
        run = play(folder / "run", model, *PRESETS["grpo"], sampling=served(one, two))
    return weights(run.models.policy)


@pytest.mark.parametrize("comes_back", quick([True, False], [True]))
def test_servers_that_die_between_turns_change_nothing(
    tmp_path: Path, comes_back: bool, calm: dict[str, Tensor]
) -> None:
    model = make_model(tmp_path / "model")
    mortal = Mortal(model, dies_at={3, 6, 8} if comes_back else {6}, comes_back=comes_back)
    with listening(service_of(model)) as one, listening(mortal) as two:  # type: ignore[arg-type]
        hard = play(tmp_path / "hard", model, *PRESETS["grpo"], sampling=served(one, two))
    assert mortal.deaths == (3 if comes_back else 1)
    assert largest_difference(calm, weights(hard.models.policy)) == 0.0

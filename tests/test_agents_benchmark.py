"""The benchmark of agents at toy size: the play to imitate, a whole cell, the table."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from extras import import_extra

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("agent_tasks", "agents_learn")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def roles(game: dict[str, Any]) -> list[str]:
    return [message["role"] for message in game["messages"]]


PACKAGES = {"palindrome": "reasoning_gym", "cups": "textarena"}


@pytest.mark.parametrize("name", ["guess_7", "calculator", "no_tool", *PACKAGES])
def test_play_to_imitate_has_the_form_of_episodes(modules: dict[str, ModuleType], name: str) -> None:
    if name in PACKAGES:
        import_extra(PACKAGES[name])
    task = modules["agent_tasks"].TASKS[name]
    games = task.games(20, seed=0)
    assert games == task.games(20, seed=0) != task.games(20, seed=1)
    for game in games:
        turns = len(game["messages"]) // 2
        assert 1 <= turns <= task.turns
        assert roles(game) == ["user", "assistant"] * turns


def test_sums_that_are_held_out_are_no_others(modules: dict[str, ModuleType]) -> None:
    task = modules["agent_tasks"].TASKS["calculator"]
    learned, held_out = ({row["sum"] for row in task.rows(3000, held_out=part)} for part in (False, True))
    assert 90 < len(held_out) < 110  # one in five of 8 ** 3
    assert not learned & held_out


def test_calls_that_are_imitated_are_those_that_the_tools_take(modules: dict[str, ModuleType]) -> None:
    games = modules["agent_tasks"].TASKS["calculator"].games(60, seed=0)
    assert {len(game["messages"]) for game in games} == {4, 6}  # stopped after the first step, and worked out
    assert not any("error" in message["content"] for game in games for message in game["messages"][1:])


@pytest.mark.beside
def test_a_cell_is_run_once(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, out = modules["agents_learn"], tmp_path / "out.json"
    monkeypatch.setitem(benchmark.TASKS, "guess_7", replace(benchmark.TASKS["guess_7"], imitated=64))
    monkeypatch.setattr(benchmark, "HELD_OUT_EPISODES", 16)
    monkeypatch.setitem(benchmark.COMMON, "schedule", {"steps": 2, "warmup_steps": 0, "decay": "constant"})
    command = [
        "agents_learn.py",
        "--tasks",
        "guess_7",
        "--seeds",
        "0",
        "--work",
        str(tmp_path / "w"),
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", command)
    benchmark.main()
    cell = json.loads(out.read_text())["cells"]["guess_7/0"]
    assert list(cell) == list(benchmark.MODELS)
    assert all(0 <= model["success"] <= 1 for model in cell.values())
    assert 2 * 2 * 128 <= cell["sft"]["imitated_tokens"] <= 3 * 2 * 2 * 128  # a number and its end, one to three times
    assert cell["ppo"]["sampled_tokens"] >= 2 * 2 * 128  # a token and its end, at least, in each episode of two steps
    capsys.readouterr()
    benchmark.main()
    assert capsys.readouterr().out.splitlines()[2].startswith("| guess_7 | ")  # nothing but the table


def test_the_table_has_intervals_over_seeds(modules: dict[str, ModuleType]) -> None:
    def cell(*values: float) -> dict[str, dict[str, float]]:
        return {name: {"success": value} for name, value in zip(("start", "sft", "ppo", "grpo"), values, strict=True)}

    cells = {"guess_7/0": cell(0.2, 0.3, 0.8, 0.7), "guess_7/1": cell(0.4, 0.3, 1.0, 0.9), "guess_7/2": {"start": {}}}
    row = modules["agents_learn"].table(cells).splitlines()[2]
    assert row == "| guess_7 | 30 [0, 100] | 30 [30, 30] | 90 [0, 100] | 80 [0, 100] |"
    assert modules["agents_learn"].interval([0.2, 0.3, 0.4]) == "30 [5, 55]"  # 4.303 * 0.1 / sqrt(3) = 0.248


def test_the_page_has_the_table(modules: dict[str, ModuleType]) -> None:
    cells = json.loads((BENCHMARKS / "results" / "agents_learn.json").read_text(encoding="utf-8"))["cells"]
    page = (BENCHMARKS.parent / "docs" / "agents.md").read_text(encoding="utf-8")
    lines = modules["agents_learn"].table(cells).splitlines()
    assert len(lines) > 2
    assert [line for line in lines if line not in page] == []


def test_the_page_tells_how_few_games_tasks_have(modules: dict[str, ModuleType]) -> None:
    page = " ".join((BENCHMARKS.parent / "docs" / "agents.md").read_text(encoding="utf-8").split())
    tasks, settings_of = modules["agent_tasks"].TASKS, modules["agents_learn"].settings_of
    numbers, letters = tasks["guess_7"].kwargs["highest"], 26**2  # a letter twice, and one between
    assert (
        f"`guess_7` has {numbers} numbers, the three tasks of cups 108 games, and `palindrome` {letters} sets" in page
    )
    trees = [settings_of(tasks["palindrome"], arm, 0) for arm in ("ppo", "grpo")]
    ppo, grpo = (tree["batch"]["prompts_per_step"] * tree["schedule"]["steps"] for tree in trees)
    assert f"PPO's training draws {ppo:,} times and GRPO's {grpo} times" in page


def test_letters_of_palindromes_are_drawn_by_their_seed(modules: dict[str, ModuleType]) -> None:
    pytest.importorskip("reasoning_gym")
    games = modules["agent_tasks"].TASKS["palindrome"].games(2000, seed=0)
    sets = {"".join(sorted(re.findall(r"\w", game["messages"][0]["content"].rpartition(":")[2]))) for game in games}
    assert 600 < len(sets) <= 26**2  # 641 of 676 are expected among 2,000


def test_a_part_of_a_game_of_cups_says_nothing_about_the_ball() -> None:
    """Of 108 games a policy wins a third that does not read the ball's start, or one of the two swaps."""
    pairs = list(permutations(range(3), 2))
    games = list(product(range(3), pairs, pairs))
    assert len(games) == 108
    balls = {}
    for start, *swaps in games:
        place = start
        for one, other in swaps:
            place = {one: other, other: one}.get(place, place)
        balls[start, *swaps] = place
    for unread in range(3):
        rest = Counter((*game[:unread], *game[unread + 1 :], ball) for game, ball in balls.items())
        best: dict[tuple[object, ...], int] = {}
        for (*known, _), count in rest.items():
            best[tuple(known)] = max(count, best.get(tuple(known), 0))
        assert sum(best.values()) == len(games) / 3

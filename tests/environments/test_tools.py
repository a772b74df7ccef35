"""Tools and other libraries' environments: the form of calls, and the text that the policy reads."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, Optional, TypedDict

import numpy
import pytest
import torch
from extras import import_extra

from rlhf.environments.gym import TextOnly
from rlhf.environments.host import Act, Begin, End, Host
from rlhf.environments.load import load_environment
from rlhf.environments.pool import EnvironmentPool
from rlhf.environments.protocol import (
    EnvironmentFault,
    Fault,
    ResetResult,
    StepResult,
    checked_reset,
    checked_step,
)
from rlhf.environments.reasoning import Question
from rlhf.environments.textarena import Game
from rlhf.environments.tools import FunctionTools, ToolEnvironment, read_calls, tool_guide, tool_of
from rlhf.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def power(base: int, exponent: int = 2) -> int:
    """Raise a number to a power."""
    return base**exponent


def no_reward(answer: str, row: Mapping[str, Any]) -> float:
    raise AssertionError("this test gives no answer")


def test_a_tool_is_read_from_hints_and_docstring() -> None:
    schema = tool_of(power).schema()["function"]
    assert schema["name"] == "power"
    assert schema["description"] == "Raise a number to a power."
    assert schema["parameters"]["properties"] == {"base": {"type": "integer"}, "exponent": {"type": "integer"}}
    assert schema["parameters"]["required"] == ["base"]
    assert tool_guide([tool_of(power).schema()]).splitlines()[-1] == (
        "power(base: integer, exponent: integer): Raise a number to a power."
    )
    with pytest.raises(ValueError, match="docstring"):
        tool_of(lambda x: x, "nameless")

    def unhinted(x):  # type: ignore[no-untyped-def]
        """Do something."""

    with pytest.raises(ValueError, match="type hint for its argument 'x'"):
        tool_of(unhinted)


def test_an_optional_argument_and_a_choice_have_the_type_of_their_values() -> None:
    def search(top: int | None, near: Optional[list[int]], unit: Literal["m", "km"], either: int | str) -> None:  # noqa: UP045
        """Search."""

    properties = tool_of(search).schema()["function"]["parameters"]["properties"]
    assert [properties[name]["type"] for name in ("top", "near", "unit", "either")] == [
        "integer", "array", "string", "string",
    ]  # fmt: skip


class Place(TypedDict):
    """A place."""

    row: int


def test_hints_beyond_the_plain_ones() -> None:
    def look(
        size: int | float, at: tuple[int, int], names: set[str], place: Place, rows: Sequence[int], x: Any
    ) -> None:
        """Look."""

    schema = tool_of(look).schema()
    assert schema["function"]["parameters"]["properties"] == {
        "size": {"type": "number"},
        "at": {"type": "array"},
        "names": {"type": "array"},
        "place": {"type": "object"},
        "rows": {"type": "array"},
        "x": {},
    }
    line = "look(size: number, at: array, names: array, place: object, rows: array, x): Look."
    assert tool_guide([schema]).splitlines()[-1] == line


def test_a_result_keeps_its_letters() -> None:
    def count(word: str) -> dict[str, int]:
        """Count a word."""
        return {word: 1}

    call = '<tool>{"name": "count", "arguments": {"word": "ä"}}</tool>'
    assert FunctionTools([count], no_reward).step(call)[0] == '{"ä": 1}'


def test_calls_are_read_from_text() -> None:
    text = 'I add. <tool>{"name": "add", "arguments": {"a": 1}}</tool> <tool_call>\n{"name": "x"}\n</tool_call>'
    first, second = read_calls(text)
    assert (first.name, first.arguments) == ("add", {"a": 1})  # type: ignore[union-attr]
    assert second.name == "x"  # type: ignore[union-attr]
    assert "no JSON" in read_calls("<tool>{a}</tool>")[0]  # type: ignore[operator]
    assert read_calls("no call") == []


@pytest.mark.parametrize("tag", ["tool", "tool_call"])
def test_a_call_without_its_closing_tag_is_malformed_and_no_answer(tag: str) -> None:
    tools = FunctionTools([power], reward=lambda answer, row: 1.0)
    tools.reset(options={})
    unclosed, no_end = f'<{tag}>{{"name": "power"', f"error: the call has no end: write </{tag}> behind it"
    assert tools.step(unclosed) == (no_end, 0.0, False, False, {"tool_calls": 1, "tool_errors": 1})
    call = f'<{tag}>{{"name": "power", "arguments": {{"base": 3}}}}</{tag}>'
    told, _, over, _, info = tools.step(call + unclosed)
    assert told.splitlines() == ["9", no_end]
    assert (over, info) == (False, {"tool_calls": 2, "tool_errors": 1})


def test_an_answer_may_name_the_tag_of_calls() -> None:
    assert read_calls("I used the <tool> tag. The answer is 5.") == []
    assert read_calls("The tags are <tool> and <tool_call>.") == []
    assert read_calls("I call <tool>") == ["the call has no end: write </tool> behind it"]
    assert read_calls('A <tool> call: <tool_call>\n{"name"') == ["the call has no end: write </tool_call> behind it"]


def test_no_text_of_a_policy_stops_the_reading_of_calls() -> None:
    started = time.perf_counter()
    assert read_calls("<tool>" + " " * 4000) == ["the call has no end: write </tool> behind it"]
    assert len(read_calls("<tool>" * 1000)) == 1
    assert time.perf_counter() - started < 1  # minutes, if each division of the white space is tried
    assert "no JSON" in read_calls(f"<tool>{'[' * 5000}</tool>")[0]  # type: ignore[operator]


def test_a_result_that_is_no_json_is_an_error_of_the_tool() -> None:
    def pairs(a: int) -> dict[tuple[int, int], int]:
        """Count pairs."""
        return {(a, a): 1}

    call = '<tool>{"name": "pairs", "arguments": {"a": 3}}</tool>'
    told, _, over, _, info = FunctionTools([pairs], no_reward).step(call)
    assert told.startswith("error: TypeError")
    assert (over, info["tool_errors"]) == (False, 1)


class Waiting:
    """Tools that wait, all in one event loop."""

    async def reset(self, start: int = 1) -> None:
        self.value, self.loop, self.lock = start, asyncio.get_running_loop(), asyncio.Lock()

    async def add(self, number: int) -> int:
        """Add a number."""
        assert asyncio.get_running_loop() is self.loop
        async with self.lock:
            await asyncio.sleep(0.001)
            self.value += number
        return self.value

    async def fail(self) -> None:
        """Fail."""
        await asyncio.sleep(0.001)
        raise KeyError("nothing")

    async def wait(self) -> None:
        """Wait too long."""
        try:
            await asyncio.sleep(60)
        finally:
            self.value = -1

    async def get_reward(self) -> float:
        return float(self.value)


def test_tools_may_be_coroutines() -> None:
    """Also of a process with a running event loop, such as a notebook's."""
    environment = load_environment(f"{__file__}:Waiting", {})()
    call = '<tool>{"name": "%s", "arguments": %s}</tool>'

    def play() -> list[Any]:
        environment.reset(options={"start": 3})
        told = [environment.step(call % ("add", '{"number": 4}'))[0], environment.step(call % ("fail", "{}"))[0]]
        return [*told, *environment.step("7")[1:3]]

    async def play_in_a_loop() -> list[Any]:
        return play()

    for answers in (play(), asyncio.run(play_in_a_loop())):
        assert answers == ["7", "error: KeyError: 'nothing'", 7.0, True]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_coroutine_that_takes_too_long_is_a_failure_of_its_episode(workers: int) -> None:
    pool = EnvironmentPool(f"{__file__}:Waiting", {}, workers=workers, timeout_s=1.0)
    pool.run([Begin(1, 5, {}), Begin(2, 5, {})])
    overdue, told = pool.run(
        [Act(1, '<tool>{"name": "wait"}</tool>'), Act(2, '<tool>{"name": "add", "arguments": {"number": 1}}</tool>')]
    )
    pool.stop()
    assert isinstance(overdue, Fault)
    assert isinstance(told, StepResult)
    assert (overdue.reason[:15], told.observation) == ("no answer in 1 ", "2")


def test_the_policys_mistakes_are_told_and_counted() -> None:
    tools = FunctionTools([power], reward=lambda answer, row: float(answer == row["answer"]))
    tools.reset(options={"answer": "9"})
    call = '<tool>{"name": "%s", "arguments": %s}</tool>'
    told, reward, over, _, info = tools.step(call % ("power", '{"base": 3}') + call % ("root", "{}"))
    assert told.splitlines() == ["9", "error: no tool 'root'; there are power"]
    assert (reward, over, info) == (0.0, False, {"tool_calls": 2, "tool_errors": 1})
    assert "missing a required argument" in tools.step(call % ("power", "{}"))[0]
    assert "TypeError" in tools.step(call % ("power", '{"base": "x"}'))[0]
    assert tools.step("9")[1:3] == (1.0, True)
    assert tools.step("8")[1:3] == (0.0, True)


def test_a_class_in_trls_form() -> None:
    calculator = example("calculator")
    make = load_environment(f"{EXAMPLES}/calculator.py:Calculator", {})
    environment = make()
    assert isinstance(environment, ToolEnvironment)
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["add", "multiply"]
    environment.reset(options={"sum": "(3 + 4) * 6", "prompt": "Compute."})
    assert environment.step(calculator.call("add", a=3, b=4))[0] == "7"
    assert environment.step(calculator.call("multiply", a=7, b=6))[0] == "42"
    assert environment.step("It is 42.")[1:3] == (1.0, True)


class Unpaid:
    """Tools without a reward."""

    def reset(self) -> None:
        self.value = 0

    def add(self, number: int) -> int:
        """Add a number."""
        self.value += number
        return self.value


def test_a_class_of_tools_without_a_reward_is_refused() -> None:
    reason = r"Unpaid' is a class of tools without get_reward: define get_reward\(self\).*every episode would earn 0"
    with pytest.raises(ConfigError, match=reason):
        load_environment(f"{__file__}:Unpaid", {})


class Counter:
    """Tools with a property that has no value before the reset."""

    def reset(self, start: int) -> None:
        self.value = start

    @property
    def is_even(self) -> bool:
        return self.value % 2 == 0

    def add(self, number: int) -> int:
        """Add a number."""
        self.value += number
        return self.value


def test_a_property_of_a_class_of_tools_is_not_read_before_the_reset() -> None:
    environment = ToolEnvironment(Counter())
    assert list(environment.tools) == ["add"]
    environment.reset(options={"start": 3})
    assert environment.step('<tool>{"name": "add", "arguments": {"number": 4}}</tool>')[0] == "7"


@pytest.mark.parametrize("reward", [None, "0.5", float("nan")])
def test_a_reward_that_is_no_number_is_a_failure_of_the_tools(reward: object) -> None:
    class Paid(Counter):
        def get_reward(self) -> object:
            return reward

    environment = ToolEnvironment(Paid())
    environment.reset(options={"start": 3})
    with pytest.raises(EnvironmentFault, match="the reward has to be a finite number"):
        checked_step(environment.step("7"))


def test_guess_the_number() -> None:
    guess = example("guess_number")
    wins = sum(len(guess.random_game(seed)) < 10 for seed in range(2000)) / 2000
    assert 0.17 < wins < 0.23  # 4 of 20 in fewer than five guesses
    game = guess.GuessNumber()
    for seed in range(50):  # halving finds every number in five guesses
        game.reset(seed=seed)
        low, high, reward = 1, 20, 0.0
        for _ in range(5):
            middle = (low + high) // 2
            answer, reward, over, _, _ = game.step(f" {middle}.")
            if over:
                break
            low, high = (middle + 1, high) if answer == "Higher." else (low, middle - 1)
        assert reward >= 0.8
    game.reset(seed=1)
    assert game.step("It may be 7")[4] == {"malformed": 1}


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (("a", 1.0, True, False), "it returned 4 values"),
        (None, "it returned a NoneType"),
        (("a", float("inf"), True, False, {}), "finite number"),
        (("a", "1", True, False, {}), "finite number"),
        (("a", 10**400, True, False, {}), "finite number"),
        (("a", "1", True, False, {}), "the str '1'"),
        (("a", None, True, False, {}), "the NoneType None"),
        (("a", 1.0, "False", False, {}), "terminated has to be true or false; step returned the str 'False'"),
        (("a", 1.0, False, [False], {}), r"truncated has to be true or false; step returned the list \[False\]"),
        (("a", 1.0, 2, False, {}), "terminated has to be true or false; step returned the int 2"),
        ((b"a", 1.0, True, False, {}), "the observation is a bytes"),
        (([{"content": "x"}], 1.0, True, False, {}), "the observation is a list"),
        (([{"role": "user", "content": 5}], 1.0, True, False, {}), "the observation is a list"),
    ],
)
def test_what_is_no_step(returned: Any, reason: str) -> None:
    with pytest.raises(EnvironmentFault, match=reason):
        checked_step(returned)


def test_what_is_a_step_and_a_reset() -> None:
    step = checked_step((None, 1, 0, 1, {"hits": 2, "name": "x", "state": 10**400}))
    assert step == StepResult("", 1.0, False, True, {"hits": 2.0})
    for one in (torch.tensor(1.0), torch.tensor([1.0]), numpy.float32(1), numpy.array([1.0])):
        assert checked_step(("", one, numpy.bool_(True), None, {})) == StepResult("", 1.0, True, False)
    ended = [checked_step(("", 0.0, flag, False, None)).terminated for flag in (True, 1, 1.0, torch.tensor(True))]
    assert ended == [True] * 4
    assert checked_reset(None).observation == checked_reset(("", None)).observation == ""
    assert checked_reset("a").observation == "a"
    assert checked_reset(([{"role": "user", "content": "a"}], {})).observation == [{"role": "user", "content": "a"}]
    odd = checked_reset([{"role": "user", "content": "\ud800"}, {"role": "user", "content": None}]).observation
    assert odd == [{"role": "user", "content": "?"}, {"role": "user", "content": ""}]


def test_what_is_no_reset() -> None:
    with pytest.raises(EnvironmentFault, match=r"^reset returns \(observation, info\); it returned 3 values$"):
        checked_reset(("a", 0.0, {}))
    with pytest.raises(EnvironmentFault, match=r"^reset returns \(observation, info\); the info is a str$"):
        checked_reset(("a", "b"))


class Dealer:
    """Takes the last card of the row's deck, and of the deck of its keywords."""

    def __init__(self, deck: list[str]) -> None:
        self.deck = deck

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        return options["deck"].pop() + self.deck.pop(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


class DealerOfTools:
    """Does the same in TRL's form."""

    def __init__(self, deck: list[str]) -> None:
        self.deck = deck

    def reset(self, deck: list[str]) -> str:
        return deck.pop() + self.deck.pop()

    def draw(self) -> str:
        """Draw a card."""
        return "none"

    def get_reward(self) -> float:
        return 1.0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Dealer, DealerOfTools])
def test_an_episode_has_a_row_and_keywords_of_its_own(kind: type, workers: int) -> None:
    row, kwargs = {"deck": ["a", "b"]}, {"deck": ["c", "d"]}
    pool = EnvironmentPool(f"{__file__}:{kind.__name__}", kwargs, workers=workers)
    answers = pool.run([Begin(1, 5, row), Begin(2, 5, row)])
    pool.stop()
    assert [answer.observation for answer in answers if isinstance(answer, ResetResult)] == ["bd", "bd"]
    assert (row, kwargs) == ({"deck": ["a", "b"]}, {"deck": ["c", "d"]})


@pytest.mark.parametrize(
    ("library", "target"),
    [("gymnasium", "gym:A-v1"), ("textarena", "textarena:A"), ("reasoning_gym", "reasoning_gym:A")],
)
def test_an_environment_of_a_library_has_keywords_of_its_own(
    monkeypatch: pytest.MonkeyPatch, library: str, target: str
) -> None:
    taken: list[str] = []

    def make(*_: Any, deck: list[str], **__: Any) -> SimpleNamespace:
        taken.append(deck.pop())
        return SimpleNamespace(action_space=None)

    class Made(list[dict[str, str]]):
        def __init__(self, *_: Any, deck: list[str], **__: Any) -> None:
            super().__init__([{"question": ""}])
            taken.append(deck.pop())

    error = SimpleNamespace(Error=ValueError)
    modules = {
        "gymnasium": SimpleNamespace(make=make, spec=lambda _: SimpleNamespace(entry_point="a"), error=error),
        "textarena": SimpleNamespace(make=make),
        "textarena.envs": SimpleNamespace(),
        "textarena.envs.registration": SimpleNamespace(ENV_REGISTRY=["A"]),
        "reasoning_gym": SimpleNamespace(create_dataset=Made),
        "reasoning_gym.factory": SimpleNamespace(DATASETS=["A"]),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    kwargs = {"deck": ["c", "d"]}
    make_one = load_environment(target, kwargs)
    for _ in range(2):
        environment = make_one()
        if library == "reasoning_gym":
            environment.reset(seed=1)
    assert set(taken) == {"d"}
    assert kwargs == {"deck": ["c", "d"]}


def test_an_environment_that_fails_to_reset_is_closed() -> None:
    closed: list[int] = []

    class Unready:
        def reset(self, **_: Any) -> None:
            raise OSError("no room")

        def close(self) -> None:
            closed.append(1)

    host = Host(Unready)  # type: ignore[arg-type]  # it has no step
    assert isinstance(host.handle(Begin(1, 5, {})), Fault)
    host.handle(End(1))
    assert closed == [1]


def test_an_environment_that_exits_ends_its_episode_alone() -> None:
    class Exiting:
        def reset(self, **_: Any) -> None:
            sys.exit(3)

    answer = Host(Exiting).handle(Begin(1, 5, {}))  # type: ignore[arg-type]  # it has no step
    assert isinstance(answer, Fault)
    assert answer.reason.startswith("SystemExit: 3")


class Dice:
    """Draws from Python's global random generator, and seeds it in reset."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        return str(random.random()), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return str(random.random()), 0.0, False, False, {}


def test_global_generators_are_each_episodes_own() -> None:
    random.seed(11)
    expected = [random.random() for _ in range(2)]
    random.seed(11)
    host = Host(Dice)
    alone = [host.handle(request) for request in (Begin(1, 5, {}), Act(1, ""), Act(1, ""))]
    assert random.random() == expected[0]
    mixed = [
        host.handle(request)
        for request in (Begin(2, 5, {}), Begin(3, 6, {}), Act(2, ""), Act(3, ""), Act(3, ""), Act(2, ""), End(3))
    ]
    assert [mixed[0], mixed[2], mixed[5]] == alone
    assert random.random() == expected[1]
    assert isinstance(host.handle(Act(3, "")), Fault)


class Echo:
    """A TextArena game that repeats the move, as `form` writes it."""

    def __init__(self, form: str) -> None:
        self.form, self.text = form, "\n[GAME] Guess."

    def reset(self, **_: Any) -> None:
        pass

    def get_observation(self) -> tuple[int, str]:
        return 0, self.text

    def step(self, action: str) -> tuple[bool, Any]:
        self.text += f"{self.form.replace('MOVE', action)}\n[GAME] Higher."
        return False, {}


@pytest.mark.parametrize("form", ["\n[Player] MOVE", "\n[Player] [MOVE]", "\n[GAME] [MOVE]", "\nMOVE", ""])
@pytest.mark.parametrize("move", ["5", " 5 \n", "I say\n(5", "", "[5]"])
def test_a_move_is_not_told_again(form: str, move: str) -> None:
    game = Game(Echo(form))
    assert game.reset()[0] == "[GAME] Guess."
    assert [game.step(move)[0] for _ in range(2)] == ["[GAME] Higher."] * 2


def make_told(make: Any, move: str) -> str:
    """Return the answer of a new game to a move."""
    game = make()
    game.reset(seed=3)
    return str(game.step(move)[0])


def test_text_arena() -> None:
    import_extra("textarena")
    make = load_environment("textarena:GuessTheNumber-v0", {})
    first, second = make(), make()
    rules = first.reset(seed=3)[0]
    assert "between 1 and 20" in rules
    second.reset(seed=4)
    told, reward, over, _, _ = first.step("[5]")
    assert told == "[GAME] The target number is higher."
    assert (reward, over) == (0.0, False)
    assert make_told(make, "5 ").startswith("[GAME] You attempted an invalid move.")
    for guess in range(6, 21):
        _, reward, over, _, _ = first.step(f"[{guess}]")
        if over:
            break
    assert over
    with pytest.raises(ConfigError, match="did you mean GuessTheNumber-v0"):
        load_environment("textarena:GuessTheNumbr-v0", {})


def test_reasoning_gym() -> None:
    import_extra("reasoning_gym")
    make = load_environment("reasoning_gym:chain_sum", {"max_terms": 3})
    question, again = make(), make()
    text = question.reset(seed=9)[0]
    assert text == again.reset(seed=9)[0]
    assert text != again.reset(seed=10)[0]
    answer = question.data[0]["answer"]  # type: ignore[attr-defined]
    assert question.step(f"<answer>{answer}</answer>")[1:3] == (1.0, True)
    assert question.step("no idea")[1] < 1.0
    with pytest.raises(ConfigError, match="no such task"):
        load_environment("reasoning_gym:chain_summ", {})
    with pytest.raises(ConfigError, match="refuses them"):
        load_environment("reasoning_gym:chain_sum", {"terms": 3})


class Board(list[dict[str, Any]]):
    """A task of one question, whose scoring reads the answer as JSON."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__([{"question": "Which cell?", "answer": '{"cell": 3}'}])

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        return float(answer == entry["answer"] or json.loads(answer)["cell"] == 3)


@pytest.mark.parametrize("answer", ["none", "{}", "[[1, 2], [3]]", '{"cell": 1e999}', '{"cell": 3}'])
def test_an_answer_that_a_task_cannot_read_is_worth_0(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Board))
    tags = SimpleNamespace(extract_answer=lambda text: None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", tags)
    host = Host(lambda: Question("board", {}))
    host.handle(Begin(1, 5, {}))
    reward = 1.0 if answer == '{"cell": 3}' else 0.0
    info = {} if answer.startswith('{"cell"') else {"malformed": 1.0}
    assert host.handle(Act(1, answer)) == StepResult("", reward, True, False, info)


def test_a_task_that_cannot_read_its_own_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Board):
        def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
            raise ImportError("no solver")

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=Broken))
    tags = SimpleNamespace(extract_answer=lambda text: None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", tags)
    host = Host(lambda: Question("board", {}))
    host.handle(Begin(1, 5, {}))
    answer = host.handle(Act(1, "{}"))
    assert isinstance(answer, Fault)
    assert answer.reason.startswith("ImportError: no solver")


def test_gymnasium() -> None:
    import_extra("gymnasium")
    make = load_environment("gym:FrozenLake-v1", {"is_slippery": False})
    lake = make()
    assert lake.reset(seed=1)[0] == "0"
    assert lake.step("go 2")[0] == "1"
    told, reward, over, _, info = lake.step("right")
    assert (told, reward, over, info) == ("Answer with one whole number from 0 to 3.", 0.0, False, {"malformed": 1.0})
    with pytest.raises(ConfigError, match=r"Did you mean: `FrozenLake`\?$"):
        load_environment("gym:FrozenLak-v1", {})
    with pytest.raises(ConfigError, match=r"Please use `FrozenLake-v1` instead\.$"):
        load_environment("gym:FrozenLake-v0", {})
    with pytest.raises(ConfigError, match=r"id: FrozenLake; did you mean FrozenLake-v1\?$"):
        load_environment("gym:FrozenLake", {})


GYM_PACKAGE = """
import gymnasium

class Counted(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(20)

    def __init__(self, closed=None):
        self.closed = closed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "start", {}

    def close(self):
        self.closed("closed")

    def step(self, action):
        return "went " + action, 1.0, False, False, {}

def wrapped(closed=None):
    return gymnasium.wrappers.TransformReward(Counted(closed), lambda reward: 10 * reward)

gymnasium.register("Wrapped-v0", entry_point=wrapped, max_episode_steps=2)
"""


def test_gymnasium_keeps_wrappers_and_limit_of_an_id_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gymnasium = import_extra("gymnasium")
    (tmp_path / "counted_envs.py").write_text(GYM_PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(gymnasium.registry, "Wrapped-v0", None)  # so that it is removed after the test
    del gymnasium.registry["Wrapped-v0"]
    environment = load_environment("gym:counted_envs:Wrapped-v0", {})()
    assert environment.reset(seed=1)[0] == "start"
    assert environment.step("on") == ("went on", 10.0, False, False, {})
    assert environment.step("on") == ("went on", 10.0, False, True, {})
    unlimited = load_environment("gym:counted_envs:Wrapped-v0", {"max_episode_steps": -1})()
    unlimited.reset(seed=1)
    assert not any(unlimited.step("on")[3] for _ in range(3))
    closed: list[str] = []
    host = Host(load_environment("gym:counted_envs:Wrapped-v0", {"closed": closed.append}))
    host.handle(Begin(1, 5, {}))
    assert host.handle(End(1)) is None
    assert closed == ["closed"]
    with pytest.raises(ConfigError, match="no module 'counted_env'"):
        load_environment("gym:counted_env:Wrapped-v0", {})
    with pytest.raises(ConfigError, match=r"Wraped.*Did you mean: `Wrapped`\?$"):
        load_environment("gym:counted_envs:Wraped-v0", {})


class Discrete:
    """Gymnasium's space of that name."""

    n, start = 3, 1


class Chosen:
    """Shows the action that it got, from 1 to 3."""

    action_space = Discrete()

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return str(action), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("3", "3"),
        ("I take 1.", "1"),
        *((bad, "") for bad in ("0", "4", "-1", "1 or 2", "1 2", "²")),
        pytest.param("9" * 5000, "", id="long"),
    ],
)
def test_a_discrete_action_is_the_one_number_of_a_text(text: str, told: str) -> None:
    observation, _, over, _, info = TextOnly(Chosen()).step(text)
    assert observation == (told or "Answer with one whole number from 1 to 3.")
    assert (over, info) == (False, {} if told else {"malformed": 1.0})


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extra in (("gymnasium", "gym"), ("textarena", "textarena"), ("reasoning_gym", "reasoning-gym")):
        monkeypatch.setitem(sys.modules, name, None)
        target = {"gymnasium": "gym:A-v1"}.get(name, f"{name}:A")
        with pytest.raises(ConfigError, match=rf"\[{extra}\]"):
            load_environment(target, {})


def test_functions_score_an_episode_that_a_limit_has_ended() -> None:
    """With an empty answer; the function may be a coroutine."""

    async def reward(answer: str, row: Mapping[str, Any]) -> float:
        return 0.25 if not answer else 1.0

    tools = FunctionTools([power], reward=reward)  # type: ignore[arg-type]
    tools.reset()
    assert tools.reward_at_limit() == 0.25
    assert tools.step("done")[1] == 1.0


def test_an_attribute_of_an_environment_is_no_reward_at_a_limit() -> None:
    """A number of that name, or another common name, changes nothing."""

    class Counter:
        reward_at_limit = last_reward = 0.5

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            return "go", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "on", 0.0, False, False, {}

    begun = Host(Counter).begin(Begin(1, 5, {}))
    assert isinstance(begun, ResetResult)
    assert not begun.has_last_reward

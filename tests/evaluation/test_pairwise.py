"""Pairs judged in both orders: the definition of a verdict, and the signs of a biased judge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chat_server import Reply, serving

from rlhf.config.reward import ChatPairsConfig
from rlhf.errors import RewardError
from rlhf.rewards.chat import ChatModel
from rlhf.rewards.pair_judge import PairJudge, Verdicts, combine_verdicts, read_verdict

PROMPTS = [f"prompt {i}" for i in range(6)]
LONG = ["a very long answer indeed"] * 6
SHORT = ["short"] * 6


def judge(url: str, cache: Path, **more: Any) -> PairJudge:
    config = ChatPairsConfig(base_url=url, model="judge-1", cache_dir=str(cache), retries=1, **more)
    model = ChatModel(config, {}, section="eval.judge", backoff_s=0.01)
    return PairJudge(config, model, section="eval.judge")


def shown(question: str) -> tuple[str, str]:
    """The two answers in the order in which the shipped question shows them."""
    first, second = (re.search(rf"<answer {side}>\n(.*?)\n</answer {side}>", question, re.S) for side in "AB")
    assert first is not None
    assert second is not None
    return first[1], second[1]


def longer_wins(_: int, question: str) -> Reply:
    first, second = shown(question)
    return "A" if len(first) > len(second) else "B"


def test_a_fair_judge_says_the_same_in_both_orders(tmp_path: Path) -> None:
    with serving(longer_wins) as server:
        verdicts = judge(server.url, tmp_path)(PROMPTS, LONG, SHORT)
        assert len(server.requests) == 12
        other = judge(server.url, tmp_path)(PROMPTS, SHORT, LONG)
        assert len(server.requests) == 12  # the same questions: kept
    assert verdicts.wins.tolist() == [1.0] * 6
    assert other.wins.tolist() == [0.0] * 6
    assert (verdicts.inconsistent, verdicts.first_shown, verdicts.unreadable, verdicts.answers) == (0.0, 0.5, 0, 12)
    assert set(verdicts.straight) == {"A"}
    assert set(verdicts.swapped) == {"B"}


@pytest.mark.parametrize("always, share", [("A", 1.0), ("B", 0.0)])
def test_the_swap_reveals_a_judge_that_goes_by_position(always: str, share: float, tmp_path: Path) -> None:
    with serving(lambda _n, _question: always) as server:
        verdicts = judge(server.url, tmp_path)(PROMPTS, LONG, SHORT)
    assert verdicts.wins.tolist() == [0.5] * 6
    assert verdicts.inconsistent == 1.0
    assert verdicts.first_shown == share


def test_garbage_is_counted_and_its_pair_is_a_tie(tmp_path: Path) -> None:
    def sometimes(n: int, question: str) -> Reply:
        return "I cannot say which" if "prompt 2" in question else longer_wins(n, question)

    with serving(sometimes) as server:
        verdicts = judge(server.url, tmp_path)(PROMPTS, LONG, SHORT)
    assert verdicts.wins.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]
    assert verdicts.unreadable == 2
    assert verdicts.inconsistent == 0.0


def test_nothing_but_garbage_is_an_error(tmp_path: Path) -> None:
    with (
        serving(lambda _n, _question: "hm") as server,
        pytest.raises(RewardError, match=r"none of 12 answers .* is A, B or tie; the first: 'hm'"),
    ):
        judge(server.url, tmp_path)(PROMPTS, LONG, SHORT)


def test_a_passing_500_changes_nothing(tmp_path: Path) -> None:
    with serving(lambda n, question: (500, b"boom") if n == 0 else longer_wins(n, question)) as server:
        assert judge(server.url, tmp_path)(PROMPTS, LONG, SHORT).wins.tolist() == [1.0] * 6
        assert len(server.requests) == 13


def test_equal_texts_are_a_tie_that_nobody_is_asked_about(tmp_path: Path) -> None:
    with serving(longer_wins) as server:
        verdicts = judge(server.url, tmp_path)(PROMPTS[:2], ["same", "a b"], ["same", "a"])
        assert len(server.requests) == 2
    assert verdicts.wins.tolist() == [0.5, 1.0]
    assert verdicts.answers == 2


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Q {prompt} ONE {a} TWO {b}")
    with serving(lambda _n, _question: "tie") as server:
        judge(server.url, tmp_path, template=str(tmp_path / "t.txt"))(["p"], ["x {b}"], ["y"])
    asked = {request["messages"][0]["content"] for request in server.requests}
    assert asked == {"Q p ONE x {b} TWO y", "Q p ONE y TWO x {b}"}


@pytest.mark.parametrize(
    "straight, swapped, outcome",
    [
        *[("A", "B", 1.0), ("B", "A", 0.0), ("tie", "tie", 0.5)],
        *[("A", "A", 0.5), ("B", "B", 0.5), ("A", "tie", 0.5), ("tie", "A", 0.5)],
        *[(None, "B", 0.5), ("A", None, 0.5), (None, None, 0.5)],
    ],
)
def test_both_orders_settle_it(straight: Any, swapped: Any, outcome: float) -> None:
    assert combine_verdicts(straight, swapped) == outcome


def test_the_counts_by_hand() -> None:
    verdicts = Verdicts(["A", "A", "tie", None, "tie"], ["B", "A", "B", "B", "tie"], [True, True, True, True, False])
    assert verdicts.wins.tolist() == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert verdicts.inconsistent == pytest.approx(2 / 3)  # of the three with two answers
    assert verdicts.first_shown == pytest.approx(3 / 6)  # A B, A A, - B, - B
    assert (verdicts.unreadable, verdicts.answers) == (1, 8)


@pytest.mark.parametrize(
    "answer, verdict",
    [
        *[("A", "A"), (" b.\n", "B"), ("Tie", "tie"), ("**A**", "A"), ("[[B]]", "B"), ("(tie)", "tie")],
        *[("Both are fine.\n\nVerdict: A", "A"), ("The better answer is B.", "B"), ("Winner: **tie**", "tie")],
        *[("", None), ("both", None), ("A good answer", None), ("A or B", None), ("answer A is better", None)],
        *[("A\nbecause it is short", None), ("C", None), ("This is a", None)],
        *[("Answer A is better than answer B.", None), ("I prefer answer b over answer a", None)],
        *[("Answer B beats answer A", None), ("Neither answer A nor answer B", None), ("The worse answer is B.", None)],
        *[("Between A and B, the better answer is A.", "A"), ("**Answer B**", "B"), ("A close call: answer A", "A")],
        *[("Both A and B are poor. Verdict: tie", "tie"), ("The verdict is not A", None), ("Not answer A", None)],
    ],
)
def test_how_a_verdict_is_read(answer: str, verdict: str | None) -> None:
    assert read_verdict(answer) == verdict

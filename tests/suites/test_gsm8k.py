"""Word problems: asked as told, graded exactly, pass@k."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from bigram import EOS
from pydantic import ValidationError
from runs import write_rows
from suite_cases import evaluate, figures, gains, subject, values

from rlhf.data.rows import BadRow
from rlhf.errors import ConfigError, DataError
from rlhf.suites.gsm8k import Gsm8kSuite, read_problem
from rlhf.suites.metrics.pass_at_k import pass_at_k

WORDS = ("Question:", "Answer:", "####", "7", "8", "q", "so")
SEVEN = {"Answer:": {"####": 1.0}, "####": {"7": 1.0}, "7": {EOS: 1.0}, "8": {EOS: 1.0}}
COIN = {**SEVEN, "####": {"7": 0.5, "8": 0.5}}


def problem(answer: str, question: str = "q") -> dict[str, str]:
    return {"question": question, "answer": f"so <<3+4=7>>7\n#### {answer}"}


def settings(path: Path, **more: object) -> Gsm8kSuite:
    return Gsm8kSuite.model_validate({"dataset": {"path": str(path)}, "sampling": {"max_new_tokens": 8}, **more})


def test_exact_answers_by_hand(tmp_path: Path) -> None:
    rows = [problem("7"), problem("8"), problem("7.0"), {"question": "q", "answer": "seven"}, {"question": "q"}]
    model = subject(tmp_path / "m", WORDS, SEVEN)
    result = evaluate(settings(write_rows(tmp_path / "g.jsonl", rows)), model)
    got = figures(result)
    assert got["pass_at_1"].value == pytest.approx(2 / 3)
    assert (got["pass_at_1"].low, got["pass_at_1"].high) == pytest.approx((0.2077, 0.9385), abs=1e-4)  # Wilson, 2 of 3
    assert (got["announced_rate"].value, got["no_answer_rate"].value) == (1.0, 0.0)
    assert result.n == 3
    assert result.skipped == {"no answer": 1, "the answer does not end in #### and a number": 1}
    assert result.examples[1] == {
        "question": "q",
        "solution": " #### 7",
        "answer": "7",
        "expected": "8",
        "right": False,
    }


@pytest.mark.parametrize("samples", [1, 2])
def test_gains_are_paired_by_problem(samples: int, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "g.jsonl", [problem("7"), problem("8"), problem("8")])
    start = subject(tmp_path / "s", WORDS, SEVEN)
    model = subject(tmp_path / "m", WORDS, {**SEVEN, "####": {"8": 1.0}}, like=start)
    asked = settings(rows, samples=samples)
    paired = gains(evaluate(asked, start), evaluate(asked, model))
    assert set(paired) == {"pass_at_1", "announced_rate", "no_answer_rate"}
    assert paired["pass_at_1"] is not None
    assert paired["pass_at_1"].value == pytest.approx(1 / 3)
    assert paired["announced_rate"] is not None
    assert paired["announced_rate"].value == 0.0
    if samples == 1:  # Wilson's interval of a share: three rows alike prove no equality
        assert paired["announced_rate"].low < 0 < paired["announced_rate"].high


def test_pass_at_k_of_a_coin(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "g.jsonl", [problem("7", f"q {'q ' * i}") for i in range(6)])
    model = subject(tmp_path / "m", WORDS, COIN)
    got = values(evaluate(settings(rows, samples=6, k=[1, 2, 6]), model))
    assert 0.2 < got["pass_at_1"] < 0.8  # 36 fair coins
    assert got["pass_at_1"] < got["pass_at_2"] < got["pass_at_6"] <= 1
    alone = write_rows(tmp_path / "one.jsonl", [problem("7")])
    got = values(evaluate(settings(alone, samples=6, k=[1, 3], seed=1), model))
    correct = round(6 * got["pass_at_1"])
    assert got["pass_at_3"] == pytest.approx(pass_at_k(6, correct, 3))
    again = values(evaluate(settings(alone, samples=6, k=[1, 3], seed=1), model))
    assert again == got


def test_a_solution_ends_where_the_next_question_begins(tmp_path: Path) -> None:
    runs_on = {**SEVEN, "7": {"Question:": 1.0}, "Question:": {"q": 1.0}, "q": {"Answer:": 1.0}}
    runs_on["####"] = {"7": 1.0}
    rows = write_rows(tmp_path / "g.jsonl", [problem("7")])
    model = subject(tmp_path / "m", WORDS, runs_on)
    result = evaluate(settings(rows, stop=["Question:"]), model)
    assert result.examples[0]["solution"] == " #### 7 "


def test_examples_are_shown_and_not_asked(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", [problem("8", "so"), problem("7", "8"), problem("9", "so so")])
    write_rows(tmp_path / "data" / "test.jsonl", [problem("7", "so"), problem("7", "q")])
    # The worked solution of an example ends in its number, without the calculator's marks.
    model = subject(tmp_path / "m", WORDS, SEVEN)
    result = evaluate(settings(tmp_path / "data", shots=2), model)
    assert result.skipped == {"one of the examples": 1}
    assert result.n == 1
    asked: list[str] = []
    ask = type(model).render_question
    try:
        type(model).render_question = lambda self, text: asked.append(text) or ask(self, text)  # type: ignore[method-assign]
        evaluate(settings(tmp_path / "data", shots=2), model)
    finally:
        type(model).render_question = ask  # type: ignore[method-assign]
    assert asked[-1] == (
        "Question: so\nAnswer: so 7\n#### 8\n\nQuestion: 8\nAnswer: so 7\n#### 7\n\nQuestion: q\nAnswer:"
    )


def test_examples_that_are_not_there(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "g.jsonl", [problem("7")])
    model = subject(tmp_path / "m", WORDS, SEVEN)
    with pytest.raises(ConfigError, match=r"name a file of examples with examples\.path"):
        evaluate(settings(rows, shots=1), model)
    with pytest.raises(ConfigError, match=r"shots is 3, but .* has only 1 usable"):
        evaluate(settings(rows, shots=3, examples={"path": str(rows)}), model)
    with pytest.raises(DataError, match="1 one of the examples"):
        evaluate(settings(rows, shots=1, examples={"path": str(rows)}), model)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"k": [2]}, "pass@2 needs samples=2 or more"),
        ({"samples": 2, "greedy": True}, "would all be the same"),
        ({"template": "Q"}, "write {question}"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, more: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(tmp_path, **more)


def test_a_problem_is_read() -> None:
    assert read_problem(problem("1,234")).expected == Fraction(1234)
    with pytest.raises(BadRow, match="does not end in ####"):
        read_problem({"question": "q", "answer": "#### so 7"})

"""The small graders: math, choice, regex, ifeval, and the grades of cheats."""

from __future__ import annotations

import gzip
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from extras import import_extra

from rlhf.config.load import validate
from rlhf.constraints import checks
from rlhf.constraints.reward import read_constraints, verify
from rlhf.errors import ConfigError, RewardError
from rlhf.rewards.verifier import VerifierSource
from rlhf.verifiers import mathematics
from rlhf.verifiers.choice import ChoiceGrader, chosen_letter
from rlhf.verifiers.grader import Grader, checked_grade, settings_of
from rlhf.verifiers.ifeval import IfevalGrader
from rlhf.verifiers.mathematics import MathGrader, expected_number
from rlhf.verifiers.numeric_answers import expected_answer
from rlhf.verifiers.reasoning_gym import ReasoningGymGrader
from rlhf.verifiers.regex import RegexGrader


@pytest.mark.parametrize(
    "gold, number",
    [
        ("42", 42), ("$42", 42), ("1,000", 1000), ("1/2", 0.5), ("So 3 + 4 = 7\n#### 7", 7), ("\\boxed{7}", 7),
        ("5 %", 5), ("-3", -3), ("x^2", None), ("(1, 2)", None), ("Paris", None), ("3 apples", None),
        ("\\boxed{x + 1}", None), ("", None),
        ("- 3", -3), ("-\\frac{1}{2}", -0.5), ("So \\boxed{5\\text{ cm}}.", 5), ("\\boxed{12} and 13 more", 12),
        ("The answer is 5. \\boxed{x}", None), ("\\boxed{5\\pi}", None),
        ("\\boxed{2\\sqrt{3}}", None),
        ("5 \\pi", None),
    ],
)  # fmt: skip
def test_which_answers_are_numbers(gold: str, number: float | None) -> None:
    value = expected_number(gold)
    assert (None if value is None else float(value)) == number


def test_math_by_our_own_parser() -> None:
    grade = validate(MathGrader, {"type": "math", "symbolic": "off"}).start()
    assert grade("It is 3 + 4 = 7.", {"answer": "7"}) == 1
    assert grade("It is 8.", {"answer": 7}) == 0
    assert grade("7 or 8? \\boxed{8}", {"answer": 7}) == 0
    assert grade("", {"answer": "7"}) == 0
    assert grade("7", {}) is None
    assert grade("x + 1", {"answer": "x + 1"}) is None  # not without math-verify
    assert grade("\\boxed{-\\frac{1}{2}}", {"answer": "1/2"}) == 0
    assert grade("\\boxed{-\\frac{1}{2}}", {"answer": "-1/2"}) == 1
    assert grade("5, so \\boxed{5\\pi}", {"answer": "5"}) == 0
    assert grade("\\boxed{2+3}", {"answer": "5"}) == 0  # not without math-verify
    announced = validate(MathGrader, {"type": "math", "symbolic": "off", "announced": True}).start()
    assert announced("1 2 3 4 5 6 7", {"answer": "7"}) == 0
    assert announced("The answer is 7.", {"answer": "7"}) == 1


def test_a_verifier_that_mixes_up_gold_and_prediction_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "final_answer", lambda text: None)
    with pytest.raises(RewardError, match="the math verifier fails its self test"):
        validate(MathGrader, {"type": "math", "symbolic": "off"}).start()


def test_symbolic_answers_by_math_verify(caplog: pytest.LogCaptureFixture) -> None:
    import_extra("math_verify")
    grade = validate(MathGrader, {"type": "math", "symbolic": "on"}).start()
    assert grade("\\boxed{(x+1)(x-1)}", {"answer": "x^2-1"}) == 1
    assert grade("\\boxed{x+1}", {"answer": "x^2-1"}) == 0
    assert grade("I don't know.", {"answer": "x^2-1"}) == 0
    for box, gold in (("2\\cdot 3", "6"), ("2+3", "5"), ("\\sqrt{4}", "2"), ("\\frac{\\frac{3}{2}}{2}", "0.75")):
        assert grade(f"\\boxed{{{box}}}", {"answer": gold}) == 1, box
    for box in ("2+3", "2\\sqrt{3}", "5x", "5\\pi", "\\frac{5}{x}", "5!", "\\pm 5", "5, 6", "5 + i"):
        assert [grade(f"5 or 2: \\boxed{{{box}}}", {"answer": gold}) for gold in "52"] == [box == "2+3", 0], box
    assert caplog.messages == []  # math-verify warns that its own timers are off


def test_math_verify_that_is_asked_for_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "_has_math_verify", lambda: False)
    with pytest.raises(ConfigError, match=r"symbolic=on needs the package math-verify: .*\[math\]"):
        validate(MathGrader, {"type": "math", "symbolic": "on"}).check()


def test_gsm8k_references_are_graded_right(shared: Path) -> None:
    """Of graded solutions of GSM8K: each reference is right for its row, and the one of another row is not."""
    with gzip.open(shared / "data" / "gsm8k" / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    solutions = [str(row.get("answer")) for row in rows]
    grade = validate(MathGrader, {"type": "math", "symbolic": "off"}).start()
    assert [grade(text, {"answer": text}) for text in solutions] == [1.0] * len(rows)
    other = solutions[1:] + solutions[:1]
    expected = [float(expected_answer(a) == expected_answer(b)) for a, b in zip(solutions, other, strict=True)]
    assert [grade(text, {"answer": gold}) for gold, text in zip(solutions, other, strict=True)] == expected


@pytest.mark.parametrize(
    "text, letter",
    [
        ("The answer is B.", "B"), ("Answer: (C)", "C"), ("**Answer:** B", "B"), ("\\boxed{D}", "D"), ("B", "B"),
        ("(b)", None), ("B) Paris", "B"), ("B. Paris is in France", "B"), ("Let me see.\nB", "B"),
        ("The answer is A.\nNo: the answer is C.", "C"), ("The answer is A. The answer is B.", None),
        ("The answer is B or C.", None), ("The answer is A/B/C/D", None), ("Answer: A, B, C, D", None),
        ("The answer is (A) and (B)", None), ("\\boxed{A, B}", None), ("Answer: B or C\nAnswer: C", "C"),
        ("The answer is B, a city.", "B"), ("The answer is B, A is wrong.", "B"), ("The answer is B and not A.", "B"),
        ("\\boxed{\\mathrm{B}}", "B"), ("\\boxed{\\textbf{B}}", "B"),
        ("A cat sat", None), ("I am sure", None), ("", None), ("ABCD", None), ("A B C D", None),
    ],
)  # fmt: skip
def test_the_letter_of_an_answer(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "ABCD") == letter


def test_choice() -> None:
    grade = validate(ChoiceGrader, {"type": "choice", "answer": "label"}).start()
    assert [grade("B", {"label": label}) for label in ("B", "b", "(B)", 1, "1", 1.0, " 0", 0.0)] == [1] * 6 + [0, 0]
    assert grade("B", {}) is None
    for label in ("Paris", "8", "-1", True, 8, 1.5, 8.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="which is none of the letters"):
            grade("B", {"label": label})
    digits = validate(ChoiceGrader, {"type": "choice", "letters": "1234"}).start()
    assert [digits("The answer is 2", {"answer": label}) for label in ("2", 2, 2.0, "1", 1)] == [1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="0, which is none of the letters 1234"):  # and not the first of them
        digits("The answer is 1", {"answer": 0})


@pytest.mark.parametrize("letters", ["abcd", "ABc", "AAB", "A B", "A.", "A", ""])
def test_letters_are_capitals_or_digits_each_once(letters: str) -> None:
    with pytest.raises(ConfigError, match="letters"):
        validate(ChoiceGrader, {"type": "choice", "letters": letters})
    with pytest.raises(ConfigError, match="'abcd': write capitals or digits, each once, as in ABCD"):
        validate(ChoiceGrader, {"type": "choice", "letters": "abcd"})


def test_a_task_of_reasoning_gym_without_an_answer_is_scored_by_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(answer: str | None, entry: dict[str, Any]) -> float:
        assert entry["answer"] is None
        return float(json.loads(answer or "") == entry["metadata"]["edges"])

    spec = ModuleSpec("reasoning_gym", None)
    package = SimpleNamespace(__spec__=spec, get_score_answer_fn=lambda task: score)
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", SimpleNamespace(DATASETS=["graph_color"]))
    grade = validate(ReasoningGymGrader, {"type": "reasoning_gym", "task": "graph_color"}).start()
    row = {"question": "?", "answer": None, "metadata": '{"edges": [1, 2]}'}
    assert [grade(text, row) for text in ("<answer>[1, 2]</answer>", "[2, 1]", "I don't know")] == [1.0, 0.0, 0.0]
    assert grade("[1, 2]", {"question": "?", "answer": None, "metadata": None}) is None


def test_regex() -> None:
    grade = validate(RegexGrader, {"type": "regex", "pattern": r"<a>(\w+)</a>", "answer": "gold"}).start()
    assert grade("<a>x</a> <a>y</a>", {"gold": "y"}) == 1
    assert grade("<a>x</a> <a>y</a>", {"gold": "x"}) == 0
    assert grade("y", {"gold": "y"}) == 0
    assert grade("<a>x</a>", {}) is None
    whole = validate(RegexGrader, {"type": "regex", "pattern": "ya*", "whole": True}).start()
    assert (whole(" yaa\n", {}), whole("yaa.", {})) == (1, 0)
    with pytest.raises(ConfigError, match="is not a regular expression"):
        validate(RegexGrader, {"type": "regex", "pattern": "("})
    with pytest.raises(ConfigError, match="pattern has no group"):
        validate(RegexGrader, {"type": "regex", "pattern": "a", "answer": "gold"})


@pytest.mark.parametrize(
    "text", ["", "no commas here", "one, two", "Title\nno commas\nend", "*no commas*, ever", "word " * 200]
)
def test_ifeval_verdicts_are_those_of_the_suite(text: str) -> None:
    row: dict[str, Any] = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"relation": "at least", "num_words": 3}],
    }
    verdict = verify(read_constraints(row), text)
    for loose, met in ((False, verdict.strict), (True, verdict.loose)):
        share = validate(IfevalGrader, {"type": "ifeval", "loose": loose}).start()
        every = validate(IfevalGrader, {"type": "ifeval", "loose": loose, "all": True}).start()
        assert share(text, row) == sum(met) / 2
        assert every(text, row) == float(all(met))
        assert share(text, {}) is None


def test_a_row_about_languages_needs_the_package_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    source = VerifierSource(grader=IfevalGrader())
    language = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}
    other = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    source.check_rows([other, {}])
    with pytest.raises(ConfigError, match="langdetect"):
        source.check_rows([other, language])


def test_names() -> None:
    assert settings_of("reasoning_gym:leg_counting") == {"type": "reasoning_gym", "task": "leg_counting"}
    assert settings_of("a/b.py:grade") == {"type": "function", "target": "a/b.py:grade"}
    for name in ("maths", "math:x", "reasoning_gym:", ":grade", "x.py:"):
        with pytest.raises(ValueError, match="no verifier"):
            settings_of(name)
    assert {"math", "choice", "json", "regex", "ifeval", "code", "reasoning_gym", "function"} <= set(Grader.choices())


@pytest.mark.parametrize(
    "grade, checked", [(True, 1.0), (2, 2.0), (None, None), ({}, None), ({"a": 1, "b": None}, {"a": 1.0})]
)
def test_grades(grade: object, checked: object) -> None:
    assert checked_grade(grade) == checked


def score_json(answer: str, entry: dict[str, Any]) -> float:
    return float(json.loads(answer)["cell"] == entry["metadata"]["cell"])


def test_a_completion_that_a_task_cannot_read_grades_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that it cannot read is an error: even its own answer is none to the scoring."""
    gym = ModuleType("reasoning_gym")
    gym.__spec__ = ModuleSpec("reasoning_gym", None)
    monkeypatch.setattr(gym, "get_score_answer_fn", lambda task: score_json, raising=False)
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", SimpleNamespace(DATASETS=["board"]))
    grade = validate(ReasoningGymGrader, settings_of("reasoning_gym:board")).start()
    row = {"question": "Which cell?", "answer": '{"cell": 3}', "metadata": {"cell": 3}}
    assert [grade(text, row) for text in ('{"cell": 3}', '{"cell": 2}', "{}", "no")] == [1, 0, 0, 0]
    with pytest.raises(KeyError):
        grade("{}", {**row, "metadata": {"row": 3}})


def test_a_task_of_reasoning_gym() -> None:
    gym = import_extra("reasoning_gym")
    row = dict(gym.create_dataset("leg_counting", size=1, seed=1)[0])
    grader = validate(ReasoningGymGrader, settings_of("reasoning_gym:leg_counting"))
    grade = grader.start()
    assert grade(grader.reference(row) or "", row) == 1
    assert grade(f"Let me count.\n{row['answer']}", row) == 1
    assert grade("I don't know.", {**row, "metadata": json.dumps(row["metadata"])}) < 0.1
    assert grade("1", {"question": "?"}) is None
    with pytest.raises(ConfigError, match="no task 'leg_countin'; did you mean leg_counting"):
        validate(ReasoningGymGrader, settings_of("reasoning_gym:leg_countin")).start()

"""The final answer of a solution, in many notations."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.verifiers.numeric_answers import (
    NumericAnswer,
    boxed_number,
    expected_answer,
    final_answer,
    find_numbers,
    strip_markup,
)


def numbers(text: str) -> list[Fraction]:
    return [number.value for number in find_numbers(strip_markup(text))]


AWKWARD = [
    # text, the number in it (None: no answer)
    ("#### 72", 72),
    ("48/2 = <<48/2=24>>24\n#### 72", 72),
    ("####72.", 72),
    ("#### $1,234.50", Fraction("1234.5")),
    ("#### -5", -5),
    ("#### −5", -5),  # a minus sign, not a hyphen
    ("#### **18**", 18),
    ("#### 3 + 4 = 7", 7),
    ("#### 72 apples in 3 boxes", 72),
    ("#### 1\nno, wait\n#### 2", 2),
    ("#### Step 2\nSo we add.\nThe answer is 9.", 9),  # a heading is no answer
    ("#### 3. Add up\nThe answer is 9", 9),
    ("#### 5%", 5),
    ("#### .5", Fraction(1, 2)),
    ("The answer is 72.", 72),
    ("The answer is: $72.00", 72),
    ("the final ANSWER is\n\n72 apples. I used 3 steps.", 72),
    ("The answer is 12 apples for 3 children.", 12),
    ("The answer is 3 + 4 = 7 apples.", 7),
    ("The answer is 12 = 3 * 4", 12),
    ("The answer is 12 = 3 x 4 apples.", 12),
    ("The answer is 12 = 3 bags × 4 apples.", 12),
    ("The answer is $12 = $15 - $3.", 12),
    ("The answer is 12 = 2 * (4 + 2)", 12),
    ("The answer is 12 = 60% of 20", 12),
    ("The answer is 12 = 24/2", 12),
    ("The answer is 3 * 4 = 12 = 6 + 6", 12),
    ("The answer is 3 * 4 = 12 apples in 3 boxes", 12),
    ("The answer is x = 12", 12),
    ("The answer is n = 3 * 4", 3),  # not computed
    ("#### 12 = 3 * 4", 12),
    (r"\boxed{12 = 3 \times 4}", 12),
    ("The answer is 1,234,567 m", 1234567),
    ("The answer is 12,34,567", 1234567),  # lakhs
    ("The answer is **$1,000**.", 1000),
    ("The answer is negative 3.", -3),
    ("The answer is minus 3.", -3),
    ("The answer is -$3.", -3),
    ("The answer is $-3.", -3),
    ("The answer is 3/4 of a cup.", Fraction(3, 4)),
    ("The answer is 2 1/2 cups.", Fraction(5, 2)),
    ("The answer is 3.5 million dollars.", 3500000),
    ("The answer is 1.2e3.", 1200),
    ("The answer is 1.2 x 10^3", 1200),
    (r"The answer is \(1.2 \times 10^{3}\)", 1200),
    ("The answer is 4 × 10³ m", 4000),
    ("The answer is 10^3", 1000),
    ("Answer: 1\n...\nAnswer: 8", 8),
    ("Answer = 8", 8),
    ("The answer is 5. Wait, the answer is 6.", 6),
    (r"\boxed{72}", 72),
    (r"so $\boxed{\$1,200}$ in all, over 3 years", 1200),
    (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
    (r"\boxed{\dfrac{7}{2}\text{ cups}}", Fraction(7, 2)),
    (r"\boxed{1{,}234}", 1234),
    (r"\boxed{x = -5}", -5),
    (r"\boxed{25\%}", 25),
    (r"\boxed 7 for 3", 7),
    (r"\boxed{-\frac{1}{2}}", Fraction(-1, 2)),
    (r"\boxed{\frac{-1}{2}}", Fraction(-1, 2)),
    (r"\boxed{x = -\dfrac{7}{2}}", Fraction(-7, 2)),
    (r"The answer is $-\frac12$.", Fraction(-1, 2)),
    (r"The answer is $- \frac{1}{2}$.", Fraction(-1, 2)),
    (r"\boxed{- 3}", -3),
    (r"\boxed{x = - 3}", -3),
    (r"\boxed{- \$3}", -3),
    ("The answer is - 3.", 3),  # a dash
    ("The answer is – 18 dollars.", 18),
    ("**Answer:** - 18 apples", 18),
    ("#### - 18", 18),
    (r"3 -\frac{1}{2}", Fraction(1, 2)),
    (r"It equals -\frac{1}{2}", Fraction(-1, 2)),
    ("The answer is 12 = 15 – 3.", 12),
    ("So x = - 3.", -3),
    ("Sum =\n- 5 apples", 5),
    ("The answer:\n- 5 apples", 5),  # the dash of a list
    ("The answer is 12 = 15 - 3.", 12),
    (r"\boxed{\cfrac{1}{2}}", Fraction(1, 2)),
    (r"\boxed{\frac{1}2}", Fraction(1, 2)),
    (r"\boxed{\frac1{20}}", Fraction(1, 20)),
    (r"\boxed{1\frac{1}{2}}", Fraction(3, 2)),
    (r"\boxed{1 \frac12}", Fraction(3, 2)),
    (r"\boxed{-1\frac12}", Fraction(-3, 2)),
    (r"\boxed{10,\!000}", 10000),
    (r"\boxed{1} then \boxed{2}", 2),
    ("It is 16 - 3 - 4 = 9 eggs a day, so she makes 9 * 2 = $18", 18),
    ("Total cost: $2,125.", 2125),
    ("She has 12 cm^2 left", 12),
    ("She has 12 cm2 left", 12),
    ("He is 5'11 tall and weighs 80kg", 80),
    ("Between 3-5 there are 2", 2),
    ("From 10-3", 3),  # a range or a difference, not minus three
    ("1\u202f234 units", 1234),
    ("- 5 apples", 5),  # the dash of a list
    ("COVID-19", None),
    ("H2O", None),
    ("seventy-two", None),  # words are not read
    ("5/0", None),
    ("", None),
    ("9" * 5000, None),  # no answer to anything
    ("7 and not 1e999", 7),
]


@pytest.mark.parametrize(("text", "value"), AWKWARD, ids=[repr(text[:40]) for text, _ in AWKWARD])
def test_awkward_formats(text: str, value: int | Fraction | None) -> None:
    answer = final_answer(text)
    assert (None if answer is None else answer.value) == value


MARKED = [
    "5", "5.", "{5}", "(5)", "+5", "$5", r"\$5", "$5$", r"5\%", "5 cm", "5cm", r"5\text{ apples}",
    r"5\,\text{cm}^2", "5 cm^2", r"5\mathrm{~m/s}", r"5 \text{ m}", "5 m", "80/16 kg", "x = 5", r"x_1 = 5",
    "f(2) = 5", r"2 + 3 = 5", "5 = 2 + 3", r"5^\circ", r"5^{\circ}\text{C}", "5°", r"\text{Total: } 5",
    r"\approx 5", "5 miles per hour", r"5\text{ km/h}", "5 apples left", "5.0", r"\left(5\right)",
    r"\textbf{5}", r"5\text{ of the }\text{ cats}",
    r"5\ \textrm{cm}", r"5\,\textit{cm}", r"5\;\operatorname{cm}", r"5 \frac{\text{km}}{\text{h}}",
    r"\mathbf{5 \text{ cm}}", r"\mathbf{5 \text{ m}^{2}}", "5°C", "5 °C", "5¢", r"5\cent", r"\pounds 5",
    "5 N", "5 J", "5 V", "5 W", "5 A", "5 K", "5 C", "5 t", "5 l", "5 d", r"5\,N",
    r"{\bf 5}", r"\boldsymbol{5}", r"\bm{5}", r"\mathit{5}", r"\displaystyle 5", r"\underline{5}",
    r"\textcolor{red}{5}", r"\color{red}5", r"5\qquad", r"5\\", r"5 \checkmark",
    "5-year-old", r"5 \text{ six-packs}", "5^{th}", r"5^\text{th}", "[5]", r"\{5\}", r"\left\{5\right\}",
    r"x \approx 5", "x ≈ 5", "Total = 2.5(2) = 5", "(1)(5) = 5", r"A = \pi r^2 = 5", r"2x=10 \Rightarrow x=5",
    r"x + 2 = 7 \implies x = 5", "5 eggs (0.5 dozen)", r"5 \text{ (0.5 dozen)}", "5 p.m.", "5:00 PM", "5:00 a.m.",
]  # fmt: skip


@pytest.mark.parametrize("content", MARKED)
def test_a_number_in_a_box_may_have_marks_units_and_words(content: str) -> None:
    assert final_answer(rf"So \boxed{{{content}}}.") == NumericAnswer(Fraction(5), announced=True)
    assert boxed_number(rf"So \boxed{{{content}}}.") == 5


EXPRESSIONS = [
    "2+3", r"2\cdot 3", r"2\sqrt{3}", r"\sqrt{4}", "5x", "5 x", r"5\pi", "5 pi", r"\frac{5}{x}", r"\frac{x}{5}",
    "5!", r"\pm 5", "5, 6", "(5, 6)", "5 or 6", "x = 5, y = 6", "x = 5 or x = 6", "> 4", r"\geq 5", "x^5",
    "5 + i", "5i", "5_6", r"\left(\frac{1}{2}\right)^2", r"\frac{2+3}{5}", r"\frac{\frac{3}{2}}{2}",
    "n = 3 * 4", "10:30", "[5, b)", r"5\sin x", r"-\frac{-1}{2}", r"5\infty",
    "[5, 6)", "x > 5", "5 to 6", "5N", "5t", "5 t^2", "5 - cost", r"5\boldsymbol{x}", r"5\mathbf{x}", "5 (6)",
    "5 (or 6)", "5 (3 pi)", "5(6)", "x = a, y = 5", "x = a or x = 5", r"x = 5 \Rightarrow", r"A = 5\pi = 2\sqrt{3}",
    "A 5", "5:00", r"5\operatorname{sin}",
]  # fmt: skip


@pytest.mark.parametrize("content", EXPRESSIONS)
def test_an_expression_in_a_box_is_no_number(content: str) -> None:
    """The last box decides: neither a number in it nor one before it is the answer."""
    assert final_answer(rf"The answer is 5, \boxed{{5}}. So \boxed{{{content}}}.") is None
    assert boxed_number(rf"So \boxed{{{content}}}.") is None


def test_a_box_without_a_number_does_not_decide() -> None:
    assert final_answer(r"I write it into \boxed{}. The answer is 5.") == NumericAnswer(Fraction(5), announced=True)
    assert boxed_number(r"The answer is 5: \boxed{x}") is None
    assert boxed_number("5") is None


VERDICTS = [
    ("The answer is 72.0", 72, True),
    ("The answer is 72.01", 72, False),
    ("The answer is 720", 72, False),
    ("The answer is 1,8 or so", 18, False),
    ("The answer is 0.05", 5, False),  # five percent as a fraction is another number
    ("The answer is 5 %", 5, True),
    ("The answer is -18", 18, False),
    ("The answer is 36/2", 18, True),
    ("We get 18 and 19", 18, False),
    ("18 eggs, the answer is 17", 18, False),
]


@pytest.mark.parametrize(("text", "expected", "right"), VERDICTS)
def test_verdicts(text: str, expected: int, right: bool) -> None:
    answer = final_answer(text)
    assert (answer is not None and answer.value == Fraction(expected)) is right


def test_an_answer_tells_whether_it_was_announced() -> None:
    assert final_answer("so 18") == NumericAnswer(Fraction(18), announced=False)
    assert final_answer("so the answer is 18") == NumericAnswer(Fraction(18), announced=True)


@pytest.mark.parametrize(
    ("solution", "value"),
    [
        ("a\n#### 7", 7),
        ("#### -1,234", -1234),
        ("7", None),
        ("#### about 7", None),
        ("#### 7 or 8", None),
        ("####", None),
    ],
)
def test_the_expected_answer_must_be_all_there_is(solution: str, value: int | None) -> None:
    assert expected_answer(solution) == value


@given(st.integers(-(10**12), 10**12))
def test_whole_numbers_come_back_with_and_without_commas(value: int) -> None:
    for written in (str(value), f"{value:,}", f"{value:,}.00"):
        for text in (f"#### {written}", f"The answer is {written}.", rf"so \boxed{{{written}}}", f"We get {written}."):
            answer = final_answer(text)
            assert answer is not None
            assert answer.value == value, text


@given(st.text(max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or isinstance(answer.value, Fraction)


@given(st.decimals(-1000, 1000, allow_nan=False, places=3))
def test_decimals_are_read_exactly(value: object) -> None:
    assert numbers(f"{value} m") == [Fraction(str(value))]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_of_gsm8k_is_recovered(shared: Path, split: str) -> None:
    with gzip.open(shared / "data" / "gsm8k" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
        solutions = [json.loads(line)["answer"] for line in file]
    assert len(solutions) == {"train": 7473, "test": 1319}[split]
    for solution in solutions:
        work, _, written = solution.rpartition("####")
        value = int(written.strip().replace(",", ""))
        assert expected_answer(solution) == value
        for text in (solution, f"{work}The answer is {written.strip()}.", rf"{work}\boxed{{{written.strip()}}}"):
            answer = final_answer(text)
            assert answer is not None
            assert (answer.value, answer.announced) == (value, True), text

"""The final answer of a worked solution: the announced number, else the last number of the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from rlhf.evaluation.suites.numbers import find_numbers, plain

HASHES = "####"
_ANSWER = re.compile(r"\banswer\b(?:\s+is|\s+comes\s+to|\s*[:=])(?:\s*[:=])?", re.IGNORECASE)
_END = re.compile(r"\n|[.!?](?=\s|$)|;")
_BEGINS = re.compile(r"[\s(=:]*(?:(?:minus|negative) )?[-$€£¥₹ ]*\.?[0-9]", re.IGNORECASE)
_LISTED = re.compile(r"[0-9]+[.)]\s+[^\s0-9]")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")


@dataclass(frozen=True)
class Answer:
    """A number, and whether the text announced it as its answer."""

    value: Fraction
    announced: bool


def final_answer(text: str) -> Answer | None:
    """Extract the number that a solution ends in; None where the text has no number.

    Searched, in this order: after the last `####` that a number follows; in the last `\\boxed{...}`; after the last
    "answer is", "answer:" or "answer ="; the last number of the text. After an announcement it is the first number up
    to the end of the sentence, or, where there is an equation, the first after its last equals sign. `find_numbers`
    defines what a number is, and which marks and units are ignored.
    """
    for part in _announcements(text):
        value = _first_number(plain(part))
        if value is not None:
            return Answer(value, announced=True)
    numbers = list(find_numbers(plain(text)))
    return Answer(numbers[-1].value, announced=False) if numbers else None


def same_answer(text: str, expected: Fraction, *, announced_only: bool = False) -> bool:
    """Check whether the final answer of `text` is exactly the number `expected`."""
    answer = final_answer(text)
    return answer is not None and answer.value == expected and (answer.announced or not announced_only)


def expected_answer(solution: str) -> Fraction | None:
    """Extract the number after a solution's last `####`; None unless that number is all that follows."""
    _, mark, end = solution.rpartition(HASHES)
    end = end.strip()
    numbers = list(find_numbers(end))
    whole = len(numbers) == 1 and (numbers[0].start, numbers[0].end) == (0, len(end))
    return numbers[0].value if mark and whole else None


def _announcements(text: str) -> Iterator[str]:
    """Yield the texts after announcements of an answer: the most reliable kind first, within a kind the last first."""
    for part in reversed(text.split(HASHES)[1:]):
        line = part.lstrip("# ").partition("\n")[0]
        if _BEGINS.match(plain(line)) and not _LISTED.match(line):  # anything else is a heading
            yield line
    yield from reversed([_braced(text, match.end()) for match in _BOXED.finditer(text)])
    for match in reversed(list(_ANSWER.finditer(text))):
        yield _sentence(text[match.end() :])


def _first_number(part: str) -> Fraction | None:
    """Return the first number after the last equals sign, else the first number; None without one."""
    _, _, after = part.rpartition("=")
    return next((number.value for side in (after, part) for number in find_numbers(side)), None)


def _sentence(text: str) -> str:
    """Return the first sentence of a text, without leading whitespace and its end mark."""
    text = text.lstrip()
    end = _END.search(text)
    return text[: end.start()] if end else text


def _braced(text: str, start: int) -> str:
    """Return the contents of the braces that open at `start`; without braces, the next word."""
    if text[start : start + 1] != "{":
        return text[start:].partition(" ")[0]
    depth = 0
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i]
    return text[start + 1 :]

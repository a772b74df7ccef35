"""The number that a worked solution ends in, however it is written; compared exactly, as fractions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 400  # digits: a longer number is never an answer, and arithmetic on it is slow
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}

_GROUPED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})(?![0-9])"  # 1,234,567 and 12,34,567
_DECIMAL = rf"(?:(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?P<minus>(?<![\w.)\]])-|\b(?:minus|negative)\ )?
    (?:[$€£¥₹]\ ?(?P<inner>-)?)?
    (?<![A-Za-z_^])(?<![A-Za-z]-)(?<![0-9]\.)(?<![0-9])     # not inside a word, a unit or another number
    (?:(?>(?P<whole>[0-9]+))\ (?=[0-9]+/[0-9]))?
    (?>(?P<value>{_DECIMAL}))
    (?:
        [eE](?P<e>[+-]?[0-9]{{1,3}})(?![0-9])
      | \ ?[x*×]\ ?10\^\(?(?P<power>[+-]?[0-9]{{1,3}})(?![0-9])\)?
      | \^\(?(?P<raised>[0-9]{{1,2}})(?![0-9])\)?
    )?
    (?:\ ?/\ ?(?>(?P<below>{_DECIMAL}))(?!\ ?/\ ?[0-9]))?
    (?:[ -](?P<scale>{"|".join(SCALES)})\b)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_IN_TEXT = re.compile(r"\\(?:text(?:rm|it|bf|sf|tt|normal)?|math(?:rm|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}")
_STYLE = r"\\(?:(?:display|text)style|large|Large|LARGE|huge|bf|rm|it|boldmath)(?![a-zA-Z])"
_REPLACEMENTS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (_IN_TEXT, r" \1 "),
    (re.compile(rf"{_STYLE}|\\(?:text)?color\s*\{{[^{{}}]*\}}"), " "),
    (re.compile(r"(?:(?<=[\w})\]])-?|(?<=[0-9})\]]) +-)(?=\\[cdt]?frac)"), r"\g<0> "),  # a difference or mixed number
    (re.compile(r"\\[cdt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))"), r"\1\2/\3\4 "),
    (re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,|[\u00a0\u202f\u2009])(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\times|\\cdot"), "×"),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\\(?:left|right|,|;|!|:|q?quad| |\\)"), " "),
    (re.compile(r"(?<=[0-9]):00(?=\s*[ap]\.?m\b)", re.IGNORECASE), ""),
    (re.compile("[\u2212\u2013\ufe63\uff0d]"), "-"),  # the minus sign and the dashes typed for it
    (re.compile(r"(=[^\S\n]*|(?<!\S)\$)-[^\S\n]+(?=[$€£¥₹]?\.?[0-9])"), r"\1-"),
    (re.compile(r"\^\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"\\(?:math(?:bf|it)|boldsymbol|bm|underline)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=10)[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+"), lambda match: "^" + match.group().translate(_SUPERSCRIPTS)),
    (re.compile(r"\*\*|__|`"), ""),
    (re.compile(r"(?<![\w*])([*_])(?=\S)([^*_\n]+)(?<=\S)\1(?![\w*])"), r"\2"),
)


@dataclass(frozen=True)
class NumberMatch:
    """A number in a text, with its value and position."""

    value: Fraction
    start: int
    end: int


def strip_markup(text: str) -> str:
    """Remove LaTeX and Markdown markup around numbers: `\\frac{3}{4}` becomes 3/4, `1{,}000` becomes 1,000."""
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text


def find_numbers(text: str) -> Iterator[NumberMatch]:
    """Yield the numbers of a `plain` text, in order.

    It understands thousands commas, decimals, a minus or the words minus and negative, a currency sign, fractions and
    mixed numbers (2 1/2), powers of ten (1.2e3, 1.2 x 10^3) and scale words (3 million). It ignores digits that belong
    to a word or to a unit (H2O, cm^2). A percent sign is a unit: 5% is 5.
    """
    for match in _NUMBER.finditer(text):
        value = _value(match)
        if value is not None:
            yield NumberMatch(value, match.start(), match.end())


def _value(match: re.Match[str]) -> Fraction | None:
    """Compute the value of a match; None if it has none (division by zero, too many digits)."""
    if len(match.group()) > LONGEST:
        return None
    groups = match.groupdict()
    value = _value_before_slash(match)
    if groups["below"]:
        denominator = _to_fraction(groups["below"])
        if denominator == 0:
            return None
        value /= denominator
    if groups["whole"] and value < 1:  # 2 1/2; in "2 4/2" the 2 is another number
        value += _to_fraction(groups["whole"])
    if groups["scale"]:
        value *= SCALES[groups["scale"].lower()]
    if max(abs(value.numerator), value.denominator) > 10**LONGEST:
        return None
    return -value if groups["minus"] or groups["inner"] else value


def _value_before_slash(match: re.Match[str]) -> Fraction:
    """Compute the number that a match begins with: its digits, times a power of ten or raised to a power."""
    value = _to_fraction(match["value"])
    power = match["e"] or match["power"]
    if power:
        value *= Fraction(10) ** int(power)
    if match["raised"]:
        value **= int(match["raised"])
    return value


def _to_fraction(digits: str) -> Fraction:
    """Parse digits with thousands commas and a decimal point exactly."""
    return Fraction(digits.replace(",", ""))


HASHES = "####"
_ANSWER = re.compile(r"\banswer\b(?:\s+is|\s+comes\s+to|\s*[:=])(?:\s*[:=])?", re.IGNORECASE)
_END = re.compile(r"\n|[.!?](?=\s|$)|;")
_BEGINS = re.compile(r"[\s(=:]*(?:(?:minus|negative) )?[-$€£¥₹ ]*\.?[0-9]", re.IGNORECASE)
_LISTED = re.compile(r"[0-9]+[.)]\s+[^\s0-9]")
_OPERATOR = re.compile(r"[+*×÷]|(?<!\w)[-x/](?!\w)|\A\)?\(|%\s+of\b", re.IGNORECASE)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")
_ITEM = re.compile(r"\A[^\S\n]*\n\s*-\s+")  # the dash of a list
_FIRST_SIGN = re.compile(r"\A([\s${(]*-)\s+(?=[$€£¥₹]?\.?[0-9])")
_PLUS = re.compile(r"\A[\s${(]*\+")
_MARK = re.compile(
    r"\^?(?:\\(?:circ|degree)|°)(?:\s*[CFK]\b)?|\^\s*(?:st|nd|rd|th)\b|\b[aApP]\.\s?[mM]\b"
    r"|\\(?:approx|pounds|cent|checkmark)\b|\\?[{}]|[\s\[\]()$€£¥₹¢%.,;:'\"~≈]"
)
_WORD = re.compile(r"(?:/\s*|(?<=[\w#])-)?([^\W\d_]+)(?:\s*\^-?[0-9]+|[0-9²³])?")  # also a unit: cm^2, /h
_SHORT_UNITS = frozenset("mgshL")
_SPACED_UNIT = re.compile(r"(?<=#)\s+[NJVWAKCltd](?![\w^])")  # close to a number it is a variable
_ASIDE = re.compile(r"\s\(([^()]*[^\W\d_][^()]*)\)\s*\Z")  # 18 eggs (1.5 dozen)
_EQUALS = re.compile(r"=|≈|\\approx\b")
_IMPLIES = re.compile(r"\\(?:implies|(?:Long)?[rR]ightarrow)\b|⇒")
_SEVERAL = re.compile(r"[,;]|\b(?:and|or)\b")
_NO_UNITS = frozenset(("pi", "or", "and", "not", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "mod"))


@dataclass(frozen=True)
class NumericAnswer:
    """A number, and whether the text announced it as its answer."""

    value: Fraction
    announced: bool


def final_answer(text: str) -> NumericAnswer | None:
    """Extract the number that a solution ends in; None if the text has no number.

    Searched, in this order: after the last `####` that a number follows; in the last `\\boxed{...}` with a digit;
    after the last "answer is", "answer:" or "answer ="; the last number of the text. After an announcement it is the
    first number up to the end of the sentence, or, if there is an equation, the first after its last equals sign; if a
    calculation follows that sign, as in 12 = 3 * 4, the first of the last side that is none. `find_numbers` defines
    what a number is, and which marks and units are ignored. A last box with more than a number, as in
    `\\boxed{2\\sqrt{3}}`, has no answer: None.
    """
    for part, is_box in _announcements(text):
        if is_box and not any(map(str.isdigit, part)):
            continue
        value = _boxed_value(part) if is_box else _first_number(strip_markup(part))
        if is_box or value is not None:
            return None if value is None else NumericAnswer(value, announced=True)
    numbers = list(find_numbers(strip_markup(text)))
    return NumericAnswer(numbers[-1].value, announced=False) if numbers else None


def last_box(text: str) -> str | None:
    """Return the contents of the last `\\boxed{...}`; None if there is none."""
    boxes = list(_BOXED.finditer(text))
    return _braced(text, boxes[-1].end()) if boxes else None


def boxed_number(text: str) -> Fraction | None:
    """Return the number of the last `\\boxed{...}`; None if there is no box, or more than a number in it."""
    box = last_box(text)
    return None if box is None else _boxed_value(box)


def lone_number(text: str) -> Fraction | None:
    """Return the number that a text is, with nothing but marks around it; None if it is none."""
    return _lone(_join_sign(strip_markup(text)))


def expected_answer(solution: str) -> Fraction | None:
    """Extract the number after a solution's last `####`; None unless that number is all that follows."""
    _, mark, end = solution.rpartition(HASHES)
    end = end.strip()
    numbers = list(find_numbers(end))
    whole = len(numbers) == 1 and (numbers[0].start, numbers[0].end) == (0, len(end))
    return numbers[0].value if mark and whole else None


def _announcements(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the texts after announcements of an answer, and whether they are the contents of a box.

    The most reliable kind is first, within a kind the last.
    """
    for part in reversed(text.split(HASHES)[1:]):
        line = part.lstrip("# ").partition("\n")[0]
        if _BEGINS.match(strip_markup(line)) and not _LISTED.match(line):  # anything else is a heading
            yield line, False
    for match in reversed(list(_BOXED.finditer(text))):
        yield _braced(text, match.end()), True
    for match in reversed(list(_ANSWER.finditer(text))):
        yield _sentence(text[match.end() :]), False


def _first_number(part: str) -> Fraction | None:
    """Return the first number of the last side of an equation that is no calculation, else of the last; or None."""
    sides = part.split("=")
    results = [side for side in reversed(sides) if not _is_calculation(side)]
    return next((number.value for side in (*results, sides[-1], part) for number in find_numbers(side)), None)


def _boxed_value(content: str) -> Fraction | None:
    """Return the number of a box, which may have marks, words and units around it, or be a side of an equation.

    None if there is more: an expression, a variable, several numbers or several equations.
    """
    words = frozenset(word for part in _IN_TEXT.findall(content) for word in _WORD.findall(part))
    sides = _EQUALS.split(_join_sign(strip_markup(_IMPLIES.split(content)[-1])))
    results = [i for i, side in enumerate(sides) if any(find_numbers(side)) and not _is_calculation(side)]
    if not results:
        return None
    between = [side for side in sides[1 : results[-1]] if any(find_numbers(side)) or _SEVERAL.search(side)]
    if any(_lone(side, words) is None for side in between if not _is_calculation(side)):
        return None
    return _lone(sides[results[-1]], words)


def _lone(side: str, words: frozenset[str] | None = None) -> Fraction | None:
    """Return the only number of a text whose rest is marks, and words if `words` is given; None if there is more.

    Words of one letter are units if they are among `words`, those that are marked as text, or a usual unit.
    """
    side = _PLUS.sub("", side)
    aside = None if words is None else _ASIDE.search(side)
    if aside and _lone(aside[1], words) is not None:
        side = side[: aside.start()]
    numbers = list(find_numbers(side))
    if len(numbers) != 1:
        return None
    rest = _MARK.sub(" ", f"{side[: numbers[0].start]}#{side[numbers[0].end :]}")
    if words is not None:
        rest = _SPACED_UNIT.sub("", rest)
        rest = _WORD.sub(lambda match: "" if _is_word(match[1], words) else match[0], rest)
    return numbers[0].value if rest.strip() == "#" else None


def _is_word(word: str, words: frozenset[str]) -> bool:
    """Check whether letters are a word or a unit, and no variable, constant or function."""
    return word.lower() not in _NO_UNITS and (len(word) > 1 or word in words or word in _SHORT_UNITS)


def _join_sign(text: str) -> str:
    """Join a minus at the beginning of a text to the number after it."""
    return _FIRST_SIGN.sub(r"\1", text)


def _is_calculation(side: str) -> bool:
    """Check whether an operator stands between the first two numbers, so that neither is the result."""
    first, second = [*find_numbers(side), None, None][:2]
    if first is None or second is None:
        return False
    return _OPERATOR.search(side[first.end : second.start]) is not None


def _sentence(text: str) -> str:
    """Return the first sentence of a text, without leading whitespace and its end mark."""
    text = _ITEM.sub("", text).lstrip()
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

"""Find the numbers in prose and parse them exactly, as fractions."""

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
_REPLACEMENTS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2 "),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r" \1/\2 "),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,|[\u00a0\u202f\u2009])(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\times|\\cdot"), "×"),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\\(?:left|right|,|;|!|:|quad| )"), " "),
    (re.compile("[\u2212\u2013\ufe63\uff0d]"), "-"),  # the minus sign and the dashes typed for it
    (re.compile(r"\^\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"(?<=10)[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+"), lambda match: "^" + match.group().translate(_SUPERSCRIPTS)),
    (re.compile(r"\*\*|__|`"), ""),
    (re.compile(r"(?<![\w*])([*_])(?=\S)([^*_\n]+)(?<=\S)\1(?![\w*])"), r"\2"),
)


@dataclass(frozen=True)
class Found:
    """A number in a text, with its value and position."""

    value: Fraction
    start: int
    end: int


def plain(text: str) -> str:
    """Remove LaTeX and Markdown markup around numbers: `\\frac{3}{4}` becomes 3/4, `1{,}000` becomes 1,000."""
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text


def find_numbers(text: str) -> Iterator[Found]:
    """Yield the numbers of a `plain` text, in order.

    It understands thousands commas, decimals, a minus or the words minus and negative, a currency sign, fractions and
    mixed numbers (2 1/2), powers of ten (1.2e3, 1.2 x 10^3) and scale words (3 million). It ignores digits that belong
    to a word or to a unit (H2O, cm^2). A percent sign is a unit: 5% is 5.
    """
    for match in _NUMBER.finditer(text):
        value = _value(match)
        if value is not None:
            yield Found(value, match.start(), match.end())


def _value(match: re.Match[str]) -> Fraction | None:
    """Compute the value of a match; None where it has none (division by zero, too many digits)."""
    if len(match.group()) > LONGEST:
        return None
    groups = match.groupdict()
    value = _to_fraction(groups["value"])
    power = groups["e"] or groups["power"]
    if power:
        value *= Fraction(10) ** int(power)
    if groups["raised"]:
        value **= int(groups["raised"])
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


def _to_fraction(digits: str) -> Fraction:
    """Parse digits with thousands commas and a decimal point exactly."""
    return Fraction(digits.replace(",", ""))

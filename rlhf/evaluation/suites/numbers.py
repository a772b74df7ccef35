"""Numbers in prose: found, and read exactly, as fractions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 400  # digits: a longer number is no answer to anything, and arithmetic on it takes its time
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
_PLAIN: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2 "),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r" \1/\2 "),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,|[\u00a0\u202f\u2009])(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\times|\\cdot"), "×"),
    (re.compile(r"\\([$%#&_])"), r"\1"),
    (re.compile(r"\\(?:left|right|,|;|!|:|quad| )"), " "),
    (re.compile("[\u2212\u2013\ufe63\uff0d]"), "-"),  # the minus sign and what is typed for it
    (re.compile(r"\^\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"(?<=10)[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+"), lambda found: "^" + found.group().translate(_SUPERSCRIPTS)),
    (re.compile(r"\*\*|__|`"), ""),
    (re.compile(r"(?<![\w*])([*_])(?=\S)([^*_\n]+)(?<=\S)\1(?![\w*])"), r"\2"),
)


@dataclass(frozen=True)
class Found:
    """A number of a text and where it stands."""

    value: Fraction
    start: int
    end: int


def plain(text: str) -> str:
    """The text without LaTeX's and Markdown's marks around numbers: `\\frac{3}{4}` is 3/4, `1{,}000` is 1,000."""
    for pattern, written in _PLAIN:
        text = pattern.sub(written, text)
    return text


def find_numbers(text: str) -> Iterator[Found]:
    """The numbers of a `plain` text, in order.

    Read are thousands commas, decimals, a minus or the words minus and negative, a currency sign, fractions and mixed
    numbers (2 1/2), powers of ten (1.2e3, 1.2 x 10^3) and words of scale (3 million). Not read are digits that belong
    to a word or to a unit (H2O, cm^2). A percent sign is a unit: 5% is 5.
    """
    for match in _NUMBER.finditer(text):
        value = _value(match)
        if value is not None:
            yield Found(value, match.start(), match.end())


def _value(match: re.Match[str]) -> Fraction | None:
    """What a match is worth; None where it is no number (divided by zero, endless)."""
    if len(match.group()) > LONGEST:
        return None
    found = match.groupdict()
    value = _exact(found["value"])
    power = found["e"] or found["power"]
    if power:
        value *= Fraction(10) ** int(power)
    if found["raised"]:
        value **= int(found["raised"])
    if found["below"]:
        below = _exact(found["below"])
        if below == 0:
            return None
        value /= below
    if found["whole"] and value < 1:  # 2 1/2; in "2 4/2" the 2 is another number
        value += _exact(found["whole"])
    if found["scale"]:
        value *= SCALES[found["scale"].lower()]
    if max(abs(value.numerator), value.denominator) > 10**LONGEST:
        return None
    return -value if found["minus"] or found["inner"] else value


def _exact(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))

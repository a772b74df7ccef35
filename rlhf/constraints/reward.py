"""A reward without a model: the share of a prompt's checkable constraints that a completion meets.

    reward: {source: {type: function, target: rlhf.constraints.reward:score}}

The rows of the prompts have IFEval's columns `instruction_id_list` and `kwargs`; scripts/make_instructions.py writes
such rows. A response is checked strictly, or loosely: without the text that often surrounds an answer.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from rlhf.constraints.checks import CHECKS, words
from rlhf.errors import RewardError

KIND_COLUMN, ARGUMENTS_COLUMN = "instruction_id_list", "kwargs"  # the columns of IFEval's rows
LANGUAGE_KIND = "language:response_language"
DETECTING_KINDS = {LANGUAGE_KIND, "change_case:english_capital", "change_case:english_lowercase"}


@dataclass(frozen=True)
class Constraint:
    """An instruction that can be checked: its kind, as IFEval names it, and its parameters."""

    kind: str
    arguments: Mapping[str, Any]

    def is_met(self, response: str) -> bool:
        """Check whether a response meets the constraint; an empty response does not."""
        return bool(response.strip()) and CHECKS[self.kind](response, **self.arguments)

    def is_met_loosely(self, response: str) -> bool:
        """Check whether any of the eight loose variants of a response meets the constraint.

        They leave out the first line, the last, both or neither, each with and without asterisks.
        """
        return any(self.is_met(variant) for variant in loose_variants(response))


@dataclass(frozen=True)
class Compliance:
    """Whether a response meets each constraint of a row, in their order."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def read_constraints(row: Mapping[str, object]) -> list[Constraint]:
    """Read a row's `instruction_id_list` and `kwargs`; arguments that are null are left out.

    Raises:
        ValueError: a column is missing or malformed, a kind is unknown, or an argument is missing or unexpected.
    """
    kinds, arguments = row.get(KIND_COLUMN), row.get(ARGUMENTS_COLUMN)
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or not kinds:
        raise ValueError(f"{KIND_COLUMN} is not a list of kinds of instruction")
    if not isinstance(arguments, Sequence) or isinstance(arguments, str) or len(arguments) != len(kinds):
        raise ValueError(f"{ARGUMENTS_COLUMN} is not a list of {len(kinds)} objects, one for each of {KIND_COLUMN}")
    return [_constraint(kind, given) for kind, given in zip(kinds, arguments, strict=True)]


def verify(constraints: Sequence[Constraint], response: str) -> Compliance:
    """Check a response against all constraints of its row."""
    return Compliance(
        strict=tuple(constraint.is_met(response) for constraint in constraints),
        loose=tuple(constraint.is_met_loosely(response) for constraint in constraints),
    )


def loose_variants(response: str) -> list[str]:
    """Return the eight variants of a response for the loose metric (Zhou et al. 2023, section 2.2)."""
    lines = response.split("\n")
    cuts = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cuts, *(cut.replace("*", "") for cut in cuts)]


def _constraint(kind: object, given: object) -> Constraint:
    if not isinstance(kind, str) or kind not in CHECKS:
        raise ValueError(f"{kind!r} is not a kind of instruction that can be checked")
    if not isinstance(given, Mapping):
        raise ValueError(f"the arguments of {kind} are not an object: {given!r}")
    arguments = {str(name): value for name, value in given.items() if value is not None}
    try:
        inspect.signature(CHECKS[kind]).bind("", **arguments)
    except TypeError as error:
        raise ValueError(f"the arguments of {kind} do not fit: {error}") from error
    for name, value in arguments.items():
        form = _forms(kind).get(name)
        if form in _IS_OF and not _IS_OF[form](value):
            raise ValueError(f"the argument {name} of {kind} is {value!r}, and not {_IN_WORDS[form]}")
        arguments[name] = int(value) if form is int else value  # JSON of some programs has 3.0
    if arguments.get("nth_paragraph", 1) < 1:
        raise ValueError(f"nth_paragraph is {arguments['nth_paragraph']}; the first paragraph is 1")
    return Constraint(kind, arguments)


@cache
def _forms(kind: str) -> dict[str, object]:
    """Return the types of a kind's arguments."""
    return get_type_hints(CHECKS[kind])


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


_IS_OF: dict[object, Callable[[Any], bool]] = {
    str: _is_text,
    int: lambda value: not isinstance(value, bool) and isinstance(value, int | float) and float(value).is_integer(),
    Sequence[str]: lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value)),
}
_IN_WORDS: dict[object, str] = {str: "a text", int: "a whole number", Sequence[str]: "a list of texts"}


COMMON_ENGLISH_WORDS = frozenset(
    """
    a about after all also an and are as at be because been but by can could do each for from had has have he her
    his how i if in into is it its just like make many may more most my no not of on one only or other our out
    people she so some such than that the their them then there these they this time to two up use was way we were
    what when which who will with would you your
    """.split()  # noqa: SIM905
)
ENGLISH_SHARE = 0.2  # least share of common words; ordinary English prose has 0.35 to 0.5
DISTINCT_SHARE = 0.6  # least share of distinct trigrams; ordinary prose has above 0.9
SHORT = 12  # words; a text of no more than these is too short for shares


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    references: Sequence[Mapping[str, Any]],
    *,
    fluency: float = 0.1,
) -> tuple[list[float], dict[str, list[float]]]:
    """Score each completion by the constraints of its row that it meets, and a little by its language.

    The share of the constraints that are met strictly, plus a bonus for text that reads as English and does not repeat:

        met / constraints + fluency * (English-like + not repetitive) / 2

    If a row asks for another language, its text counts as English-like.

    Args:
        prompts: not used.
        completions: the texts to score; an empty one scores 0.
        references: the rows, with `instruction_id_list` and `kwargs`.
        fluency: the most that the language adds; 0 scores the constraints alone.

    Returns:
        The scores, and their parts: met, all_met (1 or 0), english, varied.

    Raises:
        RewardError: a row has no constraints that can be checked.
    """
    parts: dict[str, list[float]] = {"met": [], "all_met": [], "english": [], "varied": []}
    scores = []
    for row, completion in zip(references, completions, strict=True):
        met = _share_met(row, completion)
        english = float(LANGUAGE_KIND in row[KIND_COLUMN] or is_english_like(completion))
        varied = float(is_varied(completion))
        for name, value in zip(parts, (met, float(met == 1), english, varied), strict=True):
            parts[name].append(value)
        scores.append(met + fluency * (english + varied) / 2)
    return scores, parts


def is_english_like(text: str) -> bool:
    """Return whether at least ENGLISH_SHARE of the words are among the most common of English.

    In a text of at most SHORT words, one word of ASCII letters is enough.
    """
    tokens = [word.lower() for word in words(text)]
    if len(tokens) <= SHORT:
        return any(token.isascii() and token.isalpha() for token in tokens)
    return sum(token in COMMON_ENGLISH_WORDS for token in tokens) >= ENGLISH_SHARE * len(tokens)


def is_varied(text: str) -> bool:
    """Return whether trigrams of words are rarely repeated: at least DISTINCT_SHARE of them are distinct.

    A text of at most SHORT words is varied if it has any word.
    """
    tokens = [word.lower() for word in words(text)]
    if len(tokens) <= SHORT:
        return bool(tokens)
    trigrams = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return len(trigrams) >= DISTINCT_SHARE * trigrams.total()


def _share_met(row: Mapping[str, Any], completion: str) -> float:
    try:
        constraints = read_constraints(row)
    except ValueError as error:
        raise RewardError(
            f"a prompt has no constraints to check: {error}; its row needs instruction_id_list and kwargs, "
            "as scripts/make_instructions.py writes them"
        ) from error
    return sum(constraint.is_met(completion) for constraint in constraints) / len(constraints)

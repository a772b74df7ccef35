"""Read the constraints of a row and check a response: strictly, or loosely, without what often surrounds an answer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.constraints.checks import CHECKS

KINDS, ARGUMENTS = "instruction_id_list", "kwargs"  # the columns of IFEval's rows


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
class Verdict:
    """Which constraints of a row a response meets, in their order."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]


def read_constraints(row: Mapping[str, object]) -> list[Constraint]:
    """Read a row's `instruction_id_list` and `kwargs`; arguments that are null are left out.

    Raises:
        ValueError: a column is missing or malformed, a kind is unknown, or an argument is missing or unexpected.
    """
    kinds, arguments = row.get(KINDS), row.get(ARGUMENTS)
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or not kinds:
        raise ValueError(f"{KINDS} is not a list of kinds of instruction")
    if not isinstance(arguments, Sequence) or isinstance(arguments, str) or len(arguments) != len(kinds):
        raise ValueError(f"{ARGUMENTS} is not a list of {len(kinds)} objects, one for each of {KINDS}")
    return [_constraint(kind, given) for kind, given in zip(kinds, arguments, strict=True)]


def verify(constraints: Sequence[Constraint], response: str) -> Verdict:
    """Check a response against all constraints of its row."""
    return Verdict(
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
    return Constraint(kind, arguments)

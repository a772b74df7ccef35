"""Rules for the text of a completion: length, repetition, script, language, format and forbidden words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rlhf.config.algorithm import NonNegative
from rlhf.config.base import Section
from rlhf.config.data import Count, Size

Share = Annotated[float, Field(ge=0, lt=1)]


class Rule(Section):
    """A rule, with what breaking it costs."""

    name: str | None = None
    """The name that it is logged by; null: its type."""
    weight: NonNegative = 1.0
    """Subtracted from the score where the rule is broken entirely; in proportion where it is broken in part."""
    gate: float | None = None
    """Instead of the penalty: the score of a completion that breaks the rule, whatever else it has; the lowest where
    several such rules are broken. null: the weight counts."""


class LengthRule(Rule):
    """A completion has at least `min` and at most `max` words, characters or tokens; broken entirely or not at all."""

    type: Literal["length"] = "length"
    min: Size = 0
    """The least."""
    max: Count | None = None
    """The most; null: no limit."""
    unit: Literal["words", "characters", "tokens"] = "words"
    """What is counted. Words are separated by white space; tokens are the policy's, EOS included."""

    @model_validator(mode="after")
    def _check_range(self) -> LengthRule:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max is {self.max}, below min, {self.min}: no completion can keep the rule")
        if self.max is None and self.min == 0:
            raise ValueError("give min, max or both: every completion keeps this rule")
        return self


class RepetitionRule(Rule):
    """At most the share `max` of a completion's n-grams of words occurred before in it; broken by that share."""

    type: Literal["repetition"] = "repetition"
    n: Count = 3
    """Words per n-gram."""
    max: Share = 0.0
    """The share that is tolerated."""


class ScriptRule(Rule):
    """At most the share `max` of a completion's letters belong to other scripts; broken by that share."""

    type: Literal["script"] = "script"
    allowed: Annotated[list[str], Field(min_length=1)]
    """Scripts as the names of Unicode's characters begin: latin, cyrillic, greek, arabic, cjk, hiragana, hangul ..."""
    max: Share = 0.0
    """The share that is tolerated."""


class LanguageRule(Rule):
    """A completion is in one of the languages; broken entirely or not at all, and not where no language shows.

    Needs the package langdetect, which guesses badly on texts of a few words.
    """

    type: Literal["language"] = "language"
    allowed: Annotated[list[str], Field(min_length=1)]
    """ISO 639-1 codes: en, de, zh-cn ..."""


class FormatRule(Rule):
    """Regular expressions that a completion must or must not match somewhere; broken by the share that fails."""

    type: Literal["format"] = "format"
    must: list[str] = []
    """Python's regular expressions; . matches a line break too."""
    must_not: list[str] = []
    """The same, none of which may match."""

    @field_validator("must", "must_not")
    @classmethod
    def _check_patterns(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern, re.DOTALL)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return patterns

    @model_validator(mode="after")
    def _check_given(self) -> FormatRule:
        if not self.must and not self.must_not:
            raise ValueError("give must, must_not or both: every completion keeps this rule")
        return self


class ForbiddenRule(Rule):
    """Words or phrases that may not occur; broken entirely or not at all."""

    type: Literal["forbidden"] = "forbidden"
    phrases: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    """Whole words or phrases, without regular expressions."""
    ignore_case: bool = True
    """Whether capitals and small letters are the same."""


RuleConfig = Annotated[
    LengthRule | RepetitionRule | ScriptRule | LanguageRule | FormatRule | ForbiddenRule, Field(discriminator="type")
]


def rule_names(rules: Sequence[RuleConfig]) -> list[str]:
    """Return the names that the rules are logged by.

    Raises:
        ValueError: two rules have the same name.
    """
    names = [rule.name or rule.type for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two rules are called {name}: give them a name of their own (name: ...)")
    return names

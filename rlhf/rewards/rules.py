"""A reward source of rules for the text of a completion: a broken rule is a penalty, or a gate replaces the score."""

from __future__ import annotations

import re
import sys
import unicodedata
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Lt
from pydantic import Field, field_validator, model_validator

from rlhf.constraints.checks import detect_language, require_langdetect
from rlhf.errors import RewardError
from rlhf.rewards.source import BatchDecoder, RewardSource, Source, SourceContext, decode
from rlhf.section import Choice, OneOf

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Completions, Scores


class TextRule(Choice):
    """A rule for the text of a completion, and the cost of breaking it."""

    name: str | None = None
    """Name in the metrics; null: the type."""
    weight: Annotated[float, Ge(0)] = 1.0
    """Penalty if the rule is fully broken; proportional if it is partly broken."""
    gate: float | None = None
    """Replaces the score of a completion that breaks the rule (the lowest gate, if several apply); null: subtract the
    penalty instead."""

    @abstractmethod
    def violation(self, text: str, tokens: int) -> float:
        """Compute how much of the rule a completion breaks, from 0 (nothing) to 1.

        Args:
            text: the completion, without special tokens.
            tokens: its length in tokens, EOS included.
        """

    def check(self) -> None:
        """Check before a run that the packages of the rule are installed.

        Raises:
            ConfigError: one is missing.
        """


class LengthRule(TextRule):
    """Between `min` and `max` words, characters or tokens; fully broken or kept."""

    type: Literal["length"] = "length"
    min: Annotated[int, Ge(0)] = 0
    """Minimum length."""
    max: Annotated[int, Ge(1)] | None = None
    """Maximum length; null: no limit."""
    unit: Literal["words", "characters", "tokens"] = "words"
    """Unit of length. Words are separated by white space; tokens are the policy's, including EOS."""

    @model_validator(mode="after")
    def _check_range(self) -> LengthRule:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max is {self.max}, below min, {self.min}: no completion can keep the rule")
        if self.max is None and self.min == 0:
            raise ValueError("give min, max or both: every completion keeps this rule")
        return self

    def violation(self, text: str, tokens: int) -> float:
        """Compute how much of the rule a completion breaks."""
        length = {"words": len(text.split()), "characters": len(text), "tokens": tokens}[self.unit]
        return float(length < self.min or (self.max is not None and length > self.max))


class RepetitionRule(TextRule):
    """Maximum share of word n-grams that repeat earlier ones; broken in proportion to the share."""

    type: Literal["repetition"] = "repetition"
    n: Annotated[int, Ge(1)] = 3
    """Words per n-gram."""
    max: Annotated[float, Ge(0), Lt(1)] = 0.0
    """The tolerated share."""

    def violation(self, text: str, tokens: int) -> float:
        """Compute how much of the rule a completion breaks."""
        return _above(repeated_share(text.casefold().split(), self.n), self.max)


class ScriptRule(TextRule):
    """Maximum share of letters in other scripts; broken in proportion to the share."""

    type: Literal["script"] = "script"
    allowed: Annotated[list[str], Field(min_length=1)]
    """Scripts, as in Unicode character names: latin, cyrillic, greek, arabic, cjk, hiragana, hangul ..."""
    max: Annotated[float, Ge(0), Lt(1)] = 0.0
    """The tolerated share."""

    @field_validator("allowed")
    @classmethod
    def _check_scripts(cls, names: list[str]) -> list[str]:
        for name in names:
            if not any(chr(code).isalpha() and _script(chr(code)) == name.upper() for code in range(sys.maxunicode)):
                raise ValueError(f"no letter's name in Unicode begins with {name!r}: give latin, cyrillic, cjk ...")
        return names

    def violation(self, text: str, tokens: int) -> float:
        """Compute how much of the rule a completion breaks."""
        return _above(foreign_share(text, frozenset(name.upper() for name in self.allowed)), self.max)


LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
"""The languages that langdetect knows."""


class LanguageRule(TextRule):
    """The completion's language is one of these; fully broken or kept. Kept if no language is detected.

    Needs the package langdetect, which is unreliable on texts of a few words.
    """

    type: Literal["language"] = "language"
    allowed: Annotated[list[str], Field(min_length=1)]
    """ISO 639-1 codes: en, de, zh-cn ..."""

    @field_validator("allowed")
    @classmethod
    def _check_codes(cls, codes: list[str]) -> list[str]:
        for code in codes:
            if code not in LANGUAGES.split():
                raise ValueError(f"{code!r} is not a language code of langdetect; choose from {LANGUAGES}")
        return codes

    def check(self) -> None:
        """Check that langdetect is installed.

        Raises:
            ConfigError: it is missing.
        """
        require_langdetect()

    def violation(self, text: str, tokens: int) -> float:
        """Compute how much of the rule a completion breaks."""
        return float(detect_language(text) not in (None, *self.allowed))


class FormatRule(TextRule):
    """Regular expressions that a completion must or must not contain; broken in proportion to failures."""

    type: Literal["format"] = "format"
    must: list[str] = []
    """Python regular expressions that must match; . also matches line breaks."""
    must_not: list[str] = []
    """Python regular expressions that must not match."""

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

    def violation(self, text: str, tokens: int) -> float:
        """Compute how much of the rule a completion breaks."""
        failures = [re.search(pattern, text, re.DOTALL) is None for pattern in self.must]
        failures += [re.search(pattern, text, re.DOTALL) is not None for pattern in self.must_not]
        return sum(failures) / len(failures)


class ForbiddenRule(TextRule):
    """Forbidden words or phrases; fully broken or kept."""

    type: Literal["forbidden"] = "forbidden"
    phrases: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    """Whole words or phrases, without regular expressions."""
    ignore_case: bool = True
    """Ignore upper and lower case."""

    def violation(self, text: str, tokens: int) -> float:
        """Compute how much of the rule a completion breaks."""
        flags = re.IGNORECASE if self.ignore_case else 0
        return float(any(re.search(_whole(phrase), text, flags) for phrase in self.phrases))


def rule_names(rules: Sequence[TextRule]) -> list[str]:
    """Return the names that the rules are logged by.

    Raises:
        ValueError: two rules have the same name, or one has a name of these parts of the score.
    """
    names = [rule.name or rule.type for rule in rules]
    if {"gated", "unruled"}.intersection(names):
        raise ValueError("no rule can be called gated or unruled, which are parts of the score: give another name")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two rules are called {name}: give each a different name (name: ...)")
    return names


class RulesSource(Source):
    """Rules for the text of a completion; a broken rule subtracts a penalty or replaces the score."""

    asks_on_main_rank: ClassVar[bool] = False  # the inner source is asked as it wants

    type: Literal["rules"] = "rules"
    rules: Annotated[list[Annotated[TextRule, OneOf()]], Field(min_length=1)]
    """The rules, in any order. The metrics log how far each is broken, from 0 to 1."""
    source: Annotated[Source, OneOf()] | None = None
    """The source whose scores the rules change; null: a completion that keeps all rules scores 0."""

    @property
    def is_learned(self) -> bool:
        """Return whether a model gives the scores that the rules change."""
        return self.source is not None and self.source.is_learned

    def check(self) -> None:
        """Check that the packages of the rules are installed.

        Raises:
            ConfigError: one is missing.
        """
        for rule in self.rules:
            rule.check()

    def build(self, context: SourceContext) -> RulesReward:
        """Return the source that measures the texts, and changes the scores of the inner source.

        Raises:
            UserError: a rule needs a package that is not installed, or the inner source cannot be built.
        """
        inner = context.build(self.source, may_abstain=context.may_abstain) if self.source is not None else None
        return RulesReward(self.rules, context.tokenizer, inner)

    @model_validator(mode="after")
    def _check_rules(self) -> RulesSource:
        rule_names(self.rules)
        if self.source is not None and self.source.standardizes_in_groups:
            raise ValueError("how=gdpo standardizes over groups: only the outermost source of a run may")
        return self


def repeated_share(words: Sequence[str], n: int) -> float:
    """Compute the share of n-grams that occurred earlier in the text; 0 if there is none."""
    ngrams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def foreign_share(text: str, allowed: frozenset[str]) -> float:
    """Compute the share of letters whose script is not `allowed` (in capitals); 0 for a text without letters.

    The script is the first word of the character's name in Unicode: LATIN SMALL LETTER A, CJK UNIFIED IDEOGRAPH-4E00.
    """
    scripts = [_script(character) for character in text if character.isalpha()]
    return sum(script not in allowed for script in scripts) / len(scripts) if scripts else 0.0


@lru_cache(maxsize=4096)
def _script(character: str) -> str:
    return unicodedata.name(character, "UNNAMED").split()[0].split("-")[0]


def _above(share: float, tolerated: float) -> float:
    return share if share > tolerated else 0.0


def _whole(phrase: str) -> str:
    r"""Make a pattern of a phrase that matches it as whole words: \b alone fails beside punctuation."""
    return rf"(?<!\w){re.escape(phrase)}(?!\w)"


def apply_rules(
    base: Float[Tensor, " B"], violations: Float[Tensor, "K B"], rules: Sequence[TextRule]
) -> Float[Tensor, " B"]:
    """Subtract the penalties of broken rules from the scores, and replace the scores if a gate is broken.

        score = base - Σ_k weight_k · violation_k,   or the lowest gate_k among the rules with a gate that are broken

    Args:
        base: the scores; NaN if their source does not apply, which only a gate changes.
        violations: of K rules, from 0 to 1.
        rules: the rules.
    """
    import torch

    values = base
    gates = torch.full_like(base, torch.inf)
    for rule, broken in zip(rules, violations, strict=True):
        if rule.gate is None:
            values = values - rule.weight * broken
        else:
            gates = torch.where(broken > 0, gates.clamp(max=rule.gate), gates)
    return torch.where(gates.isfinite(), gates, values)


class RulesReward:
    """Applies rules to the texts of completions, and to the scores of another source if there is one.

    The parts are the other source's, its score as "unruled", and by its name how much of each rule is broken; "gated"
    is 1 if a gate replaced the score, if there are gates.
    """

    def __init__(self, rules: Sequence[TextRule], tokenizer: BatchDecoder, source: RewardSource | None) -> None:
        """Apply `rules` to the texts that `tokenizer` decodes and, unless it is None, to the scores of `source`.

        Raises:
            ConfigError: a rule needs a package that is not installed.
        """
        for rule in rules:
            rule.check()
        self.rules = list(rules)
        self.names = rule_names(rules)
        self.tokenizer = tokenizer
        self.source = source

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions; see apply_rules.

        Raises:
            RewardError: the source fails, or a part of its score has the name of a rule.
        """
        import torch

        from rlhf.types import Scores

        texts = decode(completions, self.tokenizer).completions
        lengths = completions.action_mask.sum(dim=1).tolist()
        violations = torch.tensor(
            [[rule.violation(text, n) for text, n in zip(texts, lengths, strict=True)] for rule in self.rules]
        )
        parts = dict(zip(self.names, violations, strict=True))
        base = torch.zeros(len(texts))
        if self.source is not None:
            scores = self.source(completions)
            base = scores.values
            if clash := scores.parts.keys() & parts.keys():
                raise RewardError(
                    f"{min(clash)!r} is a rule's name and a part of the score that the rules change: give the rule "
                    "another name"
                )
            parts = {**scores.parts, "unruled": base, **parts}
        gates = [k for k, rule in enumerate(self.rules) if rule.gate is not None]
        if gates:
            parts["gated"] = (violations[gates] > 0).any(dim=0).to(base)
        return Scores(values=apply_rules(base, violations.to(base), self.rules), parts=parts)

"""Rules for the text of a completion (penalties, and gates that replace the score), and the shaping of scores."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.config.reward import (
    ForbiddenRule,
    FormatRule,
    LanguageRule,
    LengthRule,
    RepetitionRule,
    RuleConfig,
    ScriptRule,
    ShapingConfig,
    rule_names,
)
from rlhf.constraints.checks import detect_language, require_langdetect
from rlhf.errors import RewardError
from rlhf.rewards.source import BatchDecoder, RewardSource, decode
from rlhf.types import Completions, Scores


def repeated_share(words: Sequence[str], n: int) -> float:
    """Compute the share of n-grams that occurred earlier in the text; 0 where there is none."""
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


def violation(rule: RuleConfig, text: str, tokens: int) -> float:
    """Compute how much of a rule a completion breaks, from 0 (nothing) to 1.

    Args:
        rule: the rule.
        text: the completion, without special tokens.
        tokens: its length in tokens, EOS included.
    """
    match rule:
        case LengthRule():
            length = {"words": len(text.split()), "characters": len(text), "tokens": tokens}[rule.unit]
            return float(length < rule.min or (rule.max is not None and length > rule.max))
        case RepetitionRule():
            return _above(repeated_share(text.casefold().split(), rule.n), rule.max)
        case ScriptRule():
            return _above(foreign_share(text, frozenset(name.upper() for name in rule.allowed)), rule.max)
        case LanguageRule():
            return float(detect_language(text) not in (None, *rule.allowed))
        case FormatRule():
            failures = [re.search(pattern, text, re.DOTALL) is None for pattern in rule.must]
            failures += [re.search(pattern, text, re.DOTALL) is not None for pattern in rule.must_not]
            return sum(failures) / len(failures)
        case ForbiddenRule():
            flags = re.IGNORECASE if rule.ignore_case else 0
            return float(any(re.search(_whole(phrase), text, flags) for phrase in rule.phrases))


def _above(share: float, tolerated: float) -> float:
    return share if share > tolerated else 0.0


def _whole(phrase: str) -> str:
    r"""Make a pattern of a phrase that matches it as whole words: \b alone fails beside punctuation."""
    return rf"(?<!\w){re.escape(phrase)}(?!\w)"


def apply_rules(
    base: Float[Tensor, " B"], violations: Float[Tensor, "K B"], rules: Sequence[RuleConfig]
) -> Float[Tensor, " B"]:
    """Subtract the penalties of broken rules from the scores, and replace the scores where a gate is broken.

        score = base - Σ_k weight_k · violation_k,   or the lowest gate_k among the rules with a gate that are broken

    Args:
        base: the scores; NaN where their source does not apply, which only a gate changes.
        violations: of K rules, from 0 to 1.
        rules: the rules.
    """
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
    is 1 where a gate replaced the score, if there are gates.
    """

    def __init__(self, rules: Sequence[RuleConfig], tokenizer: BatchDecoder, source: RewardSource | None) -> None:
        """Apply `rules` to the texts that `tokenizer` decodes and, unless it is None, to the scores of `source`.

        Raises:
            ConfigError: a rule needs a package that is not installed.
        """
        if any(isinstance(rule, LanguageRule) for rule in rules):
            require_langdetect()
        self.rules = list(rules)
        self.names = rule_names(rules)
        self.tokenizer = tokenizer
        self.source = source

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions; see apply_rules."""
        texts = decode(completions, self.tokenizer).completions
        lengths = completions.completion_mask.sum(dim=1).tolist()
        violations = torch.tensor(
            [[violation(rule, text, n) for text, n in zip(texts, lengths, strict=True)] for rule in self.rules]
        )
        parts = dict(zip(self.names, violations, strict=True))
        base = torch.zeros(len(texts))
        if self.source is not None:
            scores = self.source(completions)
            base = scores.values
            parts = {**scores.parts, "unruled": base, **parts}
        gates = [k for k, rule in enumerate(self.rules) if rule.gate is not None]
        if gates:
            parts["gated"] = (violations[gates] > 0).any(dim=0).to(base)
        return Scores(values=apply_rules(base, violations.to(base), self.rules), parts=parts)


class ShapedReward:
    """Wraps a source and shapes its scores.

    The score is clipped first, so that the clip cannot hide a penalty:

        shaped = clip(score, -clip, clip) - missing_eos_penalty * [not finished] - overlong(length)

    The parts are the source's, the unshaped score as "raw", each penalty that is switched on, and, if clip is set,
    "clipped": 1.0 for each score that the clip changed, else 0.0.
    """

    def __init__(self, source: RewardSource, config: ShapingConfig, max_new_tokens: int) -> None:
        self.source = source
        self.config = config
        self.max_new_tokens = max_new_tokens

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions with the source and shape the scores.

        Raises:
            RewardError: the source fails, or one of its parts has a name that shaping uses.
        """
        scores = self.source(completions)
        penalties = self._penalties(completions, scores.values)
        values, shaping_parts = scores.values, {"raw": scores.values, **penalties}
        if self.config.clip is not None:
            values = values.clamp(-self.config.clip, self.config.clip)
            shaping_parts["clipped"] = (values != scores.values).to(values)
        clash = sorted(shaping_parts.keys() & scores.parts.keys())
        if clash:
            raise RewardError(f"the reward names a part {clash[0]!r}, which shaping keeps for itself; rename it")
        for penalty in penalties.values():
            values = values - penalty
        return Scores(values=values, parts={**scores.parts, **shaping_parts})

    def _penalties(self, completions: Completions, like: Float[Tensor, " B"]) -> dict[str, Float[Tensor, " B"]]:
        config, penalties = self.config, {}
        if config.missing_eos_penalty > 0:
            missing = (~completions.finished).to(like)
            penalties["missing_eos_penalty"] = config.missing_eos_penalty * missing
        if config.overlong_buffer > 0:
            share = overlong_share(
                completions.completion_mask.sum(dim=1).to(like.device),
                max_new_tokens=self.max_new_tokens,
                buffer=config.overlong_buffer,
            )
            penalties["overlong_penalty"] = config.overlong_penalty * share.to(like)
        return penalties


def overlong_share(lengths: Int[Tensor, " B"], *, max_new_tokens: int, buffer: int) -> Float[Tensor, " B"]:
    """Compute the share of the overlong penalty for completions of `lengths` tokens (EOS included).

    This is minus DAPO's R_length (Yu et al. 2025, eq. 13): 0 up to max_new_tokens - buffer, then linear, 1 at
    max_new_tokens.
    """
    start = max_new_tokens - buffer
    return ((lengths.double() - start) / buffer).clamp(0.0, 1.0)

"""The reward section (sources, judges, rules, shaping), and the sections that only a reward-model run has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rlhf.algorithms.online import Online
from rlhf.config.data import Count, Size
from rlhf.section import NonNegative, Positive, Section


class SourceSection(Section):
    """A source of scores; `is_learned` tells the opinion of a model, which a policy can exploit, from a program."""

    checked_by_program: ClassVar[bool] = False

    @property
    def is_learned(self) -> bool:
        """Return whether a model gives the scores; True for a server, behind which a model may stand."""
        return not self.checked_by_program


class ChatConfig(Section):
    """An OpenAI-compatible endpoint: POST base_url/chat/completions, at temperature 0."""

    type: Literal["openai"] = "openai"
    base_url: str
    """The address up to and including /v1, e.g. http://127.0.0.1:8000/v1."""
    model: str
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Environment variable with the key, which is never stored; null: no key is sent."""
    template: str | None = None
    """Text file with the question; null: the built-in question (docs/evaluation.md)."""
    max_tokens: Count = 512
    """Maximum answer tokens."""
    request: dict[str, Any] = {}
    """Additional keys for every request; null removes a default key, e.g. {temperature: null}."""
    timeout_s: Positive = 60.0
    """Seconds without data after which a request times out."""
    retries: Annotated[int, Field(ge=0)] = 6
    """Retries with exponential backoff after no answer, or an answer with status 429 or 5xx."""
    concurrency: Count = 8
    """Concurrent requests."""
    cache_dir: str | None = None
    """Folder of cached answers, so that no question is asked twice; null: $XDG_CACHE_HOME/rlhf or ~/.cache/rlhf."""


class ChatSource(ChatConfig, SourceSection):
    """A language model that scores each completion with a number, through an OpenAI-compatible endpoint."""

    low: float = 1.0
    """The minimum of the rating scale."""
    high: float = 10.0
    """The maximum of the rating scale. An unreadable answer counts as the midpoint and is reported."""

    @model_validator(mode="after")
    def _check_scale(self) -> ChatSource:
        if self.high <= self.low:
            raise ValueError(f"high is {self.high:g}: it must be above low, {self.low:g}")
        return self


class ChatPairsConfig(ChatConfig):
    """A language model that compares two completions, in both orders; disagreement is a tie."""


class FunctionSource(SourceSection):
    """A Python function, given by its import path."""

    checked_by_program: ClassVar[bool] = True

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function; called with prompts, completions and references (lists)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to the function unchanged."""
    timeout_s: Positive | None = None
    """Maximum seconds per call; after that the run saves and stops. null: no limit."""


class ModelSource(SourceSection):
    """A trained reward model."""

    type: Literal["model"] = "model"
    path: str
    """A reward-model run (also an ensemble), or a sequence-classification model with one label."""
    micro_batch_size: Count = 64
    """Rows per forward pass; affects memory only."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: bf16 arithmetic (on a CUDA GPU also bf16 matrices); scores change by rounding."""
    how: Literal["mean", "minimum", "mean_minus_std"] = "mean"
    """Combination of the members' scores, if path holds an ensemble (ensemble=4)."""
    std_coef: NonNegative = 1.0
    """c in mean - c * std, for mean_minus_std."""


class RemoteSource(SourceSection):
    """A reward server over HTTP."""

    type: Literal["remote"] = "remote"
    url: str
    """Answers POST {prompts, completions, references} with {scores}."""
    timeout_s: Positive = 60.0
    """Timeout of one request, in seconds."""
    retries: Size = 8
    """Retries 1 s, 2 s, 4 s ... 30 s apart (about two minutes in total); then the run saves and stops."""
    token_env: str | None = None
    """Environment variable with the token for Authorization: Bearer; null: no token is sent."""
    send_tokens: bool = False
    """Also send token ids: rlhf serve-reward then returns exactly the in-process scores."""


class EnsembleSource(SourceSection):
    """Several sources combined into one score."""

    type: Literal["ensemble"] = "ensemble"
    sources: list[RewardSourceConfig]
    """The members of the ensemble."""
    names: list[str] | None = None
    """Names of the members in the metrics (part/NAME/mean); null: sources.0, sources.1, ..."""
    weights: list[float] | None = None
    """Factors for the members' scores, applied before they are combined; null: all 1."""
    how: Literal["mean", "sum", "weighted_mean", "minimum", "mean_minus_std", "gdpo"] = "mean"
    """minimum is worst-case optimization, mean_minus_std uncertainty-weighted optimization (Coste et al. 2024);
    weighted_mean divides the sum by the weights of the sources that apply to the completion; gdpo standardizes each
    source within its group before the sum (Liu et al. 2026), with advantage.type=group and baseline=centered."""
    std_coef: NonNegative = 1.0
    """c in mean - c * std, for mean_minus_std."""

    @property
    def is_learned(self) -> bool:
        """Return whether a model gives the scores of any member."""
        return any(member.is_learned for member in self.sources)

    @model_validator(mode="after")
    def _check_members(self) -> EnsembleSource:
        for key, given in (("weights", self.weights), ("names", self.names)):
            if given is not None and len(given) != len(self.sources):
                raise ValueError(f"{key} has {len(given)} entries for {len(self.sources)} sources: give each one")
        reserved = {"disagreement", "weighted_sum"}
        if self.names is not None and (len(set(self.names)) < len(self.names) or reserved & set(self.names)):
            raise ValueError("names must differ from each other, and from disagreement and weighted_sum")
        if self.how == "weighted_mean" and any(weight <= 0 for weight in self.weights or ()):
            raise ValueError("how is weighted_mean, which divides by the weights: they must be above 0")
        if any(uses_gdpo(source) for source in self.sources):
            raise ValueError("how=gdpo standardizes over groups: only the outermost source of a run may")
        return self


Share = Annotated[float, Field(ge=0, lt=1)]


class Rule(Section):
    """A rule and the cost of breaking it."""

    name: str | None = None
    """Name in the metrics; null: the type."""
    weight: NonNegative = 1.0
    """Penalty if the rule is fully broken; proportional if it is partly broken."""
    gate: float | None = None
    """Replaces the score of a completion that breaks the rule (the lowest gate, if several apply); null: subtract the
    penalty instead."""


class LengthRule(Rule):
    """Between `min` and `max` words, characters or tokens; fully broken or kept."""

    type: Literal["length"] = "length"
    min: Size = 0
    """Minimum length."""
    max: Count | None = None
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


class RepetitionRule(Rule):
    """Maximum share of word n-grams that repeat earlier ones; broken in proportion to the share."""

    type: Literal["repetition"] = "repetition"
    n: Count = 3
    """Words per n-gram."""
    max: Share = 0.0
    """The tolerated share."""


class ScriptRule(Rule):
    """Maximum share of letters in other scripts; broken in proportion to the share."""

    type: Literal["script"] = "script"
    allowed: Annotated[list[str], Field(min_length=1)]
    """Scripts, as in Unicode character names: latin, cyrillic, greek, arabic, cjk, hiragana, hangul ..."""
    max: Share = 0.0
    """The tolerated share."""


LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
"""The languages that langdetect knows."""


class LanguageRule(Rule):
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


class FormatRule(Rule):
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


class ForbiddenRule(Rule):
    """Forbidden words or phrases; fully broken or kept."""

    type: Literal["forbidden"] = "forbidden"
    phrases: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    """Whole words or phrases, without regular expressions."""
    ignore_case: bool = True
    """Ignore upper and lower case."""


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
            raise ValueError(f"two rules are called {name}: give each a different name (name: ...)")
    return names


class RulesSource(SourceSection):
    """Rules for the text of a completion; a broken rule subtracts a penalty or replaces the score."""

    type: Literal["rules"] = "rules"
    rules: Annotated[list[RuleConfig], Field(min_length=1)]
    """The rules, in any order. The metrics log how far each is broken, from 0 to 1."""
    source: RewardSourceConfig | None = None
    """The source whose scores the rules change; null: a completion that keeps all rules scores 0."""

    @property
    def is_learned(self) -> bool:
        """Return whether a model gives the scores that the rules change."""
        return self.source is not None and self.source.is_learned

    @model_validator(mode="after")
    def _check_rules(self) -> RulesSource:
        rule_names(self.rules)
        if self.source is not None and uses_gdpo(self.source):
            raise ValueError("how=gdpo standardizes over groups: only the outermost source of a run may")
        return self


RewardSourceConfig = Annotated[
    FunctionSource | ModelSource | RemoteSource | ChatSource | EnsembleSource | RulesSource,
    Field(discriminator="type"),
]
EnsembleSource.model_rebuild()  # its members have a type now, by which a mistake in one is explained


def uses_gdpo(source: RewardSourceConfig) -> bool:
    """Check whether a source standardizes its members' scores within groups."""
    return isinstance(source, EnsembleSource) and source.how == "gdpo"


class WatchConfig(Section):
    """A second judge of training completions that is not trained on."""

    source: RewardSourceConfig
    """The judge. If it fails, the run warns and continues."""
    rows: Count = 32
    """Completions to score, drawn at random from each watched step."""
    every: Count = 1
    """Steps between two watched steps."""


class ShapingConfig(Section):
    """Transformation of scores into rewards."""

    missing_eos_penalty: NonNegative = 0.0
    """Subtracted from the score of a completion without EOS."""
    clip: Positive | None = None
    """Clip scores to [-clip, clip] (metric score/clipped: share of clipped scores); null: off."""
    overlong_buffer: Size = 0
    """Tokens before max_new_tokens over which a penalty grows from 0 to overlong_penalty (DAPO, eq. 13); 0: off."""
    overlong_penalty: NonNegative = 1.0
    """The penalty at max_new_tokens if overlong_buffer is set."""

    def check_length(self, max_new_tokens: int) -> None:
        """Check that the penalty for overlong completions begins after their first token."""
        if self.overlong_buffer >= max_new_tokens:
            raise ValueError("reward.shaping.overlong_buffer must be shorter than sampling.max_new_tokens")


class RewardConfig(Section):
    """The source of scores and their shaping."""

    source: RewardSourceConfig
    """function, model, remote, openai, ensemble or rules."""
    shaping: ShapingConfig = ShapingConfig()
    """Clipping, and penalties for a missing EOS and for overlong completions."""
    watch: WatchConfig | None = None
    """A second judge for monitoring: metrics watch/score, watch/gap, watch/correlation (online)."""

    def check_gdpo(self, algorithm: Online, *, reward_parts: int) -> None:
        """Check that scores standardized within their groups meet an algorithm that takes them as they are.

        Raises:
            ValueError: it would standardize them again, or not see whole steps.
        """
        if not uses_gdpo(self.source):
            return
        if not algorithm.advantage.only_centers:
            raise ValueError(
                "reward.source.how is gdpo, which standardizes each source within its group: the advantage must only "
                "center, algorithm.preset=grpo algorithm.advantage.baseline=centered"
            )
        if reward_parts > 1 or algorithm.refill_rounds:
            raise ValueError(
                "reward.source.how is gdpo, which looks at a whole step: set overlap.reward_parts=1 and "
                "algorithm.refill_rounds=0"
            )


Varied = Literal["head", "order", "pairs"]


class RewardModelLoss(Section):
    """The Bradley-Terry loss, with the optional margin and centering of reward_model.model."""

    use_margin: bool = False
    """Subtract the data's margin column from the score difference (Touvron et al. 2023, eq. 2)."""
    centering: NonNegative = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores near zero (Eisenstein et al. 2023); 0.01 is usual."""


class CalibrationConfig(Section):
    """Shift and scale, stored in the model, that give mean 0 and std 1 on reference completions."""

    data: Literal["chosen", "both", "none"] = "both"
    """Completions of the training pairs to calibrate on; none: no calibration."""
    limit: Count = 1024
    """Number of completions to calibrate on."""


class EnsembleConfig(Section):
    """Several reward models from one run that differ as `vary` states. `ensemble=4` is short for size: 4."""

    size: Annotated[int, Field(ge=1)] = 1
    """Number of members; 1: a single reward model."""
    backbone: Literal["shared", "separate"] = "shared"
    """shared: heads on one backbone, trained and scored in one forward pass; separate: whole reward models, trained one
    after another into members/0, members/1, ... of the run folder."""
    vary: list[Varied] | None = None
    """Differences between members. head: the initial weights of the head; order: the order of the pairs (separate
    backbones only); pairs: a bootstrap resample of the pairs per member. null: [head, pairs] with a shared backbone,
    otherwise [head, order]."""
    member: Size | None = None
    """With separate backbones, train only this member (counted from 0), for example on another machine; null: all."""

    @property
    def varied(self) -> frozenset[Varied]:
        """Return what members differ in."""
        if self.vary is not None:
            return frozenset(self.vary)
        return frozenset(("head", "pairs") if self.backbone == "shared" else ("head", "order"))

    @property
    def is_shared(self) -> bool:
        """Return whether the run trains several heads on one backbone."""
        return self.size > 1 and self.backbone == "shared"

    def number(self, what: Varied) -> int | None:
        """Return the number of the member that this run trains if members differ in `what`; else None."""
        return self.member if what in self.varied else None

    @model_validator(mode="after")
    def _check_members(self) -> EnsembleConfig:
        if self.is_shared and "order" in self.varied:
            raise ValueError("vary has order: heads on one backbone see the same batches; use pairs, or separate")
        if self.size > 1 and not self.varied:
            raise ValueError("vary is empty: all members would be the same")
        if self.member is not None and (self.backbone == "shared" or self.member >= self.size):
            raise ValueError(f"member is {self.member}: needs backbone=separate and a size above it")
        return self

"""The reward section: where scores come from (judges included) and how they are shaped."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf.config.algorithm import NonNegative, Positive
from rlhf.config.base import Section
from rlhf.config.data import Count, Size


class ChatConfig(Section):
    """An OpenAI-compatible endpoint: POST base_url/chat/completions, at temperature 0."""

    type: Literal["openai"] = "openai"
    base_url: str
    """The address up to and including /v1, e.g. http://127.0.0.1:8000/v1."""
    model: str
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """The environment variable that holds the key; null: no key is sent. The key itself is never stored."""
    template: str | None = None
    """A text file with the question to ask; null: the built-in one (docs/evaluation.md)."""
    max_tokens: Count = 512
    """Longest answer, in tokens."""
    request: dict[str, Any] = {}
    """Further keys for every request; null removes a default key, e.g. {temperature: null}."""
    timeout_s: Positive = 60.0
    """Longest wait without data on a request, in seconds."""
    retries: Annotated[int, Field(ge=0)] = 6
    """Retries with exponential backoff after no answer, or an answer with status 429 or 5xx."""
    concurrency: Count = 8
    """Requests in flight at a time."""
    cache_dir: str | None = None
    """Where answers are cached, so that no question is asked twice; null: $XDG_CACHE_HOME/rlhf, or ~/.cache/rlhf."""


class ChatSource(ChatConfig):
    """A language model that scores each completion with a number, through an OpenAI-compatible endpoint."""

    low: float = 1.0
    """The lowest score that the model may give."""
    high: float = 10.0
    """The highest score. An answer without a number from low to high counts as the midpoint and is reported."""

    @model_validator(mode="after")
    def _check_scale(self) -> ChatSource:
        if self.high <= self.low:
            raise ValueError(f"high is {self.high:g}: it must be above low, {self.low:g}")
        return self


class ChatPairsConfig(ChatConfig):
    """A language model that says which of two completions is better; asked in both orders, disagreement is a tie."""


class FunctionSource(Section):
    """A Python function, given by its import path."""

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function; called with prompts, completions and references (lists)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to the function unchanged."""
    timeout_s: Positive | None = None
    """Longest time of one call; a call that takes longer saves and stops the run. null: no limit."""


class ModelSource(Section):
    """A trained reward model."""

    type: Literal["model"] = "model"
    path: str
    """A reward-model run folder, or a sequence-classification model folder with one label."""
    micro_batch_size: Count = 64
    """Rows per forward pass; affects memory only."""


class RemoteSource(Section):
    """A reward server over HTTP."""

    type: Literal["remote"] = "remote"
    url: str
    """Answers POST {prompts, completions, references} with {scores}."""
    timeout_s: Positive = 60.0
    """Timeout of one request, in seconds."""
    retries: Size = 8
    """Retries, 1 s, 2 s, 4 s ... 30 s apart (about two minutes in all); then the run saves and stops."""
    token_env: str | None = None
    """The environment variable that holds the server's token, sent as Authorization: Bearer; null: none is sent."""
    send_tokens: bool = False
    """Send token ids with the texts: rlhf serve-reward then gives exactly the scores of the same model in-process."""


class EnsembleSource(Section):
    """Several sources combined into one score."""

    type: Literal["ensemble"] = "ensemble"
    sources: list[RewardSourceConfig]
    """The members of the ensemble."""
    how: Literal["mean", "minimum", "mean_minus_std"] = "mean"
    """minimum is worst-case optimization, mean_minus_std uncertainty-weighted optimization (Coste et al. 2024)."""
    std_coef: NonNegative = 1.0
    """c in mean - c * std, for mean_minus_std."""


RewardSourceConfig = Annotated[
    FunctionSource | ModelSource | RemoteSource | ChatSource | EnsembleSource, Field(discriminator="type")
]


class ShapingConfig(Section):
    """How a score is turned into a reward."""

    missing_eos_penalty: NonNegative = 0.0
    """Subtracted from the score of a completion that did not end with EOS."""
    clip: Positive | None = None
    """Clip scores to [-clip, clip]; the metric score/clipped is their share. null: no clipping."""
    overlong_buffer: Size = 0
    """Tokens before max_new_tokens over which a penalty grows from 0 to overlong_penalty (DAPO, eq. 13); 0: off."""
    overlong_penalty: NonNegative = 1.0
    """The penalty at max_new_tokens if overlong_buffer is set."""

    def check_length(self, max_new_tokens: int) -> None:
        """Check that the penalty for overlong completions begins after their first token."""
        if self.overlong_buffer >= max_new_tokens:
            raise ValueError("reward.shaping.overlong_buffer must be shorter than sampling.max_new_tokens")


class RewardConfig(Section):
    """Where scores come from and how they are shaped."""

    source: RewardSourceConfig
    """function, model, remote, openai or ensemble."""
    shaping: ShapingConfig = ShapingConfig()
    """Clipping, and penalties for a missing EOS and for overlong completions."""

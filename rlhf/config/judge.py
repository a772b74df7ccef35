"""A language model behind an OpenAI-compatible endpoint as a judge of single completions or of pairs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf.config.algorithm import Positive
from rlhf.config.base import Section
from rlhf.config.data import Count


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

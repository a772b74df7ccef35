"""The reward section: where scores come from and how they are shaped."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf.config.algorithm import NonNegative, Positive
from rlhf.config.base import Section
from rlhf.config.data import Count, Size
from rlhf.config.judge import ChatSource


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


class RewardConfig(Section):
    """Where scores come from and how they are shaped."""

    source: RewardSourceConfig
    """function, model, remote, openai or ensemble."""
    shaping: ShapingConfig = ShapingConfig()
    """Clipping, and penalties for a missing EOS and for overlong completions."""

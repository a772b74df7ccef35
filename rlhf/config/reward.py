"""Where scores come from and what is done to them: the reward section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf.config.algorithm import NonNegative, Positive
from rlhf.config.base import Section
from rlhf.config.data import Count, Size
from rlhf.config.judge import ChatSource


class FunctionSource(Section):
    """A Python function by import path."""

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function; called with prompts, completions and references (lists)."""
    kwargs: dict[str, Any] = {}
    """Passed to the function as they stand."""
    timeout_s: Positive | None = None
    """Longest time of one call; a call that takes longer ends the run, saved. null: no limit."""


class ModelSource(Section):
    """A trained reward model."""

    type: Literal["model"] = "model"
    path: str
    """A reward-model run or a sequence-classification folder with one label."""
    micro_batch_size: Count = 64
    """Rows per forward pass; memory only."""


class RemoteSource(Section):
    """A reward server over HTTP."""

    type: Literal["remote"] = "remote"
    url: str
    """Answers POST {prompts, completions, references} with {scores}."""
    timeout_s: Positive = 60.0
    """Per request."""
    retries: Size = 8
    """Tries after the first, 1 s, 2 s, 4 s ... 30 s apart (about two minutes in all); then the run saves and stops."""
    token_env: str | None = None
    """The environment variable that holds the server's token, sent as Authorization: Bearer; null: none is sent."""
    send_tokens: bool = False
    """Send token ids besides the texts: rlhf serve-reward then gives the very scores of the model in this process."""


class EnsembleSource(Section):
    """Several sources as one."""

    type: Literal["ensemble"] = "ensemble"
    sources: list[RewardSourceConfig]
    """Its members."""
    how: Literal["mean", "minimum", "mean_minus_std"] = "mean"
    """minimum is worst-case optimization, mean_minus_std uncertainty-weighted (Coste et al. 2024)."""
    std_coef: NonNegative = 1.0
    """c in mean - c * std."""


RewardSourceConfig = Annotated[
    FunctionSource | ModelSource | RemoteSource | ChatSource | EnsembleSource, Field(discriminator="type")
]


class ShapingConfig(Section):
    """What is done to a score before it becomes a reward."""

    missing_eos_penalty: NonNegative = 0.0
    """Subtracted from the score of a completion that did not end."""
    clip: Positive | None = None
    """Scores are clipped to [-clip, clip], and score/clipped says how many; null: not at all."""
    overlong_buffer: Size = 0
    """Tokens before max_new_tokens over which a penalty grows from 0 to overlong_penalty (DAPO, eq. 13); 0: off."""
    overlong_penalty: NonNegative = 1.0
    """The penalty at max_new_tokens, where overlong_buffer is set."""


class RewardConfig(Section):
    """Where scores come from."""

    source: RewardSourceConfig
    """function, model, remote, openai or ensemble."""
    shaping: ShapingConfig = ShapingConfig()
    """Missing-EOS and overlong penalties, clip."""

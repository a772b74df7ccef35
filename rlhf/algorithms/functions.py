"""Losses and advantages of the user that are functions: rlhf.algo.functions describes their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlhf.algorithms.advantage import Advantage
from rlhf.algorithms.policy_loss import Surrogate, TokenLoss, Tokens
from rlhf.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Rollout

LOSS_ARGUMENTS = ("logprobs", "old_logprobs", "advantages", "mask")
ADVANTAGE_ARGUMENTS = ("rewards", "mask", "group_size")


class FunctionLoss(TokenLoss):
    """A policy loss per token from a user function (rlhf.algo.functions.LossFunction)."""

    is_trusted: ClassVar[bool] = False

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to the function unchanged."""

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        """Return the function, with its keywords and checks; a run imports it once."""
        return load_checked(self.target, self.kwargs, "loss", "algorithm.policy_loss", LOSS_ARGUMENTS)

    def load(self) -> None:
        """Import the function, and check that it takes the arguments that it is called with."""
        _ = self.function

    def per_token(self, tokens: Tokens) -> Surrogate:
        """Compute the loss by the function."""
        per_token = self.function(
            logprobs=tokens.logprobs, old_logprobs=tokens.old_logprobs, advantages=tokens.advantages, mask=tokens.mask
        )
        return Surrogate(per_token=per_token)


class FunctionAdvantage(Advantage):
    """Advantages from a user function (rlhf.algo.functions.AdvantageFunction); no critic."""

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to the function unchanged."""

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        """Return the function, with its keywords and checks; a run imports it once."""
        return load_checked(self.target, self.kwargs, "advantage", "algorithm.advantage", ADVANTAGE_ARGUMENTS)

    def load(self) -> None:
        """Import the function, and check that it takes the arguments that it is called with."""
        _ = self.function

    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compute the advantages by the function; the returns are the undiscounted rewards-to-go."""
        import torch

        from rlhf.algo.advantages import rewards_to_go

        mask = rollout.action_mask
        advantages = self.function(rewards=rewards, mask=mask, group_size=rollout.group_size).detach()
        return torch.where(mask, advantages, 0.0), rewards_to_go(rewards, mask, gamma=1.0)


def load_checked(
    target: str, kwargs: Mapping[str, Any], what: str, key: str, arguments: Sequence[str]
) -> Callable[..., Tensor]:
    """Load the function of the section at `key`, with its keywords; its results are checked at each call.

    Raises:
        ConfigError: there is no such function, or it does not take the arguments.
    """
    from rlhf.user_code import checked_per_token, load_function

    function = load_function(target, what=what, error=ConfigError)
    _check_arguments(function, target, key, arguments, kwargs)
    called = partial(function, **kwargs)
    return checked_per_token(called, f"the {what} {target!r}", finite=what == "advantage")


def _check_arguments(
    function: Callable[..., Any], target: str, key: str, arguments: Sequence[str], kwargs: Mapping[str, Any]
) -> None:
    """Check by its signature that a function takes these arguments and keywords."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have none
        return
    try:
        signature.bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        names = [name for name in signature.parameters if name not in arguments]
        hint = did_you_mean(unknown[0], names) if unknown else ""
        given = f"{key}.kwargs: {unknown[0]!r} is no argument of {target!r}{hint}" if unknown else f"{key}: {error}"
        raise ConfigError(
            f"{given}. It is called with {', '.join([*arguments, *kwargs])}, and has the arguments {signature}"
        ) from error

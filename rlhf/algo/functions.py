"""Advantages and losses of the user: the arguments of such functions, and their results.

They are set by `algorithm.advantage` or `algorithm.policy_loss` with `type: function`; `rlhf.check` tells whether one
is right before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

LossFunction = Callable[..., Float[Tensor, "B T"]]
"""Computes the loss of every token: function(logprobs, old_logprobs, advantages, mask, **kwargs).

All four are [B, T]: the policy's log-probabilities, with gradient; the sampling policy's; the advantages;
and which tokens count. Its values outside the mask are not used. The aggregation over tokens, the KL penalty and
the entropy bonus come afterwards, as configured. The loss of a token must not depend on other rows, since a minibatch
is split into micro-batches of any size.
"""

AdvantageFunction = Callable[..., Float[Tensor, "B T"]]
"""Computes the advantage of every token: function(rewards, mask, group_size, **kwargs).

The token rewards and the mask are [B, T]: a row's score is on its last live token, less the KL penalty if the reward
has one, and outside the mask they are 0. Rows are the completions of a whole step; each `group_size` consecutive ones
belong to the same prompt.
"""

"""The plain policy gradient (REINFORCE, Williams 1992), REINFORCE++ (Hu et al. 2025), and A2C (Mnih et al. 2016).

REINFORCE has no baseline. REINFORCE++ has the mean of the batch as its baseline, and PPO's clip. A2C has a critic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlhf.algorithms.advantage import Advantage
from rlhf.algorithms.gae import Discount
from rlhf.algorithms.policy_loss import Surrogate, TokenLoss, Tokens
from rlhf.algorithms.ppo import CRITIC
from rlhf.algorithms.presets import preset

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.algorithms import online
    from rlhf.algorithms.advantage import StepSizes
    from rlhf.types import Experience, Rollout

ONE_UPDATE: dict[str, Any] = {"batch": {"epochs": 1, "minibatches": 1}}

preset(
    "a2c",
    {
        "algorithm": {**CRITIC, "policy_loss": {"type": "policy_gradient"}, "value_loss": {"clip_eps": None}},
        **ONE_UPDATE,
    },
)
preset(
    "reinforce",
    {
        "algorithm": {
            "advantage": {"type": "batch_whiten", "whiten": False},
            "policy_loss": {"type": "policy_gradient", "aggregate": "sequence_sum"},
            "kl": {"placement": "reward"},
        },
        **ONE_UPDATE,
    },
)
preset(
    "reinforce_pp",
    {"algorithm": {"advantage": {"type": "batch_whiten"}, "kl": {"placement": "reward", "coef": 0.01}}},
)


class PolicyGradientLoss(TokenLoss):
    """-advantage x log-probability, without ratio or clipping: one optimizer step per sampled batch."""

    type: Literal["policy_gradient"] = "policy_gradient"

    def check_sizes(self, sizes: StepSizes, algorithm: online.Online) -> None:
        """Check that there is a single update on the same completions, unless they are imitated."""
        if sizes.updates > 1 and not algorithm.advantage.imitates:
            raise ValueError(
                "the policy_gradient loss has no importance ratio, so a second optimizer step on the same completions "
                "would be wrong: set batch.epochs=1 batch.minibatches=1, or algorithm.policy_loss.type=clip"
            )

    def per_token(self, tokens: Tokens) -> Surrogate:
        """Compute the plain policy gradient loss (Williams 1992, REINFORCE), valid for tokens drawn from pi itself.

            -A * log pi

        It has the gradient of every ratio-based surrogate at ratio 1; there is no ratio here that could move away
        from 1.
        """
        return Surrogate(per_token=-tokens.advantages * tokens.logprobs)


class BatchWhiten(Advantage):
    """Reward-to-go, whitened over the batch (REINFORCE++); no critic."""

    reads_old_logprobs: ClassVar[bool] = False

    type: Literal["batch_whiten"] = "batch_whiten"
    gamma: Discount = 1.0
    """Discount per token."""
    whiten: bool = True
    """false: plain REINFORCE without a baseline."""

    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compute the discounted rewards-to-go, as advantages whitened over all live tokens of the step."""
        from rlhf.algo.advantages import rewards_to_go
        from rlhf.algo.masked import whiten

        returns = rewards_to_go(rewards, rollout.action_mask, gamma=self.gamma)
        return (whiten(returns, rollout.action_mask) if self.whiten else returns), returns

    def before_whitening(self, experience: Experience) -> Float[Tensor, "B T"]:
        """Return the returns, which whitening has scaled; zero outside the mask."""
        import torch

        return torch.where(experience.loss_mask, experience.returns, 0.0) if self.whiten else experience.advantages

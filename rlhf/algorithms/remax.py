"""ReMax (Li et al. 2024): REINFORCE with the score of the prompt's greedy completion as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.algorithms.advantage import Advantage
from rlhf.algorithms.presets import preset
from rlhf.algorithms.reinforce import ONE_UPDATE

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Rollout

preset(
    "remax",
    {
        "algorithm": {
            "advantage": {"type": "greedy"},
            "policy_loss": {"type": "policy_gradient", "aggregate": "sequence_sum"},
            "kl": {"placement": "reward"},
        },
        **ONE_UPDATE,
    },
)


class Greedy(Advantage):
    """Reward-to-go minus the score of the prompt's greedy completion (ReMax, Li et al. 2024); no critic."""

    needs_greedy: ClassVar[bool] = True
    reads_old_logprobs: ClassVar[bool] = False

    type: Literal["greedy"] = "greedy"

    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Subtract one baseline per row from the undiscounted reward-to-go of its live tokens (Li et al. 2024, alg. 1).

            A_t = R_t - b;  b is the score of the prompt's greedy completion

        As b does not depend on the row's own completion, the expected gradient is the same as without it.
        """
        import torch

        from rlhf.algo.advantages import rewards_to_go

        mask = rollout.action_mask
        returns = rewards_to_go(rewards, mask, gamma=1.0)
        return torch.where(mask, returns - rollout.baselines[:, None], 0.0), returns

"""Online DPO (Guo et al. 2024): DPO on pairs that the policy itself samples and the reward ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rlhf.algorithms.advantage import Advantage, StepSizes
from rlhf.algorithms.dpo import Dpo
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.policy_loss import PolicyLoss
from rlhf.algorithms.presets import preset
from rlhf.algorithms.reinforce import ONE_UPDATE
from rlhf.section import NonNegative, OneOf

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.algo.masked import Mean
    from rlhf.algorithms.online import Online
    from rlhf.types import Experience, Rollout, SampledPairs

preset(
    "online_dpo",
    {
        "algorithm": {"advantage": {"type": "best_and_worst"}, "policy_loss": {"type": "pair"}},
        "sampling": {"completions_per_prompt": 2},
        **ONE_UPDATE,
    },
)


class BestAndWorst(Advantage):
    """A pair from each prompt's completions: the best is chosen, the worst rejected; for the pair loss."""

    makes_pairs: ClassVar[bool] = True
    chooses_rows: ClassVar[bool] = True

    type: Literal["best_and_worst"] = "best_and_worst"
    min_gap: NonNegative = 0.0
    """Minimum score difference between best and worst, after shaping; other prompts give no pair."""

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that every prompt gives a pair, and that there are enough pairs to split into minibatches."""
        if sizes.group_size < 2:
            raise ValueError("a pair of a prompt's completions needs sampling.completions_per_prompt >= 2")
        sizes.check_selected(1, "pairs are made")

    def rows_per_prompt(self, group_size: int) -> int:
        """Return 1: a row of the update is a pair."""
        return 1

    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Mark the best of each group by +1, the worst by -1, and the others by 0."""
        from rlhf.algo.advantages import per_row
        from rlhf.algo.selection import pair_signs

        signs = pair_signs(rollout.scores, rollout.group_size, min_gap=self.min_gap)
        return per_row(signs, rewards, rollout.action_mask)

    def select(self, experience: Experience, *, drops_rows: bool) -> SampledPairs:
        """Pair the best with the worst completion of each prompt; there may be no pairs."""
        from rlhf.algo.selection import best_worst_pairs

        return best_worst_pairs(experience, min_gap=self.min_gap)

    def measure(self, experience: Experience) -> Mapping[str, Mean]:
        """Count the pairs and the prompts without one, and average the gap of the scores."""
        from rlhf.algo.masked import Mean
        from rlhf.algo.selection import best_and_worst

        scores, groups = experience.reported_scores.double(), len(experience) // experience.group_size
        best, worst = best_and_worst(experience.scores, experience.group_size, min_gap=self.min_gap)
        return {
            "pair/count": Mean(float(len(best)), 1.0),
            "pair/ties": Mean(float(groups - len(best)), 1.0),
            "pair/score_gap": Mean.of(scores[best] - scores[worst]),
        }


class OnlinePairLoss(PolicyLoss):
    """A preference loss on pairs sampled from the policy itself and ranked by the reward (Guo et al. 2024)."""

    reads_old_logprobs: ClassVar[bool] = True

    type: Literal["pair"] = "pair"
    loss: Annotated[PairLoss, OneOf("dpo", only=lambda loss: loss.needs_reference)] = Dpo()
    """A loss with a reference (dpo, robust_dpo, ipo or hinge), with the offline settings; only beta keeps the policy
    near the reference."""

    @property
    def pair_loss(self) -> PairLoss:
        """Return the loss of the sampled pairs."""
        return self.loss

    def check(self, algorithm: Online) -> None:
        """Check that nothing leaves out a side of a pair, and that no KL penalty is set that would not be read."""
        if algorithm.mask_truncated:
            raise ValueError(
                "mask_truncated leaves out single completions, but a pair loss learns from two at once: "
                "set mask_truncated=false, and reward.shaping.missing_eos_penalty to rank cut completions lower"
            )
        if algorithm.kl.placement != "none":
            raise ValueError(
                f"a pair loss reads no KL penalty, but kl.placement is {algorithm.kl.placement}: leave algorithm.kl "
                "out; the pull to the reference is policy_loss.loss.beta"
            )

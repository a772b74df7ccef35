"""Rejection sampling (RAFT, Dong et al. 2023): sample several completions of a prompt, and imitate the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from rlhf.algorithms.advantage import Advantage, StepSizes
from rlhf.algorithms.grpo import GROUP_OF_8
from rlhf.algorithms.presets import preset
from rlhf.algorithms.reinforce import ONE_UPDATE

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.algo.masked import Mean
    from rlhf.types import Experience, Rollout

preset(
    "rejection_sampling",
    {
        "algorithm": {"advantage": {"type": "best"}, "policy_loss": {"type": "policy_gradient"}},
        **GROUP_OF_8,
        **ONE_UPDATE,
    },
)


class Best(Advantage):
    """Advantage 1 for a prompt's best completions, the only ones trained on (RAFT, Dong et al. 2023); no critic."""

    chooses_rows: ClassVar[bool] = True
    imitates: ClassVar[bool] = True

    type: Literal["best"] = "best"
    keep: Annotated[int, Field(ge=1)] = 1
    """Completions kept per prompt."""
    min_score: float | None = None
    """Minimum score of a kept completion, after shaping and the KL penalty in the reward; null: none."""

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that there are completions to choose from, and enough chosen ones to split into minibatches."""
        if self.keep >= sizes.group_size and self.min_score is None:
            raise ValueError(
                f"advantage.keep is {self.keep} of {sizes.group_size} completions, so nothing is chosen: "
                "set sampling.completions_per_prompt higher, or advantage.min_score"
            )
        sizes.check_selected(self.rows_per_prompt(sizes.group_size), "completions are kept")

    def rows_per_prompt(self, group_size: int) -> int:
        """Return how many completions of a prompt are kept."""
        return min(self.keep, group_size)

    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Give 1 to the `keep` best of each group that have at least `min_score`, and 0 to the others.

        An episode whose environment failed, which has no action, comes last.
        """
        import torch

        from rlhf.algo.advantages import per_row
        from rlhf.algo.selection import select_best

        totals = torch.where(rollout.action_mask.any(dim=1), rewards.sum(dim=1), -torch.inf)
        chosen = select_best(totals, rollout.group_size, keep=self.keep, min_score=self.min_score)
        return per_row(chosen.to(rewards.dtype), rewards, rollout.action_mask)

    def select(self, experience: Experience, *, drops_rows: bool) -> Experience:
        """Select the kept completions; there may be none."""
        return experience.rows(experience.loss_mask.any(dim=1).nonzero().flatten())

    def measure(self, experience: Experience) -> Mapping[str, Mean]:
        """Count the kept completions and the prompts without one, and average their scores."""
        from rlhf.algo.masked import Mean

        groups = len(experience) // experience.group_size
        kept = experience.loss_mask.any(dim=1)
        return {
            "kept/count": Mean(float(kept.sum()), 1.0),
            "kept/none": Mean(float((~kept.view(groups, -1).any(dim=1)).sum()), 1.0),
            "kept/score": Mean.of(experience.reported_scores.double(), kept),
        }

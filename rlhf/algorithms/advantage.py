"""The family of advantages: from a step's token rewards to one advantage per token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlhf.section import Choice

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.algo.masked import Mean
    from rlhf.types import Experience, Rollout, SampledPairs


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The sizes of an online step, from the sections batch and sampling."""

    prompts: int
    group_size: int  # completions per prompt
    epochs: int
    minibatches: int

    @property
    def completions(self) -> int:
        """Return the number of completions of a step."""
        return self.prompts * self.group_size

    @property
    def updates(self) -> int:
        """Return the number of optimizer steps on the same completions."""
        return self.epochs * self.minibatches

    def check_selected(self, per_prompt: int, what: str) -> None:
        """Check that the rows selected for each prompt, `what` in words, are enough to split into minibatches."""
        selected = self.prompts * per_prompt
        if selected < self.minibatches:
            raise ValueError(f"batch.minibatches is {self.minibatches}, but at most {selected} {what} in a step")


class Advantage(Choice):
    """A way to compute advantages; a member has its settings, its equation, and its demands on a run."""

    needs_critic: ClassVar[bool] = False
    """Whether it reads the values of a critic."""
    needs_greedy: ClassVar[bool] = False
    """Whether it reads the scores of greedy completions, `rollout.baselines`."""
    is_group: ClassVar[bool] = False
    """Whether the baseline of a completion is made of the others of its prompt."""
    makes_pairs: ClassVar[bool] = False
    """Whether it makes pairs of completions, for a loss of pairs."""
    chooses_rows: ClassVar[bool] = False
    """Whether completions without an advantage are left out of the loss."""
    imitates: ClassVar[bool] = False
    """Whether it imitates the completions that it selects, from any source: no importance ratio is needed then."""
    reads_old_logprobs: ClassVar[bool] = True
    """Whether the log-probabilities of the policy that sampled have to be known before the update."""

    corrects_stale: ClassVar[bool] = False
    """Whether `compute_stale` corrects for completions of an older policy."""

    @property
    def divides_by_spread(self) -> bool:
        """Return whether scores are divided by the standard deviation of their group."""
        return False

    @property
    def whitens_minibatches(self) -> bool:
        """Return whether `of_minibatch` whitens, so that it has to apply importance weights too, after that."""
        return False

    @property
    def only_centers(self) -> bool:
        """Return whether scores lose the mean of their group and nothing else is done to them."""
        return False

    def load(self) -> None:
        """Import the functions that the settings name, at the start of a run; an error names the key."""

    def check_rescue(self) -> None:
        """Check that the advantages are right if some completions are sampled with a hint (algorithm.rescue)."""
        if not (self.is_group or self.needs_critic):
            raise ValueError(
                "algorithm.rescue needs a baseline of the prompt, of a group or of a critic: set "
                "algorithm.advantage.type=group (grpo, dr_grpo, rloo, dapo, cispo, gspo) or gae (ppo)"
            )

    def check_sizes(self, sizes: StepSizes) -> None:
        """Check that a step of these sizes has the completions that the advantages are computed from."""

    def rows_per_prompt(self, group_size: int) -> int:
        """Return how many rows of a prompt, at most, are trained on."""
        return group_size

    @abstractmethod
    def compute(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compute the advantages of a whole step from its token rewards, and the returns; both zero outside the mask.

        The rows of a prompt are consecutive, `rollout.group_size` at a time. A critic learns the returns.
        """

    def compute_stale(
        self, rollout: Rollout, rewards: Float[Tensor, "B T"], *, rho_cap: float, trace_cap: float
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Compute the results of `compute` for completions of an older policy, corrected by V-trace, not whitened."""
        raise NotImplementedError

    def whitened(self, advantages: Float[Tensor, "B T"], rollout: Rollout) -> Float[Tensor, "B T"]:
        """Whiten the advantages of a whole step, if the settings say so."""
        return advantages

    def of_minibatch(self, minibatch: Experience) -> Experience:
        """Return the rows of an optimizer step, of all ranks, with the advantages that it is to use."""
        return minibatch

    def before_whitening(self, experience: Experience) -> Float[Tensor, "B T"]:
        """Compute the advantages before whitening, for the metrics; zero outside the mask."""
        return experience.advantages

    def select(self, experience: Experience, *, drops_rows: bool) -> Experience | SampledPairs:
        """Select the rows, or pairs of rows, to train on; `drops_rows` says that some are in no loss at all.

        If all are dropped, all rows are returned, and have a gradient of zero.
        """
        rows = experience.loss_mask.any(dim=1).nonzero().flatten()
        return experience.rows(rows) if drops_rows and len(rows) else experience

    def measure(self, experience: Experience) -> Mapping[str, Mean]:
        """Compute the metrics that this advantage alone has, by name."""
        return {}

"""Natural gradients within a trust region: NPG (Kakade 2001) and TRPO (Schulman et al. 2015).

    maximize E[ratio * A]   subject to   KL(old || new) <= max_kl

The conjugate gradients and the line search are in rlhf.algo.trust_region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlhf.algorithms.policy_loss import Surrogate, TokenLoss, Tokens
from rlhf.algorithms.ppo import CRITIC
from rlhf.algorithms.presets import preset
from rlhf.errors import ConfigError
from rlhf.section import NonNegative, Positive

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.algo.trust_region import LineSearch
    from rlhf.algorithms import online
    from rlhf.algorithms.advantage import StepSizes
    from rlhf.algorithms.search import StepSpace

CRITIC_EPOCHS: dict[str, Any] = {"batch": {"epochs": 8, "minibatches": 1}}  # the policy steps in the first epoch only

preset("trpo", {"algorithm": {**CRITIC, "policy_loss": {"type": "trust_region"}}, **CRITIC_EPOCHS})
preset(
    "npg",
    {"algorithm": {**CRITIC, "policy_loss": {"type": "trust_region", "line_search": False}}, **CRITIC_EPOCHS},
)


class TrustRegionLoss(TokenLoss):
    """The plain surrogate ratio x advantage, descended by natural gradients within a trust region (NPG and TRPO).

    The policy moves once in each step of the run, along F^-1 g, by a length at which KL(old || new) is max_kl to second
    order; further epochs train the critic alone. F is the Fisher matrix of the next token, averaged over tokens.
    """

    reads_old_logprobs: ClassVar[bool] = True
    searches: ClassVar[bool] = True
    unread_optimizer: ClassVar[str] = "a trust region's step has the length that policy_loss.max_kl gives it"

    type: Literal["trust_region"] = "trust_region"
    max_kl: Positive = 0.01
    """The trust region: KL(old || new) over the whole vocabulary, in nats per token."""
    line_search: bool = True
    """Shorten the step until the exact KL is at most max_kl and the loss decreases; if no length works, the step is
    rejected (TRPO, Schulman et al. 2015). false: take the full step (NPG, Kakade 2001)."""
    backtracks: Annotated[int, Field(ge=0)] = 10
    """Number of shorter lengths that the line search tries."""
    shrink: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Factor between two lengths."""
    cg_iterations: Annotated[int, Field(ge=1)] = 10
    """Conjugate-gradient iterations; each costs about two passes with gradient over the minibatch."""
    damping: NonNegative = 0.01
    """Added to the diagonal of F. A larger value moves the direction towards the plain gradient."""
    max_parameters: Annotated[int, Field(ge=1)] = 50_000_000
    """Maximum number of trained parameters; the step needs about 48 bytes per parameter."""

    def check(self, algorithm: online.Online) -> None:
        """Check that nothing else bounds the distance from the policy that sampled."""
        if algorithm.target_kl is not None:
            raise ValueError("a trust region bounds KL(old || new) itself by policy_loss.max_kl: leave target_kl null")

    def check_sizes(self, sizes: StepSizes, algorithm: online.Online) -> None:
        """Check that the policy takes one step, on all completions, and that further epochs have a critic to train."""
        if sizes.minibatches > 1:
            raise ValueError(
                "a trust region is one step around the policy that sampled, on all its completions: "
                "set batch.minibatches=1"
            )
        if sizes.epochs > 1 and algorithm.value_loss is None:
            raise ValueError(
                "in a trust region epochs after the first train the critic, and there is none: set batch.epochs=1"
            )

    def check_run(self, *, sharding: str, splits_weights: bool, shares_backbone: bool) -> None:
        """Check that every rank has whole weights, and that they are the policy's alone."""
        if splits_weights:
            raise ValueError(
                f"a trust region needs whole weights on every rank, but sharding is {sharding}: set "
                "sharding=ddp (adapters of policy.lora are small enough), or algorithm.policy_loss.type=penalty"
            )
        if shares_backbone:
            raise ValueError(
                "a trust region's step is along the natural gradient of the policy alone, but critic.shared mixes the "
                "value loss into it: set critic.shared=false, or algorithm.policy_loss.type=penalty"
            )

    def check_parameters(self, count: int) -> None:
        """Check that the vectors of the search fit into memory.

        Raises:
            ConfigError: there are more trained parameters than `max_parameters`.
        """
        if count > self.max_parameters:
            raise ConfigError(
                f"a trust region holds about six float64 vectors as long as the trainable parameters, and there are "
                f"{count:,} of them; algorithm.policy_loss.max_parameters is {self.max_parameters:,}. Train adapters "
                "(policy.lora.r=16), take algorithm.policy_loss.type=penalty, or raise the limit if memory allows"
            )

    def per_token(self, tokens: Tokens) -> Surrogate:
        """Compute the surrogate loss that a trust region bounds from outside (Schulman et al. 2015, eq. 14).

            -ratio * A

        At ratio 1 its gradient is the policy gradient; away from it nothing in the loss holds the policy back.
        """
        return Surrogate(per_token=-tokens.ratio * tokens.advantages)

    def search(self, space: StepSpace, *, lr_factor: float) -> dict[str, float]:
        """Take the step for the gradient of the batch, or none if the line search accepts no length.

        (F + damping) x = g,   theta <- theta - s x,   s = lr_factor * sqrt(2 max_kl / x.Fx), shortened as needed
        """
        from rlhf.algo.trust_region import conjugate_gradient, step_length, undamped_curvature

        def product(vector: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
            return space.fisher_product(vector) + self.damping * vector

        solution = conjugate_gradient(product, space.gradient, iterations=self.cg_iterations)
        curvature = undamped_curvature(solution, space.gradient, damping=self.damping)
        length = lr_factor * step_length(curvature, max_kl=self.max_kl)
        metrics = {"trust_region/cg_residual": solution.residual(space.gradient)}
        if length == 0.0:
            return {**metrics, "trust_region/accepted": 0.0}
        outcome = self._move(space, solution.x, length)
        return {**metrics, **self._measure(outcome, slope=float(solution.x @ space.gradient))}

    def _move(self, space: StepSpace, direction: Float[Tensor, " N"], length: float) -> LineSearch:
        """Move the weights to the accepted step, or back."""
        from rlhf.algo.trust_region import LineSearch, Trial, backtrack

        def attempt(length: float) -> Trial:
            return space.attempt(direction, length)

        if not self.line_search:
            trial = attempt(length)
            return LineSearch(first=trial, last=trial, accepted=True, backtracks=0)
        outcome = backtrack(attempt, length, max_kl=self.max_kl, shrink=self.shrink, backtracks=self.backtracks)
        if not outcome.accepted:
            space.restore()
        return outcome

    @staticmethod
    def _measure(outcome: LineSearch, *, slope: float) -> dict[str, float]:
        from rlhf.algo.trust_region import Trial

        taken = outcome.last if outcome.accepted else Trial(length=0.0, kl=0.0, improvement=0.0)
        metrics = {
            "trust_region/accepted": float(outcome.accepted),
            "trust_region/backtracks": float(outcome.backtracks),
            "trust_region/kl_full_step": outcome.first.kl,
            "trust_region/kl": taken.kl,
            "trust_region/improvement": taken.improvement,
            "trust_region/expected_improvement": taken.length * slope,
        }
        return {**metrics, "policy/lr": taken.length} if outcome.accepted else metrics

"""Safe RLHF (Dai et al. 2023): the highest reward at a cost within its limit, by a Lagrange multiplier that is learned.

    maximize E[score]   subject to   E[cost] <= limit
    min over λ >= 0, max over the policy:   E[score] - λ (E[cost] - limit)

A source of costs (reward.cost) stands beside the source of the reward. Every online algorithm can have the multiplier;
the preset is PPO's. The paper has one critic for the score and one for the cost, and combines their advantages. GAE is
linear in the rewards, so one critic of the combined return gives the same, as here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from rlhf.algorithms.ppo import CRITIC
from rlhf.algorithms.presets import preset
from rlhf.section import Facts, NonNegative, Positive, Rule, Section, Value

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.algorithms import online

ENOUGH_STEPS = 20  # fewer are a trial, in which no multiplier gets anywhere

preset("ppo_lag", {"algorithm": {**CRITIC, "lagrange": {}}})


def moves_too_fast(lagrange: Lagrange, facts: Facts) -> Value | None:
    """Return a rate at which a cost one unit above its limit multiplies the multiplier by more than e in a step."""
    return lagrange.lr if lagrange.lr * lagrange.start > 1.0 else None


def moves_too_slowly(lagrange: Lagrange, facts: Facts) -> Value | None:
    """Return a rate at which a cost one unit above its limit moves the multiplier by less than a tenth in the run."""
    steps = facts.run.schedule.steps
    if steps is None or steps < ENOUGH_STEPS:
        return None
    return lagrange.lr if lagrange.lr * lagrange.start * steps < 0.1 else None


class Lagrange(Section):
    """A limit on the mean cost of the completions, held by a Lagrange multiplier (Safe RLHF, Dai et al. 2023) with a
    proportional term (Stooke et al. 2020)."""

    cost_limit: float = 0.0
    """Maximum mean cost of the completions, in the unit of reward.cost; 0 suits a cost model whose sign separates
    harmful from harmless answers."""
    start: Positive = 1.0
    """The multiplier of the first step, in score per cost."""
    lr: Positive = 0.1
    """After each step ln(learned multiplier) changes by lr x learned multiplier x (mean cost - cost_limit)."""
    lookahead: NonNegative = 10.0
    """Steps by which the multiplier in use is ahead of the learned one, at the violation of the latest step. It damps
    the swings of the cost, and passes on its noise; 0: none."""
    lowest: Positive = 0.001
    """Smallest multiplier. In log space 0 is never reached, and from a smaller value the way back takes longer."""
    highest: Positive = 20.0
    """Largest multiplier; the metric lagrange/at_limit is 1 when it is reached."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="multiplier-too-fast",
            level="warning",
            key="lr",
            violation=moves_too_fast,
            reason="A cost one unit above its limit multiplies the multiplier by more than e in a single step: it "
            "overshoots, and cost and score oscillate.",
            source="implementation detail: ln λ moves by lr · λ · (cost - limit); Stooke et al. 2020: "
            "Lagrangian methods oscillate",
            fix="algorithm.lagrange.lr=0.1, or less if costs are large numbers",
        ),
        Rule(
            name="multiplier-too-slow",
            level="warning",
            key="lr",
            violation=moves_too_slowly,
            reason="A cost one unit above its limit changes the multiplier by less than 10 % over the whole run, so "
            "it is practically a fixed weight.",
            source="implementation detail: ln λ moves by lr · λ · (cost - limit)",
            fix="algorithm.lagrange.lr=0.1, or more if costs are small numbers",
        ),
    )

    @model_validator(mode="after")
    def _check_range(self) -> Lagrange:
        if not self.lowest <= self.start <= self.highest:
            raise ValueError(
                f"lagrange.start is {self.start:g}, which is not between lagrange.lowest ({self.lowest:g}) and "
                f"lagrange.highest ({self.highest:g}): change one of them"
            )
        return self

    def check(self, algorithm: online.Online) -> None:
        """Check that the algorithm goes with a multiplier; a ValueError says what to set."""
        if not algorithm.policy_loss.reads_advantages:
            raise ValueError(
                f"algorithm.lagrange weighs scores against costs, and policy_loss.type={algorithm.policy_loss.type} "
                "reads neither: remove it, or choose algorithm.preset=opd for a teacher beside a reward"
            )
        for name in ("rescue", "curriculum"):
            if getattr(algorithm, name) is not None:
                raise ValueError(
                    f"algorithm.{name} tells successes by their score, which the multiplier of algorithm.lagrange "
                    "moves: remove one of the two"
                )

    def combine(
        self, scores: Float[Tensor, "*shape"], costs: Float[Tensor, "*shape"], multiplier: float
    ) -> Float[Tensor, "*shape"]:
        """Combine score and cost of each completion (Dai et al. 2023, who combine the advantages of the two so).

            (score - λ cost) / (1 + λ)

        The division keeps the scale of rewards, updates and KL penalty when λ grows. The limit is a constant and
        left out: it changes no gradient.
        """
        return (scores - multiplier * costs) / (1.0 + multiplier)

    def score_weight(self, multiplier: float) -> float:
        """Return the weight of a score in its combination with a cost."""
        return 1.0 / (1.0 + multiplier)

    def next_multiplier(self, multiplier: float, *, cost: float) -> float:
        """Return the learned multiplier after a step, by gradient ascent on ln λ within its bounds (Dai et al. 2023).

            ln λ <- clip(ln λ + lr · λ · (cost - limit), ln lowest, ln highest)

        λ (cost - limit) is the derivative of λ (E[cost] - limit) with respect to ln λ.

        Args:
            multiplier: the learned one in the step in which `cost` was measured.
            cost: mean cost of the step's completions.
        """
        return self._bounded(math.log(multiplier) + self.lr * multiplier * (cost - self.cost_limit))

    def in_use(self, multiplier: float, *, violation: float) -> float:
        """Return the multiplier to train with: the learned one, ahead by `lookahead` steps (Stooke et al. 2020).

            ln λ_used = clip(ln λ + lr · lookahead · λ · violation, ln lowest, ln highest)

        The learned multiplier is an integral of the violation, and the cost about an integral of the multiplier: two
        integrators in a loop swing for ever. The term proportional to the present violation damps them. In the paper
        it is added to λ, here to ln λ.

        Args:
            multiplier: the learned one.
            violation: mean cost of the latest step, less its limit.
        """
        return self._bounded(math.log(multiplier) + self.lr * self.lookahead * multiplier * violation)

    def _bounded(self, log_multiplier: float) -> float:
        """Return a multiplier from its logarithm, within its bounds."""
        return math.exp(min(max(log_multiplier, math.log(self.lowest)), math.log(self.highest)))

    def is_at_limit(self, multiplier: float) -> bool:
        """Return whether the multiplier is the largest that it may be, up to rounding."""
        return multiplier >= self.highest * (1 - 1e-9)

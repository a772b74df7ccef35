"""Distillation: a policy learns the next-token distributions of a teacher, at states that it visits or that data give.

    full       Σ_t D(π(·|s_t), π_T(·|s_t)) at visited states, which are not differentiated: `policy_loss.type=distill`
    token      the same expectation from the sampled token alone, −(log π − log π_T) as its reward, γ = 0: preset `opd`
    sequence   KL(π ‖ π_T) of whole answers: the same reward with γ = 1, preset `minillm` (Gu et al. 2024)

Agarwal et al. 2024 (GKD) is the source of the full form; docs/algorithms/distillation.md compares the three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlhf.algorithms.policy_loss import Surrogate, TokenLoss, Tokens
from rlhf.algorithms.presets import preset
from rlhf.algorithms.reinforce import ONE_UPDATE
from rlhf.algorithms.sft import DemonstratedLoss
from rlhf.section import Facts, NonNegative, Rule, Section, Value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Bool, Float
    from torch import Tensor

    from rlhf.algo.divergence import TeacherTokens
    from rlhf.algo.masked import Mean
    from rlhf.algorithms import online

UNSCORED: dict[str, Any] = {
    "reward": {"source": {"type": "zero"}},
    "guard": {"alarms": {"score-constant": "ignore"}},
}
PLAIN_RETURN: dict[str, Any] = {"type": "batch_whiten", "whiten": False}

preset(
    "distill",
    {
        "algorithm": {
            "advantage": PLAIN_RETURN,  # of a reward that the loss does not read
            "policy_loss": {"type": "distill"},
        },
        "reference": {"measure": False},
        **UNSCORED,
        **ONE_UPDATE,
    },
)


def _log_ratio_reward(gamma: float) -> dict[str, Any]:
    """Return the settings of a reward of -(log π - log π_T) for every sampled token, and of no other."""
    return {
        "algorithm": {
            "advantage": {**PLAIN_RETURN, "gamma": gamma},
            "policy_loss": {"type": "policy_gradient"},
            "kl": {"to": "teacher", "placement": "reward", "estimator": "k1", "coef": 1.0},
        },
        **UNSCORED,
        **ONE_UPDATE,
    }


OPD = _log_ratio_reward(0.0)
OPD["guard"] = {**UNSCORED["guard"], "allow": ["discount"]}  # a token learns from its own reward alone
preset("opd", OPD)
preset("minillm", _log_ratio_reward(1.0))

HALF = 0.5  # the Jensen-Shannon divergence itself
COLUMNS = ("divergence", "kl", "agreement", "teacher_tail", "student_tail", "error")
"""The numbers that `DistillSettings.against_teacher` computes for each token."""


def reverse_without_tail(settings: DistillSettings, facts: Facts) -> Value | None:
    """Return false if the policy can leave the teacher's tokens at no cost."""
    return "false" if not settings.tail and settings.divergence == "reverse" else None


class DistillSettings(Section):
    """The divergence of policy and teacher to minimize, and the tokens to compute it over."""

    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """reverse: KL(policy || teacher), which seeks a mode; forward: KL(teacher || policy), which covers all;
    jsd: the generalized Jensen-Shannon divergence, between the two."""
    beta: Annotated[float, Field(gt=0, lt=1)] = HALF
    """With jsd: the teacher's weight in the mixture. Near 0 the divergence is beta times forward, near 1 it is
    1 - beta times reverse."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Compare the teacher's so many likeliest tokens and the tail, which is all others together; null: the whole
    vocabulary, or all tokens that the teacher gives."""
    tail: bool = True
    """With top_k: false compares the probabilities within the likeliest tokens alone, and ignores all other tokens."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="top-k-reverse-without-tail",
            level="error",
            key="tail",
            violation=reverse_without_tail,
            reason="Without the tail nothing holds the policy to the teacher's likeliest tokens: it may move its "
            "probability to any other token at no cost.",
            source="Agarwal et al. 2024 (GKD): the whole vocabulary; verl #5041: unstable top-k reverse KL",
            fix="algorithm.policy_loss.tail=true, or algorithm.loss.tail=true with distill_sft",
        ),
    )

    @model_validator(mode="after")
    def _check_beta(self) -> DistillSettings:
        if self.beta != HALF and self.divergence != "jsd":
            raise ValueError(f"beta is the mixture of jsd, but divergence is {self.divergence}: leave it out")
        return self

    def against_teacher(self, log_pi: Float[Tensor, "N V"], teacher: TeacherTokens) -> Float[Tensor, "6 N"]:
        """Compute the `COLUMNS` of each token; the divergence alone has a gradient.

        `kl` is KL(policy || teacher) for every divergence, over all tokens that the teacher gives. `error` is the part
        of the divergence that top_k leaves out if the teacher gave the vocabulary, else a bound of it, NaN without one.
        """
        import torch

        from rlhf.algo.divergence import divergence, same_width, shared_outcomes, tail_error_bound

        log_pi, given = same_width(log_pi, teacher)
        read = given if self.top_k is None else given.top(self.top_k)
        value = divergence(*shared_outcomes(log_pi, read, tail=self.tail), self.divergence, beta=self.beta)
        with torch.no_grad():
            zero = torch.zeros_like(value)
            kl = divergence(*shared_outcomes(log_pi, given), "reverse")
            agreement = (log_pi.argmax(dim=-1) == given.first_choice()).to(value.dtype)
            tails, error = (zero, zero), zero
            if read.ids is not None and read.rest is not None:
                inside = log_pi.gather(1, read.ids).exp().sum(dim=-1)
                tails = read.rest.exp(), (1.0 - inside).clamp(min=0.0)
                if given.ids is None:
                    error = divergence(log_pi, given.logprobs, self.divergence, beta=self.beta) - value
                elif self.tail:
                    error = tail_error_bound(log_pi, read, self.divergence, beta=self.beta)
                else:  # a comparison among the K tokens says nothing of the others
                    error = torch.full_like(value, torch.nan)
        return torch.stack([value, kl, agreement, *tails, error])

    def measure(self, columns: Float[Tensor, "6 B T"], mask: Bool[Tensor, "B T"]) -> Mapping[str, Mean]:
        """Compute the metrics of a micro-batch from its `COLUMNS`."""
        import torch

        from rlhf.algo.masked import Mean

        _, kl, agreement, teacher_tail, student_tail, error = columns.detach()
        rows = mask.any(dim=1)
        metrics = {
            "kl/teacher": Mean.of(kl, mask),
            "kl/teacher_sequence": Mean.of(torch.where(mask, kl, 0.0).sum(dim=1), rows),
            "teacher/agreement": Mean.of(agreement, mask),
        }
        if self.top_k is not None or bool((teacher_tail[mask] > 0).any()):
            metrics |= {"teacher/tail": Mean.of(teacher_tail, mask), "teacher/policy_tail": Mean.of(student_tail, mask)}
            if not bool(error[mask].isnan().any()):
                metrics["teacher/tail_error"] = Mean.of(error, mask)
        return metrics


class DistillLoss(DistillSettings, TokenLoss):
    """A divergence of policy and teacher at each visited state (GKD, Agarwal et al. 2024).

        L_t = D(π(·|s_t), π_T(·|s_t))

    The states are not differentiated: the gradient is exact over the vocabulary, without noise of the sampled token.
    """

    reads_advantages: ClassVar[bool] = False
    reads_teacher: ClassVar[bool] = True

    type: Literal["distill"] = "distill"

    def check(self, algorithm: online.Online) -> None:
        """Check that no setting is given that a divergence does not read."""
        if algorithm.value_loss is not None:
            raise ValueError("a divergence reads no advantage: choose an advantage.type without a critic for distill")
        if algorithm.kl.placement == "reward" and algorithm.kl.weighs:
            raise ValueError(
                "distill reads no reward, so kl.placement=reward would do nothing: set kl.placement=none, or loss"
            )

    def per_token(self, tokens: Tokens) -> Surrogate:
        """Return the divergence of every token's state, and its metrics."""
        assert tokens.teacher is not None
        return Surrogate(per_token=tokens.teacher[0], metrics=self.measure(tokens.teacher, tokens.mask))


class DistillSft(DistillSettings, DemonstratedLoss):
    """SFT on the teacher's distributions: a divergence at the states of given answers (offline distillation).

    L_t = D(π(·|s_t), π_T(·|s_t)) − α log π(y_t|s_t),     α = nll_coef
    """

    reads_teacher: ClassVar[bool] = True

    type: Literal["distill_sft"] = "distill_sft"
    divergence: Literal["reverse", "forward", "jsd"] = "forward"
    """forward: KL(teacher || policy), the cross-entropy with the teacher's probabilities; reverse: KL(policy ||
    teacher); jsd: the generalized Jensen-Shannon divergence."""
    nll_coef: NonNegative = 0.0
    """Weight of the answers' own negative log-likelihood, added to the divergence."""

    def per_token(
        self, logprobs: Float[Tensor, "B T"], teacher: Float[Tensor, "K B T"] | None = None
    ) -> Float[Tensor, "B T"]:
        """Compute the loss of each token from its log-probability and the columns of `against_teacher`."""
        assert teacher is not None
        return teacher[0] - self.nll_coef * logprobs

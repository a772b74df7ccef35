"""The family of policy losses: per token, weighted by advantages, or over pairs of completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rlhf.section import Choice, NonNegative, Usual

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from rlhf.algo.divergence import TeacherTokens
    from rlhf.algo.kl import Coefs
    from rlhf.algo.masked import Mean
    from rlhf.algorithms import online
    from rlhf.algorithms.advantage import StepSizes
    from rlhf.algorithms.offline_loss import PairLoss
    from rlhf.algorithms.search import StepSpace

RatioLevel = Literal["token", "sequence", "sequence_mean"]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The inputs of a loss per token; all of them are [B, T], and 0 outside the mask, where the ratio is 1."""

    ratio: Float[Tensor, "B T"]  # pi / pi_old at the level that the loss asks for
    logprobs: Float[Tensor, "B T"]  # log pi, with gradient
    old_logprobs: Float[Tensor, "B T"]  # log pi_old, of the policy that sampled
    advantages: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    old_kl: Float[Tensor, "B T"]  # the estimate of KL(old || new)
    coefs: Coefs  # as the controllers have set them for this step
    teacher: Float[Tensor, "K B T"] | None = None  # the output of the loss's `against_teacher`, if it reads a teacher


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """A loss per token, and where it was clipped."""

    per_token: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"] | None = (
        None  # where the clip stops the gradient; in CISPO, where it bounds the weight
    )
    outside: Bool[Tensor, "B T"] | None = None  # where the ratio is outside the clip range; None without a range
    metrics: Mapping[str, Mean] = field(default_factory=dict)  # that the loss alone has; it declares their names


class PolicyLoss(Choice):
    """A loss of the policy; a member has its settings, its equation, and its demands on a run."""

    reads_old_logprobs: ClassVar[bool] = False
    """Whether the log-probabilities of the policy that sampled have to be known before the update."""
    is_trusted: ClassVar[bool] = True
    """Whether it is known to keep the policy near its samples over many updates, or to have no need to."""
    reads_advantages: ClassVar[bool] = True
    """Whether the scores are part of the loss, as advantages or as the order of pairs."""
    reads_teacher: ClassVar[bool] = False
    """Whether it compares the policy's next-token distributions with a teacher's, by `against_teacher`."""
    searches: ClassVar[bool] = False
    """Whether the policy takes one step on each batch, which `search` finds, in place of the optimizer's steps."""
    unread_optimizer: ClassVar[str] = "the policy loss searches its step itself"
    """The reason that the settings of the policy's optimizer are not read if it `searches`."""

    @property
    def coef_metric(self) -> str:
        """Return the metric of the coefficient that `next_coef` moves from step to step; empty: it has none."""
        return ""

    @property
    def pair_loss(self) -> PairLoss | None:
        """Return the loss of pairs that it trains on; None for a loss per token."""
        return None

    @property
    def needs_entropy(self) -> bool:
        """Return whether the entropy is part of the loss."""
        return False

    @property
    def has_narrow_clip(self) -> bool:
        """Return whether the clip range is as narrow as rounding errors of log-probabilities in bfloat16."""
        return False

    @property
    def kl_limit(self) -> float | None:
        """Return the KL(old || new), nats per token, above which a step is moved back by halves; None: never."""
        return None

    @property
    def start_coef(self) -> float:
        """Return the coefficient of the first step, in `Tokens.coefs.penalty`."""
        return 0.0

    def next_coef(self, coef: float, *, kl: float) -> float:
        """Return the coefficient of the next step; `kl` is KL(old || new) per token at the end of this one."""
        return coef

    def load(self) -> None:
        """Import the functions that the settings name, at the start of a run; an error names the key."""

    def against_teacher(self, log_pi: Float[Tensor, "N V"], teacher: TeacherTokens) -> Float[Tensor, "K N"]:
        """Compute K numbers of each token from its distributions; `Tokens.teacher` has them, with their gradient."""
        raise NotImplementedError

    def check(self, algorithm: online.Online) -> None:
        """Check that the loss and the rest of the algorithm go together; a ValueError says what to set."""

    def check_sizes(self, sizes: StepSizes, algorithm: online.Online) -> None:
        """Check that the loss can work with steps of these sizes; a ValueError says what to set."""

    def check_run(self, *, sharding: str, splits_weights: bool, shares_backbone: bool) -> None:
        """Check that the loss can work with the run's sharding, and with a critic that shares the policy's backbone."""

    def check_parameters(self, count: int) -> None:
        """Check that a step can be searched over this many trained parameters."""

    def search(self, space: StepSpace, *, lr_factor: float) -> dict[str, float]:
        """Find and take a step for the gradient of a batch; return its metrics, and its length as policy/lr if any."""
        raise NotImplementedError


class TokenLoss(PolicyLoss):
    """The base of the surrogate losses: a weight for each token, and an entropy bonus."""

    aggregate: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """Weights of the tokens in the loss (rlhf.algo.policy_loss.token_weights)."""
    entropy_coef: Annotated[
        NonNegative,
        Usual(
            low=0.0,
            high=0.05,
            rule="entropy-bonus",
            reason="With a vocabulary of thousands of tokens a bonus above 0.05 per nat rewards noise.",
            source="Huang et al. 2022 (37 details), detail 10: 0.01; Huang et al. 2024 (N+): 0",
            fix="algorithm.policy_loss.entropy_coef=0.01, or 0",
        ),
    ] = 0.0
    """Weight of the entropy bonus, per nat."""

    @property
    def ratio_level(self) -> RatioLevel:
        """Return the level of the importance ratio that `per_token` is given."""
        return "token"

    @property
    def needs_entropy(self) -> bool:
        """Return whether the entropy is part of the loss."""
        return self.entropy_coef > 0

    @property
    def drawn_ratios(self) -> tuple[float, float] | None:
        """Return the range of ratios that the report draws over the loss; None for one that is no function of it."""
        return None

    @abstractmethod
    def per_token(self, tokens: Tokens) -> Surrogate:
        """Compute the loss of every token; values outside the mask are not used.

        The loss of a token must not depend on other rows: a minibatch is split into micro-batches of any size. Weights
        and sum over tokens, the KL penalty and the entropy bonus come afterwards, as configured.
        """

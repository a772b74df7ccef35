"""An ensemble of reward sources: the score of each completion from the scores of its members.

Some members may not apply to a completion: their score is NaN there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge
from pydantic import model_validator

from rlhf.errors import ConfigError, NonFiniteScores
from rlhf.rewards.source import RewardSource, Source, SourceContext
from rlhf.section import Facts, OneOf, Rule, Value

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from rlhf.types import Completions, Scores

EnsembleMode = Literal["mean", "sum", "weighted_mean", "minimum", "mean_minus_std", "gdpo"]
FEWEST_MEMBERS = 3


def _few_members(source: EnsembleSource, facts: Facts) -> Value | None:
    """Return the number of members of a conservative ensemble that are too few to disagree."""
    is_conservative = source.how in ("minimum", "mean_minus_std")
    return float(len(source.sources)) if is_conservative and len(source.sources) < FEWEST_MEMBERS else None


class EnsembleSource(Source):
    """Several sources combined into one score."""

    asks_on_main_rank: ClassVar[bool] = False  # its members are asked as each of them wants
    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="small-ensemble",
            level="warning",
            key="sources",
            violation=_few_members,
            reason="The minimum or the spread of two members is a poor estimate of their uncertainty.",
            source="Coste et al. 2024: 3 to 5 members",
            fix="4 members, or how=mean",
        ),
    )

    type: Literal["ensemble"] = "ensemble"
    sources: list[Annotated[Source, OneOf()]]
    """The members of the ensemble."""
    names: list[str] | None = None
    """Names of the members in the metrics (part/NAME/mean); null: sources.0, sources.1, ..."""
    weights: list[float] | None = None
    """Factors for the members' scores, applied before they are combined; null: all 1."""
    how: EnsembleMode = "mean"
    """minimum is worst-case optimization, mean_minus_std uncertainty-weighted optimization (Coste et al. 2024);
    weighted_mean divides the sum by the weights of the sources that apply to the completion; gdpo standardizes each
    source within its group before the sum (Liu et al. 2026), with advantage.type=group and baseline=centered."""
    std_coef: Annotated[float, Ge(0)] = 1.0
    """c in mean - c * std, for mean_minus_std."""

    @property
    def is_learned(self) -> bool:
        """Return whether a model gives the scores of any member."""
        return any(member.is_learned for member in self.sources)

    @property
    def standardizes_in_groups(self) -> bool:
        """Return whether the members' scores are standardized within groups before their sum."""
        return self.how == "gdpo"

    def build(self, context: SourceContext) -> EnsembleReward:
        """Return the source that asks every member and combines their scores.

        Raises:
            UserError: a member cannot be built.
        """
        return EnsembleReward(
            [context.build(member, may_abstain=True) for member in self.sources],
            how=self.how,
            std_coef=self.std_coef,
            weights=self.weights,
            names=self.names,
            may_abstain=context.may_abstain,
        )

    @model_validator(mode="after")
    def _check_members(self) -> EnsembleSource:
        for key, given in (("weights", self.weights), ("names", self.names)):
            if given is not None and len(given) != len(self.sources):
                raise ValueError(f"{key} has {len(given)} entries for {len(self.sources)} sources: give each one")
        reserved = {"disagreement", "weighted_sum"}
        if self.names is not None and (len(set(self.names)) < len(self.names) or reserved & set(self.names)):
            raise ValueError("names must differ from each other, and from disagreement and weighted_sum")
        if self.how == "weighted_mean" and any(weight <= 0 for weight in self.weights or ()):
            raise ValueError("how is weighted_mean, which divides by the weights: they must be above 0")
        if any(source.standardizes_in_groups for source in self.sources):
            raise ValueError("how=gdpo standardizes over groups: only the outermost source of a run may")
        return self


def combine(
    scores: Float[Tensor, "K B"], weights: Float[Tensor, " K"], *, how: EnsembleMode, std_coef: float = 1.0
) -> Float[Tensor, " B"]:
    """Combine the scores of K sources into one per completion, over the sources that apply to it.

        mean: 1/n Σ_k w_k r_k      sum: Σ_k w_k r_k      weighted_mean: Σ_k w_k r_k / Σ_k w_k
        minimum: min_k w_k r_k     mean_minus_std: mean - c · std_k(w_k r_k)

    where k runs over the n sources whose score is not NaN. minimum is the worst-case optimization of Coste et al.
    (2024). Their uncertainty-weighted form subtracts the variance; here it is the standard deviation (of the
    population, so that it is 0 for one source), in the unit of the scores. Without groups to compare in, gdpo is
    the weighted sum.

    Args:
        scores: NaN if a source does not apply.
        weights: one for each source.
        how: the combination.
        std_coef: c.

    Returns:
        One score per completion; NaN if no source applies.
    """
    import torch

    applies = ~scores.isnan()
    weighted = torch.where(applies, scores * weights[:, None], 0.0)
    count = applies.sum(dim=0)
    combined = _combined(weighted, applies, count, weights, how=how, std_coef=std_coef)
    return torch.where(count > 0, combined, torch.nan)


def _combined(
    weighted: Float[Tensor, "K B"],
    applies: Bool[Tensor, "K B"],
    count: Tensor,
    weights: Float[Tensor, " K"],
    *,
    how: EnsembleMode,
    std_coef: float,
) -> Float[Tensor, " B"]:
    import torch

    total = weighted.sum(dim=0)
    match how:
        case "sum" | "gdpo":
            return total
        case "mean":
            return total / count
        case "weighted_mean":
            return total / torch.where(applies, weights[:, None], 0.0).sum(dim=0)
        case "minimum":
            return torch.where(applies, weighted, torch.inf).amin(dim=0)
        case "mean_minus_std":
            return total / count - std_coef * _std(weighted, applies, count)


def disagreement(scores: Float[Tensor, "K B"], weights: Float[Tensor, " K"]) -> Float[Tensor, " B"]:
    """Compute the population's standard deviation of w_k r_k over the sources that apply; 0 for fewer than 2."""
    import torch

    applies = ~scores.isnan()
    return _std(torch.where(applies, scores * weights[:, None], 0.0), applies, applies.sum(dim=0).clamp(min=1))


def _std(weighted: Float[Tensor, "K B"], applies: Bool[Tensor, "K B"], count: Tensor) -> Float[Tensor, " B"]:
    import torch

    deviations = torch.where(applies, weighted - weighted.sum(dim=0) / count, 0.0)
    return (deviations.square().sum(dim=0) / count).sqrt()


def normalize_then_sum(
    scores: Float[Tensor, "K B"], weights: Float[Tensor, " K"], group_size: int
) -> Float[Tensor, " B"]:
    """Standardize the scores of each source within their groups, sum them, and standardize the sum (GDPO).

        A_k = (r_k - mean_group r_k) / std_group r_k,     A = Σ_k w_k A_k,     Â = (A - mean_batch A) / std_batch A

    where the batch has the completions that any source applies to.
    Liu et al. (2026, arXiv 2601.05242). If rewards are summed first, as in GRPO, different combinations of them give
    the same advantage, and one of large spread hides the others. Every standard deviation is the population's plus
    1e-4, as in rlhf.algo.advantages.group_normalized. A source that does not apply contributes 0, the mean of its
    group; its mean and spread are over the completions that it applies to.

    Args:
        scores: K sources of B completions, the rows of a group one after another; NaN if a source does not apply.
        weights: one for each source.
        group_size: completions per prompt.

    Returns:
        Per completion the advantage Â, whose mean over each group is 0; NaN if no source applies.
    """
    import torch

    from rlhf.algo.advantages import GROUP_STD_EPS

    applies = ~scores.isnan()
    groups, live = scores.unflatten(1, (-1, group_size)), applies.unflatten(1, (-1, group_size))
    count = live.sum(dim=2, keepdim=True).clamp(min=1)
    mean = torch.where(live, groups, 0.0).sum(dim=2, keepdim=True) / count
    centered = torch.where(live, groups - mean, 0.0)
    std = (centered.square().sum(dim=2, keepdim=True) / count).sqrt()
    # equal scores center to exactly 0: their rounded mean may not
    same = torch.where(live, groups, -torch.inf).amax(dim=2, keepdim=True) == torch.where(live, groups, torch.inf).amin(
        dim=2, keepdim=True
    )
    advantages = torch.where(same, 0.0, centered / (std + GROUP_STD_EPS)).flatten(1)
    total = (weights[:, None] * advantages).sum(dim=0)
    any_applies = applies.any(dim=0)
    if not bool(any_applies.any()):
        return torch.full_like(total, torch.nan)
    batch = total[any_applies]
    normalized = (total - batch.mean()) / (batch.std(correction=0) + GROUP_STD_EPS)
    return torch.where(any_applies, normalized, torch.nan)


class EnsembleReward:
    """Scores every completion with every member and combines the scores; see `combine`.

    A member's score is NaN if it does not apply. The parts are each member's scores and parts, and the standard
    deviation of the weighted scores over members as "disagreement"; of gdpo, also their "weighted_sum".
    """

    def __init__(
        self,
        members: Sequence[RewardSource],
        *,
        how: EnsembleMode,
        std_coef: float = 1.0,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        may_abstain: bool = False,
    ) -> None:
        """Combine `members`, whose parts are called `names`: by default sources.0, sources.1, ... as in the config.

        Without `weights` every member has weight 1. With `may_abstain` a completion to which no member applies has the
        score NaN, which otherwise is an error.

        Raises:
            ConfigError: there are no members.
        """
        import torch

        if not members:
            raise ConfigError("reward.source.sources is empty: an ensemble needs at least one source")
        names = names or [f"sources.{i}" for i in range(len(members))]
        assert len(set(names) - {"disagreement", "weighted_sum"}) == len(members)
        self.members = dict(zip(names, members, strict=True))
        self.how = how
        self.std_coef = std_coef
        self.weights = torch.tensor([1.0] * len(members) if weights is None else list(weights), dtype=torch.float64)
        self.may_abstain = may_abstain

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions with every member and combine the scores.

        gdpo compares the completions of a prompt. If there is one of each, as in evaluation, the score is the
        weighted sum.

        Raises:
            NonFiniteScores: no member applies to a completion.
        """
        import torch

        from rlhf.types import Scores

        scores = {name: member(completions) for name, member in self.members.items()}
        parts: dict[str, Float[Tensor, " B"]] = {}
        for name, member_scores in scores.items():
            parts[name] = member_scores.values
            parts |= {f"{name}/{part}": values for part, values in member_scores.parts.items()}
        stacked = torch.stack([member_scores.values for member_scores in scores.values()])
        weights = self.weights.to(stacked)
        parts["disagreement"] = disagreement(stacked, weights)
        values = combine(stacked, weights, how=self.how, std_coef=self.std_coef)
        if self.how == "gdpo":
            parts["weighted_sum"] = values
            if completions.group_size > 1:
                values = normalize_then_sum(stacked, weights, completions.group_size)
        self._check(values)
        return Scores(values=values, parts=parts)

    def _check(self, values: Float[Tensor, " B"]) -> None:
        missing = values.isnan().nonzero().flatten().tolist()
        if missing and not self.may_abstain:
            raise NonFiniteScores(
                f"none of the ensemble's {len(self.members)} sources ({', '.join(self.members)}) applies to "
                f"{len(missing)} of {len(values)} completions (the first: row {missing[0]}): add one that always does"
            )

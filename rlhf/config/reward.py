"""The reward section (a source, its shaping, a second judge), and the sections of reward-model runs alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf.algorithms.online import Online
from rlhf.config.data import Count, Size
from rlhf.rewards.chat import ChatConfig
from rlhf.rewards.process import ProcessReward
from rlhf.rewards.shaping import ShapingConfig
from rlhf.rewards.source import Source
from rlhf.section import NonNegative, OneOf, Section


class ChatPairsConfig(ChatConfig):
    """A language model that compares two completions, in both orders; disagreement is a tie."""


class WatchConfig(Section):
    """A second judge of training completions that is not trained on."""

    source: Annotated[Source, OneOf()]
    """The judge. If it fails, the run warns and continues."""
    rows: Count = 32
    """Completions to score, drawn at random from each watched step."""
    every: Count = 1
    """Steps between two watched steps."""


class CostSourceConfig(Section):
    """A cost per completion, beside the reward; algorithm.lagrange holds its mean at a limit."""

    source: Annotated[Source, OneOf()]
    """The source of costs: higher is worse. A source, as for the reward, e.g. a cost model trained by rlhf reward
    on pairs whose first side is the more harmful one."""


class RewardConfig(Section):
    """The source of scores and their shaping."""

    source: Annotated[Source, OneOf()]
    """function, verifier, model, remote, openai, ensemble or rules."""
    shaping: ShapingConfig = ShapingConfig()
    """Clipping, and penalties for a missing EOS and for overlong completions."""
    process: Annotated[ProcessReward, OneOf()] | None = None
    """Rewards of the steps of a completion, besides its score (online; docs/verifiers.md): function or model."""
    watch: WatchConfig | None = None
    """A second judge for monitoring: metrics watch/score, watch/gap, watch/correlation (online)."""
    cost: CostSourceConfig | None = None
    """The cost of completions: metrics cost/mean, eval/cost; with algorithm.lagrange its mean is held at a limit
    (online)."""

    def check_cost(self, algorithm: Online) -> None:
        """Check that a multiplier has a cost to hold, and that score and cost are numbers of single completions.

        Raises:
            ValueError: the cost is missing, or one of them is standardized within groups.
        """
        if algorithm.lagrange is not None and self.cost is None:
            raise ValueError(
                "algorithm.lagrange holds a cost at its limit, and there is none: set reward.cost.source, e.g. "
                "reward.cost.source.type=model reward.cost.source.path=runs/cost_model"
            )
        if algorithm.lagrange is not None and self.shaping.normalize is not None:
            raise ValueError(
                "reward.shaping.normalize changes the scale that algorithm.lagrange weighs the cost on: remove one of "
                "the two"
            )
        if self.cost is None:
            return
        if self.cost.source.standardizes_in_groups:
            raise ValueError("reward.cost.source.how is gdpo, which has no mean to limit: set another how")
        if self.source.standardizes_in_groups and algorithm.lagrange is not None:
            raise ValueError(
                "reward.source.how is gdpo, whose scores are advantages, which cannot be weighed against a cost: "
                "set another how, or remove algorithm.lagrange"
            )

    def check_process(self, algorithm: Online) -> None:
        """Check that rewards of steps meet an algorithm that reads the rewards of tokens.

        Raises:
            ValueError: it compares the scores of whole completions.
        """
        if self.process is None:
            return
        if algorithm.advantage.makes_pairs or algorithm.advantage.chooses_rows or algorithm.drop_uniform_groups:
            raise ValueError(
                "reward.process rewards steps, and this algorithm chooses completions by their scores alone: use "
                "algorithm.preset=ppo, or one without drop_uniform_groups"
            )

    def check_gdpo(self, algorithm: Online, *, reward_parts: int) -> None:
        """Check that scores standardized within their groups meet an algorithm that takes them unchanged.

        Raises:
            ValueError: it would standardize them again, or not see whole steps.
        """
        if not self.source.standardizes_in_groups:
            return
        if not algorithm.advantage.only_centers:
            raise ValueError(
                "reward.source.how is gdpo, which standardizes each source within its group: the advantage must only "
                "center, algorithm.preset=grpo algorithm.advantage.baseline=centered"
            )
        if self.shaping.normalize is not None:
            raise ValueError(
                "reward.source.how is gdpo, whose scores are standardized already: set reward.shaping.normalize=null"
            )
        if algorithm.rescue is not None or algorithm.curriculum is not None:
            raise ValueError(
                "reward.source.how is gdpo, whose standardized scores tell no success from a failure: set "
                "algorithm.rescue=null and algorithm.curriculum=null, or reward.source.how=sum"
            )
        if reward_parts > 1 or algorithm.refill_rounds:
            raise ValueError(
                "reward.source.how is gdpo, which looks at a whole step: set overlap.reward_parts=1 and "
                "algorithm.refill_rounds=0"
            )


Varied = Literal["head", "order", "pairs"]


class RewardModelLoss(Section):
    """The Bradley-Terry loss, with the optional margin and centering of reward_model.model."""

    use_margin: bool = False
    """Subtract the data's margin column from the score difference (Touvron et al. 2023, eq. 2)."""
    centering: NonNegative = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores near zero (Eisenstein et al. 2023); 0.01 is usual."""


class StepLabelsConfig(Section):
    """A process reward model: data.preferences has rows with step labels (prompt, completions, labels) and no pairs."""

    separator: Annotated[str, Field(min_length=1)] = "\n"
    """The text that the model reads behind each step; it grades the step at the last token of this text."""


class CalibrationConfig(Section):
    """Shift and scale, stored in the model, that give mean 0 and std 1 on reference completions."""

    data: Literal["chosen", "both", "none"] = "both"
    """Completions of the training pairs to calibrate on; none: no calibration."""
    limit: Count = 1024
    """Number of completions to calibrate on."""


class EnsembleConfig(Section):
    """Several reward models from one run that differ as `vary` states. `ensemble=4` is short for size: 4."""

    size: Annotated[int, Field(ge=1)] = 1
    """Number of members; 1: a single reward model."""
    backbone: Literal["shared", "separate"] = "shared"
    """shared: heads on one backbone, trained and scored in one forward pass; separate: whole reward models, trained one
    after another into members/0, members/1, ... of the run folder."""
    vary: list[Varied] | None = None
    """Differences between members. head: the initial weights of the head; order: the order of the pairs (separate
    backbones only); pairs: a bootstrap resample of the pairs per member. null: [head, pairs] with a shared backbone,
    otherwise [head, order]."""
    member: Size | None = None
    """With separate backbones, train only this member (counted from 0), for example on another machine; null: all."""

    @property
    def varied(self) -> frozenset[Varied]:
        """Return the differences between members."""
        if self.vary is not None:
            return frozenset(self.vary)
        return frozenset(("head", "pairs") if self.backbone == "shared" else ("head", "order"))

    @property
    def is_shared(self) -> bool:
        """Return whether the run trains several heads on one backbone."""
        return self.size > 1 and self.backbone == "shared"

    def number(self, what: Varied) -> int | None:
        """Return the number of the member that this run trains if members differ in `what`; else None."""
        return self.member if what in self.varied else None

    @model_validator(mode="after")
    def _check_members(self) -> EnsembleConfig:
        if self.is_shared and "order" in self.varied:
            raise ValueError("vary has order: heads on one backbone see the same batches; use pairs, or separate")
        if self.size > 1 and not self.varied:
            raise ValueError("vary is empty: all members would be the same")
        if self.member is not None and (self.backbone == "shared" or self.member >= self.size):
            raise ValueError(f"member is {self.member}: needs backbone=separate and a size above it")
        return self

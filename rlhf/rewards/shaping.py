"""The shaping of scores: clipping, and penalties for a missing EOS and for overlong completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from rlhf.errors import RewardError
from rlhf.rewards.source import RewardSource
from rlhf.section import Section

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from rlhf.algo.moments import Moments
    from rlhf.types import Completions, Scores

LEAST_STD = 1e-8  # of the scores so far; equal scores stay finite


class ShapingConfig(Section):
    """Transformation of scores into rewards."""

    missing_eos_penalty: Annotated[float, Ge(0)] = 0.0
    """Subtracted from the score of a completion without EOS."""
    clip: Annotated[float, Gt(0)] | None = None
    """Clip scores to [-clip, clip] (metric score/clipped: share of clipped scores); null: off."""
    overlong_buffer: Annotated[int, Ge(0)] = 0
    """Tokens before max_new_tokens over which a penalty grows from 0 to overlong_penalty (DAPO, eq. 13); 0: off."""
    overlong_penalty: Annotated[float, Ge(0)] = 1.0
    """The penalty at max_new_tokens if overlong_buffer is set."""
    normalize: Literal["scale", "standardize"] | None = None
    """Divide the shaped scores of training by the standard deviation of all scores of the run so far (scale), or
    subtract their mean first (standardize); null: off. With an environment the rewards of turns are divided too.
    Checkpoints contain mean and deviation."""

    def normalized(self, values: Float[Tensor, " B"], moments: Moments) -> Float[Tensor, " B"]:
        """Divide scores by the deviation of all scores so far, after their mean is subtracted if asked.

        scale: s / std      standardize: (s - mean) / std
        """
        shift = moments.mean if self.normalize == "standardize" else 0.0
        return (values - shift) / self.divisor(moments)

    def divisor(self, moments: Moments) -> float:
        """Return the deviation that scores are divided by."""
        return max(moments.std, LEAST_STD)

    def check_length(self, max_new_tokens: int) -> None:
        """Check that the penalty for overlong completions begins after their first token."""
        if self.overlong_buffer >= max_new_tokens:
            raise ValueError("reward.shaping.overlong_buffer must be shorter than sampling.max_new_tokens")


class ShapedReward:
    """Wraps a source and shapes its scores.

    The score is clipped first, so that the clip cannot hide a penalty:

        shaped = clip(score, -clip, clip) - missing_eos_penalty * [not finished] - overlong(length)

    An episode whose environment failed pays no penalty for its missing EOS: its score stays the mean of its group.

    The parts are the source's, the unshaped score as "raw", each penalty that is switched on, and, if clip is set,
    "clipped": 1.0 for each score that the clip changed, else 0.0.
    """

    def __init__(self, source: RewardSource, config: ShapingConfig, max_new_tokens: int) -> None:
        self.source = source
        self.config = config
        self.max_new_tokens = max_new_tokens

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions with the source and shape the scores.

        Raises:
            RewardError: the source fails, or one of its parts has a name that shaping uses.
        """
        from rlhf.types import Scores

        scores = self.source(completions)
        penalties = self._penalties(completions, scores.values)
        values, shaping_parts = scores.values, {"raw": scores.values, **penalties}
        if self.config.clip is not None:
            values = values.clamp(-self.config.clip, self.config.clip)
            shaping_parts["clipped"] = ((values != scores.values) & ~values.isnan()).to(values)
        clash = sorted(shaping_parts.keys() & scores.parts.keys())
        if clash:
            raise RewardError(f"the reward names a part {clash[0]!r}, which shaping keeps for itself; rename it")
        for penalty in penalties.values():
            values = values - penalty
        return Scores(values=values, parts={**scores.parts, **shaping_parts})

    def _penalties(self, completions: Completions, like: Float[Tensor, " B"]) -> dict[str, Float[Tensor, " B"]]:
        config, penalties = self.config, {}
        if config.missing_eos_penalty > 0:
            missing = (~completions.finished & completions.action_mask.any(dim=1)).to(like)
            penalties["missing_eos_penalty"] = config.missing_eos_penalty * missing
        if config.overlong_buffer > 0:
            share = overlong_share(
                completions.completion_mask.sum(dim=1).to(like.device),
                max_new_tokens=self.max_new_tokens,
                buffer=config.overlong_buffer,
            )
            penalties["overlong_penalty"] = config.overlong_penalty * share.to(like)
        return penalties


def overlong_share(lengths: Int[Tensor, " B"], *, max_new_tokens: int, buffer: int) -> Float[Tensor, " B"]:
    """Compute the share of the overlong penalty for completions of `lengths` tokens (EOS included).

    This is minus DAPO's R_length (Yu et al. 2025, eq. 13): 0 up to max_new_tokens - buffer, then linear, 1 at
    max_new_tokens.
    """
    start = max_new_tokens - buffer
    return ((lengths.double() - start) / buffer).clamp(0.0, 1.0)

"""What is done to a score before it becomes a reward: clip, then penalties for not ending and for length."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from rlhf.config.reward import ShapingConfig
from rlhf.errors import RewardError
from rlhf.rewards.source import RewardSource
from rlhf.types import Completions, Scores


class ShapedReward:
    """Wraps a source. The source's own score is clipped first, so that no clip can swallow a penalty:

        shaped = clip(score, -clip, clip) - missing_eos_penalty * [not finished] - overlong(length)

    The parts keep the source's, the score before all this as "raw", each penalty that is switched on, and, where there
    is a clip, 1.0 for each score that it changed, as "clipped".
    """

    def __init__(self, source: RewardSource, config: ShapingConfig, max_new_tokens: int) -> None:
        self.source = source
        self.config = config
        self.max_new_tokens = max_new_tokens

    def __call__(self, completions: Completions) -> Scores:
        """See RewardSource."""
        scores = self.source(completions)
        penalties = self._penalties(completions, scores.values)
        values, own = scores.values, {"raw": scores.values, **penalties}
        if self.config.clip is not None:
            values = values.clamp(-self.config.clip, self.config.clip)
            own["clipped"] = (values != scores.values).to(values)
        clash = sorted(own.keys() & scores.parts.keys())
        if clash:
            raise RewardError(f"the reward names a part {clash[0]!r}, which shaping keeps for itself; rename it")
        for penalty in penalties.values():
            values = values - penalty
        return Scores(values=values, parts={**scores.parts, **own})

    def _penalties(self, completions: Completions, like: Float[Tensor, " B"]) -> dict[str, Float[Tensor, " B"]]:
        config, penalties = self.config, {}
        if config.missing_eos_penalty > 0:
            missing = (~completions.finished).to(like)
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
    """The share of the overlong penalty, minus DAPO's R_length (Yu et al. 2025, eq. 13); lengths count the EOS.

    0 up to max_new_tokens - buffer, then linear, 1 at max_new_tokens.
    """
    start = max_new_tokens - buffer
    return ((lengths.double() - start) / buffer).clamp(0.0, 1.0)

"""Curriculum: the success rate of a prompt decides how often it is dealt.

The policy gradient of a score of 0 or 1 has no signal if all completions of a prompt succeed or all fail. Foster and
Foerster 2025 (arXiv:2502.12272) sample prompts by the variance of success p (1 - p); Bae et al. 2025 (arXiv:2504.03380)
keep the prompts of intermediate success.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from rlhf.section import Choice, Fraction, Usual

if TYPE_CHECKING:
    from rlhf.algorithms.rescue import Rescue


class Curriculum(Choice):
    """The chance that a prompt is dealt, from its success rate in earlier steps; 1 if it was not dealt yet.

    Each prompt of a shuffled epoch is dealt with its chance, and passed over otherwise. The draws are keyed by the
    prompt's place in the endless sequence of epochs.
    """

    type: str
    solved_above: float = 0.0
    """A completion succeeds if its score after shaping is above this. With algorithm.rescue: the same as there."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of the earlier rate when a prompt is dealt again: rate = memory * rate + (1 - memory) * new share."""
    floor: Annotated[
        Fraction,
        Usual(
            low=0.01,
            rule="curriculum-floor",
            reason="A prompt that was solved, or failed, by chance is hardly dealt again, so its rate stays as it was.",
            source="Rutherford et al. 2024 (SFL): some tasks drawn uniformly",
            fix="algorithm.curriculum.floor=0.1",
        ),
    ] = 0.1
    """Least chance of a prompt, so that its rate does not become outdated."""

    def worth(self, rate: float) -> float:
        """Return from 0 to 1 how much a prompt of this success rate is worth."""
        raise NotImplementedError

    def chance(self, rate: float | None) -> float:
        """Return the probability that a prompt is dealt; `rate` is None if it has none yet."""
        return 1.0 if rate is None else max(self.floor, min(self.worth(rate), 1.0))

    def updated(self, rate: float | None, share: float) -> float:
        """Return a prompt's success rate after a step in which this share of its completions succeeded."""
        return share if rate is None else self.memory * rate + (1 - self.memory) * share

    def check_run(self, *, is_plain: bool) -> None:
        """Check that there are prompts whose rates can be followed."""
        if not is_plain:
            raise ValueError(
                "algorithm.curriculum follows the prompts of one data set that is read whole: give data.prompts a "
                "path, without sources and stream"
            )

    def check_rescue(self, rescue: Rescue) -> None:
        """Check that both mean the same by a success."""
        if self.solved_above != rescue.solved_above:
            raise ValueError(
                f"algorithm.curriculum.solved_above is {self.solved_above}, and algorithm.rescue.solved_above is "
                f"{rescue.solved_above}: set both to the same score"
            )


class VarianceCurriculum(Curriculum):
    """The variance of success, 4 p (1 - p): most for prompts that half of the completions solve."""

    type: Literal["variance"] = "variance"

    def worth(self, rate: float) -> float:
        """Compute 4 p (1 - p)."""
        return 4 * rate * (1 - rate)


class BandCurriculum(Curriculum):
    """Prompts whose success rate is in a band are dealt, others with the least chance."""

    type: Literal["band"] = "band"
    low: Fraction = 0.2
    """The lowest rate in the band."""
    high: Fraction = 0.8
    """The highest rate in the band."""

    def worth(self, rate: float) -> float:
        """Return 1 in the band, 0 outside."""
        return float(self.low <= rate <= self.high)

    @model_validator(mode="after")
    def _check_band(self) -> BandCurriculum:
        if self.low > self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}: low has to be the smaller")
        return self

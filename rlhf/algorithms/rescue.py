"""Rescue: prompts that a whole group fails at are sampled again with a hint, and replayed later.

Nath et al. 2025 (Guide, arXiv:2506.13923) do this for groups that fail; Yan et al. 2025 (LUFFY, arXiv:2504.14945) mix
completions of a teacher into groups. The equations of the weights are in rlhf.algo.correction and rlhf.algo.selection.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from rlhf.section import Choice, OneOf, Positive, Section

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

MOST_HINTS = 4  # each has a metric of its own
LARGEST_VALUE_WEIGHT = 10.0  # of a token in the critic's loss
_PLACES = ("{prompt}", "{hint}")


class Hint(Section):
    """A text of the prompt's row, put into the prompt for one more round of sampling."""

    column: Annotated[str, Field(min_length=1)]
    """The data column with the text: a hint or a teacher's answer."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the text's words to show, from the beginning."""
    template: str = "{prompt}\n\nHint: {hint}"
    """The new prompt (in a conversation, the last user message). Contains {prompt} and {hint} once each."""

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        if any(template.count(place) != 1 for place in _PLACES):
            raise ValueError('the template must have {prompt} and {hint}, once each, such as "{prompt} Hint: {hint}"')
        return template

    def add_to(self, prompt: str, text: str) -> str:
        """Return the prompt with this hint, of which `text` is the whole column; words keep the space between them."""
        words = re.findall(r"\s*\S+", text)
        shown = "".join(words[: max(1, round(self.share * len(words)))]).strip()
        values = {"{prompt}": prompt, "{hint}": shown}
        return re.sub(r"\{prompt\}|\{hint\}", lambda place: values[place[0]], self.template)


class HintWeights(Choice):
    """Weights of the tokens that were sampled with a hint, which the plain prompt gives other probabilities."""

    def weigh(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the weight of every token in the mask, from its log-probabilities without and with the hint.

        It is 1 outside the mask.
        """
        raise NotImplementedError

    def weigh_values(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the weight that every token in the mask has in the critic's loss; 1 outside the mask.

        The critic learns the return of the plain prompt. A return that was reached with the hint counts by the ratio
        of its rest, which makes the weighted mean of the returns from a state the plain one.
        """
        from rlhf.algo.selection import rest_importance

        return rest_importance(logprobs, sampler_logprobs, mask, cap=LARGEST_VALUE_WEIGHT)


class TokenWeights(HintWeights):
    """Truncated weights per token: low variance, some bias (as in Guide, Nath et al. 2025)."""

    type: Literal["token"] = "token"
    cap: Positive = 2.0
    """Maximum weight of a token."""

    def weigh(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute weights that correct the choice of each token, given those before it.

        The tokens before it stay as drawn with the hint, which is the bias of these weights.
        """
        from rlhf.algo.correction import token_ratios, truncated

        return truncated(token_ratios(logprobs, sampler_logprobs, mask), self.cap).masked_fill(~mask, 1.0)


class SequenceWeights(HintWeights):
    """Truncated weights per completion: unbiased below the cap, but tiny if the plain prompt fails."""

    type: Literal["sequence"] = "sequence"
    cap: Positive = 2.0
    """Maximum weight of a completion."""

    def weigh(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute weights that correct the choice of the whole completion, the same at each of its tokens."""
        from rlhf.algo.correction import sequence_ratios, truncated

        return truncated(sequence_ratios(logprobs, sampler_logprobs, mask), self.cap).masked_fill(~mask, 1.0)

    def weigh_values(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the same weights: the critic's expected loss is then the same as with plain sampling."""
        return self.weigh(logprobs, sampler_logprobs, mask)


class ShapedWeights(HintWeights):
    """Weights per token after LUFFY's policy shaping (Yan et al. 2025), largest at a ratio of gamma."""

    type: Literal["shaped"] = "shaped"
    gamma: Positive = 0.1
    """The ratio with the largest weight, 1/4; smaller values favor less likely tokens."""

    def weigh(
        self, logprobs: Float[Tensor, "B T"], sampler_logprobs: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute for each token the factor that policy shaping gives its gradient."""
        from rlhf.algo.selection import shaped_importance

        return shaped_importance(logprobs, sampler_logprobs, mask, gamma=self.gamma)


class ReplayConfig(Section):
    """Replays of unsolved prompts, in place of new ones, in later steps."""

    limit: Annotated[int, Field(ge=0)] = 3
    """Replays of a prompt before it is given up until the next epoch; 0: no replays."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Maximum share of a step's prompts that are replays (at least one prompt)."""
    until: Literal["plain", "hinted"] = "plain"
    """End of a prompt's replays. plain: a completion without a hint succeeds; hinted: any completion succeeds."""

    def per_step(self, prompts: int) -> int:
        """Return how many of a step's `prompts` may be replays."""
        return max(1, int(self.share * prompts))


class Rescue(Section):
    """Resample prompts without a successful completion, adding a hint to the prompt."""

    hints: Annotated[list[Hint], Field(min_length=1, max_length=MOST_HINTS)]
    """Hints from weakest to strongest; one round of sampling each, for prompts that still fail."""
    solved_above: float = 0.0
    """A completion succeeds if its score after shaping is above this; a group fails without a success."""
    hinted_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a group sampled with the hint, replacing as many failures: at least one of each; the
    completion of a group of one is sampled with it."""
    after: Annotated[int, Field(ge=0)] = 0
    """The steps that give a prompt a hint. 0: the step in which its whole group fails. N: every step after its
    completions without a hint have failed in N steps in a row, the next hint each time. This is decided before
    completions are drawn, so that weights of type sequence keep the expected gradient."""
    weights: Annotated[HintWeights, OneOf("token")] = TokenWeights()
    """Importance weights of hinted completions in the loss of the prompt without the hint."""
    replay: ReplayConfig = ReplayConfig()
    """Replays of unsolved prompts in later steps."""

    def hinted_per_group(self, group_size: int) -> int:
        """Return how many completions of a group are sampled with the hint: of a group of one, that one."""
        return min(max(1, group_size - 1), max(1, round(self.hinted_share * group_size)))

    def due(self, failures: int) -> int:
        """Return the hint (from 1) of a prompt that failed in so many steps in a row; 0: none before it fails again."""
        if self.after == 0 or failures < self.after:
            return 0
        return min(failures - self.after + 1, len(self.hints))

    def check_run(self, old_log_probs: str, first_tokens: int | None, *, is_plain: bool) -> None:
        """Check that the run computes log-probabilities under the plain prompt, and has prompts to add hints to."""
        if old_log_probs == "sampler":
            raise ValueError(
                "algorithm.rescue needs log-probabilities under the prompt without the hint, which the sampler does "
                "not have: set sampling.old_log_probs=auto"
            )
        if not is_plain:
            raise ValueError(
                "algorithm.rescue replays the prompts of one data set that is read whole: give data.prompts a path, "
                "without sources and stream"
            )
        if first_tokens is not None:
            raise ValueError(
                "algorithm.rescue adds hints to whole prompts, but data.prompts.first_tokens cuts texts into prompts: "
                "leave one of the two out"
            )

"""The rescue section: prompts that a whole group fails at are sampled again with a hint, and replayed later."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from rlhf.config.base import Section, type_discriminator

MOST_HINTS = 4  # each has a metric of its own
Positive = Annotated[float, Field(gt=0)]
_PLACES = ("{prompt}", "{hint}")


class Hint(Section):
    """A text of the prompt's row, put into the prompt for one more round of sampling."""

    column: Annotated[str, Field(min_length=1)]
    """The column of the data row that has the text: a hint, or a teacher's answer."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How much of the text is shown: this first share of its words."""
    template: str = "{prompt}\n\nHint: {hint}"
    """What the prompt becomes; of a conversation, its last user message. Must have {prompt} and {hint}, once each."""

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


class TokenWeights(Section):
    """Weights by token, truncated: little variance, some bias (as Guide, Nath et al. 2025)."""

    type: Literal["token"] = "token"
    cap: Positive = 2.0
    """Largest weight of a token."""


class SequenceWeights(Section):
    """Weights by whole completion, truncated: unbiased below the cap, but tiny where the plain prompt fails."""

    type: Literal["sequence"] = "sequence"
    cap: Positive = 2.0
    """Largest weight of a completion."""


class ShapedWeights(Section):
    """Weights by token after LUFFY's policy shaping (Yan et al. 2025): the largest at a ratio of gamma, not at 1."""

    type: Literal["shaped"] = "shaped"
    gamma: Positive = 0.1
    """The ratio that gets the most weight, 1/4: smaller lets less likely tokens speak louder."""


HintWeights = TokenWeights | SequenceWeights | ShapedWeights


class ReplayConfig(Section):
    """Prompts that stay unsolved take the place of fresh ones in later steps."""

    limit: Annotated[int, Field(ge=0)] = 3
    """Replays of a prompt before it is given up (until the data reach it again); 0: no replays."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest share of a step's prompts that may be replays; at least one may."""
    until: Literal["plain", "hinted"] = "plain"
    """What ends a prompt's replays. plain: a completion without a hint succeeds; hinted: one with a hint is enough."""

    def per_step(self, prompts: int) -> int:
        """Return how many of a step's `prompts` may be replays."""
        return max(1, int(self.share * prompts))


class Rescue(Section):
    """Help for prompts of which no completion succeeds, where a group algorithm has nothing to learn from."""

    hints: Annotated[list[Hint], Field(min_length=1, max_length=MOST_HINTS)]
    """One round of sampling for each, in this order, for the prompts that failed so far: the weakest hint first."""
    solved_above: float = 0.0
    """A completion succeeds if its score, after shaping, is above this; a group fails if none does."""
    hinted_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a group that is sampled with the hint, and takes the place of as many failures; at least one each."""
    weights: Annotated[
        Annotated[TokenWeights, Tag("token")]
        | Annotated[SequenceWeights, Tag("sequence")]
        | Annotated[ShapedWeights, Tag("shaped")],
        Discriminator(type_discriminator("token")),
    ] = TokenWeights()
    """How completions that were sampled with a hint are weighted when the prompt without it learns from them."""
    replay: ReplayConfig = ReplayConfig()
    """Replays of unsolved prompts in later steps."""

    def hinted_per_group(self, group_size: int) -> int:
        """Return how many completions of a group of at least 2 are sampled with the hint."""
        return min(group_size - 1, max(1, round(self.hinted_share * group_size)))

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

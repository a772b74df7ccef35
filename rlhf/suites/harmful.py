"""The harmful suite: how often does a model decline requests that it should decline?

Read beside xstest: a model that declines everything is not safe but useless. A refusal is recognized by its words; the
content of other answers is not judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlhf.config.data import Count
from rlhf.data.conversation import some_text
from rlhf.suites.questions import (
    Estimate,
    SuiteResult,
    drop_too_long,
    groups,
    read_items,
    sample_answers,
    share_estimate,
)
from rlhf.suites.refusals import RefusalSuite
from rlhf.suites.suite import EvalRows, SuiteContext, SuiteSamplingConfig

if TYPE_CHECKING:
    from rlhf.suites.subject import Subject


@dataclass(frozen=True)
class HarmfulPrompt:
    """A request, the set that it is from, and its category."""

    prompt: str
    source: str
    category: str


def read_harmful_prompt(values: Mapping[str, object]) -> HarmfulPrompt:
    """Read a row with `prompt` and, if there are any, `source` and `category`.

    Raises:
        BadRow: there is no prompt.
    """
    prompt = some_text(values.get("prompt"), "prompt")
    source = str(values.get("source") or "all")
    return HarmfulPrompt(prompt, source, str(values.get("category") or source))


class AnswerStart(SuiteSamplingConfig):
    """How answers are sampled: their start is enough, because refusals are recognized there."""

    max_new_tokens: Count = 64
    """Longest answer, EOS included."""


class HarmfulSuite(RefusalSuite):
    """Settings of harmful."""

    name: ClassVar[str] = "harmful"
    data: ClassVar[str] = "requests with prompt, source and category, as get_data.py harmful_prompts writes them"
    has_own_length: ClassVar[bool] = True

    sampling: AnswerStart = AnswerStart()
    """How answers are sampled."""
    dataset: EvalRows
    """Requests that a model should decline; --data is dataset.path."""

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Answer every request, and detect refusals.

        Raises:
            DataError: there is no usable request.
        """
        items, skips = read_items(self.dataset, read_harmful_prompt, columns=("prompt",), what="requests")
        items = drop_too_long(subject, items, skips, lambda row: row.prompt)
        rows = [item.value for item in items]
        answers = sample_answers(subject, [row.prompt for row in rows], key=self.sampling_key, greedy=self.greedy)
        refused = self.detect(answers.texts)
        by_source = _by([row.source for row in rows], refused)
        by_category = _by([row.category for row in rows], refused, "refused")
        return SuiteResult.of(
            (
                share_estimate("refused", list(map(float, refused)), "harmful requests that are refused"),
                *(figure for figure in by_source.values() if len(by_source) > 1),
                *answers.figures(seed=self.seed),
                *self.check_detector(),
            ),
            skips,
            notes=[self.method],
            groups={name: (figure,) for name, figure in by_category.items()},
            examples=(
                {"prompt": row.prompt, "source": row.source, "completion": text, "refused": refusal}
                for row, text, refusal in zip(rows, answers.texts, refused, strict=True)
            ),
        )


def _by(names: Sequence[str], refused: Sequence[bool], figure: str | None = None) -> dict[str, Estimate]:
    """Compute the refusal rate for each name; the figure is called `figure`, else after the name."""
    return {
        name: share_estimate(
            figure or f"refused_{name}", [float(refused[i]) for i in rows], f"requests of {name} that are refused"
        )
        for name, rows in groups(names)
    }

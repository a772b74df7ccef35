"""The lab suite: the lab's gold reward and its parts, on prompts that no run was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlhf.data.conversation import some_text
from rlhf.data.rows import BadRow, RowCounts
from rlhf.errors import RewardError
from rlhf.lab.gold import gold_parts, parse_prompt
from rlhf.suites.questions import (
    MAX_NEW_TOKENS_KEY,
    Estimate,
    Item,
    NotMeasured,
    SuiteResult,
    exclude,
    mean_estimate,
    read_items,
    too_long,
    win_rate_estimate,
)
from rlhf.suites.suite import EvalRows, Suite, SuiteContext, models_named

if TYPE_CHECKING:
    from rlhf.suites.subject import Subject

EXAMPLES = 8


@dataclass(frozen=True)
class _GoldScores:
    """A model's answers, and the parts of the gold reward of each."""

    texts: list[str]
    parts: list[dict[str, float]]

    @property
    def totals(self) -> list[float]:
        """Return the gold reward of every answer."""
        return [sum(parts.values()) for parts in self.parts]


class LabPrompts(EvalRows):
    """Prompts of the lab."""

    path: str = "lab:eval_prompts.jsonl"
    """File, folder or hub id; default: the held-out prompts."""


class LabSuite(Suite):
    """Settings of lab."""

    name: ClassVar[str] = "lab"
    data: ClassVar[str] = "prompts of the lab"

    dataset: LabPrompts = LabPrompts()
    """Prompts of the lab; --data is dataset.path."""
    reference: str | None = None
    """Folder or hub id of the model to compare with."""

    def models(self) -> Iterator[tuple[str, str]]:
        """Yield the model to compare with."""
        yield from models_named(reference=self.reference)

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Score answers by the gold reward, and compare them with the answers of `reference`.

        Raises:
            DataError: there is no usable prompt.
        """
        reference = None if self.reference is None else context.load(self.reference)
        items, skips = read_items(self.dataset, _read_prompt, columns=("prompt",), what="prompts of the lab")
        prompts, ids = self._encode(items, skips, subject)
        answers = self._sample_and_score(subject, prompts, ids)
        figures = [mean_estimate("gold", answers.totals, "true reward of the model's answers", seed=self.seed)]
        if reference is not None:
            start = self._sample_and_score(reference, prompts, ids)
            figures += _comparison(answers.totals, start.totals, self.seed)
        figures += [
            mean_estimate(f"gold_{part}", [parts[part] for parts in answers.parts], f"its part {part}", seed=self.seed)
            for part in answers.parts[0]
        ]
        examples = zip(prompts[:EXAMPLES], answers.texts, answers.totals, answers.parts, strict=False)
        no_reference = NotMeasured("win rate over the start model", "no reference: set reference=PATH")
        return SuiteResult.of(
            figures,
            skips,
            left_out=[] if reference else [no_reference],
            examples=({"prompt": p, "completion": t, "gold": g, "parts": parts} for p, t, g, parts in examples),
        )

    def _encode(self, items: list[Item[str]], skips: RowCounts, subject: Subject) -> tuple[list[str], list[list[int]]]:
        """Return the prompts that fit into the model's context with an answer, and their token ids."""
        from rlhf.data.templates import Rendered

        encoded = subject.encoder.prompts([Rendered(item.value, (), templated=False) for item in items])
        by_id = {id(item): ids for item, ids in zip(items, encoded, strict=True)}
        room = self.sampling.max_new_tokens
        kept = exclude(items, skips, lambda item: too_long(subject, len(by_id[id(item)]), room, of=MAX_NEW_TOKENS_KEY))
        return [item.value for item in kept], [by_id[id(item)] for item in kept]

    def _sample_and_score(self, model: Subject, prompts: Sequence[str], ids: Sequence[list[int]]) -> _GoldScores:
        """Sample one answer to every prompt and score it by the gold reward."""
        texts = model.texts(model.sample(ids, prompts, key=self.sampling_key))
        return _GoldScores(texts, [gold_parts(prompt, text) for prompt, text in zip(prompts, texts, strict=True)])


def _comparison(totals: Sequence[float], start: Sequence[float], seed: int) -> list[Estimate]:
    """Compare the gold rewards with the gold rewards of the reference's answers."""
    differences = [a - b for a, b in zip(totals, start, strict=True)]
    worth_more = "the model's answer is worth more; a tie counts half"
    return [
        mean_estimate("gold_start", start, "true reward of the start model's answers", seed=seed),
        mean_estimate(
            "gold_difference", differences, "the model's less the start model's, prompt by prompt", seed=seed
        ),
        win_rate_estimate("win_rate_start", totals, start, worth_more, seed=seed),
    ]


def _read_prompt(values: Mapping[str, object]) -> str:
    """Read the prompt of a row.

    Raises:
        BadRow: there is no prompt, or it names none of the lab's topics.
    """
    prompt = some_text(values.get("prompt"), "prompt")
    try:
        parse_prompt(prompt)
    except RewardError as error:
        raise BadRow("not a prompt of the lab: it names none of its topics") from error
    return prompt

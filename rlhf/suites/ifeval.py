"""The ifeval suite: instructions that a program can check (Zhou et al. 2023), by strict and loose accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import model_validator

from rlhf.config.data import Count
from rlhf.constraints.checks import require_langdetect
from rlhf.constraints.reward import ARGUMENTS_COLUMN, KIND_COLUMN, Compliance, Constraint, read_constraints, verify
from rlhf.data.conversation import some_text
from rlhf.data.rows import BadRow
from rlhf.rewards.source import Source
from rlhf.section import OneOf
from rlhf.suites.questions import (
    Answers,
    Estimate,
    Item,
    SuiteResult,
    drop_too_long,
    pick_best,
    ratio_estimate,
    read_items,
    sample_answers,
    share_estimate,
)
from rlhf.suites.suite import AnswerSuite, EvalRows, SuiteContext, SuiteSamplingConfig, models_named

if TYPE_CHECKING:
    from rlhf.suites.subject import Subject


@dataclass(frozen=True)
class Instruction:
    """A prompt and the constraints that it states."""

    prompt: str
    constraints: list[Constraint]


def read_instruction(values: Mapping[str, object]) -> Instruction:
    """Read a row with `prompt`, `instruction_id_list` and `kwargs`.

    Raises:
        BadRow: a column is missing or malformed, or a kind of instruction is unknown.
    """
    prompt = some_text(values.get("prompt"), "prompt")
    try:
        return Instruction(prompt, read_constraints(values))
    except ValueError as error:
        raise BadRow("no constraints that can be checked", str(error)) from error


class IfevalSuite(AnswerSuite):
    """Settings of ifeval."""

    name: ClassVar[str] = "ifeval"
    data: ClassVar[str] = "prompts with instruction_id_list and kwargs, as IFEval's"

    sampling: SuiteSamplingConfig = SuiteSamplingConfig(max_new_tokens=512)
    """How answers are sampled."""
    dataset: EvalRows
    """Prompts with instruction_id_list and kwargs; --data is dataset.path."""
    best_of: Count = 1
    """Sample this many answers to each prompt and keep the one that `source` scores highest."""
    source: Annotated[Source, OneOf()] | None = None
    """The source that picks the best answer if best_of is above 1; null: the run's judge or reward, if it has one."""

    @model_validator(mode="after")
    def _check_source(self) -> IfevalSuite:
        """Check that something picks the best answer if several are sampled."""
        if self.best_of > 1 and self.source is None:
            raise ValueError(f"best_of is {self.best_of}, but nothing picks the best: set source")
        return self

    @classmethod
    def check_installed(cls) -> None:
        """Check that langdetect is installed."""
        require_langdetect()

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Return the source if it picks nothing, and the seed if the answers are the most likely ones."""
        if self.best_of > 1:
            return ()
        return ("source", "seed") if self.greedy else ("source",)

    def models(self) -> Iterator[tuple[str, str]]:
        """Yield the reward model, if it picks the best of several answers."""
        yield from models_named(source=self.source if self.best_of > 1 else None)

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Answer every prompt and check which instructions the answer follows.

        Raises:
            DataError: there is no usable prompt.
        """
        columns = ("prompt", KIND_COLUMN, ARGUMENTS_COLUMN)
        items, skips = read_items(self.dataset, read_instruction, columns=columns, what="prompts with constraints")
        items = drop_too_long(subject, items, skips, lambda instruction: instruction.prompt)
        answers = self._answer(items, subject, context)
        verdicts = [verify(item.value.constraints, text) for item, text in zip(items, answers.texts, strict=True)]
        return SuiteResult.of(
            [*_accuracies(verdicts, seed=self.seed), *answers.figures(seed=self.seed)],
            skips,
            groups=_by_kind(items, verdicts),
            examples=(_record(i, item, answers, verdicts[i]) for i, item in enumerate(items)),
        )

    def _answer(self, items: Sequence[Item[Instruction]], subject: Subject, context: SuiteContext) -> Answers:
        """Answer every prompt, with the best of `best_of` answers if these are several."""
        pick = None
        if self.best_of > 1 and self.source is not None:
            source = context.build_source(self.source)
            pick = pick_best(source, [item.row.values for item in items], self.best_of)
        questions = [item.value.prompt for item in items]
        return sample_answers(
            subject, questions, key=self.sampling_key, greedy=self.greedy, count=self.best_of, pick=pick
        )


def _accuracies(verdicts: Sequence[Compliance], *, seed: int) -> list[Estimate]:
    """Compute strict and loose accuracy, by prompt and by instruction."""
    strict, loose = [verdict.strict for verdict in verdicts], [verdict.loose for verdict in verdicts]
    by_prompt = "prompts of which every instruction is followed"
    by_instruction = "instructions followed; the interval is over prompts"
    return [
        share_estimate("prompt_strict", [float(all(row)) for row in strict], by_prompt),
        ratio_estimate("instruction_strict", strict, by_instruction, seed=seed),
        share_estimate("prompt_loose", [float(all(row)) for row in loose], f"{by_prompt}, loosely"),
        ratio_estimate("instruction_loose", loose, f"{by_instruction}; loosely", seed=seed),
    ]


def _by_kind(items: Sequence[Item[Instruction]], verdicts: Sequence[Compliance]) -> dict[str, tuple[Estimate, ...]]:
    """Compute the accuracy on every kind of instruction, the most frequent kind first."""
    strict: dict[str, list[float]] = {}
    loose: dict[str, list[float]] = {}
    for item, verdict in zip(items, verdicts, strict=True):
        for constraint, followed, loosely in zip(item.value.constraints, verdict.strict, verdict.loose, strict=True):
            strict.setdefault(constraint.kind, []).append(float(followed))
            loose.setdefault(constraint.kind, []).append(float(loosely))
    return {
        kind: (
            share_estimate("strict", strict[kind], "instructions of this kind that are followed"),
            share_estimate("loose", loose[kind], "the same, loosely"),
        )
        for kind in sorted(strict, key=lambda kind: (-len(strict[kind]), kind))
    }


def _record(i: int, item: Item[Instruction], answers: Answers, verdict: Compliance) -> dict[str, object]:
    return {
        "prompt": item.value.prompt,
        "completion": answers.texts[i],
        "instructions": [constraint.kind for constraint in item.value.constraints],
        "strict": list(verdict.strict),
        "loose": list(verdict.loose),
        "length": answers.lengths[i],
        "truncated": answers.truncated[i],
    }

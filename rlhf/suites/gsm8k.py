"""GSM8K: grade-school mathematics; the final answer is looked up in the text and compared as a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from rlhf.config.data import Count, DatasetConfig
from rlhf.data.conversation import describe_value, some_text
from rlhf.data.rows import BadRow
from rlhf.errors import ConfigError
from rlhf.suites.metrics import compute
from rlhf.suites.questions import (
    MAX_NEW_TOKENS_KEY,
    Estimate,
    Item,
    SuiteResult,
    exclude,
    mean_estimate,
    read_items,
    share_estimate,
    too_long,
)
from rlhf.suites.suite import EvalRows, Suite, SuiteContext, SuiteSamplingConfig, fill, require_question
from rlhf.verifiers.numeric_answers import expected_answer

if TYPE_CHECKING:
    from rlhf.data.templates import Rendered
    from rlhf.suites.subject import Subject

COLUMNS = ("question", "answer")
EXAMPLES = 8
_MARKS = re.compile(r"<<[^<>]*>>")  # calculator annotations in GSM8K's solutions


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution, and the number the solution ends in."""

    question: str
    solution: str
    expected: Fraction


def read_problem(values: Mapping[str, object]) -> Problem:
    """Read a problem from the columns of its row.

    Raises:
        BadRow: there is no question, or the solution does not end in `#### number`.
    """
    solution = some_text(values.get("answer"), "answer")
    expected = expected_answer(solution)
    if expected is None:
        raise BadRow("the answer does not end in #### and a number", describe_value(solution[-30:]))
    return Problem(some_text(values.get("question"), "question"), solution, expected)


class Gsm8kSuite(Suite):
    """Settings of gsm8k."""

    name: ClassVar[str] = "gsm8k"
    data: ClassVar[str] = "problems with question and an answer that ends in #### and a number"

    sampling: SuiteSamplingConfig = SuiteSamplingConfig(max_new_tokens=256)
    """How solutions are sampled."""
    dataset: EvalRows
    """Problems; --data is dataset.path."""
    samples: Count = 1
    """Solutions of each problem."""
    k: list[Count] = [1]
    """Report pass@k for these k; none above `samples`."""
    greedy: bool | None = None
    """The most likely token each time; null: only if samples is 1."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Solved examples before the question."""
    examples: DatasetConfig | None = None
    """The source of the examples; null: the train split of the folder in dataset.path."""
    template: str = "Question: {question}\nAnswer:"
    """A problem; examples follow it with a space and their solution, a blank line between them."""
    announced_only: bool = False
    """Count an answer only if it is announced (####, boxed, "the answer is")."""
    stop: list[str] = ["\nQuestion:"]
    """A solution ends before the first of these texts."""

    @model_validator(mode="after")
    def _check_samples(self) -> Gsm8kSuite:
        """Check the template, and that `k` and `greedy` fit `samples`."""
        require_question(self.template)
        if max(self.k, default=1) > self.samples:
            raise ValueError(f"k: pass@{max(self.k)} needs samples={max(self.k)} or more (samples is {self.samples})")
        if self.greedy and self.samples > 1:
            raise ValueError("greedy: samples of a problem would all be the same; set greedy=false or samples=1")
        return self

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Sample solutions of every problem and compare their final answers.

        Raises:
            DataError: there is no usable problem.
            ConfigError: there are fewer examples than `shots`.
        """
        shown = self._read_examples()
        items, skips = read_items(self.dataset, read_problem, columns=COLUMNS, what="problems with answers")
        shown_already = {problem.question for problem in shown}
        repeated = BadRow("one of the examples")
        items = exclude(items, skips, lambda item: repeated if item.value.question in shown_already else None)
        prompts = {id(item): self._render(subject, item.value, shown) for item in items}
        room = self.sampling.max_new_tokens
        items = exclude(
            items, skips, lambda item: too_long(subject, len(prompts[id(item)][1]), room, of=MAX_NEW_TOKENS_KEY)
        )
        texts = self._sample_solutions(subject, [prompts[id(item)] for item in items])
        references = [item.value.solution for item in items for _ in range(self.samples)]
        graded = compute("gsm8k_exact", predictions=texts, references=references, announced_only=self.announced_only)
        examples = (self._example(i, item, texts, graded) for i, item in enumerate(items[:EXAMPLES]))
        return SuiteResult.of(self._figures(graded), skips, examples=examples)

    def _read_examples(self) -> list[Problem]:
        """Read the few-shot examples: `shots` problems of `examples`, by default of the data set's train split.

        Raises:
            ConfigError: no source of examples is configured, or it has too few.
        """
        if not self.shots:
            return []
        source = self.examples
        if source is None:
            if Path(self.dataset.path).expanduser().is_file():
                raise ConfigError("shots: name a file of examples with examples.path; dataset.path is a single file")
            source = self.dataset.model_copy(update={"split": "train"})
        config = DatasetConfig.model_validate({**source.model_dump(), "limit": self.shots})
        items, _ = read_items(config, read_problem, columns=COLUMNS, what="problems with answers")
        if len(items) < self.shots:
            raise ConfigError(f"shots is {self.shots}, but {source.path} has only {len(items)} usable examples")
        return [item.value for item in items]

    def _render(self, subject: Subject, problem: Problem, examples: Sequence[Problem]) -> tuple[Rendered, list[int]]:
        """Render a problem after its few-shot examples; return the prompt and its token ids."""
        solved = [
            f"{fill(self.template, question=p.question)} {_MARKS.sub('', p.solution).strip()}\n\n" for p in examples
        ]
        rendered = subject.render_question("".join(solved) + fill(self.template, question=problem.question))
        return rendered, subject.encoder.prompts([rendered])[0]

    def _sample_solutions(self, subject: Subject, prompts: Sequence[tuple[Rendered, list[int]]]) -> list[str]:
        """Sample the solutions of each problem; the solutions of one problem are adjacent."""
        from rlhf.suites.subject import cut_at_stop

        completions = subject.sample(
            [ids for _, ids in prompts],
            [rendered.prompt for rendered, _ in prompts],
            key=self.sampling_key,
            count=self.samples,
            greedy=self.samples == 1 if self.greedy is None else self.greedy,
        )
        return [cut_at_stop(text, self.stop) for text in subject.texts(completions)]

    def _figures(self, graded: Mapping[str, Any]) -> list[Estimate]:
        """Compute pass@k for every k, and the rates of announced and of missing answers."""
        ks = sorted(set(self.k))
        solved = "problems solved"
        if self.samples > 1:
            solved = "problems that at least one of {} solutions solves, estimated"
        passed = compute("pass_at_k", predictions=self._by_problem(graded["right"]), k=ks)
        announced = self._by_problem(graded["announced"])
        missing = self._by_problem([answer is None for answer in graded["answers"]])
        announces = 'solutions that announce their answer: ####, boxed, "the answer is"'
        return [
            *(self._figure(f"pass_at_{k}", passed[f"problems@{k}"], solved.format(k)) for k in ks),
            self._figure("announced_rate", self._shares(announced), announces),
            self._figure("no_answer_rate", self._shares(missing), "solutions without any number"),
        ]

    def _by_problem(self, verdicts: Sequence[bool]) -> list[list[bool]]:
        """Split the verdicts on all solutions by problem."""
        return [list(verdicts[start : start + self.samples]) for start in range(0, len(verdicts), self.samples)]

    def _shares(self, verdicts: Sequence[Sequence[bool]]) -> list[float]:
        return [sum(row) / self.samples for row in verdicts]

    def _figure(self, name: str, values: list[float], meaning: str) -> Estimate:
        """Build a figure: with one solution per problem the values are verdicts; with more, shares or estimates."""
        if self.samples == 1:
            return share_estimate(name, values, meaning)
        return mean_estimate(name, values, meaning, seed=self.seed, shares=True)

    def _example(
        self, i: int, item: Item[Problem], texts: Sequence[str], graded: Mapping[str, Any]
    ) -> dict[str, object]:
        first = i * self.samples
        return {
            "question": item.value.question,
            "solution": texts[first],
            "answer": graded["answers"][first],
            "expected": str(item.value.expected),
            "right": graded["right"][first],
        }

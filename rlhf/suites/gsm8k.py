"""GSM8K: grade-school mathematics, its answers found in text and compared as numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rlhf.config.data import DatasetConfig
from rlhf.data.conversation import describe_value, some_text
from rlhf.data.rows import BadRow
from rlhf.data.tokenizer import Rendered
from rlhf.errors import ConfigError
from rlhf.runtime.seeding import derive_seed
from rlhf.suites.figures import Estimate, SuiteResult, mean_estimate, pass_at_k, share_estimate, skipped_and_notes
from rlhf.suites.numeric_answers import Answer, expected_answer, final_answer
from rlhf.suites.questions import MAX_NEW_TOKENS_KEY, Item, exclude, read_items, too_long
from rlhf.suites.settings import Gsm8kSettings, fill
from rlhf.suites.subject import Subject, cut_at_stop

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


def run_gsm8k(settings: Gsm8kSettings, subject: Subject) -> SuiteResult:
    """Run the gsm8k suite: sample solutions of every problem and compare their final answers.

    Raises:
        DataError: there is no usable problem.
        ConfigError: there are fewer examples than `shots`.
    """
    examples = _examples(settings)
    items, skips = read_items(settings.dataset, read_problem, columns=COLUMNS, what="problems with answers")
    shown_already = {problem.question for problem in examples}
    repeated = BadRow("one of the examples")
    items = exclude(items, skips, lambda item: repeated if item.value.question in shown_already else None)
    prompts = {id(item): _render(subject, settings, item.value, examples) for item in items}
    room = settings.sampling.max_new_tokens
    items = exclude(
        items, skips, lambda item: too_long(subject, len(prompts[id(item)][1]), room, of=MAX_NEW_TOKENS_KEY)
    )
    answers = _sample_solutions(settings, subject, [prompts[id(item)] for item in items])
    graded = [
        [_is_correct(answer, item.value.expected, settings.announced_only) for _, answer in row]
        for item, row in zip(items, answers, strict=True)
    ]
    skipped, notes = skipped_and_notes(skips)
    return SuiteResult(
        figures=tuple(_figures(settings, graded, [answer for row in answers for _, answer in row])),
        n=len(items),
        skipped=skipped,
        notes=notes,
        examples=tuple(_example(*row) for row in zip(items[:EXAMPLES], answers, graded, strict=False)),
    )


def _examples(settings: Gsm8kSettings) -> list[Problem]:
    """Read the few-shot examples: `shots` problems of `examples`, by default of the data set's train split.

    Raises:
        ConfigError: no source of examples is configured, or it has too few.
    """
    if not settings.shots:
        return []
    source = settings.examples
    if source is None:
        if Path(settings.dataset.path).expanduser().is_file():
            raise ConfigError("shots: name a file of examples with examples.path; dataset.path is a single file")
        source = settings.dataset.model_copy(update={"split": "train"})
    config = DatasetConfig.model_validate({**source.model_dump(), "limit": settings.shots})
    items, _ = read_items(config, read_problem, columns=COLUMNS, what="problems with answers")
    if len(items) < settings.shots:
        raise ConfigError(f"shots is {settings.shots}, but {source.path} has only {len(items)} usable examples")
    return [item.value for item in items]


def _render(
    subject: Subject, settings: Gsm8kSettings, problem: Problem, examples: Sequence[Problem]
) -> tuple[Rendered, list[int]]:
    """Render a problem after its few-shot examples; return the prompt and its token ids."""
    solved = [
        f"{fill(settings.template, question=p.question)} {_MARKS.sub('', p.solution).strip()}\n\n" for p in examples
    ]
    rendered = subject.render_question("".join(solved) + fill(settings.template, question=problem.question))
    return rendered, subject.encoder.prompts([rendered])[0]


def _sample_solutions(
    settings: Gsm8kSettings, subject: Subject, prompts: Sequence[tuple[Rendered, list[int]]]
) -> list[list[tuple[str, Answer | None]]]:
    """Sample the solutions of each problem and extract the final answer of each solution."""
    greedy = settings.samples == 1 if settings.greedy is None else settings.greedy
    completions = subject.sample(
        [ids for _, ids in prompts],
        [rendered.prompt for rendered, _ in prompts],
        key=derive_seed(settings.seed, "gsm8k"),
        count=settings.samples,
        greedy=greedy,
    )
    texts = [cut_at_stop(text, settings.stop) for text in subject.texts(completions)]
    solved = [(text, final_answer(text)) for text in texts]
    return [solved[start : start + settings.samples] for start in range(0, len(solved), settings.samples)]


def _is_correct(answer: Answer | None, expected: Fraction, announced_only: bool) -> bool:
    """Check whether an answer is the expected number and, with `announced_only`, was announced."""
    return answer is not None and answer.value == expected and (answer.announced or not announced_only)


def _figures(
    settings: Gsm8kSettings, graded: Sequence[Sequence[bool]], answers: Sequence[Answer | None]
) -> list[Estimate]:
    """Compute pass@k for every k, and the rates of announced and of missing answers."""
    size = settings.samples

    def figure(name: str, values: list[float], meaning: str) -> Estimate:
        # With one solution per problem the values are verdicts; with more they are shares or estimates.
        return (
            share_estimate(name, values, meaning)
            if size == 1
            else mean_estimate(name, values, meaning, seed=settings.seed)
        )

    def rate(name: str, test: Callable[[Answer | None], bool], meaning: str) -> Estimate:
        rows = [answers[start : start + size] for start in range(0, len(answers), size)]
        return figure(name, [sum(map(test, row)) / size for row in rows], meaning)

    solved = "problems solved" if size == 1 else "problems that at least one of {} solutions solves, estimated"
    return [
        *(
            figure(f"pass_at_{k}", [pass_at_k(size, sum(row), k) for row in graded], solved.format(k))
            for k in sorted(set(settings.k))
        ),
        rate("announced_rate", _is_announced, 'solutions that announce their answer: ####, boxed, "the answer is"'),
        rate("no_answer_rate", _is_missing, "solutions without any number"),
    ]


def _is_announced(answer: Answer | None) -> bool:
    """Check whether a solution announces its answer."""
    return answer is not None and answer.announced


def _is_missing(answer: Answer | None) -> bool:
    """Check whether a solution has no number at all."""
    return answer is None


def _example(
    item: Item[Problem], solutions: Sequence[tuple[str, Answer | None]], verdicts: Sequence[bool]
) -> dict[str, object]:
    """Build the record of a problem and its first solution for the examples of the result."""
    text, answer = solutions[0]
    return {
        "question": item.value.question,
        "solution": text,
        "answer": None if answer is None else str(answer.value),
        "expected": str(item.value.expected),
        "right": verdicts[0],
    }

"""The lab suite: the lab's gold reward and its parts, on prompts that no run was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf.data.conversation import some_text
from rlhf.data.rows import BadRow
from rlhf.data.tokenizer import Rendered
from rlhf.errors import RewardError
from rlhf.lab.gold import gold_parts, parse_prompt
from rlhf.runtime.seeding import derive_seed
from rlhf.suites.questions import (
    MAX_NEW_TOKENS_KEY,
    Estimate,
    NotMeasured,
    SuiteResult,
    exclude,
    mean_estimate,
    read_items,
    skipped_and_notes,
    too_long,
    wins,
)
from rlhf.suites.settings import LabSettings
from rlhf.suites.subject import Subject

EXAMPLES = 8


@dataclass(frozen=True)
class _ScoredAnswers:
    """A model's answers, and the parts of the gold reward of each."""

    texts: list[str]
    parts: list[dict[str, float]]

    @property
    def totals(self) -> list[float]:
        """Return the gold reward of every answer."""
        return [sum(parts.values()) for parts in self.parts]


def run_lab(settings: LabSettings, subject: Subject, *, reference: Subject | None) -> SuiteResult:
    """Run the lab suite: score answers by the gold reward, and compare them with those of `reference`.

    Raises:
        DataError: there is no usable prompt.
    """
    items, skips = read_items(settings.dataset, _read_prompt, columns=("prompt",), what="prompts of the lab")
    encoded = subject.encoder.prompts([Rendered(item.value, (), templated=False) for item in items])
    by_id = {id(item): ids for item, ids in zip(items, encoded, strict=True)}
    room = settings.sampling.max_new_tokens
    items = exclude(items, skips, lambda item: too_long(subject, len(by_id[id(item)]), room, of=MAX_NEW_TOKENS_KEY))
    prompts, ids = [item.value for item in items], [by_id[id(item)] for item in items]
    answers = _sample_and_score(subject, prompts, ids, settings.seed)
    figures = [mean_estimate("gold", answers.totals, "true reward of the model's answers", seed=settings.seed)]
    figures += _comparison(answers, reference, prompts, ids, settings.seed)
    figures += [
        mean_estimate(f"gold_{part}", [parts[part] for parts in answers.parts], f"its part {part}", seed=settings.seed)
        for part in answers.parts[0]
    ]
    skipped, notes = skipped_and_notes(skips)
    left_out = () if reference else (NotMeasured("win rate over the start model", "no reference: set reference=PATH"),)
    examples = zip(prompts[:EXAMPLES], answers.texts, answers.totals, answers.parts, strict=False)
    return SuiteResult(
        tuple(figures),
        len(items),
        skipped,
        left_out,
        notes,
        examples=tuple({"prompt": p, "completion": t, "gold": g, "parts": parts} for p, t, g, parts in examples),
    )


def _sample_and_score(model: Subject, prompts: Sequence[str], ids: Sequence[list[int]], seed: int) -> _ScoredAnswers:
    """Sample one answer to every prompt and score it by the gold reward."""
    completions = model.sample(ids, prompts, key=derive_seed(seed, "lab"))
    texts = model.texts(completions)
    return _ScoredAnswers(texts, [gold_parts(prompt, text) for prompt, text in zip(prompts, texts, strict=True)])


def _comparison(
    answers: _ScoredAnswers, reference: Subject | None, prompts: Sequence[str], ids: Sequence[list[int]], seed: int
) -> list[Estimate]:
    """Compare the answers with those of the reference; no figures without one."""
    if reference is None:
        return []
    start = _sample_and_score(reference, prompts, ids, seed).totals
    outcomes = wins(answers.totals, start)
    differences = [a - b for a, b in zip(answers.totals, start, strict=True)]
    return [
        mean_estimate("gold_start", start, "true reward of the start model's answers", seed=seed),
        mean_estimate(
            "gold_difference", differences, "the model's less the start model's, prompt by prompt", seed=seed
        ),
        mean_estimate("win_rate_start", outcomes, "the model's answer is worth more; a tie counts half", seed=seed),
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

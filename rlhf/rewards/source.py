"""Reward sources: the family of their sections, the protocol of scorers, and the texts that most of them read.

A class below `Source` is a source that `reward.source.type` can name, in this package or in a user's module:

    class Shortness(Source):
        type: Literal["shortness"] = "shortness"
        is_learned: ClassVar[bool] = False  # a program counts the words

        def build(self, context: SourceContext) -> RewardSource: ...

In a distributed run every rank gets the same scores as a single process would.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from rlhf.errors import NonFiniteScores, RewardError
from rlhf.references import with_own_prompt
from rlhf.rewards.channels import final_message, writes_channels
from rlhf.section import Choice, Section, walk

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlhf.runtime.distributed import Distributed
    from rlhf.types import Completions, Scores


@runtime_checkable
class RewardSource(Protocol):
    """Anything that scores completions."""

    def __call__(self, completions: Completions) -> Scores:
        """Score each completion with one finite number, on the CPU.

        Raises:
            RewardError: the scores are NaN or infinite, of the wrong length, or could not be obtained.
        """


@dataclass(frozen=True, kw_only=True)
class SourceContext:
    """The objects that a source may need to be built."""

    tokenizer: PreTrainedTokenizerBase  # the policy's, in whose ids the completions are
    device: torch.device  # where models go
    ranks: Distributed  # the process group over which scoring can be divided
    warn: Callable[[str], None]  # receives messages for the user
    load_model: Callable[[Any, SourceContext], RewardSource]  # loads the model of a section of type model
    may_abstain: bool = False  # whether a score may be NaN, which leaves the completion to the others of an ensemble
    leaves_out: bool = False  # whether a completion that no verifier applies to may have the score NaN in the run, too

    def build(self, source: Source, *, may_abstain: bool) -> RewardSource:
        """Build a source, a member of another one too, so that it scores alike in a run of any number of processes."""
        built = source.build(replace(self, may_abstain=may_abstain))
        return MainRankReward(built, self.ranks) if source.asks_on_main_rank else built


class Source(Choice):
    """The source of scores; one of its members is chosen by `type`."""

    reads_episodes: ClassVar[bool] = False
    """Whether its scores are the rewards of the section `environment`."""
    asks_on_main_rank: ClassVar[bool] = True
    """Rank 0 alone asks for the scores of the whole batch. False: the result of `build` divides the work itself."""

    is_constant: ClassVar[bool] = False
    """Whether every completion has the same score, so that nothing can be learned from it."""

    @property
    @abstractmethod
    def is_learned(self) -> bool:
        """Return whether a model gives the scores, whose mistakes a policy can exploit; False for a program's check."""

    @abstractmethod
    def build(self, context: SourceContext) -> RewardSource:
        """Return the scorer of completions.

        Raises:
            UserError: it cannot be built; the message says why.
        """

    @property
    def standardizes_in_groups(self) -> bool:
        """Return whether the scores are standardized over the completions of a prompt, as in gdpo."""
        return False

    @property
    def critic_start(self) -> str | None:
        """Return the path of the reward model that a critic can start from; None without one."""
        return None

    def check(self) -> None:
        """Check, before a run and without loading a model, the things that the fields alone do not tell.

        Raises:
            UserError: the source could not be built; the message says why.
        """

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check, before the first step, the columns of the prompts' rows that choose how they are scored.

        Raises:
            UserError: a row cannot be scored.
        """

    def model_paths(self) -> Mapping[str, str]:
        """Return the path of each model that gives scores, by its field: it has to exist, and to stay the same."""
        return {}

    def code_files(self) -> Mapping[str, Path]:
        """Return the files of user code by their field; a run that resumes after a change of one warns."""
        return {}

    def describe(self) -> str:
        """Return the source in a few words, for a report."""
        return self.type

    @property
    def best_score(self) -> float | None:
        """Return the score of a right answer, for `rlhf reward-check`; None if it is not known."""
        return None

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """Return a completion that earns the best score of a row, for `rlhf reward-check`; None if none is known."""
        return None

    def for_check(self) -> Source:
        """Return the source as `rlhf reward-check` builds it."""
        return self


def sources_in(section: Section, key: str = "") -> Iterator[tuple[str, Source]]:
    """Yield every source in a section, itself and the sources in it included, with its key below `key`."""
    for path, inner in walk(section, key):
        if isinstance(inner, Source):
            yield path, inner


@runtime_checkable
class BatchDecoder(Protocol):
    """The part of a tokenizer that rewards use."""

    def batch_decode(
        self, sequences: list[list[int]], skip_special_tokens: bool = False, *, clean_up_tokenization_spaces: bool
    ) -> list[str]:
        """Decode each list of token ids to a text."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Prompts, completions and references as text; one entry per row."""

    prompts: list[str]
    completions: list[str]
    references: list[dict[str, Any]]

    def as_in_rows(self) -> Texts:
        """Return the texts with each prompt as its row has it, without chat template, also in `references`.

        A conversation, and a prompt that was cut, keep the text that the model reads.
        """
        references = [dict(with_own_prompt(row)) for row in self.references]
        own = [row.get("prompt") for row in references]
        prompts = [new if isinstance(new, str) else old for new, old in zip(own, self.prompts, strict=True)]
        return Texts(prompts=prompts, completions=self.completions, references=references)


def decode(completions: Completions, tokenizer: BatchDecoder) -> Texts:
    """Decode prompts and completions to text, without special tokens and without the final EOS of a completion.

    A prompt is the text of its row's "prompt" column if there is one, else its decoded tokens. A completion is the
    rest after the decoded prompt: many tokenizers drop a leading space, so its tokens decoded alone lack one. Of a
    completion in channels it is the final answer. Of an episode it is the actions, with a line break between two.
    """
    prompt_ids, completion_ids = unpadded_ids(completions)
    actions = [
        [((prompt + ids[:start])[-BEFORE:] if start else prompt, ids[start : end - ended]) for start, end in spans]
        for prompt, ids, spans, ended in zip(
            prompt_ids, completion_ids, _action_spans(completions), completions.finished.tolist(), strict=True
        )
    ]
    texts = iter(_texts_after([action for row in actions for action in row], tokenizer))
    references = [dict(reference) for reference in completions.references]
    return Texts(
        prompts=[_prompt_text(r, ids, tokenizer) for r, ids in zip(references, prompt_ids, strict=True)],
        completions=["\n".join(islice(texts, len(row))) for row in actions],
        references=references,
    )


BEFORE = 32  # tokens before a later action that are decoded with it: enough for a character that the seam splits


def _action_spans(completions: Completions) -> list[list[tuple[int, int]]]:
    """Return the beginning and end of every action of each row; without an environment of the whole completion."""
    rows: list[list[tuple[int, int]]] = []
    for turns in _unpadded(completions.turns, completions.completion_mask):
        runs = [(turn, len(list(run))) for turn, run in groupby(turns)]
        ends = list(accumulate(length for _, length in runs))
        rows.append([(end - length, end) for end, (turn, length) in zip(ends, runs, strict=True) if turn >= 0])
    return rows


def _texts_after(pairs: Sequence[tuple[list[int], list[int]]], tokenizer: BatchDecoder) -> list[str]:
    """Decode the second ids of each pair, as the text that they add to the text of the first."""
    if writes_channels(tokenizer):
        return [final_message(tokenizer, ids) for _, ids in pairs]
    texts = (
        _decode_all(ids, tokenizer)
        for ids in ([b for b, _ in pairs], [ids for _, ids in pairs], [b + ids for b, ids in pairs])
    )
    # A character split by the prompt's end decodes differently once complete: then the texts share no start.
    return [
        text.removeprefix(before) if text.startswith(before) else alone
        for before, alone, text in zip(*texts, strict=True)
    ]


def _decode_all(sequences: list[list[int]], tokenizer: BatchDecoder) -> list[str]:
    return tokenizer.batch_decode(sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def checked_scores(values: object, parts: object, texts: Texts, *, who: str, may_abstain: bool = False) -> Scores:
    """Convert the scores and parts that `who` returned to float32 tensors.

    With `may_abstain`, None and NaN mean that the source does not apply to the completion, and become NaN.

    Raises:
        RewardError: the scores or a part are not one number per completion.
        NonFiniteScores: a number is NaN, infinite, or outside of float32's range.
    """
    if not isinstance(parts, Mapping):
        raise RewardError(
            f"{who} returned parts of type {type(parts).__name__}; give a dict of name -> list of numbers"
        )
    from rlhf.types import Scores

    return Scores(
        values=_to_tensor(values, texts.completions, who=who, what="scores", may_abstain=may_abstain),
        parts={
            str(name): _to_tensor(
                part, texts.completions, who=who, what=f"values of part {name!r}", may_abstain=may_abstain
            )
            for name, part in parts.items()
        },
    )


def quoted(text: str, limit: int = 200) -> str:
    """Quote a text for an error message, cut to `limit` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def unpadded_ids(completions: Completions) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of every prompt and every completion without padding, EOS included."""
    prompts = _unpadded(completions.prompt_ids, completions.prompt_mask)
    return prompts, _unpadded(completions.completion_ids, completions.completion_mask)


def _unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[live].tolist() for row, live in zip(ids.cpu(), mask.cpu(), strict=True)]


def _prompt_text(reference: Mapping[str, Any], ids: list[int], tokenizer: BatchDecoder) -> str:
    prompt = reference.get("prompt")
    return prompt if isinstance(prompt, str) else _decode_all([ids], tokenizer)[0]


def _to_tensor(
    values: object, completions: list[str], *, who: str, what: str, may_abstain: bool
) -> Float[Tensor, " B"]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RewardError(f"{who} returned {type(values).__name__} for {what}; give a list of numbers")
    if len(values) != len(completions):
        detail = (
            f"; the first without one: {quoted(completions[len(values)])}" if len(values) < len(completions) else ""
        )
        raise RewardError(f"{who} returned {len(values)} {what} for {len(completions)} completions{detail}")
    numbers = [_to_float(value) for value in values]
    bad = [
        i
        for i, number in enumerate(numbers)
        if not math.isfinite(number) and not (may_abstain and _is_missing(values[i]))
    ]
    if bad:
        raise NonFiniteScores(
            f"{who} returned {len(bad)} {what} of {len(values)} that are not finite numbers; "
            f"the first is {quoted(str(values[bad[0]]))}, for the completion {quoted(completions[bad[0]])}"
            + ABSTENTION_HINT * (values[bad[0]] is None)
            + STRING_HINT * isinstance(values[bad[0]], str)
            + LIST_HINT * isinstance(values[bad[0]], list | tuple)
        )
    import torch

    return torch.tensor(numbers, dtype=torch.float32)


ABSTENTION_HINT = "; only a source in an ensemble may leave a completion to the others by returning None"

STRING_HINT = " (it is a string: return numbers, as in float(score))"

LIST_HINT = " (it is a list: return one number for each completion, as in scores.squeeze(-1))"


def _is_missing(value: object) -> bool:
    """Check whether a value says "does not apply": None or NaN."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value is None or (isinstance(value, float) and math.isnan(value))


def _to_float(value: object) -> float:
    """Convert a number to float; return NaN for a non-number or a value outside of float32's range.

    numpy's and torch's scalars are numbers.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, int | float):
        return math.nan
    import torch

    return float(value) if abs(value) <= torch.finfo(torch.float32).max else math.nan


class ShardedReward:
    """Wraps a source that scores each completion independently: every rank scores its share of the batch."""

    def __init__(self, source: RewardSource, ranks: Distributed) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """Score this rank's share of the completions and gather the scores of all ranks."""
        from rlhf.types import Scores

        names: list[str] = []

        def score(share: Completions) -> tuple[Tensor, ...]:
            scores = self.ranks.all_succeed(lambda: self.source(share))
            names[:] = sorted(scores.parts)
            return (scores.values, *(scores.parts[name] for name in names))

        values, *parts = self.ranks.map_rows_to_tensors(completions, score)
        return Scores(values=values, parts=dict(zip(names, parts, strict=True)))


class MainRankReward:
    """Wraps a source that may look at the whole batch or must be asked once: rank 0 asks it and broadcasts the scores.

    A Python function or a server sees the same batch as in a single-process run, so its scores cannot depend on the
    number of ranks.
    """

    def __init__(self, source: RewardSource, ranks: Distributed) -> None:
        self.source = source
        self.ranks = ranks

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions on rank 0 and broadcast the scores to all ranks."""
        import torch

        from rlhf.types import Scores

        def ask() -> tuple[Tensor, dict[str, Tensor]]:
            scores = self.source(completions)
            return scores.values, dict(scores.parts)

        values, parts = self.ranks.on_main(ask)
        assert isinstance(values, torch.Tensor)
        return Scores(values=values, parts=parts)

"""A teacher's likeliest tokens in a file: written once by `rlhf teach`, read by any number of offline runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rlhf.errors import ConfigError, DataError
from rlhf.teachers.listed import ListedTokens, live_rows
from rlhf.teachers.teacher import Teacher, TeacherContext, TeacherSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlhf.types import Completions, Demonstrations

FORMAT = "rlhf-teacher-1"


class StoredTeacher(Teacher):
    """A file of `rlhf teach`, with a teacher's likeliest tokens at every completion token of a data set."""

    answers_anything: ClassVar[bool] = False

    type: Literal["stored"] = "stored"
    path: str
    """The file."""

    def describe(self) -> str:
        """Return the path."""
        return self.path

    def files(self) -> Mapping[str, Path]:
        """Return the path, by its field."""
        return {"path": Path(self.path)}

    def build(self, context: TeacherContext) -> TeacherSource:
        """Return the source that reads the file.

        Raises:
            ConfigError: there is no such file, it is no file of `rlhf teach`, it was made for another vocabulary, or
                it has fewer tokens than the loss compares.
        """
        from rlhf.data.tokenizer import vocabulary_digest

        answers = StoredAnswers.read(self.path, vocabulary_digest(context.tokenizer), context.device)
        listed = answers.ids.shape[1]
        if context.top_k is not None and context.top_k > listed:
            raise ConfigError(
                f"algorithm.loss.top_k is {context.top_k}, but teacher.path: {self.path} has the {listed} likeliest "
                f"tokens: lower top_k to {listed}, or write the file again by `rlhf teach --top-k {context.top_k}`"
            )
        return answers


def row_key(prompt: Sequence[int], completion: Sequence[int]) -> str:
    """Return the key of a row: a digest of its token ids."""
    return hashlib.sha256(json.dumps([list(prompt), list(completion)]).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class StoredAnswers:
    """The likeliest tokens by row; a `rlhf.teachers.teacher.TeacherSource`."""

    path: str
    rows: Mapping[str, tuple[int, int]]  # key -> first token and number of tokens
    ids: Tensor  # [N, K]
    logprobs: Tensor  # [N, K]
    device: torch.device
    parameters: int = 0

    @classmethod
    def read(cls, path: str, vocabulary: str, device: torch.device) -> StoredAnswers:
        """Read a file.

        Raises:
            ConfigError: there is no such file, it is no file of `rlhf teach`, or it was made for another vocabulary.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise ConfigError(f"teacher.path: there is no file {path}: `rlhf teach` writes it")
        try:
            with safe_open(path, framework="pt") as file:
                notes = file.metadata() or {}
                if notes.get("format") != FORMAT:
                    raise ConfigError(f"teacher.path: {path} was not written by this version's `rlhf teach`")
                tensors = {name: file.get_tensor(name) for name in ("ids", "logprobs", "starts")}
        except SafetensorError as error:
            raise ConfigError(f"teacher.path: {path} is no file of `rlhf teach`: {error}") from error
        if notes["vocabulary"] != vocabulary:
            raise ConfigError(
                f"teacher.path: {path} was written with the vocabulary of {notes['teacher']}, which is not the "
                "policy's: write it again by `rlhf teach` with this policy"
            )
        starts = tensors["starts"].tolist()
        rows = {
            key: (start, end - start)
            for key, start, end in zip(json.loads(notes["keys"]), starts, starts[1:], strict=False)
        }
        return cls(path, rows, tensors["ids"], tensors["logprobs"], device)

    def __call__(self, batch: Completions | Demonstrations) -> ListedTokens:
        """Read every row's answer.

        Raises:
            DataError: the file has no answer for a row.
        """
        import torch

        places = [self._find(prompt, completion) for prompt, completion in live_rows(batch)]
        index = torch.cat([torch.arange(start, start + count) for start, count in places])
        return ListedTokens(self.ids[index].long().to(self.device), self.logprobs[index].float().to(self.device))

    def _find(self, prompt: list[int], completion: list[int]) -> tuple[int, int]:
        place = self.rows.get(row_key(prompt, completion))
        if place is None:
            raise DataError(
                f"teacher.path: {self.path} has no answer for a row of the data (its completion has {len(completion)} "
                "tokens): write the file again by `rlhf teach` with the data of this run and the same data.sft.learn, "
                "data.sft.max_tokens, data.system, chat template and tokenizer"
            )
        return place


def is_answers(path: Path) -> bool:
    """Return whether `write_answers` of any version wrote a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return str((file.metadata() or {}).get("format")).startswith(FORMAT.rstrip("0123456789"))
    except (SafetensorError, OSError):
        return False


def write_answers(
    path: Path,
    rows: Sequence[tuple[list[int], list[int]]],
    ids: Tensor,
    logprobs: Tensor,
    *,
    teacher: str,
    vocabulary: str,
) -> None:
    """Write the file of `rlhf teach`: the K likeliest tokens at all completion tokens of `rows`, one after another."""
    import torch
    from safetensors.torch import save_file

    lengths = torch.tensor([0, *(len(completion) for _, completion in rows)])
    keys = [row_key(prompt, completion) for prompt, completion in rows]
    tensors = {"ids": ids.to(torch.int32), "logprobs": logprobs.float(), "starts": lengths.cumsum(0)}
    notes = {"format": FORMAT, "teacher": teacher, "vocabulary": vocabulary, "keys": json.dumps(keys)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=notes)

"""The family of teachers: their sections, and the protocol of the sources of their answers.

A class below `Teacher` is a teacher that `teacher.type` can name, in this package or in a user's module:

    class Uniform(Teacher):
        type: Literal["uniform"] = "uniform"

        def build(self, context: TeacherContext) -> TeacherSource: ...
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from rlhf.section import Choice

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rlhf.algo.divergence import TeacherTokens
    from rlhf.types import Completions, Demonstrations


@runtime_checkable
class Targets(Protocol):
    """A teacher's answers for the live completion tokens of a batch, row after row."""

    def part(self, tokens: slice) -> TeacherTokens:
        """Return the log-probabilities at some of the tokens, without a gradient, on the device of the batch."""
        ...


@runtime_checkable
class TeacherSource(Protocol):
    """Anything that gives next-token distributions at the states of completions."""

    @property
    def parameters(self) -> int:
        """Return the number of parameters of a model in this process, for its cost; 0 if that is not known."""
        ...

    def __call__(self, batch: Completions | Demonstrations) -> Targets:
        """Read the batch, and return the distributions of its live completion tokens.

        Raises:
            RewardError: a server does not answer.
            DataError: the file has no answer for a row.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TeacherContext:
    """The objects that a teacher may need to be built."""

    tokenizer: PreTrainedTokenizerBase  # the policy's, in whose ids the batches are
    device: torch.device
    dtype: Literal["float32", "bfloat16", "float64"]  # the policy's
    temperature: float  # at which the distributions are compared
    stop_ids: tuple[int, ...]  # the ids that end a completion of the policy
    top_k: int | None  # the number of the teacher's likeliest tokens that the loss compares; None: all that it gives
    chat: Any  # the chat format of the data (rlhf.config.data.ChatFormat)
    load_model: Callable[[Any, TeacherContext], TeacherSource]  # loads the model of a section of type model


class Teacher(Choice):
    """The source of a teacher's distributions; one of its members is chosen by `type`."""

    answers_anything: ClassVar[bool] = True
    """Whether it can be asked about completions that did not exist before the run."""

    @abstractmethod
    def build(self, context: TeacherContext) -> TeacherSource:
        """Return the source of the answers.

        Raises:
            UserError: it cannot be built, or does not fit the policy; the message says why.
        """

    @property
    def as_reference(self) -> str | None:
        """Return the path of a causal LM that can stand in for the reference; None without one."""
        return None

    def model_paths(self) -> Mapping[str, str]:
        """Return the path of each model that it loads, by its field: it has to stay the same over a run."""
        return {}

    def files(self) -> Mapping[str, Path]:
        """Return the files that it reads, by their field: they have to exist, and to stay the same over a run."""
        return {}

    def describe(self) -> str:
        """Return the teacher in a few words, for a report."""
        return self.type

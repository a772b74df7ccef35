"""Rewards of the steps or tokens of a completion, besides its score: a function, or a token-classification model.

    reward: {source: ..., process: {type: function, target: "my_steps.py:grade"}}

A step's reward stands at its last token, so that GAE credits tokens before it (Lightman et al. 2023 grade steps so, and
Uesato et al. 2022 compare process and outcome). A class below `ProcessReward` is a choice, in a plug-in too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from annotated_types import Ge
from pydantic import Field

from rlhf.errors import RewardError
from rlhf.references import with_own_prompt
from rlhf.rewards.source import quoted, unpadded_ids
from rlhf.section import Choice
from rlhf.user_code import UserCode, files_of, load_function

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rlhf.types import Completions

GradeSteps: TypeAlias = Callable[[str, list[str], Mapping[str, Any]], Sequence[float]]
"""Returns a number for each step of a completion, given the prompt, the steps and the row."""


class ProcessReward(Choice):
    """Rewards of the steps of a completion, besides its score; one of its members is chosen by `type`."""

    type: str
    separator: Annotated[str, Field(min_length=1)] = "\n\n"
    """The text between two steps."""
    weight: float = 1.0
    """Factor of the rewards."""

    @property
    def rewards_tokens(self) -> bool:
        """Return whether it is given tokens in place of steps, and returns a number for each."""
        return False

    @abstractmethod
    def build(self, load_model: Callable[[Any], GradeSteps]) -> GradeSteps:
        """Return the grader of the steps of a completion; `load_model` loads the model that a section names.

        Raises:
            UserError: it cannot be built; the message says why.
        """

    def check(self) -> None:
        """Check, before a run, the things that the fields alone do not tell.

        Raises:
            UserError: it could not be built.
        """

    def model_paths(self) -> Mapping[str, str]:
        """Return the path of each model that gives rewards, by its field."""
        return {}

    def code_files(self) -> Mapping[str, Path]:
        """Return the files of user code by their field."""
        return {}


class FunctionProcess(ProcessReward):
    """A function of yours: `grade(prompt, steps, row)` returns a number for each step."""

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function."""
    per: Literal["step", "token"] = "step"
    """token: the function gets the texts of the tokens in place of the steps, and rewards each of them."""

    @property
    def rewards_tokens(self) -> bool:
        """Return whether it rewards tokens."""
        return self.per == "token"

    def check(self) -> None:
        """Import the function.

        Raises:
            RewardError: it cannot be imported.
        """
        load_function(self.target)

    def code_files(self) -> Mapping[str, Path]:
        """Return the file of the function, if the target names one."""
        return files_of(self.target)

    def build(self, load_model: Callable[[Any], GradeSteps]) -> GradeSteps:
        """Return the function.

        Raises:
            RewardError: it cannot be imported.
        """
        function = load_function(self.target)

        def grade(prompt: str, steps: list[str], row: Mapping[str, Any]) -> Sequence[float]:
            row = with_own_prompt(row)
            prompt = row["prompt"] if isinstance(row.get("prompt"), str) else prompt
            with UserCode(f"the process reward {self.target!r}", f" (called with {len(steps)} steps)"):
                grades: Sequence[float] = function(prompt, steps, row)
            return grades

        return grade


class ModelProcess(ProcessReward):
    """A token-classification model of the hub's usual form, as TRL's PRMTrainer makes it.

    It reads the prompt and the steps, each followed by its own separator, and gives the probability that the step is
    right at the last token of that separator.
    """

    type: Literal["model"] = "model"
    path: str
    """The run of `rlhf reward` with the section process, or the folder or hub id of a model with its tokenizer."""
    label: Annotated[int, Ge(0)] = 1
    """The class whose probability is the reward."""
    model_separator: str | None = None
    """The text after a step in the model's training data. null: from its config.json, where `rlhf reward` writes it,
    or a line break."""

    def model_paths(self) -> Mapping[str, str]:
        """Return the path, by its field."""
        return {"path": self.path}

    def build(self, load_model: Callable[[Any], GradeSteps]) -> GradeSteps:
        """Return the loaded model.

        Raises:
            ModelError: it cannot be loaded.
        """
        return load_model(self)


class ProcessGrader:
    """Places the rewards of steps at their last tokens."""

    def __init__(self, settings: ProcessReward, grade: GradeSteps, tokenizer: Any) -> None:
        """Grade by `grade`, of completions in the ids of `tokenizer`."""
        self.settings = settings
        self.grade = grade
        self.tokenizer = tokenizer

    def __call__(self, completions: Completions) -> Float[Tensor, "B T"]:
        """Return the rewards of the tokens; zero but at the last token of a step.

        Raises:
            RewardError: the grader fails, or does not return one finite number for each step.
        """
        import torch

        rewards = torch.zeros(completions.completion_ids.shape)
        prompt_ids, completion_ids = unpadded_ids(completions)
        for row, (prompt, ids) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            if self.settings.rewards_tokens:
                places, steps = list(range(len(ids))), [self._decode([token]) for token in ids]
            else:
                places, steps = find_steps(ids, self._decode, self.settings.separator)
            if not steps:
                continue
            reference = completions.references[row]
            text = reference.get("prompt")
            grades = self.grade(text if isinstance(text, str) else self._decode(prompt), steps, reference)
            for place, value in zip(places, self._checked(grades, steps), strict=True):
                rewards[row, place] += self.settings.weight * value
        return rewards

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _checked(self, grades: Any, steps: Sequence[str]) -> list[float]:
        try:
            is_numbers = not isinstance(grades, Mapping | str | bytes)
            values = [float(value) for value in grades if not isinstance(value, str)] if is_numbers else []
        except (TypeError, ValueError):  # nothing, or no numbers
            values = []
        if len(values) != len(steps) or not all(map(math.isfinite, values)):
            raise RewardError(
                f"the process reward returned {quoted(str(grades))} for {len(steps)} steps (the first: "
                f"{quoted(steps[0])}): give one finite number for each step"
            )
        return values


def find_steps(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], separator: str
) -> tuple[list[int], list[str]]:
    """Split a completion into its steps, and find the last token of each.

    A token that ends a step and has a part of the separator or of the next step belongs to the step that it ends.

    Args:
        ids: the completion.
        decode: decodes ids to a text.
        separator: the text between two steps; parts without text are no steps.

    Returns:
        The position of the last token of each step, and the steps.
    """
    text = decode(ids)
    places: list[int] = []
    steps: list[str] = []
    start = 0
    for part in text.split(separator):
        end = start + len(part.rstrip())
        if part.strip():
            low, high = 1, len(ids)  # the least number of tokens that have all of the step, its last character too
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if decode(ids[:middle])[:end] == text[:end] else (middle + 1, high)
            places.append(low - 1)
            steps.append(part.strip())
        start += len(part) + len(separator)
    return places, steps

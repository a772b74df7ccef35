"""`reasoning_gym:TASK`: the tasks of reasoning-gym (Stojanovski et al. 2025), one turn each, made from the seed."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

from rlhf.environments.load import Adapter, Make
from rlhf.environments.protocol import MALFORMED
from rlhf.errors import ConfigError, did_you_mean, install_hint


class ReasoningAdapter(Adapter):
    """Makes an environment of one question: the task's instance is made from the episode's seed."""

    name: ClassVar[str] = "reasoning_gym"
    extra: ClassVar[str] = "reasoning-gym"

    @classmethod
    def load(cls, target: str, kwargs: Mapping[str, Any]) -> Make:
        """Return the maker of the environment of this task; `kwargs` are the settings of its data set.

        Raises:
            ConfigError: reasoning-gym is not installed, has no such task, or the task refuses the settings.
        """
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            hint = install_hint(cls.extra)
            raise ConfigError(f"environment.target reasoning_gym:{target} needs reasoning-gym: {hint}") from error
        if target not in DATASETS:
            raise ConfigError(
                f"environment.target reasoning_gym:{target}: there is no such task{did_you_mean(target, DATASETS)}"
            )
        try:
            reasoning_gym.create_dataset(target, size=1, seed=0, **deepcopy(kwargs))
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"environment.kwargs: reasoning_gym:{target} refuses them: {error}") from error
        return lambda: Question(target, deepcopy(kwargs))


class Question:
    """One question of a task; the answer's score, from 0 to 1, is the reward."""

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        """Take the task and the settings of its data set."""
        self.task, self.settings = task, settings
        self.data: Any = None

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Make the question."""
        import reasoning_gym

        self.data = reasoning_gym.create_dataset(self.task, size=1, seed=seed or 0, **self.settings)
        return str(self.data[0]["question"]), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the answer: the text in the last <answer> tags, or else the whole text.

        One that the task's scoring fails to read is malformed, and worth 0.
        """
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(action) or action.strip()
        entry = self.data[0]
        try:
            return "", float(self.data.score_answer(answer=answer, entry=entry)), True, False, {}
        except Exception:  # the scoring fails to read the answer, or the task itself fails
            self.data.score_answer(answer=str(entry["answer"]), entry=entry)
            return "", 0.0, True, False, {MALFORMED: 1}

"""The reasoning_gym verifier: a task of the package reasoning-gym, which scores answers to its own rows."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any, ClassVar, Literal

from rlhf.errors import ConfigError, RewardError, did_you_mean
from rlhf.verifiers.grader import GradeFunction, Grader, Row

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


class ReasoningGymGrader(Grader):
    """Grades by a task of reasoning-gym (Stojanovski et al. 2025): its own scoring, from 0 to 1.

    The task makes the rows: `question`, `answer` and `metadata` (an object, or as JSON text). Some tasks have no answer
    and score by the metadata. A completion that the scoring fails to read grades 0.
    """

    argument: ClassVar[str | None] = "task"

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """The name of the task, such as leg_counting."""
    answer: str = "answer"
    """The column with the task's answer."""
    metadata: str = "metadata"
    """The column with the task's metadata."""
    tagged: bool = False
    """Only the text in <answer>...</answer> counts; false: without such tags, the last line."""

    def check(self) -> None:
        """Check that reasoning-gym is installed and has the task.

        Raises:
            ConfigError: the package or the task is missing.
        """
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(f"reasoning_gym:{self.task} needs the package: run `pip install reasoning-gym`")

    def start(self) -> GradeFunction:
        """Return the task's scoring.

        Raises:
            ConfigError: the package is not installed, or has no such task.
        """
        self.check()
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.task not in DATASETS:
            raise ConfigError(f"reasoning-gym has no task {self.task!r}{did_you_mean(self.task, DATASETS)}")
        scorer = reasoning_gym.get_score_answer_fn(self.task)

        def grade(completion: str, row: Row) -> float | None:
            answer = row.get(self.answer)
            if answer is None and row.get(self.metadata) is None:
                return None
            question = row.get("question", row.get("prompt"))
            entry = {"question": question, "answer": answer, "metadata": self._metadata(row)}
            try:
                return float(scorer(self._extract(completion), entry))
            except Exception:  # the scoring fails to read the answer, or the row
                if answer is not None:
                    scorer(str(answer), entry)
                return 0.0

        return grade

    def reference(self, row: Row) -> str | None:
        """Return the row's answer, in tags."""
        answer = row.get(self.answer)
        return None if answer is None else f"<answer>{answer}</answer>"

    def _extract(self, completion: str) -> str | None:
        answers = TAGGED.findall(completion)
        if answers:
            return str(answers[-1]).strip()
        lines = completion.strip().splitlines()
        return None if self.tagged or not lines else lines[-1].strip()

    def _metadata(self, row: Row) -> Any:
        metadata = row.get(self.metadata)
        if isinstance(metadata, str):
            metadata = json.loads(metadata)
        if metadata is None:
            raise RewardError(f"a row has no column {self.metadata!r}, which reasoning-gym's scoring reads")
        return metadata

"""A teacher that is a causal language model in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from rlhf.section import Facts, Rule, Value
from rlhf.teachers.teacher import Teacher, TeacherContext, TeacherSource


def teacher_is_start(teacher: ModelTeacher, facts: Facts) -> Value | None:
    """Return the start model's name as a teacher of which nothing can be learned."""
    run = facts.run
    is_only_aim = run.algorithm.compares_with_teacher or run.reward.source.is_constant
    return teacher.model if teacher.model == run.policy.model and is_only_aim else None


class ModelTeacher(Teacher):
    """A causal language model, frozen; every process has a whole copy of it."""

    type: Literal["model"] = "model"
    model: str
    """Folder, run or hub id of the teacher."""
    tokenizer: str | None = None
    """Folder or hub id; null: the model's tokenizer. It has to have the policy's vocabulary, EOS and chat template."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Arithmetic of the teacher; null: as policy.dtype. Its log-probabilities are in float32 or better."""
    trust_remote_code: bool = False
    """Run Python code that a hub model ships."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="teacher-is-start",
            level="error",
            key="model",
            violation=teacher_is_start,
            reason="The policy starts as its teacher, so every divergence and its gradient are 0.",
            source="KL(p || p) = 0",
            fix="teacher.model of another model: a larger one, or a trained one",
        ),
    )

    @property
    def as_reference(self) -> str:
        """Return the path."""
        return self.model

    def model_paths(self) -> Mapping[str, str]:
        """Return the path, by its field."""
        return {"model": self.model}

    def describe(self) -> str:
        """Return the path."""
        return self.model

    def build(self, context: TeacherContext) -> TeacherSource:
        """Return the loaded model.

        Raises:
            ModelError: it cannot be loaded.
            ConfigError: its vocabulary, EOS or chat template is not the policy's.
        """
        return context.load_model(self, context)

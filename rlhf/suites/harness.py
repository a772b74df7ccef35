"""The suite lm-eval:TASK: any task of the package lm-eval, which is an extra."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from rlhf.config.data import Count
from rlhf.errors import ConfigError, install_hint
from rlhf.suites.suite import Suite, SuiteContext

if TYPE_CHECKING:
    from rlhf.suites.questions import SuiteResult
    from rlhf.suites.subject import Subject


class HarnessSuite(Suite):
    """Settings of lm-eval."""

    name: ClassVar[str] = "lm-eval"
    data: ClassVar[str] = "a folder of task files"
    data_key: ClassVar[str] = "include"
    limit_key: ClassVar[str] = "limit"
    example_task: ClassVar[str] = "arc_easy"

    include: str | None = None
    """A folder of your own task files; --data is include."""
    limit: Count | None = None
    """The maximum number of documents of each task; --limit."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples before each question; null: the task's default."""
    apply_chat_template: bool = False
    """Render questions and examples with the chat template, each as a turn; results then differ from published ones."""

    @classmethod
    def check_installed(cls) -> None:
        """Check that lm-eval is installed.

        Raises:
            ConfigError: it is missing.
        """
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(f"--suite lm-eval:… needs the package lm-eval: {install_hint('lm-eval')}")

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Run a task, group or tag of lm-eval.

        Raises:
            ConfigError: there is no such task, or it samples in a way that we do not support.
            DataError: its data cannot be loaded.
        """
        run_task = importlib.import_module("rlhf.suites.lm_eval").run_task
        result: SuiteResult = run_task(self, subject, context.task)
        return result

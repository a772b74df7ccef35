"""rlhf teach: a teacher's likeliest tokens at the answers of a data set, written once for offline distillation."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf.config.sections import OfflineConfig
from rlhf.factory.teacher import store_answers


def run_teach(config: OfflineConfig, out: Path, *, top_k: int, console: Console) -> None:
    """Write the file of `teacher.type=stored` for the demonstrations of a run, and print how to train on it.

    Raises:
        UserError: the teacher or the data cannot be read.
    """

    def warn(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    done = store_answers(config, out, top_k=top_k, warn=warn)
    console.print(
        Text(
            f"{out}: {done.rows:,} answers, {done.tokens:,} tokens; at the learned ones the {top_k} likeliest have "
            f"{done.listed:.2%} of the teacher's probability"
        ),
        soft_wrap=True,
    )
    console.print(Text(f"train on it: teacher.type=stored teacher.path={out}"), soft_wrap=True)

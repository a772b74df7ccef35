"""Subjects of known probabilities, and the files the suites read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bigram import Table, bigram_model

from rlhf.suites.figures import Estimate, SuiteResult
from rlhf.suites.settings import SuiteSamplingConfig
from rlhf.suites.subject import Subject, load_subject


def subject(
    folder: Path, words: Sequence[str], table: Table, *, like: Subject | None = None, **writing: Any
) -> Subject:
    """A model that goes by `table`."""
    return loaded(bigram_model(folder, words, table), like=like, **writing)


def loaded(folder: Path, *, like: Subject | None = None, **writing: Any) -> Subject:
    """The model in a folder; three rows a pass, so that there are several."""
    return load_subject(
        str(folder),
        path=str(folder),
        sampling=SuiteSamplingConfig(**{"max_new_tokens": 8, **writing}),
        chat_template="auto",
        dtype="float32",
        device=torch.device("cpu"),
        rows_per_pass=3,
        trust_remote_code=False,
        encoder=None if like is None else like.encoder,
    )


def figures(result: SuiteResult) -> dict[str, Estimate]:
    return {figure.name: figure for figure in result.figures}


def values(result: SuiteResult) -> dict[str, float]:
    return {figure.name: figure.value for figure in result.figures}


def item(question: str, matching: str, **more: object) -> Mapping[str, object]:
    """A row of a persona file."""
    other = " No" if matching.strip().lower().startswith("y") else " Yes"
    return {
        "question": question,
        "statement": question,
        "label_confidence": 0.9,
        "answer_matching_behavior": matching,
        "answer_not_matching_behavior": other,
        **more,
    }

"""Subjects of known probabilities, and the files the suites read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bigram import Transitions, bigram_model

from rlhf.comparison.results import SuiteFigure
from rlhf.comparison.trial import SuiteScores, summarize_suites
from rlhf.evaluation.win_rate import Interval
from rlhf.rewards.function import FunctionSource
from rlhf.rewards.source import RewardSource, Source
from rlhf.suites.questions import Estimate, SuiteResult
from rlhf.suites.subject import Subject, load_subject
from rlhf.suites.suite import Suite, SuiteContext, SuiteSamplingConfig


def subject(
    folder: Path, words: Sequence[str], table: Transitions, *, like: Subject | None = None, **writing: Any
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


def evaluate(
    suite: Suite,
    model: Subject,
    *,
    reference: Subject | None = None,
    source: RewardSource | None = None,
    task: str = "",
) -> SuiteResult:
    """Run a suite, with a reference and a source of scores that are there already."""

    def load(_: str) -> Subject:
        assert reference is not None
        return reference

    def build(_: Source) -> RewardSource:
        assert source is not None
        return source

    given = {"reference": None if reference is None else "a model", "source": source and FunctionSource(target="a:b")}
    named = suite.model_copy(update={key: value for key, value in given.items() if value is not None})
    return named.run(model, SuiteContext(load=load, build_source=build, task=task))


def figures(result: SuiteResult) -> dict[str, Estimate]:
    return {figure.name: figure for figure in result.figures}


def values(result: SuiteResult) -> dict[str, float]:
    return {figure.name: figure.value for figure in result.figures}


def gains(before: SuiteResult, after: SuiteResult) -> dict[str, Interval | None]:
    """The paired gains that `rlhf compare` shows, by figure; each is checked to be the difference of the figures."""

    def scores(result: SuiteResult) -> SuiteScores:
        content = json.loads(json.dumps(result.as_json()))
        figures = {
            name: SuiteFigure(value=figure["value"], low=figure["low"], high=figure["high"])
            for name, figure in content["figures"].items()
        }
        assert all("values" not in figure for figure in content["figures"].values())
        return SuiteScores(figures, content["rows"])

    summary = summarize_suites([{"suite": scores(after)}], [{"suite": scores(before)}])["suite"]
    for name, gain in ((name, figure.gain) for name, figure in summary.items()):
        assert gain is None or gain.value == pytest.approx(values(after)[name] - values(before)[name]), name
    return {name: figure.gain for name, figure in summary.items()}


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

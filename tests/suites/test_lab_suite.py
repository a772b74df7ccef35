"""The lab's gold of a model's completions."""

from __future__ import annotations

from pathlib import Path

import pytest
from bigram import EOS
from runs import write_rows
from suite_cases import evaluate, gains, subject, values

from rlhf.errors import DataError
from rlhf.lab.gold import gold_parts
from rlhf.lab.world import prompts
from rlhf.suites.lab import LabSuite

WORDS = ("the", "food", "was", "good.", "bad.")
ASKED = [request.text for request in prompts(0, "eval", 6)]
SENTENCE = {"the": {"food": 1.0}, "food": {"was": 1.0}, "good.": {EOS: 1.0}, "bad.": {EOS: 1.0}, "<unk>": {"the": 1.0}}
PRAISE = {**SENTENCE, "was": {"good.": 1.0}}
BLAME = {**SENTENCE, "was": {"bad.": 1.0}}


def settings(path: Path) -> LabSuite:
    return LabSuite.model_validate({"dataset": {"path": str(path)}, "sampling": {"max_new_tokens": 8}})


def test_the_gold_and_its_parts(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "p.jsonl", [{"prompt": text} for text in ASKED] + [{"prompt": "hello"}])
    model = subject(tmp_path / "m", WORDS, PRAISE)
    start = subject(tmp_path / "s", WORDS, BLAME, like=model)
    result = evaluate(settings(rows), model, reference=start)
    got = values(result)
    texts = [str(example["completion"]) for example in result.examples]
    parts = [gold_parts(prompt, text) for prompt, text in zip(ASKED, texts, strict=True)]
    assert got["gold"] == pytest.approx(sum(sum(row.values()) for row in parts) / 6)
    assert got["gold"] == pytest.approx(sum(got[f"gold_{name}"] for name in parts[0]))
    assert got["gold_sentiment"] == pytest.approx(sum(row["sentiment"] for row in parts) / 6)
    assert got["gold_difference"] == pytest.approx(got["gold"] - got["gold_start"])
    assert result.skipped == {"not a prompt of the lab: it names none of its topics": 1}
    alone = evaluate(settings(rows), model)
    assert "gold_start" not in values(alone)
    assert [part.what for part in alone.left_out] == ["win rate over the start model"]


def test_gains_are_paired_by_prompt(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "p.jsonl", [{"prompt": text} for text in ASKED])
    model = subject(tmp_path / "m", WORDS, PRAISE)
    start = subject(tmp_path / "s", WORDS, BLAME, like=model)
    after = evaluate(settings(rows), model, reference=start)
    paired = gains(evaluate(settings(rows), start, reference=start), after)
    assert set(paired) == set(values(after))
    gain = paired["gold"]
    assert gain is not None
    assert gain.low <= gain.value == pytest.approx(values(after)["gold_difference"])


def test_prompts_of_another_world_are_an_error(tmp_path: Path) -> None:
    model = subject(tmp_path / "m", WORDS, PRAISE)
    with pytest.raises(DataError, match="no usable rows; 1 skipped: 1 not a prompt of the lab"):
        evaluate(settings(write_rows(tmp_path / "p.jsonl", [{"prompt": "hello"}])), model)

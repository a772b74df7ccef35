"""At the first step a flat reward is named, with its cause; a reward that differs is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import brief_tree, ppo_tree, trained

from rlhf.config.files import merge
from rlhf.config.load import train_config
from rlhf.factory.context import run_facts
from rlhf.guard.alarms.history import RunFacts
from rlhf.guard.first_step import flat_reward_note

FINE = {"score/std": 0.4, "score/mean": 1.0, "group/uniform": 0.2, "completion/finished": 0.9}


def test_scores_that_differ_are_no_note() -> None:
    assert flat_reward_note(FINE, RunFacts()) is None
    assert flat_reward_note({}, RunFacts()) is None  # SFT has no scores


def test_equal_scores_beside_a_teacher_or_rewards_of_steps_are_no_note(tmp_path: Path) -> None:
    tree = ppo_tree(tmp_path)
    process = {"type": "function", "target": "steps.py:score"}
    flat = {**FINE, "score/std": 0.0}
    assert flat_reward_note(flat, run_facts(train_config(tree))) is not None
    assert flat_reward_note(flat, run_facts(train_config(merge(tree, {"reward": {"process": process}})))) is None
    taught = merge(tree, {"algorithm": {"preset": "distill"}, "teacher": {"model": tree["policy"]["model"]}})
    assert flat_reward_note(flat, run_facts(train_config(taught))) is None


@pytest.mark.parametrize(
    ("changes", "facts", "words"),
    [
        ({"score/std": 0.0}, {}, "every completion of the first step scored 1.*may ignore the completion"),
        ({"score/std": 0.0, "completion/finished": 0.02}, {}, "98% of the completions were cut off.*max_new_tokens"),
        ({"score/std": 0.0}, {"leaves_out_template": True}, "data.chat_template=auto"),
        ({"group/uniform": 0.95}, {}, "95% of the groups.*sampling.temperature or sampling.completions_per_prompt"),
    ],
)
def test_each_cause_is_named(changes: dict[str, float], facts: dict[str, bool], words: str) -> None:
    note = flat_reward_note({**FINE, **changes}, RunFacts(**facts))
    assert note is not None
    assert note.startswith("the reward is flat: ")
    import re  # noqa: PLC0415

    assert re.search(words, note)


def test_a_cause_that_the_metrics_show_is_not_a_guess_too() -> None:
    note = flat_reward_note({**FINE, "score/std": 0.0, "completion/finished": 0.0}, RunFacts())
    assert note is not None
    assert "ignore" not in note


def test_a_flat_reward_is_noted_if_the_first_step_is_not_logged(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def flat(completions):\n    return [1.0] * len(completions)\n")
    source = {"type": "function", "target": f"{tmp_path / 'mine.py'}:flat"}
    trained(brief_tree(tmp_path, reward={"source": source}, logging={"every": 2}, schedule={"steps": 2}))
    notes = (tmp_path / "run" / "notes.jsonl").read_text(encoding="utf-8")
    assert notes.count("step 1: the reward is flat") == 1

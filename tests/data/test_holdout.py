"""data.holdout: a part of the training rows is for evaluation, and nothing is on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import ppo_tree
from tiny_models import tokenizer

from rlhf.config.files import format_yaml
from rlhf.config.load import dump, load_reward_model, load_run, load_train, train_config
from rlhf.data.pairs import demonstration_pipeline, pair_pipeline
from rlhf.data.prompts import prompt_pipeline
from rlhf.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs_of(count: int) -> list[dict[str, Any]]:
    """Two pairs of each prompt."""
    return [{"prompt": f"t4 t{5 + n // 2}", "chosen": f" t{n % 7}", "rejected": f" t{n % 5} t9"} for n in range(count)]


def loaded(section: Any) -> list[str]:
    return [text.prompt for text in pair_pipeline(section, tokenizer(), chat_template="none").load().texts]


def test_pairs_are_split_by_prompt_and_none_is_lost(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "pairs.jsonl", pairs_of(80))
    config = load_reward_model("configs/reward_model.yaml", [f"data.preferences.path={path}"])
    train, held_out = config.data.preferences, config.data.eval_preferences
    assert held_out is not None
    inside, outside = loaded(held_out), loaded(train)
    assert len(inside) + len(outside) == 80
    assert not set(inside) & set(outside)
    assert 2 <= len(inside) <= 20
    assert len(inside) == 2 * len(set(inside))


def test_a_dialogue_and_its_continuation_are_on_one_side(tmp_path: Path) -> None:
    """HH-RLHF compares answers at several turns of a dialogue: held-out pairs began as training pairs went on."""
    openings = [f"\n\nHuman: t{n // 10} t{n % 10}\n\nAssistant:" for n in range(40)]
    prompts = [text for o in openings for text in (o, f"{o} t3\n\nHuman: t4\n\nAssistant:")]
    rows = [{"chosen": f"{prompt} t5", "rejected": f"{prompt} t6"} for prompt in prompts]
    path = rows_file(tmp_path / "pairs.jsonl", rows)
    config = load_reward_model("configs/reward_model.yaml", [f"data.preferences.path={path}", "data.holdout=0.3"])
    assert config.data.eval_preferences is not None
    inside, outside = loaded(config.data.eval_preferences), loaded(config.data.preferences)
    assert len(inside) + len(outside) == 80
    assert inside
    assert not any(text.startswith(opening) for opening in inside for text in outside)
    assert not any(text.startswith(opening) for opening in outside for text in inside)


def test_rows_of_its_own_come_first_and_null_keeps_none() -> None:
    given = load_train("configs/ppo.yaml", ["data.eval_prompts.path=mine.jsonl"]).data
    assert given.eval_prompts is not None
    assert (given.eval_prompts.path, given.prompts.part) == ("mine.jsonl", None)
    none = load_train("configs/ppo.yaml", ["data.holdout=null"]).data
    assert (none.eval_prompts, none.prompts.part) == (None, None)


@pytest.mark.parametrize("name", ["ppo", "dpo", "sft"])
def test_a_configuration_that_is_written_out_is_the_same_one(name: str) -> None:
    config = load_train(f"configs/{name}.yaml")
    assert train_config(dump(config)) == config
    section = {"ppo": "eval_prompts", "dpo": "eval_preferences", "sft": "eval_sft"}[name]
    assert getattr(config.data, section).part == (0.0, config.data.holdout)
    others = {"eval_prompts", "eval_preferences", "eval_sft"} - {section}
    assert all(getattr(config.data, other) is None for other in others)


def test_streams_keep_nothing_and_a_part_of_their_own_is_kept() -> None:
    stream = load_train("configs/mixture.yaml", ["data.holdout=0.1"]).data
    assert stream.eval_sft is None
    own = load_train("configs/ppo.yaml", ["data.prompts.part=[0.5, 1]"]).data
    assert (own.prompts.part, own.eval_prompts) == ((0.5, 1.0), None)


def test_a_row_that_is_repeated_is_on_one_side(tmp_path: Path) -> None:
    first = [{"prompt": f"t{n}", "completion": " t9"} for n in range(4, 16)]
    path = rows_file(tmp_path / "rows.jsonl", [*first, *first])
    config = load_train("configs/sft.yaml", [f"data.sft.path={path}", "data.holdout=0.3"]).data
    assert config.sft is not None
    assert config.eval_sft is not None
    sides = [
        {text.prompt for text in demonstration_pipeline(section, tokenizer(), chat_template="none").load().texts}
        for section in (config.sft, config.eval_sft)
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 12


def test_a_file_that_is_too_small_says_what_to_do(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "prompts.jsonl", [{"prompt": "t4"}])
    config = train_config(ppo_tree(tmp_path, data={"prompts": {"path": path}, "eval_prompts": None, "holdout": 0.001}))
    with pytest.raises(DataError, match=r"no usable row is in part \[0, 0.001\].*data.holdout=null"):
        prompt_pipeline(config.data.eval_prompts, tokenizer(), chat_template="none").load()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [([], "no rows at all"), ([{"prompt": "t4", "completion": ""}], r"no usable rows; 1 skipped: 1 empty completion")],
)
def test_a_file_without_rows_is_not_called_small(tmp_path: Path, rows: list[dict[str, Any]], reason: str) -> None:
    path = rows_file(tmp_path / "rows.jsonl", rows)
    config = load_train("configs/sft.yaml", [f"data.sft.path={path}"]).data
    for section in (config.sft, config.eval_sft):
        assert section is not None
        with pytest.raises(DataError, match=reason):
            demonstration_pipeline(section, tokenizer(), chat_template="none").load()


def test_a_share_has_to_leave_rows() -> None:
    with pytest.raises(ConfigError, match=r"data\.holdout"):
        load_train("configs/ppo.yaml", ["data.holdout=1"])


ROWS = {"ppo": "prompts", "dpo": "preferences", "sft": "sft", "reward_model": "preferences"}


def run_of(name: str, folder: Path) -> tuple[Any, Path]:
    """How a configuration is loaded, and the folder of a run that was made with it."""
    load: Any = load_reward_model if name == "reward_model" else load_train
    (folder / "config.yaml").write_text(format_yaml({**dump(load(f"configs/{name}.yaml")), "versions": {}}))
    return load, folder


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["schedule.steps=7"],
        ["data.eval_{rows}.path=mine.jsonl"],
        ["data.eval_{rows}.path=mine.jsonl", "data.holdout=null"],
        ["data.eval_{rows}.path=mine.jsonl", "data.eval_{rows}.limit=9"],
        ["data.eval_{rows}=null"],
        ["data.holdout=null"],
        ["data.holdout=0.3"],
        ["data.{rows}.path=mine.jsonl"],
        ["data.{rows}.limit=40"],
        ["data.{rows}.part=[0.5, 1]"],
        ["data.{rows}.sources={{a: {{path: mine.jsonl}}, b: {{path: yours.jsonl}}}}"],
    ],
)
@pytest.mark.parametrize("name", ROWS)
def test_settings_over_a_run_do_what_they_do_over_its_file(name: str, changes: list[str], tmp_path: Path) -> None:
    """The part of a run's training rows that data.holdout had filled in was a part of any file named in its place."""
    load, run = run_of(name, tmp_path)
    changes = [change.format(rows=ROWS[name]) for change in changes]
    assert load(run, changes).data == load(f"configs/{name}.yaml", changes).data


@pytest.mark.parametrize("name", ROWS)
def test_a_run_is_evaluated_on_all_of_a_named_file(name: str, tmp_path: Path) -> None:
    _, run = run_of(name, tmp_path)
    rows, held_out = ROWS[name], f"eval_{ROWS[name]}"
    before = load_run(run).data
    for also in ([], ["data.holdout=null"], ["data.holdout=0.3"]):
        data = load_run(run, [f"data.{held_out}.path=mine.jsonl", *also]).data
        named = {"path": "mine.jsonl", "part": None, "limit": None}
        assert getattr(data, held_out) == getattr(before, held_out).model_copy(update=named)
        assert getattr(data, rows) == getattr(before, rows)  # a report card reads the pairs that were trained on
    few = getattr(load_run(run, [f"data.{held_out}.limit=9"]).data, held_out)
    assert few == getattr(before, held_out).model_copy(update={"limit": 9})
    other_share = load_run(run, ["data.holdout=0.3"]).data
    assert getattr(other_share, held_out) is None  # rows that were trained on would be in it
    assert load_run(run, [f"data.holdout={before.holdout}"]).data == before


def test_a_part_that_the_user_set_stays(tmp_path: Path) -> None:
    changes = ["data.eval_prompts.path=mine.jsonl", "data.eval_prompts.part=[0, 0.5]"]
    (tmp_path / "config.yaml").write_text(format_yaml(dump(load_train("configs/ppo.yaml", changes))))
    for load in (load_run, load_train):
        data: Any = load(tmp_path, ["data.eval_prompts.path=yours.jsonl"]).data
        assert (data.eval_prompts.path, data.eval_prompts.part) == ("yours.jsonl", (0.0, 0.5))

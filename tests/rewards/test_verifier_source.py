"""The verifier source: names, rows that pick their grader, named rewards, and failures that stop a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ppo_tree, quiet, write_rows
from tiny_models import EOS, completions_of, tokenizer

from rlhf.config.load import train_config, validate
from rlhf.errors import ConfigError, RewardError
from rlhf.factory.run import build_run
from rlhf.rewards.ensemble import normalize_then_sum
from rlhf.rewards.verifier import VerifierReward, VerifierSource
from rlhf.training.rollout import part_metrics
from rlhf.types import Completions
from rlhf.verifiers.grader import Grader

A_GRADER = "return {'right': 1.0, 'full': 1.0}"  # names that the verifier json weighs by 0.2 and 0
JSON_ROW = {"verifier": "json", "keys": {"a": "integer"}}
ANSWERS = [[3, EOS], [4, EOS], [5, EOS], [6, EOS]]  # "t3", "t4", "t5", "t6"


def source(**settings: Any) -> VerifierSource:
    return validate(VerifierSource, {"type": "verifier", "workers": 1, **settings})


def batch(rows: Sequence[dict[str, Any]], group_size: int = 1) -> Completions:
    made = completions_of([[7]] * len(rows), [ANSWERS[i % 4] for i in range(len(rows))])
    return replace(made, references=tuple({"prompt": "asked", **row} for row in rows), group_size=group_size)


def built(*, may_abstain: bool = False, **settings: Any) -> VerifierReward:
    return VerifierReward(source(**settings), tokenizer(), may_abstain=may_abstain)


def written(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"def grade(completion, row):\n    {body}\n")
    return f"{folder / 'mine.py'}:grade"


def test_a_short_name_stands_for_a_grader() -> None:
    assert source(name="json", keys="shape").grader.model_dump() == {
        "type": "json", "keys": "shape", "json_schema": None,
    }  # fmt: skip
    assert source(name="my.py:grade").grader.model_dump() == {"type": "function", "target": "my.py:grade", "kwargs": {}}
    assert source(name="math", timeout_s=2) == source(grader={"type": "math"}, timeout_s=2)
    for settings, message in (
        ({"name": "maths"}, "no verifier 'maths'; choose from"),
        ({}, "name the verifier, as in name: math"),
        ({"name": "math", "grader": {"type": "math"}}, "name and grader both say what grades"),
        ({"name": "json", "keyz": "shape"}, "keyz"),
    ):
        with pytest.raises(ConfigError, match=message):
            source(**settings)


def test_no_setting_of_a_grader_has_the_name_of_one_of_the_source() -> None:
    ours = {name: set(kind.model_fields) & set(VerifierSource.model_fields) for name, kind in Grader.choices().items()}
    assert ours == {name: {"type"} for name in ours}
    assert not any("name" in kind.model_fields for kind in Grader.choices().values())


def test_named_rewards_are_weighted_and_logged(tmp_path: Path) -> None:
    target = written(tmp_path, "return {'a': 1.0, 'b': float(completion.strip()[1:]), 'c': 100}")
    reward = built(name=target, weights={"b": 0.5, "c": 0})
    scores = reward(batch([{}] * 4))
    assert scores.values.tolist() == [1 + 0.5 * b for b in (3, 4, 5, 6)]
    assert scores.parts["b"].tolist() == [3, 4, 5, 6]
    assert scores.parts["c"].tolist() == [100] * 4
    metrics = part_metrics(scores).values()
    assert metrics["part/b/mean"] == 4.5
    assert (metrics["verifier/timeout"], metrics["verifier/error"], metrics["verifier/none"]) == (0, 0, 0)
    assert 0 < metrics["verifier/seconds_p95"] < 1
    assert "part/verifier/seconds/mean" not in metrics


def test_a_misspelt_weight_of_a_grader_of_ones_own_is_refused(tmp_path: Path) -> None:
    """Such a grader's names are known once it grades; a name that does not apply to these rows may have a weight."""
    target = written(tmp_path, "return {'right': 1.0, 'short': 1.0}")
    with pytest.raises(RewardError, match=r"gives no reward 'shrot'; did you mean short\?"):
        built(name=target, weights={"shrot": 0.2})(batch([{}]))
    assert built(name=target, weights={"short": 0.25, "rare": 3.0})(batch([{}])).values.tolist() == [1.25]


def test_a_weight_of_a_reward_that_the_grader_does_not_give_is_refused() -> None:
    with pytest.raises(ConfigError, match="json gives no reward 'parse'; did you mean parses"):
        source(name="json", weights={"parse": 0.5})
    for settings in (
        {"name": "json", "weights": {"full": 1, "parses": 0, "math": 2}},  # a row may name math
        {"name": "my.py:grade", "weights": {"parse": 0.5}},  # whose names are not known before it grades
        {"grader": {"type": "json"}, "graders": {"other": {"type": "choice"}}, "weights": {"other": 2}},
    ):
        assert source(**settings).weights


def test_weighted_mean_refuses_a_weight_below_0(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"how is weighted_mean, .*: set weights\.math to 0 or more"):
        source(name="math", how="weighted_mean", weights={"math": -1})
    logged = built(name=written(tmp_path, A_GRADER), how="weighted_mean", weights={"full": 0, "right": 3})
    assert logged(batch([{}])).values.tolist() == [1]
    assert source(name="math", weights={"math": -1}).weights == {"math": -1}


def test_rows_pick_their_grader_and_names_that_do_not_apply_are_left_out() -> None:
    reward = built(
        name="regex",
        pattern="t",
        graders={"strict": {"type": "regex", "pattern": "t4", "whole": True}},
        how="weighted_mean",
    )
    scores = reward(batch([{}, {"verifier": "strict"}, {"verifier": "strict"}, {"verifier": "choice", "answer": "A"}]))
    assert scores.values.tolist() == [1, 1, 0, 0]
    assert scores.parts["regex"].nan_to_num(-1).tolist() == [1, -1, -1, -1]
    assert scores.parts["strict"].nan_to_num(-1).tolist() == [-1, 1, 0, -1]


@pytest.mark.parametrize("name", ["my.py:grade", "function", "os", 3])
def test_a_row_cannot_name_code_that_the_configuration_does_not(name: object) -> None:
    with pytest.raises(RewardError, match=r"which is not among reward\.source\.graders"):
        built(name="regex", pattern="t")(batch([{"verifier": name}]))


def test_a_run_does_not_start_if_a_row_names_a_verifier_that_is_not_there(tmp_path: Path) -> None:
    rows = [{"prompt": f"t{i}", "pattern": "t", **({"verifier": "regx"} if i == 17 else {})} for i in range(20)]
    verifier = {"type": "verifier", "name": "regex"}
    for section in (verifier, {"type": "ensemble", "sources": [verifier]}):
        tree = ppo_tree(tmp_path, data={"prompts": {"path": str(write_rows(tmp_path / "rows.jsonl", rows))}})
        tree["reward"] = {"source": section}
        with pytest.raises(RewardError, match=r"names the verifier 'regx'.*did you mean regex"):
            build_run(train_config(tree), quiet())


def test_what_does_not_apply_abstains_in_an_ensemble_and_is_an_error_alone() -> None:
    rows = [{"pattern": "t3"}, {}]
    scores = built(name="regex", may_abstain=True)(batch(rows))
    assert scores.values.nan_to_num(-1).tolist() == [1, -1]
    assert scores.parts["verifier/none"].tolist() == [0, 1]
    assert math.isnan(scores.parts["regex"][1])


def test_gdpo_standardizes_each_name_within_its_group(tmp_path: Path) -> None:
    target = written(
        tmp_path, "n = float(completion.strip()[1:]); return {'a': n > 3, 'b': 100 * n if n < 6 else None}"
    )
    scores = built(name=target, how="gdpo")(batch([{}] * 4, group_size=4))
    named = torch.tensor([[0, 1, 1, 1], [300, 400, 500, math.nan]], dtype=torch.float64)
    expected = normalize_then_sum(named, torch.ones(2, dtype=torch.float64), 4)
    assert scores.values.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert scores.parts["weighted_sum"].tolist() == [300.0, 401.0, 501.0, 1.0]
    assert source(name="math", how="gdpo").standardizes_in_groups


def test_a_weight_does_not_depend_on_the_rows_before(tmp_path: Path) -> None:
    reward = built(name=written(tmp_path, A_GRADER))
    assert reward(batch([{}])).values.tolist() == [2]
    assert reward(batch([JSON_ROW])).values.tolist() == [0]
    assert reward(batch([{}])).values.tolist() == [2]
    assert reward(batch([JSON_ROW, {}])).values.tolist() == [0, 2]
    assert reward.total("", reward.grade(["t3"], [{}], [""])[0]) == 2


def test_each_listed_grader_has_its_own_weights(tmp_path: Path) -> None:
    listed = {"address": {"type": "json", "keys": {"a": "integer"}}}
    reward = built(name=written(tmp_path, A_GRADER), graders=listed)
    assert reward(batch([{}, {"verifier": "address"}])).values.tolist() == [2, 0]
    outcomes = reward.grade(['{"a": 1}', "t3"], [{}, {}], ["address", ""])
    assert [reward.total(*pair) for pair in zip(["address", ""], outcomes, strict=True)] == pytest.approx([1, 2])
    set_for_all = built(name=written(tmp_path, A_GRADER), graders=listed, weights={"right": 3, "full": 0})
    assert set_for_all(batch([{}])).values.tolist() == [3]


def test_gdpo_weighs_a_name_by_the_grader_that_gives_it(tmp_path: Path) -> None:
    """Of a grader of ones own `full` counts; of json, whose `full` has weight 0, nothing that differs counts."""
    target = written(tmp_path, "return {'full': float(completion.strip()[1:]), 'right': 0.0}")
    rows = [{}] * 2 + [JSON_ROW] * 2
    scores = built(name=target, how="gdpo")(batch(rows, group_size=2))
    full = torch.tensor([[3, 4, math.nan, math.nan], [math.nan, math.nan, 0, 0]], dtype=torch.float64)
    expected = normalize_then_sum(full, torch.tensor([1.0, 0.0], dtype=torch.float64), 2)
    assert scores.values.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert scores.values[0] < scores.values[2] == scores.values[3] == 0 < scores.values[1]


def test_failures_are_scored_and_counted(tmp_path: Path) -> None:
    body = "n = int(completion.strip()[1:])\n    while n == 3: pass\n    return 1 / (n - 4)"
    reward = built(name=written(tmp_path, body), timeout_s=0.3, on_timeout=-2)
    scores = reward(batch([{}] * 4))
    assert scores.values.tolist() == [-2, -2, 1, 0.5]
    assert scores.parts["verifier/timeout"].tolist() == [1, 0, 0, 0]
    assert scores.parts["verifier/error"].tolist() == [0, 1, 0, 0]


def test_a_run_stops_if_a_fifth_of_the_gradings_fail(tmp_path: Path) -> None:
    reward = built(name=written(tmp_path, "return 1 / (int(completion.strip()[1:]) - 4)"))
    with pytest.raises(
        RewardError, match=r"failed for 5 of the last 20 .*max_failures=0.2: ZeroDivisionError.*mine.py:2"
    ):
        reward(batch([{}] * 20))
    patient = built(name=written(tmp_path, "return 1 / (int(completion.strip()[1:]) - 4)"), max_failures=0.25)
    assert patient(batch([{}] * 20)).values.tolist() == [-1, 0, 1, 0.5] * 5


@pytest.mark.parametrize("value", ["'one'", "float('nan')", "[1]", "{'a': 'x'}"])
def test_a_grade_that_is_no_number_is_an_error(tmp_path: Path, value: str) -> None:
    reward = built(name=written(tmp_path, f"return {value}"))
    assert reward(batch([{}] * 4)).parts["verifier/error"].tolist() == [1] * 4


def test_a_function_that_does_not_take_a_row_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def grade(completion): return 1\n")
    with pytest.raises(RewardError, match=r"is called with \(completion, row\).*Write grade\(completion, row\)"):
        source(name=f"{tmp_path / 'mine.py'}:grade").check()


def test_the_right_answer_is_that_of_the_rows_own_verifier() -> None:
    source = validate(VerifierSource, {"type": "verifier", "name": "math"})
    assert source.reference({"answer": "42"}) == "The answer is \\boxed{42}."
    assert source.reference({"verifier": "choice", "answer": "B"}) == "The answer is B."
    assert source.reference({"verifier": "json", "keys": {"a": "integer"}}) == '{"a": 1}'

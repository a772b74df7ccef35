"""A run whose cost is limited: its training score, its log, its continuation, and that the cost arrives."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from runs import largest_difference, make_model, online, pairs_file, ppo_tree, quiet, trained, weights, write_rows
from tiny_models import completions_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf.api.training import run_reward_model
from rlhf.config.files import merge
from rlhf.config.load import validate
from rlhf.config.sections import RewardModelConfig
from rlhf.errors import ConfigError, RewardError
from rlhf.rewards.cost import COST, REWARD, CostedReward
from rlhf.rewards.source import unpadded_ids
from rlhf.tracking.metrics import Metrics
from rlhf.training.collect import sample_and_score
from rlhf.training.kl_control import update_coefficients
from rlhf.training.online import train
from rlhf.training.rollout import cost_metrics
from rlhf.types import Completions, Scores


def count_good(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """A reward: how many words are `good`."""
    return [float(text.split().count("good")) for text in completions]


def squared(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """A cost that is at odds with it: the square of that number."""
    return [float(text.split().count("good") ** 2) for text in completions]


SOURCE = {"type": "function", "target": f"{__file__}:squared"}
COSTED: dict[str, Any] = {"reward": {"cost": {"source": SOURCE}}}


def limited(folder: Path, preset: str = "ppo_lag", **lagrange: float) -> dict[str, Any]:
    tree = ppo_tree(folder, **COSTED, eval={"every": 0}, checkpoint={"every": 2})
    algorithm = {"algorithm": {"preset": preset, "lagrange": {"cost_limit": 1.0, **lagrange}}}
    if preset != "ppo_lag":
        del tree["critic"]
        algorithm |= {"sampling": {"completions_per_prompt": 4}, "batch": {"prompts_per_step": 8}}
    return merge(tree, algorithm)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


BATCH = completions_of([[5]] * 3, [[3], [4], [3]])


def source(values: list[float], **parts: list[float]) -> Any:
    tensors = {name: torch.tensor(part) for name, part in parts.items()}
    return lambda _: Scores(values=torch.tensor(values), parts=tensors)


def test_score_and_cost_are_combined_and_both_are_kept() -> None:
    reward = source([4.0, 1.0, 0.0], raw=[5.0, 1.0, 0.0])
    both = CostedReward(reward, source([2.0, -1.0, 0.0], toxic=[1.0, 0.0, 0.0]), lambda s, c: (s - 3 * c) / 4)(BATCH)
    assert both.values.tolist() == [-0.5, 1.0, 0.0]
    assert both.parts[REWARD].tolist() == [4.0, 1.0, 0.0]
    assert both.parts[COST].tolist() == [2.0, -1.0, 0.0]
    assert both.parts["cost.toxic"].tolist() == [1.0, 0.0, 0.0]
    assert both.parts["raw"].tolist() == [5.0, 1.0, 0.0]
    assert CostedReward(reward, source([2.0, -1.0, 0.0]), None)(BATCH).values.tolist() == [4.0, 1.0, 0.0]


def test_a_part_of_the_reward_with_the_name_of_a_cost_is_refused() -> None:
    clash = source([1.0] * 3, **{"cost.toxic": [0.0] * 3})
    with pytest.raises(RewardError, match=r"part 'cost\.toxic'"):
        CostedReward(clash, source([1.0] * 3, toxic=[0.0] * 3), None)(BATCH)


def test_completions_without_a_cost_do_not_count() -> None:
    """A cost of NaN would keep the multiplier unchanged in every step that has one."""
    parts = {COST: torch.tensor([math.nan, 2.0, 4.0]), REWARD: torch.tensor([1.0, 1.0, 0.0])}
    metrics = cost_metrics(Scores(values=torch.tensor([math.nan, -1.0, -4.0]), parts=parts))
    assert (metrics["cost/mean"], metrics["cost/std"], metrics["lagrange/score"]) == (3.0, 1.0, -2.5)


def test_the_run_trains_on_the_combination_of_the_step(tmp_path: Path) -> None:
    run = online(limited(tmp_path, start=3.0))
    collected = sample_and_score(run, 1)
    assert collected is not None
    parts, values = collected.scores.parts, collected.scores.values
    assert torch.allclose(values, (parts[REWARD] - 3.0 * parts[COST]) / 4.0)
    run.session.state.multiplier = 1.0
    assert torch.allclose(run.reward(collected.completions).values, (parts[REWARD] - parts[COST]) / 2.0)
    run.session.state.violation = math.log(3.0) / (0.1 * 10.0)  # lr · lookahead
    assert torch.allclose(run.reward(collected.completions).values, (parts[REWARD] - 3.0 * parts[COST]) / 4.0)
    assert collected.metrics["cost/mean"] == pytest.approx(parts[COST].mean().item())
    assert collected.metrics["lagrange/score"] == pytest.approx(values.mean().item())


def test_nothing_goes_round_the_limit(tmp_path: Path) -> None:
    """Refused when a run begins, so that finished runs with such settings can still be read."""
    best = merge(limited(tmp_path), {"checkpoint": {"best": {}}, "eval": {"every": 2}})
    with pytest.raises(ConfigError, match=r"checkpoint\.best keeps the model with the highest score"):
        online(best)
    steps = merge(limited(tmp_path), {"reward": {"process": {"type": "function", "target": f"{__file__}:squared"}}})
    with pytest.raises(ConfigError, match=r"reward\.process is not weighed against the cost"):
        online(steps)


def test_the_multiplier_follows_the_cost_and_is_held_in_the_warm_up(tmp_path: Path) -> None:
    trained(limited(tmp_path, lr=0.05, lookahead=3.0), "critic.warmup_steps=2")
    rows = lines(tmp_path)[1:]
    multipliers = [row["lagrange/multiplier"] for row in rows]
    assert multipliers[:3] == [1.0] * 3
    violation = rows[2]["cost/mean"] - 1.0
    learned = math.exp(0.05 * violation)
    assert multipliers[3] == pytest.approx(learned * math.exp(3 * 0.05 * learned * violation))
    assert [row["lagrange/violation"] for row in rows] == pytest.approx([row["cost/mean"] - 1.0 for row in rows])
    assert all(row["score/mean"] == pytest.approx(row["score/raw"]) for row in rows)  # the reward, before the cost
    assert lines(tmp_path)[0]["eval/cost"] >= 0.0


def step_metrics(cost: float) -> Metrics:
    """The metrics of a step that a fixed penalty and the multiplier are moved by."""
    metrics = Metrics()
    metrics.add("cost/mean", cost)
    return metrics


def test_an_unknown_cost_moves_nothing(tmp_path: Path) -> None:
    run = online(limited(tmp_path))
    state = run.session.state
    state.multiplier, state.violation = 1.7, 0.2
    update_coefficients(run, step_metrics(math.nan), completions=8, step=5)
    assert (state.multiplier, state.violation) == (1.7, 0.2)
    update_coefficients(run, step_metrics(1.5), completions=8, step=5)
    assert (state.multiplier, state.violation) == (pytest.approx(1.7 * math.exp(0.1 * 1.7 * 0.5)), 0.5)
    run.session.recorder.close()


def test_a_cost_without_a_multiplier_is_measured_and_changes_nothing(tmp_path: Path) -> None:
    plain = trained(ppo_tree(tmp_path, schedule={"steps": 2}))
    (tmp_path / "run").rename(tmp_path / "plain")
    measured = trained(ppo_tree(tmp_path, **COSTED, schedule={"steps": 2}))
    assert largest_difference(weights(plain.models.policy), weights(measured.models.policy)) == 0.0
    before = (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()
    for old, row in zip(map(json.loads, before), lines(tmp_path), strict=True):
        assert {name: row[name] for name in old} == old
        assert "lagrange/multiplier" not in row
    assert lines(tmp_path)[-1]["cost/mean"] > 0


PRESETS = ("ppo_lag", "grpo", "rloo", "reinforce_pp", "online_dpo", "remax")


@pytest.mark.parametrize("preset", quick(PRESETS, ["ppo_lag", "grpo", "online_dpo", "remax"]))
def test_every_kind_of_algorithm_can_have_a_multiplier(tmp_path: Path, preset: str) -> None:
    changes = ["schedule.steps=2", *(["batch.epochs=1", "batch.minibatches=1"] if preset == "remax" else [])]
    trained(limited(tmp_path, preset, lookahead=0.0), *changes)
    rows = lines(tmp_path)[1:]
    assert rows[1]["lagrange/multiplier"] == pytest.approx(math.exp(0.1 * rows[0]["lagrange/violation"]))
    assert rows[0]["policy/first_ratio_deviation"] < 5e-5


def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    tree, metrics = limited(tmp_path), tmp_path / "run" / "metrics.jsonl"
    whole, expected = trained(tree), metrics.read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")  # as after a kill in step 4, which left its lines
    resumed = trained(tree)
    assert resumed.session.resumed
    assert resumed.session.state.multiplier == whole.session.state.multiplier != 1.0
    assert resumed.session.state.violation == whole.session.state.violation != 0.0
    assert largest_difference(weights(whole.models.policy), weights(resumed.models.policy)) == 0.0
    assert metrics.read_bytes() == expected


def test_other_settings_begin_with_their_own_multiplier(tmp_path: Path) -> None:
    trained(limited(tmp_path), "schedule.steps=2")
    again = online(limited(tmp_path, start=5.0), "schedule.steps=3", "checkpoint.resume=always")
    assert (again.session.state.multiplier, again.session.state.violation) == (5.0, 0.0)
    again.session.recorder.close()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ppo_lag", "rloo"])
def test_the_cost_arrives_at_its_limit(tmp_path: Path, preset: str) -> None:
    """Without a limit the policy says `good` five or six times, at a cost of 25 and more."""
    sizes = {"ppo_lag": ["batch.prompts_per_step=64"], "rloo": ["batch.prompts_per_step=16"]}[preset]
    changes = [*sizes, "schedule.steps=60", "policy.lr=3e-3", "batch.micro_batch_size=64", "batch.minibatches=1"]
    tree = merge(limited(tmp_path, preset, cost_limit=4.0, lr=0.1), {"checkpoint": {"every": 0}})
    tree["reward"]["source"]["target"] = f"{__file__}:count_good"
    trained(tree, *changes)
    rows = lines(tmp_path)
    late = [row["cost/mean"] for row in rows[-15:]]
    assert sum(late) / len(late) == pytest.approx(4.0, rel=0.1)
    assert rows[-1]["score/mean"] > 1.5


def test_a_cost_that_fails_stops_the_run_as_a_reward_does(tmp_path: Path) -> None:
    run = online(limited(tmp_path))

    def broken(completions: Completions) -> Scores:
        raise RewardError("no cost today")

    with pytest.raises(RewardError, match="no cost today"):
        train(replace(run, reward=CostedReward(run.reward, broken, None)))
    run.session.recorder.close()


def harmful_first(folder: Path, seed: int = 0) -> str:
    """Pairs whose chosen side is the more harmful one: it says `bad` more often, or `good` less often."""
    rows = [json.loads(line) for line in pairs_file(folder, seed=seed).read_text().splitlines()]
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    return str(write_rows(folder / f"harmful_first-{seed}.jsonl", swapped))


def train_cost_model(folder: Path) -> str:
    settings = {
        "run": {"out_dir": str(folder / "cost_model"), "device": "cpu"},
        "data": {
            "preferences": {"path": harmful_first(folder)},
            "eval_preferences": {"path": harmful_first(folder, seed=1)},
        },
        "model": {"model": str(make_model(folder / "model")), "lr": 1e-2},
        "batch": {"prompts_per_step": 16, "micro_batch_size": 16},
        "schedule": {"steps": 10, "epochs": None},
        "checkpoint": {"every": 0},
    }
    assert run_reward_model(validate(RewardModelConfig, settings), quiet())
    return str(folder / "cost_model")


class Classifier:
    """The exported cost model as transformers loads it, with the shift and scale of its config.json."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/model").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> float:
        raw = self.model.score(self.model.model(torch.tensor([ids])).last_hidden_state[0, -1]).item()
        return float((raw - self.model.config.score_mean) / self.model.config.score_std)

    def of_text(self, text: str) -> float:
        return self(self.tokenizer(text)["input_ids"])


def test_a_cost_model_trained_on_pairs_is_the_cost_and_moves_the_multiplier(tmp_path: Path) -> None:
    path = train_cost_model(tmp_path)
    classify = Classifier(path)
    assert classify.of_text("red one bad bad") > classify.of_text("red one good good")  # higher is worse
    for limit in (-5.0, 5.0):
        tree = merge(limited(tmp_path / str(limit), cost_limit=limit), {"data": {"eval_prompts": None}})
        tree["reward"]["cost"]["source"] = {"type": "model", "path": path}
        run = online(tree, "schedule.steps=2")
        collected = sample_and_score(run, 1)
        train(run)
        run.session.recorder.close()
        assert collected is not None
        rows = [[*prompt, *text] for prompt, text in zip(*unpadded_ids(collected.completions), strict=True)]
        costs = torch.tensor([classify(row) for row in rows])
        torch.testing.assert_close(collected.scores.parts[COST], costs, rtol=0, atol=1e-5)
        first, second = lines(tmp_path / str(limit))
        assert first["cost/mean"] == pytest.approx(costs.mean().item(), abs=1e-5)
        assert first["lagrange/multiplier"] == 1.0
        assert (second["lagrange/multiplier"] > 1.0) == (first["cost/mean"] > limit) == (limit < 0)

"""A critic that trains for more epochs than the policy (critic.epochs), and one with a λ of its own, in a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import largest_difference, online, ppo_tree, trained, weights

from rlhf.comparison.costs import Costs, CostTracker, Sizes, online_flops
from rlhf.config.compare import BudgetConfig
from rlhf.config.load import train_config
from rlhf.errors import ConfigError
from rlhf.experience import compute_advantages
from rlhf.training.annotate import annotate
from rlhf.training.collect import sample_and_score
from rlhf.training.losses import CriticLoss
from rlhf.training.online import update
from rlhf.training.online_run import OnlineRun, lr_factor_at, minibatches_of
from rlhf.training.step import LossBatch, optimizer_step
from rlhf.types import Experience

ONE_EPOCH = {"batch": {"epochs": 1, "minibatches": 2}}
MORE_EPOCHS = {**ONE_EPOCH, "critic": {"epochs": 3}}


def lines(run: OnlineRun) -> list[dict[str, Any]]:
    return run.session.recorder.folder.read_metrics()[1:]


def test_a_run_with_a_lambda_of_the_critic_moves_its_critic_otherwise(tmp_path: Path) -> None:
    advantage = {"gae_lambda": 0.5}
    plain = trained(ppo_tree(tmp_path / "a", algorithm={"advantage": advantage}), "schedule.steps=1")
    other = trained(
        ppo_tree(tmp_path / "b", algorithm={"advantage": {**advantage, "critic_lambda": 1.0}}), "schedule.steps=1"
    )
    assert largest_difference(weights(plain.models.policy), weights(other.models.policy)) == 0.0
    assert plain.models.critic is not None
    assert other.models.critic is not None
    assert largest_difference(weights(plain.models.critic), weights(other.models.critic)) > 1e-5


def test_the_critic_goes_on_alone(tmp_path: Path) -> None:
    plain = trained(ppo_tree(tmp_path / "a", **ONE_EPOCH), "schedule.steps=1")
    more = trained(ppo_tree(tmp_path / "b", **MORE_EPOCHS), "schedule.steps=1")
    assert largest_difference(weights(plain.models.policy), weights(more.models.policy)) == 0.0
    assert plain.models.critic is not None
    assert more.models.critic is not None
    assert largest_difference(weights(plain.models.critic), weights(more.models.critic)) > 1e-4
    (few,), (many,) = lines(plain), lines(more)
    assert "critic/extra_tokens" not in few
    assert many["critic/extra_tokens"] == 2 * many["completion/trained_tokens"] > 0
    same = ("policy/optimizer_steps", "loss/policy", "loss/total", "kl/old_last", "policy/ratio")
    assert [many[name] for name in same] == [few[name] for name in same]
    assert many["loss/value"] < few["loss/value"]  # a mean over six optimizer steps instead of two


def test_the_epochs_alone_are_optimizer_steps_of_the_value_loss(tmp_path: Path) -> None:
    """The critic after the run is the critic of one epoch, moved by four more steps that are taken here."""
    one, more = (online(ppo_tree(tmp_path / name, **settings), "schedule.steps=1")
                 for name, settings in (("a", ONE_EPOCH), ("b", MORE_EPOCHS)))  # fmt: skip

    def stepped(run: OnlineRun) -> Experience:
        collected = sample_and_score(run, 1)
        assert collected is not None
        rows = compute_advantages(annotate(run, collected), run.algorithm, run.coefs)
        update(rows, run, 1)
        return rows

    rows = stepped(one)
    for epoch in (1, 2):
        for minibatch in minibatches_of(rows, one, 1, epoch):
            assert one.critic is not None
            parts = [LossBatch(minibatch, CriticLoss(one.models, one.objective))]
            optimizer_step(parts, [one.critic], micro_batch_size=one.rows, lr_factor=lr_factor_at(one, 1))
    stepped(more)
    assert one.models.critic is not None
    assert more.models.critic is not None
    assert largest_difference(weights(one.models.critic), weights(more.models.critic)) == 0.0
    for run in (one, more):
        run.session.recorder.close()


def test_the_warm_up_is_the_same_training_of_the_critic_without_the_policys_passes(tmp_path: Path) -> None:
    both = trained(ppo_tree(tmp_path / "a"), "schedule.steps=1")
    allowed = "guard.allow=[critic-warmup-covers-the-run]"
    warm = trained(ppo_tree(tmp_path / "b", critic={"warmup_steps": 1}), "schedule.steps=1", allowed)
    assert both.models.critic is not None
    assert warm.models.critic is not None
    assert largest_difference(weights(both.models.critic), weights(warm.models.critic)) == 0.0
    (beside,), (alone,) = lines(both), lines(warm)
    assert alone["critic/extra_tokens"] == beside["completion/trained_tokens"]
    assert alone["completion/trained_tokens"] == alone["policy/optimizer_steps"] == 0.0
    assert "loss/policy" in beside
    assert not {"loss/policy", "kl/old", "kl/old_last", "policy/first_ratio_deviation"} & set(alone)
    assert alone["loss/value"] == beside["loss/value"]


def test_the_critic_trains_alone_once_the_policys_step_is_searched(tmp_path: Path) -> None:
    settings = {"batch": {"epochs": 3, "minibatches": 1}, "policy": {"lora": {"r": 1}}}
    clipped = trained(ppo_tree(tmp_path / "a", **settings), "schedule.steps=1")
    searched = trained(ppo_tree(tmp_path / "b", **settings), "schedule.steps=1", "algorithm.preset=trpo")
    assert clipped.models.critic is not None
    assert searched.models.critic is not None
    assert largest_difference(weights(clipped.models.critic), weights(searched.models.critic)) == 0.0
    (of_three,), (of_one,) = lines(clipped), lines(searched)
    assert of_one["policy/optimizer_steps"] == 1.0
    assert of_one["completion/trained_tokens"] + of_one["critic/extra_tokens"] == of_three["completion/trained_tokens"]
    assert of_one["critic/extra_tokens"] == 2 * of_one["completion/trained_tokens"]


def test_the_critic_goes_on_if_the_policy_stops(tmp_path: Path) -> None:
    settings = {"batch": {"epochs": 2, "minibatches": 2}, "algorithm": {"target_kl": 1e-9}}
    run = trained(ppo_tree(tmp_path, **settings, critic={"epochs": 4}), "schedule.steps=1")
    (line,) = lines(run)
    assert line["policy/early_stop"] == 1.0
    assert line["policy/optimizer_steps"] < 4
    whole = line["completion/trained_tokens"] * 4 / line["policy/optimizer_steps"]  # of two epochs
    assert line["critic/extra_tokens"] == pytest.approx(whole, rel=0.2)


def test_the_epochs_alone_and_a_search_are_paid_for(tmp_path: Path) -> None:
    """The epochs at 6 FLOPs per parameter of the critic and token, a forward pass of the policy at 2."""
    tree = ppo_tree(tmp_path)
    run, config = online(tree), train_config(tree)
    tracker = CostTracker(tmp_path, run, config, BudgetConfig(completions=100))
    tracker.sizes = Sizes(policy=100, critic=50)
    metrics = {"completion/count": 8.0, "completion/generated_tokens": 30.0, "completion/trained_tokens": 80.0}
    tracker.spend(1, metrics | {"critic/extra_tokens": 40.0}, tokens=40, seconds=1.0)
    spent = Costs.of(json.loads((tmp_path / "costs.jsonl").read_text()))
    assert spent.trained_tokens == 120
    assert spent.flops == online_flops(tracker.sizes, tokens=40, passes=2.0) + 6 * 50 * 40
    before = spent.flops
    tracker.spend(2, metrics | {"trust_region/forward_passes": 9.0}, tokens=40, seconds=1.0)
    both = Costs.of(json.loads((tmp_path / "costs.jsonl").read_text().splitlines()[-1]))
    assert both.flops - before == online_flops(tracker.sizes, tokens=40, passes=2.0) + 9 * 2 * 100 * 80
    run.session.recorder.close()


@pytest.mark.parametrize(
    "critic, message",
    [
        ({"epochs": 1}, "critic.epochs is 1, but the critic trains in each of the 2 epochs"),
        ({"epochs": 3, "shared": True, "init": "auto"}, "critic.epochs trains the critic alone"),
    ],
)
def test_epochs_that_cannot_be(tmp_path: Path, critic: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_config(ppo_tree(tmp_path, batch={"epochs": 2}, critic=critic))

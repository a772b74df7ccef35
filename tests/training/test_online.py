"""The online loop at its seams: steps with nothing to learn, controllers that hold, the temperature of each loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import largest_difference, online, ppo_tree, trained, weights, write_rows

from rlhf.algorithms.sft import Sft
from rlhf.models.policy_models import Models
from rlhf.rewards.source import RewardSource
from rlhf.sampling.fast.kv_cache import UnsupportedModel
from rlhf.training.losses import DemonstrationLoss
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun, row_order
from rlhf.training.step import optimizer_step
from rlhf.types import Completions, Demonstrations, Scores

GROUPS: dict[str, Any] = {
    "algorithm": {"preset": "dr_grpo"},
    "sampling": {"completions_per_prompt": 3},
    "batch": {"prompts_per_step": 8},
    "critic": {"init": "auto"},
}


class TiesAfter:
    """Scores like `source` for so many calls, and every completion the same from then on."""

    def __init__(self, source: RewardSource, calls: int) -> None:
        self.source, self.left = source, calls

    def __call__(self, completions: Completions) -> Scores:
        self.left -= 1
        scores = self.source(completions)
        return scores if self.left >= 0 else Scores(values=torch.full_like(scores.values, 0.1), parts={})


def lines(run: OnlineRun) -> list[dict[str, Any]]:
    return run.session.recorder.folder.read_metrics()


def test_a_run_tells_why_it_samples_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds out in its first rollout, when the notes of its start are logged."""

    def refuses(*_: object, **__: object) -> None:
        raise UnsupportedModel("it is a test")

    monkeypatch.setattr("rlhf.sampling.fast.engine.verify_decoder", refuses)
    run = trained(ppo_tree(tmp_path), "schedule.steps=1", "overlap.ahead=true")  # two samplers
    notes = [json.loads(line)["text"] for line in run.session.recorder.folder.notes.read_text().splitlines()]
    reason = "sampling with transformers' generate, which is slower: it is a test"
    assert [note for note in notes if "generate" in note] == [reason]


def test_a_step_in_which_every_group_ties_leaves_the_policy_where_it_is(tmp_path: Path) -> None:
    """Adam's momentum of the steps before would carry it on."""
    run = online(ppo_tree(tmp_path, **GROUPS), "schedule.steps=2")
    train(run)
    moved = weights(run.models.policy)
    run.session.recorder.close()
    longer = online(ppo_tree(tmp_path, **GROUPS), "schedule.steps=5")
    assert largest_difference(weights(longer.models.policy), moved) == 0.0
    train(replace(longer, reward=TiesAfter(longer.reward, 0)))
    assert largest_difference(weights(longer.models.policy), moved) == 0.0
    last = lines(longer)[-3:]
    assert [line["group/uniform"] for line in last] == [1.0] * 3
    assert [line["policy/optimizer_steps"] for line in last] == [0.0] * 3
    assert [line["policy/grad_norm"] for line in last] == [0.0] * 3
    assert [line["skipped/zero_gradient"] for line in last] == [4.0, 8.0, 12.0]  # 2 epochs x 2 minibatches a step
    assert json.loads((longer.session.checkpoints.all()[-1] / "state.json").read_text())["state"]["idle"] == 12


def test_a_group_that_does_not_tie_moves_the_policy(tmp_path: Path) -> None:
    run = online(ppo_tree(tmp_path, **GROUPS), "schedule.steps=1")
    before = weights(run.models.policy)
    train(run)
    assert largest_difference(weights(run.models.policy), before) > 1e-3
    assert lines(run)[-1]["policy/optimizer_steps"] == 4.0
    assert lines(run)[-1]["skipped/zero_gradient"] == 0.0


@pytest.mark.parametrize(("minibatches", "sizes"), [(8, [2, 2, 1, 1, 1, 1, 1, 1]), (5, [2] * 5), (3, [4, 3, 3])])
def test_a_step_has_as_many_minibatches_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minibatches: int, sizes: list[int]
) -> None:
    dealt: list[int] = []

    def counted(parts: Any, *arguments: Any, **settings: Any) -> Any:
        dealt.append(len(parts[0].batch))
        return optimizer_step(parts, *arguments, **settings)

    monkeypatch.setattr("rlhf.training.online.optimizer_step", counted)
    sized = {"batch": {"prompts_per_step": 10, "epochs": 1, "minibatches": minibatches}, "eval": {"every": 0}}
    run = trained(ppo_tree(tmp_path, **sized), "schedule.steps=1")
    assert dealt == sizes
    assert lines(run)[-1]["policy/optimizer_steps"] == minibatches


def test_without_shuffling_minibatches_are_the_same_in_every_epoch_and_step(tmp_path: Path) -> None:
    run = online(ppo_tree(tmp_path))
    orders = [row_order(run, 12, step, epoch).tolist() for step, epoch in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(12)) for order in orders)
    fixed = online(ppo_tree(tmp_path), "batch.shuffle=false")
    assert row_order(fixed, 12, 1, 0).tolist() == row_order(fixed, 12, 2, 1).tolist() == list(range(12))


def test_controllers_hold_while_the_critic_warms_up(tmp_path: Path) -> None:
    """KL is 0 by construction then: the coefficient would fall, and the penalty's halve, at every step."""
    kl = {"coef": 0.05, "controller": {"type": "adaptive", "target": 6.0, "horizon": 100}}
    tree = ppo_tree(tmp_path, algorithm={"preset": "ppo_penalty", "kl": kl}, critic={"warmup_steps": 2})
    rows = lines(trained(tree))[1:]
    assert [row["kl/coef"] for row in rows[:3]] == [0.05] * 3
    assert [row["kl/penalty_coef"] for row in rows[:3]] == [1.0] * 3
    assert [row["policy/optimizer_steps"] for row in rows] == [0.0, 0.0, 4.0, 4.0]
    assert rows[3]["kl/coef"] < 0.05  # 0.05 (1 - 0.2 * 16 / 100) if KL is far below its target
    assert rows[3]["kl/coef"] == pytest.approx(0.05 * (1 - 0.2 * 16 / 100))


def test_the_penalty_loss_on_the_best_holds_its_coefficient_where_nothing_is_kept(tmp_path: Path) -> None:
    algorithm = {
        "preset": "rejection_sampling",
        "advantage": {"min_score": 100.0},
        "policy_loss": {"type": "penalty"},
    }
    tree = ppo_tree(tmp_path, algorithm=algorithm, batch={"epochs": 2}, critic={"init": "auto"})
    rows = lines(trained(tree, "schedule.steps=2"))[1:]
    assert [row["kept/count"] for row in rows] == [0.0, 0.0]
    assert [row["kl/penalty_coef"] for row in rows] == [1.0, 1.0]


def test_the_ptx_loss_is_at_temperature_1_whatever_is_sampled_at(tmp_path: Path) -> None:
    sft = write_rows(tmp_path / "sft.jsonl", [{"prompt": "red one", "completion": " good good"}] * 4)
    data = {"sft": {"path": str(sft)}}
    tree = ppo_tree(tmp_path, data=data, algorithm={"ptx_coef": 0.5}, sampling={"temperature": 0.5})
    run = online(tree)
    assert run.ptx is not None
    batch = run.ptx(1, 0)
    terms, observed = DemonstrationLoss(run.models, Sft(), name="ptx").terms(batch)
    assert terms["ptx"].item() == pytest.approx(likelihood(run.models, batch), rel=1e-5)
    assert observed["loss/ptx"].total == pytest.approx(likelihood(run.models, batch), rel=1e-5)


def test_demonstrations_beyond_the_context_are_not_mixed_in(tmp_path: Path) -> None:
    """The model has 64 positions, data.sft.max_tokens is 2,048: PPO-ptx keeps to the context, like SFT."""
    long, short = " good" * 80, " good good"
    sft = write_rows(tmp_path / "sft.jsonl", [{"prompt": "red one", "completion": text} for text in (long, short)] * 8)
    run = online(ppo_tree(tmp_path, data={"sft": {"path": str(sft)}}, algorithm={"ptx_coef": 0.5}))
    assert run.ptx is not None
    batches = [run.ptx(step, update) for step in (1, 2, 3) for update in range(4)]
    assert max(int(batch.live_tokens().max()) for batch in batches) <= 64


def test_a_run_that_was_stopped_before_a_checkpoint_starts_again_with_its_own_config(tmp_path: Path) -> None:
    tree = ppo_tree(tmp_path)
    first = online(tree, "policy.lr=0.5")
    first.session.recorder.close()
    run = trained(tree, "policy.lr=0.001", "schedule.steps=2")
    assert run.session.recorder.folder.read_config()["policy"]["lr"] == 0.001
    again = online(tree, "policy.lr=0.002", "schedule.steps=2")  # from a checkpoint: the value at the run's start stays
    again.session.recorder.close()
    assert again.session.recorder.folder.read_config()["policy"]["lr"] == 0.001


def likelihood(models: Models, batch: Demonstrations) -> float:
    """The negative log-likelihood of all completion tokens, from plain softmaxes row by row."""
    total = 0.0
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row]]
        own = batch.completion_ids[row][batch.completion_mask[row]]
        with torch.no_grad():
            logits = models.policy(torch.cat([prompt, own])[None]).logits[0, len(prompt) - 1 : -1]
        total -= float(logits.double().log_softmax(-1).gather(1, own[:, None]).sum())
    assert math.isfinite(total)
    return total

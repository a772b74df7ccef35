"""Runs that must be the same run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from runs import largest_difference, make_model, online, ppo_tree, quiet, trained, trained_offline, weights, write_rows

from rlhf.config.files import merge
from rlhf.config.load import validate
from rlhf.config.sections import RewardModelConfig
from rlhf.errors import ConfigError
from rlhf.experience import compute_advantages
from rlhf.factory.reward_model import build_reward_model
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training.offline import train_offline
from rlhf.training.online import train, update
from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import compute_logprobs_and_values
from rlhf.types import Experience

EXACT = {"policy": {"dtype": "float64", "optimizer": "sgd"}, "critic": {"optimizer": "sgd"}}
UNEVALUATED = {"data": {"eval_prompts": None}, "eval": {"every": 0}, "checkpoint": {"every": 0}}
PRESETS = (
    *("ppo", "ppo_penalty", "grpo", "rloo", "gspo", "cispo", "dapo", "dr_grpo", "reinforce_pp"),
    *("online_dpo", "rejection_sampling"),
)


# Passes of unequal sizes. One row at a time is the same code: two presets show it, one of rows and one of pairs.
RAGGED = ("micro_batch_size=3", "micro_batch_tokens=30")
ONE_ROW = ("micro_batch_size=1", "micro_batch_tokens=1")
PASSES = dict.fromkeys(PRESETS, RAGGED) | dict.fromkeys(("ppo", "online_dpo"), (*RAGGED, *ONE_ROW))


def exact(folder: Path, preset: str) -> dict[str, Any]:
    """A run in float64; only its final weights are compared."""
    make_model(folder / "model", dtype=torch.float64)
    tree = merge(merge(ppo_tree(folder), EXACT), UNEVALUATED)
    tree["algorithm"] = {"preset": preset}
    tree["sampling"] = {**tree["sampling"], "completions_per_prompt": 4}
    tree["batch"] = {**tree["batch"], "prompts_per_step": 5, "minibatches": 3}  # 20 rows in minibatches of 7, 7, 6
    return tree


def one_update(tree: dict[str, Any], experience: Experience | None, *settings: str) -> tuple[Any, Experience]:
    shutil.rmtree(Path(tree["run"]["out_dir"]), ignore_errors=True)
    run = online(tree, *settings)
    before = weights(run.models.policy)
    if experience is None:
        completions = run.sampler.sample(run.prompts(1), key=1, group_size=4)
        rollout = compute_logprobs_and_values(
            completions, run.reward(completions), run.models, cut=AdaptiveMicroBatch(7).cut
        )
        experience = compute_advantages(rollout, run.algorithm, run.coefs)
    update(experience, run, 1)
    assert largest_difference(before, weights(run.models.policy)) > 1e-6
    modules = {"policy": run.models.policy} | ({"critic": run.models.critic} if run.models.critic else {})
    return {f"{n}.{k}": v for n, m in modules.items() for k, v in weights(m).items()}, experience


@pytest.mark.parametrize("preset", quick(PRESETS, ["ppo", "gspo", "dr_grpo", "online_dpo"]))
def test_the_micro_batch_size_does_not_change_an_update(tmp_path: Path, preset: str) -> None:
    tree = exact(tmp_path, preset)
    whole, experience = one_update(tree, None, "batch.micro_batch_size=64")
    for micro in PASSES[preset]:
        parts, _ = one_update(tree, experience, f"batch.{micro}")
        assert largest_difference(whole, parts) < 1e-10


def test_a_reference_that_is_only_measured_changes_nothing(tmp_path: Path) -> None:
    final_weights = []
    for measure in ("true", "false"):
        tree = exact(tmp_path, "grpo")
        shutil.rmtree(Path(tree["run"]["out_dir"]), ignore_errors=True)
        run = trained(tree, "algorithm.kl.coef=0.0", f"reference.measure={measure}", "schedule.steps=2")
        final_weights.append(weights(run.models.policy))
        named = "kl/reference" in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
        assert named == run.models.has_reference == (measure == "true")
    assert largest_difference(*final_weights) == 0.0


def test_a_reference_that_is_learned_from_cannot_be_left_out(tmp_path: Path) -> None:
    for preset in ("ppo", "grpo", "online_dpo"):
        with pytest.raises(ConfigError, match=r"reference\.measure=true"):
            online(exact(tmp_path, preset), "reference.measure=false")


def test_a2c_is_ppo_at_one_epoch_of_one_minibatch(tmp_path: Path) -> None:
    whole = {}
    for preset in ("ppo", "a2c"):
        sizes = {"batch": {"epochs": 1, "minibatches": 1}, "schedule": {"steps": 2}}
        tree = merge(exact(tmp_path, preset), sizes)
        shutil.rmtree(Path(tree["run"]["out_dir"]), ignore_errors=True)
        before = weights(online(tree).models.policy)
        models = trained(tree).models
        whole[preset] = weights(models.policy) | {f"critic.{k}": v for k, v in weights(models.critic).items()}
        assert largest_difference(before, {k: whole[preset][k] for k in before}) > 1e-4
    assert largest_difference(whole["ppo"], whole["a2c"]) < 1e-12


def test_refilling_changes_nothing_where_no_group_is_uniform(tmp_path: Path) -> None:
    """With 16 completions of a fresh model no group is uniform."""
    final_weights = []
    for rounds in (0, 3):
        tree = merge(exact(tmp_path, "dapo"), {"sampling": {"completions_per_prompt": 16}, "schedule": {"steps": 1}})
        shutil.rmtree(Path(tree["run"]["out_dir"]), ignore_errors=True)
        final_weights.append(weights(trained(tree, f"algorithm.refill_rounds={rounds}").models.policy))
    assert largest_difference(*final_weights) == 0.0


def test_the_sampler_does_not_see_the_batch(tmp_path: Path) -> None:
    tree = ppo_tree(tmp_path)
    run, small = online(tree), online(tree, "sampling.batch_size=3")
    a, b = (one.sampler.sample(run.prompts(3), key=9, group_size=2) for one in (run, small))
    assert torch.equal(a.completion_ids, b.completion_ids)
    assert torch.equal(a.completion_mask, b.completion_mask)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / "run" / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}


RESUMABLE: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": {"kl": {"controller": {"type": "adaptive", "target": 1.0, "horizon": 100}}}},
    "warm, averaged, early stop": {
        "policy": {"ema_decay": 0.5},
        "critic": {"warmup_steps": 1, "epochs": 3},
        "algorithm": {"target_kl": 0.001},
        "schedule": {"warmup_steps": 2, "decay": "cosine"},
    },
    "shared critic": {"critic": {"shared": True}},
    "penalty": {"algorithm": {"preset": "ppo_penalty"}},
    "lora": {"policy": {"lora": {"r": 2}}},
    "greedy baselines": {"algorithm": {"preset": "remax"}, "batch": {"epochs": 1, "minibatches": 1}},
    "online dpo": {
        "algorithm": {"preset": "online_dpo", "policy_loss": {"loss": {"type": "ipo"}}},
        "sampling": {"completions_per_prompt": 3},
    },
    "rejection sampling": {
        "algorithm": {"preset": "rejection_sampling", "advantage": {"keep": 2, "min_score": 0.2}},
        "sampling": {"completions_per_prompt": 4},
    },
    "drawn ahead": {"overlap": {"ahead": True}},
    "refilled groups": {
        "algorithm": {"preset": "dapo", "refill_rounds": 2},
        "sampling": {"completions_per_prompt": 2},
    },
}


# The state that a run takes up again differs in kind; `ppo_penalty` continues in training/test_seeds.py too.
TAKEN_UP = (
    "ppo",
    "warm, averaged, early stop",
    "shared critic",
    "lora",
    "online dpo",
    "drawn ahead",
    "refilled groups",
)


@pytest.mark.parametrize("name", quick(RESUMABLE, TAKEN_UP))
def test_a_resumed_run_is_the_uninterrupted_run_bitwise(tmp_path: Path, name: str) -> None:
    tree = ppo_tree(tmp_path, **RESUMABLE[name])
    whole, expected = trained(tree), files(tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")  # as after a kill in step 4, which left its lines
    resumed = trained(tree)
    assert resumed.session.resumed
    assert_same(whole, resumed)
    assert files(tmp_path) == expected


@pytest.mark.parametrize("name", quick(["ppo", "drawn ahead"], ["drawn ahead"]))
def test_a_run_broken_off_while_it_samples_is_the_uninterrupted_run_bitwise(tmp_path: Path, name: str) -> None:
    for folder in ("a", "b"):
        make_model(tmp_path / folder / "model")
    whole = trained(ppo_tree(tmp_path / "a", **RESUMABLE[name]))
    tree = ppo_tree(tmp_path / "b", **RESUMABLE[name])
    broken = online(tree)

    class Killed(Exception):
        """Stands for SIGKILL: after step 3 has begun, the newest checkpoint is of step 2."""

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    real = broken.sampler.sample

    def sample(prompts: Any, **options: Any) -> Any:
        if broken.session.state.step == 3 and len(prompts) == 16:
            die()
        return real(prompts, **options)

    broken.sampler.sample = sample  # type: ignore[method-assign]
    if broken.ahead is not None:
        take = broken.ahead.take
        broken.ahead.take = lambda step: die() if step == 4 else take(step)  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(Killed):
        train(broken)
    broken.session.recorder.close()
    assert_same(whole, trained(tree))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def assert_same(whole: OnlineRun, resumed: OnlineRun) -> None:
    assert largest_difference(weights(whole.models.policy), weights(resumed.models.policy)) == 0.0
    if whole.models.critic is not None:
        assert resumed.models.critic is not None
        assert largest_difference(weights(whole.models.critic), weights(resumed.models.critic)) == 0.0
    assert whole.session.state == resumed.session.state


def test_a_resumed_sft_run_is_the_uninterrupted_run_bitwise(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    rows = write_rows(
        tmp_path / "sft.jsonl", [{"prompt": f"red {n}", "completion": " good"} for n in ("one", "two")] * 8
    )

    def tree(name: str) -> dict[str, Any]:
        return {
            "run": {"out_dir": str(tmp_path / name), "device": "cpu"},
            "data": {"sft": {"path": str(rows)}, "eval_sft": {"path": str(rows)}},
            "policy": {"model": str(tmp_path / "model"), "lr": 1e-2},
            "algorithm": {"preset": "sft"},
            "batch": {"prompts_per_step": 5, "micro_batch_size": 2},
            "schedule": {"steps": 6},
            "checkpoint": {"every": 2},
        }

    whole = trained_offline(tree("a"))
    trained_offline(tree("b"), "schedule.steps=4")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-000004")
    resumed = trained_offline(tree("b"))
    assert largest_difference(weights(whole.trained.module), weights(resumed.trained.module)) == 0.0
    losses = [
        json.loads(line)["eval/loss"]
        for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
        if "eval/loss" in line
    ]
    assert losses[-1] < losses[0]


def test_a_resumed_reward_model_is_the_uninterrupted_one_bitwise(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    sides = [(" good", " bad"), (" red", " bad"), (" good", " blue one")]
    rows = write_rows(
        tmp_path / "pairs.jsonl",
        [{"prompt": f"red {n}", "chosen": c, "rejected": r} for n in ("one", "two") for c, r in sides] * 3,
    )

    def tree(name: str) -> dict[str, Any]:
        return {
            "run": {"out_dir": str(tmp_path / name), "device": "cpu"},
            "data": {"preferences": {"path": str(rows)}, "eval_preferences": {"path": str(rows)}},
            "model": {"model": str(tmp_path / "model"), "lr": 1e-2},
            "batch": {"prompts_per_step": 5, "micro_batch_size": 2},
            "schedule": {"steps": 6, "epochs": None, "warmup_steps": 2},
            "checkpoint": {"every": 2},
        }

    def fitted(name: str, until: int = 6) -> dict[str, torch.Tensor]:
        built = build_reward_model(
            validate(RewardModelConfig, merge(tree(name), {"schedule": {"steps": until}})), quiet()
        )
        train_offline(built.run)
        built.run.session.recorder.close()
        return weights(built.model)

    whole = fitted("a")
    fitted("b", until=4)
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-000004")
    assert largest_difference(whole, fitted("b")) == 0.0
    rows_a, rows_b = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in "ab")
    losses = [json.loads(line)["loss/rm"] for line in rows_a if "loss/rm" in line]
    assert losses[-1] < losses[0]
    assert rows_a[-1] == rows_b[-1]

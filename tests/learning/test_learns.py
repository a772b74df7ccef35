"""Does it learn: every preset raises a known reward on a tiny model; SFT imitates; PPO-ptx does both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quick import quick
from runs import ppo_tree, trained, trained_offline, write_rows

from rlhf.config.files import merge

ONLINE = (
    *("ppo", "ppo_penalty", "a2c", "reinforce", "remax", "reinforce_pp"),
    *("grpo", "rloo", "dr_grpo", "dapo", "cispo", "gspo"),
)
ROUNDING = 5e-5  # of a ratio in float32: up to 1.001e-5 was seen, on a CPU with AVX-512
ONE_STEP = ("a2c", "reinforce", "remax")  # no importance ratio: one optimizer step for each sampled batch


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


# After so many steps each has a gold of 0.9 or more; most are there after 8.
STEPS = {"ppo_penalty": 20, "a2c": 20, "reinforce": 20, "remax": 28}


def tree_of(folder: Path, preset: str) -> dict[str, Any]:
    tree = ppo_tree(folder, schedule={"steps": STEPS.get(preset, 8)}, eval={"every": 0}, checkpoint={"every": 0})
    tree["algorithm"] = {"preset": preset}
    tree["batch"]["micro_batch_size"] = 64  # each minibatch in one pass: test_same_run.py shows the effect of the size
    if preset in ONE_STEP:
        tree = merge(tree, {"batch": {"epochs": 1, "minibatches": 1}})
    if preset not in ("ppo", "ppo_penalty", "a2c"):
        tree = merge(tree, {"sampling": {"completions_per_prompt": 4}, "batch": {"prompts_per_step": 8}})
        del tree["critic"]
    return tree


# The differences of the others from these are proven by enumeration (tests/exact).
@pytest.mark.parametrize("preset", quick(ONLINE, ["ppo", "grpo", "reinforce"]))
def test_every_online_preset_raises_the_gold(tmp_path: Path, preset: str) -> None:
    trained(tree_of(tmp_path, preset))
    rows = metrics(tmp_path)
    assert rows[0]["eval/score"] < 0.3
    assert rows[-1]["eval/score"] > 0.6
    assert all(row["policy/first_ratio_deviation"] < ROUNDING for row in rows[1:])
    assert all(row["kl/sampler_mismatch"] < 1e-5 for row in rows[1:])


def test_a_policy_that_learns_one_step_behind_raises_the_gold_too_and_its_critic_learns(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, "ppo"), "overlap.ahead=true", "schedule.steps=15")
    rows = metrics(tmp_path)
    assert rows[0]["eval/score"] < 0.3
    assert rows[-1]["eval/score"] > 0.6
    assert rows[1]["kl/sampler_mismatch"] < 1e-5  # nothing was learned before the first step
    assert all(row["kl/sampler_mismatch"] > 1e-4 for row in rows[2:])
    assert rows[1]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # its head starts at zero
    assert max(row["critic/explained_variance"] for row in rows[5:]) > 0.2


def chosen_from(folder: Path, preset: str, *overrides: str, steps: int = 15) -> list[dict[str, Any]]:
    """The metrics of some steps of 16 prompts, the sizes the preset's own but for the number of completions."""
    tree = ppo_tree(folder, schedule={"steps": steps}, eval={"every": 0}, checkpoint={"every": 0})
    tree |= {"algorithm": {"preset": preset}, "batch": {"prompts_per_step": 16, "micro_batch_size": 64}}
    del tree["critic"]
    trained(tree, *overrides)
    return metrics(folder)


@pytest.mark.parametrize("loss", quick(["dpo", "ipo", "hinge", "robust_dpo"], ["dpo"]))
def test_online_dpo_raises_the_gold_and_counts_its_pairs(tmp_path: Path, loss: str) -> None:
    steps = 30 if loss == "ipo" else 15
    rows = chosen_from(tmp_path, "online_dpo", f"algorithm.policy_loss.loss.type={loss}", steps=steps)
    assert rows[0]["eval/score"] < 0.3
    assert rows[-1]["eval/score"] > 0.6
    assert all(row["pair/count"] + row["pair/ties"] == 16.0 for row in rows[1:])
    assert all(row["group/uniform"] == row["pair/ties"] / 16 for row in rows[1:])
    learned = [row for row in rows[1:] if row["pair/count"]]
    assert all(row["policy/first_ratio_deviation"] < ROUNDING for row in learned)
    assert all(row["pair/score_gap"] > 0 for row in learned)
    assert all(row["policy/optimizer_steps"] == min(row["pair/count"], 1.0) for row in rows[1:])
    assert max(row["pair/ties"] for row in rows[1:]) > 0  # as it learns, more and more score alike


def test_a_large_beta_holds_online_dpo(tmp_path: Path) -> None:
    kl = {}
    for beta in ("0.1", "5.0"):
        (tmp_path / beta).mkdir()
        rows = chosen_from(tmp_path / beta, "online_dpo", f"algorithm.policy_loss.loss.beta={beta}", steps=5)
        kl[beta] = rows[-1]["eval/kl"]
    assert kl["0.1"] > 2.0
    assert kl["5.0"] < 0.25 * kl["0.1"]


def test_rejection_sampling_raises_the_gold_and_counts_what_it_kept(tmp_path: Path) -> None:
    rows = chosen_from(tmp_path, "rejection_sampling", "sampling.completions_per_prompt=4", steps=10)
    assert rows[0]["eval/score"] < 0.3
    assert rows[-1]["eval/score"] > 0.6
    assert all(row["kept/count"] == 16.0 for row in rows[1:])
    assert all(row["kept/score"] == pytest.approx(row["score/best_of_group"]) for row in rows[1:])
    assert all(row["policy/first_ratio_deviation"] < ROUNDING for row in rows[1:])


def test_a_threshold_leaves_prompts_without_a_completion(tmp_path: Path) -> None:
    rows = chosen_from(tmp_path, "rejection_sampling", "algorithm.advantage={keep: 8, min_score: 0.5}", steps=6)[1:]
    assert all(0 < row["kept/count"] < 128 for row in rows[:3])
    assert rows[0]["kept/none"] > 0
    assert all(row["kept/score"] >= 0.5 for row in rows)


def test_refilled_groups_are_counted_and_learned_from(tmp_path: Path) -> None:
    """As the policy learns, all of a group score alike: other prompts stand in, and the count shows their cost."""
    few = ("sampling.completions_per_prompt=2", "schedule.steps=12")
    run = trained(tree_of(tmp_path, "dapo"), "algorithm.refill_rounds=2", *few)
    rows = metrics(tmp_path)
    assert rows[-1]["eval/score"] > 0.6
    extra = [row["completion/extra"] for row in rows[1:]]
    assert max(extra) > 0
    assert rows[-1]["completion/count"] == run.session.state.completions == sum(16 + each for each in extra)
    refilled = [row for row in rows[1:] if row["group/refilled"] > 0]
    assert len(refilled) > 3
    assert all(row["policy/first_ratio_deviation"] < ROUNDING for row in rows[1:])
    assert any(row["score/first_draw"] != pytest.approx(row["score/mean"]) for row in refilled)


def test_greedy_baselines_are_counted(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, "remax"), "schedule.steps=3")
    rows = metrics(tmp_path)[1:]
    assert [row["completion/count"] for row in rows] == [40.0, 80.0, 120.0]  # 8 prompts: 32 sampled, 8 greedy
    assert all(row["completion/extra"] == 8.0 for row in rows)
    assert all(-1.0 <= row["score/greedy"] <= 1.0 for row in rows)


def test_a_large_kl_coefficient_holds_the_policy(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, "ppo"), "algorithm.kl.coef=20.0")
    penalized = metrics(tmp_path)[-1]["eval/kl"]
    trained(tree_of(tmp_path, "ppo"), "algorithm.kl.coef=0.0", f"run.out_dir={tmp_path / 'run' / 'free'}")
    free = json.loads((tmp_path / "run" / "free" / "metrics.jsonl").read_text().splitlines()[-1])["eval/kl"]
    assert free > 2.0
    assert penalized < 0.25 * free


def test_adaptive_kl_moves_the_coefficient_by_the_kl_of_each_step(tmp_path: Path) -> None:
    """Ziegler et al. 2019, sec. 2.2: times 1 + clip(KL / target - 1, -0.2, 0.2) · completions / horizon."""
    controller = "{type: adaptive, target: 0.5, horizon: 100}"
    run = trained(tree_of(tmp_path, "ppo"), f"algorithm.kl={{coef: 0.05, controller: {controller}}}")
    rows = metrics(tmp_path)[1:]
    errors = [min(max(row["kl/reference"] / 0.5 - 1, -0.2), 0.2) for row in rows]
    assert min(errors) == -0.2
    assert max(errors) == 0.2
    expected = [row["kl/coef"] * (1 + error * 16 / 100) for row, error in zip(rows, errors, strict=True)]
    assert [*[row["kl/coef"] for row in rows[1:]], run.coefs.kl] == pytest.approx(expected)


@pytest.mark.slow
def test_adaptive_kl_moves_the_coefficient_towards_its_target(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "ppo")
    controller = "{type: adaptive, target: 1.0, horizon: 100}"
    overrides = ["schedule.steps=60", "policy.lr=3e-3", "critic.lr=3e-3", "batch.prompts_per_step=32"]
    trained(tree, f"algorithm.kl={{coef: 0.05, controller: {controller}}}", *overrides)
    rows = metrics(tmp_path)[1:]
    last = [row["kl/reference"] for row in rows[-15:]]
    assert rows[-1]["kl/coef"] > 0.1
    assert sum(last) / len(last) == pytest.approx(1.0, abs=0.3)


def test_target_kl_ends_a_step_early(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, "ppo"), "algorithm.target_kl=1e-6", "schedule.steps=3", "batch.epochs=4")
    rows = metrics(tmp_path)[1:]
    assert all(row["policy/early_stop"] == 1.0 for row in rows)
    assert all(row["policy/optimizer_steps"] == 2.0 for row in rows)  # the first has KL 0, the second shows the move


def test_critic_warmup_leaves_the_policy_alone(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, "ppo"), "critic.warmup_steps=3", "schedule.steps=4")
    rows = metrics(tmp_path)[1:]
    assert [row["kl/reference"] for row in rows] == pytest.approx([0.0] * 4, abs=1e-6)  # measured before each update
    assert "policy/grad_norm" not in rows[2]
    assert "policy/grad_norm" in rows[3]
    assert rows[3]["critic/explained_variance"] != 0.0


def test_sft_imitates_and_ptx_keeps_imitating(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "ppo")
    rows = [{"prompt": f"{c} {n}", "completion": " blue blue"} for c in ("red", "blue") for n in ("one", "two")] * 4
    sft = str(write_rows(tmp_path / "sft.jsonl", rows))
    taught = {
        "run": {"out_dir": str(tmp_path / "sft"), "device": "cpu"},
        "data": {"sft": {"path": sft}, "eval_sft": {"path": sft}},
        "policy": tree["policy"],
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 40},
    }
    trained_offline(taught)
    losses = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert losses[0]["eval/loss"] > 1.8
    assert losses[-1]["eval/loss"] < 0.1
    trained(tree, "schedule.steps=12", "algorithm.ptx_coef=1.0", f"data.sft.path={sft}", "batch.epochs=1")
    ptx = [row["loss/ptx"] for row in metrics(tmp_path)[1:]]
    assert ptx[-1] < 0.7 * ptx[0]

"""Options that are off by default in the online loop: each has its effect, resumes exactly, or is refused.

Running normalization of scores, whitening per minibatch, the adaptive clip range, V-trace, backtracking.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import word_rewards
from runs import count_words, largest_difference, online, ppo_tree, trained, weights

from rlhf.algo.masked import whiten
from rlhf.algo.moments import Moments
from rlhf.config.files import merge
from rlhf.config.load import train_config
from rlhf.errors import ConfigError
from rlhf.experience import compute_advantages, select_training_rows
from rlhf.rewards.cost import REWARD
from rlhf.tracking.metrics import Metrics
from rlhf.training.annotate import annotate
from rlhf.training.backtracking import Backtracking, halve_step
from rlhf.training.collect import sample_and_score
from rlhf.training.rollout import _advantage_metrics

NORMALIZED = {"reward": {"shaping": {"normalize": "standardize"}}}
ADAPTED = {"algorithm": {"policy_loss": {"adapt_to": 0.01}}}
PER_MINIBATCH = {"algorithm": {"advantage": {"whiten_over": "minibatch"}}}
VTRACE = {"overlap": {"ahead": True, "ratio_cap": 1.0, "trace_cap": 1.0}}
BACKTRACKED = {"algorithm": {"preset": "ppo_penalty", "policy_loss": {"target": 1e-3, "backtrack_above": 2.0}}}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][1:]


def tree_of(folder: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    tree = ppo_tree(folder, eval={"every": 4}, checkpoint={"every": 2})
    for change in changes:
        tree = merge(tree, change)
    return tree


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of runs that change nothing, by preset."""
    trees = {preset: {"algorithm": {"preset": preset}} for preset in ("ppo", "ppo_penalty")}
    runs = {preset: trained(tree_of(tmp_path_factory.mktemp(preset), tree)) for preset, tree in trees.items()}
    return {preset: weights(run.models.policy) for preset, run in runs.items()}


@pytest.mark.parametrize("change", [NORMALIZED, ADAPTED, PER_MINIBATCH, VTRACE, BACKTRACKED])
def test_each_changes_the_run_and_a_resumed_run_is_the_run(
    tmp_path: Path, change: dict[str, Any], plain: dict[str, dict[str, torch.Tensor]]
) -> None:
    tree, metrics = tree_of(tmp_path, change), tmp_path / "run" / "metrics.jsonl"
    whole, expected = trained(tree), metrics.read_bytes()
    preset = change.get("algorithm", {}).get("preset", "ppo")
    assert largest_difference(plain[preset], weights(whole.models.policy)) > 1e-4
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")  # as after a kill in step 4, which left its lines
    resumed = trained(tree)
    assert resumed.session.resumed
    assert largest_difference(weights(whole.models.policy), weights(resumed.models.policy)) == 0.0
    assert metrics.read_bytes() == expected
    assert vars(resumed.session.state)["score_moments"] == vars(whole.session.state)["score_moments"]


def test_scores_are_on_the_scale_of_all_scores_so_far(tmp_path: Path) -> None:
    run = online(tree_of(tmp_path, NORMALIZED))
    first = sample_and_score(run, 1)
    assert first is not None
    assert first.score_moments is not None
    assert not run.session.state.score_moments, "a step that does not end is not counted"
    run.session.state.score_moments = first.score_moments
    second = sample_and_score(run, 2)
    assert second is not None
    assert second.score_moments is not None
    raw = [collected.scores.parts[REWARD] for collected in (first, second)]
    assert first.scores.values.mean().item() == pytest.approx(0.0, abs=1e-6)
    both = torch.cat(raw)
    expected = (raw[1] - both.mean()) / both.std(correction=0)
    assert torch.allclose(second.scores.values, expected, atol=1e-5)
    assert Moments(**second.score_moments).count == len(both)
    run.session.recorder.close()


def test_a_greedy_baseline_is_on_the_same_scale(tmp_path: Path) -> None:
    one = {"algorithm": {"preset": "remax"}, "batch": {"epochs": 1, "minibatches": 1}, "critic": {"init": "auto"}}
    run = online(tree_of(tmp_path, one, NORMALIZED))
    collected = sample_and_score(run, 1)
    assert collected is not None
    assert collected.score_moments is not None
    moments = Moments(**collected.score_moments)
    greedy = collected.baselines * moments.std + moments.mean
    assert collected.metrics["score/greedy"] == pytest.approx(greedy.mean().item(), abs=1e-6)
    run.session.recorder.close()


def test_metrics_keep_the_unit_of_the_reward(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, NORMALIZED), "reward.shaping.normalize=scale")
    rows = lines(tmp_path)
    assert all(row["score/mean"] == pytest.approx(row["score/raw"]) for row in rows)
    assert rows[0]["score/running_std"] == pytest.approx(rows[0]["score/std"], rel=1e-5)


def squared(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """A cost: the square of how many words are `good`."""
    return [score**2 for score in count_words(prompts=prompts, completions=completions, references=references)]


COST = {"source": {"type": "function", "target": f"{__file__}:squared"}}
COSTED = {"reward": {"cost": COST}, "algorithm": {"lagrange": {"cost_limit": 1.0, "start": 0.3, "lr": 1e-9}}}


@pytest.mark.parametrize("preset", ["rejection_sampling", "online_dpo"])
@pytest.mark.parametrize(("change", "multiplier"), [(NORMALIZED, 0.0), (COSTED, 0.3)])
def test_what_is_selected_and_recorded_keeps_the_unit_of_the_reward(
    tmp_path: Path, preset: str, change: dict[str, Any], multiplier: float
) -> None:
    """No two counts of words have the same s - 0.3 s^2, by which the best is chosen with a cost."""
    groups = {"sampling": {"completions_per_prompt": 4}, "critic": {"init": "auto"}, "logging": {"samples": 64}}
    reward = {"reward": {"source": {"type": "function", "target": f"{word_rewards.__file__}:count_words"}}}
    once = {"batch": {"epochs": 1, "minibatches": 1}, "schedule": {"steps": 1}, "eval": {"every": 0}}
    trained(tree_of(tmp_path, groups, reward, once, {"algorithm": {"preset": preset}}, change))
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    scores = [sample["score"] for sample in samples if sample["split"] == "train"]
    by_prompt = [
        sorted(scores[n : n + 4], key=lambda score: score - multiplier * score**2) for n in range(0, len(scores), 4)
    ]
    (row,) = lines(tmp_path)
    assert len(scores) == 64
    assert row["score/mean"] == pytest.approx(sum(scores) / 64, abs=1e-6)
    if preset == "rejection_sampling":
        assert row["kept/score"] == pytest.approx(sum(group[-1] for group in by_prompt) / 16, abs=1e-6)
    else:
        gaps = [group[-1] - group[0] for group in by_prompt if group[-1] != group[0]]
        assert row["pair/score_gap"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-6)


def test_without_a_reference_a_record_has_no_kl(tmp_path: Path) -> None:
    measured = {"reference": {"measure": False}, "algorithm": {"kl": {"placement": "none"}}, "eval": {"every": 1}}
    trained(tree_of(tmp_path, measured, {"schedule": {"steps": 1}}))
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["split"] for sample in samples} == {"train", "eval"}
    assert {sample["kl"] for sample in samples} == {None}


def test_a_minibatch_is_whitened_over_its_own_tokens(tmp_path: Path) -> None:
    run = online(tree_of(tmp_path, PER_MINIBATCH))
    collected = sample_and_score(run, 1)
    assert collected is not None
    experience = compute_advantages(annotate(run, collected), run.algorithm, run.coefs)
    rows = select_training_rows(experience, run.algorithm).rows(torch.arange(8))
    live = run.algorithm.advantage.of_minibatch(rows).advantages[rows.loss_mask]  # type: ignore[arg-type]
    assert live.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert live.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)
    assert torch.equal(live, whiten(rows.advantages, rows.loss_mask)[rows.loss_mask])  # type: ignore[union-attr]
    raw = (experience.returns - experience.values)[experience.loss_mask]
    assert torch.allclose(experience.advantages[experience.loss_mask], raw, atol=1e-6)
    run.session.recorder.close()


def test_the_clip_range_follows_the_kl(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, ADAPTED), "algorithm.policy_loss.adapt_to=1e-6")
    assert [row["policy/clip_scale"] for row in lines(tmp_path)] == pytest.approx([1.0, 1 / 1.5, 1 / 2.25, 1 / 3.375])


def test_vtrace_corrects_from_the_second_step_on(tmp_path: Path) -> None:
    plain = trained(tree_of(tmp_path, {"overlap": {"ahead": True}}), f"run.out_dir={tmp_path / 'plain'}")
    corrected = trained(tree_of(tmp_path, VTRACE))
    first, second = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[1]) for name in ("plain", "run")
    )
    assert first["critic/return"] == pytest.approx(second["critic/return"], abs=1e-6)  # the policy sampled it itself
    assert largest_difference(weights(plain.models.policy), weights(corrected.models.policy)) > 1e-5


def test_the_metrics_of_advantages_are_of_v_trace_before_whitening(tmp_path: Path) -> None:
    measured = []
    for whitens in (True, False):
        run = online(tree_of(tmp_path, {"algorithm": {"advantage": {"whiten": whitens}}}))
        collected = sample_and_score(run, 1)
        assert collected is not None
        rollout = annotate(run, collected)
        older = replace(rollout, sampler_logprobs=rollout.logprobs + torch.linspace(-1, 1, len(rollout))[:, None])
        experience = compute_advantages(older, run.algorithm, run.coefs, ratio_cap=1.0, trace_cap=0.5)
        measured.append(_advantage_metrics(experience, run.algorithm).values())
        run.session.recorder.close()
    assert measured[0] == pytest.approx(measured[1])
    assert {"advantage/mean", "advantage/std", "advantage/p05", "advantage/p95"} == measured[0].keys()


def test_half_of_a_step_by_hand() -> None:
    weight = torch.tensor([3.0, -1.0])
    halve_step([weight], [torch.tensor([1.0, -1.0])])
    assert weight.tolist() == [2.0, -1.0]


def test_a_step_that_goes_too_far_is_moved_back(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, BACKTRACKED), "policy.lr=3e-2")
    rows = lines(tmp_path)
    assert max(row["policy/backtracks"] for row in rows) >= 1
    assert all(row["kl/old_kept"] <= 2e-3 for row in rows)
    assert any(row["kl/old_last"] > 2e-3 for row in rows)


def test_a_step_without_a_token_in_the_loss_is_not_moved_back(tmp_path: Path) -> None:
    run = online(tree_of(tmp_path, BACKTRACKED))
    collected = sample_and_score(run, 1)
    assert collected is not None
    experience = compute_advantages(annotate(run, collected), run.algorithm, run.coefs)
    nothing = replace(experience, loss_mask=torch.zeros_like(experience.loss_mask))
    metrics = Metrics()
    Backtracking(run, nothing, 2e-3).finish(metrics)
    assert metrics.values() == {"policy/backtracks": 0.0, "kl/old_kept": 0.0}
    run.session.recorder.close()


LAGRANGE = {"reward": {"cost": {"source": {"type": "model", "path": "cm"}}}, "algorithm": {"lagrange": {}}}


@pytest.mark.parametrize(
    "changes, message",
    [
        ([NORMALIZED, LAGRANGE], r"reward\.shaping\.normalize changes the scale"),
        ([ADAPTED, {"batch": {"epochs": 1, "minibatches": 1}}], "adapt_to is steered by"),
        ([PER_MINIBATCH, {"batch": {"minibatches": 4}}], "noise"),
        ([{"overlap": {"trace_cap": 1.0}}], r"set overlap\.ahead=true"),
        ([VTRACE, {"overlap": {"trace_cap": 2.0}}], "must not be above"),
        (
            [VTRACE, {"algorithm": {"preset": "rloo"}, "sampling": {"completions_per_prompt": 2}}],
            r"needs advantage\.type=gae",
        ),
        ([BACKTRACKED, {"sharding": "zero2"}], r"backtrack_above moves whole weights"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, changes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_config(tree_of(tmp_path, *changes))


def test_samples_ahead_whitened_over_the_one_minibatch_train_like_those_whitened_over_the_step(tmp_path: Path) -> None:
    once = {"batch": {"epochs": 1, "minibatches": 1}, "overlap": {"ahead": True, "ratio_cap": 1.01}}
    step, minibatch, plain = (
        trained(tree_of(tmp_path, once, changes), f"run.out_dir={tmp_path / name}")
        for name, changes in (
            ("step", {}),
            ("minibatch", PER_MINIBATCH),
            ("plain", {"sampling": {"correction": "none"}, **PER_MINIBATCH}),
        )
    )
    assert largest_difference(weights(step.models.policy), weights(minibatch.models.policy)) == 0.0
    assert largest_difference(weights(step.models.policy), weights(plain.models.policy)) > 1e-5  # weights are not 1

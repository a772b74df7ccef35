"""The old log-probs of the update's own pass: if a step has one optimizer step, pi_old is pi."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from runs import largest_difference, online, ppo_tree, trained, weights

from rlhf.config.files import merge
from rlhf.experience import compute_advantages
from rlhf.models.policy_models import Models
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training.online import update
from rlhf.training.rollout import compute_logprobs_and_values, takes_sampler_logprobs
from rlhf.types import Completions

ONE_STEP = {"batch": {"epochs": 1, "minibatches": 1}}
GROUPS = {"sampling": {"completions_per_prompt": 4}, "critic": {"init": "auto"}}
IMPORTANCE_WEIGHTED = {"preset": "grpo", "kl": {"coef": 0.5, "importance_weighted": True}}


def tree_of(folder: Path, algorithm: dict[str, Any], **changes: Any) -> dict[str, Any]:
    tree = merge(merge(ppo_tree(folder, **GROUPS), ONE_STEP), changes)
    return tree | {"algorithm": algorithm}


ALGORITHMS = [*({"preset": name} for name in ("grpo", "dr_grpo", "gspo", "cispo")), IMPORTANCE_WEIGHTED]


@pytest.mark.parametrize("algorithm", quick(ALGORITHMS, [{"preset": "grpo"}, {"preset": "gspo"}, IMPORTANCE_WEIGHTED]))
def test_the_step_is_that_of_the_trainers_and_the_samplers_are_not_read(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    """They are wrong by a quarter of a nat here, which only the metric sees."""
    tree, after = tree_of(tmp_path, algorithm, policy={"dtype": "float64", "optimizer": "sgd"}), []
    for own in (False, True):
        run = online(tree)
        before = weights(run.models.policy)
        completions = run.sampler.sample(run.prompts(1), key=1, group_size=4)
        scores = run.reward(completions)
        wrong = replace(completions, sampler_logprobs=completions.sampler_logprobs - 0.25)
        run = replace(run, models=replace(run.models, update_gives_old_logprobs=own))
        how: Any = "auto" if own else "trainer"
        cut = AdaptiveMicroBatch(7).cut
        rollout = compute_logprobs_and_values(wrong, scores, run.models, cut=cut, old_log_probs=how)
        assert torch.equal(rollout.logprobs, wrong.sampler_logprobs) == own
        metrics = update(compute_advantages(rollout, run.algorithm, run.coefs), run, 1)
        assert metrics["policy/first_ratio_deviation"] < 1e-9
        assert ("kl/sampler_mismatch" in metrics) == ("kl/reference" in metrics) == own
        if own:
            assert metrics["kl/reference"] == pytest.approx(0.0, abs=1e-12)  # the policy is its reference still
            assert metrics["kl/sampler_mismatch"] == pytest.approx(0.25, abs=1e-9)
            assert metrics["policy/ratio"] == 1.0
            assert metrics["kl/old"] == 0.0
        after.append(weights(run.models.policy))
        assert largest_difference(before, after[-1]) > 1e-6
        run.session.recorder.close()
    assert largest_difference(*after) < 1e-10


def test_a_run_in_bfloat16_passes_over_its_completions_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reference nothing is left to annotate; evaluations are not counted."""
    changes: dict[str, Any] = {"policy": {"dtype": "bfloat16"}, "reference": {"measure": False}, "eval": {"every": 0}}
    tree = tree_of(tmp_path, {"preset": "dr_grpo", "kl": {"coef": 0.0}}, **changes)
    passes: list[bool] = []
    outputs = Models.outputs

    def counted(models: Models, batch: Completions, **more: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return outputs(models, batch, **more)

    monkeypatch.setattr(Models, "outputs", counted)
    lines = trained(tree).session.recorder.folder.read_metrics()[1:]  # after the first evaluation
    assert len(lines) == 4
    assert passes == [True] * 4 * 8  # 64 completions in passes of 8
    for line in lines:
        assert line["policy/first_ratio_deviation"] == 0.0
        assert 0.0 < line["kl/sampler_mismatch"] < 0.1
    passes.clear()
    trained(tree, "sampling.old_log_probs=trainer", f"run.out_dir={tmp_path / 'other'}")
    assert passes.count(False) == 4 * 2  # four times as many rows in a pass without a gradient


SAMPLED_AGAIN = {"preset": "rloo", "kl": {"placement": "reward", "coef": 0.1}}


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [
        ({"preset": "grpo"}, {}, True),
        ({"preset": "ppo", "kl": {"coef": 0.0}}, {}, True),
        ({"preset": "grpo"}, {"policy": {"dtype": "float32"}}, False),
        ({"preset": "grpo"}, {"sampling": {"old_log_probs": "trainer"}}, False),
        ({"preset": "grpo"}, {"sampling": {"old_log_probs": "sampler"}}, False),
        ({"preset": "grpo"}, {"batch": {"epochs": 2}}, False),
        ({"preset": "grpo"}, {"batch": {"minibatches": 2}}, False),
        ({"preset": "grpo"}, {"overlap": {"ahead": True}}, False),
        (SAMPLED_AGAIN, {}, False),
        ({"preset": "rloo", "kl": {"placement": "reward", "coef": 0.0}}, {}, True),
        ({"preset": "ppo", "kl": {"coef": 0.0}}, {"critic": {"shared": True, "init": "policy"}}, False),
        ({"preset": "online_dpo"}, {}, False),
        ({"preset": "dapo"}, {}, False),  # groups that tie take no pass
        ({"preset": "rejection_sampling"}, {}, False),
        ({"preset": "grpo", "mask_truncated": True}, {}, False),
        ({"preset": "trpo", "kl": {"coef": 0.0}}, {}, False),
    ],
)
def test_where_it_is_so(tmp_path: Path, algorithm: dict[str, Any], changes: dict[str, Any], expected: bool) -> None:
    run = online(tree_of(tmp_path, algorithm, **merge({"policy": {"dtype": "bfloat16"}}, changes)))
    assert run.models.update_gives_old_logprobs == expected
    completions = run.sampler.sample(run.prompts(1), key=1, group_size=4)
    how = run.config.sampling.old_log_probs
    assert takes_sampler_logprobs(completions, run.models, how) == (
        expected or how == "sampler" or (how == "auto" and run.config.policy.dtype == "float32")
    )
    run.session.recorder.close()

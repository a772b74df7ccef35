"""Samples of top-k, top-p and min-p: the draws of both samplers, and the trainer's figures for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import brief_tree, largest_difference, make_model, online, ppo_tree, trained, weights

from rlhf.algo.support import unpack
from rlhf.config.load import train_config
from rlhf.errors import ConfigError
from rlhf.models.logprobs import Sequences, completion_logits
from rlhf.models.policy_models import Models
from rlhf.training.online import train
from rlhf.types import Completions

LIMITS = {"top_k": 6, "top_p": 0.8}
VOCABULARY = 10


def drawn(folder: Path, **sampling: Any) -> tuple[Any, Completions]:
    run = online(ppo_tree(folder, sampling={**LIMITS, **sampling}, critic={"init": "policy"}))
    return run, run.sampler.sample(run.prompts(1), key=3, group_size=3)


def test_both_samplers_draw_the_same_among_the_same(tmp_path: Path) -> None:
    made = []
    for backend in ("fast", "hf"):
        (tmp_path / backend).mkdir()
        made.append(drawn(tmp_path / backend, backend=backend)[1])
    fast, plain = made
    assert torch.equal(fast.completion_ids, plain.completion_ids)
    assert fast.sampler_support is not None
    assert plain.sampler_support is not None
    assert torch.equal(fast.sampler_support, plain.sampler_support)
    torch.testing.assert_close(fast.sampler_logprobs, plain.sampler_logprobs)
    left = unpack(fast.sampler_support.flatten(0, 1), VOCABULARY).view(*fast.completion_ids.shape, -1)
    mask = fast.completion_mask
    assert left.gather(2, fast.completion_ids[..., None]).squeeze(2)[mask].all()
    assert not left[~mask].any()
    assert 1 <= int(left.sum(-1)[mask].min()) < int(left.sum(-1)[mask].max()) <= 6


@pytest.mark.parametrize("way", [{}, {"packing": "off"}, {"log_probs": "naive"}])
def test_the_trainer_s_log_probabilities_are_among_those_left(tmp_path: Path, way: dict[str, Any]) -> None:
    run, rows = drawn(tmp_path)
    models: Models = replace(run.models, **way)
    tokens = models.policy_tokens(rows)
    torch.testing.assert_close(tokens.logprobs, rows.sampler_logprobs, atol=1e-5, rtol=0)
    assert tokens.compared is None
    sequences = Sequences.join(rows.prompt_ids, rows.prompt_mask, rows.completion_ids, rows.completion_mask)
    logits, _ = completion_logits(models.policy, sequences, rows.completion_ids.shape[1])
    assert rows.sampler_support is not None
    left = unpack(rows.sampler_support.flatten(0, 1), VOCABULARY).view(*rows.completion_ids.shape, -1)
    among = logits.masked_fill(~left, -torch.inf).log_softmax(-1)
    expected = torch.where(rows.completion_mask, among.gather(2, rows.completion_ids[..., None]).squeeze(2), 0.0)
    head = models.policy.get_output_embeddings().weight
    weights_of_sum = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    gradients = [
        torch.autograd.grad((torch.where(rows.completion_mask, value, 0.0) * weights_of_sum).sum(), head)[0]
        for value in (tokens.logprobs, expected)
    ]
    torch.testing.assert_close(tokens.logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("old_log_probs", ["auto", "trainer"])
def test_a_run_begins_each_step_with_ratios_of_one(tmp_path: Path, old_log_probs: str) -> None:
    sampling = {**LIMITS, "min_p": 0.1, "completions_per_prompt": 4, "old_log_probs": old_log_probs}
    trained(ppo_tree(tmp_path, algorithm={"preset": "grpo"}, sampling=sampling, schedule={"steps": 2}))
    steps = [line for line in metrics(tmp_path) if "policy/ratio" in line]
    assert len(steps) == 2
    assert max(line["policy/first_ratio_deviation"] for line in steps) < 1e-4
    assert max(line["kl/sampler_mismatch"] for line in steps) < 1e-5
    assert abs(steps[0]["kl/reference"]) < 1e-5  # the start among the tokens left, against itself
    assert abs(metrics(tmp_path)[0]["eval/kl"]) < 1e-5
    assert steps[-1]["kl/reference"] > 1e-3


def test_supports_are_in_the_checkpoint_of_a_run_ahead(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")

    def tree(name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir(exist_ok=True)
        return brief_tree(
            tmp_path / name,
            policy={"model": str(model)},
            sampling=LIMITS,
            overlap={"ahead": True, "ahead_steps": 2},
            schedule={"steps": 5},
            checkpoint={"every": 1},
        )

    whole = trained(tree("whole"))
    run = online(tree("cut"))
    score, left = run.reward.source, [3]  # type: ignore[attr-defined]

    class Killed(BaseException):
        """The process is gone."""

    def dies(completions: Completions) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return score(completions)

    run.reward.source = dies  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        train(run)
    run.session.recorder.close()
    resumed = trained(tree("cut"))
    assert largest_difference(weights(whole.models.policy), weights(resumed.models.policy)) == 0.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampling": {"top_p": 0.0}}, "greater than 0"),
        ({"sampling": {"top_k": -1}}, "greater than or equal to 0"),
        ({"environment": {"target": "x.py:Y"}, "reward": None}, "cannot be combined with environment"),
        ({"algorithm": {"preset": "online_dpo"}, "batch": {"epochs": 1, "minibatches": 1}}, "among all tokens"),
        ({"sharding": "zero3"}, "cannot be combined with sharding=zero3"),
        (
            {"sampling": {"backend": "server", "server": {"type": "vllm", "urls": ["http://a"]}}},
            "vllm does not return which",
        ),
    ],
)
def test_what_reads_whole_distributions_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    tree = ppo_tree(tmp_path, sampling={"top_p": 0.9})
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    with pytest.raises(ConfigError, match=why):
        train_config(tree)

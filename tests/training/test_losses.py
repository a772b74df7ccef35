"""A critic of its own is trained beside the policy in one optimizer step: same gradients, one graph at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import online, ppo_tree
from torch import Tensor, nn

from rlhf.experience import compute_advantages
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training.collect import _draw
from rlhf.training.losses import online_losses
from rlhf.training.online import update
from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import compute_logprobs_and_values
from rlhf.types import Experience


def experience_of(run: OnlineRun) -> Experience:
    completions, scores = _draw(run, 1, [])(run.prompts(1), group_size=1)
    rollout = compute_logprobs_and_values(completions, scores, run.models, cut=AdaptiveMicroBatch(64).cut)
    return compute_advantages(rollout, run.algorithm, run.coefs)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.usefixtures("wide_norms")
def test_the_gradient_is_that_of_the_whole_objective(tmp_path: Path) -> None:
    run = online(ppo_tree(tmp_path, policy={"dtype": "float64"}))
    assert run.models.critic is not None
    experience, slopes = experience_of(run), {}
    norms = run.objective.denominators(experience)
    for name in ("apart", "together"):
        for module in (run.models.policy, run.models.critic):
            module.zero_grad()
        if name == "apart":
            pairs = [(loss.terms(experience)[0], loss.denominators(experience)) for loss in _losses(run)]
            total = sum(terms[key] / of[key] for terms, of in pairs for key in terms)
            assert [set(terms) for terms, _ in pairs] == [{"policy"}, {"value"}]
            assert [set(of) for _, of in pairs] == [{"policy"}, {"value"}]
        else:
            terms, _ = run.objective.loss(experience, run.models.outputs(experience), run.coefs)
            total = sum(terms[key] / norms[key] for key in terms)
        total.backward()
        slopes[name] = gradients(run.models.policy) + gradients(run.models.critic)
    assert len(slopes["apart"]) == len(slopes["together"])
    for one, other in zip(slopes["apart"], slopes["together"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def _losses(run: OnlineRun) -> Any:
    return online_losses(run.models, run.objective, run.coefs)


def test_what_the_policy_keeps_is_gone_when_the_critic_begins(tmp_path: Path) -> None:
    """Saved tensors are counted as autograd packs them; the tensors of the policy's last pass must have died."""
    run = online(ppo_tree(tmp_path))
    experience = experience_of(run)
    alive: list[weakref.ref[Any]] = []
    counts: list[tuple[str, int]] = []

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # a result that its own step keeps would else never die

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        alive.append(weakref.ref(kept))
        return kept

    def count(name: str) -> Any:
        return lambda *_: counts.append((name, sum(ref() is not None for ref in alive)))

    assert run.models.critic is not None
    run.models.policy.get_input_embeddings().register_forward_pre_hook(count("policy"))
    run.models.critic.classifier.get_input_embeddings().register_forward_pre_hook(count("critic"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        update(experience, run, 1)
    assert {name for name, _ in counts} == {"policy", "critic"}
    assert len(alive) > 50
    assert [number for _, number in counts] == [0] * len(counts)

"""NPG and TRPO on language models: the direction against a direct solver, the constraint, and rejected steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import largest_difference, make_model, online, ppo_tree, trained, weights

from rlhf.config.files import merge
from rlhf.config.load import train_config, unread_warnings
from rlhf.errors import ConfigError
from rlhf.experience import compute_advantages
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.engine import SteppingModel
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training.losses import online_losses
from rlhf.training.online import train, update
from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import compute_logprobs_and_values
from rlhf.training.searched import SearchedModel
from rlhf.training.step import LossBatch, Minibatch, SearchingModel, optimizer_step
from rlhf.types import Experience

LORA = {"r": 1, "target_modules": ["q_proj", "down_proj"]}


def tree_of(folder: Path, **policy_loss: Any) -> dict[str, Any]:
    """TRPO on the adapters of a model in float64."""
    make_model(folder / "model", dtype=torch.float64)
    tree = merge(ppo_tree(folder), {"policy": {"dtype": "float64", "lora": LORA}, "checkpoint": {"every": 0}})
    tree["algorithm"] = {"preset": "trpo", "policy_loss": {"cg_iterations": 6, **policy_loss}}
    tree["batch"] = {"prompts_per_step": 12, "micro_batch_size": 16, "epochs": 2, "minibatches": 1}
    tree["eval"] = {"every": 0}
    del tree["data"]["eval_prompts"]
    return merge(tree, {"schedule": {"steps": 2}})


def drawn(run: OnlineRun) -> Experience:
    """The experience of the first step."""
    completions = run.sampler.sample(run.prompts(1), key=1, group_size=1)
    rollout = compute_logprobs_and_values(
        completions, run.reward(completions), run.models, cut=AdaptiveMicroBatch(16).cut
    )
    return compute_advantages(rollout, run.algorithm, run.coefs)


def vector_of(run: OnlineRun) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in run.policy.parameters]).clone()


def explicit_fisher(model: SearchedModel, experience: Experience) -> torch.Tensor:
    """Column by column, by products that tests/models/test_token_fisher.py compares with the definition."""
    size = sum(p.numel() for p in model.parameters)
    named, columns = model.local.named, []
    for unit in torch.eye(size, dtype=torch.float64):
        parts = unit.split([p.numel() for p in named.values()])
        vector = {name: part.view_as(p) for (name, p), part in zip(named.items(), parts, strict=True)}
        product = model.fisher.product(experience, vector)
        columns.append(torch.cat([product[name].reshape(-1) for name in named]))
    return torch.stack(columns, dim=1) / int(experience.loss_mask.sum())


def test_the_step_solves_the_damped_system_and_has_the_length_it_should(tmp_path: Path) -> None:
    small = {"r": 1, "target_modules": ["q_proj"]}
    tree = merge(tree_of(tmp_path, cg_iterations=100, damping=0.05, line_search=False, max_kl=1e-4), {})
    tree["policy"]["lora"] = small
    tree["batch"]["prompts_per_step"] = 8
    run = online(tree)
    assert isinstance(run.policy, SearchedModel)
    generator = torch.Generator().manual_seed(0)
    for parameter in run.policy.parameters:  # adapters as after some training: at zero half the Fisher matrix is zero
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    experience, before = drawn(run), vector_of(run)
    loss = online_losses(run.models, run.objective, run.coefs)[0]
    terms = loss.terms(experience)[0]["policy"] / loss.denominators(experience)["policy"]
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(terms, run.policy.parameters)])
    fisher = explicit_fisher(run.policy, experience)
    natural = torch.linalg.solve(fisher + 0.05 * torch.eye(len(fisher), dtype=torch.float64), gradient)
    length = (2 * 1e-4 / (natural @ fisher @ natural)).sqrt()
    metrics = optimizer_step(
        [LossBatch(experience, loss)], [run.policy], micro_batch_size=5, lr_factor=1.0, ranks=run.session.ranks
    )
    moved = before - vector_of(run)
    torch.testing.assert_close(moved, length * natural, rtol=1e-4, atol=1e-7)
    assert metrics["policy/lr"] == pytest.approx(length.item(), rel=1e-4)
    assert metrics["trust_region/kl"] == pytest.approx(1e-4, rel=0.1)  # and exactly so to second order
    assert metrics["trust_region/cg_residual"] < 1e-4
    assert metrics["trust_region/expected_improvement"] == pytest.approx(float(moved @ gradient), rel=1e-4)
    after = loss.terms(experience)[0]["policy"] / loss.denominators(experience)["policy"]
    assert metrics["trust_region/improvement"] == pytest.approx(float((terms - after).detach()), rel=1e-6)
    assert metrics["trust_region/improvement"] > 0


def test_neither_micro_batches_nor_their_order_change_a_step(tmp_path: Path) -> None:
    tree, after, experience = tree_of(tmp_path), [], None
    for setting in ("micro_batch_size=64", "micro_batch_size=5", "micro_batch_tokens=25"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = online(tree, f"batch.{setting}")
        experience = experience or drawn(run)
        update(experience, run, 1)
        after.append(vector_of(run))
    for other in after[1:]:
        assert float((other - after[0]).abs().max()) < 1e-6  # the norms of a Llama are float32 in forward mode
    assert float(after[0].abs().max()) > 1e-3


def test_the_passes_of_a_search_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product reads the tokens forward, forward with a derivative (as two) and backward (as two); a KL twice."""
    run = online(tree_of(tmp_path), "batch.micro_batch_size=64")
    assert isinstance(run.policy, SearchedModel)
    calls = {"product": 0, "kl": 0, "value": 0}

    def counting(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def counted(*args: Any) -> Any:
            calls[name] += 1
            return method(*args)

        monkeypatch.setattr(owner, name, counted)

    counting(run.policy.fisher, "product")
    counting(run.policy.fisher, "kl")
    counting(Minibatch, "value")
    metrics = update(drawn(run), run, 1)
    assert calls["product"] >= 6
    passes = 5 * calls["product"] + 2 * calls["kl"] + calls["value"]
    assert metrics["trust_region/forward_passes"] == passes > 30


class OneOfTwo(Distributed):
    """A rank that hears nothing of the other: its sums are its own share."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def start_sum(self, gradients: Sequence[torch.Tensor]) -> Callable[[], None]:
        return lambda: None


def test_what_the_ranks_compute_adds_up_to_what_one_process_computes(tmp_path: Path) -> None:
    run = online(tree_of(tmp_path))
    assert isinstance(run.policy, SearchedModel)
    experience = drawn(run).rows(torch.arange(11))  # 6 rows and 5
    loss = online_losses(run.models, run.objective, run.coefs)[0]
    parts, vector = [LossBatch(experience, loss)], torch.randn_like(vector_of(run))
    old = {name: p.detach() + 0.1 for name, p in run.policy.local.named.items()}
    results = [
        (
            run.policy._fisher_product(vector, minibatch),
            torch.tensor([run.policy._kl(old, minibatch), minibatch.value(run.policy.terms)]),
        )
        for ranks in (SINGLE_PROCESS, OneOfTwo(0), OneOfTwo(1))
        for minibatch in [Minibatch(parts, AdaptiveMicroBatch(4), ranks)]
    ]
    for whole, first, second in zip(*results, strict=True):
        torch.testing.assert_close(first + second, whole, rtol=1e-5, atol=1e-9)
        assert all(part.abs().max() > 1e-6 for part in (first, second))


def test_the_policy_moves_once_and_the_critic_in_every_epoch(tmp_path: Path) -> None:
    run = online(tree_of(tmp_path), "batch.epochs=3")
    assert isinstance(run.policy, SearchingModel)
    assert not isinstance(run.policy, SteppingModel)
    metrics = update(drawn(run), run, 1)
    assert metrics["policy/optimizer_steps"] == 1.0
    assert metrics.means()["critic/lr"].weight == 3.0
    assert metrics.means()["trust_region/accepted"].weight == 1.0
    assert metrics["policy/first_ratio_deviation"] < 1e-6  # the weights that a line search tries do not count


def test_a_step_that_the_line_search_rejects_leaves_every_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = online(tree_of(tmp_path, backtracks=2))
    assert isinstance(run.policy, SearchedModel)
    monkeypatch.setattr(run.policy.fisher, "kl", lambda *_: 1e9)
    before = vector_of(run)
    metrics = update(drawn(run), run, 1)
    assert torch.equal(vector_of(run), before)
    assert metrics["trust_region/accepted"] == 0.0
    assert metrics["trust_region/backtracks"] == 2.0
    assert metrics["trust_region/kl"] == 0.0
    assert metrics["policy/optimizer_steps"] == 0.0
    assert "policy/lr" not in metrics


def test_the_schedule_scales_the_step(tmp_path: Path) -> None:
    steps = []
    for warmup in ("0", "4"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = online(tree_of(tmp_path, line_search=False), f"schedule.warmup_steps={warmup}")
        before = vector_of(run)
        update(drawn(run), run, 1)
        steps.append(vector_of(run) - before)
    torch.testing.assert_close(steps[1], steps[0] / 4)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_trpo_learns_and_every_step_keeps_within_its_trust_region(tmp_path: Path) -> None:
    tree = ppo_tree(tmp_path, schedule={"steps": 9}, eval={"every": 0}, checkpoint={"every": 0})
    tree["algorithm"] = {"preset": "trpo", "policy_loss": {"max_kl": 0.03, "cg_iterations": 5}}
    tree["batch"] = {"prompts_per_step": 32, "micro_batch_size": 32, "epochs": 4, "minibatches": 1}
    trained(tree)
    rows = metrics_of(tmp_path)
    steps = [row for row in rows if "trust_region/kl" in row]
    assert len(steps) == 9
    assert all(row["trust_region/kl"] <= 0.03 * 1.01 for row in steps)
    assert all(row["trust_region/improvement"] > 0 for row in steps if row["trust_region/accepted"])
    assert max(row["trust_region/kl"] for row in steps) > 0.015  # the region is used
    assert rows[0]["eval/score"] < 0.3
    assert rows[-1]["eval/score"] > 0.5


def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    files = []
    for stop in (None, 1):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        tree = merge(tree_of(tmp_path), {"checkpoint": {"every": 1}})
        if stop is not None:
            run = online(tree)
            run.session.total_steps = stop
            train(run)
            run.session.recorder.close()
        run = trained(tree)
        files.append(((tmp_path / "run" / "metrics.jsonl").read_bytes(), weights(run.models.policy)))
    assert files[0][0] == files[1][0]
    assert largest_difference(files[0][1], files[1][1]) == 0.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch": {"minibatches": 2}}, r"set batch\.minibatches=1"),
        ({"algorithm": {"target_kl": 0.1}}, "leave target_kl null"),
        ({"sharding": "zero2"}, r"set sharding=ddp"),
        ({"critic": {"shared": True}, "policy": {"lora": None}}, r"set critic\.shared=false"),
        ({"algorithm": {"advantage": {"type": "group"}}, "sampling": {"completions_per_prompt": 2}}, "batch.epochs=1"),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_config(merge(tree_of(tmp_path), changes))


def test_too_many_parameters_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_parameters is 10\. Train adapters \(policy\.lora\.r=16\)"):
        online(tree_of(tmp_path, max_parameters=10))


def test_optimizer_settings_that_no_step_reads_are_named(tmp_path: Path) -> None:
    warnings = unread_warnings(train_config(tree_of(tmp_path)))
    assert any(text.startswith("policy.lr is set, but a trust region's step") for text in warnings)

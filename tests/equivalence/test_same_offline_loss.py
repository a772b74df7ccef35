"""Online DPO takes offline DPO's step on the pairs it drew, and rejection sampling SFT's on the completions it kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import largest_difference, make_model, online, ppo_tree, weights

from rlhf.algo.masked import Mean
from rlhf.algorithms.dpo import Dpo
from rlhf.algorithms.hinge import Hinge
from rlhf.algorithms.ipo import Ipo
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.robust_dpo import RobustDpo
from rlhf.algorithms.sft import Sft
from rlhf.batching import Batch
from rlhf.config.files import merge
from rlhf.data.pairs import CompletionRows
from rlhf.data.tokenizer import left_pad, right_pad
from rlhf.experience import compute_advantages
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training.losses import DemonstrationLoss
from rlhf.training.offline import PairwiseLoss, completion_logprobs
from rlhf.training.online import update
from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import compute_logprobs_and_values
from rlhf.training.step import Loss, LossBatch, optimizer_step
from rlhf.types import AnnotatedPairs, Demonstrations, Experience

Tokens = list[int]


def tree_of(folder: Path, algorithm: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """One minibatch of five prompts with four completions each, in float64, with plain SGD; pi is not pi_ref."""
    make_model(folder / "model", dtype=torch.float64)
    make_model(folder / "other", seed=7, dtype=torch.float64)
    tree = ppo_tree(folder, policy={"dtype": "float64", "optimizer": "sgd", "lr": 0.3, "max_grad_norm": 1e9})
    tree |= {"algorithm": algorithm, "reference": {"model": str(folder / "other")}}
    del tree["critic"]
    batch = {"prompts_per_step": 5, "epochs": 1, "minibatches": 1, "micro_batch_size": 3}
    return merge(merge(tree, {"batch": batch, "sampling": {"completions_per_prompt": 4}}), changes)


def fresh(tree: dict[str, Any]) -> OnlineRun:
    shutil.rmtree(Path(tree["run"]["out_dir"]), ignore_errors=True)
    return online(tree)


def experience_of(run: OnlineRun) -> Experience:
    completions = run.sampler.sample(run.prompts(1), key=1, group_size=run.config.sampling.completions_per_prompt)
    rollout = compute_logprobs_and_values(
        completions, run.reward(completions), run.models, cut=AdaptiveMicroBatch(7).cut
    )
    return compute_advantages(rollout, run.algorithm, run.coefs)


def rows_of(experience: Experience) -> list[tuple[Tokens, Tokens, float]]:
    """Prompt, completion and score of each row, without any padding."""
    return [
        (
            experience.prompt_ids[row][experience.prompt_mask[row]].tolist(),
            experience.completion_ids[row][experience.completion_mask[row]].tolist(),
            float(experience.scores[row]),
        )
        for row in range(len(experience))
    ]


def groups_of(experience: Experience) -> list[list[tuple[Tokens, Tokens, float]]]:
    rows, size = rows_of(experience), experience.group_size
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def stepped(run: OnlineRun, batch: Batch, loss: Loss) -> dict[str, torch.Tensor]:
    """The policy's weights after one step of the offline kind."""
    optimizer_step([LossBatch(batch, loss)], [run.policy], micro_batch_size=2, lr_factor=1.0)
    return weights(run.models.policy)


def padded(pad: Callable[..., Any], rows: Sequence[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = pad(list(rows), 0)
    return ids, mask


def fixed_pairs(run: OnlineRun, experience: Experience) -> AnnotatedPairs:
    """Pairs as a file of preferences would give them: each side padded alone, the reference asked again."""
    best = [max(group, key=lambda row: row[2]) for group in groups_of(experience)]
    worst = [min(group, key=lambda row: row[2]) for group in groups_of(experience)]
    apart = [(b, w) for b, w in zip(best, worst, strict=True) if b[2] > w[2]]
    prompts, chosen, rejected = ([b[0] for b, _ in apart], [b[1] for b, _ in apart], [w[1] for _, w in apart])
    asked = completion_logprobs(
        CompletionRows((*prompts, *prompts), (*chosen, *rejected), 0),
        run.models.reference_logprobs,
        rows_per_pass=3,
        device=run.models.device,
    )
    sides = {"prompt": padded(left_pad, prompts)}
    sides |= {"chosen": padded(right_pad, chosen), "rejected": padded(right_pad, rejected)}
    return AnnotatedPairs(
        **{f"{name}_{what}": side[i] for name, side in sides.items() for i, what in enumerate(("ids", "mask"))},
        **{f"{name}_learned": sides[name][1] for name in ("chosen", "rejected")},
        margins=torch.zeros(len(apart)),
        chosen_ref_logprobs=asked[: len(apart)],
        rejected_ref_logprobs=asked[len(apart) :],
    )


LOSSES: list[PairLoss] = [
    Dpo(beta=0.3),
    Dpo(label_smoothing=0.1),
    RobustDpo(),
    Ipo(),
    Ipo(normalize="length"),
    Hinge(nll_coef=0.7),
]


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: "-".join(map(str, config.model_dump().values())))
def test_online_dpo_is_offline_dpo_on_the_pairs_it_drew(tmp_path: Path, config: PairLoss) -> None:
    tree = tree_of(tmp_path, {"preset": "online_dpo", "policy_loss": {"loss": config.model_dump()}})
    run = fresh(tree)
    start, experience = weights(run.models.policy), experience_of(run)
    metrics = update(experience, run, 1)
    other = fresh(tree)
    pairs = fixed_pairs(other, experience)
    assert len(pairs) >= 4
    terms, observed = PairwiseLoss(other.models, config).terms(pairs)
    offline = stepped(other, pairs, PairwiseLoss(other.models, config))
    assert largest_difference(start, offline) > 1e-3
    assert largest_difference(weights(run.models.policy), offline) < 1e-10
    assert metrics["loss/preference"] == pytest.approx(float(terms["preference"].detach()) / len(pairs), abs=1e-10)
    assert metrics["preference/margin"] == pytest.approx(observed["preference/margin"].value, abs=1e-10)
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize("keep, aggregate", [(1, "token_mean"), (2, "token_mean"), (2, "sequence_mean")])
def test_rejection_sampling_is_sft_on_the_kept_completions(tmp_path: Path, keep: int, aggregate: str) -> None:
    algorithm = {
        "preset": "rejection_sampling",
        "advantage": {"keep": keep},
        "policy_loss": {"aggregate": aggregate},
    }
    tree = tree_of(tmp_path, algorithm)
    run = fresh(tree)
    start, experience = weights(run.models.policy), experience_of(run)
    metrics = update(experience, run, 1)
    kept = [row for group in groups_of(experience) for row in sorted(group, key=lambda row: -row[2])[:keep]]
    prompts, completions = tuple(row[0] for row in kept), tuple(row[1] for row in kept)
    other = fresh(tree)
    loss = DemonstrationLoss(other.models, Sft.model_validate({"aggregate": aggregate}), name="policy")
    loss.denominators, loss.terms = _as_policy(loss)  # type: ignore[method-assign]
    sft = stepped(other, CompletionRows(prompts, completions, 0).collate(range(len(kept))), loss)
    assert largest_difference(start, sft) > 1e-3
    assert largest_difference(weights(run.models.policy), sft) < 1e-10
    read = sum(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    assert metrics["completion/trained_tokens"] == read


def _as_policy(loss: DemonstrationLoss) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """SFT's own sums and norm, under the name of the term that an online policy descends; nothing is observed."""
    norms, terms = loss.denominators, loss.terms

    def silent(micro: Demonstrations) -> tuple[dict[str, torch.Tensor], dict[str, Mean]]:
        return terms(micro)[0], {}

    return norms, silent


def test_pairs_are_ranked_by_what_shaping_leaves_of_the_score(tmp_path: Path) -> None:
    """With a penalty larger than any score, no cut-off completion is chosen over one that ended."""
    shaped = {"reward": {"shaping": {"missing_eos_penalty": 9.0}}}
    run = fresh(tree_of(tmp_path, {"preset": "online_dpo"}, sampling={"max_new_tokens": 4}, **shaped))
    experience = experience_of(run)
    finished = experience.finished.view(-1, 4)
    signs = experience.advantages[:, 0].view(-1, 4)
    mixed = [row for row in range(len(finished)) if finished[row].any() and not finished[row].all()]
    assert len(mixed) >= 3
    for row in mixed:
        assert bool(finished[row][signs[row] > 0].all())
        assert not bool(finished[row][signs[row] < 0].any())


def test_where_nothing_can_be_chosen_no_model_moves(tmp_path: Path) -> None:
    for algorithm in ({"preset": "online_dpo"}, {"preset": "rejection_sampling", "advantage": {"min_score": 2.0}}):
        run = fresh(tree_of(tmp_path, algorithm))
        before, experience = weights(run.models.policy), experience_of(run)
        alike = Experience(**{**vars(experience), "scores": torch.zeros_like(experience.scores)})
        metrics = update(alike, run, 1)
        assert largest_difference(before, weights(run.models.policy)) == 0.0
        assert metrics["policy/optimizer_steps"] == metrics["completion/trained_tokens"] == 0.0

"""Preference losses over models: log-probabilities of whole completions, sides kept apart, z0 of a whole minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from pair_values import dpo, hinge, robust_dpo, simpo
from tiny_models import EOS, completions_of, padded, tiny
from transformers import PreTrainedModel

from rlhf.algorithms.dpo import Dpo
from rlhf.algorithms.hinge import Hinge
from rlhf.algorithms.ipo import Ipo
from rlhf.algorithms.kto import Kto
from rlhf.algorithms.offline_loss import PairLoss
from rlhf.algorithms.robust_dpo import RobustDpo
from rlhf.algorithms.simpo import Simpo
from rlhf.data.pairs import CompletionRows
from rlhf.models.logprobs import completion_outputs
from rlhf.models.policy_models import Models
from rlhf.training.micro_batches import count_tokens
from rlhf.training.offline import LabelledLoss, PairwiseLoss, completion_logprobs, sum_logprobs
from rlhf.types import AnnotatedLabelledCompletions, AnnotatedPairs, Demonstrations

PROMPTS = [[1, 5, 6], [1, 7], [1, 8, 9, 10]]
CHOSEN = [[4, 5, EOS], [6, EOS], [7, 8, 9, 10, EOS]]
REJECTED = [[9, EOS], [3, 4, 5, 6, EOS], [12, 13, EOS]]
REFERENCE = ([-5.0, -4.0, -9.0], [-6.0, -7.5, -6.5])


@torch.no_grad()
def sequence_logprob(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> float:
    """The log-probability of a completion by itself: no padding, no batch."""
    one = completions_of([prompt], [completion])
    outputs = completion_outputs(
        model, one.prompt_ids, one.prompt_mask, one.completion_ids, one.completion_mask, temperature=1.0
    )
    return float(outputs.logprobs.sum())


def models_of(policy: PreTrainedModel, reference: PreTrainedModel | None = None) -> Models:
    device = torch.device("cpu")
    return Models(policy=policy, temperature=1.0, dtype="float64", device=device, reference=reference)


def moved(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """Another model of the same kind."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def pairs() -> AnnotatedPairs:
    prompt_ids, prompt_mask = padded(PROMPTS, left=True)
    chosen_ids, chosen_mask = padded(CHOSEN, left=False)
    rejected_ids, rejected_mask = padded(REJECTED, left=False)
    return AnnotatedPairs(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        chosen_ids=chosen_ids,
        chosen_mask=chosen_mask,
        rejected_ids=rejected_ids,
        rejected_mask=rejected_mask,
        chosen_learned=chosen_mask,
        rejected_learned=rejected_mask,
        margins=torch.zeros(3),
        chosen_ref_logprobs=torch.tensor(REFERENCE[0], dtype=torch.float64),
        rejected_ref_logprobs=torch.tensor(REFERENCE[1], dtype=torch.float64),
    )


def labelled(
    prompts: Sequence[Sequence[int]] = PROMPTS, completions: Sequence[Sequence[int]] = CHOSEN
) -> AnnotatedLabelledCompletions:
    rows = completions_of(prompts, completions)
    return AnnotatedLabelledCompletions(
        prompt_ids=rows.prompt_ids,
        prompt_mask=rows.prompt_mask,
        completion_ids=rows.completion_ids,
        completion_mask=rows.completion_mask,
        loss_mask=rows.completion_mask,
        desirable=torch.tensor([True, False, True][: len(prompts)]),
        ref_logprobs=torch.tensor(REFERENCE[0][: len(prompts)], dtype=torch.float64),
    )


def numbers(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_loss_is_that_of_rows_by_themselves(family: str) -> None:
    policy = tiny(family)
    alone = [
        numbers([sequence_logprob(policy, *row) for row in zip(PROMPTS, side, strict=True)])
        for side in (CHOSEN, REJECTED)
    ]
    h = [logprobs - numbers(reference) for logprobs, reference in zip(alone, REFERENCE, strict=True)]
    m = [logprobs / numbers([len(c) for c in side]) for logprobs, side in zip(alone, (CHOSEN, REJECTED), strict=True)]
    per_token = [x / numbers([len(c) for c in side]) for x, side in zip(h, (CHOSEN, REJECTED), strict=True)]
    expected: list[tuple[PairLoss, torch.Tensor]] = [
        (Dpo(beta=0.3), dpo(*h, beta=0.3).per_pair),
        (Dpo(beta=0.3, label_smoothing=0.2), dpo(*h, beta=0.3, label_smoothing=0.2).per_pair),
        (Simpo(beta=2.0, gamma=0.5), simpo(*m, beta=2.0, gamma=0.5).per_pair),
        (Ipo(beta=0.3), (h[0] - h[1] - 1 / 0.6) ** 2),
        (Ipo(beta=0.3, normalize="length"), (per_token[0] - per_token[1] - 1 / 0.6) ** 2),
        (Dpo(beta=0.3, nll_coef=0.7), dpo(*h, beta=0.3).per_pair - 0.7 * m[0]),
        (Ipo(beta=0.3, nll_coef=0.7), (h[0] - h[1] - 1 / 0.6) ** 2 - 0.7 * m[0]),
        (Hinge(beta=0.3, nll_coef=0.7), hinge(*h, beta=0.3, margin=1.0).per_pair - 0.7 * m[0]),
        (
            RobustDpo(beta=0.3, nll_coef=0.7),
            robust_dpo(*h, beta=0.3, label_smoothing=0.1).per_pair - 0.7 * m[0],
        ),
    ]
    for config, per_pair in expected:
        terms, observed = PairwiseLoss(models_of(policy), config).terms(pairs())
        torch.testing.assert_close(terms["preference"], per_pair.sum(), rtol=1e-9, atol=1e-9)
        assert observed["loss/preference"].value == pytest.approx(per_pair.mean().item())
        assert observed["preference/chosen_logprob"].value == pytest.approx(alone[0].mean().item())
        assert observed["preference/rejected_logprob"].value == pytest.approx(alone[1].mean().item())


def test_rewards_and_accuracy_are_observed_apart() -> None:
    policy = tiny()
    loss = PairwiseLoss(models_of(policy), Dpo(beta=0.3))
    alone = [
        numbers([sequence_logprob(policy, *row) for row in zip(PROMPTS, side, strict=True)])
        for side in (CHOSEN, REJECTED)
    ]
    rewards = [0.3 * (logprobs - numbers(ref)) for logprobs, ref in zip(alone, REFERENCE, strict=True)]
    observed = loss.terms(pairs())[1]
    assert observed["preference/chosen_reward"].value == pytest.approx(rewards[0].mean().item())
    assert observed["preference/rejected_reward"].value == pytest.approx(rewards[1].mean().item())
    assert observed["preference/margin"].value == pytest.approx((rewards[0] - rewards[1]).mean().item())
    assert observed["preference/accuracy"].value == pytest.approx((rewards[0] > rewards[1]).double().mean().item())
    assert loss.denominators(pairs()) == {"preference": 3.0}


def test_a_users_turn_between_two_answers_is_read_and_not_scored() -> None:
    policy, both = tiny(), pairs()
    learned = both.chosen_learned.clone()
    learned[:, 1] = False
    tokens = models_of(policy).policy_tokens(completions_of(PROMPTS, CHOSEN)).logprobs.double()
    expected = torch.where(learned, tokens, 0.0).sum(dim=1)
    some = replace(both, chosen_learned=learned)
    observed = PairwiseLoss(models_of(policy), Dpo()).terms(some)[1]
    assert observed["preference/chosen_logprob"].value == pytest.approx(expected.mean().item())
    rows = CompletionRows(tuple(PROMPTS), tuple(CHOSEN), 0, tuple([i != 1 for i in range(len(c))] for c in CHOSEN))
    say = lambda batch: models_of(policy).policy_tokens(batch).logprobs  # noqa: E731
    logprobs = completion_logprobs(rows, say, rows_per_pass=2, device=torch.device("cpu"))
    torch.testing.assert_close(logprobs, expected.detach())


def test_a_tie_is_half_right() -> None:
    tied = pairs()
    observed = PairwiseLoss(models_of(tiny()), Dpo()).terms(
        type(tied)(
            **{
                **vars(tied),
                "rejected_ids": tied.chosen_ids,
                "rejected_mask": tied.chosen_mask,
                "rejected_learned": tied.chosen_learned,
                "rejected_ref_logprobs": tied.chosen_ref_logprobs,
            }
        )
    )[1]
    assert observed["preference/accuracy"].value == 0.5
    assert observed["preference/margin"].value == 0.0


ROUNDED = numbers([2e-7, -2e-7, 3e-7])  # about what another size of the passes changes in float32


@torch.no_grad()
def own_logprobs(models: Models, completions: Sequence[Sequence[int]]) -> torch.Tensor:
    rows = completions_of(PROMPTS, completions)
    return sum_logprobs(models.policy_tokens(rows).logprobs, rows.completion_mask)


@pytest.mark.parametrize("config", [Dpo(), Ipo(), Hinge()])
@pytest.mark.parametrize(("factor", "accuracy"), [(1, 0.5), (1000, 2 / 3)])
def test_a_gap_within_the_rounding_of_the_log_probabilities_is_a_tie(
    config: PairLoss, factor: int, accuracy: float
) -> None:
    models = models_of(tiny().float())
    ours, theirs = (own_logprobs(models, side) for side in (CHOSEN, REJECTED))
    near = replace(pairs(), chosen_ref_logprobs=ours - factor * ROUNDED, rejected_ref_logprobs=theirs)
    loss = PairwiseLoss(models, config)
    assert loss.terms(near)[1]["preference/accuracy"].value == pytest.approx(accuracy)
    assert loss.row_values["accuracy"].mean().item() == pytest.approx(accuracy)


def test_log_probabilities_in_float64_tie_within_their_own_rounding() -> None:
    models = models_of(tiny().double())
    ours, theirs = (own_logprobs(models, side) for side in (CHOSEN, REJECTED))
    near = replace(pairs(), chosen_ref_logprobs=ours - ROUNDED, rejected_ref_logprobs=theirs)
    assert PairwiseLoss(models, Dpo()).terms(near)[1]["preference/accuracy"].value == pytest.approx(2 / 3)


# KTO


def kto_loss(models: Models, **options: int | None) -> LabelledLoss:
    how = {"rows_per_pass": 2, "context": None, **options}
    return LabelledLoss(models, Kto(beta=0.3), **how)  # type: ignore[arg-type]


def test_the_baseline_is_of_completions_of_other_prompts() -> None:
    reference, policy = tiny(), moved(tiny())
    rows = list(zip(PROMPTS, [*CHOSEN[1:], CHOSEN[0]], strict=True))  # each prompt with the next one's completion
    ratios = [sequence_logprob(policy, *row) - sequence_logprob(reference, *row) for row in rows]
    ours = kto_loss(models_of(policy, reference)).with_baseline(labelled()).baselines
    expected = max(0.0, sum(ratios) / 3)
    torch.testing.assert_close(ours, numbers([expected] * 3))
    turned = kto_loss(models_of(reference, policy)).with_baseline(labelled()).baselines
    torch.testing.assert_close(turned, numbers([max(0.0, -sum(ratios) / 3)] * 3))
    assert (ours > 0.01).all() != (turned > 0.01).all()  # one of the two is not held at 0


@pytest.mark.parametrize("rows_per_pass", [1, 2, 64])
def test_the_baseline_does_not_depend_on_the_rows_of_a_pass(rows_per_pass: int) -> None:
    models = models_of(moved(tiny()), tiny())
    baselines = kto_loss(models, rows_per_pass=rows_per_pass).with_baseline(labelled()).baselines
    torch.testing.assert_close(baselines, kto_loss(models).with_baseline(labelled()).baselines)
    assert not baselines.requires_grad


def test_a_label_is_worth_what_the_definition_says() -> None:
    reference, policy = tiny(), moved(tiny())
    loss = kto_loss(models_of(policy, reference))
    batch = loss.with_baseline(labelled())
    h = numbers([sequence_logprob(policy, *row) for row in zip(PROMPTS, CHOSEN, strict=True)]) - numbers(REFERENCE[0])
    z0, good = batch.baselines, batch.desirable
    signed = torch.where(good, h - z0, z0 - h)
    terms, observed = loss.terms(batch)
    torch.testing.assert_close(terms["preference"], (1 - torch.sigmoid(0.3 * signed)).sum())
    assert loss.denominators(batch) == {"preference": 3.0}
    assert observed["preference/chosen_reward"].value == pytest.approx(0.3 * h[good].mean().item())
    assert observed["preference/rejected_reward"].value == pytest.approx(0.3 * h[~good].mean().item())
    assert observed["preference/accuracy"].value == pytest.approx((signed > 0).double().mean().item())


@pytest.mark.parametrize(("factor", "right"), [(1, [0.5, 0.5, 0.5]), (1000, [1.0, 0.0, 1.0])])
def test_a_row_within_rounding_of_the_baseline_is_half_right(factor: int, right: list[float]) -> None:
    models = models_of(tiny().float(), tiny().float())
    batch = labelled()
    batch = replace(batch, desirable=torch.ones(3, dtype=torch.bool))
    loss = kto_loss(models)
    near = replace(loss.with_baseline(batch), ref_logprobs=own_logprobs(models, CHOSEN) - factor * ROUNDED)
    observed = loss.terms(near)[1]
    assert loss.row_values["accuracy"].tolist() == right
    assert observed["preference/accuracy"].value == pytest.approx(sum(right) / 3)


def test_a_label_that_a_micro_batch_lacks_is_not_observed() -> None:
    loss = kto_loss(models_of(tiny(), tiny()))
    undesirable = next(loss.with_baseline(labelled()).split(1, torch.tensor([1])))
    assert not [name for name in loss.terms(undesirable)[1] if "chosen" in name]


def test_another_prompts_completion_is_read_no_further_than_the_context() -> None:
    """GPT-2 has no position 8: a prompt of 6 tokens has room for 2 of another's 5."""
    long, short = [1, 3, 4, 5, 6, 7], [1, 3]
    first, second = [8, EOS], [9, 10, 11, 12, EOS]
    policy, reference = (tiny("gpt2", n_positions=8) for _ in range(2))
    batch = labelled([long, short], [first, second])
    loss = kto_loss(models_of(moved(policy), reference), context=8)
    baselines = loss.with_baseline(batch).baselines
    ratios = [
        sequence_logprob(policy, *row) - sequence_logprob(reference, *row)
        for row in ((long, second[:2]), (short, first))
    ]
    torch.testing.assert_close(baselines, numbers([max(0.0, sum(ratios) / 2)] * 2))
    with pytest.raises(IndexError):
        kto_loss(models_of(policy, reference)).with_baseline(batch)


# Whole completions


def test_rows_come_back_in_their_own_order_whatever_the_pass() -> None:
    model = tiny()
    rows = CompletionRows(tuple(PROMPTS), tuple(CHOSEN), 0)
    expected = numbers([sequence_logprob(model, *row) for row in zip(PROMPTS, CHOSEN, strict=True)])
    for size in (1, 2, 3):
        logprobs = completion_logprobs(
            rows, lambda batch: models_of(model).policy_tokens(batch).logprobs, rows_per_pass=size,
            device=torch.device("cpu"),
        )  # fmt: skip
        torch.testing.assert_close(logprobs, expected)
        assert not logprobs.requires_grad
    assert rows.by_length() == [2, 0, 1]


def test_rows_of_a_prompt_share_a_pass_if_the_model_computes_it_once() -> None:
    model, prompt = tiny(), [1, 2, 3, 4, 5, 6]
    rows = CompletionRows((prompt, [7], prompt, [7]), ([3, 4], [5, 6, 7], [8], [9, 3, 5, 1, 2, 4]), 0)
    assert rows.by_prompt() == [0, 2, 1, 3]
    assert rows.by_length() == [0, 2, 3, 1]
    passes: list[int] = []

    def logprobs(batch: Demonstrations) -> torch.Tensor:
        passes.append(len({tuple(row) for row in batch.prompt_ids.tolist()}))
        return models_of(model).policy_tokens(batch).logprobs

    shares: list[float] = []
    once = completion_logprobs(
        rows, logprobs, rows_per_pass=2, device=torch.device("cpu"), shares_prompts=True, progress=shares.append
    )
    assert (passes, shares) == ([1, 1], [0.0, 0.5])
    torch.testing.assert_close(
        once, numbers([sequence_logprob(model, *row) for row in zip(rows.prompts, rows.completions, strict=True)])
    )


def test_tokens_are_counted() -> None:
    prompts, chosen, rejected = (sum(map(len, side)) for side in (PROMPTS, CHOSEN, REJECTED))
    assert count_tokens(pairs()) == 2 * prompts + chosen + rejected
    assert count_tokens(labelled()) == prompts + chosen

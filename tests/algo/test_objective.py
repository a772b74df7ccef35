"""The table of algorithms: credit for a whole step, and the loss as sums that add over micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from algo_cases import (
    ALGORITHMS,
    CLIP_PPO,
    COEFS,
    KL_IN_LOSS,
    NAN,
    close,
    experience,
    online,
    output_rows,
    outputs,
    rollout,
    table,
)
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algo.advantages import gae, rewards_to_go
from rlhf.algo.kl import Coefs, kl_estimate
from rlhf.algo.masked import Mean, masked_mean, masked_sum, whiten
from rlhf.algorithms.correction import TokenMask
from rlhf.algorithms.presets import PRESETS
from rlhf.batching import concat
from rlhf.experience import compute_advantages
from rlhf.objective import Objective, Outputs, divide_by_denominators
from rlhf.types import Rollout

names = st.sampled_from(sorted(ALGORITHMS))
seeds = st.integers(0, 10_000)


def total_loss(objective: Objective, batch, model_outputs: Outputs, *, size: int, order=None) -> torch.Tensor:
    """The loss of a minibatch taken `size` rows at a time."""
    norms = objective.denominators(batch)
    order = torch.arange(len(batch)) if order is None else order
    loss = torch.zeros((), dtype=torch.float64)
    for part in order.split(size):
        terms, _ = objective.loss(batch.rows(part), output_rows(model_outputs, part), COEFS)
        loss = loss + sum(divide_by_denominators(terms, norms).values())
    return loss


def gradients(loss: torch.Tensor, model_outputs: Outputs) -> list[torch.Tensor]:
    """With respect to all outputs of the models."""
    slopes = torch.autograd.grad(
        loss,
        [model_outputs.logprobs, model_outputs.entropy, model_outputs.values],
        allow_unused=True,
        retain_graph=True,
    )
    return [torch.zeros_like(model_outputs.logprobs) if g is None else g for g in slopes]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_completions_of_an_older_policy_are_weighted_token_by_token(name):
    """d loss / d logprob of each token equals an on-policy token's times min(pi_old / pi_sampler, cap)."""
    algorithm = online(**ALGORITHMS[name])
    here = rollout(seed=3)
    gap = torch.linspace(-1.0, 1.0, here.logprobs.numel(), dtype=here.logprobs.dtype).view_as(here.logprobs)
    older = replace(here, sampler_logprobs=torch.where(here.completion_mask, here.logprobs - gap, 0.0))
    plain, weighted = (
        compute_advantages(older, algorithm, COEFS),
        compute_advantages(older, algorithm, COEFS, ratio_cap=1.5),
    )
    expected = plain.advantages * gap.exp().clamp(max=1.5)
    close(weighted.advantages, torch.where(here.completion_mask, expected, 0.0))
    close(weighted.returns, plain.returns)
    close(
        compute_advantages(replace(here, sampler_logprobs=here.logprobs), algorithm, COEFS, ratio_cap=1.5).advantages,
        plain.advantages,
    )


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_micro_batch_changes_nothing(name, size):
    algorithm = online(**ALGORITHMS[name])
    batch, objective = experience(algorithm, seed=3), Objective(algorithm, max_tokens=5)
    model_outputs = outputs(batch)
    whole = total_loss(objective, batch, model_outputs, size=len(batch))
    order = torch.tensor([4, 0, 7, 2, 1, 6, 5, 3])
    parts = total_loss(objective, batch, model_outputs, size=size, order=order)
    close(parts, whole)
    for ours, theirs in zip(gradients(parts, model_outputs), gradients(whole, model_outputs), strict=True):
        close(ours, theirs)


@given(names, seeds, st.randoms(use_true_random=False))
def test_credit_permutes_with_its_groups(name, seed, random):
    algorithm = online(**ALGORITHMS[name])
    plain = rollout(seed=seed)
    groups = random.sample(range(4), 4)
    order = torch.tensor([2 * g + member for g in groups for member in random.sample(range(2), 2)])
    before, after = (
        compute_advantages(plain, algorithm, COEFS).rows(order),
        compute_advantages(plain.rows(order), algorithm, COEFS),
    )
    for field in ("rewards", "advantages", "returns"):
        close(getattr(after, field), getattr(before, field))
    assert torch.equal(after.loss_mask, before.loss_mask)


@given(names, seeds)
def test_credit_and_loss_never_read_what_the_mask_hides(name, seed):
    algorithm = online(**ALGORITHMS[name])
    plain = rollout(seed=seed)
    mask = plain.completion_mask

    def hide(tensor):
        return torch.where(mask, tensor, NAN)

    fields = ("logprobs", "ref_logprobs", "values")
    hidden = replace(plain, **{field: hide(getattr(plain, field)) for field in fields})
    before, after = compute_advantages(plain, algorithm, COEFS), compute_advantages(hidden, algorithm, COEFS)
    for field in ("rewards", "advantages", "returns"):
        close(getattr(after, field), getattr(before, field))
        assert (getattr(after, field)[~mask] == 0).all()
    model_outputs = outputs(plain)
    dark = Outputs(
        logprobs=hide(model_outputs.logprobs.detach()).requires_grad_(),
        entropy=hide(model_outputs.entropy.detach()).requires_grad_(),
        values=hide(model_outputs.values.detach()).requires_grad_(),
    )
    objective = Objective(algorithm, max_tokens=5)
    loss, dark_loss = total_loss(objective, before, model_outputs, size=8), total_loss(objective, after, dark, size=8)
    close(dark_loss, loss)
    for ours, theirs in zip(gradients(dark_loss, dark), gradients(loss, model_outputs), strict=True):
        close(ours, theirs)
    _, observed = objective.loss(before, model_outputs, COEFS)
    _, dark_observed = objective.loss(after, dark, COEFS)
    for key, mean in observed.items():
        assert dark_observed[key].value == pytest.approx(mean.value, rel=1e-9, abs=1e-12), key


@given(names, seeds, st.integers(1, 3))
def test_extra_padding_changes_nothing(name, seed, extra):
    algorithm = online(**ALGORITHMS[name])
    plain = rollout(seed=seed)
    longer = rollout(seed=seed + 1, tokens=5 + extra, full=True)
    wide = concat([plain, longer]).rows(slice(0, len(plain)))
    assert wide.completion_mask.shape[1] == 5 + extra
    before, after = compute_advantages(plain, algorithm, COEFS), compute_advantages(wide, algorithm, COEFS)
    for field in ("rewards", "advantages", "returns"):
        close(getattr(after, field)[:, :5], getattr(before, field))
        assert (getattr(after, field)[:, 5:] == 0).all()


def hand_rollout() -> Rollout:
    """One group of two completions, of two tokens and of one."""
    return replace(
        rollout(groups=1, group_size=2, tokens=2, full=True),
        completion_mask=torch.tensor([[True, True], [True, False]]),
        scores=table([3.0, 1.0])[0],
        logprobs=table([-1.0, -2.0], [-1.5, 0.0]),
        ref_logprobs=table([-1.2, -1.5], [-2.5, 0.0]),  # k1: .2, -.5 | 1
        values=table([0.5, 1.0], [2.0, 0.0]),
    )


def test_credit_by_hand_with_a_critic():
    algorithm = online(
        advantage={"type": "gae", "gamma": 1.0, "gae_lambda": 0.5, "whiten": False},
        value_loss={},
        kl={"placement": "reward", "coef": 9.0},  # the coefficient in use is the controller's
    )
    batch = compute_advantages(hand_rollout(), algorithm, Coefs(kl=0.1, penalty=0.0))
    close(batch.rewards, table([-0.02, 3.05], [0.9, 0.0]))
    # delta: -.02 + 1 - .5 = .48, 3.05 - 1 = 2.05 | .9 - 2
    close(batch.advantages, table([0.48 + 0.5 * 2.05, 2.05], [-1.1, 0.0]))
    close(batch.returns, table([2.005, 3.05], [0.9, 0.0]))
    assert torch.equal(batch.loss_mask, batch.completion_mask)


@pytest.mark.parametrize(
    "baseline, first, second",
    [
        ("centered", 2.13 / 2, -2.13 / 2),  # totals 3 - .1 * (.2 - .5) = 3.03 and 1 - .1 = .9
        ("leave_one_out", 2.13, -2.13),
        ("normalized", 1.065 / 1.0651, -1.065 / 1.0651),
    ],
)
def test_credit_by_hand_with_a_group_baseline(baseline, first, second):
    algorithm = online(advantage={"type": "group", "baseline": baseline}, kl={"placement": "reward", "coef": 0.1})
    batch = compute_advantages(hand_rollout(), algorithm, Coefs(kl=0.1, penalty=0.0))
    close(batch.advantages, table([first, first], [second, 0.0]))


def test_credit_by_hand_with_reward_to_go():
    algorithm = online(advantage={"type": "batch_whiten", "gamma": 0.5, "whiten": False}, kl={"placement": "reward"})
    batch = compute_advantages(hand_rollout(), algorithm, Coefs(kl=0.1, penalty=0.0))
    close(batch.advantages, table([-0.02 + 0.5 * 3.05, 3.05], [0.9, 0.0]))


def test_credit_by_hand_with_greedy_baselines():
    """To go: 3.05 - .02 and 3.05 | .9; the greedy completion of the prompt scored 2 (no KL of its own)."""
    algorithm = online(advantage={"type": "greedy"}, kl={"placement": "reward"})
    batch = compute_advantages(
        replace(hand_rollout(), baselines=table([2.0, 2.0])[0]), algorithm, Coefs(kl=0.1, penalty=0.0)
    )
    close(batch.advantages, table([1.03, 1.05], [-1.1, 0.0]))
    close(batch.returns, table([3.03, 3.05], [0.9, 0.0]))


@pytest.mark.parametrize(
    "estimator, penalties", [("k2", [0.02, 0.125, 0.5]), ("k3", [0.018730753, 0.1487212707, None])]
)
def test_the_reward_penalty_uses_the_estimator(estimator, penalties):
    algorithm = online(advantage={"type": "group"}, kl={"placement": "reward", "estimator": estimator})
    rewards = compute_advantages(hand_rollout(), algorithm, Coefs(kl=0.1, penalty=0.0)).rewards
    close(rewards[0], [-0.1 * penalties[0], 3.0 - 0.1 * penalties[1]], rtol=1e-9, atol=1e-10)
    if penalties[2] is not None:
        close(rewards[1, 0], 1.0 - 0.1 * penalties[2])


def test_the_penalty_is_in_the_reward_only_where_it_is_placed_there():
    for placement, penalized in (("reward", True), ("loss", False), ("none", False)):
        algorithm = online(advantage={"type": "group"}, kl={"placement": placement, "estimator": "k2"})
        rewards = compute_advantages(hand_rollout(), algorithm, COEFS).rewards
        assert (rewards[0, 0].item() != 0.0) == penalized


@given(seeds)
def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_step(seed):
    for name in ("ppo", "reinforce_pp"):
        batch = experience(online(**ALGORITHMS[name]), seed=seed)
        close(masked_mean(batch.advantages, batch.completion_mask), 0.0)
        close(masked_mean(batch.advantages**2, batch.completion_mask), 1.0, rtol=1e-6)


@pytest.mark.parametrize("weights", [{"ratio_cap": 1.5}, {"correction": TokenMask(cap=1.2)}])
def test_a_minibatch_of_the_whole_step_is_whitened_and_weighted_like_the_step(weights):
    here = rollout(seed=3)
    gap = torch.linspace(-1.0, 1.0, here.logprobs.numel(), dtype=here.logprobs.dtype).view_as(here.logprobs)
    older = replace(here, sampler_logprobs=torch.where(here.completion_mask, here.logprobs - gap, 0.0))
    batches = []
    for over in ("step", "minibatch"):
        advantage = {**ALGORITHMS["ppo"]["advantage"], "whiten_over": over}
        algorithm = online(**{**ALGORITHMS["ppo"], "advantage": advantage})
        batch = compute_advantages(older, algorithm, COEFS, **weights)
        batches.append(algorithm.advantage.of_minibatch(batch))
    step, minibatch = batches
    assert torch.equal(minibatch.advantages, step.advantages)
    zeros = (step.advantages == 0) & step.loss_mask
    assert zeros.any() == ("correction" in weights)  # tokens that the mask leaves out
    objective, model_outputs = Objective(algorithm, max_tokens=5), outputs(here)
    losses = [total_loss(objective, batch, model_outputs, size=8) for batch in batches]
    assert torch.equal(losses[0], losses[1])


def test_a_minibatch_is_whitened_before_its_weights_by_hand():
    """Of 1, 3 and 5 the mean is 3 and the variance 8/3; a weight of 0 leaves its token in both, and without a loss."""
    algorithm = online(advantage={"type": "gae", "whiten_over": "minibatch"}, value_loss={})
    batch = experience(algorithm, seed=0).rows(slice(0, 1))
    batch = replace(
        batch,
        loss_mask=torch.tensor([[True, True, True, False, False]]),
        advantages=torch.tensor([[1.0, 3.0, 5.0, 0.0, 0.0]], dtype=torch.float64),
        pending_weights=torch.tensor([[0.5, 2.0, 0.0, 1.0, 1.0]], dtype=torch.float64),
    )
    expected = torch.tensor([[-0.5 * 1.5**0.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    close(algorithm.advantage.of_minibatch(batch).advantages, expected, rtol=1e-6)


@given(seeds)
def test_returns_are_not_whitened(seed):
    algorithm = online(advantage={"type": "gae", "gae_lambda": 1.0}, value_loss={}, kl={"placement": "reward"})
    batch = experience(algorithm, seed=seed)
    close(batch.returns, rewards_to_go(batch.rewards, batch.completion_mask, gamma=1.0))
    expected = whiten(batch.returns - batch.values, batch.completion_mask)
    close(batch.advantages, expected)


@given(seeds)
def test_whitened_rewards_keep_their_mean(seed):
    algorithm = online(**ALGORITHMS["ppo_whitened_rewards"])
    batch = experience(algorithm, seed=seed)
    mask = batch.completion_mask
    mean = masked_mean(batch.rewards, mask)
    deviation = masked_mean((batch.rewards - mean) ** 2, mask).sqrt()
    rewards = torch.where(mask, (batch.rewards - mean) / deviation + mean, 0.0)
    _, returns = gae(rewards, batch.values, mask, gamma=0.9, gae_lambda=1.0)
    close(batch.returns, returns, rtol=1e-6, atol=1e-6)


def test_uniform_groups_leave_the_policy_loss_and_its_norm():
    algorithm = online(**ALGORITHMS["dapo"])
    plain = rollout(seed=5)
    plain = replace(plain, scores=torch.where(torch.arange(8) < 4, 1.0, plain.scores))
    batch, objective = compute_advantages(plain, algorithm, COEFS), Objective(algorithm, max_tokens=5)
    assert not batch.loss_mask[:4].any()
    assert torch.equal(batch.loss_mask[4:], batch.completion_mask[4:])
    assert objective.denominators(batch)["policy"] == batch.completion_mask[4:].sum().item()
    model_outputs = outputs(batch)
    slope, _, _ = gradients(total_loss(objective, batch, model_outputs, size=8), model_outputs)
    assert (slope[:4] == 0).all()
    rest = compute_advantages(plain.rows(slice(4, 8)), algorithm, COEFS)
    close(
        total_loss(objective, batch, model_outputs, size=8),
        total_loss(objective, rest, output_rows(model_outputs, slice(4, 8)), size=4),
    )


def test_a_step_of_uniform_groups_only_is_no_step_and_no_division_by_zero():
    algorithm = online(**ALGORITHMS["dapo"])
    plain = replace(rollout(), scores=torch.ones(8, dtype=torch.float64))
    batch, objective = compute_advantages(plain, algorithm, COEFS), Objective(algorithm, max_tokens=5)
    model_outputs = outputs(batch)
    assert total_loss(objective, batch, model_outputs, size=8).item() == 0.0
    assert objective.denominators(batch) == {"policy": 1.0, "value": float(batch.completion_mask.sum())}


@given(seeds)
def test_the_critic_learns_from_all_live_tokens_whatever_the_policy_leaves_out(seed):
    algorithm = online(**CLIP_PPO)
    batch, objective = experience(algorithm, seed=seed), Objective(algorithm, max_tokens=5)
    model_outputs = outputs(batch)
    some = replace(batch, loss_mask=batch.loss_mask & (torch.arange(8) < 3)[:, None])
    terms, _ = objective.loss(batch, model_outputs, COEFS)
    fewer, _ = objective.loss(some, model_outputs, COEFS)
    close(fewer["value"], terms["value"])
    assert objective.denominators(some)["value"] == batch.completion_mask.sum().item()
    assert objective.denominators(some)["policy"] == some.loss_mask.sum().item()
    (slope,) = torch.autograd.grad(terms["value"], model_outputs.values)
    assert (slope[~batch.completion_mask] == 0).all()


def test_the_value_term_by_hand():
    algorithm = online(**{**CLIP_PPO, "value_loss": {"coef": 0.1, "clip_eps": 0.2}})
    batch = replace(
        compute_advantages(hand_rollout(), algorithm, COEFS),
        values=table([0.0, 0.0], [0.0, 0.0]),
        returns=table([2.0, 0.5], [2.0, 9.0]),
    )
    model_outputs = replace(outputs(batch), values=table([1.0, 1.0], [0.1, 5.0]))
    terms, observed = Objective(algorithm, max_tokens=2).loss(batch, model_outputs, COEFS)
    close(terms["value"], 0.1 * (1.62 + 0.125 + 1.805))
    assert observed["loss/value"].weight == 3.0
    assert observed["loss/value"].total == pytest.approx(1.62 + 0.125 + 1.805)
    assert observed["critic/clip_fraction"] == Mean(1.0, 3.0)


def test_the_policy_term_by_hand():
    algorithm = online(
        advantage={"type": "group"}, policy_loss={"type": "clip", "aggregate": "sequence_mean", "entropy_coef": 0.5}
    )
    batch = replace(compute_advantages(hand_rollout(), algorithm, COEFS), advantages=table([2.0, -2.0], [2.0, 0.0]))
    ratios = table([1.1, 0.5], [1.5, 7.0])
    model_outputs = Outputs(
        logprobs=batch.logprobs + ratios.log(), entropy=table([0.4, 0.6], [1.0, 9.0]), values=batch.values
    )
    terms, observed = Objective(algorithm, max_tokens=2).loss(batch, model_outputs, COEFS)
    assert set(terms) == {"policy"}
    # Row 0: (-2.2 - .2 + 1.6 - .3) / 2; row 1: -2.4 - .5
    close(terms["policy"], -0.55 - 2.9)
    assert observed["policy/clip_fraction"] == Mean(2.0, 3.0)
    assert observed["policy/ratio"].value == pytest.approx((1.1 + 0.5 + 1.5) / 3)
    assert observed["policy/entropy"].value == pytest.approx(2.0 / 3)
    assert observed["loss/policy"].value == pytest.approx((-2.2 + 1.6 - 2.4) / 3)
    expected = sum(r - 1 - torch.tensor(r).log().item() for r in (1.1, 0.5, 1.5)) / 3
    assert observed["kl/old"].value == pytest.approx(expected, rel=1e-5)


def test_ratios_outside_the_clip_range_are_counted_whatever_the_sign_of_the_advantage():
    """The clip stops the gradient of one of the two ratios outside [0.8, 1.2]: the other one's advantage pulls back."""
    algorithm = online(advantage={"type": "group"}, policy_loss={"type": "clip"})
    batch = replace(compute_advantages(hand_rollout(), algorithm, COEFS), advantages=table([2.0, 2.0], [2.0, 0.0]))
    ratios = table([1.1, 0.5], [1.5, 7.0])
    model_outputs = replace(outputs(batch), logprobs=batch.logprobs + ratios.log())
    _, observed = Objective(algorithm, max_tokens=2).loss(batch, model_outputs, COEFS)
    assert observed["policy/outside_clip"] == Mean(2.0, 3.0)
    assert observed["policy/clip_fraction"] == Mean(1.0, 3.0)
    unbounded = online(advantage={"type": "group"}, policy_loss={"type": "policy_gradient"})
    _, observed = Objective(unbounded, max_tokens=2).loss(batch, model_outputs, COEFS)
    assert "policy/outside_clip" not in observed


@pytest.mark.parametrize(
    "loss, expected, clipped",
    [
        # Advantages 2, -2 | 2; log-probs -.9, -2.5 | -.7; ratios 1.1, .5 | 1.5 clipped to [.8, 1.3]
        ({"type": "cispo", "clip_eps_low": 0.2, "clip_eps_high": 0.3}, [1.1 * 1.8, -0.8 * 5.0, 1.3 * 1.4], 2.0),
        ({"type": "cispo"}, [1.1 * 1.8, -0.5 * 5.0, 1.5 * 1.4], 0.0),
        ({"type": "policy_gradient"}, [1.8, -5.0, 1.4], 0.0),
    ],
)
def test_losses_of_log_probabilities_by_hand(loss, expected, clipped):
    algorithm = online(advantage={"type": "group"}, policy_loss=loss)
    ratios, logprobs = table([1.1, 0.5], [1.5, 7.0]), table([-0.9, -2.5], [-0.7, NAN])
    batch = replace(
        compute_advantages(hand_rollout(), algorithm, COEFS),
        logprobs=logprobs - ratios.log(),
        advantages=table([2.0, -2.0], [2.0, 0.0]),
    )
    model_outputs = Outputs(logprobs=logprobs, entropy=torch.zeros_like(logprobs), values=batch.values)
    terms, observed = Objective(algorithm, max_tokens=2).loss(batch, model_outputs, COEFS)
    close(terms["policy"], sum(expected))
    assert observed["loss/policy"].value == pytest.approx(sum(expected) / 3)
    assert observed["policy/clip_fraction"] == Mean(clipped, 3.0)
    assert observed["policy/ratio"].value == pytest.approx((1.1 + 0.5 + 1.5) / 3)


def test_a2c_is_ppo_at_the_first_optimizer_step_and_not_after():
    ppo, a2c = (online(**PRESETS[name]["algorithm"]) for name in ("ppo", "a2c"))
    plain = rollout(seed=6)
    batch = compute_advantages(plain, ppo, COEFS)
    for field in ("rewards", "advantages", "returns"):
        close(getattr(compute_advantages(plain, a2c, COEFS), field), getattr(batch, field))
    model_outputs = outputs(batch)
    first = replace(
        model_outputs, logprobs=batch.logprobs.clone().requires_grad_(), values=batch.values.clone().requires_grad_()
    )
    for moment, same in ((first, True), (model_outputs, False)):
        ours, theirs = (
            gradients(total_loss(Objective(algorithm, max_tokens=5), batch, moment, size=3), moment)
            for algorithm in (a2c, ppo)
        )
        assert theirs[0].abs().sum() > 0.1
        assert theirs[2].abs().sum() > 0.01
        assert torch.allclose(ours[0], theirs[0], rtol=1e-12, atol=0) == same
        close(ours[1], theirs[1])
        if same:
            close(ours[2], theirs[2], rtol=1e-12)


@given(seeds)
def test_entropy_is_a_bonus(seed):
    batch = experience(online(**KL_IN_LOSS), seed=seed)
    model_outputs = outputs(batch)
    terms, _ = Objective(online(**KL_IN_LOSS), max_tokens=5).loss(batch, model_outputs, COEFS)
    (slope,) = torch.autograd.grad(terms["policy"], model_outputs.entropy)
    lengths = batch.loss_mask.sum(1, keepdim=True).double()
    close(slope, torch.where(batch.loss_mask, -0.01 / lengths, 0.0))


@given(seeds, st.sampled_from(["k2", "k3"]))
def test_the_penalty_in_the_loss_is_its_weighted_sum(seed, estimator):
    def loss(placement):
        algorithm = online(
            advantage={"type": "group"},
            policy_loss={"type": "clip", "aggregate": "sequence_sum"},
            kl={"placement": placement, "estimator": estimator},
        )
        return Objective(algorithm, max_tokens=5).loss(batch, model_outputs, COEFS)

    batch = experience(online(**ALGORITHMS["dr_grpo"]), seed=seed)
    model_outputs = outputs(batch)
    penalized, observed = loss("loss")
    plain, _ = loss("none")
    penalty = masked_sum(COEFS.kl * kl_estimate(model_outputs.logprobs, batch.ref_logprobs, estimator), batch.loss_mask)
    close(penalized["policy"] - plain["policy"], penalty.detach(), atol=1e-9)
    assert observed["loss/kl"].total == pytest.approx(penalty.item(), rel=1e-9)
    assert penalty > 0


def test_the_penalized_surrogate_uses_the_coefficient_of_the_step():
    algorithm = online(**ALGORITHMS["ppo_penalty"])
    batch = experience(algorithm)
    model_outputs = outputs(batch)
    objective = Objective(algorithm, max_tokens=5)
    low, observed = objective.loss(batch, model_outputs, Coefs(kl=0.0, penalty=1.0))
    high, _ = objective.loss(batch, model_outputs, Coefs(kl=0.0, penalty=3.0))
    close(high["policy"] - low["policy"], 2.0 * observed["kl/old"].total, atol=1e-9)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_at_the_old_policy_the_gradient_is_reinforce(name):
    algorithm = online(**ALGORITHMS[name])
    kind = algorithm.policy_loss.model_copy(update={"aggregate": "sequence_sum", "entropy_coef": 0.0})
    level = getattr(kind, "ratio", "token")
    if level == "sequence":  # every token carries the whole sequence's ratio
        kind = kind.model_copy(update={"aggregate": "sequence_mean"})
    elif level == "sequence_mean":
        kind = kind.model_copy(update={"ratio": "token"})
    algorithm = algorithm.model_copy(update={"policy_loss": kind, "kl": algorithm.kl.model_copy(update={"coef": 0.0})})
    batch = experience(algorithm, seed=2)
    model_outputs = replace(outputs(batch), logprobs=batch.logprobs.clone().requires_grad_())
    terms, observed = Objective(algorithm, max_tokens=5).loss(batch, model_outputs, Coefs(kl=0.0, penalty=0.7))
    (slope,) = torch.autograd.grad(terms["policy"], model_outputs.logprobs)
    close(slope, -batch.advantages)
    assert observed["policy/clip_fraction"].value == 0.0
    assert observed["policy/ratio"].value == 1.0
    assert observed["kl/old"].value == 0.0


def test_at_the_old_policy_gspo_is_grpo():
    """The length's root and the length's weight are one division by the length, not two and not none."""
    parts = {"advantage": {"type": "group"}}
    grpo = online(**parts, policy_loss={"type": "clip", "ratio": "token", "aggregate": "sequence_mean"})
    gspo = online(**parts, policy_loss={"type": "clip", "ratio": "sequence_mean", "aggregate": "sequence_mean"})
    batch = experience(grpo, seed=4)
    model_outputs = replace(outputs(batch), logprobs=batch.logprobs.clone().requires_grad_())
    slopes = []
    for algorithm in (grpo, gspo):
        terms, _ = Objective(algorithm, max_tokens=5).loss(batch, model_outputs, COEFS)
        slopes.append(torch.autograd.grad(terms["policy"], model_outputs.logprobs)[0])
    close(slopes[0], slopes[1])
    assert slopes[0].abs().sum() > 0


def test_only_an_algorithm_with_a_critic_has_a_value_term():
    for choices in ALGORITHMS.values():
        algorithm = online(**choices)
        batch = experience(algorithm)
        terms, _ = Objective(algorithm, max_tokens=5).loss(batch, outputs(batch), COEFS)
        assert ("value" in terms) == (algorithm.value_loss is not None)


MASKED = {"advantage": {"type": "group"}, "policy_loss": {"aggregate": "sequence_mean"}, "mask_truncated": True}


def test_completions_that_were_cut_off_are_left_out_of_the_loss_and_its_denominators() -> None:
    """As if the step had never drawn them, but for the baselines of their groups (DAPO's overlong filtering)."""
    drawn = rollout()
    drawn = replace(drawn, finished=torch.tensor([True, False, True, True, False, False, True, True]))
    algorithm, plain = online(**MASKED), online(**{**MASKED, "mask_truncated": False})
    masked, whole = (compute_advantages(drawn, each, COEFS) for each in (algorithm, plain))
    kept = drawn.finished.nonzero().flatten()
    assert torch.equal(masked.loss_mask, whole.loss_mask & drawn.finished[:, None])
    close(masked.advantages[kept], whole.advantages[kept])
    model_outputs = outputs(masked)
    terms, _ = Objective(algorithm, max_tokens=5).loss(masked, model_outputs, COEFS)
    alone, _ = Objective(plain, max_tokens=5).loss(whole.rows(kept), output_rows(model_outputs, kept), COEFS)
    close(terms["policy"], alone["policy"])
    assert Objective(algorithm, max_tokens=5).denominators(masked)["policy"] == float(len(kept)) == 5.0


def test_the_critic_does_not_learn_from_completions_that_were_cut_off() -> None:
    drawn = rollout()
    drawn = replace(drawn, finished=torch.tensor([True, False] * 4))
    algorithm = online(**CLIP_PPO, mask_truncated=True)
    batch, kept = compute_advantages(drawn, algorithm, COEFS), drawn.finished.nonzero().flatten()
    objective, model_outputs = Objective(algorithm, max_tokens=5), outputs(batch)
    terms, _ = objective.value_term(batch, model_outputs.values)
    alone, _ = objective.value_term(batch.rows(kept), model_outputs.values[kept])
    close(terms["value"], alone["value"])
    assert objective.denominators(batch)["value"] == float(batch.completion_mask[kept].sum())


def test_where_every_completion_was_cut_off_the_gradient_is_exactly_zero() -> None:
    drawn = rollout()
    batch = compute_advantages(replace(drawn, finished=torch.zeros_like(drawn.finished)), online(**MASKED), COEFS)
    model_outputs, objective = outputs(batch), Objective(online(**MASKED), max_tokens=5)
    terms, _ = objective.loss(batch, model_outputs, COEFS)
    (gradient,) = torch.autograd.grad(terms["policy"] / objective.denominators(batch)["policy"], model_outputs.logprobs)
    assert gradient.abs().max() == 0.0


def test_an_entropy_that_is_no_number_does_not_reach_a_loss_without_a_bonus() -> None:
    batch = experience(online(**CLIP_PPO))
    model_outputs = outputs(batch)
    nan = replace(model_outputs, entropy=torch.full_like(model_outputs.entropy, NAN))
    terms, _ = Objective(online(**CLIP_PPO), max_tokens=5).loss(batch, nan, COEFS)
    assert bool(terms["policy"].isfinite())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {**CLIP_PPO, "kl": {"placement": "reward", "importance_weighted": True}},
            "importance_weighted weighs the penalty in the loss",
        ),
        (
            {"advantage": {"type": "best_and_worst"}, "policy_loss": {"type": "pair"}, "mask_truncated": True},
            "a pair loss learns from two at once",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        online(**choices)

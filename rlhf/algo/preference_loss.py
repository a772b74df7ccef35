"""The offline losses: what a preference says about two completions, a label about one. No reduction here.

Every function takes one number a completion. With y_w the chosen completion of prompt x and y_l the rejected one:

    log π(y)    the log-probability of the whole completion: summed over its tokens, EOS included
    h(y)        its log-ratio to the reference, log π(y) - log π_ref(y)
    m(y)        its mean log-probability per token, log π(y) / |y|

The reward of a completion is what the loss compares; the chosen side wins where its reward is the higher one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

ODDS_EPS = 1e-6  # a mean log-probability is taken to be at most -ODDS_EPS: at 0 the odds are infinite


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss a pair, and the implicit reward of each side."""

    per_pair: Float[Tensor, " B"]
    chosen_reward: Float[Tensor, " B"]
    rejected_reward: Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class LabelLoss:
    """A loss a completion, and its implicit reward: for losses that need no pairs."""

    per_completion: Float[Tensor, " B"]
    reward: Float[Tensor, " B"]


def dpo(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float, label_smoothing: float = 0.0
) -> PreferenceLoss:
    """Direct preference optimization (Rafailov et al. 2023, eq. 7); with label smoothing, conservative DPO.

        z = β (h_w - h_l)
        L = -(1 - ε) log σ(z) - ε log σ(-z)

    `chosen` and `rejected` are h. cDPO (Mitchell 2023) takes ε to be the share of labels that are flipped; its
    optimum is at σ(z) = 1 - ε, so the margin stays finite. It is not the robust DPO below.
    """
    logits = beta * (chosen - rejected)
    per_pair = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def robust_dpo(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float, label_smoothing: float
) -> PreferenceLoss:
    """DPO's loss made unbiased under labels flipped with probability ε < 1/2 (Chowdhury et al. 2024, rDPO).

        L = (-(1 - ε) log σ(z) + ε log σ(-z)) / (1 - 2ε),     z = β (h_w - h_l)

    Its expectation over the flips is the DPO loss of the clean label. It can be negative, and where ε is set larger
    than the noise it falls without bound.
    """
    logits = beta * (chosen - rejected)
    mixed = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    per_pair = mixed / (1 - 2 * label_smoothing)
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def ipo(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float) -> PreferenceLoss:
    """Identity preference optimization (Azar et al. 2024, eq. 17): the margin is to be 1/(2β), no more.

        L = (h_w - h_l - 1/(2β))²

    β is the paper's τ, and the scale of h decides what it means. With h summed over tokens (the paper, and DPO's
    reference repository) the margin is 1/(2β) nats per sequence; with h divided by the length (TRL), per token: one β
    does not carry over from the one to the other.
    """
    per_pair = (chosen - rejected - 1 / (2 * beta)) ** 2
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def hinge(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float, margin: float) -> PreferenceLoss:
    """The hinge in place of DPO's logistic loss (Liu et al. 2024, RSO's hinge-norm, margin 1).

    L = max(0, δ - β (h_w - h_l)),     δ = `margin`
    """
    per_pair = (margin - beta * (chosen - rejected)).relu()
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def slic(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, margin: float, nll_coef: float
) -> PreferenceLoss:
    """Sequence likelihood calibration from pairs (Zhao et al. 2023, SLiC-HF): no reference but its own text.

        L = max(0, δ - log π(y_w) + log π(y_l)) - λ log π(y_w)

    `chosen` and `rejected` are log π, λ is `nll_coef`. Departure: the paper's second term is on a target of the SFT
    data, or on the best-ranked of several samples; of a pair, the best-ranked is the chosen completion.
    """
    per_pair = (margin - chosen + rejected).relu() - nll_coef * chosen
    return PreferenceLoss(per_pair=per_pair, chosen_reward=chosen, rejected_reward=rejected)


def simpo(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float, gamma: float) -> PreferenceLoss:
    """Simple preference optimization (Meng et al. 2024, eq. 6): mean log-probabilities, no reference, a margin γ.

        L = -log σ(β (m_w - m_l) - γ)

    `chosen` and `rejected` are m. Some implementations set γ/β instead of γ.
    """
    per_pair = -logsigmoid(beta * (chosen - rejected) - gamma)
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def orpo(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, coef: float) -> PreferenceLoss:
    """Odds ratio preference optimization (Hong et al. 2024, eq. 6 and 7): SFT on the chosen side, and an odds ratio.

        L = -m_w - λ log σ(log odds(y_w) - log odds(y_l)),     odds(y) = p / (1 - p),  p = exp m(y)

    `chosen` and `rejected` are m, λ is `coef`. The reward is the log odds. Departure: m is held below 0 by a
    millionth, for a completion of probability 1 has infinite odds. The SFT term is the mean over a completion's own
    tokens, as in the paper; implementations that average over all tokens of a batch weigh long completions more.
    """
    odds = [_log_odds(side) for side in (chosen, rejected)]
    per_pair = -chosen - coef * logsigmoid(odds[0] - odds[1])
    return PreferenceLoss(per_pair=per_pair, chosen_reward=odds[0], rejected_reward=odds[1])


def _log_odds(mean_logprobs: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    below_zero = mean_logprobs.clamp(max=-ODDS_EPS)
    return below_zero - torch.log(-torch.expm1(below_zero))


def kto(
    log_ratios: Float[Tensor, " B"],
    desirable: Bool[Tensor, " B"],
    baselines: Float[Tensor, " B"],
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> LabelLoss:
    """Kahneman-Tversky optimization of labelled completions (Ethayarajh et al. 2024, eq. 8).

        L = λ_D (1 - σ(β (h - z0)))     where the completion is desirable
        L = λ_U (1 - σ(β (z0 - h)))     where it is not

    `log_ratios` are h and `baselines` z0, which has no gradient: see `kto_baseline`.
    """
    distance = beta * (log_ratios - baselines.detach())
    per_completion = torch.where(
        desirable, desirable_weight * torch.sigmoid(-distance), undesirable_weight * torch.sigmoid(distance)
    )
    return LabelLoss(per_completion=per_completion, reward=beta * log_ratios)


def kto_baseline(mismatched_log_ratios: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """KTO's z0, a biased estimate of KL(π || π_ref) that needs no sampling (Ethayarajh et al. 2024, sec. 4.1).

        z0 = max(0, mean over i of log π(y_j | x_i) - log π_ref(y_j | x_i)),     y_j another prompt's completion

    The mean is over the whole minibatch, so that micro-batches cannot change it; no gradient.
    """
    return mismatched_log_ratios.detach().mean().clamp(min=0)


def mismatched(prompts: Sequence[Hashable]) -> list[int]:
    """For each row the next one, around the end, that has another prompt; the next one where all prompts are alike.

    The paper shifts a batch by one; where neighbors share a prompt, that is no mismatch.
    """
    count = len(prompts)
    partners = [(row + 1) % count for row in range(count)]
    if len(set(prompts)) > 1:
        for row in reversed(range(2 * count)):  # twice around, for the last rows look past the end
            here, following = row % count, (row + 1) % count
            if prompts[here] == prompts[following]:
                partners[here] = partners[following]
    return partners

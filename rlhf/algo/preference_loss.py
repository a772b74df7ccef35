"""Offline losses: of pairs of completions (DPO and others) and of labelled completions (KTO). No reduction here.

Every function takes one number per completion. With y_w the chosen completion of prompt x and y_l the rejected one:

    log π(y)    the log-probability of the whole completion: summed over its tokens, EOS included
    h(y)        its log-ratio to the reference, log π(y) - log π_ref(y)
    m(y)        its mean log-probability per token, log π(y) / |y|

The implicit reward of a completion is what the loss compares; the chosen side wins where its reward is higher.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

ODDS_EPS = 1e-6  # mean log-probabilities are clamped to at most -ODDS_EPS: at 0 the odds are infinite


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss per pair, and the implicit reward of each side."""

    per_pair: Float[Tensor, " B"]
    chosen_reward: Float[Tensor, " B"]
    rejected_reward: Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class LabelLoss:
    """A loss per completion, and its implicit reward: for losses that need no pairs."""

    per_completion: Float[Tensor, " B"]
    reward: Float[Tensor, " B"]


def dpo(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float, label_smoothing: float = 0.0
) -> PreferenceLoss:
    """Compute the DPO loss (Rafailov et al. 2023, eq. 7); with label smoothing, that of conservative DPO.

        z = β (h_w - h_l)
        L = -(1 - ε) log σ(z) - ε log σ(-z)

    `chosen` and `rejected` are h, ε is `label_smoothing`. cDPO (Mitchell 2023) takes ε to be the share of flipped
    labels; its optimum is at σ(z) = 1 - ε, so the margin stays finite. It is not the robust DPO below.
    """
    logits = beta * (chosen - rejected)
    per_pair = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def robust_dpo(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float, label_smoothing: float
) -> PreferenceLoss:
    """Compute the rDPO loss: DPO made robust to labels flipped with probability ε < 1/2 (Chowdhury et al. 2024).

        L = (-(1 - ε) log σ(z) + ε log σ(-z)) / (1 - 2ε),     z = β (h_w - h_l)

    Its expectation over the flips is the DPO loss of the clean label. It can be negative, and is unbounded below
    where ε is set larger than the true noise.
    """
    logits = beta * (chosen - rejected)
    mixed = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    per_pair = mixed / (1 - 2 * label_smoothing)
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def ipo(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float) -> PreferenceLoss:
    """Compute the IPO loss, which regresses the margin to 1/(2β) (Azar et al. 2024, eq. 17).

        L = (h_w - h_l - 1/(2β))²

    β is the paper's τ, and its meaning depends on the scale of h. With h summed over tokens (the paper, and DPO's
    reference repository) the margin is 1/(2β) nats per sequence; with h divided by the length (TRL), per token: a β
    tuned for one does not carry over to the other.
    """
    per_pair = (chosen - rejected - 1 / (2 * beta)) ** 2
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def hinge(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float, margin: float) -> PreferenceLoss:
    """Compute the hinge loss in place of DPO's logistic loss (Liu et al. 2024, RSO's hinge-norm, margin 1).

    L = max(0, δ - β (h_w - h_l)),     δ = `margin`
    """
    per_pair = (margin - beta * (chosen - rejected)).relu()
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def add_chosen_likelihood(loss: PreferenceLoss, chosen: Float[Tensor, " B"], *, nll_coef: float) -> PreferenceLoss:
    """Add the chosen side's negative log-likelihood per token to a pair loss (iterative RPO, Pang et al. 2024, eq. 1).

        L = L_pair - α m(y_w)

    `chosen` is m, α is `nll_coef`. It keeps the chosen completion from losing probability, which the pair loss alone
    allows as long as the rejected one loses more.
    """
    return replace(loss, per_pair=loss.per_pair - nll_coef * chosen)


def slic(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, margin: float, nll_coef: float
) -> PreferenceLoss:
    """Compute the SLiC-HF loss, sequence likelihood calibration without a reference model (Zhao et al. 2023).

        L = max(0, δ - log π(y_w) + log π(y_l)) - λ log π(y_w)

    `chosen` and `rejected` are log π, λ is `nll_coef`. Departure: the paper's second term is over a target of the SFT
    data, or over the best-ranked of several samples; in a pair, the best-ranked is the chosen completion.
    """
    per_pair = (margin - chosen + rejected).relu() - nll_coef * chosen
    return PreferenceLoss(per_pair=per_pair, chosen_reward=chosen, rejected_reward=rejected)


def simpo(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float, gamma: float) -> PreferenceLoss:
    """Compute the SimPO loss: mean log-probabilities, a margin γ, no reference model (Meng et al. 2024, eq. 6).

        L = -log σ(β (m_w - m_l) - γ)

    `chosen` and `rejected` are m. Some implementations have γ/β as their setting instead of γ.
    """
    per_pair = -logsigmoid(beta * (chosen - rejected) - gamma)
    return PreferenceLoss(per_pair=per_pair, chosen_reward=beta * chosen, rejected_reward=beta * rejected)


def orpo(chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, coef: float) -> PreferenceLoss:
    """Compute the ORPO loss: SFT on the chosen side plus an odds ratio term (Hong et al. 2024, eq. 6 and 7).

        L = -m_w - λ log σ(log odds(y_w) - log odds(y_l)),     odds(y) = p / (1 - p),  p = exp m(y)

    `chosen` and `rejected` are m, λ is `coef`. The implicit reward is the log odds. Departure: m is clamped to at most
    -1e-6, because a completion of probability 1 has infinite odds. The SFT term is the mean over a completion's own
    tokens, as in the paper; implementations that average over all tokens of a batch give long completions more weight.
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
    """Compute the KTO loss of labelled completions (Kahneman-Tversky optimization; Ethayarajh et al. 2024, eq. 8).

        L = λ_D (1 - σ(β (h - z0)))     where the completion is desirable
        L = λ_U (1 - σ(β (z0 - h)))     where it is not

    `log_ratios` are h and `baselines` are z0, which gets no gradient (see `kto_baseline`); λ_D and λ_U are
    `desirable_weight` and `undesirable_weight`.
    """
    distance = beta * (log_ratios - baselines.detach())
    per_completion = torch.where(
        desirable, desirable_weight * torch.sigmoid(-distance), undesirable_weight * torch.sigmoid(distance)
    )
    return LabelLoss(per_completion=per_completion, reward=beta * log_ratios)


def kto_baseline(mismatched_log_ratios: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Compute KTO's z0, a biased estimate of KL(π || π_ref) that needs no sampling (Ethayarajh et al. 2024, sec. 4.1).

        z0 = max(0, mean over i of log π(y_j | x_i) - log π_ref(y_j | x_i)),     y_j another prompt's completion

    The mean is over the whole minibatch, so that splitting it into micro-batches cannot change it; no gradient.
    """
    return mismatched_log_ratios.detach().mean().clamp(min=0)


def mismatched_partners(prompts: Sequence[Hashable]) -> list[int]:
    """Return for every row the next row, cyclically, that has a different prompt; just the next where all are equal.

    The paper shifts a batch by one, but where neighbors share a prompt, that is not a mismatch.
    """
    count = len(prompts)
    partners = [(row + 1) % count for row in range(count)]
    if len(set(prompts)) > 1:
        for row in reversed(range(2 * count)):  # twice around: the last rows look past the end
            here, following = row % count, (row + 1) % count
            if prompts[here] == prompts[following]:
                partners[here] = partners[following]
    return partners

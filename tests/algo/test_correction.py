"""Importance weights of stale or foreign samples: their bias and variance by enumeration, and the table of the docs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.algo.correction import masked_above, sequence_ratios, token_ratios, truncated
from rlhf.algorithms.correction import Correction
from rlhf.config.sections import SamplingConfig
from rlhf.exact.world import World, enumerate_world, random_scores, random_table

WORLD = enumerate_world(prompts=2, vocabulary=3, horizon=4)
DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
CHANGES = (0.1, 0.3, 1.0)  # standard deviation of the noise in the sampler's logits
NAMES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def correction(name: str, **settings: Any) -> Correction:
    made = SamplingConfig(correction={"type": name, **settings}).correction  # type: ignore[arg-type]
    assert made is not None
    return made


@dataclass(frozen=True)
class Estimate:
    """A gradient estimated from the sampler's completions: the error of its mean and its spread, as shares of it."""

    bias: float
    spread: float


def estimate(world: World, policy: Tensor, sampler: Tensor, scores: Tensor, weights: Correction) -> Estimate:
    """Enumerate E_mu[sum_t w_t A grad log pi_t] and its standard deviation, against the gradient of E_pi[score]."""
    rows, mask = world.all_rows(), world.mask.repeat(world.prompts, 1)
    advantages = (scores - (world.sequence_logprobs(policy).exp() * scores).sum(1, keepdim=True)).flatten()
    logits = policy.clone().requires_grad_()
    logprobs = world.token_logprobs(logits.log_softmax(-1), rows)
    w = weights.weigh(logprobs.detach(), world.token_logprobs(sampler, rows), mask)
    single = [
        torch.autograd.grad((w * advantages[:, None] * logprobs)[row].sum(), logits, retain_graph=True)[0].flatten()
        for row in rows
    ]
    gradients = torch.stack(single)
    chance = world.sequence_logprobs(sampler).exp().flatten()[:, None] / world.prompts
    mean = (chance * gradients).sum(0)
    exact_logits = policy.clone().requires_grad_()
    objective = (world.sequence_logprobs(exact_logits.log_softmax(-1)).exp() * scores).sum(1).mean()
    (exact,) = torch.autograd.grad(objective, exact_logits)
    spread = (chance * (gradients - mean).square()).sum().sqrt()
    size = exact.norm()
    return Estimate(float((mean - exact.flatten()).norm() / size), float(spread / size))


def problem(change: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    policy = random_table(WORLD, seed)
    noise = torch.randn(policy.shape, generator=torch.Generator().manual_seed(seed + 100), dtype=policy.dtype)
    return policy, (policy + change * noise).log_softmax(-1), random_scores(WORLD, seed + 200)


def bias_and_spread(name: str, change: float, **settings: Any) -> Estimate:
    """The mean over four policies."""
    estimates = [estimate(WORLD, *problem(change, seed), correction(name, **settings)) for seed in range(4)]
    return Estimate(sum(e.bias for e in estimates) / 4, sum(e.spread for e in estimates) / 4)


@pytest.mark.parametrize("name", ["sequence_truncate", "sequence_mask"])
def test_whole_completions_without_a_cap_are_unbiased(name: str) -> None:
    assert bias_and_spread(name, 1.0, cap=1e6).bias < 1e-12


@pytest.mark.parametrize("name", ["token_truncate", "token_mask"])
def test_tokens_alone_are_biased_also_without_a_cap(name: str) -> None:
    corrected, plain = bias_and_spread(name, 0.3, cap=1e6), bias_and_spread("none", 0.3)
    assert 1e-3 < corrected.bias < plain.bias


def test_a_sampler_that_is_the_policy_needs_nothing() -> None:
    policy, _, scores = problem(0.0)
    for name in NAMES:
        assert estimate(WORLD, policy, policy, scores, correction(name)).bias < 1e-12


def test_a_cap_trades_spread_for_bias() -> None:
    wide, narrow = (bias_and_spread("sequence_truncate", 1.0, cap=cap) for cap in (1e6, 1.5))
    assert narrow.bias > wide.bias
    assert narrow.spread < wide.spread


def test_weights_worked_by_hand() -> None:
    logprobs = torch.tensor([[2.0, 3.0, torch.nan]]).log()
    sampler = torch.tensor([[1.0, 1.0, torch.nan]]).log()
    mask = torch.tensor([[True, True, False]])
    tokens, sequence = token_ratios(logprobs, sampler, mask), sequence_ratios(logprobs, sampler, mask)
    torch.testing.assert_close(tokens, torch.tensor([[2.0, 3.0, 1.0]]))
    torch.testing.assert_close(sequence, torch.tensor([[6.0, 6.0, 1.0]]))
    torch.testing.assert_close(truncated(tokens, 2.5), torch.tensor([[2.0, 2.5, 1.0]]))
    torch.testing.assert_close(masked_above(tokens, 2.5), torch.tensor([[2.0, 0.0, 1.0]]))
    for name, expected, capped, masked in (
        ("token_truncate", [2.0, 2.5, 1.0], 0.5, 0.0),
        ("token_mask", [2.0, 0.0, 1.0], 0.5, 0.5),
        ("sequence_truncate", [2.5, 2.5, 1.0], 1.0, 0.0),
        ("sequence_mask", [0.0, 0.0, 1.0], 1.0, 1.0),
    ):
        made = correction(name, cap=2.5)
        torch.testing.assert_close(made.weigh(logprobs, sampler, mask), torch.tensor([expected]))
        measured = made.measure(logprobs, sampler, mask)
        assert (measured["correction/capped"].value, measured["correction/masked"].value) == (capped, masked)


def table() -> str:
    """The rows of the table in docs/vllm.md."""
    lines = []
    for name in NAMES:
        settings = {} if name == "none" else {"cap": 3.0}
        cells = [bias_and_spread(name, change, **settings) for change in CHANGES]
        lines.append(f"| `{name}` | " + " | ".join(f"{c.bias:.3f} | {c.spread:.2f}" for c in cells) + " |")
    return "\n".join(lines)


def test_the_table_of_the_page_is_what_enumeration_gives() -> None:
    lines = re.findall(rf"^\| `(?:{'|'.join(NAMES)})` \|(?: [\d.]+ \|){{6}}$", DOCS.read_text(encoding="utf-8"), re.M)
    assert "\n".join(lines) == table()


if __name__ == "__main__":
    print(table())  # noqa: T201

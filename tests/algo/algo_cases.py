"""Small batches in float64 for the tests of the mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.online import Online
from rlhf.algorithms.policy_loss import Tokens
from rlhf.experience import compute_advantages
from rlhf.objective import Outputs
from rlhf.types import Experience, Rollout

NAN = float("nan")
CLIP_PPO: dict[str, Any] = {
    "advantage": {"type": "gae"},
    "value_loss": {},
    "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
}
KL_IN_LOSS: dict[str, Any] = {
    "advantage": {"type": "group", "baseline": "normalized"},
    "policy_loss": {"type": "clip", "aggregate": "sequence_mean", "entropy_coef": 0.01},
    "kl": {"placement": "loss", "estimator": "k3", "coef": 0.04},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": CLIP_PPO,
    "ppo_whitened_rewards": {**CLIP_PPO, "advantage": {"type": "gae", "gamma": 0.9, "whiten_rewards": True}},
    "ppo_penalty": {**CLIP_PPO, "policy_loss": {"type": "penalty", "entropy_coef": 0.02}},
    "trpo": {**CLIP_PPO, "policy_loss": {"type": "trust_region", "entropy_coef": 0.02}},
    "reinforce_pp": {"advantage": {"type": "batch_whiten"}, "kl": {"placement": "reward", "coef": 0.01}},
    "rloo": {
        "advantage": {"type": "group", "baseline": "leave_one_out"},
        "policy_loss": {"type": "clip", "ratio": "sequence", "aggregate": "sequence_sum"},
        "kl": {"placement": "reward", "coef": 0.05},
    },
    "grpo": KL_IN_LOSS,
    "dr_grpo": {
        "advantage": {"type": "group", "baseline": "centered"},
        "policy_loss": {"type": "clip", "aggregate": "constant"},
    },
    "dapo": {
        "advantage": {"type": "group"},
        "policy_loss": {"type": "clip", "clip_eps_high": 0.28, "dual_clip": 3.0},
        "drop_uniform_groups": True,
    },
    "cispo": {
        "advantage": {"type": "group"},
        "policy_loss": {"type": "cispo", "clip_eps_low": 0.3, "clip_eps_high": 0.3, "entropy_coef": 0.01},
    },
    "a2c": {**CLIP_PPO, "policy_loss": {"type": "policy_gradient", "entropy_coef": 0.01}},
    "remax": {
        "advantage": {"type": "greedy"},
        "policy_loss": {"type": "policy_gradient", "aggregate": "sequence_sum"},
        "kl": {"placement": "reward", "coef": 0.05},
    },
    "gspo": {
        "advantage": {"type": "group"},
        "policy_loss": {"type": "clip", "ratio": "sequence_mean", "aggregate": "sequence_mean"},
    },
}
COEFS = Coefs(kl=0.3, penalty=0.7)


def online(**choices: Any) -> Online:
    """The algorithm of these choices."""
    return Online.model_validate(choices)


def close(actual: Any, expected: Any, *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Equal up to float64's rounding."""
    if not isinstance(expected, Tensor):
        expected = torch.as_tensor(expected, dtype=torch.float64)
    if not isinstance(actual, Tensor):
        actual = torch.as_tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def table(*rows: Sequence[float]) -> Tensor:
    """A float64 tensor of these rows."""
    return torch.tensor(rows, dtype=torch.float64)


def live(*rows: Sequence[int]) -> Tensor:
    """A mask of these rows."""
    return torch.tensor(rows, dtype=torch.bool)


def prefix_mask(lengths: Sequence[int], tokens: int) -> Tensor:
    """Right padding: the first `length` tokens of each row are live."""
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


@dataclass(frozen=True)
class Grid:
    """Random numbers on rows of tokens, and which of them are live."""

    first: Tensor
    second: Tensor
    mask: Tensor
    scores: Tensor


@st.composite
def grids(draw: st.DrawFn, *, holes: bool = False, shortest: int = 0) -> Grid:
    """1 to 5 rows of 1 to 6 tokens; right-padded, or with dead tokens anywhere."""
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(max(shortest, 1), 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    if holes:
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows * tokens, max_size=rows * tokens)))
        mask = mask.view(rows, tokens)
    else:
        mask = prefix_mask(draw(st.lists(st.integers(shortest, tokens), min_size=rows, max_size=rows)), tokens)
    numbers = [torch.randn(rows, tokens, generator=generator, dtype=torch.float64) for _ in range(2)]
    scale = draw(st.sampled_from([0.1, 1.0, 30.0]))
    scores = torch.randn(rows, generator=generator, dtype=torch.float64) * scale
    return Grid(numbers[0] * scale, numbers[1], mask, scores)


def rollout(
    *, groups: int = 4, group_size: int = 2, tokens: int = 5, seed: int = 0, full: bool = False, noise: float = 0.3
) -> Rollout:
    """Random completions of 1 to `tokens` tokens, with log-probs, values and scores that models could have given."""
    rows = groups * group_size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
    mask = prefix_mask([tokens] * rows if full else lengths.tolist(), tokens)
    logprobs = -normal(rows, tokens).abs() - 0.1
    return Rollout(
        prompt_ids=torch.ones(rows, 2, dtype=torch.long),
        prompt_mask=torch.ones(rows, 2, dtype=torch.bool),
        row_ids=torch.arange(rows),
        references=tuple({"row": row} for row in range(rows)),
        completion_ids=torch.randint(1, 9, (rows, tokens), generator=generator),
        completion_mask=mask,
        sampler_logprobs=logprobs,
        finished=torch.ones(rows, dtype=torch.bool),
        group_size=group_size,
        scores=normal(rows),
        baselines=0.5 * torch.arange(groups, dtype=torch.float64).repeat_interleave(group_size),
        logprobs=logprobs,
        ref_logprobs=logprobs + noise * normal(rows, tokens),
        values=normal(rows, tokens),
        hinted=torch.zeros(rows, dtype=torch.bool),
    )


def tokens(ratio: Tensor, advantages: Tensor, **given: Any) -> Tokens:
    """The inputs of a loss of these tokens, all of them live; coefficients as in COEFS."""
    zeros = torch.zeros_like(ratio.detach())
    others = {
        "logprobs": zeros,
        "old_logprobs": zeros,
        "mask": torch.ones_like(zeros, dtype=torch.bool),
        "old_kl": zeros,
    }
    return Tokens(**{"ratio": ratio, "advantages": advantages, "coefs": COEFS, **others, **given})


def experience(algorithm: Online, **how: Any) -> Experience:
    """A rollout with its credit."""
    return compute_advantages(rollout(**how), algorithm, COEFS)


def outputs(batch: Rollout, *, seed: int = 1, spread: float = 0.3) -> Outputs:
    """Possible outputs of trained models for `batch`, some updates later: leaves that require a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def near(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return (tensor + spread * noise).requires_grad_()

    entropy = torch.rand(batch.logprobs.shape, generator=generator, dtype=torch.float64)
    return Outputs(logprobs=near(batch.logprobs), entropy=entropy.requires_grad_(), values=near(batch.values))


def output_rows(whole: Outputs, index: Tensor | slice) -> Outputs:
    """The outputs of these rows."""
    return Outputs(logprobs=whole.logprobs[index], entropy=whole.entropy[index], values=whole.values[index])

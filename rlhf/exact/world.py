"""A world small enough to enumerate: every completion of every prompt, its probability, every expectation exactly.

A *table* `[C, S, V]` holds a policy: the log-probabilities of the next token, for each of C prompts and S states
(a state is the prefix of live tokens so far). A *distribution* `[C, N]` holds log-probabilities of the N completions
of each prompt. Prompts are equally likely. Rows of batches are prompt-major: row `c * N + n`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

EOS = 0


@dataclass(frozen=True, kw_only=True)
class World:
    """All completions over tokens 0 (EOS) to V - 1 that end by EOS, or at T tokens without it."""

    prompts: int  # C
    vocabulary: int  # V
    horizon: int  # T
    ids: Tensor  # [N, T] completions; EOS behind the end
    mask: Tensor  # [N, T] live up to and including EOS
    finished: Tensor  # [N] ended by EOS
    states: Tensor  # [N, T] the state in which token t is chosen; 0 outside the mask
    prefixes: tuple[tuple[int, ...], ...]  # S prefixes, by state

    @property
    def rows(self) -> int:
        """Return the number of completions of all prompts, C x N."""
        return self.prompts * len(self.ids)

    def row_prompts(self, rows: Tensor) -> Tensor:
        """Return the prompt of each row."""
        return rows // len(self.ids)

    def all_rows(self) -> Tensor:
        """Return every completion of every prompt once."""
        return torch.arange(self.rows)

    def per_token(self, by_state: Tensor, rows: Tensor) -> Tensor:
        """Return `[C, S, ...]` where each token of `rows` was chosen: `[B, T, ...]`."""
        which = rows % len(self.ids)
        return by_state[self.row_prompts(rows)[:, None], self.states[which]]

    def token_logprobs(self, table: Tensor, rows: Tensor) -> Tensor:
        """Return the log-probability of each token under a table, `[B, T]`, zero outside the mask."""
        which = rows % len(self.ids)
        chosen = self.per_token(table, rows).gather(-1, self.ids[which][..., None]).squeeze(-1)
        return torch.where(self.mask[which], chosen, 0.0)

    def sequence_logprobs(self, table: Tensor) -> Tensor:
        """Return the distribution `[C, N]` that a table makes."""
        return self.token_logprobs(table, self.all_rows()).sum(1).view(self.prompts, -1)


def enumerate_world(*, prompts: int = 2, vocabulary: int = 3, horizon: int = 3) -> World:
    """Build a world: 15 completions and 7 states a prompt by default."""
    words = range(1, vocabulary)
    prefixes = [prefix for length in range(horizon) for prefix in itertools.product(words, repeat=length)]
    completions = [(*prefix, EOS) for prefix in prefixes]
    completions += itertools.product(words, repeat=horizon)
    index = {prefix: state for state, prefix in enumerate(prefixes)}
    ids = torch.zeros(len(completions), horizon, dtype=torch.long)
    states = torch.zeros_like(ids)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(completions):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = True
        states[row, : len(tokens)] = torch.tensor([index[tokens[:t]] for t in range(len(tokens))])
    return World(
        prompts=prompts,
        vocabulary=vocabulary,
        horizon=horizon,
        ids=ids,
        mask=mask,
        finished=torch.tensor([tokens[-1] == EOS for tokens in completions]),
        states=states,
        prefixes=tuple(prefixes),
    )


def random_table(world: World, seed: int) -> Tensor:
    """Return a policy with random logits."""
    generator = torch.Generator().manual_seed(seed)
    shape = (world.prompts, len(world.prefixes), world.vocabulary)
    return torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)


def random_scores(world: World, seed: int, *, scale: float = 1.0) -> Tensor:
    """Return a random score `[C, N]` for every completion."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(world.prompts, len(world.ids), generator=generator, dtype=torch.float64)


# Distributions


def expectation(distribution: Tensor, values: Tensor) -> Tensor:
    """Compute E[values], over prompts and completions."""
    return (distribution.exp() * values).sum(1).mean()

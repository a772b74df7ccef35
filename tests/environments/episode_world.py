"""A two-turn environment over 3 tokens, small enough to enumerate: every episode with its probability, in float64.

An action is one or two tokens, 0 ends it. An action of 0 alone ends the episode after its turn. Any other is answered
by two tokens of the environment and a reward, then the second action is paid for, and if that ends by 0 the
environment adds a last token, which is no action. A state is all that was read and written before a token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.online import Online
from rlhf.experience import compute_advantages
from rlhf.objective import Objective, Outputs
from rlhf.types import Experience, Rollout, StopReason

V, COLUMNS = 3, 7
ACTIONS = [(0,), *((first, second) for first in (1, 2) for second in range(V))]
Context = tuple[int, ...]


@dataclass
class World:
    """All episodes: tokens, which of them are actions, the state of each, the turns, and the rewards."""

    ids: Tensor  # [N, T]
    mask: Tensor
    actions: Tensor
    turns: Tensor
    rewards: Tensor
    states: Tensor  # [N, T]: the state in which an action token was drawn
    contexts: list[Context]
    returns: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.returns = self.rewards.sum(dim=1)

    def __len__(self) -> int:
        return len(self.ids)

    def table(self, seed: int) -> Tensor:
        """A random policy [S, V], as log-probabilities."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(len(self.contexts), V, generator=generator, dtype=torch.float64).log_softmax(-1)

    def logprobs(self, table: Tensor) -> Tensor:
        """The log-probability [N, T] of each token under a table: of environment tokens too, as a model has one."""
        chosen = table[self.states].gather(-1, self.ids[..., None]).squeeze(-1)
        return torch.where(self.mask, chosen, 0.0)

    def log_probability(self, table: Tensor) -> Tensor:
        """The log-probability [N] of each episode: of its actions alone."""
        return torch.where(self.actions, self.logprobs(table), 0.0).sum(dim=1)

    def values(self, table: Tensor, token_rewards: Tensor) -> Tensor:
        """V [N, T] of the state of each token: the expected rest of the rewards; anything at environment tokens."""
        to_go = token_rewards.flip(1).cumsum(1).flip(1)
        weights = self.log_probability(table).exp()[:, None] * self.actions
        total, mass = torch.zeros(2, len(self.contexts), dtype=torch.float64)
        total = total.index_add(0, self.states.flatten(), (weights * to_go).flatten())
        mass = mass.index_add(0, self.states.flatten(), weights.flatten())
        exact = (total / mass.clamp(min=1e-300))[self.states]
        return torch.where(self.actions, exact, torch.where(self.mask, 3.7, 0.0))


def make_world(seed: int = 0) -> World:
    generator = torch.Generator().manual_seed(seed)
    first_rewards = torch.randn(len(ACTIONS), generator=generator, dtype=torch.float64)
    last_rewards = torch.randn(len(ACTIONS), len(ACTIONS), generator=generator, dtype=torch.float64)
    rows: list[tuple[list[int], list[bool], list[int], dict[int, float]]] = []
    for one, first in enumerate(ACTIONS):
        ids, is_action, turns = [*first], [True] * len(first), [0] * len(first)
        paid = {len(ids) - 1: float(first_rewards[one])}
        if first == (0,):
            rows.append((ids, is_action, turns, paid))
            continue
        answer = [1, 2] if sum(first) % 2 else [2, 1]
        for two, second in enumerate(ACTIONS):
            here, acted, turn = [*ids, *answer, *second], [*is_action, False, False], [*turns, 0, 0]
            acted, turn = [*acted, *[True] * len(second)], [*turn, *[1] * len(second)]
            rewards = {**paid, len(here) - 1: float(last_rewards[one, two])}
            if second[-1] == 0:
                here, acted, turn = [*here, 2], [*acted, False], [*turn, 0]
            rows.append((here, acted, turn, rewards))
    contexts = sorted({tuple(ids[:place]) for ids, *_ in rows for place in range(len(ids))})
    index = {context: state for state, context in enumerate(contexts)}
    ids, mask, actions, turns, rewards, states = (
        torch.zeros(len(rows), COLUMNS, dtype=kind)
        for kind in (torch.long, torch.bool, torch.bool, torch.long, torch.float64, torch.long)
    )
    for row, (tokens, acted, turn, paid) in enumerate(rows):
        length = len(tokens)
        ids[row, :length] = torch.tensor(tokens)
        mask[row, :length] = True
        actions[row, :length] = torch.tensor(acted)
        turns[row, :length] = torch.tensor(turn)
        states[row, :length] = torch.tensor([index[tuple(tokens[:place])] for place in range(length)])
        for place, reward in paid.items():
            rewards[row, place] = reward
    return World(ids, mask, actions, turns, rewards, states, contexts)


def rollout(
    world: World, rows: Tensor, *, old: Tensor, reference: Tensor, values: Tensor | None = None, group_size: int = 1
) -> Rollout:
    """Episodes as the frozen models would annotate them."""
    logprobs = torch.where(world.actions, world.logprobs(old), 0.0)[rows].detach()
    return Rollout(
        prompt_ids=torch.ones(len(rows), 1, dtype=torch.long),
        prompt_mask=torch.ones(len(rows), 1, dtype=torch.bool),
        row_ids=torch.arange(len(rows)),
        references=tuple({} for _ in rows),
        completion_ids=world.ids[rows],
        completion_mask=world.mask[rows],
        sampler_logprobs=logprobs,
        finished=torch.ones(len(rows), dtype=torch.bool),
        group_size=group_size,
        episode_actions=world.actions[rows],
        episode_turns=world.turns[rows],
        episode_rewards=world.rewards[rows],
        episode_stops=torch.full((len(rows),), int(StopReason.TERMINATED)),
        scores=world.returns[rows],
        baselines=torch.zeros(len(rows), dtype=torch.float64),
        logprobs=logprobs,
        ref_logprobs=torch.where(world.actions, world.logprobs(reference), 0.0)[rows],
        values=torch.zeros_like(logprobs) if values is None else values[rows],
        hinted=torch.zeros(len(rows), dtype=torch.bool),
    )


def all_pairs(world: World) -> Tensor:
    """The rows of every ordered pair of episodes: the groups of two."""
    return torch.tensor(list(itertools.product(range(len(world)), repeat=2))).flatten()


def weights_of(world: World, rows: Tensor, old: Tensor, group_size: int) -> Tensor:
    """The probability of each row's group, as a weight of the row: a sum over rows is an expectation of a mean."""
    of_group = world.log_probability(old.detach())[rows].view(-1, group_size).sum(dim=1).exp()
    return of_group.repeat_interleave(group_size) / group_size


def expected_loss(
    world: World, experience: Experience, rows: Tensor, algorithm: Online, coefs: Coefs, new: Tensor, weights: Tensor
) -> Tensor:
    """The policy's loss, whose gradient is the expectation over episodes of the old policy."""
    fixed = (logprobs := world.logprobs(new)[rows]).detach()
    weighed = fixed + weights[:, None] * (logprobs - fixed)  # of the value itself; the gradient is weighed
    zeros = torch.zeros_like(fixed)
    outputs = Outputs(logprobs=weighed, entropy=zeros, values=zeros)
    return Objective(algorithm, max_tokens=4).policy_term(experience, outputs.logprobs, outputs.entropy, coefs)[0][
        "policy"
    ]


def experience_of(
    world: World,
    algorithm: Online,
    coefs: Coefs,
    old: Tensor,
    reference: Tensor,
    *,
    values: Tensor | None,
    group_size: int,
) -> tuple[Experience, Tensor]:
    """The experience of all groups, with their rows."""
    rows = torch.arange(len(world)) if group_size == 1 else all_pairs(world)
    made = rollout(world, rows, old=old, reference=reference, values=values, group_size=group_size)
    return compute_advantages(made, algorithm, coefs), rows

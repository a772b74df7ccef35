"""The data that flow through training: Prompts -> Completions -> Rollout -> Experience, and the offline batches.

Axes: B rows, P prompt tokens (left-padded), T completion tokens (right-padded), G completions per prompt.
Every `[B, T]` tensor is aligned with `completion_ids`: entry t belongs to completion token t. Masks are Bool and True
for live tokens. Without a critic the values are zero, without a reference the KL. Optional fields are for episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from rlhf.batching import Batch


class StopReason(IntEnum):
    """The reasons for the end of an episode; without an environment `finished` says whether a completion was cut."""

    NONE = 0  # a completion without an environment
    TERMINATED = 1  # the environment said that the task is over
    TRUNCATED = 2  # the environment ended it by a limit of its own
    MAX_TURNS = 3  # environment.max_turns
    MAX_TOKENS = 4  # environment.max_tokens leaves no room for another action
    CONTEXT = 5  # the model's context leaves no room for another action
    ERROR = 6  # the environment raised, hung, or returned something that is no step

    @property
    def cuts(self) -> bool:
        """Return whether a limit ended the episode, in a state from which it could have gone on."""
        return self in (StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT)


@dataclass(frozen=True, kw_only=True)
class Prompts(Batch):
    """Prompts to sample completions from."""

    prompt_ids: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    row_ids: Int[Tensor, " B"]  # the row's number within the step, over all ranks: random draws are keyed by it
    references: tuple[Mapping[str, Any], ...]  # the other columns of the data row, for function rewards


@dataclass(frozen=True, kw_only=True)
class Completions(Prompts):
    """Sampled completions. The rows of one prompt are contiguous, `group_size` at a time.

    With an environment a row is an episode, action, observation, action ...: the model reads all of it, and learns from
    the actions. The fields of episodes are None without one; the properties below say what holds then.
    """

    completion_ids: Int[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]  # True up to and including EOS
    sampler_logprobs: Float[Tensor, "B T"]  # as the sampler computed them; for the mismatch metric
    finished: Bool[Tensor, " B"]  # ended by EOS, not by length; of an episode every action
    group_size: int
    episode_actions: Bool[Tensor, "B T"] | None = None  # tokens that the policy drew; within completion_mask
    episode_turns: Int[Tensor, "B T"] | None = None  # of a token that the policy wrote its turn, from 0; -1: of another
    episode_rewards: Float[Tensor, "B T"] | None = None  # of a turn, on the last of its action tokens
    episode_stops: Int[Tensor, " B"] | None = None  # of each row its StopReason
    episode_whole: Bool[Tensor, " B"] | None = None  # of each row whether mask_truncated keeps it
    # which tokens could be drawn (algo.support.pack), if sampling leaves some out; None: all
    sampler_support: UInt8[Tensor, "B T W"] | None = None

    @property
    def has_episodes(self) -> bool:
        """Return whether an environment answered the policy."""
        return self.episode_stops is not None

    @property
    def action_mask(self) -> Bool[Tensor, "B T"]:
        """Return which tokens the policy drew, and learns from: without an environment all live ones."""
        return self.completion_mask if self.episode_actions is None else self.episode_actions

    @property
    def counted(self) -> Bool[Tensor, " B"]:
        """Return which rows count: all but episodes whose environment failed (environment.on_error=drop)."""
        return self.action_mask.any(dim=1)

    @property
    def turns(self) -> Int[Tensor, "B T"]:
        """Return the turn of each token that the policy wrote, from 0, also in an episode that does not count."""
        return torch.zeros_like(self.completion_ids) if self.episode_turns is None else self.episode_turns

    @property
    def turn_rewards(self) -> Float[Tensor, "B T"]:
        """Return the rewards of turns, each on the last action token of its turn; 0 without an environment."""
        return torch.zeros_like(self.sampler_logprobs) if self.episode_rewards is None else self.episode_rewards

    @property
    def stops(self) -> Int[Tensor, " B"]:
        """Return the StopReason of each row; NONE without an environment."""
        return torch.zeros_like(self.row_ids) if self.episode_stops is None else self.episode_stops

    @property
    def whole(self) -> Bool[Tensor, " B"]:
        """Return which rows algorithm.mask_truncated keeps: without an environment those that ended by EOS."""
        return self.finished if self.episode_whole is None else self.episode_whole

    @property
    def bootstrapped(self) -> Bool[Tensor, " B"]:
        """Return which rows end with an observation that no action answers: the return goes on with its value."""
        last = self.completion_mask.sum(dim=1, keepdim=True) - 1
        ends_with_action = self.action_mask.gather(1, last.clamp(min=0)).squeeze(1)
        return ~ends_with_action & self.action_mask.any(dim=1)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One score per completion, and the named parts it is made of (for logging only)."""

    values: Float[Tensor, " B"]
    parts: Mapping[str, Float[Tensor, " B"]]
    scale: float = 1.0  # the factor from the rewards of an episode's turns to their part of the values


@dataclass(frozen=True, kw_only=True)
class Rollout(Completions):
    """Completions with their scores, log-probabilities and values, all computed before any update."""

    scores: Float[Tensor, " B"]  # one per completion, which is learned from
    baselines: Float[Tensor, " B"]  # score of the prompt's greedy completion (ReMax); zero if none was sampled
    logprobs: Float[Tensor, "B T"]  # log pi_old: the policy at the start of this step; nats
    ref_logprobs: Float[Tensor, "B T"]  # the policy's own when there is no reference: zero KL
    values: Float[Tensor, "B T"]  # V of the state in which token t is chosen; zero when there is no critic
    hinted: Bool[Tensor, " B"]  # sampled with a hint in the prompt, which is not in prompt_ids (algorithm.rescue)
    hint_weights: Float[Tensor, "B T"] | None = None  # importance weights of hinted rows; 1 elsewhere. None: 1 for all
    final_values: Float[Tensor, " B"] | None = None  # V after the last action; 0 for ended rows. None: 0 for all
    process_rewards: Float[Tensor, "B T"] | None = None  # of steps, at their last tokens (reward.process); None: off
    turn_scale: float = 1.0  # see Scores.scale
    # before reward.shaping.normalize, and before a cost was combined with them; None: as scores
    shaped_scores: Float[Tensor, " B"] | None = None

    @property
    def reported_scores(self) -> Float[Tensor, " B"]:
        """Return the scores that records and the metrics of scores show: after shaping, in the reward's unit."""
        return self.scores if self.shaped_scores is None else self.shaped_scores


@dataclass(frozen=True, kw_only=True)
class Experience(Rollout):
    """A rollout with token rewards, advantages and returns: the input of the update."""

    loss_mask: Bool[Tensor, "B T"]  # tokens in the loss: action_mask without the tokens that the algorithm leaves out
    rewards: Float[Tensor, "B T"]  # score on the last token of its turn, minus the KL penalty if it is placed here
    advantages: Float[Tensor, "B T"]  # zero outside the mask; hint_weights are in them
    returns: Float[Tensor, "B T"]  # the critic's target
    value_weights: Float[Tensor, "B T"] | None = None  # of hinted rows in the critic's loss. None: 1 for all
    stale_advantages: Float[Tensor, "B T"] | None = None  # V-trace's, before whitening. None: it was not used
    pending_weights: Float[Tensor, "B T"] | None = None  # of advantages that a minibatch whitens first. None: none


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Batch):
    """Prompts with the completions to imitate."""

    prompt_ids: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    completion_ids: Int[Tensor, "B T"]
    completion_mask: Bool[Tensor, "B T"]  # True if live
    loss_mask: Bool[Tensor, "B T"]  # tokens in the loss; a subset of completion_mask


@dataclass(frozen=True, kw_only=True)
class LabelledSteps(Demonstrations):
    """Solutions in steps; `loss_mask` marks the last token of the separator behind each step."""

    labels: Float[Tensor, "B T"]  # at these tokens the probability that the step is right; zero elsewhere


@dataclass(frozen=True, kw_only=True)
class PreferencePairs(Batch):
    """Pairs of completions of one prompt, the first preferred. B pairs; the two sides may differ in T."""

    prompt_ids: Int[Tensor, "B P"]
    prompt_mask: Bool[Tensor, "B P"]
    chosen_ids: Int[Tensor, "B Tc"]
    chosen_mask: Bool[Tensor, "B Tc"]
    rejected_ids: Int[Tensor, "B Tr"]
    rejected_mask: Bool[Tensor, "B Tr"]
    chosen_learned: Bool[Tensor, "B Tc"]  # tokens in the loss: the assistant's, without the user's turns in between
    rejected_learned: Bool[Tensor, "B Tr"]
    margins: Float[Tensor, " B"]  # by how much chosen should win; zero when the data do not say


@dataclass(frozen=True, kw_only=True)
class AnnotatedPairs(PreferencePairs):
    """Pairs with the reference's log-probabilities of both sides, summed over tokens; 0 if the loss uses none."""

    chosen_ref_logprobs: Float[Tensor, " B"]
    rejected_ref_logprobs: Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """The log-probabilities and lengths of one side of each pair: the input of a pair loss."""

    logprobs: Float[Tensor, " B"]  # log pi, summed over tokens
    ref_logprobs: Float[Tensor, " B"]  # 0 if the loss reads no reference
    lengths: Float[Tensor, " B"]

    @property
    def log_ratios(self) -> Float[Tensor, " B"]:
        """Return the log-ratio to the reference, h = log pi - log pi_ref."""
        return self.logprobs - self.ref_logprobs

    @property
    def mean_log_ratios(self) -> Float[Tensor, " B"]:
        """Return the log-ratio to the reference per token, h / length."""
        return self.log_ratios / self.lengths

    @property
    def mean_logprobs(self) -> Float[Tensor, " B"]:
        """Return the mean log-probability per token, m = log pi / length."""
        return self.logprobs / self.lengths


@dataclass(frozen=True, kw_only=True)
class SampledPairs(AnnotatedPairs):
    """Pairs sampled from the policy being trained, with its per-token log-probabilities of both sides at that time."""

    chosen_old_logprobs: Float[Tensor, "B T"]
    rejected_old_logprobs: Float[Tensor, "B T"]


@dataclass(frozen=True, kw_only=True)
class LabelledCompletions(Demonstrations):
    """Completions labelled desirable or undesirable, for losses that need no pairs (KTO)."""

    desirable: Bool[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class AnnotatedLabelledCompletions(LabelledCompletions):
    """Labelled completions with the reference's log-probabilities, summed over tokens."""

    ref_logprobs: Float[Tensor, " B"]


@dataclass(frozen=True, kw_only=True)
class BaselinedLabelledCompletions(AnnotatedLabelledCompletions):
    """Labelled completions with the minibatch's baseline in every row, so that each micro-batch is self-contained."""

    baselines: Float[Tensor, " B"]  # KTO's z0: nats

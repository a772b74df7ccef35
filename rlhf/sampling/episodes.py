"""Episodes as completions: the policy and an environment take turns, all live episodes of a step at once.

A row is a prompt and then action, observation, action ...: token in, token out. The policy's tokens stay as they were
drawn, and an observation is encoded once, as the chat template would write it (rlhf/data/bridge.py). The first turn is
the sampler's own call, so that an environment of one turn gives the completions of a run without one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlhf.batching import concat, extend
from rlhf.data.bridge import make_bridge, writes_tools
from rlhf.data.conversation import Message, mark, with_marks
from rlhf.data.prompts import SOURCE
from rlhf.data.rows import BadRow
from rlhf.data.tokenizer import Encoder, left_pad
from rlhf.environments.host import Act, Begin, Cut, End, HostReply, HostRequest
from rlhf.environments.pool import EnvironmentPool
from rlhf.environments.protocol import (
    MALFORMED,
    TOOL_CALLS,
    TOOL_ERRORS,
    Fault,
    Observation,
    ResetResult,
    StepResult,
)
from rlhf.environments.section import ERROR_SHARE, EnvironmentConfig
from rlhf.environments.tools import tool_guide
from rlhf.errors import ConfigError, RewardError
from rlhf.references import CONVERSATION, MESSAGES, own_prompt
from rlhf.rewards.source import decode
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.fast.engine import FastSampler
from rlhf.sampling.generate import repeat_rows
from rlhf.sampling.sampler import Sampler
from rlhf.types import Completions, Prompts, StopReason

OWN_COLUMNS = (MESSAGES, CONVERSATION, SOURCE)  # of a row, that its environment does not get
LARGEST_SEED = 2**31
LIMITS = (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT)  # of the run, not of the environment

Steady = Callable[[], AbstractContextManager[None]]
"""Returns a context in which the policy does not change, so that servers need its weights once."""


@dataclass
class Episode:
    """One row while it is played."""

    row: int  # in the call
    prompt: list[int]
    reference: Mapping[str, Any]
    number: int  # of the episode, over the whole run
    ids: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)  # by position: the last action token of a turn
    stop: StopReason = StopReason.NONE
    ended: bool = False  # the last action ended by itself, and was not cut
    cuts: int = 0  # actions that were cut
    calls: float = 0.0
    failed_calls: float = 0.0
    malformed: float = 0.0
    tools: tuple[Mapping[str, Any], ...] = ()
    has_last_reward: bool = False  # the environment is asked for it if a limit ends the episode

    def act(self, ids: Sequence[int], logprobs: Sequence[float], turn: int, *, ended: bool) -> None:
        """Add an action."""
        self.ids += ids
        self.logprobs += logprobs
        self.is_action += [True] * len(ids)
        self.turns += [turn] * len(ids)
        self.ended = ended
        self.cuts += not ended

    def observe(self, ids: Sequence[int]) -> None:
        """Add tokens that the policy reads and did not write."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.is_action += [False] * len(ids)
        self.turns += [-1] * len(ids)

    def forget(self) -> None:
        """Leave the episode out of everything that is learned: none of its tokens is an action."""
        self.is_action = [False] * len(self.ids)


@dataclass
class EpisodeCounts:
    """Counts of the played episodes that are not in their rows."""

    calls: float = 0.0
    failed_calls: float = 0.0
    malformed: float = 0.0
    cuts: int = 0
    episodes: int = 0

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add the episodes with an action; one that failed and was dropped has none."""
        for episode in episodes:
            if any(episode.is_action):
                self.calls += episode.calls
                self.failed_calls += episode.failed_calls
                self.malformed += episode.malformed
                self.cuts += episode.cuts
                self.episodes += 1

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the episodes so far."""
        episodes = max(self.episodes, 1)
        metrics = {
            "env/malformed": self.malformed / episodes,
            "env/cut_actions": self.cuts / episodes,
        }
        if self.calls:
            metrics |= {"env/tool_calls": self.calls / episodes, "env/tool_error": self.failed_calls / self.calls}
        return metrics


@dataclass
class PlayedTogether:
    """What became of the episodes that are judged together: a step's, or an evaluation's."""

    episodes: int  # all of them, also those that are yet to be played
    played: int = 0
    not_begun: int = 0
    any_begun: bool = False
    faults: list[str] = field(default_factory=list)


class EpisodeSampler:
    """Samples episodes with the policy's sampler and a pool of environments; a Sampler itself.

    Draws are keyed by row and turn, and an environment by its group: neither the other episodes nor the number of
    ranks or workers change one.
    """

    def __init__(
        self,
        sampler: Sampler,
        pool: EnvironmentPool,
        encoder: Encoder,
        config: EnvironmentConfig,
        *,
        max_new_tokens: int,
        context: int | None,
        ranks: Distributed = SINGLE_PROCESS,
        steady: Steady = nullcontext,
    ) -> None:
        """Take the sampler of single actions, and the limits; a call plays its episodes within a context of `steady`.

        Raises:
            ConfigError: the chat template rewrites earlier turns.
        """
        self.sampler, self.pool, self.encoder, self.config = sampler, pool, encoder, config
        self.max_new_tokens, self.context, self.ranks, self.steady = max_new_tokens, context, ranks, steady
        reads_on = config.max_turns > 1 or config.truncation == "bootstrap"
        self.bridge = make_bridge(encoder) if reads_on else None
        self.note: Callable[[str], None] = lambda _: None
        self.counts = EpisodeCounts()
        self._played = 0
        self._together = PlayedTogether(0)  # of this call
        self._has_tool_form: bool | None = None

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Play `group_size` episodes of each prompt; see `sample_batches`."""
        return self.sample_batches([prompts], key=key, group_size=group_size, greedy=greedy)

    def sample_batches(
        self, batches: Sequence[Prompts], *, key: int, group_size: int, greedy: bool = False
    ) -> Completions:
        """Play `group_size` episodes of each prompt of all batches; see Sampler.sample.

        Raises:
            RewardError: too many of all these environments failed, or one did and environment.on_error is stop.
        """
        self._together = PlayedTogether(group_size * sum(map(len, batches)))
        played = concat([self._sample(batch, key, group_size, greedy) for batch in batches])
        self._report()
        return played

    def _sample(self, prompts: Prompts, key: int, group_size: int, greedy: bool) -> Completions:
        rows = repeat_rows(prompts, group_size)
        episodes = self._begin(rows, key, group_size)
        try:
            with self.steady():
                first = self._play(rows, episodes, key, greedy)
        finally:
            closed = self._ask(End(episode.number) for episode in episodes)
        self._count(episodes, any_begun=first is not None)
        self._check_faults()
        if unclosed := [answer.reason for answer in closed if isinstance(answer, Fault)]:
            self.note(f"warning: {len(unclosed)} of {len(episodes)} environments did not close: {unclosed[0]}")
        self.counts.add(episodes)
        return self._collect(rows, episodes, first, group_size)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the episodes since the last call."""
        metrics, self.counts = self.counts.metrics(), EpisodeCounts()
        return metrics

    def _begin(self, rows: Prompts, key: int, group_size: int) -> list[Episode]:
        """Reset an environment for each row; the rows of a group have the same seed."""
        ids = [row[mask].tolist() for row, mask in zip(rows.prompt_ids, rows.prompt_mask, strict=True)]
        episodes = [Episode(i, ids[i], rows.references[i], self._played + i) for i in range(len(rows))]
        self._played += len(rows)
        seeds = [derive_seed(key, "environment", row // group_size) % LARGEST_SEED for row in rows.row_ids.tolist()]
        requests = [Begin(e.number, seed, _options(e.reference)) for e, seed in zip(episodes, seeds, strict=True)]
        for episode, answer in zip(episodes, self._ask(requests), strict=True):
            if isinstance(answer, Fault):
                self._fail(episode, answer)
            else:
                assert isinstance(answer, ResetResult)
                self._open(episode, answer)
        return episodes

    def _open(self, episode: Episode, answer: ResetResult) -> None:
        """Put the first observation, and the tools, into the prompt."""
        episode.has_last_reward = answer.has_last_reward
        if not answer.observation and not answer.tools:
            return
        episode.tools = answer.tools
        native = self._writes_tools(answer.tools)
        guide = "" if native or not answer.tools else tool_guide(answer.tools)
        tools = answer.tools if native else ()
        first = self._first_prompt(episode.reference, answer.observation, guide)
        try:
            rendered = self.encoder.render(first, tools=tools)
        except BadRow as error:
            raise ConfigError(f"the chat template refuses the first observation: {error}") from error
        observed = answer.observation
        marked, contents = (mark(0), [observed]) if isinstance(observed, str) else with_marks(observed)
        if self.encoder.spells_specials(contents):
            places = self.encoder.render(self._first_prompt(episode.reference, marked, guide), tools=tools)
            ids = self.encoder.prompt_with(rendered, places.prompt, contents)
        else:
            (ids,) = self.encoder.prompts([rendered])
        turns = {} if isinstance(first, str) else {MESSAGES: first}
        flag = {CONVERSATION: True} if isinstance(observed, list) else {}
        episode.reference = {**episode.reference, "prompt": rendered.prompt, **turns, **flag}
        if self.context is not None and len(ids) + self.max_new_tokens > self.context:
            episode.stop = StopReason.CONTEXT
            return
        episode.prompt = ids

    def _first_prompt(self, reference: Mapping[str, Any], observation: Observation, guide: str) -> str | list[Message]:
        """Join the row's prompt with a text observation; messages take its place."""
        messages = reference.get(MESSAGES)
        if isinstance(observation, list):
            before: str | list[Message] = observation
            parts = [guide]
        else:
            before = list(messages) if messages else str(reference.get("prompt", ""))
            parts = [observation, guide]
        text = "\n\n".join(part for part in parts if part)
        if isinstance(before, str) and not self.encoder.template.turns:
            return "\n\n".join(part for part in (before, text) if part)
        turns: list[Message] = [{"role": "user", "content": before}] if isinstance(before, str) else before
        if not text:
            return turns
        last = {**turns[-1], "content": "\n\n".join(part for part in (str(turns[-1]["content"]), text) if part)}
        return [*turns[:-1], last]

    def _writes_tools(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        if self._has_tool_form is None and tools:
            self._has_tool_form = writes_tools(self.encoder, tools)
        return bool(tools) and bool(self._has_tool_form)

    def _play(self, rows: Prompts, episodes: list[Episode], key: int, greedy: bool) -> Completions | None:
        """Let policy and environments take turns until every episode has ended; return the first turn's actions."""
        first: Completions | None = None
        for turn in range(self.config.max_turns):
            live = [episode for episode in episodes if not episode.stop]
            if not live:
                break
            turn_key = key if turn == 0 else derive_seed(key, "turn", turn)
            asked = self._prompts(rows, live, turn)
            actions = self.sampler.sample(asked, key=turn_key, group_size=1, greedy=greedy)
            first = actions if first is None else first
            self._add(live, actions, turn)
            texts = decode(actions, self.encoder.tokenizer).completions
            answers = self._ask(Act(episode.number, text) for episode, text in zip(live, texts, strict=True))
            for episode, answer in zip(live, answers, strict=True):
                if isinstance(answer, Fault):
                    self._fail(episode, answer)
                else:
                    assert isinstance(answer, StepResult)
                    self._answer(episode, answer, turn)
            self._add_last_rewards(live)
        return first

    def _add_last_rewards(self, episodes: Sequence[Episode]) -> None:
        """Add to the last action of episodes that a limit has ended what their environments give for all of it."""
        cut = [episode for episode in episodes if episode.has_last_reward and episode.stop in LIMITS]
        if not cut:
            return
        for episode, answer in zip(cut, self._ask(Cut(episode.number) for episode in cut), strict=True):
            if isinstance(answer, Fault):
                self._fail(episode, answer)
            else:
                assert isinstance(answer, StepResult)
                episode.rewards[max(episode.rewards)] += answer.reward

    def _prompts(self, rows: Prompts, live: Sequence[Episode], turn: int) -> Prompts:
        """Return the prompts from which live episodes go on: on the first turn the rows, unless resets changed them."""
        chosen = rows if len(live) == len(rows) else rows.rows(torch.tensor([episode.row for episode in live]))
        if turn == 0 and all(e.reference is rows.references[e.row] for e in live):
            return chosen
        ids, mask = left_pad([[*episode.prompt, *episode.ids] for episode in live], self.encoder.pad_id)
        references = tuple(episode.reference for episode in live)
        return replace(chosen, prompt_ids=ids, prompt_mask=mask, references=references)

    def _add(self, live: Sequence[Episode], actions: Completions, turn: int) -> None:
        rows = zip(live, actions.completion_ids, actions.completion_mask, actions.sampler_logprobs, strict=True)
        for (episode, ids, mask, logprobs), ended in zip(rows, actions.finished.tolist(), strict=True):
            episode.act(ids[mask].tolist(), logprobs[mask].tolist(), turn, ended=ended)

    def _answer(self, episode: Episode, answer: StepResult, turn: int) -> None:
        """Take the reward of a turn, and the observation if the episode goes on."""
        episode.rewards[len(episode.ids) - 1] = answer.reward
        episode.calls += answer.metrics.get(TOOL_CALLS, 0.0)
        episode.failed_calls += answer.metrics.get(TOOL_ERRORS, 0.0)
        episode.malformed += answer.metrics.get(MALFORMED, 0.0)
        if answer.terminated:
            episode.stop = StopReason.TERMINATED
        elif answer.truncated:
            episode.stop = StopReason.TRUNCATED
        elif turn == self.config.max_turns - 1:
            episode.stop = StopReason.MAX_TURNS
        bootstraps = self.config.truncation == "bootstrap" and not episode.has_last_reward
        if self.bridge is None or (episode.stop and not (episode.stop.cuts and bootstraps)):
            return
        role = "tool" if answer.is_tool_result and self._writes_tools(episode.tools) else "user"
        observed = self.bridge.tokens(answer.observation, episode.ids[-1], role=role)
        if not episode.stop:
            episode.stop = self._room(episode, len(observed))
        if not episode.stop:
            episode.observe(observed)
        elif bootstraps and self._fits(episode, len(observed) + 1):
            episode.observe([*observed, self.encoder.pad_id])  # the value at the last one is the observation's

    def _room(self, episode: Episode, observed: int) -> StopReason:
        """Return why no action fits after an observation of so many tokens; NONE if one does."""
        if not self._fits(episode, observed + self.max_new_tokens):
            return StopReason.CONTEXT
        budget = self.config.max_tokens
        is_spent = budget is not None and len(episode.ids) + observed + self.max_new_tokens > budget
        return StopReason.MAX_TOKENS if is_spent else StopReason.NONE

    def _fits(self, episode: Episode, more: int) -> bool:
        return self.context is None or len(episode.prompt) + len(episode.ids) + more <= self.context

    def _is_whole(self, episode: Episode) -> bool:
        """Return whether algorithm.mask_truncated keeps an episode; truncation=drop leaves out by the limit alone."""
        if self.config.truncation == "drop":
            return not episode.stop.cuts
        return episode.stop is StopReason.TERMINATED and episode.ended

    def _fail(self, episode: Episode, fault: Fault) -> None:
        """End an episode whose environment failed, by the rule of environment.on_error."""
        episode.stop = StopReason.ERROR
        self._together.faults.append(fault.reason)
        if self.config.on_error == "stop":
            raise RewardError(
                f"the environment {self.config.target!r} failed (environment.on_error=stop): {fault.reason}"
            )
        if self.config.on_error == "drop":
            episode.forget()
        elif episode.ids:
            episode.rewards.setdefault(len(episode.ids) - 1, 0.0)

    def _count(self, episodes: Sequence[Episode], *, any_begun: bool) -> None:
        self._together.played += len(episodes)
        self._together.not_begun += sum(e.stop is StopReason.CONTEXT and not e.ids for e in episodes)
        self._together.any_begun |= any_begun

    def _failed(self) -> str:
        faults, played = self._together.faults, self._together.played
        return f"{len(faults)} of {played} episodes failed in the environment {self.config.target!r}"

    def _check_faults(self) -> None:
        """Check, also before all episodes are played, that failures are no more than single ones.

        Raises:
            RewardError: more than 5 % of all episodes failed, and more than one.
        """
        faults, episodes = self._together.faults, self._together.episodes
        if len(faults) > max(1, ERROR_SHARE * episodes):
            raise RewardError(
                f"{self._failed()}, more than {ERROR_SHARE:.0%} of {episodes}: what is left would be another task. "
                f"The first: {faults[0]}"
            )

    def _report(self) -> None:
        """Report single failures, and the episodes whose first observation leaves no room for an action.

        Raises:
            RewardError: no episode could begin, and not because environments failed.
        """
        together = self._together
        if together.faults:
            self.note(f"warning: {self._failed()}: {together.faults[0]}")
        room = (
            f"leaves no room for an action of sampling.max_new_tokens={self.max_new_tokens} in the model's context of "
            f"{self.context}"
        )
        if not together.any_begun and not together.faults:
            raise RewardError(
                f"no episode could begin: the first observation of {self.config.target!r} {room}; shorten it, or lower "
                "sampling.max_new_tokens"
            )
        if together.not_begun:
            self.note(
                f"warning: {together.not_begun} of {together.played} episodes could not begin, and are left out: their "
                f"first observation {room}"
            )

    def _ask(self, requests: Iterable[HostRequest]) -> list[HostReply]:
        """Answer requests, each on the rank that has the episode's environment; every rank gets all answers."""
        asked = list(requests)
        if self.ranks.world == 1:
            return self.pool.run(asked)
        own = [number for number, request in enumerate(asked) if request.episode % self.ranks.world == self.ranks.rank]
        answers = self.ranks.all_succeed(lambda: self.pool.run([asked[number] for number in own]))
        gathered: dict[int, HostReply] = {}
        for part in self.ranks.gather(dict(zip(own, answers, strict=True))):
            gathered |= part
        return [gathered[number] for number in range(len(asked))]

    def _collect(
        self, rows: Prompts, episodes: Sequence[Episode], first: Completions | None, group_size: int
    ) -> Completions:
        """Make the rows of the episodes; one without any token has one that is not an action."""
        for episode in episodes:
            if not episode.ids:
                episode.observe([self.encoder.pad_id])
        width = max(0 if first is None else first.completion_ids.shape[1], *(len(e.ids) for e in episodes))
        dtype = torch.float32 if first is None else first.sampler_logprobs.dtype
        mask = torch.tensor([[column < len(episode.ids) for column in range(width)] for episode in episodes])
        rewards = [[episode.rewards.get(column, 0.0) for column in range(width)] for episode in episodes]
        if any(e.reference is not rows.references[e.row] for e in episodes):
            ids, prompt_mask = left_pad([episode.prompt for episode in episodes], self.encoder.pad_id)
            references = tuple(episode.reference for episode in episodes)
            rows = replace(rows, prompt_ids=ids, prompt_mask=prompt_mask, references=references)
        return extend(
            Completions,
            rows,
            completion_ids=_padded([episode.ids for episode in episodes], width, self.encoder.pad_id),
            completion_mask=mask,
            sampler_logprobs=_padded([episode.logprobs for episode in episodes], width, 0.0).to(dtype),
            finished=torch.tensor([not episode.cuts for episode in episodes]),
            group_size=group_size,
            episode_actions=_padded([episode.is_action for episode in episodes], width, False),
            episode_turns=_padded([episode.turns for episode in episodes], width, 0),
            episode_rewards=torch.tensor(rewards, dtype=torch.float32),
            episode_stops=torch.tensor([int(episode.stop) for episode in episodes]),
            episode_whole=torch.tensor([self._is_whole(episode) for episode in episodes]),
        )


def _padded(rows: Sequence[Sequence[Any]], width: int, fill: Any) -> Tensor:
    kind = torch.float64 if isinstance(fill, float) else None
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=kind)


def _options(reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row, as its environment's reset gets them."""
    columns = {name: value for name, value in reference.items() if name not in OWN_COLUMNS}
    return columns | ({"prompt": own_prompt(reference)} if "prompt" in columns else {})


def make_episode_sampler(
    sampler: Sampler,
    config: EnvironmentConfig,
    encoder: Encoder,
    *,
    max_new_tokens: int,
    context: int | None,
    ranks: Distributed,
    plugins: Sequence[str] = (),
    steady: Steady | None = None,
) -> EpisodeSampler:
    """Make the sampler of episodes, with a pool of environments of its own; see EpisodeSampler.

    If `steady` is None and environment.prefix_cache is set, a fast sampler reads only the new tokens of each turn.

    Raises:
        ConfigError: the environment cannot be made, or the chat template rewrites earlier turns.
    """
    if steady is None:
        steady = nullcontext
        if config.remembers_prompts and isinstance(sampler, FastSampler):
            steady = sampler.prefixes.kept
    pool = EnvironmentPool(
        config.target, config.kwargs, workers=config.workers, timeout_s=config.step_timeout_s, plugins=plugins
    )
    return EpisodeSampler(
        sampler, pool, encoder, config, max_new_tokens=max_new_tokens, context=context, ranks=ranks, steady=steady
    )

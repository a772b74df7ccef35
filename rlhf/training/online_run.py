"""An online run: its collaborators, and their state at a step: models to train, demonstrations, order of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from rlhf.algo.kl import Coefs
from rlhf.algorithms.correction import Correction
from rlhf.algorithms.online import Online
from rlhf.algorithms.sft import Sft
from rlhf.batching import Batch
from rlhf.config.sections import OnlineConfig
from rlhf.models.policy_models import Ema, Models
from rlhf.objective import Objective
from rlhf.rewards.process import ProcessGrader
from rlhf.rewards.source import RewardSource
from rlhf.runtime.engine import TrainableModel, lr_factor
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.runtime.offload import Offload
from rlhf.runtime.seeding import generator
from rlhf.sampling.episodes import EpisodeSampler
from rlhf.sampling.pool import ServerPool
from rlhf.sampling.sampler import Sampler
from rlhf.training.losses import DemonstrationLoss
from rlhf.training.overlap import CompletionPrefetcher
from rlhf.training.prompt_queue import PromptQueue
from rlhf.training.session import Session
from rlhf.training.step import LossBatch
from rlhf.training.watch import WatchingJudge
from rlhf.types import Demonstrations, Prompts

RowsT = TypeVar("RowsT", bound=Batch)

NO_GRAD_BATCH_MULTIPLIER = 4  # size of a pass without gradient, in micro-batches


@dataclass(frozen=True, kw_only=True)
class OnlineRun:
    """The collaborators of an online run, made by rlhf.factory."""

    config: OnlineConfig
    session: Session
    prompts: Callable[[int], Prompts]  # the prompts of a step
    queue: PromptQueue | None  # deals prompts by their earlier outcomes (algorithm.rescue, curriculum)
    refill: Callable[[int], Prompts]  # as many other prompts; rounds count from 1 over the whole run
    ptx: Callable[[int, int], Demonstrations] | None  # those mixed into an optimizer step (PPO-ptx), by step and number
    sampler: Sampler
    ahead: CompletionPrefetcher | None  # samples the next step's completions during the update
    reward: RewardSource
    models: Models
    policy: TrainableModel
    critic: TrainableModel | None  # None if there is none, or if it shares the policy's backbone
    objective: Objective
    ema: Ema | None
    rows: AdaptiveMicroBatch  # micro-batch of a pass with gradient
    passes: AdaptiveMicroBatch  # micro-batch of a pass without gradient
    decode: Callable[[Sequence[int]], str]  # token ids to text, for samples.jsonl
    export: Callable[[Path], None]  # writes the trained model as a standard model folder
    episodes: EpisodeSampler | None = None  # the sampler, if an environment answers the policy
    process: ProcessGrader | None = None  # rewards of steps, besides the scores (reward.process)
    servers: ServerPool | None = None  # those that sample (sampling.backend=server)
    offload: Offload = field(default_factory=Offload)  # the tensors that leave the device between their uses
    watch: WatchingJudge | None = None  # looks at the scored completions; nothing is trained on its scores

    @property
    def algorithm(self) -> Online:
        """Return the algorithm of the configuration."""
        return self.config.algorithm

    @property
    def coefs(self) -> Coefs:
        """Return the current KL coefficients."""
        return Coefs(kl=self.session.state.kl_coef, penalty=self.session.state.penalty_coef)

    @property
    def stale_caps(self) -> dict[str, float | None]:
        """Return the caps of the importance weights of completions sampled by an older policy; empty without any.

        It is empty too if sampling.correction weights them.
        """
        overlap, is_corrected = self.config.overlap, self.config.sampling.correction is not None
        if self.ahead is None or is_corrected:
            return {}
        return {"ratio_cap": overlap.ratio_cap, "trace_cap": overlap.trace_cap}

    @property
    def correction(self) -> Correction | None:
        """Return the importance weights that sampling.correction asks for; None if it asks for none."""
        return self.config.sampling.correction if self.config.sampling.corrects else None


def epochs_together(run: OnlineRun, step: int) -> int:
    """Return the epochs that train the policy: none in the critic's warm-up, one if the policy's step is searched."""
    if is_warming_up(run, step):
        return 0
    return 1 if run.algorithm.policy_loss.searches else run.config.batch.epochs


def demonstrations(run: OnlineRun, step: int, update: int) -> list[LossBatch]:
    """Return the demonstrations mixed into an optimizer step with their loss (PPO-ptx), or nothing.

    Args:
        step: the training step, counted from 1.
        update: the number of the optimizer step in it, over all epochs, from 0.
    """
    if run.ptx is None:
        return []
    loss = DemonstrationLoss(run.models, Sft(), coef=run.algorithm.ptx_coef, name="ptx")
    return [LossBatch(run.ptx(step, update), loss)]


def row_order(run: OnlineRun, rows: int, step: int, epoch: int) -> Int[Tensor, " rows"]:
    """Return the order in which an epoch deals the rows to minibatches: a random one, or as they were sampled."""
    if not run.config.batch.shuffle:
        return torch.arange(rows)
    return torch.randperm(rows, generator=generator(run.config.run.seed, "order", step, epoch))


def minibatches_of(rows: RowsT, run: OnlineRun, step: int, epoch: int) -> Iterator[RowsT]:
    """Deal the rows of an epoch to its minibatches; rows of one prompt stay together, since they share its pass."""
    order = row_order(run, len(rows), step, epoch)
    for indices in order.tensor_split(min(run.config.batch.minibatches, len(order))) if len(order) else ():
        yield rows.rows(indices.sort().values)


def lr_factor_at(run: OnlineRun, step: int) -> float:
    """Return the schedule's factor of the learning rates at this step."""
    schedule = run.config.schedule
    total = run.session.total_steps
    factor = lr_factor(step, steps=total, warmup_steps=schedule.warmup_steps, decay=schedule.decay)
    return factor * run.session.state.lr_scale


def is_warming_up(run: OnlineRun, step: int) -> bool:
    """Check whether this step trains the critic alone."""
    return run.critic is not None and step <= run.config.critic.warmup_steps

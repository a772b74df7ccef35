"""Build an online run from its configuration: PPO, GRPO and related algorithms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.lagrange import Lagrange
from rlhf.algorithms.online import Online
from rlhf.batching import extend
from rlhf.config.sections import OnlineConfig, TrainConfig
from rlhf.data.prompts import PromptSet, PromptStream
from rlhf.errors import CheckpointError, ConfigError
from rlhf.evaluation.during_run import with_average
from rlhf.factory.context import RunContext, keep_best, open_context
from rlhf.factory.data import PromptBatches, build_demonstrations, build_prompts
from rlhf.factory.evaluator import build_evaluator
from rlhf.factory.functions import check_functions
from rlhf.factory.models import build_online_models, build_tokenizer, export, make_decode, read_export_origin
from rlhf.factory.offload import build_offload
from rlhf.factory.rewards import build_process, build_source, build_watch, identify_process, identify_source
from rlhf.factory.sampler import build_sampler, build_servers, slow_lengths_reason
from rlhf.models.backbone import CausalLM, context_length, freeze
from rlhf.models.export import Origin
from rlhf.models.policy_models import Ema, Models
from rlhf.models.saving import save_models
from rlhf.objective import Objective
from rlhf.rewards.cost import Combine, CostedReward
from rlhf.rewards.shaping import ShapedReward
from rlhf.rewards.source import RewardSource, Source
from rlhf.runtime.device import choose_precision
from rlhf.runtime.engine import Engine, LocalModel, TrainableModel
from rlhf.runtime.offload import Offload
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.episodes import EpisodeSampler
from rlhf.sampling.generate import HFSampler, repeat_rows
from rlhf.sampling.pool import ServerPool
from rlhf.sampling.sampler import OffloadingSampler, Sampler
from rlhf.section import walk
from rlhf.tracking.fingerprint import content_digest
from rlhf.tracking.metrics import progress_metrics
from rlhf.tracking.view import View
from rlhf.training.checkpoints import OnlineSaver, load_trainer_state, restore_trainer_state
from rlhf.training.collect import sampling_key
from rlhf.training.feed import PTX
from rlhf.training.offline import PREFERENCE_TERM, adaptive_micro_batch
from rlhf.training.online_run import NO_GRAD_BATCH_MULTIPLIER, OnlineRun
from rlhf.training.overlap import CompletionPrefetcher
from rlhf.training.prompt_queue import PromptQueue
from rlhf.training.searched import SearchedModel
from rlhf.training.session import Recorder, Session, TrainState
from rlhf.types import Completions, Demonstrations, Prompts


def build_prefetcher(
    config: OnlineConfig,
    context: RunContext,
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptBatches,
    saved: dict[str, Any] | None,
    *,
    last_step: int,
    servers: ServerPool | None = None,
) -> CompletionPrefetcher:
    """Build the sampler that works some steps ahead of the update (overlap.ahead_steps), with a copy of the policy.

    `saved` are the completions that the checkpoint holds, None for a new run; after `last_step` nothing is sampled.
    Without `servers` this process samples.

    Raises:
        ConfigError: the run has several processes, uses DeepSpeed, or may end before its last step.
        CheckpointError: the saved completions do not fit the configured number of prompts or completions.
    """
    _check_ahead(config, context.engine)
    policy_copy = freeze(copy.deepcopy(models.policy))
    group_size = config.sampling.completions_per_prompt
    sampler = build_sampler(config, replace(models, policy=policy_copy), tokenizer, context.note, servers=servers)

    def draw(step: int) -> Completions:
        return sampler.sample(prompts.batch(step), key=sampling_key(config, step), group_size=group_size)

    ahead = CompletionPrefetcher(
        draw,
        lambda: _copy_weights(list(models.policy.parameters()), policy_copy),
        last_step=last_step,
        behind=config.overlap.ahead_steps,
        keep=lambda: _keep_weights(models.policy, policy_copy),
        device=models.device,
        note=context.note,
    )
    for fields in saved["drawn"] if saved else ():
        ahead.restore(fields["step"], _restore_completions(fields, prompts, group_size), fields["updates"])
    return ahead


def _check_ahead(config: OnlineConfig, engine: Engine) -> None:
    if config.data.prompts.at_end == "stop":
        raise ConfigError(
            "overlap.ahead samples a step that at_end=stop may never take: set data.prompts.at_end=restart"
        )
    if engine.ranks.world > 1 or engine.sharding.uses_deepspeed:
        raise ConfigError("overlap.ahead works in one process without DeepSpeed: set overlap.ahead=false")


@torch.no_grad()
def _copy_weights(source: Sequence[Tensor], target: CausalLM) -> None:
    for source_weight, target_weight in zip(source, target.parameters(), strict=True):
        target_weight.copy_(source_weight)


def _keep_weights(source: CausalLM, target: CausalLM) -> Callable[[], None]:
    """Keep copies of the source's weights, and return a function that puts them into the target."""
    kept = [weight.detach().clone() for weight in source.parameters()]
    return lambda: _copy_weights(kept, target)


def _restore_completions(saved: dict[str, Any], prompts: PromptBatches, group_size: int) -> Completions:
    fields = {name: value for name, value in saved.items() if name not in ("step", "updates")}
    rows = repeat_rows(prompts.batch(saved["step"]), group_size)
    if fields["group_size"] != group_size or len(fields["finished"]) != len(rows):
        raise CheckpointError(
            "the checkpoint has completions that were drawn ahead with other sampling.completions_per_prompt or "
            "batch.prompts_per_step: set them back, or start in another folder"
        )
    return extend(Completions, rows, **fields)


def build_online(config: OnlineConfig, view: View | None = None) -> OnlineRun:
    """Build an online run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set, reward or checkpoint is missing or invalid; the subclass says which.
    """
    config, notes = choose_precision(config)
    if config.has_chosen_rate:
        size = "50 to 300 million parameters"
        notes.append(f"policy.lr={config.policy.lr:g}: it is not set, and the model has {size}")
    check_functions(config)
    context = open_context(config, view, notes)
    with context.undone_on_error():
        return _build(config, context)


@dataclass(frozen=True)
class _Models:
    """The models of a run, and the objects that sample, score and train."""

    models: Models
    sampler: Sampler
    episodes: EpisodeSampler | None  # the sampler, if an environment answers the policy
    offload: Offload
    source: RewardSource
    cost: RewardSource | None  # of reward.cost
    trained: dict[str, TrainableModel]
    ema: Ema | None
    saved: dict[str, Any] | None  # the trainer state of the checkpoint; None for a new run
    servers: ServerPool | None


def _build(config: OnlineConfig, context: RunContext) -> OnlineRun:
    _check_reward_parts(config, context.engine)
    _check_limit(config)
    if config.sampling.backend == "server" and config.sampling.server is not None:
        config.sampling.server.check_trainer(context.engine.device.type, trains_adapter=config.policy.lora is not None)
    tokenizer = build_tokenizer(config.policy)
    origin = read_export_origin(config.policy, tokenizer, config.data.chat_format)
    built = _build_models(config, context, tokenizer)
    models, saved = built.models, built.saved
    prompts = _load_prompts(config, context, tokenizer, models)
    _check_rows(config.reward.source, prompts)
    queue = _build_queue(config, context, prompts, saved)
    ptx = _load_ptx(config, context, tokenizer, models)
    evaluator = build_evaluator(config, context, tokenizer, models, built.sampler, built.source, cost=built.cost)
    steps = context.total_steps(prompts.steps_per_epoch)
    ahead = None
    if config.overlap.ahead:
        is_same = not context.is_other_run and context.is_recorded("data.prompts")
        completions = saved.get("ahead") if saved is not None and is_same else None
        ahead = build_prefetcher(
            config, context, models, tokenizer, prompts, completions, last_step=steps, servers=built.servers
        )
    save = partial(save_models, models, tokenizer, origin)
    goal = config.algorithm.kl.controller.goal
    session = context.session(
        total_steps=steps,
        save=OnlineSaver(save, models, built.trained, built.ema, ahead, queue, context.state),
        evaluate=with_average(evaluator, built.ema),
        show=progress_metrics("online"),
        targets=None if goal is None else {"kl/reference": goal},
    )
    evaluator.connect(session.recorder)
    _connect(built, session.recorder, has_clock=ahead is None)
    export_model = _make_export(config, context, tokenizer, origin, built)
    keep_best(context, session, lambda: evaluator.rows, export_model)
    feed = _Feed(
        prompts=prompts.batch if queue is None else lambda _: queue.prompts(),
        queue=queue,
        refill=prompts.reseeded(derive_seed(context.seed, "refill")).batch,
        ptx=ptx,
        ahead=ahead,
    )
    return _assemble(config, context, tokenizer, built, feed, session, export_model)


def _connect(built: _Models, recorder: Recorder, *, has_clock: bool) -> None:
    """Let what samples report to the recorder; the thread that samples ahead has no clock of its own."""
    if built.episodes is not None:
        built.episodes.note, built.episodes.pool.phase = recorder.note, recorder.phase
    if built.servers is not None:
        built.servers.warn = recorder.note
        if has_clock:
            built.servers.phase = recorder.phase


@dataclass(frozen=True, kw_only=True)
class _Feed:
    """The prompts and demonstrations of each step; see OnlineRun."""

    prompts: Callable[[int], Prompts]
    queue: PromptQueue | None
    refill: Callable[[int], Prompts]
    ptx: Callable[[int, int], Demonstrations] | None
    ahead: CompletionPrefetcher | None


def _build_models(config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> _Models:
    """Build the models, sampler and reward of a run, and restore their state from the checkpoint."""
    models = build_online_models(config, context, tokenizer)
    fast_ways = None if context.engine.splits_weights else models.fast_ways()
    source = build_source(config.reward.source, tokenizer, context.engine, context.notes.append, leaves_out=True)
    identify_source(config.reward.source, context)
    if config.environment is not None and config.environment.code_file is not None:
        context.identify("environment.target", content_digest(config.environment.code_file), may_change=True)
    identify_process(config.reward.process, context)
    cost = _build_cost(config, context, tokenizer)
    servers = build_servers(config, tokenizer, context.folder.path, context.notes.append)
    sampler = build_sampler(config, models, tokenizer, context.note, servers=servers)
    saved = _load_checkpoint(context, models)
    trained = _build_trained(config, models, context)
    fast_ways = fast_ways or models.fast_ways()  # under ZeRO-3 only DeepSpeed's hooks make weights whole
    acting = sampler.sampler if isinstance(sampler, EpisodeSampler) else sampler
    if servers is None:
        fast_ways.ways["fast sampling"] = not isinstance(acting, HFSampler)
    fast_ways.reasons += slow_lengths_reason(config, sampler)
    context.notes += fast_ways.lines()
    ema = Ema(models.policy, config.policy.ema_decay, context.engine) if config.policy.ema_decay else None
    if saved is not None:
        restore_trainer_state(saved, trained, ema)
    if saved is None or context.is_other_run:
        _start_coefficients(config.algorithm, context.state)
    offload = build_offload(config.offload, context, trained, acting)
    return _Models(
        models=models,
        sampler=OffloadingSampler(sampler, offload) if offload.is_on else sampler,
        episodes=sampler if isinstance(sampler, EpisodeSampler) else None,
        offload=offload,
        source=source,
        cost=cost,
        trained=trained,
        ema=ema,
        saved=saved,
        servers=servers,
    )


def _start_coefficients(algorithm: Online, state: TrainState) -> None:
    """Set the coefficients that an algorithm adapts to their start, and forget the best checkpoint."""
    state.kl_coef = algorithm.kl.coef
    state.penalty_coef = algorithm.policy_loss.start_coef
    state.multiplier = 0.0 if algorithm.lagrange is None else algorithm.lagrange.start
    state.violation = 0.0
    state.score_moments = {}
    state.best = None


def _build_cost(config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> RewardSource | None:
    """Build the source of costs, whose weights the run records like the reward's; None without one."""
    if config.reward.cost is None:
        return None
    identify_source(config.reward.cost.source, context, "reward.cost.source")
    return build_source(config.reward.cost.source, tokenizer, context.engine, context.notes.append, leaves_out=True)


def _make_reward(config: OnlineConfig, context: RunContext, built: _Models) -> RewardSource:
    """Return the reward to train on: the shaped scores, combined with the costs if the run limits them."""
    shaped = ShapedReward(built.source, config.reward.shaping, config.sampling.max_new_tokens)
    if built.cost is None:
        return shaped
    lagrange = config.algorithm.lagrange
    combine = None if lagrange is None else _combination(lagrange, context.state)
    return CostedReward(shaped, built.cost, combine)


def _combination(lagrange: Lagrange, state: TrainState) -> Combine:
    """Return the function that combines score and cost, by the multiplier that the run has at the time of the call."""

    def combine(scores: Tensor, costs: Tensor) -> Tensor:
        return lagrange.combine(scores, costs, lagrange.in_use(state.multiplier, violation=state.violation))

    return combine


def _make_export(
    config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, origin: Origin, built: _Models
) -> Callable[[Path], None]:
    policy, ema = built.models.policy, built.ema
    return lambda folder: export(policy, ema, tokenizer, folder, context.engine, origin=origin, config=config.policy)


def _assemble(
    config: OnlineConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    built: _Models,
    feed: _Feed,
    session: Session,
    export_model: Callable[[Path], None],
) -> OnlineRun:
    algorithm, engine, longest = config.algorithm, context.engine, config.longest_completion
    times = no_grad_batch_multiplier(config, engine)
    return OnlineRun(
        config=config,
        session=session,
        prompts=feed.prompts,
        queue=feed.queue,
        refill=feed.refill,
        ptx=feed.ptx,
        sampler=built.sampler,
        episodes=built.episodes,
        offload=built.offload,
        ahead=feed.ahead,
        reward=_make_reward(config, context, built),
        models=built.models,
        policy=built.trained["policy"],
        critic=built.trained.get("critic"),
        objective=Objective(algorithm, max_tokens=longest),
        ema=built.ema,
        rows=adaptive_micro_batch(config.batch, session),
        passes=adaptive_micro_batch(config.batch, session, times=times, what="a forward pass"),
        decode=make_decode(tokenizer),
        export=export_model,
        process=build_process(config.reward.process, tokenizer, engine),
        servers=built.servers,
        watch=build_watch(config.reward, tokenizer, engine, seed=config.run.seed, warn=session.recorder.note),
    )


def no_grad_batch_multiplier(config: OnlineConfig, engine: Engine) -> int:
    """Return how many micro-batches make up one forward pass without gradient.

    On a single GPU it starts as the whole step; a pass that runs out of memory is halved, and the smaller size is kept.
    On a CPU running out of memory cannot be caught in time, and in a distributed run a single rank cannot halve: there
    the number is fixed. Of a step whose minibatches take several passes, a pass then has at most half of the rows, so
    that the passes of one process may be the passes of two.
    """
    rows, batch = config.completions_per_step, config.batch
    micro = 1 if batch.micro_batch_tokens else batch.micro_batch_size
    if engine.device.type == "cpu" or engine.ranks.world > 1 or engine.sharding.uses_deepspeed:
        takes_several = micro * batch.minibatches < rows
        return min(NO_GRAD_BATCH_MULTIPLIER, -(-rows // (2 * micro))) if takes_several else NO_GRAD_BATCH_MULTIPLIER
    return max(NO_GRAD_BATCH_MULTIPLIER, -(-rows // micro))


def _load_prompts(
    config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> PromptBatches:
    prompts = build_prompts(
        config.data.prompts,
        context,
        tokenizer,
        chat=config.data.chat_format,
        rows_per_step=config.batch.prompts_per_step,
        model_context=context_length(models.policy),
        max_new_tokens=config.sampling.max_new_tokens,
        hints=() if config.algorithm.rescue is None else config.algorithm.rescue.hints,
    )
    context.repeats_prompts = prompts.steps_per_epoch < 1
    context.leaves_out_template = config.data.chat_template == "none" and bool(tokenizer.chat_template)
    if context.repeats_prompts:
        context.notes.append(
            f"data.prompts has fewer rows than a step takes (batch.prompts_per_step={config.batch.prompts_per_step}): "
            "each step repeats prompts"
        )
    return prompts


def _check_rows(source: Source, prompts: PromptBatches) -> None:
    """Check the rows that are in memory against the source, and the sources in it."""
    if isinstance(prompts, PromptStream) and isinstance(prompts.rows, PromptSet):
        for _, section in walk(source):
            if isinstance(section, Source):
                section.check_rows(prompts.rows.references)


def _build_queue(
    config: OnlineConfig, context: RunContext, stream: PromptBatches, saved: dict[str, Any] | None
) -> PromptQueue | None:
    """Build the queue of prompts that a rescue or a curriculum deals, as the checkpoint has it; None without both.

    A checkpoint with other prompts, which it names by their place in the data, tells nothing about these.
    """
    algorithm = config.algorithm
    if not algorithm.follows_prompts:
        return None
    assert isinstance(stream, PromptStream)
    assert isinstance(stream.rows, PromptSet)
    queue = PromptQueue(
        stream.rows, stream.rows_per_step, stream.seed, rescue=algorithm.rescue, curriculum=algorithm.curriculum
    )
    if saved is not None:
        is_same = context.is_recorded("data.prompts")
        if not is_same:
            what = "data.prompts: the checkpoint does not record these rows"
            context.notes.append(f"{what}: success rates and replays begin again")
        queue.restore(saved.get("queue") if is_same else None, step=context.state.step)
    return queue


def _load_ptx(
    config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> Callable[[int, int], Demonstrations] | None:
    """Return the demonstrations mixed into each optimizer step of PPO-ptx, other ones in each; None without."""
    if config.algorithm.ptx_coef == 0 or config.data.sft is None:
        return None
    size = max(1, config.completions_per_step // config.batch.minibatches)
    stream = build_demonstrations(
        config.data.sft,
        context,
        tokenizer,
        chat=config.data.chat_format,
        rows_per_step=size * config.batch.epochs * config.batch.minibatches,
        model_context=context_length(models.policy),
        purpose=PTX,
    )

    def draw(step: int, update: int) -> Demonstrations:
        return stream.part(step, range(update * size, (update + 1) * size))

    return draw


def _build_trained(config: OnlineConfig, models: Models, context: RunContext) -> dict[str, TrainableModel]:
    train = partial(context.train, dtype=models.dtype)
    if models.shared_head is not None:
        policy_and_head = nn.ModuleDict({"policy": models.policy, "head": models.shared_head})
        return {"policy": train("policy", policy_and_head, config.policy, terms=("policy", "ptx", "value"))}
    policy = train("policy", models.policy, config.policy, terms=("policy", PREFERENCE_TERM, "ptx"))
    if config.algorithm.policy_loss.searches:
        assert isinstance(policy, LocalModel), "the configuration refuses DeepSpeed"
        policy = SearchedModel(policy, models, config.algorithm.policy_loss)
    trained: dict[str, TrainableModel] = {"policy": policy}
    if models.critic is not None:
        trained["critic"] = train("critic", models.critic, config.critic, terms=("value",))
    return trained


def _check_limit(config: OnlineConfig) -> None:
    """Check that nothing goes round the limit of a cost. Finished runs of an earlier version may have such settings."""
    if config.algorithm.lagrange is None:
        return
    if config.checkpoint.best is not None:
        raise ConfigError(
            "checkpoint.best keeps the model with the highest score, whatever its cost, and algorithm.lagrange limits "
            "the cost: remove one of the two"
        )
    if config.reward.process is not None:
        raise ConfigError(
            "reward.process is not weighed against the cost of algorithm.lagrange, so it could outbid any multiplier: "
            "remove one of the two, or make the grades of the steps a part of the score"
        )


def _check_reward_parts(config: TrainConfig, engine: Engine) -> None:
    """Check that a run that scores the parts of a step while it samples the next has one process.

    Raises:
        ConfigError: it has several.
    """
    if config.overlap.reward_parts > 1 and engine.ranks.world > 1:
        raise ConfigError("overlap.reward_parts works in one process: set overlap.reward_parts=1")


def _load_checkpoint(context: RunContext, models: Models) -> dict[str, Any] | None:
    """Load the trainer state of the checkpoint to resume from, and its shared head into the models; None if new."""
    if context.resume is None:
        return None
    saved = load_trainer_state(context.resume)
    if models.shared_head is not None and "shared_head" in saved:
        models.shared_head.load_state_dict(saved["shared_head"])
    return saved

"""Build an online run from its configuration: PPO, GRPO and related algorithms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.algo.objective import Objective
from rlhf.batching import extend
from rlhf.config.algorithm import AdaptiveKl, PenaltyLoss, TrustRegionLoss
from rlhf.config.sections import OnlineConfig, TrainConfig
from rlhf.data.mixture import Stream
from rlhf.data.prompts import PromptSet, PromptStream, load_prompts
from rlhf.errors import CheckpointError, ConfigError
from rlhf.evaluation.evaluate import evaluate_policy
from rlhf.factory.context import (
    CRITIC,
    MODEL,
    PTX,
    RunContext,
    keep_best,
    load_trainer_state,
    open_context,
    save_policy,
    save_scalar_head,
    save_trainer_state,
    total_steps,
)
from rlhf.factory.data import PromptBatches, build_demonstrations, build_prompts
from rlhf.factory.exported import rounded_inputs
from rlhf.factory.functions import check_functions, user_function
from rlhf.factory.models import build_online_models, build_tokenizer, export, make_decode, read_export_origin
from rlhf.factory.rewards import build_source, build_watch, identify_source
from rlhf.factory.sampler import build_sampler, slow_lengths_reason
from rlhf.models.backbone import CausalLM, context_length, freeze
from rlhf.models.export import Origin
from rlhf.models.policy_models import Ema, Models
from rlhf.rewards.rules import ShapedReward
from rlhf.rewards.source import RewardSource
from rlhf.runtime.device import choose_precision
from rlhf.runtime.engine import Engine, LocalModel, TrainableModel
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.generate import HFSampler, repeat_rows
from rlhf.sampling.sampler import Sampler
from rlhf.tracking.metrics import progress_metrics
from rlhf.training.collect import sampling_key
from rlhf.training.offline import PREFERENCE_TERM, adaptive_micro_batch
from rlhf.training.online_run import NO_GRAD_BATCH_MULTIPLIER, OnlineRun
from rlhf.training.overlap import CompletionPrefetcher
from rlhf.training.prompt_queue import PromptQueue
from rlhf.training.rollout import sample_records
from rlhf.training.session import Recorder, TrainState
from rlhf.training.trust_region import TrustRegionModel
from rlhf.types import Completions, Demonstrations, Prompts


def build_prefetcher(
    config: OnlineConfig,
    context: RunContext,
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Stream[Prompts],
    saved: dict[str, Any] | None,
    *,
    last_step: int,
) -> CompletionPrefetcher:
    """Build the sampler that works one step ahead of the update.

    Args:
        config: the configuration of the run.
        context: the run's context; its engine must be a single process without DeepSpeed.
        models: the models; the policy is copied.
        tokenizer: the policy's tokenizer.
        prompts: the prompts of each step.
        saved: the completions that the checkpoint holds, None for a new run.
        last_step: the last step of the run, after which nothing is sampled.

    Raises:
        ConfigError: the run has several processes, uses DeepSpeed, or may end before its last step.
        CheckpointError: the saved completions do not fit the configured number of prompts or completions.
    """
    if config.data.prompts.at_end == "stop":
        raise ConfigError(
            "overlap.ahead samples a step that at_end=stop may never take: set data.prompts.at_end=restart"
        )
    if context.engine.ranks.world > 1 or context.engine.sharding.uses_deepspeed:
        raise ConfigError("overlap.ahead works in one process without DeepSpeed: set overlap.ahead=false")
    policy_copy = freeze(copy.deepcopy(models.policy))
    group_size = config.sampling.completions_per_prompt
    sampler = build_sampler(config, replace(models, policy=policy_copy), tokenizer)

    def draw(step: int) -> Completions:
        return sampler.sample(prompts.batch(step), key=sampling_key(config, step), group_size=group_size)

    ahead = CompletionPrefetcher(
        draw, lambda: _copy_weights(models.policy, policy_copy), last_step=last_step, device=models.device
    )
    if saved:
        ahead.restore(saved["step"], _restore_completions(saved, prompts, group_size))
    return ahead


@torch.no_grad()
def _copy_weights(source: CausalLM, target: CausalLM) -> None:
    for source_weight, target_weight in zip(source.parameters(), target.parameters(), strict=True):
        target_weight.copy_(source_weight)


def _restore_completions(saved: dict[str, Any], prompts: Stream[Prompts], group_size: int) -> Completions:
    fields = {name: value for name, value in saved.items() if name != "step"}
    rows = repeat_rows(prompts.batch(saved["step"]), group_size)
    if fields["group_size"] != group_size or len(fields["finished"]) != len(rows):
        raise CheckpointError(
            "the checkpoint has completions that were drawn ahead with other sampling.completions_per_prompt or "
            "batch.prompts_per_step: set them back, or start in another folder"
        )
    return extend(Completions, rows, **fields)


def build_online(config: OnlineConfig, console: Console | None = None) -> OnlineRun:
    """Build an online run, at step 0 or resumed from its newest checkpoint.

    Raises:
        UserError: a model, data set, reward or checkpoint is missing or invalid; the subclass says which.
    """
    config, precision = choose_precision(config)
    check_functions(config)
    context = open_context(config, console, [*precision, *(f"warning: {text}" for text in rounded_inputs(config))])
    with context.undone_on_error():
        return _build(config, context)


def _build(config: OnlineConfig, context: RunContext) -> OnlineRun:
    algorithm = config.algorithm
    _check_reward_parts(config, context.engine)
    tokenizer = build_tokenizer(config.policy)
    origin = read_export_origin(config.policy, tokenizer)
    models = build_online_models(config, context, tokenizer)
    fast_ways = None if context.engine.splits_weights else models.fast_ways()
    source = build_source(config.reward.source, tokenizer, context.engine, context.notes.append)
    identify_source(config.reward.source, context)
    sampler = build_sampler(config, models, tokenizer, context.notes.append)
    saved = _load_checkpoint(context, models)
    trained = _build_trained(config, models, context)
    fast_ways = fast_ways or models.fast_ways()  # under ZeRO-3 only DeepSpeed's hooks make weights whole
    fast_ways.ways["fast sampling"] = not isinstance(sampler, HFSampler)
    fast_ways.reasons += slow_lengths_reason(config, sampler)
    context.notes += fast_ways.lines()
    ema = Ema(models.policy, config.policy.ema_decay, context.engine) if config.policy.ema_decay else None
    if saved is not None:
        _restore(saved, trained, ema)
    if saved is None or context.is_other_run:
        context.state.kl_coef = algorithm.kl.coef
        context.state.penalty_coef = (
            algorithm.policy_loss.coef if isinstance(algorithm.policy_loss, PenaltyLoss) else 0.0
        )
        context.state.best = None
    prompts = _load_prompts(config, context, tokenizer, models)
    queue = _build_queue(config, context, prompts, saved)
    ptx = _load_ptx(config, context, tokenizer, models)
    evaluate = _build_evaluator(config, context, tokenizer, models, sampler, source)
    controller = algorithm.kl.controller
    steps = total_steps(config.schedule, prompts.steps_per_epoch)
    ahead = None
    if config.overlap.ahead:
        completions = None if saved is None or context.is_other_run else saved.get("ahead")
        ahead = build_prefetcher(config, context, models, tokenizer, prompts, completions, last_step=steps)
    session = context.session(
        total_steps=steps,
        save=_Save(models, trained, tokenizer, origin, ema, ahead, queue, context.state),
        evaluate=_with_average(evaluate, ema),
        show=progress_metrics("online"),
        targets={"kl/reference": controller.target} if isinstance(controller, AdaptiveKl) else None,
    )
    evaluate.connect(session.recorder)

    def export_model(folder: Path) -> None:
        export(models.policy, ema, tokenizer, folder, context.engine, origin=origin, dtype=config.policy.export_dtype)

    keep_best(context, session, lambda: evaluate.rows, export_model)
    return OnlineRun(
        config=config,
        session=session,
        prompts=prompts.batch if queue is None else lambda _: queue.prompts(),
        queue=queue,
        refill=prompts.reseeded(derive_seed(context.seed, "refill")).batch,
        ptx=ptx,
        sampler=sampler,
        ahead=ahead,
        reward=ShapedReward(source, config.reward.shaping, config.sampling.max_new_tokens),
        models=models,
        policy=trained["policy"],
        critic=trained.get("critic"),
        objective=Objective(
            algorithm,
            max_tokens=config.sampling.max_new_tokens,
            function=user_function(algorithm.policy_loss),
        ),
        advantage_function=user_function(algorithm.advantage),
        ema=ema,
        rows=adaptive_micro_batch(config.batch, session),
        passes=adaptive_micro_batch(
            config.batch, session, times=no_grad_batch_multiplier(config, context.engine), what="a forward pass"
        ),
        decode=make_decode(tokenizer),
        export=export_model,
        watch=build_watch(
            config.reward.watch, tokenizer, context.engine, seed=config.run.seed, warn=session.recorder.note
        ),
    )


def no_grad_batch_multiplier(config: OnlineConfig, engine: Engine) -> int:
    """Return how many micro-batches make up one forward pass without gradient.

    On a single GPU it starts as the whole step; a pass that runs out of memory is halved, and the smaller size is kept.
    On a CPU running out of memory cannot be caught in time, and in a distributed run a single rank cannot halve: there
    the number is fixed.
    """
    if engine.device.type == "cpu" or engine.ranks.world > 1 or engine.sharding.uses_deepspeed:
        return NO_GRAD_BATCH_MULTIPLIER
    rows = config.completions_per_step
    micro = 1 if config.batch.micro_batch_tokens else config.batch.micro_batch_size
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


def _build_queue(
    config: OnlineConfig, context: RunContext, stream: PromptBatches, saved: dict[str, Any] | None
) -> PromptQueue | None:
    """Build the queue of prompts to replay, as the checkpoint has it if the run is resumed; None without a rescue."""
    if config.algorithm.rescue is None:
        return None
    assert isinstance(stream, PromptStream)
    assert isinstance(stream.rows, PromptSet)
    queue = PromptQueue(stream.rows, stream.rows_per_step, stream.seed, config.algorithm.rescue.replay)
    if saved is not None:
        queue.restore(saved.get("queue"), step=context.state.step)
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
    engine = context.engine
    if models.shared_head is not None:
        policy_and_head = nn.ModuleDict({"policy": models.policy, "head": models.shared_head})
        return {"policy": engine.train("policy", policy_and_head, config.policy, terms=("policy", "ptx", "value"))}
    policy = engine.train("policy", models.policy, config.policy, terms=("policy", PREFERENCE_TERM, "ptx"))
    if isinstance(config.algorithm.policy_loss, TrustRegionLoss):
        assert isinstance(policy, LocalModel), "the configuration refuses DeepSpeed"
        policy = TrustRegionModel(policy, models, config.algorithm.policy_loss)
    trained: dict[str, TrainableModel] = {"policy": policy}
    if models.critic is not None:
        trained["critic"] = engine.train("critic", models.critic, config.critic, terms=("value",))
    return trained


class _Save:
    """A function that fills a checkpoint folder: models as ordinary folders, optimizers and averages in one file."""

    def __init__(
        self,
        models: Models,
        trained: dict[str, TrainableModel],
        tokenizer: PreTrainedTokenizerBase,
        origin: Origin,
        ema: Ema | None,
        ahead: CompletionPrefetcher | None,
        queue: PromptQueue | None,
        state: TrainState,
    ) -> None:
        self.models, self.trained, self.tokenizer, self.origin = models, trained, tokenizer, origin
        self.ema, self.ahead, self.queue, self.state = ema, ahead, queue, state

    def __call__(self, folder: Path) -> None:
        engine, head = self.models.engine, self.models.shared_head
        save_policy(self.models.policy, self.tokenizer, folder / MODEL, engine, self.origin)
        if self.models.critic is not None:
            save_scalar_head(self.models.critic, self.tokenizer, folder / CRITIC, engine)
        extra: dict[str, Any] = {}
        if head is not None:
            full_state = engine.full_state(head)
            extra["shared_head"] = head.state_dict() if full_state is None else full_state
        if self.ema is not None:
            extra["ema"] = self.ema.saved()
        if self.ahead is not None:
            extra["ahead"] = self.ahead.saved(self.state)
        if self.queue is not None:
            extra["queue"] = self.queue.saved()
        save_trainer_state(folder, self.trained, extra, engine)


def _restore(state: dict[str, Any], trained: dict[str, TrainableModel], ema: Ema | None) -> None:
    for name, model in trained.items():
        if name in state:  # not a critic that checkpoint.resume=always adds
            model.load_state(state[name])
    if ema is not None and "ema" in state:
        ema.load(state["ema"])


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


def _build_evaluator(
    config: TrainConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    models: Models,
    sampler: Sampler,
    source: RewardSource,
) -> PromptEvaluator:
    """Build the evaluator, with a judge of its own if eval.source is set; else the training reward `source` judges."""
    if config.eval.source is None:
        return PromptEvaluator(config, context, tokenizer, models, sampler, judge=source, proxy=None)
    judge = build_source(config.eval.source, tokenizer, context.engine)
    return PromptEvaluator(config, context, tokenizer, models, sampler, judge=judge, proxy=source)


class PromptEvaluator:
    """Evaluation of the policy on held-out prompts during a run; it does nothing if the run has none."""

    def __init__(
        self,
        config: TrainConfig,
        context: RunContext,
        tokenizer: PreTrainedTokenizerBase,
        models: Models,
        sampler: Sampler,
        judge: RewardSource,
        proxy: RewardSource | None,
    ) -> None:
        """Load the held-out prompts; `proxy` is the reward that is trained on, if the judge is another one."""
        self.config, self.models, self.sampler = config, models, sampler
        self.judge, self.proxy = judge, proxy
        self.decode = make_decode(tokenizer)
        self.key = derive_seed(context.seed, "eval")
        self.record: Callable[[list[dict[str, object]]], None] = lambda _: None
        self.passes = AdaptiveMicroBatch(
            config.batch.micro_batch_size * NO_GRAD_BATCH_MULTIPLIER, what="an evaluation pass"
        )
        self.rows: dict[str, list[float]] = {}  # of the latest evaluation: the score of each prompt
        self.batches: list[Prompts] = []
        if config.data.eval_prompts is not None:
            held_out = load_prompts(
                config.data.eval_prompts,
                tokenizer,
                chat_template=config.data.chat_format,
                context=context_length(models.policy),
                max_new_tokens=config.sampling.max_new_tokens,
            )
            context.rows_read("eval_prompts", held_out.skips)
            self.batches = list(held_out.batches(config.sampling.batch_size))

    def connect(self, recorder: Recorder) -> None:
        """Send the held-out samples, and messages about memory, to the recorder of the run."""
        self.record, self.passes.note = recorder.samples, recorder.note

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluate the current policy, record samples of its completions, and return the metrics."""
        if not self.batches:
            return {}
        evaluation = evaluate_policy(
            self.batches,
            self.sampler,
            self.models,
            self.judge,
            proxy=self.proxy,
            key=self.key,
            greedy=self.config.eval.greedy,
            rows_per_pass=self.passes,
        )
        self.rows = {"score": evaluation.rollout.scores.tolist()}
        parts, limit = evaluation.scores.parts, self.config.eval.samples
        self.record(sample_records(evaluation.rollout, self.decode, step=step, split="eval", limit=limit, parts=parts))
        return evaluation.metrics


def _with_average(evaluate: PromptEvaluator, ema: Ema | None) -> Callable[[int], dict[str, float]]:
    """Make `evaluate` use the moving average of the weights, if there is one."""
    if ema is None:
        return evaluate

    def evaluate_average(step: int) -> dict[str, float]:
        with ema.applied():
            return evaluate(step)

    return evaluate_average

"""An online run from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.algo.objective import Objective
from rlhf.build.ahead import build_ahead
from rlhf.build.context import CRITIC, MODEL, Context, open_context, total_steps
from rlhf.build.models import build_online_models, build_origin, build_tokenizer, decoder, export
from rlhf.build.rewards import build_source
from rlhf.build.sampler import build_sampler
from rlhf.build.saving import load_trainer, save_policy, save_scalar_head, save_trainer
from rlhf.config.algorithm import AdaptiveKl, Online, PenaltyLoss
from rlhf.config.sections import TrainConfig
from rlhf.data.pairs import load_demonstrations
from rlhf.data.prompts import PromptStream, load_prompts
from rlhf.data.stream import BatchStream
from rlhf.errors import ConfigError
from rlhf.evaluation.evaluate import evaluate_policy
from rlhf.models.backbone import context_length
from rlhf.models.bundle import Ema, Models
from rlhf.models.origin import Origin
from rlhf.rewards.shaping import ShapedReward
from rlhf.rewards.source import RewardSource
from rlhf.rollout import sample_records
from rlhf.runtime.engine import Engine, Trained
from rlhf.runtime.memory import Fitting
from rlhf.runtime.recorder import Recorder
from rlhf.runtime.seeding import derive
from rlhf.runtime.session import TrainState
from rlhf.sampling.hf import HFSampler
from rlhf.sampling.sampler import Sampler
from rlhf.trainers.offline import fitting
from rlhf.trainers.online import ROWS_PER_PASS, OnlineRun
from rlhf.trainers.overlap import Ahead
from rlhf.trainers.preference import TERM
from rlhf.types import Demonstrations, Prompts

SHOW = ("score/mean", "kl/reference", "kl/coef", "critic/explained_variance", "completion/length", "eval/score")


def build_online(config: TrainConfig, console: Console | None = None) -> OnlineRun:
    """Everything an online run needs, from step 0 or from its newest checkpoint.

    Raises:
        UserError: of the kind that fits: a model, data set, reward or checkpoint is not as it should be.
    """
    algorithm = config.algorithm
    assert isinstance(algorithm, Online)
    assert config.reward is not None
    context = open_context(config, console)
    if config.overlap.reward_parts > 1 and context.engine.ranks.world > 1:
        raise ConfigError("overlap.reward_parts works in one process: set overlap.reward_parts=1")
    tokenizer = build_tokenizer(config.policy)
    origin = build_origin(config.policy, tokenizer)
    models = build_online_models(config, context, tokenizer)
    fast_ways = models.fast_ways()
    source = build_source(config.reward.source, tokenizer, context.engine, context.notes.append)
    sampler = build_sampler(config, models, tokenizer, context.notes.append)
    fast_ways.ways["fast sampling"] = not isinstance(sampler, HFSampler)
    context.notes += fast_ways.lines()
    saved = load_trainer(context.resume) if context.resume is not None else None
    if saved is not None and models.shared_head is not None:
        models.shared_head.load_state_dict(saved["shared_head"])
    trained = _trained(config, models, context)
    ema = Ema(models.policy, config.policy.ema_decay, context.engine) if config.policy.ema_decay else None
    if saved is not None:
        _restore(saved, trained, ema)
    elif context.state.step == 0:
        context.state.kl_coef = algorithm.kl.coef
        if isinstance(algorithm.policy_loss, PenaltyLoss):
            context.state.penalty_coef = algorithm.policy_loss.coef
    prompts = _prompts(config, context, tokenizer, models)
    ptx = _ptx(config, context, tokenizer)
    judge = build_source(config.eval.source, tokenizer, context.engine) if config.eval.source else source
    proxy = source if config.eval.source else None
    evaluate = EvaluatePrompts(config, context, tokenizer, models, sampler, judge, proxy)
    controller = algorithm.kl.controller
    steps = total_steps(config.schedule, prompts.steps_per_epoch)
    ahead = None
    if config.overlap.ahead:
        ahead = build_ahead(config, context, models, tokenizer, prompts, (saved or {}).get("ahead"), last_step=steps)
    session = context.session(
        total_steps=steps,
        save=_Save(models, trained, tokenizer, origin, ema, ahead, context.state),
        evaluate=_averaged(evaluate, ema),
        show=SHOW,
        targets={"kl/reference": controller.target} if isinstance(controller, AdaptiveKl) else None,
    )
    evaluate.connect(session.recorder)
    return OnlineRun(
        config=config,
        algorithm=algorithm,
        session=session,
        prompts=prompts.batch,
        refill=BatchStream(prompts.rows, prompts.rows_per_step, derive(context.seed, "refill")).batch,
        ptx=ptx,
        sampler=sampler,
        ahead=ahead,
        reward=ShapedReward(source, config.reward.shaping, config.sampling.max_new_tokens),
        models=models,
        policy=trained["policy"],
        critic=trained.get("critic"),
        objective=Objective(algorithm, max_tokens=config.sampling.max_new_tokens),
        ema=ema,
        rows=fitting(config.batch, session),
        passes=fitting(config.batch, session, times=frozen_times(config, context.engine), what="a forward pass"),
        decode=decoder(tokenizer),
        export=lambda folder: export(
            models.policy,
            ema,
            tokenizer,
            folder,
            context.engine,
            origin=origin,
            dtype=config.policy.export_dtype,
            tell=session.recorder.note,
        ),
    )


def frozen_times(config: TrainConfig, engine: Engine) -> int:
    """Micro-batches in a pass without gradient.

    On one GPU the whole step at first: what does not fit is halved, once, and stays so. A CPU says too late that memory
    has run out, and several processes cannot halve: there it is a fixed number.
    """
    if engine.device.type == "cpu" or engine.ranks.world > 1 or engine.sharding.uses_deepspeed:
        return ROWS_PER_PASS
    rows = config.batch.prompts_per_step * config.sampling.completions_per_prompt
    micro = 1 if config.batch.micro_batch_tokens else config.batch.micro_batch_size
    return max(ROWS_PER_PASS, -(-rows // micro))


def _prompts(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models) -> PromptStream:
    assert config.data.prompts is not None
    prompts = load_prompts(
        config.data.prompts,
        tokenizer,
        chat_template=config.data.chat_format,
        context=context_length(models.policy),
        max_new_tokens=config.sampling.max_new_tokens,
    )
    context.notes.append(prompts.skips.summary())
    return PromptStream(prompts, config.batch.prompts_per_step, derive(context.seed, "prompts"))


def _ptx(
    config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase
) -> Callable[[int], Demonstrations] | None:
    algorithm = config.algorithm
    assert isinstance(algorithm, Online)
    if algorithm.ptx_coef == 0:
        return None
    assert config.data.sft is not None
    rows = load_demonstrations(config.data.sft, tokenizer, chat_template=config.data.chat_format)
    context.notes.append(rows.skips.summary())
    per_step = config.batch.prompts_per_step * config.sampling.completions_per_prompt
    size = max(1, per_step // config.batch.minibatches)
    return BatchStream(rows, size, derive(context.seed, "ptx")).batch


def _trained(config: TrainConfig, models: Models, context: Context) -> dict[str, Trained]:
    engine = context.engine
    if models.shared_head is not None:
        both = nn.ModuleDict({"policy": models.policy, "head": models.shared_head})
        return {"policy": engine.train("policy", both, config.policy, terms=("policy", "ptx", "value"))}
    trained = {"policy": engine.train("policy", models.policy, config.policy, terms=("policy", TERM, "ptx"))}
    if models.critic is not None:
        trained["critic"] = engine.train("critic", models.critic, config.critic, terms=("value",))
    return trained


class _Save:
    """Fills a checkpoint folder: models as ordinary folders, optimizers and averages in one file."""

    def __init__(
        self,
        models: Models,
        trained: dict[str, Trained],
        tokenizer: PreTrainedTokenizerBase,
        origin: Origin,
        ema: Ema | None,
        ahead: Ahead | None,
        state: TrainState,
    ) -> None:
        self.models, self.trained, self.tokenizer, self.origin = models, trained, tokenizer, origin
        self.ema, self.ahead, self.state = ema, ahead, state

    def __call__(self, folder: Path) -> None:
        engine, head = self.models.engine, self.models.shared_head
        save_policy(self.models.policy, self.tokenizer, folder / MODEL, engine, self.origin)
        if self.models.critic is not None:
            save_scalar_head(self.models.critic, self.tokenizer, folder / CRITIC, engine)
        besides: dict[str, Any] = {}
        if head is not None:
            whole = engine.full_state(head)
            besides["shared_head"] = head.state_dict() if whole is None else whole
        if self.ema is not None:
            besides["ema"] = self.ema.saved()
        if self.ahead is not None:
            besides["ahead"] = self.ahead.saved(self.state)
        save_trainer(folder, self.trained, besides, engine)


def _restore(state: dict[str, Any], trained: dict[str, Trained], ema: Ema | None) -> None:
    for name, model in trained.items():
        model.load_state(state[name])
    if ema is not None and "ema" in state:
        ema.load(state["ema"])


class EvaluatePrompts:
    """Evaluation during a run, on held-out prompts; nothing where there are none."""

    def __init__(
        self,
        config: TrainConfig,
        context: Context,
        tokenizer: PreTrainedTokenizerBase,
        models: Models,
        sampler: Sampler,
        judge: RewardSource,
        proxy: RewardSource | None,
    ) -> None:
        """`proxy` is the reward that is trained on, where it is not the judge."""
        self.config, self.models, self.sampler = config, models, sampler
        self.judge, self.proxy = judge, proxy
        self.decode = decoder(tokenizer)
        self.key = derive(context.seed, "eval")
        self.record: Callable[[list[dict[str, object]]], None] = lambda _: None
        self.passes = Fitting(config.batch.micro_batch_size * ROWS_PER_PASS, what="an evaluation pass")
        self.batches: list[Prompts] = []
        if config.data.eval_prompts is not None:
            held_out = load_prompts(
                config.data.eval_prompts,
                tokenizer,
                chat_template=config.data.chat_format,
                context=context_length(models.policy),
                max_new_tokens=config.sampling.max_new_tokens,
            )
            context.notes.append(held_out.skips.summary())
            self.batches = list(held_out.batches(config.sampling.batch_size))

    def connect(self, recorder: Recorder) -> None:
        """Send held-out samples, and what there is to say of memory, to the run's recorder."""
        self.record, self.passes.note = recorder.samples, recorder.note

    def __call__(self, step: int) -> dict[str, float]:
        """The metrics of the policy as it is now; samples go to `record`."""
        if not self.batches:
            return {}
        found = evaluate_policy(
            self.batches,
            self.sampler,
            self.models,
            self.judge,
            proxy=self.proxy,
            key=self.key,
            greedy=self.config.eval.greedy,
            rows_per_pass=self.passes,
        )
        parts, limit = found.scores.parts, self.config.eval.samples
        self.record(sample_records(found.rollout, self.decode, step=step, split="eval", limit=limit, parts=parts))
        return found.metrics


def _averaged(evaluate: EvaluatePrompts, ema: Ema | None) -> Callable[[int], dict[str, float]]:
    """Evaluate the average of the weights, where there is one."""
    if ema is None:
        return evaluate

    def under_average(step: int) -> dict[str, float]:
        with ema.applied():
            return evaluate(step)

    return under_average

"""Build reward sources from their configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedTokenizerBase

from reward_model.ensemble import EnsembleModelSource
from reward_model.source import RewardModelSource
from rlhf.config.load import load_chat_format
from rlhf.config.reward import RewardConfig
from rlhf.data.paths import resolve_best
from rlhf.errors import ConfigError
from rlhf.factory.context import RunContext
from rlhf.models.folders import member_folders, scoring_folder
from rlhf.models.policy_models import keep_in_bfloat16
from rlhf.models.scalar_head import EnsembleHeadModel
from rlhf.models.step_model import StepModel, load_step_model
from rlhf.rewards.ensemble import EnsembleReward
from rlhf.rewards.model import ModelSource
from rlhf.rewards.process import ModelProcess, ProcessGrader, ProcessReward
from rlhf.rewards.source import RewardSource, ShardedReward, Source, SourceContext, sources_in
from rlhf.runtime.device import fallback_note, usable_dtype
from rlhf.runtime.engine import Engine
from rlhf.tracking.fingerprint import content_digest
from rlhf.training.watch import WatchingJudge


def build_source(
    config: Source,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    warn: Callable[[str], None] = lambda _: None,
    *,
    leaves_out: bool = False,
) -> RewardSource:
    """Build the reward source that `config` describes.

    Args:
        tokenizer: the policy's tokenizer, in whose ids the completions are.
        engine: places reward models on devices, and has the process group over which scoring is spread.
        warn: receives a message if a reward model has another vocabulary than the policy.
        leaves_out: a score may be NaN if no verifier applies; the caller leaves the completion out.

    Raises:
        RewardError: a function cannot be imported, or an address is invalid.
        ConfigError: a template lacks its fields, or a key or token is not in the environment.
        ModelError: a reward model cannot be loaded.
    """
    context = SourceContext(
        tokenizer=tokenizer,
        device=engine.device,
        ranks=engine.ranks,
        warn=warn,
        load_model=partial(_load_model, engine=engine),
        leaves_out=leaves_out,
    )
    return context.build(config, may_abstain=False)


def identify_source(config: Source, context: RunContext, key: str = "reward.source") -> None:
    """Record the weights of the reward models of a source, and check that they are as at the run's beginning.

    A file of the user's code may change, since a mistake in it may have stopped the run: that is a warning.
    """
    for place, source in sources_in(config, key):
        for field, path in source.model_paths().items():
            context.identify_model(f"{place}.{field}", resolve_best(path))
        for field, file in source.code_files().items():
            context.identify(f"{place}.{field}", content_digest(file), may_change=True)


def build_process(
    config: ProcessReward | None, tokenizer: PreTrainedTokenizerBase, engine: Engine
) -> ProcessGrader | None:
    """Build the grader of the steps of completions; None without one.

    Raises:
        RewardError: a function cannot be imported.
        ModelError: a model cannot be loaded.
    """
    if config is None:
        return None
    config.check()

    def load(section: ModelProcess) -> StepModel:
        loaded = load_step_model(section, device=engine.device)
        engine.frozen.append(loaded.model)
        return loaded

    grade = config.build(load)
    return ProcessGrader(config, grade, tokenizer)


def identify_process(config: ProcessReward | None, context: RunContext) -> None:
    """Record the model or the code that rewards steps, like `identify_source`."""
    if config is None:
        return
    for field, path in config.model_paths().items():
        context.identify_model(f"reward.process.{field}", path)
    for field, file in config.code_files().items():
        context.identify(f"reward.process.{field}", content_digest(file), may_change=True)


def build_watch(
    reward: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    *,
    seed: int,
    warn: Callable[[str], None],
) -> WatchingJudge | None:
    """Build the judge that watches the training completions; None without one. For errors see build_source."""
    config = reward.watch
    if config is None:
        return None
    source = build_source(config.source, tokenizer, engine, warn)
    raw = "weighted_sum" if reward.source.standardizes_in_groups else "raw"
    return WatchingJudge(source=source, rows=config.rows, every=config.every, seed=seed, warn=warn, raw=raw)


def _load_model(config: ModelSource, context: SourceContext, *, engine: Engine) -> RewardSource:
    """Load a reward model, or an ensemble of them, and spread the scoring over the ranks."""
    dtype = usable_dtype(config.dtype, engine.device)
    if dtype != config.dtype:
        context.warn(fallback_note("reward.source.dtype"))
    if config.weights not in ("auto", "float32") and engine.sharding.uses_deepspeed:
        raise ConfigError(
            f"source.weights is {config.weights}, which DeepSpeed does not split: set sharding=ddp, or weights=auto"
        )
    members = member_folders(config.path)
    if members:
        single = ModelSource(path="", micro_batch_size=config.micro_batch_size, dtype=dtype, weights=config.weights)
        sources = [
            _load_model(single.model_copy(update={"path": str(member)}), context, engine=engine) for member in members
        ]
        names = [f"member.{number}" for number in range(len(members))]
        return EnsembleReward(sources, how=config.how, std_coef=config.std_coef, names=names)
    source = RewardModelSource.load(
        scoring_folder(config.path),
        context.tokenizer,
        device=engine.device,
        micro_batch_size=config.micro_batch_size,
        dtype=dtype,
        engine=engine,
        chat=load_chat_format(resolve_best(config.path)),
        weights=config.weights,
    )
    source.model = engine.freeze("reward", source.model)
    if not engine.splits_weights and config.weights == "auto":
        keep_in_bfloat16(source.model, dtype=dtype, device=engine.device)
    if source.note:
        context.warn(source.note)
    if isinstance(source.model, EnsembleHeadModel):
        return ShardedReward(EnsembleModelSource(source, how=config.how, std_coef=config.std_coef), engine.ranks)
    if config.how != "mean":
        raise ConfigError(f"source.how is {config.how}, but {config.path} is one reward model, not an ensemble")
    return ShardedReward(source, engine.ranks)

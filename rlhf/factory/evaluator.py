"""Build the evaluation of a run while it trains."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from rlhf.config.sections import OfflineConfig, TrainConfig
from rlhf.evaluation.during_run import HeldOut, OfflineEvaluation, PromptEvaluator
from rlhf.factory.context import RunContext
from rlhf.factory.data import load_prompts_of_run
from rlhf.factory.models import make_decode
from rlhf.factory.rewards import build_source
from rlhf.factory.sampler import build_sampler
from rlhf.models.policy_models import Ema, Models
from rlhf.rewards.source import RewardSource
from rlhf.sampling.sampler import Sampler
from rlhf.types import Prompts


def build_evaluator(
    config: TrainConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    models: Models,
    sampler: Sampler,
    source: RewardSource,
    *,
    cost: RewardSource | None = None,
) -> PromptEvaluator:
    """Build the evaluator, with a judge of its own if eval.source is set; else the training reward `source` judges.

    `cost` is the source of costs, if the run has one.
    """
    judge, proxy = source, None
    if config.eval.source is not None:
        judge, proxy = build_source(config.eval.source, tokenizer, context.engine, leaves_out=True), source
    batches, decode = _held_out_prompts(config, context, tokenizer, models), make_decode(tokenizer)
    return PromptEvaluator(config, batches, models, sampler, judge=judge, proxy=proxy, cost=cost, decode=decode)


def build_offline_evaluation(
    config: OfflineConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    models: Models,
    held_out: HeldOut,
    ema: Ema | None,
) -> OfflineEvaluation:
    """Build the evaluation of an offline run: on held-out data and, with prompts and a judge, by completions."""
    prompts = None
    if config.held_out_source is not None:
        sampling_models = replace(models, temperature=config.sampling.temperature)
        judge = build_source(config.held_out_source, tokenizer, models.engine, leaves_out=True)
        sampler = build_sampler(config, sampling_models, tokenizer)
        batches, decode = _held_out_prompts(config, context, tokenizer, sampling_models), make_decode(tokenizer)
        prompts = PromptEvaluator(config, batches, sampling_models, sampler, judge=judge, proxy=None, decode=decode)
    return OfflineEvaluation(held_out, prompts, ema)


def _held_out_prompts(
    config: TrainConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> list[Prompts]:
    """Load the held-out prompts, in batches for the sampler; none if the run has none."""
    if config.data.eval_prompts is None:
        return []
    data, most = config.data.eval_prompts, config.eval.prompts
    if most is not None and (data.limit is None or data.limit > most):
        data = data.model_copy(update={"limit": most})
    held_out = load_prompts_of_run(data, config, tokenizer, models.policy)
    context.rows_read("eval_prompts", held_out.skips)
    return list(held_out.batches(config.sampling.batch_size))

"""A finished run beside the model it started from: same prompts, same random numbers, same judge."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.build.context import model_folder
from rlhf.build.models import build_tokenizer
from rlhf.build.rewards import build_source
from rlhf.config.sections import RewardSourceConfig, SamplingConfig, TrainConfig
from rlhf.data.prompts import load_prompts
from rlhf.errors import ConfigError
from rlhf.evaluation.evaluate import PolicyEvaluation, evaluate_policy
from rlhf.evaluation.win_rate import Interval, mean_difference, win_rate
from rlhf.models.backbone import context_length, eos_ids, fit_vocabulary, freeze, load_causal_lm, place
from rlhf.models.bundle import Models
from rlhf.runtime.engine import make_engine
from rlhf.runtime.seeding import derive
from rlhf.sampling.hf import HFSampler
from rlhf.trainers.online import ROWS_PER_PASS


@dataclass(frozen=True)
class PolicyComparison:
    """What `rlhf eval` found."""

    prompts: int
    run: dict[str, float]
    reference: dict[str, float]
    win_rate: Interval
    difference: Interval


def compare_to_reference(config: TrainConfig, run: str) -> PolicyComparison:
    """Evaluate the model of `run` and the one it started from.

    Raises:
        UserError: there is no judge, no prompts, or a model cannot be loaded.
    """
    before, after = (evaluate_model(config, path, run) for path in (None, run))
    a, b = after.rollout.scores, before.rollout.scores
    return PolicyComparison(
        prompts=len(a),
        run=after.metrics,
        reference=before.metrics,
        win_rate=win_rate(a, b),
        difference=mean_difference(a, b),
    )


def evaluate_model(config: TrainConfig, path: str | None, tokenizer_from: str) -> PolicyEvaluation:
    """The model in `path` (None: the run's reference) on the run's held-out prompts, judged as the run is."""
    assert config.data.eval_prompts is not None
    engine = make_engine(config.run)
    tokenizer = build_tokenizer(config.policy.model_copy(update={"model": tokenizer_from}))
    start = model_folder(config.reference.model or config.policy.model)
    models = Models(
        policy=place(_load(config, model_folder(path) if path else start, tokenizer), engine.device),
        reference=place(_load(config, start, tokenizer), engine.device),
        temperature=config.sampling.temperature,
        dtype=config.policy.dtype,
        device=engine.device,
        engine=engine,
    )
    held_out = load_prompts(
        config.data.eval_prompts,
        tokenizer,
        chat_template=config.data.chat_template,
        context=context_length(models.policy),
        max_new_tokens=config.sampling.max_new_tokens,
    )
    judge = build_source(_judge(config), tokenizer, engine)
    return evaluate_policy(
        list(held_out.batches(config.sampling.batch_size)),
        _sampler(config.sampling, models, tokenizer, config.policy.dtype),
        models,
        judge,
        proxy=None,
        key=derive(config.run.seed, "eval"),
        greedy=config.eval.greedy,
        rows_per_pass=config.batch.micro_batch_size * ROWS_PER_PASS,
    )


def _judge(config: TrainConfig) -> RewardSourceConfig:
    if config.eval.source is not None:
        return config.eval.source
    if config.reward is None:
        raise ConfigError("no judge: set eval.source, e.g. eval.source.type=model eval.source.path=runs/rm")
    return config.reward.source


def _load(config: TrainConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    model = load_causal_lm(path, dtype=config.policy.dtype, trust_remote_code=config.policy.trust_remote_code)
    fit_vocabulary(model, tokenizer, path)
    return freeze(model)


def _sampler(config: SamplingConfig, models: Models, tokenizer: PreTrainedTokenizerBase, dtype: str) -> HFSampler:
    return HFSampler(
        models.policy,
        config,
        eos_ids=eos_ids(models.policy, tokenizer),
        pad_id=int(tokenizer.pad_token_id),
        dtype=dtype,
        device=models.device,
        engine=models.engine,
    )

"""Sampling the next step's completions while the update runs, from a copy of the policy."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.build.context import Context
from rlhf.build.sampler import build_sampler
from rlhf.config.sections import TrainConfig
from rlhf.data.prompts import PromptStream
from rlhf.errors import CheckpointError, ConfigError
from rlhf.models.backbone import CausalLM, freeze
from rlhf.models.bundle import Models
from rlhf.sampling.hf import repeat_rows
from rlhf.trainers.online import sampling_key
from rlhf.trainers.overlap import Ahead
from rlhf.types import Completions, extend


def build_ahead(
    config: TrainConfig,
    context: Context,
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptStream,
    saved: dict[str, Any] | None,
    *,
    last_step: int,
) -> Ahead:
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
        ConfigError: the run has several processes, or uses DeepSpeed.
        CheckpointError: the saved completions do not fit the configured number of prompts or completions.
    """
    if context.engine.ranks.world > 1 or context.engine.sharding.uses_deepspeed:
        raise ConfigError("overlap.ahead works in one process without DeepSpeed: set overlap.ahead=false")
    policy_copy = freeze(copy.deepcopy(models.policy))
    group_size = config.sampling.completions_per_prompt
    sampler = build_sampler(config, replace(models, policy=policy_copy), tokenizer)

    def draw(step: int) -> Completions:
        return sampler.sample(prompts.batch(step), key=sampling_key(config, step), group_size=group_size)

    ahead = Ahead(draw, lambda: _copy_weights(models.policy, policy_copy), last_step=last_step)
    if saved:
        ahead.put_back(saved["step"], _restore_completions(saved, prompts, group_size))
    return ahead


@torch.no_grad()
def _copy_weights(source: CausalLM, target: CausalLM) -> None:
    for source_weight, target_weight in zip(source.parameters(), target.parameters(), strict=True):
        target_weight.copy_(source_weight)


def _restore_completions(saved: dict[str, Any], prompts: PromptStream, group_size: int) -> Completions:
    fields = {name: value for name, value in saved.items() if name != "step"}
    rows = repeat_rows(prompts.batch(saved["step"]), group_size)
    if fields["group_size"] != group_size or len(fields["finished"]) != len(rows):
        raise CheckpointError(
            "the checkpoint has completions that were drawn ahead with other sampling.completions_per_prompt or "
            "batch.prompts_per_step: set them back, or start in another folder"
        )
    return extend(Completions, rows, **fields)

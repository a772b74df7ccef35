"""The sampler that draws a step ahead of the update, over a copy of the policy."""

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
    """What draws ahead; `saved` is what the checkpoint has of it.

    Raises:
        ConfigError: there are several processes, or DeepSpeed.
        CheckpointError: what was drawn is not of the configuration's group size.
    """
    if context.engine.ranks.world > 1 or context.engine.sharding.uses_deepspeed:
        raise ConfigError("overlap.ahead works in one process without DeepSpeed: set overlap.ahead=false")
    twin = freeze(copy.deepcopy(models.policy))
    group_size = config.sampling.completions_per_prompt
    sampler = build_sampler(config, replace(models, policy=twin), tokenizer)

    def draw(step: int) -> Completions:
        return sampler.sample(prompts.batch(step), key=sampling_key(config, step), group_size=group_size)

    ahead = Ahead(draw, lambda: _copy(models.policy, twin), last_step=last_step)
    if saved:
        ahead.put_back(saved["step"], _completions(saved, prompts, group_size))
    return ahead


@torch.no_grad()
def _copy(policy: CausalLM, twin: CausalLM) -> None:
    for live, copied in zip(policy.parameters(), twin.parameters(), strict=True):
        copied.copy_(live)


def _completions(saved: dict[str, Any], prompts: PromptStream, group_size: int) -> Completions:
    fields = {name: value for name, value in saved.items() if name != "step"}
    rows = repeat_rows(prompts.batch(saved["step"]), group_size)
    if fields["group_size"] != group_size or len(fields["finished"]) != len(rows):
        raise CheckpointError(
            "the checkpoint has completions that were drawn ahead with other sampling.completions_per_prompt or "
            "batch.prompts_per_step: set them back, or start in another folder"
        )
    return extend(Completions, rows, **fields)

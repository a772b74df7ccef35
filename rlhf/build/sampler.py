"""Building the sampler of a policy from configuration."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from rlhf.config.sections import TrainConfig
from rlhf.data.chat import pad_id
from rlhf.data.encode import ending_ids
from rlhf.models.backbone import eos_ids
from rlhf.models.bundle import Models
from rlhf.sampling.choice import make_sampler
from rlhf.sampling.sampler import Sampler


def build_sampler(
    config: TrainConfig,
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    tell: Callable[[str], None] = lambda _: None,
) -> Sampler:
    """Build the sampler of the policy that is being trained; `tell` receives the reason if it is not the fast one."""
    return make_sampler(
        models.policy,
        config.sampling,
        eos_ids=ending_ids(tokenizer, config.data.chat_format, eos_ids(models.policy, tokenizer)),
        pad_id=pad_id(tokenizer),
        dtype=config.policy.dtype,
        device=models.device,
        engine=models.engine,
        tell=tell,
    )

"""The models, moments and copies that leave the GPU while a part of a step does not read them."""

from __future__ import annotations

from rlhf.config.run import ShardingConfig
from rlhf.section import Section


class OffloadConfig(Section):
    """Move models, moments and the sampler off the GPU while a part of a step does not read them (online).

    They wait in the memory of the machine. This saves GPU memory and costs the time of the copies. No result changes.
    On a CPU nothing is moved.
    """

    frozen_models: bool = False
    """Keep the reference and the reward models in the machine's memory while completions are sampled and while weights
    are updated. OpenRLHF calls this --ref_reward_offload, verl param_offload of the reference and the reward model."""
    optimizer: bool = False
    """Keep the optimizers' moments in the machine's memory outside the update. verl calls this optimizer_offload."""
    sampler: bool = False
    """Free the sampler's copy of the weights and its cache outside rollouts; every rollout makes them again. TRL calls
    this vllm_enable_sleep_mode, verl free_cache_engine."""

    @property
    def is_on(self) -> bool:
        """Return whether anything is moved."""
        return self.frozen_models or self.optimizer or self.sampler

    def check_run(self, sharding: ShardingConfig, *, ahead: bool, reward_parts: int) -> None:
        """Check that nothing is moved that another part of the run reads or moves at the same time."""
        if self.frozen_models and sharding.uses_deepspeed:
            raise ValueError(
                f"offload.frozen_models moves whole models, and sharding is {sharding.mode}: set sharding=ddp, or "
                "offload.frozen_models=false (zero3 splits frozen models)"
            )
        if self.optimizer and sharding.uses_deepspeed:
            raise ValueError(
                f"offload.optimizer moves whole moments, and sharding={sharding.mode} splits them: set "
                "sharding=zero2_offload, or offload.optimizer=false"
            )
        if self.frozen_models and reward_parts > 1:
            raise ValueError(
                "offload.frozen_models moves the reward models while overlap.reward_parts scores with them: set "
                "overlap.reward_parts=1, or offload.frozen_models=false"
            )
        if ahead and (self.optimizer or self.sampler):
            key = "optimizer" if self.optimizer else "sampler"
            raise ValueError(
                f"offload.{key} alternates rollouts and updates, and overlap.ahead runs both at once: set "
                f"overlap.ahead=false, or offload.{key}=false"
            )

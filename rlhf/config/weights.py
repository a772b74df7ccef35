"""The storage of a model's weights, and the adapters that train a few of them: common to policy, critic and others."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf.config.data import Count
from rlhf.config.run import Dtype, ShardingConfig
from rlhf.section import Positive, Section

Weights = Literal["auto", "float32", "bfloat16", "int8", "nf4"]
Export = Literal["merged", "adapter", "both"]
QUANTIZED = ("int8", "nf4")  # kinds that no gradient step can change


class LoraConfig(Section):
    """Low-rank adapters through peft (Hu et al. 2022); the model below them is frozen and may be quantized."""

    r: Count = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """Scale: the adapter is multiplied by alpha / r."""
    target_modules: list[str] | Literal["all-linear", "attention", "mlp"] = "all-linear"
    """The modules that get an adapter: names, or all linear layers except the head, or only the linear layers of
    the attention or of the feed-forward halves."""
    modules_to_save: list[str] = []
    """Modules to train whole and to save beside the adapters, e.g. [embed_tokens]; a scalar head is always trained."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead (rank-stabilized LoRA, Kalajdzievski 2023)."""
    dora: bool = False
    """Train the length of each weight's columns apart from their direction (weight-decomposed LoRA). Layers are then
    not written out, which is slower."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which an input of the adapters is dropped. For SFT, preference losses and reward models; layers
    are then not written out. Its draws depend on the number of processes and on batch.micro_batch_size."""
    start: Literal["merge", "continue"] = "merge"
    """If the model is an adapter's folder. merge: merge it into its base and train a new adapter; continue: train that
    adapter further, with its own rank, alpha and modules, on its base."""

    def check_trainer(self, section: str, *, is_online: bool) -> None:
        """Check that a run of this kind can train the adapters; errors name the `section`."""
        if self.dropout and is_online:
            raise ValueError(
                f"{section}.lora.dropout is {self.dropout}, but dropout would make the first importance ratios differ "
                f"from 1: set {section}.lora.dropout=0"
            )


class WeightsConfig(Section):
    """The storage of one model's weights in memory."""

    precise: ClassVar[tuple[Weights, ...]] = ("auto", "float32")

    weights: Weights = "auto"
    """Storage of the weights. float32; bfloat16: 2 bytes each (trained ones are rounded at random so that small steps
    count on average); int8, nf4: frozen linear layers in 1 byte or about half a byte, embeddings in bfloat16, below
    adapters. auto: float32, and frozen ones in bfloat16 if that changes no result."""

    def check_kept(self, section: str, dtype: str, sharding: ShardingConfig) -> None:
        """Check that weights can be kept like this in a run of this dtype and sharding; errors name the `section`."""
        if self.weights in self.precise:
            return
        if dtype == "float64":
            raise ValueError(
                f"{section}.weights is {self.weights}, but the run computes in float64: set {section}.weights=auto, or "
                "dtype=float32"
            )
        if sharding.uses_deepspeed:
            raise ValueError(
                f"{section}.weights is {self.weights}, which DeepSpeed does not split: set sharding=ddp, or "
                f"{section}.weights=auto"
            )


class TrainedWeightsConfig(WeightsConfig):
    """The storage of a trained model's weights, and the choice of the trained ones."""

    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes more time."""

    @property
    def rounds_trained(self) -> bool:
        """Return whether trained weights are kept in 16 bits, so that each step is rounded."""
        return self.lora is None and self.weights not in self.precise

    def check_trained(self, section: str, dtype: Dtype, sharding: ShardingConfig, *, is_online: bool) -> None:
        """Check that weights kept like this can be trained; errors name the `section`."""
        self.check_kept(section, dtype, sharding)
        if self.lora is not None:
            self.lora.check_trainer(section, is_online=is_online)
            return
        if self.weights in QUANTIZED:
            raise ValueError(
                f"{section}.weights is {self.weights}, which cannot be trained itself: set {section}.lora.r=16 to "
                f"train adapters over it, or {section}.weights=bfloat16"
            )

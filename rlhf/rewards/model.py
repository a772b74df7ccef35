"""A reward source that is a trained reward model, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from rlhf.rewards.source import RewardSource, Source, SourceContext


class ModelSource(Source):
    """A trained reward model."""

    is_learned: ClassVar[bool] = True
    asks_on_main_rank: ClassVar[bool] = False  # each rank scores its share

    type: Literal["model"] = "model"
    path: str
    """A reward-model run (also an ensemble), or a sequence-classification model with one label."""
    micro_batch_size: Annotated[int, Ge(1)] = 64
    """Rows per forward pass; affects memory only."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: bf16 arithmetic (on a CUDA GPU also bf16 matrices); scores change by rounding."""
    weights: Literal["auto", "float32", "bfloat16", "int8", "nf4"] = "auto"
    """How the weights are kept; see policy.weights. With any value but auto, an adapter's folder is not merged, and its
    base is shared with the policy, critic and reference that have the same one."""
    how: Literal["mean", "minimum", "mean_minus_std"] = "mean"
    """Combination of the members' scores, if path holds an ensemble (ensemble=4)."""
    std_coef: Annotated[float, Ge(0)] = 1.0
    """c in mean - c * std, for mean_minus_std."""

    @property
    def critic_start(self) -> str:
        """Return the path: a critic can start from the reward model's weights."""
        return self.path

    def model_paths(self) -> Mapping[str, str]:
        """Return the path, by its field."""
        return {"path": self.path}

    def describe(self) -> str:
        """Return the path."""
        return self.path

    def build(self, context: SourceContext) -> RewardSource:
        """Return the loaded model.

        Raises:
            ModelError: it cannot be loaded.
        """
        return context.load_model(self, context)

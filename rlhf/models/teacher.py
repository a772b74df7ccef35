"""A frozen causal LM as a teacher: its next-token distributions at completion tokens, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.divergence import TeacherTokens
from rlhf.batching import select_live
from rlhf.config.sections import LogProbs, Packing
from rlhf.models.backbone import CausalLM, autocast
from rlhf.models.logprobs import (
    Sequences,
    at_least_float32,
    completion_logits,
    in_chunks,
    logits_function,
    output_head,
)
from rlhf.models.policy_models import predictor_hidden_states
from rlhf.types import Completions, Demonstrations


@dataclass(frozen=True)
class Logits:
    """A model's answers for the live tokens of a batch; a `rlhf.teachers.teacher.Targets`.

    `source` are its hidden states, from which `head` makes logits when they are asked for.
    """

    source: Float[Tensor, "M D"]
    head: Callable[[Tensor], Tensor]
    temperature: float
    arithmetic: Callable[[], AbstractContextManager[None]]

    @torch.no_grad()
    def part(self, tokens: slice) -> TeacherTokens:
        """Compute the log-probabilities of all tokens, in float32 at least."""
        with self.arithmetic():
            logits = at_least_float32(self.head(self.source[tokens]))
        return TeacherTokens(logprobs=(logits / self.temperature).log_softmax(dim=-1))


@dataclass(frozen=True, kw_only=True)
class LocalTeacher:
    """A model in this process that answers as a teacher; a `rlhf.teachers.teacher.TeacherSource`."""

    model: CausalLM
    dtype: str
    device: torch.device
    temperature: float
    log_probs: LogProbs = "auto"
    packing: Packing = "auto"

    @property
    def parameters(self) -> int:
        """Return the number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @torch.no_grad()
    def __call__(self, batch: Completions | Demonstrations) -> Logits:
        """Run the model over a batch up to its head; if its forward does more to the logits, to the logits."""
        with self._arithmetic():
            if in_chunks(self.model, self.log_probs):
                states = predictor_hidden_states(self.model, batch, self.packing)
                head = logits_function(output_head(self.model), self.device, float32_head=self.dtype == "bfloat16")
                return Logits(states, head, self.temperature, self._arithmetic)
            fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
            logits, _ = completion_logits(
                self.model,
                Sequences.join(*fields),
                batch.completion_ids.shape[1],
                float32_head=self.dtype == "bfloat16",
            )
        live = select_live(logits, batch.completion_mask)
        return Logits(live, lambda logits: logits, self.temperature, self._arithmetic)

    def _arithmetic(self) -> AbstractContextManager[None]:
        """Return the autocast context of the teacher's dtype, which the policy's does not change."""
        if self.dtype == "bfloat16":
            return autocast(self.dtype, self.device)
        return torch.autocast(device_type=self.device.type, enabled=False)

"""Policy and reference on the same completion tokens: log-probabilities and exact KL, few logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import starmap

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf.algo.kl import kl_of_distributions
from rlhf.config.sections import LogProbs, Packing
from rlhf.models.backbone import CausalLM, body_of
from rlhf.models.head import NUMBERS, chunk_rows, logits_of, output_head, reading, wide
from rlhf.models.lean import chosen_states, is_lean
from rlhf.models.logprobs import Sequences, completion_logits, in_chunks
from rlhf.models.rows import body_inputs, lay_for
from rlhf.types import Completions

Said = tuple[Tensor, Tensor, Tensor]  # of tokens [M]: log-probability under the policy and the reference, and the KL


@dataclass(frozen=True)
class BesideReference:
    """Policy and reference on the same completion tokens; nats, zero outside the mask."""

    logprobs: Float[Tensor, "B T"]
    ref_logprobs: Float[Tensor, "B T"]
    kl: Float[Tensor, "B T"]  # KL(policy || reference) of the next token, over the whole vocabulary


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two models are compared; no logits of the whole batch are ever made, of neither model."""

    policy: CausalLM
    reference: CausalLM
    temperature: float
    as_reference: Callable[[], AbstractContextManager[object]]  # inside, `reference` is the reference: an adapter off
    whole: Callable[[torch.nn.Module], AbstractContextManager[None]]  # inside, all weights of a head are here
    log_probs: LogProbs = "auto"
    packing: Packing = "auto"
    float32_head: bool = False

    def __call__(self, batch: Completions) -> BesideReference:
        """Compare the models on the live tokens of `batch`."""
        chunked = [in_chunks(model, self.log_probs) for model in (self.policy, self.reference)]
        mask = batch.completion_mask
        # Made at once: numbers kept of each chunk would lie between the logits of others, and break up the heap.
        columns = torch.empty(3, int(mask.sum()), dtype=self._dtype(), device=mask.device)
        done = 0
        for tokens in self._by_tokens(batch) if all(chunked) else self._by_rows(batch):
            count = tokens[0].shape[0]
            for column, numbers in zip(columns, tokens, strict=True):
                column[done : done + count] = numbers
            done += count
        return BesideReference(*(column.new_zeros(mask.shape).masked_scatter(mask, column) for column in columns))

    def _by_tokens(self, batch: Completions) -> Iterator[Said]:
        """From hidden states of both models: logits are there for a few tokens at a time."""
        heads = output_head(self.policy), output_head(self.reference)
        states = chosen_hidden(self.policy, batch, self.packing)
        with self.as_reference():
            ref_states = chosen_hidden(self.reference, batch, self.packing)
        ids, device = batch.completion_ids[batch.completion_mask], states.device
        with self.whole(heads[0]), self.whole(heads[1]):
            say, say_reference = (logits_of(head, device, float32_head=self.float32_head) for head in heads)
            size = chunk_rows(self._vocabulary(), device)
            parts = zip(states.split(size), ref_states.split(size), ids.split(size), strict=True)
            for some, ref_some, some_ids in parts:
                logits = say(some)
                with self.as_reference():
                    ref_logits = say_reference(ref_some)
                yield self._compared(logits, ref_logits, some_ids)

    def _by_rows(self, batch: Completions) -> Iterator[Said]:
        """From logits that the models' own forward must make: of few enough rows at a time, one at least."""
        length = batch.completion_ids.shape[1]
        budget = NUMBERS.get(batch.completion_ids.device.type, 2**23)
        for part in batch.split(max(1, budget // (length * self._vocabulary()))):
            ids, mask = part.completion_ids, part.completion_mask
            sequences = Sequences.join(part.prompt_ids, part.prompt_mask, ids, mask)
            logits, _ = completion_logits(self.policy, sequences, length, float32_head=self.float32_head)
            with self.as_reference():
                ref_logits, _ = completion_logits(self.reference, sequences, length, float32_head=self.float32_head)
            size = chunk_rows(self._vocabulary(), logits.device)
            parts = (tensor[mask].split(size) for tensor in (logits, ref_logits, ids))
            yield from starmap(self._compared, zip(*parts, strict=True))

    def _compared(self, logits: Float[Tensor, "M V"], ref_logits: Float[Tensor, "M V"], ids: Tensor) -> Said:
        log_pi, log_ref = ((wide(said) / self.temperature).log_softmax(dim=-1) for said in (logits, ref_logits))
        chosen, ref_chosen = (logs.gather(1, ids[:, None]).squeeze(1) for logs in (log_pi, log_ref))
        return chosen, ref_chosen, kl_of_distributions(log_pi, log_ref)

    def _dtype(self) -> torch.dtype:
        return torch.promote_types(next(self.policy.parameters()).dtype, torch.float32)

    def _vocabulary(self) -> int:
        embeddings = self.policy.get_input_embeddings()
        return int(embeddings.num_embeddings)  # type: ignore[arg-type]


def chosen_hidden(model: CausalLM, batch: Completions, packing: Packing) -> Float[Tensor, "M D"]:
    """Compute the hidden states that reach the LM head where live completion tokens are chosen, in the mask's order."""
    body, mask, length = body_of(model), batch.completion_mask, batch.completion_ids.shape[1]
    fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, mask
    rows = lay_for(body, *fields) if packing == "auto" else None
    if rows is not None and is_lean(body):
        return chosen_states(body, rows, rows.choosers)
    states: list[Tensor] = []

    def read(_: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        chosen = hidden[:, -length - 1 : -1][mask] if rows is None else hidden[0].index_select(0, rows.choosers)
        states.append(chosen)
        return chosen

    with reading(output_head(model), read):
        model(**(Sequences.join(*fields).inputs() if rows is None else body_inputs(rows)))
    return states[0]

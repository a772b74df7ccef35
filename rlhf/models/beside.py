"""Compare policy and reference on the same completion tokens, without logits of the whole batch."""

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

TokenNumbers = tuple[Tensor, Tensor, Tensor]  # per token [M]: log-prob under policy and reference, and the KL


@dataclass(frozen=True)
class BesideReference:
    """What policy and reference assign to the same completion tokens: nats, zero outside the mask."""

    logprobs: Float[Tensor, "B T"]
    ref_logprobs: Float[Tensor, "B T"]
    kl: Float[Tensor, "B T"]  # KL(policy || reference) of the next token, over the whole vocabulary


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of two models; logits of the whole batch are never made, for either of them."""

    policy: CausalLM
    reference: CausalLM
    temperature: float
    as_reference: Callable[[], AbstractContextManager[object]]  # in it `reference` is the reference: adapter off
    whole: Callable[[torch.nn.Module], AbstractContextManager[None]]  # in it a head's weights are whole (ZeRO-3)
    log_probs: LogProbs = "auto"
    packing: Packing = "auto"
    float32_head: bool = False

    def __call__(self, batch: Completions) -> BesideReference:
        """Compare the models on the live tokens of `batch`."""
        chunked = [in_chunks(model, self.log_probs) for model in (self.policy, self.reference)]
        mask = batch.completion_mask
        # Allocated once: results kept from each chunk would lie between the logits of others and fragment the heap.
        columns = torch.empty(3, int(mask.sum()), dtype=self._dtype(), device=mask.device)
        done = 0
        for chunk in self._by_tokens(batch) if all(chunked) else self._by_rows(batch):
            count = chunk[0].shape[0]
            for column, values in zip(columns, chunk, strict=True):
                column[done : done + count] = values
            done += count
        return BesideReference(*(column.new_zeros(mask.shape).masked_scatter(mask, column) for column in columns))

    def _by_tokens(self, batch: Completions) -> Iterator[TokenNumbers]:
        """Compare from the hidden states of both models, with logits for a few tokens at a time."""
        heads = output_head(self.policy), output_head(self.reference)
        states = chosen_hidden(self.policy, batch, self.packing)
        with self.as_reference():
            ref_states = chosen_hidden(self.reference, batch, self.packing)
        ids, device = batch.completion_ids[batch.completion_mask], states.device
        with self.whole(heads[0]), self.whole(heads[1]):
            to_logits, to_ref_logits = (logits_of(head, device, float32_head=self.float32_head) for head in heads)
            size = chunk_rows(self._vocabulary(), device)
            chunks = zip(states.split(size), ref_states.split(size), ids.split(size), strict=True)
            for chunk, ref_chunk, chunk_ids in chunks:
                logits = to_logits(chunk)
                with self.as_reference():
                    ref_logits = to_ref_logits(ref_chunk)
                yield self._compare(logits, ref_logits, chunk_ids)

    def _by_rows(self, batch: Completions) -> Iterator[TokenNumbers]:
        """Compare from logits that the models' own forward makes, for a few rows at a time (at least one)."""
        length = batch.completion_ids.shape[1]
        budget = NUMBERS.get(batch.completion_ids.device.type, 2**23)
        for part in batch.split(max(1, budget // (length * self._vocabulary()))):
            ids, mask = part.completion_ids, part.completion_mask
            sequences = Sequences.join(part.prompt_ids, part.prompt_mask, ids, mask)
            logits, _ = completion_logits(self.policy, sequences, length, float32_head=self.float32_head)
            with self.as_reference():
                ref_logits, _ = completion_logits(self.reference, sequences, length, float32_head=self.float32_head)
            size = chunk_rows(self._vocabulary(), logits.device)
            chunks = (tensor[mask].split(size) for tensor in (logits, ref_logits, ids))
            yield from starmap(self._compare, zip(*chunks, strict=True))

    def _compare(self, logits: Float[Tensor, "M V"], ref_logits: Float[Tensor, "M V"], ids: Tensor) -> TokenNumbers:
        log_pi, log_ref = ((wide(raw) / self.temperature).log_softmax(dim=-1) for raw in (logits, ref_logits))
        logprobs, ref_logprobs = (logs.gather(1, ids[:, None]).squeeze(1) for logs in (log_pi, log_ref))
        return logprobs, ref_logprobs, kl_of_distributions(log_pi, log_ref)

    def _dtype(self) -> torch.dtype:
        return torch.promote_types(next(self.policy.parameters()).dtype, torch.float32)

    def _vocabulary(self) -> int:
        embeddings = self.policy.get_input_embeddings()
        return int(embeddings.num_embeddings)  # type: ignore[arg-type]


def chosen_hidden(model: CausalLM, batch: Completions, packing: Packing) -> Float[Tensor, "M D"]:
    """Compute the hidden states from which the LM head predicts live completion tokens, in the mask's order."""
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

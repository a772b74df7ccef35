"""The models of a run (policy, reference, critic), and log-probabilities, values and KL computed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from rlhf.algo.divergence import TeacherTokens
from rlhf.algo.kl import kl_of_distributions
from rlhf.algo.support import log_mass, restricted
from rlhf.batching import on_host, place_live, select_live
from rlhf.config.sections import LogProbs, Packing
from rlhf.models.adapters import is_adapted
from rlhf.models.backbone import CausalLM, autocast, body_of, weight_dtype
from rlhf.models.kernels.llama.forward import predictor_states, supports_fused
from rlhf.models.kernels.packing import (
    pack_for,
    packed_inputs,
    packing_unsupported_reason,
    takes_varlen,
    vocabulary_size,
)
from rlhf.models.logprobs import (
    MAX_CHUNK_LOGITS,
    Compare,
    FastWays,
    Sequences,
    TokenOutputs,
    at_least_float32,
    chunk_rows,
    chunking_unsupported_reason,
    completion_logits,
    completion_outputs,
    in_chunks,
    intercept_head,
    logits_function,
    of_bodies,
    of_policy,
    output_head,
)
from rlhf.models.scalar_head import ScalarHeadModel, completion_values
from rlhf.models.stored import round_matrices, store_exact_matrices
from rlhf.objective import Outputs
from rlhf.runtime.engine import Engine
from rlhf.teachers.teacher import TeacherSource
from rlhf.types import Completions, Demonstrations

TokenNumbers = tuple[Tensor, Tensor, Tensor]  # per token [M]: log-prob under policy and reference, and the KL


@runtime_checkable
class ReadsTeacher(Protocol):
    """The part of a loss that compares distributions with a teacher's."""

    @property
    def reads_teacher(self) -> bool:
        """Return whether the loss makes this comparison."""

    def against_teacher(self, log_pi: Tensor, teacher: TeacherTokens) -> Tensor:
        """Compute K numbers of each token."""


@dataclass(frozen=True)
class ReferenceComparison:
    """Policy and reference compared on the same completion tokens: nats, zero outside the mask."""

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

    def __call__(self, batch: Completions) -> ReferenceComparison:
        """Compare the models on the live tokens of `batch`."""
        chunked = [in_chunks(model, self.log_probs) for model in (self.policy, self.reference)]
        mask = batch.completion_mask
        # Allocated once: results kept from each chunk would lie between the logits of others and fragment the heap.
        columns = torch.empty(3, int(on_host(mask).sum()), dtype=self._dtype(), device=mask.device)
        done = 0
        for chunk in self._by_tokens(batch) if all(chunked) else self._by_rows(batch):
            count = chunk[0].shape[0]
            for column, values in zip(columns, chunk, strict=True):
                column[done : done + count] = values
            done += count
        return ReferenceComparison(*(place_live(column, mask) for column in columns))

    @property
    def _is_itself(self) -> bool:
        """Return whether the policy is its own reference, so that one pass gives both."""
        return self.policy is self.reference and self.as_reference is nullcontext

    def _by_tokens(self, batch: Completions) -> Iterator[TokenNumbers]:
        """Compare from the hidden states of both models, with logits for a few tokens at a time."""
        heads = output_head(self.policy), output_head(self.reference)
        states = predictor_hidden_states(self.policy, batch, self.packing)
        ref_states = states
        if not self._is_itself:
            with self.as_reference():
                ref_states = predictor_hidden_states(self.reference, batch, self.packing)
        ids, device = select_live(batch.completion_ids, batch.completion_mask), states.device
        with self.whole(heads[0]), self.whole(heads[1]):
            to_logits, to_ref_logits = (logits_function(head, device, float32_head=self.float32_head) for head in heads)
            size = chunk_rows(self._vocabulary(), device)
            supports = _support_chunks(batch, size, -(-len(ids) // size))
            chunks = zip(states.split(size), ref_states.split(size), ids.split(size), supports, strict=True)
            for chunk, ref_chunk, chunk_ids, support in chunks:
                logits = to_logits(chunk)
                ref_logits = logits
                if not self._is_itself:
                    with self.as_reference():
                        ref_logits = to_ref_logits(ref_chunk)
                yield self._compare(logits, ref_logits, chunk_ids, support)

    def _by_rows(self, batch: Completions) -> Iterator[TokenNumbers]:
        """Compare from logits that the models' own forward makes, for a few rows at a time (at least one)."""
        length = batch.completion_ids.shape[1]
        budget = MAX_CHUNK_LOGITS.get(batch.completion_ids.device.type, 2**23)
        for part in batch.split(max(1, budget // (length * self._vocabulary()))):
            ids, mask = part.completion_ids, part.completion_mask
            sequences = Sequences.join(part.prompt_ids, part.prompt_mask, ids, mask)
            logits, _ = completion_logits(self.policy, sequences, length, float32_head=self.float32_head)
            ref_logits = logits
            if not self._is_itself:
                with self.as_reference():
                    ref_logits, _ = completion_logits(self.reference, sequences, length, float32_head=self.float32_head)
            size = chunk_rows(self._vocabulary(), logits.device)
            chunks = [select_live(tensor, mask).split(size) for tensor in (logits, ref_logits, ids)]
            supports = _support_chunks(part, size, len(chunks[0]))
            yield from starmap(self._compare, zip(*chunks, supports, strict=True))

    def _compare(
        self,
        logits: Float[Tensor, "M V"],
        ref_logits: Float[Tensor, "M V"],
        ids: Tensor,
        support: UInt8[Tensor, "M W"] | None,
    ) -> TokenNumbers:
        log_pi, log_ref = (
            (at_least_float32(raw) / self.temperature).log_softmax(dim=-1) for raw in (logits, ref_logits)
        )
        if support is not None:
            log_pi, log_ref = restricted(log_pi, support), restricted(log_ref, support)
        logprobs, ref_logprobs = (logs.gather(1, ids[:, None]).squeeze(1) for logs in (log_pi, log_ref))
        return logprobs, ref_logprobs, kl_of_distributions(log_pi, log_ref)

    def _dtype(self) -> torch.dtype:
        return torch.promote_types(next(self.policy.parameters()).dtype, torch.float32)

    def _vocabulary(self) -> int:
        return vocabulary_size(self.policy)


def _support_chunks(batch: Completions, size: int, count: int) -> Sequence[Tensor | None]:
    """Return which tokens could be drawn, for `size` live tokens at a time; None in each of `count` places: all."""
    if batch.sampler_support is None:
        return [None] * count
    return list(select_live(batch.sampler_support, batch.completion_mask).split(size))


def predictor_hidden_states(
    model: CausalLM, batch: Completions | Demonstrations, packing: Packing
) -> Float[Tensor, "M D"]:
    """Compute the hidden states from which the LM head predicts live completion tokens, in the mask's order."""
    body, mask, length = body_of(model), batch.completion_mask, batch.completion_ids.shape[1]
    fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, mask
    rows = pack_for(body, *fields) if packing == "auto" else None
    if rows is not None and supports_fused(body):
        return predictor_states(body, rows, rows.predictor_index)
    states: list[Tensor] = []

    def read(_: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        if rows is None:
            chosen = select_live(hidden[:, -length - 1 : -1], mask)
        else:
            chosen = hidden[0].index_select(0, rows.predictor_index)
        states.append(chosen)
        return chosen

    with intercept_head(output_head(model), read):
        model(**(Sequences.join(*fields).inputs() if rows is None else packed_inputs(rows)))
    return states[0]


class SharedValueHead(nn.Module):
    """A value head on the policy's own hidden states, initialized to zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """Compute the value of each hidden state."""
        values: Tensor = self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
        return values


@dataclass
class Models:
    """Policy, reference and critic. The reference is a model, the policy with its adapter off, or absent."""

    policy: CausalLM
    temperature: float
    dtype: str
    device: torch.device
    reference: CausalLM | None = None
    adapter_off_is_reference: bool = False
    critic: ScalarHeadModel | None = None
    shared_head: SharedValueHead | None = None
    teacher: TeacherSource | None = None  # whose distributions the loss is compared with
    reference_is_teacher: bool = False
    entropy_gradient: bool = False
    log_probs: LogProbs = "auto"
    packing: Packing = "auto"
    float32_head: bool = True  # compute logits in float32 in a bfloat16 run too
    update_gives_old_logprobs: bool = False  # from the pass that is trained on, in which the ratio is then 1
    engine: Engine = field(default_factory=lambda: Engine(torch.device("cpu")))

    @property
    def has_critic(self) -> bool:
        """Return whether there is a critic: a model, or a head on the policy."""
        return self.critic is not None or self.shared_head is not None

    @property
    def bodies(self) -> list[nn.Module]:
        """Return the transformers, without their heads, of policy, reference and critic, as far as there are any."""
        bodies = [body_of(model) for model in (self.policy, self.reference) if model is not None]
        return bodies if self.critic is None else [*bodies, self.critic.classifier.base_model]

    def fast_ways(self) -> FastWays:
        """Find out by trial which fast paths over completions the models support; call it while weights are whole.

        Raises:
            ModelError: a fast path that was requested by name is not available.
        """
        fast_ways = of_policy(self.policy, log_probs=self.log_probs, packing=self.packing)
        if self.critic is not None:
            critic = of_bodies([self.critic.classifier.base_model], packing=self.packing)
            for way, is_on in critic.ways.items():
                fast_ways.ways[way] = fast_ways.ways[way] and is_on
            fast_ways.reasons += critic.reasons
        bodies = [body_of(self.policy), *([] if self.critic is None else [self.critic.classifier.base_model])]
        fast_ways.with_varlen(bodies, self.dtype, self.device)
        return fast_ways.under_zero(self.engine.sharding.stage)

    def outputs(self, batch: Completions, *, compare: Compare | None = None) -> Outputs:
        """Compute log-probabilities, entropy and values of the trained models, with gradients."""
        tokens = self._tokens(self.policy, batch, with_hidden=self.shared_head is not None, compare=compare)
        return Outputs(
            logprobs=tokens.logprobs,
            entropy=tokens.entropy,
            values=self._values(batch, tokens.hidden),
            teacher=tokens.compared,
        )

    def values(self, batch: Completions) -> Float[Tensor, "B T"]:
        """Compute the critic's values alone; zeros without a critic.

        Raises:
            RuntimeError: the critic is a head on the policy, without a backbone of its own.
        """
        if self.shared_head is not None:
            raise RuntimeError("a shared critic has no pass of its own")
        return self._values(batch, None)

    def policy_tokens(
        self,
        batch: Completions | Demonstrations,
        *,
        temperature: float | None = None,
        compare: Compare | None = None,
    ) -> TokenOutputs:
        """Compute log-probabilities and entropy under the policy, at `temperature` (None: the run's)."""
        return self._tokens(self.policy, batch, temperature=temperature, compare=compare)

    def comparison(self, loss: ReadsTeacher, batch: Completions | Demonstrations) -> Compare | None:
        """Let the teacher read the batch, and return the loss's comparison with it; None if the loss reads no teacher.

        Raises:
            RewardError: the teacher does not answer.
        """
        if not loss.reads_teacher:
            return None
        assert self.teacher is not None, "the configuration has a teacher for such a loss"
        targets = self.teacher(batch)
        return lambda log_pi, tokens: loss.against_teacher(log_pi, targets.part(tokens))

    def reference_logprobs(self, batch: Completions | Demonstrations) -> Float[Tensor, "B T"]:
        """Compute log pi_ref of the completion tokens.

        Raises:
            RuntimeError: the run has no reference.
        """
        reference, as_reference = self._reference()
        with as_reference():
            return self._tokens(reference, batch).logprobs

    @torch.no_grad()
    def compare_to_reference(self, batch: Completions) -> ReferenceComparison:
        """Compute log-probabilities under policy and reference, and their KL over the whole vocabulary; one pass each.

        Raises:
            RuntimeError: the run has no reference.
        """
        reference, as_reference = self._reference()
        compare = Comparison(
            policy=self.policy,
            reference=reference,
            temperature=self.temperature,
            as_reference=as_reference,
            whole=self.engine.whole_weights,
            log_probs=self.log_probs,
            packing=self.packing,
            float32_head=self.float32_head and self.dtype == "bfloat16",
        )
        with self.autocast():
            return compare(batch)

    def _reference(self) -> tuple[CausalLM, Callable[[], AbstractContextManager[object]]]:
        """Return the model that is the reference, and the context in which it is."""
        if self.reference is not None:
            return self.reference, nullcontext
        if not self.adapter_off_is_reference:
            raise RuntimeError("this run has no reference model")
        assert is_adapted(self.policy)
        return self.policy, self.policy.disable_adapter

    @property
    def has_reference(self) -> bool:
        """Return whether there is a reference to measure a KL to."""
        return self.reference is not None or self.adapter_off_is_reference

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of the run's dtype."""
        return autocast(self.dtype, self.device)

    def _values(self, batch: Completions, hidden: Float[Tensor, "B T D"] | None) -> Float[Tensor, "B T"]:
        if self.shared_head is not None:
            assert hidden is not None
            with self.autocast():
                return torch.where(batch.completion_mask, self.shared_head(hidden), 0.0)
        if self.critic is None:
            return torch.zeros(batch.completion_ids.shape, dtype=weight_dtype(self.dtype), device=self.device)
        with self.autocast():
            return completion_values(
                self.critic, batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
            )

    def _tokens(
        self,
        model: CausalLM,
        batch: Completions | Demonstrations,
        *,
        with_hidden: bool = False,
        temperature: float | None = None,
        compare: Compare | None = None,
    ) -> TokenOutputs:
        support = batch.sampler_support if isinstance(batch, Completions) else None
        if support is not None:
            assert compare is None, "the configuration refuses a teacher if sampling leaves tokens out"
            compare = masses_of(select_live(support, batch.completion_mask))
        with self.autocast():
            tokens = completion_outputs(
                model,
                batch.prompt_ids,
                batch.prompt_mask,
                batch.completion_ids,
                batch.completion_mask,
                temperature=self.temperature if temperature is None else temperature,
                entropy_gradient=self.entropy_gradient,
                with_hidden=with_hidden,
                log_probs=self.log_probs,
                packing=self.packing,
                float32_head=self.float32_head and self.dtype == "bfloat16",
                compare=compare,
            )
        if support is None:
            return tokens
        assert tokens.compared is not None
        return replace(tokens, logprobs=tokens.logprobs - tokens.compared[0], compared=None)


def masses_of(support: UInt8[Tensor, "M W"]) -> Compare:
    """Return a function that computes log Σ_{j in S} pi(j) of live tokens, whose supports are given in their order."""
    return lambda log_pi, part: log_mass(log_pi, support[part])[None]


class Ema:
    """An exponential moving average of a module's trainable weights; each process averages the part it holds."""

    def __init__(self, module: nn.Module, decay: float, engine: Engine | None = None) -> None:
        """Start from the module's current weights; `engine` is the one that `module` was handed to before."""
        self.decay = decay
        self.module = module
        self.engine = engine or Engine(torch.device("cpu"))
        self._live = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shadow = self._parts()

    def update(self) -> None:
        """Update the average: shadow <- decay * shadow + (1 - decay) * live."""
        for name, parameter in self._live.items():
            self.shadow[name].lerp_(self.engine.part(parameter).to(self.shadow[name].dtype), 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the module the averaged weights within this context, and its own ones back afterwards."""
        live = self._parts()
        self._copy(self.shadow)
        try:
            yield
        finally:
            self._copy(live)

    def load(self, shadow: Mapping[str, Tensor]) -> None:
        """Restore a saved average, given as whole weights (see `saved`)."""
        for name, value in shadow.items():
            self.shadow[name].copy_(self.engine.part_of(self._live[name], value))

    def saved(self) -> dict[str, Tensor]:
        """Return the average as whole weights, under ZeRO-3 those that this rank owns; every rank must call it."""
        if not self.engine.splits_weights:
            return self.shadow
        with self.applied():
            return self.engine.owned_weights(self.module, trained_only=True)

    def _parts(self) -> dict[str, Tensor]:
        """Return copies of the weights, in float32 also of those that are trained in 16 bits."""
        parts = {name: self.engine.part(p) for name, p in self._live.items()}
        return {
            name: part.to(torch.promote_types(part.dtype, torch.float32), copy=True) for name, part in parts.items()
        }

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor]) -> None:
        self.engine.release_gathered(self.module)
        for name, parameter in self._live.items():
            self.engine.part(parameter).copy_(source[name])


def keep_in_bfloat16(model: CausalLM | ScalarHeadModel, *, dtype: str, device: torch.device) -> int:
    """Convert the matrices of a frozen model to bfloat16; return the bytes saved, 0 if it stays unchanged.

    No result changes by a bit, and at least 2 of 4 bytes of a weight are saved. On a CUDA GPU the run has to compute
    in bfloat16: autocast rounds the matrices the same way for every product. On a CPU only matrices of exact bfloat16
    numbers are converted, embeddings and an LM head too: see `store_exact_matrices`. This is only for families whose
    layers are written out; ZeRO-3 splits such models instead. Norms and scalar heads stay as they are. Call it once
    the model is on its device: it is tried in float32 first.
    """
    body = model.classifier.base_model if isinstance(model, ScalarHeadModel) else body_of(model)
    may_convert = dtype in {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}.get(device.type, ())
    if not may_convert or packing_unsupported_reason(body) or not supports_fused(body):
        return 0
    if not isinstance(model, ScalarHeadModel):
        chunking_unsupported_reason(model)
    if device.type == "cpu":
        return store_exact_matrices(body if isinstance(model, ScalarHeadModel) else model)
    with autocast(dtype, device):
        takes_varlen(body)
    return round_matrices(body)

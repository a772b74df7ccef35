"""The policy's next-token distributions under other weights: exact KL and Fisher-vector products, in chunks of tokens.

Everything here is computed outside autocast, in the dtype of the weights: a second derivative in bfloat16 is noise.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlhf.algo.kl import kl_of_distributions
from rlhf.algo.trust_region import softmax_fisher_product
from rlhf.config.sections import LogProbs, Packing
from rlhf.errors import ModelError
from rlhf.models.backbone import CausalLM
from rlhf.models.kernels.packing import vocabulary_size
from rlhf.models.logprobs import (
    MAX_CHUNK_LOGITS,
    Sequences,
    at_least_float32,
    chunk_rows,
    completion_logits,
    in_chunks,
    output_head,
)
from rlhf.models.policy_models import predictor_hidden_states
from rlhf.types import Experience

Weights = Mapping[str, Tensor]
"""Values of the trainable weights (or of vectors like them), by name."""


class TokenFisher:
    """The distributions of a causal LM at the tokens in the loss, as a function of its trainable weights.

    Logits are made for a chunk of tokens at a time, from hidden states; if the model's forward does more to the
    logits than its head, for a few rows at a time. [B, T, V] is never held at once.
    """

    def __init__(self, model: CausalLM, *, temperature: float, log_probs: LogProbs, packing: Packing) -> None:
        """Prepare the passes; the model's weights must be whole on this rank."""
        self.temperature = temperature
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._vocabulary = vocabulary_size(model)
        self._has_chunks = in_chunks(model, log_probs)
        self._packing = packing
        self._body = _States(model, chunked=self._has_chunks)
        self._head: nn.Module = output_head(model) if self._has_chunks else nn.Identity()
        names = {id(parameter): name for name, parameter in self.named.items()}
        self._head_names = {own: names[id(p)] for own, p in self._head.named_parameters() if id(p) in names}

    @torch.no_grad()
    def kl(self, batch: Experience, old: Weights) -> float:
        """Compute KL(old || live) of the next token, summed over the tokens in the loss, over the whole vocabulary."""
        total = 0.0
        for part in self._parts(batch):
            states, old_states = self._states(part), self._states(part, old)
            for chunk, old_chunk in zip(self._chunks(states), self._chunks(old_states), strict=True):
                log_old, log_new = self._log_pi(self._logits(old_chunk, old)), self._log_pi(self._logits(chunk))
                total += float(kl_of_distributions(log_old, log_new).double().sum())
        return total

    def product(self, batch: Experience, vector: Weights) -> dict[str, Tensor]:
        """Compute F v, summed over the tokens in the loss; F is the Fisher matrix of the next token given its state.

            F v = sum_t J_t' (diag(p_t) - p_t p_t') J_t v

        J v by forward-mode differentiation, without a graph; J' u by an ordinary backward pass, which runs the same
        optimizations as the loss. Against differentiating the KL twice (Pearlmutter 1994) this is the same matrix with
        less memory: no graph of a gradient is kept, and the logits need not all be there at once.

        Raises:
            ModelError: an operation of the model has no forward-mode derivative.
        """
        total = {name: torch.zeros_like(parameter) for name, parameter in self.named.items()}
        for part in self._parts(batch):
            for name, gradient in self._part_product(part, vector).items():
                total[name] += gradient
        return total

    def _part_product(self, part: Experience, vector: Weights) -> dict[str, Tensor]:
        frozen_states, tangent = self._push(part, vector)
        states = self._states(part)
        leaf = states.detach().requires_grad_()
        gradients: dict[str, Tensor] = {}
        pulled: list[Tensor] = []
        head_tangents = {own: vector[name] for own, name in self._head_names.items()}
        for chunk, frozen, slope in zip(
            self._chunks(leaf), self._chunks(frozen_states), self._chunks(tangent), strict=True
        ):
            weighted = self._cotangent(frozen, slope, head_tangents)
            head = [self.named[name] for name in self._head_names.values()]
            logits = self._head(chunk)
            to_states, *to_head = torch.autograd.grad(logits, [chunk, *head], weighted.to(logits.dtype))
            pulled.append(to_states)
            _add(gradients, dict(zip(self._head_names.values(), to_head, strict=True)))
        if not states.requires_grad:  # only the head learns
            return gradients
        inner = torch.autograd.grad(states, list(self.named.values()), torch.cat(pulled), allow_unused=True)
        _add(gradients, {name: g for name, g in zip(self.named, inner, strict=True) if g is not None})
        return gradients

    def _cotangent(self, states: Tensor, tangent: Tensor, head_tangents: Weights) -> Float[Tensor, "m V"]:
        """Return F_softmax J v with respect to the head's own outputs, which the temperature divides."""
        with torch.no_grad(), _forward_differentiable(), forward_ad.dual_level():
            head = dict(self._head.named_parameters())
            duals = {own: forward_ad.make_dual(head[own].detach(), slope) for own, slope in head_tangents.items()}
            outputs = functional_call(self._head, duals, (forward_ad.make_dual(states, tangent),))
            logits, slope = forward_ad.unpack_dual(outputs)
        slope = torch.zeros_like(logits) if slope is None else slope
        scaled = at_least_float32(slope) / self.temperature
        return softmax_fisher_product(self._log_pi(logits), scaled) / self.temperature

    @torch.no_grad()
    def _push(self, part: Experience, vector: Weights) -> tuple[Tensor, Tensor]:
        """Compute the states and their derivative along `vector`, through the model's own modules."""
        try:
            with _forward_differentiable(), forward_ad.dual_level():
                duals = {
                    name: forward_ad.make_dual(p.detach(), vector[name].to(p.dtype)) for name, p in self.named.items()
                }
                states, tangent = forward_ad.unpack_dual(self._body.under(duals, part, packing="off"))
        except (NotImplementedError, RuntimeError) as error:
            if "forward" not in str(error).lower():
                raise
            raise ModelError(
                f"a trust region differentiates {self._body.model_name} in forward mode, which an operation of it does "
                f"not support ({error}): use another policy_loss.type, such as penalty"
            ) from error
        return states, torch.zeros_like(states) if tangent is None else tangent

    def _states(self, part: Experience, weights: Weights | None = None) -> Tensor:
        return self._body.under(weights or {}, part, packing=self._packing)

    def _logits(self, states: Tensor, weights: Weights | None = None) -> Tensor:
        chosen = {} if weights is None else {own: weights[name] for own, name in self._head_names.items()}
        logits: Tensor = functional_call(self._head, chosen, (states,))
        return logits

    def _log_pi(self, logits: Tensor) -> Tensor:
        return (at_least_float32(logits) / self.temperature).log_softmax(dim=-1)

    def _chunks(self, states: Tensor) -> Sequence[Tensor]:
        return torch.split(states, chunk_rows(self._vocabulary, states.device))

    def _parts(self, batch: Experience) -> Iterator[Experience]:
        """Yield the rows with a token in the loss, as many at a time as their logits allow if they are made at once."""
        rows = batch.rows(batch.loss_mask.any(dim=1).nonzero().squeeze(1))
        if not len(rows):
            return
        if self._has_chunks:
            yield rows
            return
        budget = MAX_CHUNK_LOGITS.get(batch.completion_ids.device.type, 2**23)
        yield from rows.split(max(1, budget // (batch.completion_ids.shape[1] * self._vocabulary)))


class _States(nn.Module):
    """The hidden states that predict the tokens in the loss; their logits if they cannot be made in chunks."""

    def __init__(self, model: CausalLM, *, chunked: bool) -> None:
        super().__init__()
        self.model = model
        self.chunked = chunked

    @property
    def model_name(self) -> str:
        """Return the name of the model's class, for messages."""
        return type(self.model).__name__

    def under(self, weights: Weights, batch: Experience, *, packing: Packing) -> Float[Tensor, "M D"]:
        """Compute the states with these values of some weights, and the live ones of the others."""
        renamed = {f"model.{name}": value for name, value in weights.items()}
        states: Tensor = functional_call(self, renamed, (batch, packing))
        return states

    def forward(self, batch: Experience, packing: Packing) -> Float[Tensor, "M D"]:
        """Compute the states of all live tokens, and keep the states of the tokens in the loss."""
        mask = batch.completion_mask
        if self.chunked:
            return predictor_hidden_states(self.model, batch, packing)[batch.loss_mask[mask]]
        sequences = Sequences.join(batch.prompt_ids, batch.prompt_mask, batch.completion_ids, mask)
        logits, _ = completion_logits(self.model, sequences, mask.shape[1])
        return logits[batch.loss_mask]


@contextmanager
def _forward_differentiable() -> Iterator[None]:
    """Compute attention by its definition: the fused kernels have no forward-mode derivative."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # torch imports its forward-mode rules at the first use, and scripts them with its own deprecated functions.
        warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated", category=DeprecationWarning)
        yield


def _add(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value

"""Log-probabilities and entropies of completions, in one forward pass: padded or packed, whole or in chunks of tokens.

The LM head goes from hidden states to log-probabilities without the logits of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rlhf.algo.divergence import LOWEST
from rlhf.batching import place_live, select_live
from rlhf.config.sections import LogProbs, Packing
from rlhf.errors import ModelError
from rlhf.models.adapters import base_model
from rlhf.models.backbone import CausalLM, body_of
from rlhf.models.kernels.attention import PackedBatch
from rlhf.models.kernels.cast import HALF_DTYPES, cast_weight, pad_rows_for_onednn
from rlhf.models.kernels.llama.forward import fused_unsupported_reason, predictor_states, supports_fused
from rlhf.models.kernels.packing import (
    build_probe,
    full_precision,
    pack_for,
    packed_inputs,
    packing_unsupported_reason,
    probe_tokens,
    varlen_unsupported_reason,
)
from rlhf.runtime.device import is_device_error


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """The outputs of a model for each completion token; zero outside the mask."""

    logprobs: Float[Tensor, "B T"]  # nats, at the sampling temperature
    entropy: Float[Tensor, "B T"]  # nats, of the whole next-token distribution
    first_choice: Bool[Tensor, "B T"]  # the token is the model's most likely one
    hidden: Float[Tensor, "B T D"] | None  # last hidden state that predicts the token, on request
    compared: Float[Tensor, "K B T"] | None = None  # the numbers of `compare` for its distribution, on request


Compare = Callable[[Float[Tensor, "N V"], slice], Float[Tensor, "K N"]]
"""Computes K numbers of each live token from the log-probabilities of all tokens there; the slice says which tokens of
the batch they are, row after row. It is called again in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Prompts joined with their completions: left padding, prompt, completion, right padding."""

    input_ids: Int[Tensor, "B L"]
    attention_mask: Int[Tensor, "B L"]
    position_ids: Int[Tensor, "B L"]  # 0 at the first live token, with any padding

    @classmethod
    def join(
        cls,
        prompt_ids: Int[Tensor, "B P"],
        prompt_mask: Bool[Tensor, "B P"],
        completion_ids: Int[Tensor, "B T"],
        completion_mask: Bool[Tensor, "B T"],
    ) -> Sequences:
        """Join prompts and completions; positions count live tokens only."""
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        return cls(
            input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(dim=1) - 1).clamp(min=0),
        )

    def inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of a model's forward pass."""
        return {**vars(self), "use_cache": False}


def completion_outputs(
    model: CausalLM,
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    temperature: float,
    entropy_gradient: bool = False,
    with_hidden: bool = False,
    log_probs: LogProbs = "auto",
    packing: Packing = "auto",
    float32_head: bool = False,
    compare: Compare | None = None,
) -> TokenOutputs:
    """Compute the log-probability and entropy of every completion token given all tokens before it.

    The logits that predict completion token t stand one position before it. They are divided by `temperature` and
    normalized in float32 at least. Only live tokens reach the LM head, a chunk at a time; all positions do at once if
    `log_probs` is naive, or if the model's forward does more to the logits than its head. Rows go
    through the model without padding if `packing` is auto and the model allows it.
    `float32_head` computes logits in float32 in a bfloat16 run too, in which the head's own have 8 bits.
    `compare` is asked about every live token besides.

    Raises:
        ModelError: `log_probs` is chunked, but the model's forward does more to the logits than its head.
    """
    fields = prompt_ids, prompt_mask, completion_ids, completion_mask
    if in_chunks(model, log_probs):
        rows = pack_for(body_of(model), *fields) if packing == "auto" else None
        reader = _TokenReader(
            completion_ids, completion_mask, temperature, entropy_gradient, with_hidden, float32_head, compare
        )
        return reader.padded(model, Sequences.join(*fields)) if rows is None else reader.packed(model, rows)
    sequences = Sequences.join(*fields)
    logits, hidden = completion_logits(
        model, sequences, completion_ids.shape[1], with_hidden=with_hidden, float32_head=float32_head
    )
    return token_outputs(
        logits,
        completion_ids,
        completion_mask,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
        hidden=hidden,
        compare=compare,
    )


def in_chunks(model: CausalLM, log_probs: LogProbs) -> bool:
    """Return whether the logits of `model` are computed a chunk at a time.

    Raises:
        ModelError: `log_probs` is chunked, but the model does not allow it.
    """
    reason = "" if log_probs == "naive" else chunking_unsupported_reason(model)
    if reason and log_probs == "chunked":
        raise ModelError(f"policy.log_probs is chunked, but {reason}: set policy.log_probs=auto")
    return log_probs != "naive" and not reason


@dataclass(frozen=True)
class _TokenReader:
    """Completion tokens and what to compute for them, a chunk of logits at a time."""

    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    temperature: float
    entropy_gradient: bool
    with_hidden: bool
    float32_head: bool
    compare: Compare | None = None

    def padded(self, model: CausalLM, sequences: Sequences) -> TokenOutputs:
        """Compute the outputs from padded rows; each token is predicted one position before its own."""
        length = self.ids.shape[1]
        return self._outputs(
            model, sequences.inputs(), lambda hidden: select_live(hidden[:, -length - 1 : -1], self.mask)
        )

    def packed(self, model: CausalLM, rows: PackedBatch) -> TokenOutputs:
        """Compute the outputs from rows without padding."""
        body = body_of(model)
        if not supports_fused(body):
            return self._outputs(
                model, packed_inputs(rows), lambda hidden: hidden[0].index_select(0, rows.predictor_index)
            )
        head, states = output_head(model), predictor_states(body, rows, rows.predictor_index)
        return self._scatter(self._statistics(head, head, states), states)

    def _outputs(self, model: CausalLM, inputs: dict[str, Any], live: Callable[[Tensor], Tensor]) -> TokenOutputs:
        head = output_head(model)

        def read(plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
            return self._statistics(head, plain, live(hidden))

        with intercept_head(head, read):
            outputs = model(**inputs, output_hidden_states=self.with_hidden)
        return self._scatter(outputs.logits, live(outputs.hidden_states[-1]) if self.with_hidden else None)

    def _statistics(self, head: nn.Module, plain: Callable[[Tensor], Tensor], live: Float[Tensor, "M D"]) -> Tensor:
        return chunked_statistics(
            head,
            plain,
            live,
            select_live(self.ids, self.mask),
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            float32_head=self.float32_head,
            compare=self.compare,
        )

    def _scatter(self, live: Float[Tensor, "J M"], states: Float[Tensor, "M D"] | None) -> TokenOutputs:
        logprobs, entropy, first, *compared = (place_live(values, self.mask) for values in live)
        hidden = place_live(states, self.mask) if self.with_hidden and states is not None else None
        return _outputs(logprobs, entropy, first, hidden, compared, entropy_gradient=self.entropy_gradient)


def token_outputs(
    logits: Float[Tensor, "B T V"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    temperature: float,
    entropy_gradient: bool = False,
    hidden: Float[Tensor, "B T D"] | None = None,
    compare: Compare | None = None,
) -> TokenOutputs:
    """Compute log-probability and entropy of each completion token from the logits that predict it."""
    stats = token_statistics(logits, completion_ids, temperature, entropy_gradient=entropy_gradient)
    logprobs, entropy, first = stats.where(completion_mask, torch.zeros((), dtype=stats.dtype, device=stats.device))
    compared: list[Tensor] = []
    if compare is not None:
        live = (at_least_float32(select_live(logits, completion_mask)) / temperature).log_softmax(dim=-1)
        compared = [place_live(values, completion_mask) for values in compare(live, slice(0, len(live)))]
    return _outputs(logprobs, entropy, first, hidden, compared, entropy_gradient=entropy_gradient)


def _outputs(
    logprobs: Tensor,
    entropy: Tensor,
    first: Tensor,
    hidden: Tensor | None,
    compared: Sequence[Tensor],
    *,
    entropy_gradient: bool,
) -> TokenOutputs:
    return TokenOutputs(
        logprobs=logprobs,
        entropy=entropy if entropy_gradient else entropy.detach(),
        first_choice=first.detach().bool(),
        hidden=hidden,
        compared=torch.stack(list(compared)) if compared else None,
    )


def completion_logits(
    model: CausalLM, sequences: Sequences, length: int, *, with_hidden: bool = False, float32_head: bool = False
) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "B T D"] | None]:
    """Compute the logits that predict the last `length` tokens and, on request, the hidden states behind them."""
    with (
        intercept_head(output_head(model), lambda plain, states: in_float32(plain)(states))
        if float32_head
        else nullcontext()
    ):
        outputs = model(**sequences.inputs(), logits_to_keep=length + 1, output_hidden_states=with_hidden)
    logits = outputs.logits[:, -length - 1 : -1]
    return logits, outputs.hidden_states[-1][:, -length - 1 : -1] if with_hidden else None


WRITTEN_OUT = "written-out layers"
VARLEN = "attention over rows of any length"


@dataclass
class FastWays:
    """The fast paths by name, whether each is on, and the reasons for those that are off."""

    ways: dict[str, bool] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Describe the fast paths for the user: one line, then the reasons."""
        on, off = ([name for name, is_on in self.ways.items() if is_on == wanted] for wanted in (True, False))
        line = f"optimizations on: {', '.join(on) or 'none'}" + (f"; off: {', '.join(off)}" if off else "")
        return [line, *dict.fromkeys(self.reasons)]

    def under_zero(self, stage: int) -> FastWays:
        """Switch off written-out layers under ZeRO-2 and 3, which gather weights or reduce gradients by module."""
        if stage == 3 or (stage == 2 and self.ways.get(WRITTEN_OUT)):  # under ZeRO-3 the trial itself says no
            self.ways[WRITTEN_OUT] = False
            self.reasons.append(f"layers are not written out: ZeRO-{stage} watches their modules")
        return self

    def with_varlen(self, bodies: Sequence[nn.Module], dtype: str, device: torch.device) -> FastWays:
        """Add attention over rows of any length, which a CUDA GPU has in 16 bits; call it while weights are whole."""
        if device.type == "cuda" and dtype == "bfloat16" and self.ways["no padding"]:
            reasons = [varlen_unsupported_reason(body, torch.bfloat16) for body in bodies]
            self.ways[VARLEN] = not any(reasons)
            self.reasons += [reason for reason in reasons if reason]
        return self


def of_policy(model: CausalLM, *, log_probs: LogProbs, packing: Packing) -> FastWays:
    """Find out by trial which fast paths a policy supports; call it while its weights are whole.

    Raises:
        ModelError: chunked log-probabilities were requested by name and are not available.
    """
    chunked = in_chunks(model, log_probs)
    passes = of_bodies([body_of(model)], packing=packing if chunked else "off")
    packed = passes.ways["no padding"]
    reasons = list(passes.reasons)
    if not chunked and log_probs != "naive":
        reasons.insert(
            0, f"log-probabilities are taken from all logits at once (naive): {chunking_unsupported_reason(model)}"
        )
    return FastWays({"log-probabilities in chunks": chunked, **passes.ways, "shared prompts": packed}, reasons)


def of_bodies(bodies: Sequence[nn.Module], *, packing: Packing) -> FastWays:
    """Find out by trial which fast paths all of `bodies` (transformers without their heads) support."""
    padded = [packing_unsupported_reason(body) for body in bodies] if packing == "auto" else []
    packed = packing == "auto" and not any(padded)
    written_out = [supports_fused(body) for body in bodies] if packed else [False]
    reasons = [f"rows go through the model padded: {reason}" for reason in padded if reason]
    if not packed:
        reasons += [f"warning: {problem}" for body in bodies if (problem := padding_problem(body))]
    reasons += [reason for body in bodies if packed and (reason := fused_unsupported_reason(body))]
    return FastWays({"no padding": packed, WRITTEN_OUT: all(written_out)}, reasons)


@torch.no_grad()
def padding_problem(body: nn.Module) -> str:
    """Explain that padding changes the numbers of `body` (a transformer without its head); empty if it does not.

    Recurrent models read left padding as if it were text, and a few families place positions by the padded row. Tried
    on a few rows: the hidden states of each must be the ones that it has when computed alone.
    """
    prompts, completions = probe_tokens(body)
    try:
        with full_precision(body):
            probe = build_probe(body)
            states = body(**_padded(prompts, completions, next(body.parameters()).device).inputs()).last_hidden_state
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_device_error(error):
            raise
        return ""  # the first pass over completions raises it again
    start = max(map(len, prompts)) - 1
    if probe.matches(torch.cat([row[start : start + len(ids)] for row, ids in zip(states, completions, strict=True)])):
        return ""
    return f"padding changes what {type(body).__name__} computes: log-probabilities depend on the rows beside a row"


def _padded(prompts: Sequence[Tensor], completions: Sequence[Tensor], device: torch.device) -> Sequences:
    """Join rows of token ids: prompts padded on the left, completions on the right."""

    def pad(rows: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
        ids = pad_sequence(list(rows), batch_first=True, padding_side=side)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
        return ids.to(device), mask.bool().to(device)

    return Sequences.join(*pad(prompts, "left"), *pad(completions, "right"))


CHUNK_TOKENS = {"cpu": 256, "cuda": 4096}  # tokens per chunk of logits: measured, see benchmarks/NOTES_forward.md
MAX_CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**26}  # and never more logits than this, for any vocabulary
MAX_SAVED_PROBS = {
    "cpu": 2**24,
    "cuda": 2**27,
}  # probabilities kept for the backward pass; beyond it they are recomputed


TokenStatistics = Float[Tensor, "3 *shape"]
"""For each token: log-probability (nats), entropy of its distribution (nats), 1.0 if it is the most likely one."""


def token_statistics(
    logits: Float[Tensor, "*shape V"], ids: Int[Tensor, "*shape"], temperature: float, *, entropy_gradient: bool
) -> TokenStatistics:
    """Compute the statistics of tokens from all logits at once: the reference for the chunked computations.

    log p = z_a − log Σ exp z,  H = − Σ p log p,  z = logits / temperature, in float32 at least. 0 log 0 is 0: a logit
    may be minus infinity.
    """
    log_softmax = (at_least_float32(logits) / temperature).log_softmax(dim=-1)
    logprobs = log_softmax.gather(-1, ids[..., None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_softmax.exp() * log_softmax.clamp(min=LOWEST)).sum(dim=-1)
    return torch.stack([logprobs, entropy, (log_softmax.argmax(dim=-1) == ids).to(logprobs.dtype)])


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert logits to float32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Return how many tokens' logits are computed at a time."""
    return max(1, min(CHUNK_TOKENS.get(device.type, 1024), MAX_CHUNK_LOGITS.get(device.type, 2**23) // vocabulary))


def chunked_statistics(
    head: nn.Module,
    plain: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "N D"],
    ids: Int[Tensor, " N"],
    *,
    temperature: float,
    entropy_gradient: bool,
    float32_head: bool = False,
    compare: Compare | None = None,
) -> Float[Tensor, "J N"]:
    """Compute the `token_statistics` of `head(hidden)`, with logits of a few tokens at a time in both passes.

    A linear head has a backward pass of its own; any other (one with an adapter) is called again, chunk by chunk.
    `plain` is the head's own forward. `float32_head` computes logits in float32 in a bfloat16 run too. With `compare`,
    its rows follow the three of the statistics, and any head is called again.
    """
    if type(head) is nn.Linear and compare is None:
        return _linear_statistics(head, hidden, ids, temperature, entropy_gradient, float32_head)
    plain = in_float32(plain) if float32_head else plain
    size = chunk_rows(_vocabulary_size(head), hidden.device)

    def chunk_statistics(states: Tensor, tokens: Tensor, start: int) -> Tensor:
        logits = plain(states)
        statistics = token_statistics(logits, tokens, temperature, entropy_gradient=entropy_gradient)
        if compare is None:
            return statistics
        log_pi = (at_least_float32(logits) / temperature).log_softmax(dim=-1)
        return torch.cat([statistics, compare(log_pi, slice(start, start + len(states)))])

    chunks = [
        cast(Tensor, checkpoint(chunk_statistics, states, tokens, start, use_reentrant=False, preserve_rng_state=False))
        for states, tokens, start in zip(hidden.split(size), ids.split(size), range(0, len(ids), size), strict=False)
    ]
    return torch.cat(chunks, dim=1)


def in_float32(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a head's forward to run outside autocast, on hidden states in float32 at least."""

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            return plain(at_least_float32(hidden))

    return forward


def factor_dtype(head: nn.Linear, device: torch.device, *, float32_head: bool) -> torch.dtype:
    """Choose the dtype of the two factors of a linear head's matrix product.

    On a GPU `float32_head` leaves them in the run's: the product accumulates and returns float32 (see _scaled_logits).
    A CPU has no such product, and one in float32 throughout is faster if the CPU has no bfloat16 arithmetic.
    """
    kind = device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return torch.promote_types(dtype, torch.float32) if float32_head and kind == "cpu" else dtype
    return torch.promote_types(head.weight.dtype, torch.float32)  # of a frozen head it may be stored in 16 bits


def logits_function(head: nn.Module, device: torch.device, *, float32_head: bool) -> Callable[[Tensor], Tensor]:
    """Return a function from hidden states [N, D] to the head's logits [N, V], for passes without a gradient.

    It calls the head's forward rather than the head, so that hooks on the module do not run; adapters still count.
    """
    if type(head) is not nn.Linear:
        return in_float32(head.forward) if float32_head else head.forward
    dtype, bias = factor_dtype(head, device, float32_head=float32_head), head.bias
    weight = head.weight.to(dtype)

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(device_type=device.type, enabled=False):
            return _scaled_logits(pad_rows_for_onednn(hidden, dtype), weight, bias, 1.0, float32_head)[: len(hidden)]

    return forward


def _linear_statistics(
    head: nn.Linear,
    hidden: Float[Tensor, "N D"],
    ids: Int[Tensor, " N"],
    temperature: float,
    entropy_gradient: bool,
    float32_head: bool,
) -> TokenStatistics:
    dtype = factor_dtype(head, hidden.device, float32_head=float32_head)
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        rows = pad_rows_for_onednn(hidden, dtype)
        padded_ids = functional.pad(ids, (0, len(rows) - len(ids)))
        outputs: tuple[Tensor, ...] = _LinearStatistics.apply(  # type: ignore[no-untyped-call]
            rows, head.weight, head.bias, padded_ids, temperature, entropy_gradient, float32_head
        )
    return torch.stack(outputs)[:, : len(ids)]


class _LinearStatistics(torch.autograd.Function):
    """Statistics (log p, H, first) of z = (h W' + b) / temperature, with dz/dlogits computed if it is needed.

    d log p_a / dz = 1_a − p,   dH / dz = − p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        entropy_gradient: bool,
        float32_head: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the statistics by chunks of tokens; save up to `MAX_SAVED_PROBS` probabilities for the backward."""
        count, vocabulary = len(ids), weight.shape[0]
        size = chunk_rows(vocabulary, hidden.device)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, entropy, first, logsums = torch.empty(4, count, dtype=dtype, device=hidden.device).unbind()
        needs_grad = any(ctx.needs_input_grad[:3])
        budget = MAX_SAVED_PROBS.get(hidden.device.type, 2**24) if needs_grad and not entropy_gradient else 0
        kept: list[Tensor] = []
        matrix = cast_weight(weight, hidden.dtype)
        for part in _chunks(count, size):
            z = _scaled_logits(hidden[part], matrix, bias, temperature, float32_head)
            top, best = z.max(dim=-1)
            chosen = z.gather(1, ids[part, None]).squeeze(1)
            exps = z.sub_(top[:, None]).exp()
            total = exps.sum(dim=-1)
            logsums[part] = total.log() + top
            logprobs[part] = chosen - logsums[part]
            if z.is_cuda:  # to look for NaN as below would wait for the device
                z.clamp_(min=LOWEST)
            moments = torch.bmm(exps[:, None], z[:, :, None])[:, 0, 0]
            if (
                not z.is_cuda and moments.isnan().any()
            ):  # from a logit of minus infinity (0 * -inf): rare, so it is handled only then
                moments = torch.bmm(exps[:, None], z.clamp_(min=LOWEST)[:, :, None])[:, 0, 0]
            entropy[part] = total.log() - moments / total
            first[part] = (best == ids[part]).to(dtype)
            budget -= exps.numel()
            if budget >= 0:
                kept.append(exps.div_(total[:, None]))
        ctx.save_for_backward(hidden, weight, bias, ids, logsums, entropy, *kept)
        ctx.temperature, ctx.entropy_gradient, ctx.size = temperature, entropy_gradient, size
        ctx.float32_head = float32_head
        ctx.mark_non_differentiable(*([first] if entropy_gradient else [entropy, first]))
        return logprobs, entropy, first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Recompute logits whose probabilities were not kept, and return the gradients of hidden, weight and bias."""
        hidden, weight, bias, ids, logsums, entropy, *kept = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        matrix = cast_weight(weight, hidden.dtype)
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        # Sums over chunks are in float32 also for a weight that is trained in 16 bits.
        d_weight = (
            torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if to_weight else None
        )
        d_bias = torch.zeros_like(bias) if to_bias else None
        for number, part in enumerate(_chunks(len(ids), ctx.size)):
            if number < len(kept):
                d_logits = kept[number].mul(-d_logprobs[part, None])
            else:
                logs = _scaled_logits(hidden[part], matrix, bias, ctx.temperature, ctx.float32_head)
                logs = logs.sub_(logsums[part, None])
                slope = -d_logprobs[part, None]
                if ctx.entropy_gradient and d_entropy is not None:
                    slope = slope - d_entropy[part, None] * (logs.clamp_(min=LOWEST) + entropy[part, None])
                d_logits = logs.exp_().mul_(slope)
            d_logits.scatter_add_(1, ids[part, None], d_logprobs[part, None])
            d_logits = d_logits.div_(ctx.temperature).to(hidden.dtype)
            _add_chunk((d_hidden, d_weight, d_bias), d_logits, hidden, matrix, part)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), d_bias, None, None, None, None


def _add_chunk(
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    d_logits: Float[Tensor, "n V"],
    hidden: Tensor,
    matrix: Tensor,
    part: slice,
) -> None:
    """Write a chunk's gradient of hidden, and add to the gradients of weight and bias; None: not needed."""
    d_hidden, d_weight, d_bias = gradients
    if d_hidden is not None:
        torch.mm(d_logits, matrix, out=d_hidden[part])
    if d_weight is not None:
        if d_weight.dtype == d_logits.dtype:
            d_weight.addmm_(d_logits.t(), hidden[part])
        else:
            d_weight += d_logits.t() @ hidden[part]
    if d_bias is not None:
        d_bias += d_logits.sum(dim=0)


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, float32_head: bool
) -> Float[Tensor, "N V"]:
    if float32_head and hidden.is_cuda and hidden.dtype in HALF_DTYPES:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        logits = logits if bias is None else logits.add_(bias)
    else:
        logits = hidden @ weight.t() if bias is None else torch.addmm(bias.to(hidden.dtype), hidden, weight.t())
    logits = at_least_float32(logits)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _vocabulary_size(head: nn.Module) -> int:
    """Return the rows of the head's largest matrix, which is its own, with any adapters."""
    return max((p.shape[0] for p in head.parameters() if p.ndim == 2), default=2**16)


@contextmanager
def intercept_head(head: nn.Module, read: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Iterator[None]:
    """Make the head return `read(its own forward, hidden)` instead of logits within this context.

    It is still called as a module, so that its hooks run (ZeRO-3 gathers its weights in one).
    """
    plain, overridden = head.forward, "forward" in vars(head)
    vars(head)["forward"] = lambda hidden: read(plain, hidden)
    try:
        yield
    finally:
        if overridden:
            vars(head)["forward"] = plain
        else:
            del vars(head)["forward"]


def output_head(model: CausalLM) -> nn.Module:
    """Return the LM head, the module whose outputs are the logits."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    return head


_REASONS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # tried once for each model


def chunking_unsupported_reason(model: CausalLM) -> str:
    """Explain why logits of `model` must be taken all at once; empty if they are just its head's outputs.

    Found out by a pass in which the head returns fixed numbers from -1,000 to 1,000: a forward that caps, scales, cuts
    or reshapes logits then gives back others, or fails.
    """
    if model not in _REASONS:
        _REASONS[model] = _find_unsupported_reason(model)
    return _REASONS[model]


@torch.no_grad()
def _find_unsupported_reason(model: CausalLM) -> str:
    name = type(base_model(model)).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        return f"{name} has no output embeddings"
    shapes: list[torch.Size] = []
    ids = torch.zeros(1, 5, dtype=torch.long, device=next(head.parameters()).device)

    def read(_: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        shapes.append(hidden.shape)
        return torch.linspace(-1e3, 1e3, 21, dtype=hidden.dtype, device=hidden.device).reshape(3, 7)

    try:
        with intercept_head(head, read):
            logits = model(input_ids=ids, use_cache=False).logits
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        if is_device_error(error):
            raise
        return f"the forward of {name} does not take its head's answer as it is"
    expected = torch.linspace(-1e3, 1e3, 21, dtype=logits.dtype, device=logits.device).reshape(3, 7)
    if logits.shape != expected.shape or not torch.equal(logits, expected):
        return f"the forward of {name} changes the logits after its head"
    if len(shapes) != 1 or shapes[0][:2] != ids.shape:
        return f"the forward of {name} does not ask its head once, for all positions"
    return ""

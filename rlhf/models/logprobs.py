"""Log-probabilities and entropies of completions, in one forward pass, and which fast ways compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlhf.config.sections import LogProbs, Packing
from rlhf.errors import ModelError
from rlhf.models.backbone import CausalLM, body_of
from rlhf.models.kernels.attention import PackedBatch
from rlhf.models.kernels.llama.compile_layers import NOT_WRITTEN_OUT, compile_layers
from rlhf.models.kernels.llama.forward import fused_unsupported_reason, predictor_states, supports_fused
from rlhf.models.kernels.lm_head import (
    chunked_statistics,
    chunking_unsupported_reason,
    in_float32,
    intercept_head,
    output_head,
    token_statistics,
)
from rlhf.models.kernels.packing import (
    autocast_off,
    build_probe,
    pack_for,
    packed_inputs,
    packing_unsupported_reason,
    probe_tokens,
    varlen_unsupported_reason,
)
from rlhf.runtime.device import is_device_error
from rlhf.transfer import place_live, select_live


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """What a model computes for each completion token; zero outside the mask."""

    logprobs: Float[Tensor, "B T"]  # nats, at the sampling temperature
    entropy: Float[Tensor, "B T"]  # nats, of the whole next-token distribution
    first_choice: Bool[Tensor, "B T"]  # the token is the model's most likely one
    hidden: Float[Tensor, "B T D"] | None  # last hidden state that predicts the token, on request


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Prompts joined with their completions: left padding, prompt, completion, right padding."""

    input_ids: Int[Tensor, "B L"]
    attention_mask: Int[Tensor, "B L"]
    position_ids: Int[Tensor, "B L"]  # 0 at the first live token, whatever the padding

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
) -> TokenOutputs:
    """Compute the log-probability and entropy of every completion token given all tokens before it.

    The logits that predict completion token t stand one position before it. They are divided by `temperature` and
    normalized in float32 at least. Only live tokens reach the LM head, a chunk at a time; all positions do at once if
    `log_probs` is naive, or if the model's forward does more to the logits than its head. Rows go
    through the model without padding if `packing` is auto and the model allows it.
    `float32_head` computes logits in float32 in a bfloat16 run too, where the head's own have 8 bits.

    Raises:
        ModelError: `log_probs` is chunked, but the model's forward does more to the logits than its head.
    """
    fields = prompt_ids, prompt_mask, completion_ids, completion_mask
    if in_chunks(model, log_probs):
        rows = pack_for(body_of(model), *fields) if packing == "auto" else None
        reader = _TokenReader(completion_ids, completion_mask, temperature, entropy_gradient, with_hidden, float32_head)
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
        )

    def _scatter(self, live: Float[Tensor, "3 M"], states: Float[Tensor, "M D"] | None) -> TokenOutputs:
        logprobs, entropy, first = (place_live(values, self.mask) for values in live)
        hidden = place_live(states, self.mask) if self.with_hidden and states is not None else None
        return _outputs(logprobs, entropy, first, hidden, entropy_gradient=self.entropy_gradient)


def token_outputs(
    logits: Float[Tensor, "B T V"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    temperature: float,
    entropy_gradient: bool = False,
    hidden: Float[Tensor, "B T D"] | None = None,
) -> TokenOutputs:
    """Compute log-probability and entropy of each completion token from the logits that predict it."""
    stats = token_statistics(logits, completion_ids, temperature, entropy_gradient=entropy_gradient)
    logprobs, entropy, first = stats.where(completion_mask, torch.zeros((), dtype=stats.dtype, device=stats.device))
    return _outputs(logprobs, entropy, first, hidden, entropy_gradient=entropy_gradient)


def _outputs(
    logprobs: Tensor, entropy: Tensor, first: Tensor, hidden: Tensor | None, *, entropy_gradient: bool
) -> TokenOutputs:
    return TokenOutputs(
        logprobs=logprobs,
        entropy=entropy if entropy_gradient else entropy.detach(),
        first_choice=first.detach().bool(),
        hidden=hidden,
    )


def _in_float32(plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return in_float32(plain)(hidden)


def completion_logits(
    model: CausalLM, sequences: Sequences, length: int, *, with_hidden: bool = False, float32_head: bool = False
) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "B T D"] | None]:
    """Compute the logits that predict the last `length` tokens and, on request, the hidden states behind them."""
    with intercept_head(output_head(model), _in_float32) if float32_head else nullcontext():
        outputs = model(**sequences.inputs(), logits_to_keep=length + 1, output_hidden_states=with_hidden)
    logits = outputs.logits[:, -length - 1 : -1]
    return logits, outputs.hidden_states[-1][:, -length - 1 : -1] if with_hidden else None


WRITTEN_OUT = "written-out layers"
VARLEN = "attention over rows of any length"
COMPILED = "compiled layers"


@dataclass
class FastWays:
    """The fast paths by name, whether each is on, and the reasons for those that are off."""

    ways: dict[str, bool] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Describe the fast paths for the user: one line, then the reasons."""
        on, off = ([name for name, is_on in self.ways.items() if is_on == wanted] for wanted in (True, False))
        line = f"fast ways on: {', '.join(on) or 'none'}" + (f"; off: {', '.join(off)}" if off else "")
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

    def with_compiled(self, bodies: Sequence[nn.Module], dtype: str, *, wanted: bool) -> FastWays:
        """Compile layers where the run asks for it (policy.compile); call it once the other ways are known."""
        if wanted:
            tried = bodies if self.ways[WRITTEN_OUT] else []
            reasons = [compile_layers(body, getattr(torch, dtype)) for body in tried] or [NOT_WRITTEN_OUT]
            self.ways[COMPILED] = not any(reasons)
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
    """Explain that padding changes the numbers of `body` (a transformer without its head); empty where it does not.

    Recurrent models read left padding as if it were text, and a few families place positions by the padded row. Tried
    on a few rows: the hidden states of each must be the ones that it has when computed alone.
    """
    prompts, completions = probe_tokens(body)
    try:
        with autocast_off(body):
            probe = build_probe(body)
            states = body(**_padded(prompts, completions, next(body.parameters()).device).inputs()).last_hidden_state
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_device_error(error):
            raise
        return ""  # what it is, the first pass over completions says
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

"""The one place that aligns log-probabilities with completion tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.config.sections import LogProbs
from rlhf.errors import ModelError
from rlhf.models.backbone import CausalLM
from rlhf.models.head import chunked_statistics, output_head, reading, statistics, why_naive


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """Per completion token; zero outside the mask."""

    logprobs: Float[Tensor, "B T"]  # nats, at the sampling temperature
    entropy: Float[Tensor, "B T"]  # nats, of the whole next-token distribution
    first_choice: Bool[Tensor, "B T"]  # the token is the model's most likely one
    hidden: Float[Tensor, "B T D"] | None  # last hidden state where the token is chosen, when asked for


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Prompt and completion joined: left padding, prompt, completion, right padding."""

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
        """Join the two; positions count live tokens only."""
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        return cls(
            input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(dim=1) - 1).clamp(min=0),
        )


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
) -> TokenOutputs:
    """Log-probability and entropy of every completion token given all before it.

    The logits that choose completion token t stand one position before it. They are divided by `temperature` and
    normalized in float32 at least. Only the live tokens' reach the LM head, a chunk at a time; all of them at once
    where `log_probs` is naive, and where the model's forward does more to them than its head (see head.why_naive).

    Raises:
        ModelError: `log_probs` is chunked and the model's forward does more.
    """
    sequences = Sequences.join(prompt_ids, prompt_mask, completion_ids, completion_mask)
    if in_chunks(model, log_probs):
        return _chunked_outputs(
            model,
            sequences,
            completion_ids,
            completion_mask,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            with_hidden=with_hidden,
        )
    logits, hidden = completion_logits(model, sequences, completion_ids.shape[1], with_hidden=with_hidden)
    return token_outputs(
        logits,
        completion_ids,
        completion_mask,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
        hidden=hidden,
    )


def in_chunks(model: CausalLM, log_probs: LogProbs) -> bool:
    """Whether the logits of `model` are computed a chunk at a time.

    Raises:
        ModelError: they are to be, and cannot.
    """
    reason = "" if log_probs == "naive" else why_naive(model)
    if reason and log_probs == "chunked":
        raise ModelError(f"policy.log_probs is chunked, but {reason}: set policy.log_probs=auto")
    return log_probs != "naive" and not reason


def _chunked_outputs(
    model: CausalLM,
    sequences: Sequences,
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    temperature: float,
    entropy_gradient: bool,
    with_hidden: bool,
) -> TokenOutputs:
    head, length = output_head(model), completion_ids.shape[1]
    ids = completion_ids[completion_mask]

    def read(plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        live = hidden[:, -length - 1 : -1][completion_mask]
        return chunked_statistics(head, plain, live, ids, temperature=temperature, entropy_gradient=entropy_gradient)

    with reading(head, read):
        outputs = model(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            position_ids=sequences.position_ids,
            output_hidden_states=with_hidden,
            use_cache=False,
        )
    logprobs, entropy, first = (_spread(each, completion_mask) for each in outputs.logits)
    hidden = outputs.hidden_states[-1][:, -length - 1 : -1] if with_hidden else None
    return _outputs(logprobs, entropy, first, hidden, entropy_gradient=entropy_gradient)


def _spread(values: Float[Tensor, " N"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The values at the live places, zero elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def token_outputs(
    logits: Float[Tensor, "B T V"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    temperature: float,
    entropy_gradient: bool = False,
    hidden: Float[Tensor, "B T D"] | None = None,
) -> TokenOutputs:
    """What the logits that choose each completion token say of it."""
    found = statistics(logits, completion_ids, temperature, entropy_gradient=entropy_gradient)
    logprobs, entropy, first = found.where(completion_mask, torch.zeros((), dtype=found.dtype, device=found.device))
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


def completion_logits(
    model: CausalLM, sequences: Sequences, length: int, *, with_hidden: bool = False
) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "B T D"] | None]:
    """The logits that choose each of the last `length` tokens, and the hidden states they come from when asked for."""
    outputs = model(
        input_ids=sequences.input_ids,
        attention_mask=sequences.attention_mask,
        position_ids=sequences.position_ids,
        logits_to_keep=length + 1,
        output_hidden_states=with_hidden,
        use_cache=False,
    )
    logits = outputs.logits[:, -length - 1 : -1]
    return logits, outputs.hidden_states[-1][:, -length - 1 : -1] if with_hidden else None

"""The one place that aligns log-probabilities with completion tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.models.backbone import CausalLM


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
) -> TokenOutputs:
    """Log-probability and entropy of every completion token given all before it.

    The logits that choose completion token t stand one position before it, so only positions P-1 .. P+T-2 reach
    the LM head. They are divided by `temperature` and normalized in float32 at least.
    """
    sequences = Sequences.join(prompt_ids, prompt_mask, completion_ids, completion_mask)
    logits, hidden = completion_logits(model, sequences, completion_ids.shape[1], with_hidden=with_hidden)
    return token_outputs(
        logits,
        completion_ids,
        completion_mask,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
        hidden=hidden,
    )


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
    logprobs, entropy, first = _token_statistics(logits, completion_ids, temperature, entropy_gradient)
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return TokenOutputs(
        logprobs=torch.where(completion_mask, logprobs, zero),
        entropy=torch.where(completion_mask, entropy, zero),
        first_choice=first & completion_mask,
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


def _token_statistics(
    logits: Float[Tensor, "B T V"], ids: Int[Tensor, "B T"], temperature: float, entropy_gradient: bool
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_softmax = (logits / temperature).log_softmax(dim=-1)
    logprobs = log_softmax.gather(-1, ids[..., None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    return logprobs, entropy, log_softmax.argmax(dim=-1) == ids

"""Checks a decoder against the model before the first rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.models.backbone import CausalLM
from rlhf.sampling.decoders import Decoder, Unsupported, prefill
from rlhf.sampling.slots import Slots
from rlhf.types import Prompts

TOKENS = 16  # tokens of a prompt that are used
STEPS = 2
LIMIT = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.1}  # of the largest logit; float64 models norm in float32


def trial(
    model: CausalLM, decoder: Decoder, prompts: Prompts, *, length: int, dtype: str, device: torch.device
) -> None:
    """Check that decoding a few tokens after two prompts gives the logits of one forward pass without a cache.

    `length` is that of the longest completion: no sequence here is longer than the longest that will be sampled.

    Raises:
        Unsupported: the logits differ by more than rounding, or the decoder cannot be used.
    """
    rows = torch.tensor([0, len(prompts) - 1])
    mask = prompts.prompt_mask[rows]
    longest = int(mask.sum(dim=1).max())
    width = max(1, min(TOKENS, longest, longest + length - STEPS))
    ids, mask = prompts.prompt_ids[rows][:, -width:].to(device), mask[:, -width:].to(device)
    logits, layers = prefill(model, ids, mask)
    slots = Slots(3, 2, width, STEPS + 1, device=device, windows=True)
    lanes = torch.tensor([1, 0, 1])
    slots.add_prompts(layers, mask)
    slots.add_rows(lanes)
    lane = lanes.to(device)
    positions, decoded = mask.sum(dim=1)[lane], []
    sequences, sequence_mask = ids[lane], mask[lane]
    token = logits.argmax(dim=-1)[lane]
    for _ in range(STEPS):
        slots.advance()
        decoded.append(decoder.step(slots, token, positions))
        sequences, sequence_mask = (
            torch.cat([sequences, token[:, None]], 1),
            torch.cat([sequence_mask, torch.ones_like(sequence_mask[:, :1])], 1),
        )
        token, positions = decoded[-1].argmax(dim=-1), positions + 1
    difference = _relative_difference(torch.stack(decoded, dim=1), _full_forward(model, sequences, sequence_mask))
    if not difference <= LIMIT[dtype]:
        raise Unsupported(f"its logits come out differently with our cache (by {difference:.1g} of the largest)")


def _full_forward(model: CausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits[:, -STEPS:]
    return logits


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-6))

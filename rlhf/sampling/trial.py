"""Before the first rollout: does a decoder say what the model says?"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.models.backbone import CausalLM
from rlhf.sampling.decoders import Decoder, Unsupported, prefill
from rlhf.sampling.slots import Slots
from rlhf.types import Prompts

TOKENS = 16  # of a prompt that are tried
STEPS = 2
LIMIT = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.1}  # of the largest logit; float64 models norm in float32


def trial(
    model: CausalLM, decoder: Decoder, prompts: Prompts, *, length: int, dtype: str, device: torch.device
) -> None:
    """Decode a few tokens after two prompts and read the same tokens at once, without a cache.

    `length` is that of the longest completion: no sequence is longer than the longest that will be sampled.

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
    positions, said = mask.sum(dim=1)[lane], []
    everything, live = ids[lane], mask[lane]
    token = logits.argmax(dim=-1)[lane]
    for _ in range(STEPS):
        slots.advance()
        said.append(decoder.step(slots, token, positions))
        everything, live = (
            torch.cat([everything, token[:, None]], 1),
            torch.cat([live, torch.ones_like(live[:, :1])], 1),
        )
        token, positions = said[-1].argmax(dim=-1), positions + 1
    far = _distance(torch.stack(said, dim=1), _plain(model, everything, live))
    if not far <= LIMIT[dtype]:
        raise Unsupported(f"its logits come out differently from a cache of ours (by {far:.1g} of the largest)")


def _plain(model: CausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits[:, -STEPS:]
    return logits


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-6))

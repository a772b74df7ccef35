"""Frozen models (reference, reward model) on a GPU in bfloat16 arithmetic: their matrices are kept in bfloat16."""

from __future__ import annotations

import torch
from torch import nn

from rlhf.models.backbone import CausalLM, autocast, body_of
from rlhf.models.kernels.llama.forward import supports_fused
from rlhf.models.kernels.lm_head import chunking_unsupported_reason
from rlhf.models.kernels.packing import packing_unsupported_reason, takes_varlen
from rlhf.models.scalar_head import ScalarHeadModel


def keep_in_bfloat16(model: CausalLM | ScalarHeadModel, *, dtype: str, device: torch.device) -> int:
    """Convert the matrices of a frozen model to bfloat16; return the bytes saved, 0 where it is left as it is.

    Autocast rounds them the same way for every product, so that no result changes by a bit, and 2 of 4 bytes of a
    weight are saved and no weight is cast any more. Only on a CUDA GPU, where the run computes in bfloat16, and for
    families whose layers are written out; ZeRO-3 splits such models instead. Norms, embeddings and head stay as they
    are. Call it once the model is where it computes: it is tried in float32 first.
    """
    body = model.classifier.base_model if isinstance(model, ScalarHeadModel) else body_of(model)
    if device.type != "cuda" or dtype != "bfloat16" or packing_unsupported_reason(body) or not supports_fused(body):
        return 0
    if not isinstance(model, ScalarHeadModel):
        chunking_unsupported_reason(model)
    with autocast(dtype, device):
        takes_varlen(body)
    return round_matrices(body)


@torch.no_grad()
def round_matrices(body: nn.Module) -> int:
    """Convert to bfloat16 the matrices of a frozen `body` that only linear layers hold; return the bytes saved."""
    linear = [part for part in body.modules() if type(part) is nn.Linear and part.weight.dtype == torch.float32]
    elsewhere = {p for part in body.modules() if type(part) is not nn.Linear for p in part._parameters.values()}
    rounded: dict[torch.Tensor, nn.Parameter] = {}
    for part in linear:
        weight = part.weight
        if weight in elsewhere:
            continue
        assert not weight.requires_grad, "a weight that is trained keeps its float32"
        if weight not in rounded:
            rounded[weight] = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
        part.weight = rounded[weight]
    return sum(2 * weight.numel() for weight in rounded)

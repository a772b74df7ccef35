"""The tokens that may be drawn, by the settings, and as text on its way from a server to the trainer."""

from __future__ import annotations

import base64
import zlib

import torch
from jaxtyping import UInt8
from torch import Tensor

from rlhf.algo.support import SamplingLimits
from rlhf.config.sections import SamplingConfig
from rlhf.errors import SamplingError

LEVEL = 1  # of compression: most bits are 0, and speed counts


def limits_of(config: SamplingConfig) -> SamplingLimits:
    """Return the settings that leave tokens out of sampling."""
    return SamplingLimits(top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)


def to_text(support: UInt8[Tensor, "T W"]) -> str:
    """Write the packed support of a completion as text."""
    return base64.b64encode(zlib.compress(support.contiguous().numpy().tobytes(), LEVEL)).decode()


def from_text(text: str, tokens: int) -> UInt8[Tensor, "T W"]:
    """Undo `to_text`, for a completion of so many tokens.

    Raises:
        SamplingError: the text is of another length, or broken.
    """
    try:
        content = bytearray(zlib.decompress(base64.b64decode(text)))
    except (ValueError, zlib.error) as error:
        raise SamplingError(f"a sampling server returned a broken support of its samples: {error}") from error
    if not content or len(content) % tokens:
        raise SamplingError("a sampling server returned the support of another number of tokens than it sampled")
    return torch.frombuffer(content, dtype=torch.uint8).view(tokens, -1)

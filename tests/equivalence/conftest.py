"""What equalities to the last digits need."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm


@pytest.fixture
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in the model's own precision: transformers' rounds to float32, and gradients with it at 1e-7."""

    def forward(self: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(mean + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)

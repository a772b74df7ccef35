"""SmolLM2-135M-Instruct from `../shared`: real weights, read once a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

FOLDER = Path("models/smollm2-135m-instruct")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def real_model(shared: Path) -> PreTrainedModel:
    """Load the model in float32, in evaluation mode; do not change it."""
    logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(shared / FOLDER, gguf_file=FILE, dtype=torch.float32)
    return model.eval()

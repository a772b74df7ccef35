"""rlhf export: the model of a run, or of a folder, as one GGUF file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ModelError
from rlhf.factory.context import model_folder
from rlhf.models.backbone import load_causal_lm, load_model_config


def run_export(path: str, out: Path, *, dtype: str, console: Console) -> None:
    """Write the model of a run, or in a model folder, as a GGUF file; an adapter is merged into its base.

    Raises:
        ModelError: the model cannot be loaded, or is of a kind that cannot be written.
    """
    gguf_export: Any = importlib.import_module("rlhf.models.gguf_export")  # it needs an extra
    folder = model_folder(path)
    architectures = load_model_config(folder).architectures or []
    if any("SequenceClassification" in name for name in architectures):
        raise ModelError(
            f"{path} is a reward model, which cannot be written as GGUF. Supported are {gguf_export.SUPPORTED}"
        )
    tokenizer = load_tokenizer(folder)
    gguf_export.write_gguf(load_causal_lm(folder, dtype="float32"), tokenizer, out, dtype=dtype)
    console.print(Text(f"{out}: {out.stat().st_size / 2**20:,.1f} MiB, {dtype}"), soft_wrap=True)

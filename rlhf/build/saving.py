"""Saving and exporting models as ordinary folders, however they are sharded.

Every rank calls these functions, because gathering the weights is collective; only the main rank writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from rlhf.build.context import TRAINER
from rlhf.models.backbone import CausalLM, save_model, whole_copy
from rlhf.models.export import ExportDtype, export_model, write_tokenizer
from rlhf.models.origin import Origin
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.runtime.engine import Engine, Trained

TOLERATED_ROUNDING = 0.5  # share of the change by training that rounding may lose without a warning


def save_policy(
    policy: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine, origin: Origin
) -> None:
    """Save the policy with its exact weights, as an adapter if it has one."""
    state = engine.full_state(policy)

    def write() -> None:
        if isinstance(policy, PeftModel):
            save_model(policy, tokenizer, folder, state)
            write_tokenizer(tokenizer, folder, origin)
        else:
            export_model(policy, tokenizer, folder, origin=origin, dtype=None, state=state)

    engine.ranks.on_main(write)


def export_policy(
    policy: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    engine: Engine,
    origin: Origin,
    dtype: ExportDtype,
    tell: Callable[[str], None],
) -> None:
    """Export the policy as an ordinary model, with adapters merged into a copy of the weights."""
    state = engine.full_state(policy)

    def write() -> float:
        if isinstance(policy, PeftModel):
            merged = whole_copy(policy, state)
            return export_model(merged, tokenizer, folder, origin=origin, dtype=dtype)
        return export_model(policy, tokenizer, folder, origin=origin, dtype=dtype, state=state)

    _warn_of_rounding(engine.ranks.on_main(write), "policy", tell)


def save_scalar_head(model: ScalarHeadModel, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine) -> None:
    """Save a critic or a reward model with its exact weights."""
    state = engine.full_state(model.classifier)
    engine.ranks.on_main(lambda: model.save(tokenizer, folder, state))


def export_scalar_head(
    model: ScalarHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    engine: Engine,
    origin: Origin,
    dtype: ExportDtype,
    tell: Callable[[str], None],
) -> None:
    """Export a reward model as a folder that AutoModelForSequenceClassification can load."""
    state = engine.full_state(model.classifier)
    loss = engine.ranks.on_main(
        lambda: export_model(model.classifier, tokenizer, folder, origin=origin, dtype=dtype, state=state)
    )
    _warn_of_rounding(loss, "model", tell)


def _warn_of_rounding(loss: float, section: str, warn: Callable[[str], None]) -> None:
    if loss > TOLERATED_ROUNDING:
        warn(
            f"warning: the exported weights are in the checkpoint's dtype, and rounding to it takes away {loss:.0%} of "
            f"what training changed: {section}.export_dtype=float32 keeps it"
        )


def save_trainer(folder: Path, trained: dict[str, Trained], besides: dict[str, Any], engine: Engine) -> None:
    """Save optimizer states, keyed by parameter name, and `besides`, unsharded so that any world size can resume."""
    state = {name: model.state() for name, model in trained.items()} | besides
    engine.ranks.on_main(lambda: torch.save(state, folder / TRAINER))


def load_trainer(folder: Path) -> dict[str, Any]:
    """Load the state that `save_trainer` wrote, onto the CPU."""
    state: dict[str, Any] = torch.load(folder / TRAINER, weights_only=True, map_location="cpu")
    return state

"""Models as ordinary folders, from any sharding: every process calls these, the main one writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from rlhf.build.context import TRAINER
from rlhf.models.backbone import CausalLM, save_model, whole_copy
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.runtime.engine import Engine, Trained


def save_policy(policy: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine) -> None:
    """The policy as it is trained: an adapter where it has one."""
    state = engine.full_state(policy)
    engine.ranks.on_main(lambda: save_model(policy, tokenizer, folder, state))


def export_policy(policy: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine) -> None:
    """The policy as an ordinary model, adapters merged into a copy of the weights."""
    state = engine.full_state(policy)

    def write() -> None:
        if isinstance(policy, PeftModel):
            save_model(whole_copy(policy, state), tokenizer, folder)
        else:
            save_model(policy, tokenizer, folder, state)

    engine.ranks.on_main(write)


def save_scalar_head(model: ScalarHeadModel, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine) -> None:
    """A critic or a reward model."""
    state = engine.full_state(model.classifier)
    engine.ranks.on_main(lambda: model.save(tokenizer, folder, state))


def save_trainer(folder: Path, trained: dict[str, Trained], besides: dict[str, Any], engine: Engine) -> None:
    """Optimizers by parameter name, and `besides`: whole, so that any number of processes can continue from them."""
    state = {name: model.state() for name, model in trained.items()} | besides
    engine.ranks.on_main(lambda: torch.save(state, folder / TRAINER))


def load_trainer(folder: Path) -> dict[str, Any]:
    """What `save_trainer` wrote, on the CPU."""
    found: dict[str, Any] = torch.load(folder / TRAINER, weights_only=True, map_location="cpu")
    return found

"""Save models with their exact weights, however sharded.

Every rank calls these functions, because gathering the weights is collective; only the main rank writes.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf.models.adapters import is_adapted
from rlhf.models.backbone import CausalLM, save_model
from rlhf.models.export import Origin, export_model, save_in_parts, write_parts, write_tokenizer
from rlhf.models.folders import CRITIC, MODEL
from rlhf.models.policy_models import Models
from rlhf.models.scalar_adapters import save_adapter
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.models.weight_files import is_split
from rlhf.runtime.engine import Engine


def save_models(models: Models, tokenizer: PreTrainedTokenizerBase, origin: Origin, folder: Path) -> None:
    """Save the trained models of a run as folders in `folder`: the policy, and its critic if it has one of its own."""
    save_policy(models.policy, tokenizer, folder / MODEL, models.engine, origin)
    if models.critic is not None:
        save_scalar_head(models.critic, tokenizer, folder / CRITIC, models.engine)


def save_policy(
    policy: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine, origin: Origin
) -> None:
    """Save the policy with its exact weights, as an adapter if it has one."""
    if engine.splits_weights and is_split(policy):
        save_in_parts(policy, tokenizer, folder, origin=origin, engine=engine)
        return
    state = engine.full_state(policy, trained_only=is_adapted(policy))

    def write() -> None:
        if is_adapted(policy):
            save_model(policy, tokenizer, folder, state)
            write_tokenizer(tokenizer, folder, origin)
        else:
            export_model(policy, tokenizer, folder, origin=origin, dtype=None, state=state)

    engine.ranks.on_main(write)


def save_scalar_head(model: ScalarHeadModel, tokenizer: PreTrainedTokenizerBase, folder: Path, engine: Engine) -> None:
    """Save a critic or a reward model with its exact weights, as an adapter if it has one."""
    if model.adapter is None and engine.splits_weights and is_split(model.classifier):
        engine.ranks.on_main(lambda: model.save_settings(tokenizer, folder))
        write_parts(model.classifier, folder, engine)
        return
    state = engine.full_state(model.classifier)
    if model.adapter is not None:
        engine.ranks.on_main(lambda: save_adapter(model, tokenizer, folder, state))
        return
    engine.ranks.on_main(lambda: model.save(tokenizer, folder, state))

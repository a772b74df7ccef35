"""Export the models of a run, however sharded, and report which exported weights have lost their training.

Every rank calls the functions that export, because gathering the weights is collective; only the main rank writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config.load import dump, load_run
from rlhf.config.sections import PolicyConfig, RewardModelConfig, TrainConfig
from rlhf.config.weights import Export
from rlhf.data.paths import resolve_best
from rlhf.data.tokenizer import locate_model
from rlhf.errors import ConfigError, ModelError
from rlhf.model_files import ADAPTER
from rlhf.models.adapters import is_adapted
from rlhf.models.backbone import CausalLM, merged_copy, save_model
from rlhf.models.export import ExportDtype, Exported, Origin, export_model, write_tokenizer
from rlhf.models.folders import ADAPTER_FOLDER, member_folders, model_folder
from rlhf.models.kernels.quantized import KINDS
from rlhf.models.rounding import lost_change, names_at_start
from rlhf.models.scalar_adapters import merged_classifier, save_adapter
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.models.stored import is_quantized
from rlhf.models.weight_files import WeightFiles, local_folder, read_headers
from rlhf.runtime.engine import Engine
from rlhf.tracking.exported import ExportRecord, read_export, rounding_warnings
from rlhf.training.session import Session


def export_policy(
    policy: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    engine: Engine,
    origin: Origin,
    dtype: ExportDtype,
    kind: Export = "merged",
) -> None:
    """Export the policy: as an ordinary model, adapters merged into a copy of the weights, or as its adapter.

    `kind` is the setting policy.export; with both, the adapter is in the folder `adapter` beside the model.
    """
    state = engine.full_state(policy)
    rank = policy.active_peft_config.r if is_adapted(policy) else None

    def write() -> None:
        if is_adapted(policy) and kind != "merged":
            place = folder if kind == "adapter" else folder.parent / ADAPTER_FOLDER
            save_model(policy, tokenizer, place, state)
            write_tokenizer(tokenizer, place, origin)
            if kind == "adapter":
                _record_export(Exported(torch.float32, lost=0.0), "policy", dtype, folder, rank)
                return
        if is_adapted(policy):
            merged, is_comparable = merged_copy(policy, state), not is_quantized(policy)
            exported = export_model(merged, tokenizer, folder, origin=origin, dtype=dtype, is_comparable=is_comparable)
        else:
            exported = export_model(policy, tokenizer, folder, origin=origin, dtype=dtype, state=state)
        _record_export(exported, "policy", dtype, folder, rank)

    engine.ranks.on_main(write)


def export_scalar_head(
    model: ScalarHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    engine: Engine,
    origin: Origin,
    dtype: ExportDtype,
    kind: Export = "merged",
) -> None:
    """Export a reward model as a folder that AutoModelForSequenceClassification can load, or as its adapter.

    `kind` is the setting model.export; with both, the adapter is in the folder `adapter` beside the model.
    """
    state = engine.full_state(model.classifier)
    rank = None if model.adapter is None else model.adapter.r

    def write() -> None:
        if model.adapter is not None and kind != "merged":
            save_adapter(model, tokenizer, folder if kind == "adapter" else folder.parent / ADAPTER_FOLDER, state)
            if kind == "adapter":
                _record_export(Exported(torch.float32, lost=0.0), "model", dtype, folder, rank)
                return
        if model.adapter is not None:
            merged, is_comparable = merged_classifier(model, state), not is_quantized(model)
            exported = export_model(merged, tokenizer, folder, origin=origin, dtype=dtype, is_comparable=is_comparable)
        else:
            exported = export_model(model.classifier, tokenizer, folder, origin=origin, dtype=dtype, state=state)
        _record_export(exported, "model", dtype, folder, rank)

    engine.ranks.on_main(write)


def _record_export(exported: Exported, section: str, asked: ExportDtype, folder: Path, rank: int | None) -> None:
    """Write export.json beside the folder of the exported model."""

    def kept(lost: float | None) -> float | None:
        return None if lost is None else 1 - lost

    ExportRecord(
        key=f"{section}.export_dtype",
        asked=asked,
        dtype=_dtype_name(exported.dtype),
        change_kept=kept(exported.lost),
        start_dtype=None if exported.avoided is None else _dtype_name(exported.avoided),
        start_dtype_keeps=kept(exported.avoided_loss),
        rank=rank,
    ).write(folder.parent)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def note_export(session: Session) -> None:
    """Tell at the end of a run the loss of training by the dtype of the exported weights, if there is one."""
    record = session.ranks.on_main(lambda: read_export(session.recorder.folder.path))
    text = None if record is None else record.summary()
    if text is not None:
        session.recorder.note(text)


def kept_export_note(model: Path, policy: PolicyConfig) -> str | None:
    """Return a warning if the best checkpoint was exported with other settings, when it was kept, than those now."""
    record, kind = read_export(model), "merged"
    if (model / ADAPTER).is_file() or model.with_name(ADAPTER_FOLDER).is_dir():
        kind = "adapter" if (model / ADAPTER).is_file() else "both"
    kept = {"export_dtype": policy.export_dtype if record is None else record.asked, "export": kind}
    other = [f"policy.{key}={value}" for key, value in kept.items() if getattr(policy, key) != value]
    if not other:
        return None
    return (
        f"warning: the best checkpoint was exported with {' and '.join(other)} when it was kept, and stays so. "
        "checkpoint.best.restore=false exports the last checkpoint, with the settings of now"
    )


def rounded_inputs(config: TrainConfig | RewardModelConfig) -> list[str]:
    """Return a message for each model that a run reads and whose exported weights have lost their training."""
    return rounded_models({name: section for name, section in dump(config).items() if name != "run"})


def rounded_models(*trees: object) -> list[str]:
    """Return a message for each exported model among the paths in the trees that has lost its training to rounding.

    Args:
        trees: paths, or configurations in which some of the strings are paths: runs, ensembles, folders of models.
    """
    paths = dict.fromkeys(path for tree in trees for path in _folders(tree))
    models = [str(model) for path in paths for model in member_folders(path) or [Path(path)]]
    return rounding_warnings(dict(zip(models, models, strict=True)))


def change_lost_in(path: str, model: PreTrainedModel, targets: Mapping[str, torch.dtype]) -> float | None:
    """Compute the share of a run's training that its model would lose in other dtypes; None if it cannot be measured.

    Args:
        model: its model, loaded in float32.
        targets: the dtype of each weight.
    """
    if not (Path(path).expanduser() / "config.yaml").is_file():
        return None
    config = load_run(path)
    if isinstance(config, RewardModelConfig) or config.policy.weights in KINDS:  # trained from other weights
        return None
    with suppress(ModelError):
        location = locate_model(model_folder(config.policy.model))
        folder = None if location.is_adapter or location.gguf is not None else local_folder(location)
        if folder is not None:
            start = WeightFiles(folder, read_headers(folder))
            trained = model.state_dict()
            return lost_change(start, trained, targets, names_at_start(model, trained, start))
    return None


def _folders(tree: object) -> Iterator[str]:
    """Yield every string in a tree of mappings and lists that names a folder; RUN@best as the folder that it means."""
    if isinstance(tree, str):
        with suppress(ConfigError, OSError, RuntimeError, ValueError):  # a text that can be no path
            path = resolve_best(tree)
            if Path(path).expanduser().is_dir():
                yield path
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _folders(value)
    elif isinstance(tree, Sequence):
        for value in tree:
            yield from _folders(value)

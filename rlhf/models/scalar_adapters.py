"""Adapters on a critic or a reward model: the backbone is frozen, adapters and the scalar head are trained.

The folder of one is peft's for sequence classification, and plain peft loads it onto its base. A config.json beside it
has what peft does not keep: the calibration of the scores and the number of heads.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config.sections import HeadInit
from rlhf.config.weights import LoraConfig
from rlhf.data.tokenizer import adapts_classifier, base_of_adapter, locate_model
from rlhf.errors import ModelError
from rlhf.model_files import CONFIG
from rlhf.models.backbone import check_vocabulary, freeze, load_model_config, move_to, weight_dtype
from rlhf.models.bases import bases_of
from rlhf.models.export import classifier_padding
from rlhf.models.folders import SCORE_SETTINGS
from rlhf.models.kernels.cast import HALF_DTYPES
from rlhf.models.lora import adding, overruled_settings, peft_settings, quiet_peft, settings_in, train_saved_modules
from rlhf.models.scalar_head import (
    ENSEMBLE_SIZE,
    EnsembleHeadModel,
    ScalarHeadModel,
    adapter_settings,
    cannot_load,
    ensemble_size,
    has_scalar_head,
    initialize_head,
    is_reward_model,
    load_reward_heads,
    load_scalar_head,
)
from rlhf.models.stored import make_dense, store_weights
from rlhf.models.text_config import text_config
from rlhf.runtime.engine import Engine

PREFIX = "base_model.model."  # before every name in a file of peft's
WEIGHTS = "adapter_model.safetensors"


def load_adapted(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    lora: LoraConfig | None,
    *,
    weights: str,
    new_head: HeadInit | None,
    engine: Engine,
    seed: int = 0,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    note_overruled: Callable[[list[str]], None] = lambda _: None,
) -> ScalarHeadModel:
    """Load a critic or reward model over a frozen backbone: with adapters to train, or frozen as a whole.

    Args:
        path: a causal LM, a reward model or an adapter's folder. An adapter stays one if it is trained further
            (lora.start=continue) or frozen; otherwise it is merged.
        tokenizer: the tokenizer of the texts to score.
        lora: the adapters to train; None: the model is only read.
        weights: how the backbone is kept, a value of the setting of this name.
        new_head: how a head is initialized; None: `path` has one.
        engine: the engine of the run, whose bases are shared.
        dtype: the dtype of the arithmetic.
        note_overruled: gets the settings of `lora` that differ from the adapter that is trained further.

    Raises:
        ModelError: the model cannot be loaded, or lacks the scalar head that is expected.
    """
    settings: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    folder, base_path = kept_adapter(path, lora), base_below(path, lora)
    if engine.splits_weights:
        if folder is not None:
            raise ModelError(f"{path!r} is an adapter, which ZeRO-3 does not keep apart: set lora.start=merge")
        random_state = torch.get_rng_state()
        model = _whole(path, tokenizer, new_head, seed, weights, engine=engine, **settings)
        torch.set_rng_state(random_state)
        if new_head is not None and not _is_classifier(path):  # so that the adapters start as on a shared base
            _new_head(text_config(model.classifier).hidden_size, 1)
    elif folder is not None:
        model = _on_base(base_path, tokenizer, weights, engine, folder=folder, **settings)
    elif new_head is not None and not _is_classifier(path):
        model = _on_base(path, tokenizer, weights, engine, **settings)
        initialize_head(model.head, new_head, seed)
    else:
        model = _whole(path, tokenizer, new_head, seed, weights, device=engine.device, **settings)
        move_to(model, engine.device)
    if folder is not None:
        if lora is not None:
            note_overruled(overruled_settings(model.classifier.base_model, lora, folder))
        try:
            add_adapters(model, _within_body(settings_in(folder), model.classifier.base_model_prefix), base_path)
        except ValueError as error:
            raise ModelError(
                f"cannot keep the adapter in {str(folder)!r} apart from its base: {error} Set lora.start=merge, or "
                "weights=auto for a model that is not trained"
            ) from error
        load_adapter_weights(model, folder)
    elif lora is not None:
        with quiet_peft():
            add_adapters(model, peft_settings(model.classifier.base_model, lora, None), base_path)
    return freeze(model) if lora is None else model


def _within_body(settings: Any, prefix: str) -> Any:
    """Name the modules of an adapter by their paths in the backbone; peft names them by paths in the classifier."""
    if not isinstance(settings.target_modules, str):
        settings.target_modules = {name.removeprefix(f"{prefix}.") for name in settings.target_modules}
    return settings


def kept_adapter(path: str, lora: LoraConfig | None) -> Path | None:
    """Return the folder of the adapter at `path` if it stays one, frozen or trained further; None if it is merged."""
    location = locate_model(path)
    stays = location.is_adapter and (lora is None or lora.start == "continue")
    return Path(location.name) if stays and adapts_classifier(Path(location.name)) else None


def base_below(path: str, lora: LoraConfig | None) -> str:
    """Return the model below the adapters, whose name their configuration gets."""
    folder = kept_adapter(path, lora)
    return path if folder is None else base_of_adapter(folder)


def _is_classifier(path: str) -> bool:
    """Return whether the weights at `path` are a classifier's, or an adapter's on one."""
    location = locate_model(path)
    if location.gguf is not None:
        return False
    if location.is_adapter:
        return adapts_classifier(Path(location.name))
    return has_scalar_head(path)


def has_one_head(path: str, *, trust_remote_code: bool = False) -> bool:
    """Return whether `path` is a reward model of one member, whose head can be trained further."""
    location = locate_model(path)
    if location.gguf is not None:
        return False
    if location.is_adapter:
        folder = Path(location.name)
        return adapts_classifier(folder) and adapter_settings(folder).get(ENSEMBLE_SIZE, 1) == 1
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    return is_reward_model(config) and ensemble_size(config) == 1


def check_trainable_heads(path: str, *, trust_remote_code: bool = False) -> None:
    """Check that a model to train as a reward model has one head that can be trained further, or none.

    Raises:
        ModelError: it is an ensemble, a process reward model or another classifier.
    """
    location = locate_model(path)
    if location.gguf is not None or has_one_head(path, trust_remote_code=trust_remote_code):
        return
    if location.is_adapter:
        is_classifier = adapts_classifier(Path(location.name))
    else:
        config = load_model_config(path, trust_remote_code=trust_remote_code)
        is_classifier = any("Classification" in name for name in config.architectures or [])
    if is_classifier:
        raise ModelError(
            f"model.model: {path} is an ensemble, a process reward model or another classifier, whose heads are "
            "not trained further: name the model that it was trained from, or a reward model with one head"
        )


def _whole(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    new_head: HeadInit | None,
    seed: int,
    weights: str,
    device: torch.device | None = None,
    **settings: Any,
) -> ScalarHeadModel:
    """Load a model with a backbone of its own, frozen."""
    model = (
        load_reward_heads(path, tokenizer, **settings)
        if new_head is None
        else load_scalar_head(path, tokenizer, new_head=new_head, seed=seed, **settings)
    )
    freeze(model)
    if settings.get("engine") is None:
        store_weights(model.classifier, weights, device)
    return model


def _on_base(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    weights: str,
    engine: Engine,
    *,
    folder: Path | None = None,
    **settings: Any,
) -> ScalarHeadModel:
    """Put a scalar head, or the head of the adapter in `folder`, on a base that other roles may share."""
    if folder is not None and _is_classifier(path):  # the adapter of a run that started from a whole reward model
        model = _whole(path, tokenizer, None, 0, weights, device=engine.device, **settings)
        move_to(model, engine.device)
        _take_settings(model.classifier, folder)
        return model
    causal = bases_of(engine).load(path, weights, **settings)
    check_vocabulary(causal, tokenizer, path)
    classifier = _classifier_on(causal, path)
    if folder is not None:
        _take_settings(classifier, folder)
    size = ensemble_size(classifier.config)
    head = _new_head(text_config(causal).hidden_size, size)
    classifier.score = head.to(device=engine.device, dtype=weight_dtype(settings["dtype"]))
    classifier.config.num_labels = size
    classifier.config.pad_token_id = classifier_padding(classifier, tokenizer).number
    return (EnsembleHeadModel if size > 1 else ScalarHeadModel)(classifier)


def _new_head(width: int, size: int) -> nn.Linear:
    """Make a head, whose random numbers are the only ones that are drawn before the adapters' numbers."""
    return nn.Linear(width, size, bias=False)


def _classifier_on(causal: PreTrainedModel, path: str) -> PreTrainedModel:
    """Build a classifier around the backbone of a causal LM, which it takes over as it is."""
    config = copy.deepcopy(causal.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            classifier: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise cannot_load(path, config, error) from error
    setattr(classifier, classifier.base_model_prefix, causal.base_model)
    return classifier


def add_adapters(model: ScalarHeadModel, settings: Any, base: str) -> None:
    """Put adapters in float32 into the backbone, freeze the weights below, and let them and the head be trained."""
    from peft import inject_adapter_in_model

    settings.inference_mode = False
    body = model.classifier.base_model
    with quiet_peft(), adding(settings):
        inject_adapter_in_model(settings, body)
    for name, parameter in body.named_parameters():
        parameter.requires_grad_("lora_" in name or "modules_to_save" in name)
        if "lora_" in name and parameter.dtype in HALF_DTYPES:  # peft makes them as the base is kept
            parameter.data = parameter.data.float()
    train_saved_modules(body)
    model.head.requires_grad_(True)
    settings.base_model_name_or_path = base
    model.adapter = settings


def _take_settings(classifier: PreTrainedModel, folder: Path) -> None:
    """Give a classifier the calibration and the number of heads that an adapter's folder has."""
    for name, value in adapter_settings(folder).items():
        setattr(classifier.config, name, value)


def adapter_state(model: ScalarHeadModel, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return adapters, head and modules that are trained whole, by the names that peft gives them in a file.

    `state` holds the classifier's whole weights if this process has only a part of them.
    """
    whole = model.classifier.state_dict() if state is None else state
    return {
        PREFIX + _name_in_file(name): weight.detach().cpu().contiguous()
        for name, weight in whole.items()
        if "lora_" in name or ".modules_to_save." in name or name.startswith("score.")
    }


def _name_in_file(name: str) -> str:
    name = name.replace(".modules_to_save.default", "")
    if "lora_magnitude_vector" in name:
        return name.replace(".default.weight", "")
    return name.replace(".default", "") if "lora_" in name else name


def load_adapter_weights(model: ScalarHeadModel, folder: Path) -> None:
    """Load adapters and head from a folder that `save_adapter`, or peft, wrote.

    Raises:
        ModelError: the file is missing or damaged, or of another shape.
    """
    try:
        saved = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot load the adapter in {str(folder)!r}: {error}") from error
    weights: dict[str, Tensor] = model.classifier.state_dict()
    mine = {PREFIX + _name_in_file(name): name for name in weights if PREFIX + _name_in_file(name) in saved}
    missing = sorted(set(saved) - set(mine)) + sorted(set(adapter_state(model)) - set(saved))
    if missing:
        raise ModelError(
            f"the adapter in {str(folder)!r} does not fit the model: {missing[0]} is only in one of them. Set the lora "
            "section to what it was when the adapter was trained"
        )
    with torch.no_grad():
        for name_in_file, name in _trained(mine, model).items():
            weights[name].copy_(saved[name_in_file])
    _take_settings(model.classifier, folder)


def _trained(mine: Mapping[str, str], model: ScalarHeadModel) -> dict[str, str]:
    """Choose the copy that is trained if a module is there twice: as it was, and as it is trained."""
    names = model.classifier.state_dict()
    return {
        in_file: max((n for n in names if PREFIX + _name_in_file(n) == in_file), key=lambda n: "modules_to_save" in n)
        for in_file in mine
    }


def save_adapter(
    model: ScalarHeadModel, tokenizer: PreTrainedTokenizerBase, folder: Path, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters and the head as a folder that plain peft loads, with their calibration.

    `state` holds the classifier's whole weights if this process has only a part of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    assert model.adapter is not None
    settings = copy.deepcopy(model.adapter)
    settings.task_type = "SEQ_CLS"
    settings.inference_mode = True
    settings.modules_to_save = [*(settings.modules_to_save or []), "score"]
    settings.save_pretrained(str(folder))
    save_file(adapter_state(model, state), folder / WEIGHTS, metadata={"format": "pt"})
    config = model.classifier.config
    kept = {name: getattr(config, name) for name in SCORE_SETTINGS if getattr(config, name, None) is not None}
    described = {"architectures": [type(model.classifier).__name__], "model_type": config.model_type, **kept}
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)


def merged_classifier(model: ScalarHeadModel, state: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Copy the classifier into an ordinary one with the adapters added to its weights; nothing is shared with it."""
    duplicate = make_dense(copy.deepcopy(model.classifier))
    if state is not None:
        duplicate.load_state_dict(dict(state))
    for name, module in list(duplicate.named_modules()):
        if not name:
            continue
        parent, _, attribute = name.rpartition(".")
        if hasattr(module, "lora_A"):
            layer: Any = module
            layer.merge()
            setattr(duplicate.get_submodule(parent), attribute, layer.get_base_layer())
        elif isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            copies: Any = module
            setattr(duplicate.get_submodule(parent), attribute, copies.modules_to_save["default"])
    return duplicate.requires_grad_(True)

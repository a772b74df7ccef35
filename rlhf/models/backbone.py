"""Load and save causal LMs: dtype, LoRA, GGUF files, dropout, gradient checkpointing, vocabulary check."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import PretrainedConfig as HfConfig
from transformers.utils import logging as hf_logging

from rlhf.config.sections import PolicyConfig
from rlhf.config.weights import LoraConfig
from rlhf.data.tokenizer import (
    CUT_OFF,
    ModelLocation,
    adapts_classifier,
    base_of_adapter,
    cut_off_reason,
    locate_model,
    text_vocabulary,
)
from rlhf.errors import ModelError
from rlhf.models.adapters import base_model, is_adapted
from rlhf.models.dither import spread_trained
from rlhf.models.kernels.quantized import KINDS
from rlhf.models.lora import Dropout, adding, peft_settings, quiet_peft, shared_adapted, train_saved_modules
from rlhf.models.stored import make_dense, quantize_layer, store_weights
from rlhf.models.text_config import text_config
from rlhf.models.weight_files import is_split, load_by_module, load_split, local_folder
from rlhf.runtime.engine import Engine

if TYPE_CHECKING:
    from peft import PeftModel

    # A PeftModel forwards attributes that it lacks to the model that it wraps, which no annotation can express.
    CausalLM = PreTrainedModel
else:
    CausalLM = PeftModel = nn.Module

M = TypeVar("M", bound=nn.Module)

ALIGNMENT = 64  # bytes; torch aligns its allocations to this


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context for a run in `dtype`; it does nothing unless that is bfloat16.

    Arithmetic is then in bfloat16, over weights in float32, so that small updates are not lost to rounding.
    """
    if dtype != "bfloat16":
        return nullcontext()
    return torch.autocast(device_type=device.type, dtype=torch.bfloat16)


def weight_dtype(dtype: str) -> torch.dtype:
    """Return the dtype that weights are kept in: float64 if `dtype` is float64, else float32."""
    return torch.float64 if dtype == "float64" else torch.float32


def load_model_config(path: str, *, trust_remote_code: bool = False) -> HfConfig:
    """Load a model's configuration with every dropout set to 0; for an adapter's folder, its base model's.

    Raises:
        ModelError: there is no such folder or hub id, or it holds no model.
    """
    location = locate_model(path)
    if location.is_adapter:
        return load_model_config(base_of_adapter(Path(location.name)), trust_remote_code=trust_remote_code)
    config = published_config(location, trust_remote_code=trust_remote_code)
    _no_dropout(config)
    text = config.get_text_config()
    pad, rows = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and not 0 <= pad < rows:
        text.pad_token_id = None  # Llama 1 has -1, which would index the last embedding, or none
    return config


def published_config(location: ModelLocation, *, trust_remote_code: bool = False) -> HfConfig:
    """Load a model's configuration unchanged, as its folder or file has it.

    Raises:
        ModelError: the configuration cannot be loaded.
    """
    _no_loading_bars()
    try:
        if location.gguf is not None:
            return copy.deepcopy(_gguf_config(location, Path(location.path).stat().st_mtime_ns))
        config: HfConfig = AutoConfig.from_pretrained(location.name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, *CUT_OFF) as error:
        raise ModelError(f"cannot load a model from {location.path!r}: {_first_line(error)}") from error
    return config


@lru_cache(maxsize=2)
def _gguf_config(location: ModelLocation, _changed: int) -> HfConfig:
    config: HfConfig = AutoConfig.from_pretrained(location.name, **location.kwargs())
    return config


def _no_dropout(config: HfConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, HfConfig):
            _no_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("jitter_noise")):
            setattr(config, name, 0.0)  # the jitter of mixtures of experts is noise in train mode too


def load_causal_lm(
    path: str,
    *,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    engine: Engine | None = None,
    kept: str = "auto",
    device: torch.device | None = None,
    is_checkpoint: bool = False,
) -> PreTrainedModel:
    """Load a causal LM from a folder, GGUF file or hub id; an adapter is merged into its base.

    If `engine` splits weights over the ranks, each loads its own part only (see rlhf.models.weight_files). For
    `store_weights`, which comes after, `kept` says how it will keep the weights: 16-bit files are then not widened, and
    layers for int8 and nf4 are quantized one by one as they are read, if the files allow it, and on `device`.

    For arithmetic in bfloat16, float32 weights that rounding would take back to the model they were trained from are
    changed by less than its steps (see `spread_trained`). With `is_checkpoint` they are loaded as they are.

    Raises:
        ModelError: the model cannot be loaded, or is a reward model.
    """
    is_rounded = dtype == "bfloat16" and kept == "auto" and not is_checkpoint
    location = locate_model(path)
    if location.is_adapter:
        folder = Path(location.name)
        _check_writes(path, is_classifier=adapts_classifier(folder))
        base = load_causal_lm(base_of_adapter(folder), dtype=dtype, trust_remote_code=trust_remote_code)
        merged = merge_adapter(base, folder)
        merged.name_or_path = location.name  # the base that a new adapter over it names
        return spread_trained(merged) if is_rounded else merged
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    _check_writes(path, is_classifier=any("Classification" in name for name in config.architectures or []))
    try:
        model = _load_split(location, config, dtype, trust_remote_code, engine)
        if model is None and kept in KINDS:
            model = _load_quantized(location, config, kept, trust_remote_code, device)
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(
                location.name,
                config=config,
                dtype=weight_dtype(dtype) if kept == "auto" else "auto",
                trust_remote_code=trust_remote_code,
                **_gguf_arguments(location),
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, *CUT_OFF) as error:
        raise ModelError(f"cannot load a causal LM from {path!r}: {_first_line(error)}{damaged(path)}") from error
    if location.gguf is not None:
        _forget_quantization(model)
        model.name_or_path = location.path  # the base that an adapter names: the file, its folder may hold others
    model = _plain_generation(train_pad_embedding(align_weights(model)))
    return spread_trained(model, engine if is_split(model) else None) if is_rounded else model


def _check_writes(path: str, *, is_classifier: bool) -> None:
    if is_classifier:
        raise ModelError(f"{path} is a reward model: it writes nothing. Name a run of a policy, or a causal LM")


def _load_split(
    location: ModelLocation, config: HfConfig, dtype: str, trust_remote_code: bool, engine: Engine | None
) -> PreTrainedModel | None:
    if engine is None or not engine.splits_weights or location.gguf is not None:
        return None

    def make() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=weight_dtype(dtype), trust_remote_code=trust_remote_code
        )
        return model

    return load_split(make, local_folder(location), engine)


def _load_quantized(
    location: ModelLocation, config: HfConfig, kept: str, trust_remote_code: bool, device: torch.device | None
) -> PreTrainedModel | None:
    if location.gguf is not None:
        return None

    def make() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return model

    def finish(model: PreTrainedModel, name: str, part: nn.Module) -> None:
        quantize_layer(model, name, part, kept, device)

    return load_by_module(make, local_folder(location), finish)


def train_pad_embedding(model: PreTrainedModel) -> PreTrainedModel:
    """Let the pad token's embedding learn as well: if the pad token is the EOS, it also occurs in texts."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None  # torch gives the row at padding_idx no gradient
    return model


def _gguf_arguments(location: ModelLocation) -> dict[str, Any]:
    if location.gguf is None:
        return {}
    quantization = getattr(transformers, "GgufConfig", None)  # later versions keep the blocks quantized by default
    return {**location.kwargs(), **({"quantization_config": quantization(dequantize=True)} if quantization else {})}


def _forget_quantization(model: PreTrainedModel) -> None:
    """Remove the marks of quantization from a dequantized model, so that it can be trained and saved."""
    attributes = ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config"))
    for holder, name in attributes:
        if hasattr(holder, name):
            delattr(holder, name)
    vars(model)["is_quantized"] = False


def load_policy(
    config: PolicyConfig,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine | None = None,
    *,
    is_checkpoint: bool = False,
) -> CausalLM:
    """Load the model to train whole as `config` describes it, with gradient checkpointing if it asks for it.

    If `engine` splits weights over the ranks, each loads its own part only. A checkpoint's weights are not changed.

    Raises:
        ModelError: the model cannot be loaded, or has no embedding for a token of `tokenizer`.
    """
    model = load_causal_lm(
        path,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        engine=engine,
        is_checkpoint=is_checkpoint,
    )
    if config.weights != "auto":
        store_weights(model, config.weights)
    return prepare_policy(model, config, tokenizer, path)


def prepare_policy(model: CausalLM, config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, path: str) -> CausalLM:
    """Check a loaded policy, with its adapters, against the tokenizer, and set it up for training.

    Raises:
        ModelError: it has no embedding for a token of `tokenizer`.
    """
    check_vocabulary(model, tokenizer, path)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    model.train()
    Dropout(model)  # off until a step, also in the trials of the fast ways
    return model


def check_vocabulary(model: CausalLM, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Check that the model has an embedding for every id that `tokenizer` makes of text; none is ever added.

    Raises:
        ModelError: the tokenizer was made for another model.
    """
    rows = embedding_rows(model)
    token, highest = max(text_vocabulary(tokenizer).items(), key=lambda entry: entry[1])
    if highest >= rows:
        raise ModelError(
            f"the tokenizer has {highest + 1:,} tokens (the last is {token!r}, id {highest}) but the model {path!r} "
            f"has {rows:,} embeddings: they do not belong together. Set policy.tokenizer to the model's own; a model "
            "that is to have more tokens must be given embeddings for them first (docs/decisions/010)"
        )


def embedding_rows(model: CausalLM) -> int:
    """Return the number of rows of the input embedding, also if its weight is split over the ranks."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def add_lora(model: PreTrainedModel, config: LoraConfig) -> CausalLM:
    """Add trainable LoRA adapters to the model and freeze all its other weights."""
    from peft import get_peft_model

    settings = peft_settings(model, config, "CAUSAL_LM")
    with quiet_peft(), adding(settings):
        adapted = cast(CausalLM, get_peft_model(model, settings))
    train_saved_modules(adapted)
    return adapted


def load_adapter(base: PreTrainedModel, folder: Path, *, trainable: bool = True) -> CausalLM:
    """Load the adapter saved in `folder` onto the base model, trainable or frozen.

    Raises:
        ModelError: the adapter cannot be loaded, or is a reward model's.
    """
    _check_writes(str(folder), is_classifier=adapts_classifier(folder))
    adapted = cast(CausalLM, _adapted(base, folder, trainable=trainable))
    if trainable:
        train_saved_modules(adapted)
    return adapted


def enable_gradient_checkpointing(model: CausalLM) -> None:
    """Enable gradient checkpointing: activations are recomputed in the backward pass."""
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # renamed within transformers 5
        model.activation_checkpointing_enable(kwargs)
    else:
        model.gradient_checkpointing_enable(kwargs)
    model.enable_input_require_grads()


@torch.no_grad()
def align_weights(model: M) -> M:
    """Copy weights that are not aligned in memory as fresh tensors are, and return the model.

    The last bit of a matrix product depends on the alignment (MKL). Weights that are views of a file may start at any
    address, so that a resumed run would otherwise differ from one that was never interrupted.
    """
    for parameter in model.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model


def freeze(model: M) -> M:
    """Put the model in evaluation mode, switch its gradients off and return it."""
    model.eval()
    model.requires_grad_(False)
    return model


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode, then restore the mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def move_to(model: M, device: torch.device) -> M:
    """Move the model to `device` and return it."""
    nn.Module.to(model, device)
    return model


def save_model(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, state: dict[str, Tensor] | None = None
) -> None:
    """Save the model and its tokenizer as an ordinary `save_pretrained` folder.

    `state` holds the whole weights if this process has only a part of them.
    """
    # No row is ever added to an embedding; "auto" would look for the config.json of the base, if need be on the hub.
    options: dict[str, Any] = {"save_embedding_layers": False} if is_adapted(model) else {}
    card = folder / "README.md"
    had_card = card.exists()
    with quiet_peft():
        model.save_pretrained(folder, state_dict=state, **options)
    if is_adapted(model) and not had_card:  # peft's, a form that nobody has filled in
        card.unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def eos_ids(model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every token id that ends a completion: the tokenizer's EOS and the ids in the generation settings."""
    eos = model.generation_config.eos_token_id
    configured = eos if isinstance(eos, list) else [eos]
    return tuple(dict.fromkeys(int(token) for token in (tokenizer.eos_token_id, *configured) if token is not None))


def body_of(model: CausalLM) -> nn.Module:
    """Return the transformer without its LM head, adapters in place."""
    base = base_model(model)
    body = base.base_model
    if body is base:  # Llama 4's text model names its prefix after the part of the larger model that it is
        body = base.model
    assert isinstance(body, nn.Module)
    return body


def context_length(model: CausalLM) -> int | None:
    """Return the longest sequence (tokens) the model was made for; None if its configuration does not say."""
    value = getattr(text_config(model), "max_position_embeddings", None)
    return int(value) if value else None


def merge_adapter(base: M, folder: Path) -> M:
    """Merge the adapter saved in `folder` into the base model.

    Raises:
        ModelError: the adapter cannot be loaded.
    """
    adapted = _adapted(base, folder, trainable=False)
    try:
        merged = cast(M, adapted.merge_and_unload())
    except RuntimeError as error:
        raise ModelError(f"cannot merge the adapter in {str(folder)!r}: {_first_line(error)}") from error
    return merged.requires_grad_(True)  # peft freezes adapted weights


def _adapted(base: nn.Module, folder: Path, *, trainable: bool) -> PeftModel:
    from peft import PeftModel as Peft

    try:
        with quiet_peft():
            adapted = Peft.from_pretrained(cast(PreTrainedModel, base), str(folder), is_trainable=trainable)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the adapter in {str(folder)!r}: {_first_line(error)}") from error
    if names := shared_adapted(adapted):
        raise ModelError(
            f"cannot load the adapter in {str(folder)!r}: it changes {names[0]}, whose weight another layer of its "
            "base shares, so that it cannot be merged. Train an adapter without this layer"
        )
    return adapted


def merged_copy(model: CausalLM, state: dict[str, Tensor] | None) -> PreTrainedModel:
    """Copy the model into an ordinary one, adapters merged, that shares no memory with it.

    `state` holds the whole weights if this process has only a part of them.
    """
    if state is None:
        duplicate = make_dense(copy.deepcopy(model))
    else:
        base = base_model(model)
        dtype = next(iter(state.values())).dtype
        # Not by AutoModelForCausalLM, which does not know the class of a model that came with its own code.
        plain = type(base)._from_config(copy.deepcopy(base.config), dtype=dtype)
        plain.generation_config = copy.deepcopy(base.generation_config)
        duplicate = plain
        if is_adapted(model):
            from peft import get_peft_model

            with quiet_peft():
                duplicate = get_peft_model(plain, copy.deepcopy(model.peft_config["default"]))
        duplicate.load_state_dict(state)
    return cast(PreTrainedModel, duplicate.merge_and_unload()) if is_adapted(duplicate) else duplicate


def _plain_generation(model: PreTrainedModel) -> PreTrainedModel:
    """Keep the folder's special token ids and drop its top-k, penalties and the like, which the sampler sets itself."""
    published = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=published.bos_token_id,
        eos_token_id=published.eos_token_id,
        pad_token_id=published.pad_token_id,
    )
    return model


def _no_loading_bars() -> None:
    """Silence transformers' progress bars and its tables of new weights: our own lines are the display."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()


def damaged(path: str) -> str:
    """Return how to get the exported model of a run again; empty if `path` is none."""
    if Path(path).name != "model" or not (Path(path).parent / "checkpoints").is_dir():
        return ""
    return f". If its files are damaged, remove {path}: the command that trained the run writes it again"


def _first_line(error: Exception) -> str:
    lines = (cut_off_reason(error) or str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__

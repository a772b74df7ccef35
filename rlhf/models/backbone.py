"""Load and save causal LMs: dtype, LoRA, dropout off, gradient checkpointing, vocabulary check."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, load_peft_weights
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers import PretrainedConfig as HfConfig
from transformers.utils import logging as hf_logging

from rlhf.config.sections import LoraConfig, PolicyConfig
from rlhf.errors import ModelError

if TYPE_CHECKING:  # a PeftModel passes on whatever it lacks to the model it wraps, which no annotation can say
    CausalLM = PreTrainedModel
else:
    CausalLM = PreTrainedModel | PeftModel

ALIGNMENT = 64  # bytes, as torch allocates


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[None]:
    """bfloat16: arithmetic in bf16 over float32 weights, so that small updates are not lost; else nothing."""
    if dtype != "bfloat16":
        return nullcontext()
    return torch.autocast(device_type=device.type, dtype=torch.bfloat16)


def weight_dtype(dtype: str) -> torch.dtype:
    """The dtype weights are kept in."""
    return torch.float64 if dtype == "float64" else torch.float32


def load_model_config(path: str, *, trust_remote_code: bool = False) -> HfConfig:
    """The model's configuration with every dropout off.

    Raises:
        ModelError: there is no such folder or hub id, or it holds no model.
    """
    _check_local(path)
    _no_loading_bars()
    try:
        config: HfConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load a model from {path!r}: {_first_line(error)}") from error
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    return config


def load_causal_lm(path: str, *, dtype: str = "float32", trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal LM from a folder or hub id; an adapter folder is loaded over its base and merged.

    Raises:
        ModelError: it cannot be loaded.
    """
    folder = Path(path)
    if (folder / "adapter_config.json").is_file():
        return _merged_adapter(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=weight_dtype(dtype), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load a causal LM from {path!r}: {_first_line(error)}") from error
    return _plain_generation(aligned(model))


def load_policy(config: PolicyConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> CausalLM:
    """The model to train, as `config` asks, with room for every token of `tokenizer`."""
    model = load_causal_lm(path, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    fit_vocabulary(model, tokenizer, path)
    if config.lora is not None:
        model = add_lora(model, config.lora)
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    model.train()
    return model


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Add embedding rows for tokens that we added (a pad token); refuse a tokenizer of another model.

    Raises:
        ModelError: the tokenizer has many more tokens than the model has embeddings.
    """
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    rows = weight.shape[0]
    added = getattr(tokenizer, "rlhf_added_tokens", 0)
    if len(tokenizer) - added > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer) - added} tokens but the model {path!r} has {rows} embeddings: "
            "they do not belong together; set policy.tokenizer to the model's own"
        )
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)


def add_lora(model: PreTrainedModel, config: LoraConfig) -> CausalLM:
    """The model with trainable low-rank adapters; all else is frozen."""
    target = config.target_modules
    adapter = PeftLoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=0.0,
        target_modules=target if isinstance(target, str) else list(target),
        task_type="CAUSAL_LM",
    )
    with _quiet_peft():
        return cast(CausalLM, get_peft_model(model, adapter))


def load_adapter(base: PreTrainedModel, folder: Path) -> CausalLM:
    """The base model with the adapter saved in `folder`, trainable.

    Raises:
        ModelError: it cannot be loaded.
    """
    return cast(CausalLM, _adapted(base, folder, trainable=True))


def enable_checkpointing(model: CausalLM) -> None:
    """Recompute activations in the backward pass."""
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # renamed within transformers 5
        model.activation_checkpointing_enable(kwargs)
    else:
        model.gradient_checkpointing_enable(kwargs)
    model.enable_input_require_grads()


M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def aligned(model: M) -> M:
    """The model with its weights where fresh tensors stand: the last bit of a matrix product depends on it (MKL).

    Weights that are views of a file stand anywhere; a run that continues from one would else differ from one that
    went on.
    """
    for parameter in model.parameters():
        if parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model


def freeze(model: M) -> M:
    """Evaluation mode, no gradients."""
    model.eval()
    model.requires_grad_(False)
    return model


def place(model: M, device: torch.device) -> M:
    """The model, moved to `device`."""
    nn.Module.to(model, device)
    return model


def save_model(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path, state: dict[str, Tensor] | None = None
) -> None:
    """An ordinary `save_pretrained` folder, tokenizer included.

    `state` are the whole weights where this process has only a part of them.
    """
    with _quiet_peft():
        model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)


def eos_ids(model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, and those of the model's generation settings."""
    own = model.generation_config.eos_token_id
    listed = own if isinstance(own, list) else [own]
    return tuple(dict.fromkeys(int(token) for token in (tokenizer.eos_token_id, *listed) if token is not None))


def body_of(model: CausalLM) -> nn.Module:
    """The transformer without its head, adapters in place."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    body = base.base_model
    assert isinstance(body, nn.Module)
    return body


def context_length(model: CausalLM) -> int | None:
    """The longest sequence the model was made for, where its configuration says."""
    value = getattr(model.config, "max_position_embeddings", None)
    return int(value) if value else None


def _merged_adapter(folder: Path, *, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    from_adapter = PeftLoraConfig.from_pretrained(str(folder))
    base = load_causal_lm(str(from_adapter.base_model_name_or_path), dtype=dtype, trust_remote_code=trust_remote_code)
    return cast(PreTrainedModel, _adapted(base, folder, trainable=False).merge_and_unload())


def _adapted(base: PreTrainedModel, folder: Path, *, trainable: bool) -> PeftModel:
    try:
        _make_room(base, load_peft_weights(str(folder), device="cpu"))
        with _quiet_peft():
            return PeftModel.from_pretrained(base, str(folder), is_trainable=trainable)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the adapter in {str(folder)!r}: {_first_line(error)}") from error


def _make_room(base: PreTrainedModel, adapter: Mapping[str, Tensor]) -> None:
    """An adapter trained with an added pad token brings its embeddings along: more rows than its base has."""
    embeddings = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embeddings)
    for key, weight in adapter.items():
        if key.endswith(f"{name}.weight"):
            base.resize_token_embeddings(weight.shape[0], mean_resizing=False)


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """What peft 0.21 says that is not the user's concern: a property that transformers renamed, embeddings it saves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`", category=UserWarning)
        yield


def whole_copy(model: CausalLM, state: dict[str, Tensor] | None) -> PreTrainedModel:
    """An ordinary model with the same weights, adapters merged, that shares nothing with `model`.

    `state` are the whole weights where this process has only a part of them.
    """
    if state is None:
        twin = copy.deepcopy(model)
    else:
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        plain = AutoModelForCausalLM.from_config(base.config, dtype=next(iter(state.values())).dtype)
        plain.generation_config = copy.deepcopy(base.generation_config)
        twin = plain
        if isinstance(model, PeftModel):
            with _quiet_peft():
                twin = get_peft_model(plain, copy.deepcopy(model.peft_config["default"]))
        twin.load_state_dict(state)
    return cast(PreTrainedModel, twin.merge_and_unload()) if isinstance(twin, PeftModel) else twin


def _plain_generation(model: PreTrainedModel) -> PreTrainedModel:
    """Keep the folder's token ids, drop its top-k, penalties and the like: the sampler says everything itself."""
    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    return model


def _check_local(path: str) -> None:
    looks_local = path.startswith((".", "/", "~", "runs/")) or path.count("/") > 1
    if looks_local and not Path(path).is_dir():
        raise ModelError(f"no model folder {path!r}: give an existing folder or a hub id")


def _no_loading_bars() -> None:
    """Every load and save draws a bar, and a new head a table of warnings: our own lines are the display."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

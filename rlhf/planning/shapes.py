"""The widths of a model, read from its config.json or from a table of published models, without its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.config.weights import LoraConfig
from rlhf.model_files import ADAPTER, CONFIG, adapter_at, existing_folder, read_header, read_json

WRITTEN_OUT = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma3", "gemma3_text")
"""The model types whose layers have a forward and backward pass of our own; see rlhf.models.kernels.llama.families."""

_HALF_NORMS, _ALL_NORMS = 2, 4  # norms of width `hidden` in a layer
_NORMS = {"gemma3": _ALL_NORMS, "gemma3_text": _ALL_NORMS, "gemma2": _ALL_NORMS}
_HEAD_NORMS = ("qwen3", "gemma3", "gemma3_text")  # a norm over each head of queries and keys
_WIDE_NORMS = ("olmo2",)  # a norm over all heads of queries, and one of keys
_INPUT_BIASES = ("qwen2",)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The widths of a decoder-only transformer with gated feed-forward halves."""

    family: str
    """`model_type` of config.json."""
    hidden: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values."""
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the LM head is the embedding."""
    stored: str = "float32"
    """The dtype of the weights in their files."""
    is_gated: bool = True
    """Whether the feed-forward half has a gate."""
    context: int | None = None
    """The most tokens of a row; None if config.json names no limit."""
    other: int = 0
    """Parameters beyond those that these widths give; negative if there are fewer."""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the matrices of a layer, outputs and inputs of each, by peft's name of the module."""
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        half = {"up_proj": (self.intermediate, self.hidden), "down_proj": (self.hidden, self.intermediate)}
        gate = {"gate_proj": (self.intermediate, self.hidden)} if self.is_gated else {}
        return {
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            **gate,
            **half,
        }

    @property
    def linear(self) -> int:
        """Return the weights in the matrices of all layers, without embedding and head."""
        return self.layers * sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def embedding(self) -> int:
        """Return the weights of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def vectors(self) -> int:
        """Return the weights of norms and biases."""
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        layer = _NORMS.get(self.family, _HALF_NORMS) * self.hidden
        layer += 2 * self.head_dim if self.family in _HEAD_NORMS else 0
        layer += queries + keys if self.family in _WIDE_NORMS else 0
        layer += queries + 2 * keys if self.family in _INPUT_BIASES else 0
        return self.layers * layer + self.hidden

    @property
    def parameters(self) -> int:
        """Return the parameters of the causal LM; a tied head counts once."""
        return self.linear + self.vectors + self.embedding * (1 if self.tied else 2) + self.other

    @property
    def backbone(self) -> int:
        """Return the parameters without the LM head, as a critic or a reward model has them, with one scalar head."""
        return self.parameters - (0 if self.tied else self.embedding) + self.hidden

    @property
    def is_written_out(self) -> bool:
        """Return whether the layers of this family have passes of our own."""
        return self.family in WRITTEN_OUT

    def adapters(self, r: int, targets: list[str] | str) -> int:
        """Return the parameters of LoRA adapters of rank r: r (inputs + outputs) for each adapted matrix.

        `targets` are names of modules, or all-linear.
        """
        names = None if isinstance(targets, str) else {name.rpartition(".")[2] for name in targets}
        adapted = [size for name, size in self.matrices.items() if names is None or name in names]
        return self.layers * sum(r * (rows + columns) for rows, columns in adapted)


def _llama(family: str, widths: tuple[int, ...], *, tied: bool, head_dim: int | None = None) -> Shape:
    hidden, layers, heads, groups, intermediate, vocabulary = widths
    return Shape(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        groups=groups,
        head_dim=head_dim or hidden // heads,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied=tied,
        stored="bfloat16",
    )


PUBLISHED: Mapping[str, Shape] = {
    "HuggingFaceTB/SmolLM2-135M": _llama("llama", (576, 30, 9, 3, 1536, 49152), tied=True),
    "HuggingFaceTB/SmolLM2-360M": _llama("llama", (960, 32, 15, 5, 2560, 49152), tied=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama("llama", (2048, 24, 32, 32, 8192, 49152), tied=True),
    "Qwen/Qwen2.5-0.5B": _llama("qwen2", (896, 24, 14, 2, 4864, 151936), tied=True),
    "Qwen/Qwen2.5-1.5B": _llama("qwen2", (1536, 28, 12, 2, 8960, 151936), tied=True),
    "Qwen/Qwen2.5-3B": _llama("qwen2", (2048, 36, 16, 2, 11008, 151936), tied=True),
    "Qwen/Qwen2.5-7B": _llama("qwen2", (3584, 28, 28, 4, 18944, 152064), tied=False),
    "meta-llama/Llama-3.2-1B": _llama("llama", (2048, 16, 32, 8, 8192, 128256), tied=True),
    "meta-llama/Llama-3.2-3B": _llama("llama", (3072, 28, 24, 8, 8192, 128256), tied=True),
    "meta-llama/Llama-3.1-8B": _llama("llama", (4096, 32, 32, 8, 14336, 128256), tied=False),
    "google/gemma-3-1b": _llama("gemma3_text", (1152, 26, 4, 1, 6912, 262144), tied=True, head_dim=256),
    "google/gemma-3-4b": _llama("gemma3_text", (2560, 34, 8, 4, 10240, 262208), tied=True, head_dim=256),
}
"""The shapes of published models, as in their config.json; of Gemma 3 4B the text model."""

_VARIANTS = ("-instruct", "-it", "-pt", "-base")


def published_shape(name: str) -> Shape | None:
    """Return the shape of a published model by its hub id, in any of its variants; None for another."""
    wanted = name.rpartition("/")[2].lower()
    for variant in _VARIANTS:
        wanted = wanted.removesuffix(variant)
    matching = [shape for known, shape in PUBLISHED.items() if known.rpartition("/")[2].lower() == wanted]
    return matching[0] if matching and ("/" in name or not Path(name).exists()) else None


def read_shape(path: str, *, may_make: bool = False) -> Shape | None:
    """Return the shape of a model: a folder, a run folder, a hub id in the cache or in the table; None if unknown.

    With `may_make` transformers makes a model of another family on the meta device, which takes seconds.
    """
    folder = existing_folder(path)
    if folder is None:
        return published_shape(path) or _cached(path, may_make=may_make)
    if (folder / ADAPTER).is_file():
        base = str(read_json(folder / ADAPTER).get("base_model_name_or_path") or "")
        names_itself = not base or Path(base).resolve() == folder.resolve()
        return None if names_itself else read_shape(base, may_make=may_make)
    if not (folder / CONFIG).is_file():
        return None
    shape = shape_of_config(read_json(folder / CONFIG))
    if shape is None and may_make:
        return _made_on_meta(str(folder))
    return None if shape is None else _as_stored(shape, folder)


def continued_adapter(path: str, lora: LoraConfig | None, *, head: bool) -> dict[str, Any]:
    """Return peft's settings of the adapter at `path` if it is trained further; empty if it is merged.

    `head`: whether the model has an LM head; a scalar head continues a reward model's adapter only.
    """
    settings = {} if lora is None or lora.start == "merge" else adapter_at(path)
    return settings if head or settings.get("task_type") == "SEQ_CLS" else {}


def _cached(name: str, *, may_make: bool) -> Shape | None:
    """Return the shape of a hub model whose config.json is in the cache; None if it is not."""
    if name.count("/") != 1:
        return None
    import huggingface_hub  # takes a third of a second, and only a hub id needs it

    try:
        file = huggingface_hub.try_to_load_from_cache(name, CONFIG)
    except huggingface_hub.errors.HFValidationError:
        return None
    if not isinstance(file, str):
        return None
    return shape_of_config(read_json(Path(file))) or (_made_on_meta(name) if may_make else None)


_KNOWN = (*WRITTEN_OUT, "gemma2", "gemma", "olmo", "smollm3", "granite")


def shape_of_config(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape that a config.json describes; None for a family that is not known here."""
    text = {**config, **config.get("text_config", {})} if isinstance(config.get("text_config"), Mapping) else config
    family = str(text.get("model_type", ""))
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if family not in _KNOWN or not all(isinstance(text.get(name), int) for name in needed):
        return None
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    tied = text.get("tie_word_embeddings")
    return Shape(
        family=family,
        hidden=hidden,
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        groups=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        intermediate=int(text["intermediate_size"]),
        vocabulary=int(text["vocab_size"]),
        tied=family.startswith("gemma") if tied is None else bool(tied),
        stored=str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "float32"),
        context=text.get("max_position_embeddings"),
    )


_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def _as_stored(shape: Shape, folder: Path) -> Shape:
    """Return the shape with the dtype of most of the parameters in the weight files."""
    tensors = [tensor for file in sorted(folder.glob("*.safetensors")) for tensor in read_header(file)[0].values()]
    if not tensors:
        return shape
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor["dtype"]] = counts.get(tensor["dtype"], 0) + math.prod(tensor["shape"])
    stored = _DTYPES.get(max(counts, key=lambda kind: counts[kind]), shape.stored)
    return replace(shape, stored=stored)


def _made_on_meta(name: str) -> Shape | None:
    """Return the shape of a model that transformers makes without memory; None if it cannot."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError):
        return None
    heads = int(config.num_attention_heads)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
    shape = Shape(
        family=str(config.model_type),
        hidden=int(config.hidden_size),
        layers=int(config.num_hidden_layers),
        heads=heads,
        groups=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        intermediate=int(inner),
        vocabulary=int(config.vocab_size),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        stored=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
        is_gated=False,
        context=getattr(config, "max_position_embeddings", None),
    )
    counted = sum(weight.numel() for weight in model.parameters())
    return replace(shape, other=counted - shape.parameters)

"""Write a Llama with a byte-level tokenizer as one GGUF file, the format of llama.cpp.

Values and names are as in the files of llama.cpp's own converter: docs/gguf.md of the ggml project.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType, quants
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.errors import ModelError

GgufDtype = Literal["f32", "f16", "bf16"]
SUPPORTED = "models of type llama with a byte-level BPE tokenizer and unscaled rotations, such as SmolLM2"

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LLAMA3_WORDS = (  # how Llama 3 splits a text before byte-pair encoding
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, *, dtype: GgufDtype) -> None:
    """Write the model and its tokenizer as a GGUF file: matrices in `dtype`, norms in float32, as llama.cpp needs them.

    Args:
        model: a Llama.
        tokenizer: byte-level BPE; its vocabulary, merges, special ids and chat template are written.
        dtype: of the matrices.

    Raises:
        ModelError: the model or its tokenizer is of another kind.
    """
    _check_model(model)
    backend = _backend(tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    writer = GGUFWriter(new, "llama")
    try:
        _add_settings(writer, model, name=path.stem, dtype=dtype)
        _add_tokenizer(writer, tokenizer, backend, vocabulary=model.config.vocab_size)
        for tensor_name, weight in _tensors(model):
            _add_tensor(writer, tensor_name, weight, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _check_model(model: PreTrainedModel) -> None:
    """Check that llama.cpp would compute the same as the model.

    Raises:
        ModelError: it would compute something else, or this is unknown.
    """
    config = model.config
    rope = dict(getattr(config, "rope_parameters", None) or {})
    biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    activation = getattr(config, "hidden_act", None)
    reasons = {
        f"it is of type {config.model_type}": config.model_type != "llama",
        "it is not a causal language model": model.get_output_embeddings() is None,
        f"its rotations are scaled ({rope.get('rope_type')})": rope.get("rope_type", "default") != "default",
        "it has biases": bool(biases),
        f"its activation is {activation}": activation not in ("silu", "swish"),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelError(f"cannot be written as GGUF: {reason}. Supported are {SUPPORTED}")


def _backend(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the content of tokenizer.json.

    Raises:
        ModelError: the tokenizer is not byte-level BPE.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = json.loads(fast.to_str()) if fast is not None else {}
    kind = content.get("model", {}).get("type")
    if kind != "BPE" or content.get("normalizer") is not None:
        raise ModelError(
            f"cannot be written as GGUF: its tokenizer is {kind or 'not a fast one'}. Supported: {SUPPORTED}"
        )
    _words(content)
    return content


def _words(content: dict[str, Any]) -> str:
    """Return llama.cpp's name for how the tokenizer splits a text before byte-pair encoding.

    Raises:
        ModelError: it has none that we know.
    """
    splitter = content.get("pre_tokenizer") or {}
    match splitter.get("pretokenizers", [splitter]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return "smollm"
        case [{"type": "Split", "pattern": {"Regex": pattern}}, {"type": "ByteLevel", "use_regex": False}] if (
            pattern == _LLAMA3_WORDS
        ):
            return "llama-bpe"
    raise ModelError(
        f"cannot be written as GGUF: its tokenizer splits texts in a way of its own. Supported: {SUPPORTED}"
    )


def _add_settings(writer: GGUFWriter, model: PreTrainedModel, *, name: str, dtype: GgufDtype) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = {"f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16, "bf16": LlamaFileType.MOSTLY_BF16}
    writer.add_name(name)
    writer.add_file_type(types[dtype])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, content: dict[str, Any], *, vocabulary: int
) -> None:
    """Add the tokens, their merges, the special ids and the chat template; ids without a token are unused ones."""
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    kinds = [TokenType.UNUSED] * vocabulary
    for token, number in content["model"]["vocab"].items():
        tokens[number], kinds[number] = token, TokenType.NORMAL
    for added in content.get("added_tokens", []):
        if added["id"] < vocabulary:  # a padding token appended after the vocabulary has no embedding
            tokens[added["id"]] = added["content"]
            kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_words(content))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    special: dict[str, Callable[[int], None]] = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for name, add in special.items():
        number = getattr(tokenizer, f"{name}_token_id")
        if isinstance(number, int) and number < vocabulary:
            add(number)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by llama.cpp's names and in its order of rows; a tied output layer is not there twice."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if not name.startswith("model.layers."):
            yield _NAMES[name], weight
            continue
        _, _, layer, rest = name.split(".", 3)
        part = _LAYER_NAMES[rest.removesuffix(".weight")]
        yield f"blk.{layer}.{part}.weight", interleave(weight, heads[part]) if part in heads else weight


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Convert the order of the rows of a query or key projection [heads · d, n] from halves to pairs.

    transformers rotates entry i of a head with entry i + d/2, llama.cpp entry 2i with entry 2i + 1.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).transpose(1, 2).reshape(weight.shape)


def _add_tensor(writer: GGUFWriter, name: str, weight: Tensor, dtype: GgufDtype) -> None:
    values = weight.detach().to(torch.float32).cpu().contiguous().numpy()
    if weight.ndim < 2 or dtype == "f32":
        writer.add_tensor(name, values)
        return
    kind = GGMLQuantizationType.F16 if dtype == "f16" else GGMLQuantizationType.BF16
    writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)

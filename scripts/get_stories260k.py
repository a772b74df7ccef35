"""Fetch stories260K, a Llama of 260,032 parameters that writes children's stories, as an ordinary model folder.

    python scripts/get_stories260k.py [--out models/stories260k] [--from FOLDER]

Andrej Karpathy's tinyllamas/stories260K (MIT), in llama2.c's format. It is the smallest real model there is: PPO takes
three minutes on a CPU. --from names a folder with stories260K.bin and tok512.bin, downloaded elsewhere.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from get_data import GetDataError, raw, read

from rlhf.process import silence_libraries

REPOSITORY, COMMIT = "ytmytm/llama2.c64", "12b5bec82eb980362b8a7bfe86992a552a492481"
WEIGHTS = raw(
    REPOSITORY, COMMIT, "stories260K.bin", 1056540, "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696"
)
TOKENIZER = raw(
    REPOSITORY, COMMIT, "tok512.bin", 6227, "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312"
)
SPACE = "\u2581"  # how the vocabulary writes a space
NOTE = "# stories260K\n\nAndrej Karpathy's tinyllamas/stories260K, MIT licence, converted from llama2.c's format.\n"


def main() -> int:
    """Write the model folder, unless it exists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("models/stories260k"), help="the folder to write")
    parser.add_argument("--from", dest="folder", type=Path, help="a folder with the two source files")
    parsed = parser.parse_args()
    out: Path = parsed.out
    if (out / "config.json").is_file():
        print(f"{out} is already there: nothing to do")  # noqa: T201
        return 0
    try:
        weights = read(WEIGHTS, parsed.folder, "stories")
        vocabulary = read(TOKENIZER, parsed.folder, "stories")
    except GetDataError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    silence_libraries()
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(vocabulary, out)
    write_model(weights, out)
    (out / "README.md").write_text(NOTE, encoding="utf-8")
    print(f"{out}: stories260K")  # noqa: T201
    return 0


def write_model(content: bytes, folder: Path) -> None:
    """Write the weights as a transformers Llama; llama2.c interleaves the halves of rotary pairs."""
    import torch  # noqa: PLC0415  # imported only after the libraries were silenced
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack("<7i", content[:28])
    numbers = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    place = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        size = int(torch.Size(shape).numel())
        place += size
        return numbers[place - size : place].view(shape).clone()

    def halves(weight: torch.Tensor, count: int) -> torch.Tensor:
        return (
            weight.view(count, weight.shape[0] // count // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        )

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    kv = dim // heads * kv_heads
    state = {"model.embed_tokens.weight": take(vocabulary, dim)}
    parts = (
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (dim, dim)),
        ("self_attn.k_proj", (kv, dim)),
        ("self_attn.v_proj", (kv, dim)),
        ("self_attn.o_proj", (dim, dim)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (hidden, dim)),
        ("mlp.down_proj", (dim, hidden)),
        ("mlp.up_proj", (hidden, dim)),
    )
    for part, shape in parts:
        for layer in range(layers):
            weight = take(*shape)
            if part.endswith(("q_proj", "k_proj")):
                weight = halves(weight, heads if part.endswith("q_proj") else kv_heads)
            state[f"model.layers.{layer}.{part}.weight"] = weight
    state["model.norm.weight"] = take(dim)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.save_pretrained(folder)


def pieces(content: bytes) -> Iterator[tuple[float, str]]:
    """Yield score and text of each token of llama2.c's vocabulary file."""
    place = 4  # after the length of the longest token
    while place < len(content):
        score, length = struct.unpack("<fi", content[place : place + 8])
        yield score, content[place + 8 : place + 8 + length].decode("utf-8")
        place += 8 + length


def write_tokenizer(content: bytes, folder: Path) -> None:
    """Write the vocabulary as a fast tokenizer: SentencePiece's merges in the order of their scores, with bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    scored = list(pieces(content))
    special = ["<unk>", "<s>", "</s>"]
    names = special + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [text.replace(" ", SPACE) for _, text in scored[len(names) :]]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=list(merges(names)), unk_token=special[0], fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # the name of a token
        eos_token="<s>",
        unk_token="<unk>",
        pad_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )
    fast.save_pretrained(folder)


def merges(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that make another, the best first: later tokens of the vocabulary have lower scores."""
    known = set(names)
    for name in names[259:]:
        cuts = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
        yield from sorted((pair for pair in cuts if known.issuperset(pair)), key=lambda pair: names.index(pair[0]))


if __name__ == "__main__":
    sys.exit(main())

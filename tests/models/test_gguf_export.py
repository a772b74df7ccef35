"""A Llama written as GGUF is read back as the same model, by transformers and by llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from real_model import FOLDER, real_model
from rich.console import Console
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from rlhf.cli import main
from rlhf.commands.push import run_export
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ModelError
from rlhf.models.gguf_export import GgufDtype, interleave, write_gguf

TEMPLATE = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
WIDE = {"max_position_embeddings": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def byte_tokenizer(pre: pre_tokenizers.PreTokenizer | None = None) -> PreTrainedTokenizerFast:
    """256 bytes, two merges and two special tokens: 260 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate(["<s>", "<end>", *alphabet, "th", "the"])}
    backend = Tokenizer(models.BPE(words, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def llama(*, tied: bool = False, vocab: int = 262) -> PreTrainedModel:
    return tiny(vocab=vocab, dtype=torch.float32, tie_word_embeddings=tied, **WIDE)


def greedy(model: PreTrainedModel, ids: list[int], count: int = 64) -> list[int]:
    prompt = torch.tensor([ids])  # its mask is given: else its ends of turns, which are the pad token, would be masked
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None)
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_back_the_same_weights_and_tokens(tmp_path: Path, tied: bool) -> None:
    model, tokenizer = llama(tied=tied), byte_tokenizer()
    write_gguf(model, tokenizer, tmp_path / "a.gguf", dtype="f32")
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf")
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())
    assert back.config.head_dim == 8
    ids = tokenizer("the other")["input_ids"]
    assert len(ids) == 5  # the, a space, o, the, r
    assert greedy(back, ids) == greedy(model, ids)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    for text in ("the other thing", "Hé 12\n"):
        assert read(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"]
    assert (read.eos_token, read.pad_token, read.bos_token, read.chat_template) == ("<end>", "<end>", "<s>", TEMPLATE)


@pytest.mark.parametrize(("dtype", "kept"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_matrices_are_rounded_and_norms_are_not(tmp_path: Path, dtype: GgufDtype, kept: torch.dtype) -> None:
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    write_gguf(model, byte_tokenizer(), tmp_path / "a.gguf", dtype=dtype)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(back[name].float(), weight if weight.ndim == 1 else weight.to(kept).float()), name


def test_the_file_has_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    write_gguf(llama(), byte_tokenizer(), tmp_path / "a.gguf", dtype="f16")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "a.gguf").fields.items()}
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.merges"] == ["t h", "th e"]
    assert fields["tokenizer.ggml.tokens"][-4:] == ["th", "the", "[PAD260]", "[PAD261]"]
    assert fields["tokenizer.ggml.token_type"][:3] == [3, 3, 1]  # control, control, normal
    assert fields["tokenizer.ggml.token_type"][-2:] == [5, 5]  # unused
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["general.architecture"] == "llama"


def test_rows_of_a_head_go_from_halves_to_pairs() -> None:
    """Two heads of four rows: rotation pairs rows 0, 2 and 1, 3 of each."""
    assert interleave(torch.arange(8.0)[:, None], heads=2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_other_models_are_refused_by_name(tmp_path: Path, family: str) -> None:
    with pytest.raises(ModelError, match=rf"of type {family}.*llama"):
        write_gguf(tiny(family), byte_tokenizer(), tmp_path / "a.gguf", dtype="f32")
    assert not list(tmp_path.iterdir())


def test_scaled_rotations_activations_and_other_tokenizers_are_refused(tmp_path: Path) -> None:
    scaled = llama()
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ModelError, match=r"rotations are scaled \(linear\)"):
        write_gguf(scaled, byte_tokenizer(), tmp_path / "a.gguf", dtype="f32")
    with pytest.raises(ModelError, match="its activation is gelu"):
        write_gguf(tiny(hidden_act="gelu", **WIDE), byte_tokenizer(), tmp_path / "a.gguf", dtype="f32")
    for pre in (pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=True)):
        with pytest.raises(ModelError, match="splits texts"):
            write_gguf(llama(), byte_tokenizer(pre), tmp_path / "a.gguf", dtype="f32")


def test_the_command_writes_a_model_folder(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "out" / "a.gguf"
    assert main(["export", str(tmp_path / "model"), "--gguf", str(out), "--dtype", "f32"]) == 0
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(out.parent, gguf_file=out.name).lm_head.weight, llama().lm_head.weight
    )


SEA = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.mark.slow
def test_smollm2_is_read_back_by_transformers(shared: Path, tmp_path: Path) -> None:
    model, tokenizer = real_model(shared), load_tokenizer(str(shared / FOLDER))
    run_export(str(shared / FOLDER), tmp_path / "a.gguf", dtype="f32", console=Console(quiet=True))
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())
    ids = tokenizer.apply_chat_template(SEA, add_generation_prompt=True, return_dict=False)
    assert load_tokenizer(str(tmp_path)).apply_chat_template(SEA, add_generation_prompt=True, return_dict=False) == ids
    assert greedy(back, ids) == greedy(model, ids)


@pytest.mark.slow
def test_llama_cpp_writes_the_same_64_tokens(shared: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = load_tokenizer(str(shared / FOLDER))
    run_export(str(shared / FOLDER), tmp_path / "a.gguf", dtype="f32", console=Console(quiet=True))
    ids = tokenizer.apply_chat_template(SEA, add_generation_prompt=True, return_dict=False)
    f32 = llama_cpp.GGML_TYPE_F32  # its cache in half precision, the default, moves logits by .05: more than some gaps
    reader = llama_cpp.Llama(str(tmp_path / "a.gguf"), n_ctx=256, type_k=f32, type_v=f32, verbose=False)
    tokens = reader.generate(list(ids), temp=0.0, repeat_penalty=1.0)
    assert [next(tokens) for _ in range(64)] == greedy(real_model(shared), ids)
    reader.close()

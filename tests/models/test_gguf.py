"""A GGUF file is accepted wherever a model or a tokenizer is; it is read as an ordinary model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf
import pytest
import torch
from published import files
from runs import write_rows
from safetensors.torch import load_file
from tiny_models import tiny
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, PreTrainedModel, PreTrainedTokenizerBase

from reward_model.source import RewardModelSource
from rlhf.config.data import ChatFormat, PreferencesConfig, PromptsConfig, SftConfig
from rlhf.config.sections import PolicyConfig, SamplingConfig
from rlhf.config.weights import LoraConfig
from rlhf.data.pairs import demonstration_pipeline, pair_pipeline
from rlhf.data.prompts import prompt_pipeline
from rlhf.data.tokenizer import ADDED_TO_GGUF, base_of_adapter, load_tokenizer
from rlhf.errors import ModelError
from rlhf.factory.sampler import Completer
from rlhf.models.backbone import add_lora, load_causal_lm, load_policy, merged_copy, save_model
from rlhf.models.export import export_model, read_origin
from rlhf.models.scalar_head import load_scalar_head
from rlhf.types import Completions

TEMPLATE = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
NAMES = {
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


def byte_model() -> PreTrainedModel:
    return tiny(vocab=259, dtype=torch.float32, tie_word_embeddings=True, head_dim=8, num_key_value_heads=2).eval()


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The rows of a query or key projection as llama.cpp orders them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path) -> Path:
    """A Llama of two layers over bytes, pad token its EOS, in float32."""
    model, config = byte_model(), byte_model().config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "<end>", *sorted(ByteLevel.alphabet()), "th"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["t h"])
    for add, number in ((writer.add_bos_token_id, 0), (writer.add_eos_token_id, 1), (writer.add_pad_token_id, 1)):
        add(number)
    writer.add_chat_template(TEMPLATE)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            stored = interleaved(weight, 2) if "q_proj" in name or "k_proj" in name else weight
            writer.add_tensor(gguf_name(name), stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model.eval()(torch.arange(2, 40)[None]).logits


def test_a_file_is_an_ordinary_model(file: Path) -> None:
    model = load_causal_lm(str(file))
    assert torch.equal(logits(model), logits(byte_model()))
    assert not hasattr(model.config, "quantization_config")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    model(torch.arange(2, 9)[None]).logits.logsumexp(-1).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_its_tokenizer_and_template_come_with_it(file: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template) == ("<end>", "<end>", TEMPLATE)
    assert tokenizer.decode(tokenizer("Hé", add_special_tokens=False)["input_ids"]) == "Hé"


def test_text_that_spells_the_token_transformers_appends_is_read_as_text(file: Path, tmp_path: Path) -> None:
    """The appended token has no embedding: its id would be an IndexError in the forward pass."""
    model, tokenizer = load_causal_lm(str(file)), load_tokenizer(str(file))
    assert tokenizer.convert_tokens_to_ids(ADDED_TO_GGUF) == model.get_input_embeddings().num_embeddings
    rows = str(write_rows(tmp_path / "rows.jsonl", [{"prompt": ADDED_TO_GGUF, "completion": "x" + ADDED_TO_GGUF}]))
    pairs = str(write_rows(tmp_path / "p.jsonl", [{"prompt": "a", "chosen": ADDED_TO_GGUF, "rejected": "b"}]))
    batches = [
        prompt_pipeline(PromptsConfig(path=rows), tokenizer, chat_template=ChatFormat()).load().collate([0]).prompt_ids,
        demonstration_pipeline(SftConfig(path=rows), tokenizer, chat_template=ChatFormat())
        .load()
        .collate([0])
        .completion_ids,
        torch.tensor(
            [pair_pipeline(PreferencesConfig(path=pairs), tokenizer, chat_template=ChatFormat()).load().chosen[0]]
        ),
    ]
    for batch in batches:
        assert model(batch).logits.isfinite().all()
        assert ADDED_TO_GGUF in tokenizer.decode(batch[0])
    completer = Completer(str(file), SamplingConfig(max_new_tokens=2, backend="hf"), chat=ChatFormat())
    assert completer.sample([ADDED_TO_GGUF], count=1, key=0).completion_ids.shape == (1, 2)
    critic = load_scalar_head(str(file), tokenizer, new_head="zero")
    policy_tokenizer = ByT5Tokenizer(extra_ids=0)
    source = RewardModelSource(critic, tokenizer, policy_tokenizer=policy_tokenizer, micro_batch_size=1)
    assert not source.same_ids
    assert source(written_by(policy_tokenizer, ADDED_TO_GGUF)).values.isfinite().all()


def written_by(tokenizer: PreTrainedTokenizerBase, text: str) -> Completions:
    """One completion, the text after itself."""
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    live = torch.ones_like(ids, dtype=torch.bool)
    return Completions(
        prompt_ids=ids,
        prompt_mask=live,
        row_ids=torch.tensor([0]),
        references=({},),
        completion_ids=ids,
        completion_mask=live,
        sampler_logprobs=torch.zeros(ids.shape),
        finished=torch.tensor([False]),
        group_size=1,
    )


def test_a_folder_with_one_file_will_do_and_with_several_will_not(file: Path, tmp_path: Path) -> None:
    assert torch.equal(logits(load_causal_lm(str(file.parent))), logits(byte_model()))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files \(a\.gguf, b\.gguf\): name one of them"):
        load_causal_lm(str(tmp_path))


def test_an_export_whose_start_cannot_be_compared_loses_nothing(file: Path, tmp_path: Path) -> None:
    tokenizer, origin = load_tokenizer(str(file)), read_origin(str(file), str(file), load_tokenizer(str(file)))
    exported = export_model(load_causal_lm(str(file)), tokenizer, tmp_path, origin=origin)
    assert (exported.dtype, exported.avoided, exported.avoided_loss) == (torch.float32, torch.bfloat16, None)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    model = load_causal_lm(str(file))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())  # bfloat16 holds all of it
    assert export_model(model, tokenizer, tmp_path, origin=origin).dtype == torch.bfloat16


def test_the_export_in_bfloat16_is_an_ordinary_folder(file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    model = load_policy(PolicyConfig(model=str(file)), str(file), tokenizer)
    export_model(model, tokenizer, tmp_path, origin=read_origin(str(file), str(file), tokenizer), dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    expected = byte_model().state_dict()
    assert stored.keys() == expected.keys() - {"lm_head.weight"}  # tied: stored once
    assert all(torch.equal(stored[name], expected[name].bfloat16()) for name in stored)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["dtype"] == "bfloat16"
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in settings
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    rounded = byte_model()
    rounded.load_state_dict({name: weight.bfloat16() for name, weight in expected.items()})
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)), logits(rounded))
    assert (plain.generation_config.eos_token_id, plain.generation_config.pad_token_id) == (1, 1)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.get_vocab(), theirs.chat_template) == (tokenizer.get_vocab(), TEMPLATE)


def test_reward_models_and_adapters_start_from_it(file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    critic = load_scalar_head(str(file), tokenizer, new_head="zero")
    ours, theirs = critic.classifier.base_model.state_dict(), byte_model().base_model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ModelError, match="not a reward model"):
        load_scalar_head(str(file), tokenizer, new_head=None)
    adapted = add_lora(load_causal_lm(str(file)), LoraConfig(r=2))
    assert torch.equal(logits(merged_copy(adapted, None)), logits(byte_model()))


def test_an_adapter_names_the_file_it_is_for(file: Path, tmp_path: Path) -> None:
    """It named the folder, which may hold several files: the adapter of a checkpoint could not be loaded any more."""
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    path, tokenizer = str(tmp_path / "one.gguf"), load_tokenizer(str(file))
    save_model(add_lora(load_causal_lm(path), LoraConfig(r=2)), tokenizer, tmp_path / "adapter")
    assert base_of_adapter(tmp_path / "adapter") == path
    assert torch.equal(logits(load_causal_lm(str(tmp_path / "adapter"))), logits(byte_model()))


def test_a_file_that_is_no_gguf_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"x\.gguf"):
        load_causal_lm(str(tmp_path / "x.gguf"))
    with pytest.raises(ModelError, match=r"x\.gguf"):
        load_tokenizer(str(tmp_path / "x.gguf"))
    with pytest.raises(ModelError, match="no such file or folder"):
        load_causal_lm("nothing.gguf")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_anywhere_is_a_plain_error(share: float, file: Path, tmp_path: Path) -> None:
    """`share` of the header is left; the file of this model is mostly header."""
    content = file.read_bytes()
    header = content.index(b"output_norm.weight")
    (tmp_path / "cut.gguf").write_bytes(content[: max(6, int(share * header))])
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ModelError, match=r"cut\.gguf.*(cut off or damaged|GGUF)"):
            load(str(tmp_path / "cut.gguf"))


def test_a_file_cut_in_its_weights_is_a_plain_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        load_causal_lm(str(tmp_path / "cut.gguf"))


def test_without_its_package_the_cure_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else there(name))
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ModelError, match=r"needs the package gguf: run `pip install"):
            load(str(file))


@pytest.mark.slow
def test_smollm2_is_exported_as_it_was_loaded(shared: Path, tmp_path: Path) -> None:
    folder = str(shared / "models" / "smollm2-135m-instruct")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|im_end|>", "<|im_end|>", 49152)
    model = load_causal_lm(folder)
    export_model(model, tokenizer, tmp_path / "one", origin=read_origin(folder, folder, tokenizer))
    again = load_causal_lm(str(tmp_path / "one"))
    one = str(tmp_path / "one")
    export_model(again, tokenizer, tmp_path / "two", origin=read_origin(one, one, tokenizer))
    assert files(tmp_path / "two") == files(tmp_path / "one")

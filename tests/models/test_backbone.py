"""Folders load as plain models, mistakes are named, adapters come back merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as Settings
from peft import get_peft_model
from safetensors.torch import load_file
from tiny_models import EOS, PAD, VOCAB, ragged, saved, tiny, tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from rlhf.config.sections import PolicyConfig
from rlhf.config.weights import LoraConfig
from rlhf.data.tokenizer import pad_id
from rlhf.errors import ModelError
from rlhf.models.backbone import (
    add_lora,
    align_weights,
    check_vocabulary,
    context_length,
    freeze,
    load_adapter,
    load_causal_lm,
    load_policy,
    prepare_policy,
    save_model,
)
from rlhf.models.logprobs import completion_outputs
from rlhf.models.lora import overruled_settings, quiet_peft


def logprobs(model: PreTrainedModel) -> Tensor:
    b = ragged()
    return completion_outputs(
        model, b.prompt_ids, b.prompt_mask, b.completion_ids, b.completion_mask, temperature=1.0
    ).logprobs


def nudged(model: PreTrainedModel) -> PreTrainedModel:
    """An adapter starts as no change at all (B = 0); move it."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_a_folder_round_trips_and_is_an_ordinary_one(tmp_path: Path) -> None:
    model = tiny()
    save_model(model, tokenizer(), tmp_path)
    ours = load_causal_lm(str(tmp_path), dtype="float64").eval()
    assert torch.equal(logprobs(ours), logprobs(model))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    # Its weights are views of the file, not aligned as fresh ones are: products differ in the last bit.
    torch.testing.assert_close(logprobs(theirs.eval()), logprobs(model), rtol=0, atol=1e-12)
    assert AutoTokenizer.from_pretrained(tmp_path)("t5 t7")["input_ids"] == [5, 7]


@pytest.mark.parametrize(
    "asked, kept", [("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)]
)
def test_weights_are_float32_at_least(asked: str, kept: torch.dtype, tmp_path: Path) -> None:
    model = load_causal_lm(saved(tiny(dtype=torch.bfloat16), tmp_path), dtype=asked)
    assert {p.dtype for p in model.parameters()} == {kept}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_is_off_even_in_training_mode(family: str, tmp_path: Path) -> None:
    drops = {"attention_dropout": 0.5} if family == "llama" else {"resid_pdrop": 0.5, "embd_pdrop": 0.5}
    path = saved(tiny(family, **drops), tmp_path)
    dropping = AutoModelForCausalLM.from_pretrained(path).train()
    assert not torch.equal(logprobs(dropping), logprobs(dropping))
    model = load_policy(PolicyConfig(model=path, dtype="float64"), path, tokenizer())
    assert model.training
    assert torch.equal(logprobs(model), logprobs(model))
    assert torch.equal(logprobs(model), logprobs(align_weights(dropping.eval())))


def test_the_jitter_of_experts_is_off_even_in_training_mode(tmp_path: Path) -> None:
    """It is drawn again in each pass, so that the ratio of PPO is not 1 in the first one."""
    experts = {"num_local_experts": 2, "router_jitter_noise": 0.5}
    path = saved(tiny("mixtral", dtype=torch.float32, **experts), tmp_path)
    noisy = AutoModelForCausalLM.from_pretrained(path).train()
    assert not torch.equal(logprobs(noisy), logprobs(noisy))
    model = load_policy(PolicyConfig(model=path), path, tokenizer())
    assert model.training
    assert torch.equal(logprobs(model), logprobs(model))


def test_the_folders_own_generation_settings_are_dropped(tmp_path: Path) -> None:
    path = saved(tiny(), tmp_path)
    GenerationConfig(
        top_k=1, temperature=0.1, repetition_penalty=5.0, do_sample=True, eos_token_id=[EOS, 5], pad_token_id=PAD
    ).save_pretrained(path)
    kept = load_causal_lm(path).generation_config
    assert kept.eos_token_id == [EOS, 5]
    assert kept.pad_token_id == PAD
    assert (kept.top_k, kept.temperature, kept.repetition_penalty, kept.do_sample) == (None, None, None, None)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such file or folder: .*nowhere"):
        load_causal_lm(str(tmp_path / "nowhere"))


def test_a_folder_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{tmp_path.name} is no model folder: .*config\.json \(it is empty\)"):
        load_causal_lm(str(tmp_path))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"it holds notes\.txt"):
        load_causal_lm(str(tmp_path))
    with pytest.raises(ModelError, match=r"notes\.txt is a file: give the model's folder"):
        load_causal_lm(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("damage", ["cut", "missing", "noise"])
def test_damaged_weights_are_a_model_error(damage: str, tmp_path: Path) -> None:
    weights = Path(saved(tiny(), tmp_path)) / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:2000] if damage == "cut" else b"not weights")
    with pytest.raises(ModelError, match="cannot load a causal LM"):
        load_causal_lm(str(tmp_path))


def test_a_damaged_config_is_a_model_error(tmp_path: Path) -> None:
    (Path(saved(tiny(), tmp_path)) / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load"):
        load_causal_lm(str(tmp_path))


def test_a_tokenizer_of_another_model_is_refused() -> None:
    told = r"30 tokens \(the last is 't29', id 29\) but the model 'some/model' has 23 embeddings.*policy\.tokenizer"
    with pytest.raises(ModelError, match=told):
        check_vocabulary(tiny(), tokenizer(30), "some/model")


def test_a_smaller_tokenizer_is_fine() -> None:
    model = tiny()
    check_vocabulary(model, tokenizer(VOCAB - 4), "some/model")
    assert model.get_input_embeddings().weight.shape[0] == VOCAB


def test_a_pad_token_behind_the_vocabulary_needs_no_embedding() -> None:
    model, padding = tiny(), tokenizer()
    padding.add_special_tokens({"pad_token": "[PAD]"})
    assert len(padding) == VOCAB + 1
    check_vocabulary(model, padding, "some/model")
    assert model.get_input_embeddings().weight.shape[0] == VOCAB
    assert pad_id(padding) == EOS


def test_every_row_of_the_embedding_learns_even_where_the_pad_token_is_the_eos(tmp_path: Path) -> None:
    path = saved(tiny(pad_token_id=EOS), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().padding_idx == EOS
    model = load_causal_lm(path, dtype="float64")
    ids = torch.tensor([[1, EOS, 5, 7]])
    model(ids).logits[:, -1].sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert gradient is not None
    assert gradient[EOS].abs().max() > 0


@pytest.mark.parametrize("pad", [-1, VOCAB])
def test_a_pad_token_without_an_embedding_is_no_obstacle(pad: int, tmp_path: Path) -> None:
    path = Path(saved(tiny(), tmp_path))
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"pad_token_id": pad}))
    assert torch.equal(logprobs(load_causal_lm(str(path), dtype="float64").eval()), logprobs(align_weights(tiny())))


def test_freeze_stops_every_gradient() -> None:
    model = freeze(tiny().train())
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_context_length() -> None:
    assert context_length(tiny()) == 64
    assert context_length(tiny("gpt2")) == 64


@torch.no_grad()
def test_lora_trains_the_adapter_only_and_starts_as_the_base() -> None:
    base = logprobs(tiny())
    model = add_lora(tiny(), LoraConfig(r=2, alpha=4.0))
    torch.testing.assert_close(logprobs(model), base, rtol=0, atol=1e-13)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert not torch.allclose(logprobs(nudged(model)), base)


def test_lora_targets() -> None:
    model = add_lora(tiny(), LoraConfig(r=2, target_modules=["q_proj"]))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 4
    assert all("q_proj" in name for name in names)


@pytest.mark.parametrize(("family", "layer"), [("llama", "q_proj"), ("gpt2", "c_fc")])
def test_all_linear_overrules_no_adapter_of_all_linear_layers(tmp_path: Path, family: str, layer: str) -> None:
    add_lora(tiny(family), LoraConfig(r=2)).save_pretrained(tmp_path)
    asked = {"all-linear": [], "one": [f"lora.target_modules=['{layer}'] has no effect"]}
    for targets, told in asked.items():
        config = LoraConfig(r=2, target_modules="all-linear" if targets == "all-linear" else [layer])
        texts = overruled_settings(tiny(family), config, tmp_path)
        assert [text.partition(" (")[0] for text in texts] == told


def test_an_adapter_folder_loads_merged_over_its_base(tmp_path: Path) -> None:
    path = saved(tiny(), tmp_path / "base")
    base = load_causal_lm(path, dtype="float64")
    model = nudged(add_lora(base, LoraConfig(r=2, alpha=4.0))).eval()
    expected = logprobs(model)
    save_model(model, tokenizer(), tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    merged = load_causal_lm(str(tmp_path / "adapter"), dtype="float64").eval()
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logprobs(merged), expected, rtol=0, atol=1e-6)  # the adapter's file is float32
    again = load_adapter(load_causal_lm(path, dtype="float64"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logprobs(again), expected, rtol=0, atol=1e-6)
    assert any(p.requires_grad for p in again.parameters())


@pytest.mark.parametrize("targets", [["q_proj"], ["embed_tokens"]])
def test_an_adapter_of_a_base_without_config_is_saved_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str]
) -> None:
    """A folder with a GGUF file has no config.json, and peft would look for one on the hub at every checkpoint."""

    def asked(model_id: str, name: str) -> bool:
        raise AssertionError(f"asked the hub for {name} of {model_id}")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", asked)
    path = saved(tiny(), tmp_path / "base")
    model = nudged(add_lora(load_causal_lm(path, dtype="float64"), LoraConfig(r=2, target_modules=targets))).eval()
    config = tmp_path / "base" / "config.json"
    config.rename(tmp_path / "config.json")
    save_model(model, tokenizer(), tmp_path / "adapter")
    (tmp_path / "config.json").rename(config)
    assert all("lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    again = load_adapter(load_causal_lm(path, dtype="float64"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logprobs(again), logprobs(model), rtol=0, atol=1e-6)


def test_an_adapter_whose_base_is_gone_is_a_model_error(tmp_path: Path) -> None:
    path = saved(tiny(), tmp_path / "base")
    add_lora(load_causal_lm(path), LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="base"):
        load_causal_lm(str(tmp_path / "adapter"))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_an_adapter_of_a_layer_that_shares_its_weight_is_not_merged(tmp_path: Path, layer: str) -> None:
    """Peft adds the change of the head to the embedding as well, which is another model."""
    path = saved(tiny(tie_word_embeddings=True), tmp_path / "base")
    settings = Settings(r=2, target_modules=["q_proj", layer], task_type="CAUSAL_LM")
    with quiet_peft():
        adapted = get_peft_model(load_causal_lm(path), settings)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ModelError, match=rf"changes \S*{layer}, whose weight another layer"):
        load_causal_lm(str(tmp_path / "adapter"))


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")
def test_an_adapter_that_cannot_be_merged_is_a_model_error(tmp_path: Path) -> None:
    """Its layers have biases, and the layers of its base have none."""
    path = saved(tiny(), tmp_path / "base")
    settings = Settings(r=2, target_modules=["q_proj"], lora_bias=True, task_type="CAUSAL_LM")
    with quiet_peft():
        get_peft_model(load_causal_lm(path), settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"cannot merge the adapter in .*lora_bias"):
        load_causal_lm(str(tmp_path / "adapter"))


def test_the_adapter_of_a_reward_model_is_not_loaded_as_a_causal_lm(tmp_path: Path) -> None:
    path = saved(tiny(), tmp_path / "base")
    add_lora(load_causal_lm(path), LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": "SEQ_CLS"}))
    with pytest.raises(ModelError, match="adapter is a reward model: it writes nothing"):
        load_causal_lm(str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="adapter is a reward model: it writes nothing"):
        load_adapter(load_causal_lm(path), tmp_path / "adapter")


def test_a_damaged_adapter_is_a_model_error(tmp_path: Path) -> None:
    path = saved(tiny(), tmp_path / "base")
    add_lora(load_causal_lm(path), LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="adapter"):
        load_causal_lm(str(tmp_path / "adapter"))


def test_a_lora_policy_with_checkpointing_has_a_gradient(tmp_path: Path) -> None:
    path = saved(tiny(), tmp_path)
    config = PolicyConfig(model=path, dtype="float64", lora=LoraConfig(r=2), gradient_checkpointing=True)
    plain, spared = (
        prepare_policy(
            add_lora(load_causal_lm(path, dtype="float64"), LoraConfig(r=2)),
            config.model_copy(update={"gradient_checkpointing": saves}),
            tokenizer(),
            path,
        )
        for saves in (False, True)
    )
    spared.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, spared):
        logprobs(nudged(model)).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(grads[0]) == len(grads[1]) > 0
    for one, other in zip(*grads, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert max(g.abs().max().item() for g in grads[0] if g is not None) > 0


def test_saved_weights_are_safetensors(tmp_path: Path) -> None:
    save_model(tiny(), tokenizer(), tmp_path)
    assert "model.embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("*.bin"))

"""The export equals the loaded folder but for the weights, and the weights too if nothing was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from published import EOS, KINDS, Kind, files, publish, published_tokenizer, store_norms_wide, store_tied_head, write
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from rlhf.config.sections import PolicyConfig
from rlhf.config.weights import LoraConfig
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models import rounding
from rlhf.models.backbone import add_lora, load_causal_lm, load_policy, merged_copy
from rlhf.models.dither import dither
from rlhf.models.export import Origin, classifier_padding, export_model, read_origin
from rlhf.models.lora import quiet_peft
from rlhf.models.rounding import lost_change
from rlhf.models.scalar_head import ScalarHeadModel, load_scalar_head
from rlhf.models.weight_files import WeightFiles, read_tensors

TIED = KINDS["llama, tied, several EOS, no pad"]


def origin_of(folder: Path) -> Origin:
    return read_origin(str(folder), str(folder), load_tokenizer(str(folder)))


def untrained(folder: Path, out: Path) -> Path:
    """The folder, loaded to train and exported unchanged."""
    tokenizer = load_tokenizer(str(folder))
    model = load_policy(PolicyConfig(model=str(folder)), str(folder), tokenizer)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert export_model(model, tokenizer, out, origin=origin_of(folder)).lost == 0.0
    return out


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model.eval()(torch.arange(1, VOCAB)[None]).logits


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_untrained_export_equals_its_input_file_by_file(kind: Kind, tmp_path: Path) -> None:
    source = publish(kind, tmp_path / "in")
    exported = untrained(source, tmp_path / "out")
    before, after = files(source), files(exported)
    assert sorted(after) == sorted(before)
    assert {name for name in before if before[name] != after[name]} == set()
    plain, ours = (AutoModelForCausalLM.from_pretrained(path) for path in (source, exported))
    assert ours.dtype == kind.dtype
    assert torch.equal(logits(ours), logits(plain))
    assert ours.config.to_diff_dict() == plain.config.to_diff_dict()
    assert ours.generation_config.to_dict() == plain.generation_config.to_dict()
    assert len(AutoTokenizer.from_pretrained(exported)) == len(published_tokenizer())


@pytest.mark.parametrize("change", [store_tied_head, store_norms_wide])
def test_the_names_and_the_dtype_of_each_weight_are_those_of_the_file(change, tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    change(source)
    assert files(untrained(source, tmp_path / "out")) == files(source)


def test_names_that_transformers_changes_while_loading_are_the_ones_it_saves(tmp_path: Path) -> None:
    """GPT-2 was published without its prefix, and with masks that are no weights."""
    source = publish(KINDS["gpt2, dropout, pad is EOS"], tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    torch.save({k.removeprefix("transformer."): w for k, w in weights.items()}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    exported = untrained(source, tmp_path / "out")
    after = load_file(exported / "model.safetensors")
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    same = files(source).keys() - {"pytorch_model.bin"}
    assert files(exported).keys() - {"model.safetensors"} == same
    assert all(files(exported)[name] == files(source)[name] for name in same)
    assert isinstance(AutoModelForCausalLM.from_pretrained(exported), GPT2LMHeadModel)


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_another_dtype_is_written_and_said(asked: str, tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    tokenizer = load_tokenizer(str(source))
    model = load_causal_lm(str(source))
    export_model(model, tokenizer, tmp_path / "out", origin=origin_of(source), dtype=asked)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, asked)}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings == json.loads((source / "config.json").read_text()) | {"dtype": asked}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, asked)


def test_an_older_name_of_the_dtype_is_kept(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    settings = json.loads((source / "config.json").read_text())
    del settings["dtype"]
    write(source / "config.json", settings | {"torch_dtype": "bfloat16"})
    tokenizer = load_tokenizer(str(source))
    export_model(load_causal_lm(str(source)), tokenizer, tmp_path / "out", origin=origin_of(source), dtype="float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == settings | {"torch_dtype": "float32"}


def nudged(folder: Path, factor: float) -> PreTrainedModel:
    """The folder's model, every weight multiplied; 1 + 2⁻¹² is a sixteenth of a bfloat16 step."""
    model = load_causal_lm(str(folder))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(factor)
    return model


@pytest.mark.parametrize("kind", ["llama, tied, several EOS, no pad", "llama, untied, shards"])
def test_a_small_change_is_exported_in_float32(kind: str, tmp_path: Path) -> None:
    source = publish(KINDS[kind], tmp_path / "in")
    model, tokenizer, origin = nudged(source, 1 + 2**-12), load_tokenizer(str(source)), origin_of(source)
    exported = export_model(model, tokenizer, tmp_path / "out", origin=origin)
    assert (exported.dtype, exported.lost) == (torch.float32, 0.0)
    assert (exported.avoided, exported.avoided_loss) == (torch.bfloat16, pytest.approx(1.0))
    again = load_causal_lm(str(tmp_path / "out")).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert sorted(files(tmp_path / "out")) == sorted(files(source))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_a_large_change_keeps_the_dtype(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    exported = export_model(
        nudged(source, 1.3), load_tokenizer(str(source)), tmp_path / "out", origin=origin_of(source)
    )
    assert (exported.dtype, exported.avoided) == (torch.bfloat16, None)
    assert exported.lost is not None
    assert 0 < exported.lost < 0.01
    assert {weight.dtype for weight in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_dtype_that_is_asked_for_is_obeyed_and_its_loss_is_known(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    model, tokenizer, origin = nudged(source, 1 + 2**-12), load_tokenizer(str(source)), origin_of(source)
    rounded = export_model(model, tokenizer, tmp_path / "out", origin=origin, dtype="float16")
    assert (rounded.dtype, rounded.avoided) == (torch.float16, None)
    assert rounded.lost is not None
    assert rounded.lost > 0.5
    assert export_model(model, tokenizer, tmp_path / "wide", origin=origin, dtype="float32").lost == 0.0


def test_small_changes_in_float32_survive_a_rounding_to_bfloat16_on_average(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    model, tokenizer, origin = nudged(source, 1 + 2**-12), load_tokenizer(str(source)), origin_of(source)
    rounded = export_model(model, tokenizer, tmp_path / "out", origin=origin, dtype="bfloat16")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    steps = torch.cat([(after[name].double() / before[name].double() - 1).flatten() for name in before])
    steps = steps[steps.isfinite()]
    share = float(steps.mean()) / 2**-12
    error = float(steps.std()) / 2**-12 / len(steps) ** 0.5
    assert abs(share - 1.0) < 4 * error
    assert error < 0.1
    assert rounded.lost is not None
    assert rounded.lost < 0.5  # 1.0 if rounded to the nearest; its norms, all 1.0, are few and have the largest steps


def test_norms_that_are_stored_wide_stay_so_and_the_rest_follows(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    store_norms_wide(source)
    origin, tokenizer = origin_of(source), load_tokenizer(str(source))
    assert export_model(nudged(source, 1 + 2**-12), tokenizer, tmp_path / "out", origin=origin).dtype == torch.float32
    export_model(nudged(source, 1.3), tokenizer, tmp_path / "much", origin=origin)
    kept = load_file(tmp_path / "much" / "model.safetensors")
    assert {name: weight.dtype for name, weight in kept.items()} == {n: t.dtype for n, t in origin.tensors.items()}


def test_the_start_is_found_under_the_names_of_older_files(tmp_path: Path) -> None:
    """GPT-2 was published without its prefix: here in float16, which loses a change of 2⁻¹⁴."""
    source = publish(Kind("gpt2", torch.float16, "</s>"), tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    old = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    save_file(old, source / "model.safetensors", {"format": "pt"})
    origin, tokenizer = origin_of(source), load_tokenizer(str(source))
    exported = export_model(nudged(source, 1 + 2**-14), tokenizer, tmp_path / "out", origin=origin)
    assert exported.dtype == torch.float32
    assert exported.avoided_loss is not None
    assert 0.5 < exported.avoided_loss <= 1
    assert export_model(nudged(source, 1.3), tokenizer, tmp_path / "out", origin=origin).dtype == torch.float16


def test_a_start_that_is_gone_loses_nothing(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    model, tokenizer, origin = nudged(source, 1.3), load_tokenizer(str(source)), origin_of(source)
    source.rename(tmp_path / "gone")
    exported = export_model(model, tokenizer, tmp_path / "out", origin=origin)
    assert (exported.dtype, exported.lost) == (torch.float32, 0.0)
    assert (exported.avoided, exported.avoided_loss) == (torch.bfloat16, None)
    assert export_model(model, tokenizer, tmp_path / "out", origin=origin, dtype="bfloat16").lost is None


def test_the_loss_is_the_relative_norm_of_what_is_rounded_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two weights of 1 change by 2⁻⁷, which bfloat16 holds, and two by 2⁻⁹, which it does not: √(1/(1 + 16))."""
    monkeypatch.setattr(rounding, "CHUNK", 3)  # in two pieces
    save_file({"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(2)}, tmp_path / "start.safetensors")
    start = WeightFiles(tmp_path, {"start.safetensors": read_tensors(tmp_path / "start.safetensors")})
    trained = {"a": 1 + torch.tensor([2**-7, -(2**-7), 2**-9, -(2**-9)]), "b": torch.ones(2)}
    names = {"a": "a", "b": "b"}

    def lost(dtype: torch.dtype) -> float | None:
        return lost_change(start, trained, {"a": dtype, "b": torch.float32}, names)

    assert lost(torch.bfloat16) == pytest.approx(17**-0.5)
    assert lost(torch.float16) == 0.0
    assert lost_change(start, {"a": torch.ones(4)}, {"a": torch.bfloat16}, names) == 0.0
    assert lost_change(start, {"new": torch.full((2,), 1 / 3)}, {"new": torch.bfloat16}, {}) is None
    assert lost_change(start, {"a": torch.full((4,), 1e6)}, {"a": torch.float16}, names) == 1.0  # it overflows


def test_weights_that_training_dithered_keep_their_change_in_bfloat16(tmp_path: Path) -> None:
    """Rounding takes all of a step of a twentieth of the spacing, and on average nothing after dither."""
    numbers = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"a": numbers}, tmp_path / "start.safetensors")
    start = WeightFiles(tmp_path, {"start.safetensors": read_tensors(tmp_path / "start.safetensors")})
    step = numbers.float() * 2.0**-9 * 0.1

    def lost(trained: Tensor) -> float | None:
        return lost_change(start, {"a": trained}, {"a": torch.bfloat16}, {"a": "a"})

    assert lost(numbers.float() + step) == 1.0
    share = lost(dither(numbers.float().view(-1)).view_as(step) + step)
    assert share is not None
    assert share < 0.05


def test_a_small_adapter_is_merged_into_float32(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    model = add_lora(load_causal_lm(str(source)), LoraConfig(r=2))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.add_(1e-5)
    merged = merged_copy(model, None)
    exported = export_model(merged, load_tokenizer(str(source)), tmp_path / "out", origin=origin_of(source))
    assert exported.dtype == torch.float32
    assert exported.avoided_loss is not None
    assert exported.avoided_loss > 0.9
    again = load_causal_lm(str(tmp_path / "out")).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in merged.state_dict().items())


def test_an_untrained_adapter_merges_to_its_base(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    model = add_lora(load_causal_lm(str(source)), LoraConfig(r=2))
    export_model(merged_copy(model, None), load_tokenizer(str(source)), tmp_path / "out", origin=origin_of(source))
    assert files(tmp_path / "out") == files(source)


LLAMA, GPT2 = "llama, tied, several EOS, no pad", "gpt2, dropout, pad is EOS"


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Input and output embeddings are no longer")
@pytest.mark.parametrize(
    ("kind", "beside", "tied"),
    [
        (LLAMA, {"trainable_token_indices": [4, 5]}, True),
        (LLAMA, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        (LLAMA, {"modules_to_save": ["embed_tokens"]}, False),
        (LLAMA, {"modules_to_save": ["lm_head"]}, False),
        (LLAMA, {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        (GPT2, {"modules_to_save": ["wte", "lm_head"]}, False),
    ],
)
def test_the_export_of_a_merged_adapter_is_tied_only_if_the_merged_model_is(
    tmp_path: Path, kind: str, beside: dict[str, Any], tied: bool
) -> None:
    """GPT-2's config.json need not name the tie, which is its default."""
    torch.manual_seed(0)
    source = publish(KINDS[kind], tmp_path / "in")
    settings = json.loads((source / "config.json").read_text())
    if kind == GPT2:
        settings.pop("tie_word_embeddings", None)
        write(source / "config.json", settings)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    targets = ["c_attn" if kind == GPT2 else "q_proj"]
    lora = PeftConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **beside)
    with quiet_peft(), torch.no_grad():
        adapted = get_peft_model(plain, lora)
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight))
    expected = logits(adapted)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merged, tokenizer = load_causal_lm(str(tmp_path / "adapter")), load_tokenizer(str(source))
    origin = read_origin(str(tmp_path / "adapter"), str(source), tokenizer)
    export_model(merged, tokenizer, tmp_path / "out", origin=origin, dtype="float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), expected, rtol=1e-3, atol=1e-3)
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tied
    changes = {"dtype": "float32"} if tied else {"dtype": "float32", "tie_word_embeddings": False}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == settings | changes


def test_the_origin_of_an_adapter_is_its_base(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    add_lora(load_causal_lm(str(source)), LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    assert origin_of(tmp_path / "adapter") == replace(origin_of(source), folder=None)
    assert load_tokenizer(str(tmp_path / "adapter")).get_vocab() == published_tokenizer().get_vocab()


def test_what_a_run_changes_that_starts_from_an_adapter_is_not_measured_from_the_base(tmp_path: Path) -> None:
    """The adapter changed the base much, the run changed the two together little: bfloat16 would lose all of that."""
    source = publish(TIED, tmp_path / "in")
    adapted = add_lora(load_causal_lm(str(source)), LoraConfig(r=2))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    model = nudged(tmp_path / "adapter", 1 + 2**-12)
    origin, tokenizer = origin_of(tmp_path / "adapter"), load_tokenizer(str(source))
    exported = export_model(model, tokenizer, tmp_path / "out", origin=origin)
    assert (exported.dtype, exported.lost) == (torch.float32, 0.0)
    assert (exported.avoided, exported.avoided_loss) == (torch.bfloat16, None)


@pytest.mark.parametrize(
    "generation", [{"eos_token_id": None, "top_p": 0.9}, {}, None], ids=["null", "no key", "no file"]
)
@pytest.mark.parametrize("nested", [False, True], ids=["outer config", "text_config"])
def test_the_end_of_a_turn_is_added_to_the_ends_of_the_model(
    tmp_path: Path, generation: dict[str, Any] | None, nested: bool
) -> None:
    source = publish(TIED, tmp_path / "in")
    model, tokenizer = load_causal_lm(str(source)), load_tokenizer(str(source))
    settings = json.loads((source / "config.json").read_text()) | {"eos_token_id": None if nested else EOS}
    write(source / "config.json", settings | ({"text_config": {"eos_token_id": EOS}} if nested else {}))
    (source / "generation_config.json").unlink()
    if generation is not None:
        write(source / "generation_config.json", generation)
    export_model(model, tokenizer, tmp_path / "out", origin=replace(origin_of(source), turn_end=7))
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {**(generation or {}), "eos_token_id": [EOS, 7]}


def test_an_export_does_not_need_its_source_any_more(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    expected, origin, tokenizer = files(source), origin_of(source), load_tokenizer(str(source))
    model = load_causal_lm(str(source))
    source.rename(tmp_path / "gone")
    assert export_model(model, tokenizer, tmp_path / "out", origin=origin).lost == 0.0
    assert files(tmp_path / "out") == expected


# Reward models


def scores(folder: Path, rows: list[list[int]], pad: int | None = None) -> torch.Tensor:
    """The scores of the rows by plain transformers: together, padded with `pad`, or one by one."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        if pad is None:
            return torch.cat([model(torch.tensor([row])).logits for row in rows]).flatten()
        width = max(map(len, rows))
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return model(ids, attention_mask=mask).logits.flatten()


@torch.no_grad()
def last_scores(reward: ScalarHeadModel, rows: list[list[int]]) -> torch.Tensor:
    """Our scores of the rows: at the last token of each."""
    states = [reward.classifier.base_model(torch.tensor([row])).last_hidden_state for row in rows]
    return torch.stack([reward.score_hidden(state)[0, -1] for state in states])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_plain_transformers_reads_an_exported_reward_model_where_we_do(kind: Kind, tmp_path: Path) -> None:
    source = publish(kind, tmp_path / "in")
    tokenizer = load_tokenizer(str(source))
    reward = load_scalar_head(str(source), tokenizer, new_head="normal").eval()
    export_model(reward.classifier, tokenizer, tmp_path / "out", origin=origin_of(source), dtype="float32")
    rows = [[1, 5, 6, 7, EOS], [1, 9, EOS], [1, 8, 8, 4]]  # the last was cut off
    expected = last_scores(reward, rows)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.pad_token_id not in (None, EOS)
    assert theirs.get_vocab() == tokenizer.get_vocab()
    for pad in (None, theirs.pad_token_id):
        torch.testing.assert_close(scores(tmp_path / "out", rows, pad), expected, rtol=1e-5, atol=1e-6)


def test_a_tokenizer_without_a_spare_special_token_names_no_pad(tmp_path: Path) -> None:
    """GPT-2 has one special token, its EOS: naming a word as pad token would change how texts are cut into tokens."""
    source = publish(Kind("gpt2", torch.float32, pad="</s>"), tmp_path / "in")
    settings = json.loads((source / "tokenizer.json").read_text())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] == "</s>"]
    write(source / "tokenizer.json", settings)
    named = json.loads((source / "tokenizer_config.json").read_text())
    write(
        source / "tokenizer_config.json",
        {"tokenizer_class": named["tokenizer_class"], "eos_token": "</s>", "pad_token": "</s>"},
    )
    tokenizer = load_tokenizer(str(source))
    reward = load_scalar_head(str(source), tokenizer, new_head="normal").eval()
    pad = classifier_padding(reward.classifier, tokenizer)
    assert pad.token is None
    assert pad.number != EOS
    export_model(reward.classifier, tokenizer, tmp_path / "out", origin=origin_of(source))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.pad_token is None
    with pytest.raises(ValueError, match="padding token"):
        theirs(["t5 </s>", "t5 t6 </s>"], padding=True)
    rows = [[5, 6, EOS], [7, EOS]]
    torch.testing.assert_close(scores(tmp_path / "out", rows), last_scores(reward, rows))


def test_an_exported_reward_model_is_its_origin_with_a_head(tmp_path: Path) -> None:
    source = publish(KINDS["gpt2, dropout, pad is EOS"], tmp_path / "in")
    tokenizer = load_tokenizer(str(source))
    reward = load_scalar_head(str(source), tokenizer, new_head="normal")
    reward.calibrate(1.5, 0.25)
    export_model(reward.classifier, tokenizer, tmp_path / "out", origin=origin_of(source))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    changed = {
        "architectures": ["GPT2ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": 0,
        "score_mean": 1.5,
        "score_std": 0.25,
    }
    assert after == before | changed
    assert after["resid_pdrop"] == 0.1
    assert "generation_config.json" not in files(tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["score.weight"], reward.head.weight)
    again = load_scalar_head(str(tmp_path / "out"), tokenizer, new_head=None)
    assert again.calibration == (1.5, 0.25)
    export_model(
        again.classifier, load_tokenizer(str(tmp_path / "out")), tmp_path / "again", origin=origin_of(tmp_path / "out")
    )
    assert files(tmp_path / "again") == files(tmp_path / "out")


def test_a_head_stays_in_float32_over_a_bfloat16_backbone(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    tokenizer = load_tokenizer(str(source))
    reward = load_scalar_head(str(source), tokenizer, new_head="normal")
    export_model(reward.classifier, tokenizer, tmp_path / "out", origin=origin_of(source))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: w.dtype for name, w in weights.items() if w.dtype != torch.bfloat16} == {
        "score.weight": torch.float32
    }
    assert torch.equal(weights["score.weight"], reward.head.weight)


# Adapters


def test_reward_model_and_critic_start_from_an_adapters_folder(tmp_path: Path) -> None:
    source = publish(KINDS["llama, untied, shards"], tmp_path / "in")
    model = add_lora(load_causal_lm(str(source)), LoraConfig(r=2))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1)
    model.save_pretrained(tmp_path / "adapter")
    merged = merged_copy(model, None).base_model.state_dict()
    tokenizer = load_tokenizer(str(source))
    critic = load_scalar_head(str(tmp_path / "adapter"), tokenizer, new_head="zero")
    theirs = critic.classifier.base_model.state_dict()
    assert theirs.keys() == merged.keys()
    assert all(torch.equal(theirs[name], merged[name]) for name in merged)
    plain = load_scalar_head(str(source), tokenizer, new_head="zero").classifier.base_model.state_dict()
    assert not all(torch.equal(theirs[name], plain[name]) for name in merged)
    assert critic.head.weight.abs().max() == 0


class OwnConfig(LlamaConfig):
    """The configuration of a model that came with its own code."""

    model_type = "own"


class OwnModel(LlamaForCausalLM):
    """A model that transformers does not know."""

    config_class = OwnConfig


def test_a_model_with_its_own_code_is_copied_from_the_weights_of_all_ranks() -> None:
    """As under ZeRO-3: the copy is made of the configuration and the gathered weights."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = OwnModel(OwnConfig(vocab_size=VOCAB, **sizes))
    merged = merged_copy(model, model.state_dict())
    assert type(merged) is OwnModel
    assert merged is not model
    assert torch.equal(logits(merged), logits(model))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_an_adapter_over_a_classifier_is_a_reward_model(tmp_path: Path) -> None:
    source = publish(TIED, tmp_path / "in")
    classifier = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    adapted = get_peft_model(classifier, PeftConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    reward = load_scalar_head(str(tmp_path / "adapter"), load_tokenizer(str(source)), new_head=None).eval()
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        expected = adapted.eval().base_model.model.model(ids).last_hidden_state
        expected = adapted.base_model.model.score(expected)[0, :, 0]
        scores = reward.score_hidden(reward.classifier.base_model(ids).last_hidden_state)[0]
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)

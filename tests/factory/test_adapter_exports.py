"""The exports of a run with adapters, read by plain peft and plain transformers: for a Llama of SmolLM2's layers, and a
Gemma 3, which nothing but its own configuration of transformers makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from quick import quick
from runs import WORDS, brief_tree, make_model, offline_tree, quiet
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from rlhf.commands.push import card_of_run
from rlhf.config.load import train_config
from rlhf.errors import ConfigError
from rlhf.factory.run import build_run
from rlhf.models.backbone import body_of, load_causal_lm
from rlhf.models.kernels.llama.forward import supports_fused
from rlhf.models.kernels.quantized import QuantizedLinear
from rlhf.models.lora import quiet_peft
from rlhf.tracking.exported import read_export
from rlhf.tracking.run_folder import RunFolder
from rlhf.training.online_run import OnlineRun

IDS = torch.tensor([[1, 4, 6, 8, 5, 9, 7, 4, 4, 8]])  # longer than a window of Gemma's
SPECIAL = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_smollm2(folder: Path) -> None:
    """Two layers of SmolLM2-135M's width, with the words of these tests."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rope_theta=100_000.0,
        initializer_range=0.041666666666666664,
        **SPECIAL,
    )
    _replace(folder, LlamaForCausalLM(config))


def make_gemma3(folder: Path) -> None:
    """Three layers of a Gemma 3 of text, two of them with a window of eight tokens."""
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        initializer_range=0.15,
        **SPECIAL,
    )
    _replace(folder, Gemma3ForCausalLM(config))


def _replace(folder: Path, model: PreTrainedModel) -> None:
    make_model(folder)  # for its tokenizer
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=model.config.initializer_range)
    model.save_pretrained(folder)


def tree_of(preset: str, folder: Path, **policy: Any) -> dict[str, Any]:
    """Two steps with adapters, of the critic too."""
    role = {"lora": {"r": 4}, **policy}
    short = {"policy": role, "schedule": {"steps": 2}, "eval": {"every": 0}, "checkpoint": {"every": 0}}
    short["guard"] = {"on_alarm": "ignore"}
    match preset:
        case "sft":
            tree = offline_tree(folder, "sft", **short)
            pairs = tree["data"]["preferences"]["path"]
            return {**tree, "data": {"sft": {"path": pairs, "columns": {"completion": "chosen"}}}}
        case "dpo":
            return offline_tree(folder, "dpo", **short)
        case "grpo":
            return brief_tree(folder, algorithm={"preset": "grpo"}, sampling={"completions_per_prompt": 2}, **short)
        case _:
            critic = {"lora": {"r": 4}, "weights": policy.get("weights", "auto")}
            return brief_tree(folder, critic=critic, **short)


def trained(tree: dict[str, Any]) -> Any:
    """Train and export; return the models."""
    run = build_run(train_config(tree), quiet())
    assert run.train()
    run.session.recorder.close()
    return run.run.models if isinstance(run.run, OnlineRun) else run.run.loss.models  # type: ignore[attr-defined]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def base_of(models: Any, folder: Path) -> PreTrainedModel:
    """The base in plain transformers, with the numbers that the run kept: of codes, and of embeddings in 16 bits."""
    base = plain(folder / "model")
    weights = base.state_dict()
    for name, module in models.policy.named_modules():
        place = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        if isinstance(module, QuantizedLinear | torch.nn.Embedding):
            weights[f"{place}.weight"].copy_(module.weight)
    return base


MERGED = list(product([make_smollm2, make_gemma3], ["auto", "nf4"]))


@pytest.mark.parametrize(("make", "weights"), quick(MERGED, [(make_smollm2, "nf4"), (make_gemma3, "auto")]))
def test_the_merged_model_is_adapter_plus_base(make: Callable[[Path], None], weights: str, tmp_path: Path) -> None:
    if weights == "nf4":
        pytest.importorskip("bitsandbytes")
    make(tmp_path / "model")
    models = trained(tree_of("sft", tmp_path, weights=weights, export="both", export_dtype="float32"))
    base = base_of(models, tmp_path)
    untrained = logits(base)
    with quiet_peft():
        both = logits(PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter")))
    merged = logits(plain(tmp_path / "run" / "model"))
    assert (both - untrained).abs().max() > 0.01
    assert (merged - both).abs().max() < 1e-5 * both.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("export", ["adapter", "merged", "both"])
def test_each_export_has_what_it_says_and_its_tokenizer(export: str, tmp_path: Path) -> None:
    make_gemma3(tmp_path / "model")
    models = trained(tree_of("sft", tmp_path, export=export, export_dtype="float32"))
    expected = logits(models.policy)
    run = tmp_path / "run"
    adapter = {"adapter": run / "model", "both": run / "adapter"}.get(export)
    assert (run / "adapter").is_dir() == (export == "both")
    if adapter is not None:
        with quiet_peft():
            loaded = PeftModel.from_pretrained(plain(tmp_path / "model"), str(adapter))
        assert torch.allclose(logits(loaded), expected, atol=1e-5)
        assert AutoTokenizer.from_pretrained(adapter).encode("red good") == [6, 4]
    if export != "adapter":
        assert not (run / "model" / "adapter_config.json").exists()
        assert torch.allclose(logits(plain(run / "model")), expected, atol=1e-5)
        assert AutoTokenizer.from_pretrained(run / "model").encode("red good") == [6, 4]


def test_the_best_checkpoint_brings_its_adapter(tmp_path: Path) -> None:
    tree = tree_of("dpo", tmp_path, export="both")
    trained(tree | {"checkpoint": {"best": {}}, "eval": {"every": 1}})
    best = next((tmp_path / "run" / "best").glob("step-*"))
    kept, exported = (place / "adapter" / "adapter_model.safetensors" for place in (best, tmp_path / "run"))
    assert exported.read_bytes() == kept.read_bytes()


@pytest.mark.parametrize(
    ("preset", "weights"),
    quick(product(["sft", "dpo", "grpo", "ppo"], ["auto", "nf4"]), [("sft", "auto"), ("dpo", "auto"), ("ppo", "nf4")]),
)
def test_a_gemma_3_trains_adapters(preset: str, weights: str, tmp_path: Path) -> None:
    if weights == "nf4":
        pytest.importorskip("bitsandbytes")
    make_gemma3(tmp_path / "model")
    models = trained(tree_of(preset, tmp_path, weights=weights))
    trained_models = [models.policy, *([models.critic] if preset == "ppo" else [])]
    for model in trained_models:
        moved = [p for name, p in model.named_parameters() if "lora_B" in name]
        assert len(moved) == 3 * 7
        assert all(float(p.detach().abs().max()) > 0 for p in moved)
        quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        assert len(quantized) == (3 * 7 if weights == "nf4" else 0)
    assert supports_fused(body_of(models.policy))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if preset in ("grpo", "ppo"):
        first = next(row for row in rows if "policy/first_ratio_deviation" in row)
        assert first["policy/first_ratio_deviation"] < 1e-4


def test_a_run_and_its_card_tell_of_the_adapter_that_is_continued(tmp_path: Path) -> None:
    """It keeps its own rank, scale and modules, whatever the file of the run says."""
    lora = {"r": 2, "alpha": 4.0, "target_modules": ["q_proj"]}
    first = tree_of("sft", tmp_path, lora=lora, export="adapter")
    first["run"]["out_dir"] = str(tmp_path / "first")
    trained(first)
    start = tmp_path / "first" / "model"
    for number, settings in enumerate([{"r": 16, "alpha": 4, "target_modules": "all-linear", "dora": True}, lora, {}]):
        tree = tree_of("sft", tmp_path, model=str(start), lora={"start": "continue", **settings})
        tree["run"]["out_dir"] = str(tmp_path / f"second{number}")
        trained(tree)
        assert "adapters of rank 2 |" in card_of_run(tree["run"]["out_dir"])
        notes = [str(note["text"]) for note in RunFolder(tree["run"]["out_dir"]).read_notes()]
        told = [text for text in notes if "policy.lora.start=continue" in text]
        if number:
            assert told == []
        else:
            start_text = f"warning: policy.lora.start=continue trains the adapter {start} as it is: "
            assert told == [
                start_text + "lora.dora=True has no effect (it has False); lora.r=16 has no effect (it has 2); "
                "lora.target_modules=all-linear has no effect (it has ['q_proj'])"
            ]


def test_a_run_tells_that_there_is_no_adapter_to_continue(tmp_path: Path) -> None:
    first = tree_of("sft", tmp_path, lora={"r": 2}, export="both")
    first["run"]["out_dir"] = str(tmp_path / "first")
    trained(first)
    beside = tmp_path / "first" / "adapter"
    told = {}
    for start in (tmp_path / "first", beside):
        tree = tree_of("sft", tmp_path, model=str(start), lora={"r": 2, "start": "continue"})
        tree["run"]["out_dir"] = str(tmp_path / f"from_{start.name}")
        trained(tree)
        notes = [str(note["text"]) for note in RunFolder(tree["run"]["out_dir"]).read_notes()]
        told[start] = [text for text in notes if "lora.start=continue has no effect" in text]
    assert told == {
        tmp_path / "first": [
            f"warning: policy.lora.start=continue has no effect: {tmp_path / 'first' / 'model'} is no adapter, so that "
            f"a new one is trained over it; {beside} is the adapter of that run"
        ],
        beside: [],
    }


def test_the_share_kept_over_a_quantized_base_is_unknown(tmp_path: Path) -> None:
    """Its distance to the published weights is no training."""
    make_model(tmp_path / "published", dtype=torch.bfloat16)
    tree = tree_of("sft", tmp_path, model=str(tmp_path / "published"), lora={"r": 2}, weights="int8", lr=0.0)
    trained(tree)
    record = read_export(tree["run"]["out_dir"])
    assert record is not None
    assert (record.dtype, record.change_kept, record.start_dtype) == ("bfloat16", None, None)
    assert "it is not known how much of the training this dtype keeps" in card_of_run(tree["run"]["out_dir"])
    trained(tree_of("sft", tmp_path, **{**tree["policy"], "export_dtype": "float32"}))
    record = read_export(tree["run"]["out_dir"])
    assert record is not None
    assert (record.dtype, record.change_kept) == ("float32", 1.0)


def test_an_adapter_has_no_placeholder_for_a_card(tmp_path: Path) -> None:
    tree = tree_of("sft", tmp_path, export="adapter")
    trained(tree)
    folder = Path(tree["run"]["out_dir"])
    assert (folder / "model" / "adapter_config.json").is_file()
    assert list(folder.rglob("README.md")) == []


FIRST = {
    "lora": {},
    "rslora": {"rslora": True, "alpha": 3.0},
    "dora": {"dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "down_proj"]},
}


def train_first(folder: Path, **lora: Any) -> Path:
    """Train an adapter over a small Llama, whose head has weights of its own; return the adapter's folder."""
    make_model(folder / "model")
    tree = tree_of("sft", folder, lora={"r": 2, **lora}, export="adapter", lr=3e-2)
    tree["run"]["out_dir"] = str(folder / "first")
    trained(tree)
    return folder / "first" / "model"


def by_peft(adapter: Path) -> torch.Tensor:
    """The logits of an adapter as plain peft loads it: onto the base that its configuration names."""
    base = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    with quiet_peft():
        return logits(PeftModel.from_pretrained(plain(Path(base)), str(adapter)))


@pytest.mark.parametrize("kind", FIRST)
def test_untrained_steps_from_an_adapter_export_what_it_computes(kind: str, tmp_path: Path) -> None:
    first = train_first(tmp_path, **FIRST[kind])
    expected = by_peft(first)
    assert (expected - logits(plain(tmp_path / "model"))).abs().max() > 0.01
    for start, export in (("merge", "merged"), ("continue", "both")):
        lora = {"r": 2, **FIRST[kind], "start": start}
        tree = tree_of("sft", tmp_path, model=str(first), lora=lora, lr=0.0, export=export, export_dtype="float32")
        run = Path(tree["run"]["out_dir"]).with_name(start)
        trained({**tree, "run": {**tree["run"], "out_dir": str(run)}, "checkpoint": {"every": 1}})
        assert torch.allclose(logits(plain(run / "model")), expected, atol=1e-5)
        for folder in (run / "model", run / "checkpoints" / "step-000002" / "model"):
            assert torch.allclose(logits(load_causal_lm(str(folder))), expected, atol=1e-5)
        if export == "both":
            assert torch.allclose(by_peft(run / "adapter"), expected, atol=1e-5)
            assert torch.allclose(logits(load_causal_lm(str(run / "adapter"))), expected, atol=1e-5)


@pytest.mark.parametrize("export", ["adapter", "both"])
def test_an_adapter_over_a_merged_adapter_is_not_exported_as_one(export: str, tmp_path: Path) -> None:
    """Its base is in no folder, so that peft would load it onto another."""
    first = train_first(tmp_path)
    tree = tree_of("sft", tmp_path, model=str(first), export=export)
    with pytest.raises(ConfigError, match=r"policy\.export=merged, or policy\.lora\.start=continue to"):
        build_run(train_config(tree), quiet())
    assert not Path(tree["run"]["out_dir"]).exists()


def test_an_adapter_of_a_checkpoint_over_a_merged_adapter_is_continued_but_not_exported_as_one(tmp_path: Path) -> None:
    first = train_first(tmp_path)
    tree = tree_of("sft", tmp_path, model=str(first), lr=3e-2)
    second = trained({**tree, "checkpoint": {"every": 1}})
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-000002" / "model")
    tree["run"]["out_dir"] = str(tmp_path / "third")
    tree["policy"] |= {"model": checkpoint, "lora": {"start": "continue"}, "lr": 0.0}
    with pytest.raises(ConfigError, match=r"set policy\.export=merged$"):
        build_run(train_config({**tree, "policy": tree["policy"] | {"export": "adapter"}}), quiet())
    third = trained(tree)
    assert torch.allclose(logits(third.policy), logits(second.policy), atol=1e-5)

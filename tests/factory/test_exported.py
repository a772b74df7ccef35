"""The exported weights are the trained ones, and a reader of others is told: run, eval, sample, push, report, PPO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from published import write
from runs import make_model, pairs_file, ppo_tree, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import rlhf
from rlhf.cli import main
from rlhf.factory.exported import rounded_models
from rlhf.models.backbone import load_causal_lm
from rlhf.tracking.exported import ExportRecord, read_export

ROWS = [{"prompt": f"{color} one", "completion": " good"} for color in ("red", "blue")] * 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model in bfloat16."""
    make_model(tmp_path / "model", dtype=torch.bfloat16)
    return tmp_path / "model"


def run(verb: str, folder: Path, tree: dict[str, Any], *overrides: str) -> Path:
    """Run a verb of the command line to its end; returns the run folder."""
    file = folder / f"{verb}.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main([verb, str(file), *overrides]) == 0
    return Path(tree["run"]["out_dir"])


def sft_tree(folder: Path, **policy: Any) -> dict[str, Any]:
    return {
        "run": {"out_dir": str(folder / "sft"), "device": "cpu"},
        "data": {"sft": {"path": str(write_rows(folder / "sft.jsonl", ROWS))}},
        "policy": {"model": str(folder / "model"), "lr": 1e-7, **policy},
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": 4},
        "schedule": {"steps": 1},
    }


def rm_tree(folder: Path, **model: Any) -> dict[str, Any]:
    return {
        "run": {"out_dir": str(folder / "rm"), "device": "cpu"},
        "data": {"preferences": {"path": str(pairs_file(folder))}},
        "model": {"model": str(folder / "model"), "lr": 1e-7, **model},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 1},
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    return " ".join((out + err).split())


@pytest.mark.parametrize("lora", [None, {"r": 2}])
@pytest.mark.parametrize("verb", ["train", "rm"])
def test_a_short_run_exports_the_weights_that_it_trained(
    verb: str, lora: dict[str, int] | None, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if verb == "rm" and lora is not None:
        pytest.skip("a reward model has no adapters")
    folder = run(verb, tmp_path, sft_tree(tmp_path, lora=lora) if verb == "train" else rm_tree(tmp_path))
    section = "policy" if verb == "train" else "model"
    told = printed(capsys)
    assert "the model is exported in float32: bfloat16, the dtype of the start model, would lose " in told
    assert f"({section}.export_dtype=auto allows 5%)" in told
    record = read_export(folder)
    assert record is not None
    assert (record.key, record.asked, record.dtype) == (f"{section}.export_dtype", "auto", "float32")
    assert (record.change_kept, record.start_dtype) == (1.0, "bfloat16")
    assert record.start_dtype_keeps is not None
    assert record.start_dtype_keeps < 0.05
    start = load_file(source / "model.safetensors")
    after = weights(folder)
    assert any(not torch.equal(weight, start[name].float()) for name, weight in after.items() if name in start)
    if lora is None:
        exact = load_file(next((folder / "checkpoints").glob("*/model")) / "model.safetensors")
        assert all(torch.equal(after[name], weight) for name, weight in exact.items() if name in after)
    assert rounded_models(str(folder)) == []


def test_a_dtype_that_is_asked_for_is_obeyed_and_every_reader_is_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = sft_tree(tmp_path, export_dtype="float16")
    folder = run("train", tmp_path, tree)
    told = printed(capsys)
    assert "warning: policy.export_dtype=float16 loses " in told
    assert "run the same command with policy.export_dtype=auto, which exports the last checkpoint again" in told
    lost = f"{folder}: float16 has lost "
    assert main(["sample", str(folder), "--prompt", "red one", "--max-new-tokens", "2"]) == 0
    assert lost in printed(capsys)
    assert main(["push", str(folder), "owner/tiny", "--dry-run"]) == 0
    card = printed(capsys)
    assert lost in card
    assert "- model: float16 has lost " in card
    assert "| exported weights | float16, which keeps 0.0% of the change" in card
    assert "Warning: model: float16 has lost " in (folder / "report.html").read_text()
    with pytest.warns(UserWarning, match="float16 has lost"):
        rlhf.sample(folder, "red one", max_new_tokens=2)
    for path in (folder, folder / "model", f"{folder}/"):
        assert len(rounded_models(str(path))) == 1
    tree["policy"]["export_dtype"] = "auto"
    run("train", tmp_path, tree)
    assert "the model is exported in float32" in printed(capsys)
    assert {weight.dtype for weight in weights(folder).values()} == {torch.float32}
    assert main(["sample", str(folder), "--prompt", "red one", "--max-new-tokens", "2"]) == 0
    assert "has lost" not in printed(capsys)


def test_ppo_is_told_that_its_reward_model_is_rounded_and_evaluation_too(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = run("rm", tmp_path, rm_tree(tmp_path, export_dtype="float16"))
    assert "warning: model.export_dtype=float16 loses " in printed(capsys)
    tree = ppo_tree(tmp_path, schedule={"steps": 1})
    tree["reward"] = {"source": {"type": "model", "path": str(reward)}}
    tree["policy"] = {**tree["policy"], "lr": 1e-7, "export_dtype": "float16"}
    tree["data"] = {**tree["data"], "eval_prompts": tree["data"]["prompts"]}
    folder = run("train", tmp_path, tree)
    assert f"warning: {reward}: float16 has lost " in printed(capsys)
    assert main(["eval", str(folder)]) == 0
    told = printed(capsys)
    assert f"warning: {folder}: float16 has lost " in told
    assert f"warning: {reward}: float16 has lost " in told
    assert len(json.loads((folder / "eval.json").read_text())["notes"]) == 2
    sources = {"type": "ensemble", "sources": [{"type": "model", "path": f"{reward}/model"}]}
    assert len(rounded_models({"reward": {"source": sources}})) == 1


def test_a_run_in_float32_that_asks_for_bfloat16_keeps_its_training(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run("train", tmp_path, sft_tree(tmp_path, lr=1e-4))
    assert "the model is exported in float32: bfloat16, the dtype of the start model, would lose " in printed(capsys)
    start, wide = (load_file(place / "model.safetensors") for place in (source, folder / "model"))
    run("train", tmp_path, sft_tree(tmp_path, lr=1e-4, export_dtype="bfloat16"))
    narrow, changed, kept = weights(folder), 0.0, {"by chance": 0.0, "to the nearest": 0.0}
    assert {weight.dtype for weight in narrow.values()} == {torch.bfloat16}
    for name, weight in wide.items():
        before, step = start[name].double(), weight.double() - start[name].double()
        changed += float(step.square().sum())
        kept["by chance"] += float(((narrow[name].double() - before) * step).sum())
        kept["to the nearest"] += float(((weight.to(torch.bfloat16).double() - before) * step).sum())
    assert kept["to the nearest"] < 0.5 * changed
    assert kept["by chance"] == pytest.approx(changed, rel=0.3)
    record = read_export(folder)
    assert record is not None
    assert record.change_kept == pytest.approx(min(1.0, kept["by chance"] / changed), abs=1e-6)


def test_the_best_checkpoint_brings_its_own_record(source: Path, tmp_path: Path) -> None:
    tree = sft_tree(tmp_path, export_dtype="bfloat16") | {"checkpoint": {"best": {}}, "eval": {"every": 1}}
    tree["data"]["eval_sft"] = tree["data"]["sft"]
    folder = run("train", tmp_path, tree)
    best = next((folder / "best").glob("step-*"))
    assert read_export(best) == read_export(folder)
    assert read_export(best) is not None


def test_the_export_of_the_best_checkpoint_stays_as_it_was_kept_with_a_warning(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = sft_tree(tmp_path, export_dtype="bfloat16", lr=1e-30) | {"checkpoint": {"best": {}}, "eval": {"every": 1}}
    tree["data"]["eval_sft"] = tree["data"]["sft"]
    run("train", tmp_path, tree)
    assert "stays so" not in printed(capsys)
    folder = run("train", tmp_path, tree, "policy.export_dtype=float32", "schedule.steps=2")
    assert "exported with policy.export_dtype=bfloat16 when it was kept, and stays so" in printed(capsys)
    assert {weight.dtype for weight in weights(folder).values()} == {torch.bfloat16}


def test_a_change_that_bfloat16_holds_is_exported_in_it_without_a_word(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run("train", tmp_path, sft_tree(tmp_path, lr=1e-1))
    assert "export" not in printed(capsys)
    assert {weight.dtype for weight in weights(folder).values()} == {torch.bfloat16}
    record = read_export(folder)
    assert record is not None
    assert record.change_kept is not None
    assert 0.95 < record.change_kept < 1


def test_a_model_without_a_record_is_read_quietly(source: Path, tmp_path: Path) -> None:
    assert read_export(source) is None
    (tmp_path / "model" / "model").mkdir()
    for damaged in ("", "[]", "{}", '{"unknown": 1}'):
        (source / "export.json").write_text(damaged)
        assert read_export(source) is None


@pytest.mark.parametrize("text", ["x" * 5000, "~nobody-of-this-name/x", "a\0b", "none@best", "{completion}\n" * 500])
def test_texts_among_the_settings_are_no_folders(text: str) -> None:
    assert rounded_models({"judge": {"template": [text]}}) == []


def test_an_unknown_share_is_called_unknown(tmp_path: Path) -> None:
    record = ExportRecord(
        key="policy.export_dtype", asked="auto", dtype="float32", change_kept=1.0, start_dtype="bfloat16"
    )
    assert "how much of the training bfloat16 would lose is not known" in str(record.summary())
    record = ExportRecord(key="policy.export_dtype", asked="bfloat16", dtype="bfloat16", change_kept=None)
    assert record.summary() is None
    assert not record.is_rounded_away


def test_a_gguf_file_reports_what_its_dtype_loses(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run("train", tmp_path, sft_tree(tmp_path))
    monkeypatch.setattr(
        "rlhf.models.gguf_export.write_gguf", lambda model, tokenizer, path, dtype: path.write_bytes(b"")
    )
    capsys.readouterr()
    out = str(tmp_path / "out.gguf")
    assert main(["export", str(folder), "--gguf", out, "--dtype", "bf16"]) == 0
    assert "warning: bf16 loses " in (told := printed(capsys))
    assert "--dtype f32 keeps it" in told
    assert main(["export", str(folder), "--gguf", out, "--dtype", "f32"]) == 0
    assert "warning" not in printed(capsys)


def test_the_report_card_of_a_reward_model_is_of_the_exported_weights(source: Path, tmp_path: Path) -> None:
    tree = rm_tree(tmp_path)
    tree["data"]["eval_preferences"] = tree["data"]["preferences"]
    folder = run("rm", tmp_path, tree)
    assert json.loads((folder / "report_card.json").read_text())["n"] > 0
    assert load_causal_lm(str(source)).dtype == torch.float32
    assert weights(folder)["score.weight"].dtype == torch.float32


def test_a_dtype_of_another_time_is_replaced(source: Path, tmp_path: Path) -> None:
    """The record always belongs to the model beside it."""
    tree = sft_tree(tmp_path, export_dtype="bfloat16")
    folder = run("train", tmp_path, tree)
    first = read_export(folder)
    tree["policy"]["export_dtype"] = "float16"
    run("train", tmp_path, tree)
    second = read_export(folder)
    assert first is not None
    assert second is not None
    assert (first.dtype, second.dtype) == ("bfloat16", "float16")
    settings = json.loads((folder / "model" / "config.json").read_text())
    assert settings["dtype"] == "float16"
    write(folder / "model" / "config.json", settings)


TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


@pytest.mark.parametrize("verb", ["train", "rm"])
def test_the_template_of_the_run_is_exported(verb: str, source: Path, tmp_path: Path) -> None:
    tree = sft_tree(tmp_path) if verb == "train" else rm_tree(tmp_path)
    tree["data"]["chat_template"] = str(tmp_path / "own.jinja")
    (tmp_path / "own.jinja").write_text(TEMPLATE, encoding="utf-8")
    folder = run(verb, tmp_path, tree)
    turns = [{"role": "user", "content": "red"}]
    exported = AutoTokenizer.from_pretrained(folder / "model")
    assert exported.apply_chat_template(turns, tokenize=False) == "user: red<eos>"


def test_generation_stops_where_the_template_ends_a_turn(source: Path, tmp_path: Path) -> None:
    published = AutoTokenizer.from_pretrained(source)
    published.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(len(published))
    for part in (model, published):
        part.save_pretrained(source)
    tree = sft_tree(tmp_path)
    tree["data"]["chat_template"] = str(tmp_path / "own.jinja")
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace("<eos>", "<|end|>"), encoding="utf-8")
    folder = run("train", tmp_path, tree)
    generation = GenerationConfig.from_pretrained(folder / "model")
    assert generation.eos_token_id == [published.eos_token_id, published.convert_tokens_to_ids("<|end|>")]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_reward_model_that_is_trained_further_keeps_its_head(
    lora: dict[str, int] | None, source: Path, tmp_path: Path
) -> None:
    first = run("rm", tmp_path, rm_tree(tmp_path))
    further = rm_tree(tmp_path, model=str(first), lr=0.0, lora=lora)
    further["run"]["out_dir"] = str(tmp_path / "further")
    again = run("rm", tmp_path, further)
    assert torch.equal(weights(again)["score.weight"].float(), weights(first)["score.weight"].float())

"""Whole runs on a model as published, its pad token its EOS: untrained, the export is the input, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from published import files, write
from runs import make_model, online, pairs_file, ppo_tree, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf.cli import main
from rlhf.config.weights import LoraConfig
from rlhf.errors import ConfigError
from rlhf.models.backbone import add_lora, load_causal_lm

ROWS = [{"prompt": f"{color} one", "completion": " good"} for color in ("red", "blue")] * 4


def publish_words(folder: Path) -> Path:
    """The model of `runs`, in bfloat16, with dropout and sampling defaults, padded with its EOS."""
    make_model(folder, dtype=torch.bfloat16)
    settings = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", settings | {"attention_dropout": 0.1, "pad_token_id": 2})
    defaults = {"eos_token_id": [2, 3], "do_sample": True, "top_p": 0.9, "pad_token_id": 2}
    write(folder / "generation_config.json", defaults)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder / "tokenizer_config.json", tokenizer | {"pad_token": "<eos>"})
    return folder


def run(verb: str, folder: Path, tree: dict[str, Any], *overrides: str) -> Path:
    """Run a verb of the command line to its end; returns the exported folder."""
    file = folder / f"{verb}.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main([verb, str(file), *overrides]) == 0
    return Path(tree["run"]["out_dir"]) / "model"


def sft_tree(folder: Path, **policy: Any) -> dict[str, Any]:
    return {
        "run": {"out_dir": str(folder / "sft"), "device": "cpu"},
        "data": {"sft": {"path": str(write_rows(folder / "sft.jsonl", ROWS))}},
        "policy": {"model": str(folder / "model"), **policy},
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": 4},
        "schedule": {"steps": 1},
    }


@pytest.mark.parametrize("lora", [None, {"r": 2}])
@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_a_run_that_trains_nothing_exports_its_input(kind: str, lora: dict[str, int] | None, tmp_path: Path) -> None:
    source = publish_words(tmp_path / "model")
    policy = {"lr": 0.0, "lora": lora}
    ppo = ppo_tree(tmp_path, policy=policy, schedule={"steps": 1}, checkpoint={"every": 1}, eval={"every": 1})
    exported = run("train", tmp_path, sft_tree(tmp_path, **policy) if kind == "sft" else ppo)
    assert files(exported) == files(source)


@pytest.mark.beside
def test_the_command_line_prints_nothing_of_its_libraries(tmp_path: Path) -> None:
    publish_words(tmp_path / "model")
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(sft_tree(tmp_path, lr=1e-3, optimizer="adamw_8bit")), encoding="utf-8")
    command = [sys.executable, "-m", "rlhf", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "NO_COLOR": "1"})
    first_words = {line.split()[0] for line in (done.stdout + done.stderr).splitlines()}
    assert first_words <= {str(tmp_path / "sft.jsonl:"), "sft", "optimizations", "step", "the", "model", "report"}


def test_checkpoints_are_exact_and_otherwise_as_published(tmp_path: Path) -> None:
    source = publish_words(tmp_path / "model")
    exported = run("train", tmp_path, sft_tree(tmp_path, lr=1e-2) | {"checkpoint": {"every": 1}})
    checkpoint = next((tmp_path / "sft" / "checkpoints").glob("*/model"))
    exact, rounded = (load_file(folder / "model.safetensors") for folder in (checkpoint, exported))
    assert {weight.dtype for weight in exact.values()} == {torch.float32}
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in rounded)
    assert not all(torch.equal(exact[name], rounded[name].float()) for name in rounded)
    weights = {"model.safetensors"}
    assert {name for name in files(source) if files(exported)[name] != files(source)[name]} == weights
    changed = {name for name in files(source) if files(checkpoint)[name] != files(source)[name]}
    assert changed == weights | {"config.json"}
    settings = json.loads((checkpoint / "config.json").read_text())
    assert settings == json.loads((source / "config.json").read_text()) | {"dtype": "float32"}


def test_reward_model_and_ppo_on_it_without_a_spare_pad_token(tmp_path: Path) -> None:
    source = publish_words(tmp_path / "model")
    rm = {
        "run": {"out_dir": str(tmp_path / "rm"), "device": "cpu"},
        "data": {"preferences": {"path": str(pairs_file(tmp_path))}},
        "model": {"model": str(source), "lr": 1e-3},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 2},
    }
    reward = run("rm", tmp_path, rm)
    theirs = AutoTokenizer.from_pretrained(reward)
    assert theirs.pad_token == "<pad>"
    assert theirs.get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    config = AutoModelForSequenceClassification.from_pretrained(reward).config
    assert (config.pad_token_id, config.attention_dropout) == (0, 0.1)
    same = {"tokenizer.json"}
    assert {name for name in same if files(reward)[name] != files(source)[name]} == set()
    scored = {"source": {"type": "model", "path": str(tmp_path / "rm")}}
    tree = ppo_tree(tmp_path, reward={}, critic={"init": "auto"}, schedule={"steps": 1})
    tree["reward"] = scored
    exported = run("train", tmp_path, tree)
    weights, before = (load_file(folder / "model.safetensors") for folder in (exported, source))
    assert {name: weight.shape for name, weight in weights.items()} == {n: w.shape for n, w in before.items()}


def other_vocabulary(folder: Path) -> Path:
    """The model of `runs` under a tokenizer in which two words have changed places."""
    make_model(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"red"', '"x"').replace('"blue"', '"red"').replace('"x"', '"blue"'))
    return folder


def test_a_reward_model_of_another_vocabulary_is_no_critic(tmp_path: Path) -> None:
    rm = {
        "run": {"out_dir": str(tmp_path / "rm"), "device": "cpu"},
        "data": {"preferences": {"path": str(pairs_file(tmp_path))}},
        "model": {"model": str(other_vocabulary(tmp_path / "other")), "lr": 1e-3},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 1},
    }
    run("rm", tmp_path, rm)
    tree = ppo_tree(tmp_path, critic={"init": "auto"})
    tree["reward"] = {"source": {"type": "model", "path": str(tmp_path / "rm")}}
    built = online(tree)
    assert built.models.critic is not None
    assert built.models.critic.head.weight.abs().max() == 0  # new, over the policy's backbone
    built.session.recorder.close()
    notes = (tmp_path / "run" / "notes.jsonl").read_text()
    assert "critic.init=auto: the policy's backbone" in notes
    for init in ("reward", str(tmp_path / "rm")):
        with pytest.raises(ConfigError, match=r"critic\.init=.*set critic\.init=policy"):
            online(tree, f"critic.init={init}", f"run.out_dir={tmp_path / init.replace('/', '-')}")


def test_reward_model_reference_and_policy_start_from_an_adapters_folder(tmp_path: Path) -> None:
    source = publish_words(tmp_path / "model")
    add_lora(load_causal_lm(str(source)), LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    policy = {"model": str(tmp_path / "adapter"), "lr": 0.0}
    tree = ppo_tree(tmp_path, policy=policy, reference={"model": str(tmp_path / "adapter")}, schedule={"steps": 1})
    assert files(run("train", tmp_path, tree)) == files(source)
    rm = {
        "run": {"out_dir": str(tmp_path / "rm"), "device": "cpu"},
        "data": {"preferences": {"path": str(pairs_file(tmp_path))}},
        "model": {"model": str(tmp_path / "adapter"), "lr": 0.0},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 1},
    }
    weights, before = load_file(run("rm", tmp_path, rm) / "model.safetensors"), load_file(source / "model.safetensors")
    assert weights.keys() - before.keys() == {"score.weight"}
    assert all(torch.equal(weights[name], before[name]) for name in weights.keys() & before.keys())

"""A mistake in a configuration is told before torch and the other slow libraries are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import make_model, ppo_tree

from rlhf.config.load import load_train, merge
from rlhf.data.paths import check_files
from rlhf.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("torch", "transformers", "peft", "datasets", "plotly", "sklearn", "accelerate", "numpy")
PROGRAM = f"""
import sys
from rlhf.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
print("code", code, "imported", *[name for name in {SLOW} if name in sys.modules])
"""


def run_cli(*arguments: str) -> tuple[str, str, str]:
    """Run the command line in a new process: its output, its errors, and what became of it."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *output, ending = done.stdout.splitlines()
    return "\n".join(output), done.stderr, ending


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train configs/ppo.yaml policy.learning_rate=1", "policy.learning_rate: unknown key; here it is called lr"),
        ("rm configs/reward_model.yaml model.lrr=1", "model.lrr: unknown key; did you mean lr?"),
        ("config configs/ppo.yaml batch.minibatches=0", "batch.minibatches: Input should be greater than or equal"),
        ("compare configs/compare.yaml budget.steps=3", "budget.steps: unknown key"),
        ("compare configs/lab/compare.yaml arms.ppo.policy.lrr=1", "arms.ppo: policy.lrr: unknown key"),
        ("train configs/lab/ppo.yaml data.prompts.path=lab:promts", "the lab has no 'promts'"),
        ("quickstart policy.lrr=1", "policy.lrr: unknown key; did you mean lr?"),
        ("eval docs", "docs is not a run folder (it has no config.yaml)"),
        ("eval docs --suite gsm9k", "--suite: 'gsm9k' is not one of hh, persona, gsm8k"),
        ("eval docs --suite gsm8k --data README.md smaples=2", "smaples: unknown key; did you mean samples?"),
        ("eval docs --suite gsm8k", "the suite gsm8k needs data: --data PATH"),
        ("eval docs --suite xstest --data ./no.csv", "dataset.path: no such file or folder: ./no.csv"),
        ("eval docs --suite lab --against runs/no", "reference: no such file or folder: runs/no"),
        ("eval runs/nowhere --suite lab", "no such file or folder: runs/nowhere"),
        ("sample runs/nowhere --prompt a", "no such file or folder: runs/nowhere"),
        ("sample ./no.gguf --prompt a", "no such file or folder: ./no.gguf"),
        ("sample docs --prompt a --top-p 2", "--top-p is above 0 and at most 1"),
        ("sample docs --prompt a --temperature -1", "temperature: Input should be greater than 0"),
        ("train configs/pppo.yaml", "no configuration file 'configs/pppo.yaml'; did you mean configs/ppo.yaml?"),
    ],
)
def test_a_mistake_is_told_before_anything_slow_is_imported(command: str, message: str) -> None:
    _, errors, ending = run_cli(*command.split())
    assert message in errors
    assert ending == "code 2 imported"


@pytest.mark.parametrize("command", ["--help", "train --help", "config configs/ppo.yaml policy.lr=1e-5"])
def test_help_and_config_import_nothing_slow(command: str) -> None:
    output, errors, ending = run_cli(*command.split())
    assert "lr: 1.0e-05" in output or "usage: rlhf" in output
    assert (errors, ending) == ("", "code 0 imported")


def test_the_settings_of_a_run_folder_are_checked_first(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(ppo_tree(tmp_path)))
    _, errors, ending = run_cli("eval", str(tmp_path), "sampling.temprature=1")
    assert "sampling.temprature: unknown key; did you mean temperature?" in errors
    assert ending == "code 2 imported"


@pytest.mark.parametrize("command", ["sample {} --prompt a", "eval {} --suite xstest --data README.md"])
def test_so_are_they_before_a_sample_and_a_suite(command: str, tmp_path: Path) -> None:
    tree = merge(ppo_tree(tmp_path), {"sampling": {"temprature": 1}, "data": {"chat_template_kwarg": {}}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    _, errors, ending = run_cli(*command.format(tmp_path).split())
    assert "unknown key; did you mean" in errors
    assert ending == "code 2 imported"


def write_tree(folder: Path, **changes: Any) -> str:
    (folder / "c.yaml").write_text(yaml.safe_dump(merge(ppo_tree(folder), changes)))
    return str(folder / "c.yaml")


def test_files_that_are_not_there_are_told_together_and_by_their_keys(tmp_path: Path) -> None:
    missing = {"path": str(tmp_path / "promts.jsonl")}
    source = {"type": "model", "path": str(tmp_path / "rm")}
    file = write_tree(tmp_path, data={"prompts": missing, "sft": missing}, policy={"model": "runs/nowhere/model"})
    _, errors, ending = run_cli("train", file, f"reward.source={source}")
    assert ending == "code 2 imported"
    assert [line.removeprefix("error: ").split(": no such file or folder: ")[0] for line in errors.splitlines()] == [
        "policy.model",
        "reward.source.path",
        "data.prompts.path",
    ]
    assert "there is prompts.jsonl" in errors
    assert not (tmp_path / "run").exists()


def test_only_what_a_run_reads_must_be_there(tmp_path: Path) -> None:
    """A hub id may be anything, an unread section may name anything, a run that continues has its own model."""
    unread = {"path": "nowhere.jsonl"}
    file = write_tree(tmp_path, data={"sft": unread, "preferences": unread, "eval_sft": unread})
    config = load_train(file)
    make_model(tmp_path / "model")
    check_files(config)
    check_files(load_train(file, ["policy.model=owner/name", "data.prompts.path=owner/name"]))
    gone = load_train(file, [f"policy.model={tmp_path / 'gone'}"])
    with pytest.raises(ModelError, match=r"policy\.model: no such file or folder"):
        check_files(gone)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    check_files(gone)

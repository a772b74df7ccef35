"""A mistake in a configuration is told before torch and the other slow libraries are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import make_model, ppo_tree

from rlhf.config.files import merge
from rlhf.config.load import load_train
from rlhf.data.paths import check_files
from rlhf.errors import ModelError
from rlhf.lab.build import LabSpec, lab_folder

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("torch", "transformers", "peft", "datasets", "plotly", "sklearn", "accelerate", "numpy")
PROGRAM = f"""
import contextlib, io, json, sys
from rlhf.cli import main

for arguments in json.load(sys.stdin):
    before, out, err = set(sys.modules), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = exit.code
    imported = [name for name in {SLOW} if name in set(sys.modules) - before]
    print(json.dumps([out.getvalue(), err.getvalue(), " ".join(["code", str(code), "imported", *imported])]))
"""
Ending = tuple[str, str, str]  # a command's output, its errors, and its outcome


def run_all(commands: Sequence[Sequence[str]], folder: Path = ROOT) -> list[Ending]:
    """Run command lines one after another in a new process, which has imported nothing slow before any of them."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=True,
    )
    return [(output, errors, ending) for output, errors, ending in map(json.loads, done.stdout.splitlines())]


def run_cli(*arguments: str) -> Ending:
    (result,) = run_all([arguments])
    return result


MISTAKES = {
    "train configs/ppo.yaml policy.learning_rate=1": "policy.learning_rate: unknown key; here it is called lr",
    "rm configs/reward_model.yaml model.lrr=1": "model.lrr: unknown key; did you mean lr?",
    "config configs/ppo.yaml batch.minibatches=0": "batch.minibatches: Input should be greater than or equal",
    "compare configs/compare.yaml budget.steps=3": "budget.steps: unknown key",
    "compare configs/lab/compare.yaml arms.ppo.policy.lrr=1": "arms.ppo: policy.lrr: unknown key",
    "compare configs/compare.yaml start=runs/no": "start: no such file or folder: runs/no",
    "compare configs/compare.yaml out_dir=README.md": "out_dir: cannot write into README.md (it is a file)",
    "compare configs/lab/compare.yaml out_dir=README.md": "out_dir: cannot write into README.md (it is a file)",
    "train configs/lab/ppo.yaml data.prompts.path=lab:promts": "the lab has no 'promts'",
    "quickstart policy.lrr=1": "policy.lrr: unknown key; did you mean lr?",
    "eval doks": "no such run folder: doks; did you mean docs?",
    "eval docs": "docs is not a run folder (it has no config.yaml)",
    "eval docs --suite gsm9k": "--suite: 'gsm9k' is not one of blimp, detox, gsm8k, harmful, lm-eval:TASK, hh",
    "eval docs --suite gsm8k --data README.md smaples=2": "smaples: unknown key; did you mean samples?",
    "eval docs --suite gsm8k": "the suite gsm8k needs data: --data PATH",
    "eval docs --suite xstest --data ./no.csv": "dataset.path: no such file or folder: ./no.csv",
    "eval docs --suite lab --against runs/no": "reference: no such file or folder: runs/no",
    "eval runs/nowhere --suite lab": "no such file or folder: runs/nowhere",
    "serve-reward runs/nowhere": "no such file or folder: runs/nowhere",
    "serve-policy runs/nowhere": "no such file or folder: runs/nowhere",
    "export runs/nowhere --gguf x.gguf": "no such file or folder: runs/nowhere",
    "sample runs/nowhere --prompt a": "no such file or folder: runs/nowhere",
    "sample ./no.gguf --prompt a": "no such file or folder: ./no.gguf",
    "sample docs --prompt a --top-p 2": "--top-p is 2: it has to be above 0 and at most 1",
    "sample docs --prompt a --top-p nan": "--top-p is nan: it has to be above 0 and at most 1",
    "sample docs --prompt a --count 0": "count is 0: it has to be at least 1",
    "sample docs --prompt a --prompt=": "prompt 2 is empty: give it a text to complete",
    "sample docs --prompt a\udcff": "prompt 1 is not valid Unicode: give it in UTF-8",
    f"sample docs --prompt a --seed {2**64}": f"seed is {2**64}: it has to have at most 64 bits",
    "sample docs --prompt a --temperature nan": "temperature: Input should be a finite number",
    "chat runs/nowhere": "no such file or folder: runs/nowhere",
    "chat docs --temperature nan": "--temperature must be > 0",
    "chat docs --temperature inf": "--temperature must be > 0",
    "chat docs --temperature -1": "--temperature must be > 0",
    "chat docs --top-p 0": "--top-p is 0: it has to be above 0 and at most 1",
    "chat docs --max-tokens 0": "--max-new-tokens is 0: it must be at least 1",
    f"chat docs --seed {2**64}": f"seed is {2**64}: it has to have at most 64 bits",
    "eval docs --suite lab --out .": "--out . is a folder: name the file to write",
    "push docs@best owner/name": "docs has kept no best checkpoint",
    "export docs --gguf .": "--gguf . is a folder: name the file to write",
    "sample docs --prompt a --temperature -1": "temperature: Input should be greater than 0",
    "launch --slurm configs/pppo.yaml --gpus 8": "no configuration file 'configs/pppo.yaml'",
    "launch --slurm configs/ppo.yaml --gpus 0": "--gpus is 0: it has to be at least 1",
    "train configs/pppo.yaml": "no configuration file 'configs/pppo.yaml'; did you mean configs/ppo.yaml?",
}
LIGHT = {
    "--help": "usage: rlhf",
    "train --help": "usage: rlhf",
    "report --help": "the folder of a run or of a comparison",
    "config configs/ppo.yaml policy.lr=1e-5": "lr: 1.0e-05",
    "launch --slurm configs/ppo.yaml policy.lr=1e-5 --gpus 8": "train configs/ppo.yaml policy.lr=1e-5",
}


@pytest.fixture(scope="module")
def endings() -> dict[str, Ending]:
    commands = [*MISTAKES, *LIGHT]
    return dict(zip(commands, run_all([command.split() for command in commands]), strict=True))


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_told_before_anything_slow_is_imported(command: str, endings: dict[str, Ending]) -> None:
    _, errors, ending = endings[command]
    assert MISTAKES[command] in errors
    assert ending == "code 2 imported"


NOT_FETCHED = {
    "reward {}/rm_smollm2_hh.yaml": "hh_harmless/train.jsonl. `python scripts/get_data.py hh_harmless` makes it",
    "train {}/ppo_stories_vader.yaml": "models/stories260k. `python scripts/get_stories260k.py` makes it",
    "compare {}/compare_smollm2.yaml": "`python scripts/make_instructions.py runs/instructions/train.jsonl --rows",
    "eval . --suite ifeval --data data/ifeval": "data/ifeval. `python scripts/get_data.py ifeval` makes it",
    "sample models/smollm2-135m-instruct --prompt a": "`python scripts/get_smollm2.py` makes it",
}


def test_what_a_script_makes_is_told_with_its_command(tmp_path: Path) -> None:
    commands = [command.format(ROOT / "configs" / "real").split() for command in NOT_FETCHED]
    for (_, errors, ending), message in zip(run_all(commands, tmp_path), NOT_FETCHED.values(), strict=True):
        assert message in errors
        assert ending == "code 2 imported"


def test_a_function_that_a_file_lacks_is_told_at_once(tmp_path: Path) -> None:
    lab_folder(LabSpec())  # which the first command of a machine makes, with torch
    (tmp_path / "mine.py").write_text("import torch\ndef score(**columns): ...\n")
    target, sections = f"{tmp_path}/mine.py:scor", ("reward.source", "algorithm.policy_loss")
    known = ["policy.model=docs", "critic.init=policy", "reward.source={type: function, target: math:sqrt}"]
    words = [f"{section}={{type: function, target: '{target}'}}" for section in sections]
    endings = run_all([["train", "configs/lab/ppo.yaml", *known, word] for word in words])
    for section, (_, errors, ending) in zip(sections, endings, strict=True):
        assert f"{section} target '{target}': {tmp_path}/mine.py has no 'scor'; did you mean score?" in errors
        assert ending == "code 2 imported"


@pytest.mark.parametrize("command", LIGHT)
def test_what_trains_nothing_imports_nothing_slow(command: str, endings: dict[str, Ending]) -> None:
    output, errors, ending = endings[command]
    assert LIGHT[command] in output
    assert (errors, ending) == ("", "code 0 imported")


def test_the_help_imports_little() -> None:
    """Of other projects only rich, and of this one nothing but the command line: help comes at once."""
    listed = "print(*sorted({name.partition('.')[0] for name in new} - set(sys.stdlib_module_names)), sep=',')"
    own = "print(*sorted(name for name in new if name.startswith(('rlhf.', 'reward_model'))), sep=',')"
    program = f"""
import sys
before = set(sys.modules)
from rlhf.cli import main
try:
    main(["--help"])
except SystemExit:
    new = set(sys.modules) - before
    {listed}
    {own}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    *_, projects, modules = done.stdout.splitlines()
    assert set(projects.split(",")) <= {"rich", "rlhf"}
    assert modules == "rlhf.cli,rlhf.errors,rlhf.process"


OF_A_FOLDER = {
    "eval {}/right sampling.temprature=1": "sampling.temprature: unknown key; did you mean temperature?",
    "sample {}/wrong --prompt a": "unknown key; did you mean",
    "eval {}/wrong --suite xstest --data README.md": "unknown key; did you mean",
}


def test_the_settings_of_a_run_folder_are_checked_first(tmp_path: Path) -> None:
    wrong = {"sampling": {"temprature": 1}, "data": {"chat_template_kwarg": {}}}
    for name, changes in {"right": {}, "wrong": wrong}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(merge(ppo_tree(tmp_path), changes)))
    commands = [command.format(tmp_path).split() for command in OF_A_FOLDER]
    for (_, errors, ending), message in zip(run_all(commands), OF_A_FOLDER.values(), strict=True):
        assert message in errors
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


def test_only_what_a_run_reads_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id may be anything, an unread section may name anything, a run that continues has its own model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    unread = {"path": "nowhere.jsonl"}
    file = write_tree(tmp_path, data={"sft": unread, "preferences": unread, "eval_sft": unread})
    config = load_train(file)
    make_model(tmp_path / "model")
    check_files(config)
    check_files(load_train(file, ["data.prompts.path=owner/name"]))
    with pytest.raises(
        ModelError, match=r"policy\.model: 'owner/name' is neither a folder here nor in the hub's cache"
    ):
        check_files(load_train(file, ["policy.model=owner/name"]))
    gone = load_train(file, [f"policy.model={tmp_path / 'gone'}"])
    with pytest.raises(ModelError, match=r"policy\.model: no such file or folder"):
        check_files(gone)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    check_files(gone)

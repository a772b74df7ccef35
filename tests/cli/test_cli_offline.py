"""`rlhf train` with a preference loss, from the file to the report; a user's mistakes on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from quick import quick
from runs import labelled_file, offline_tree, write_rows

from rlhf.cli import main


def write_config(folder: Path, preset: str, **changes: object) -> str:
    path = folder / f"{preset}.yaml"
    path.write_text(yaml.safe_dump(offline_tree(folder, preset, **changes)))
    return str(path)


@pytest.mark.parametrize("preset", quick(["dpo", "orpo", "kto"], ["dpo", "kto"]))
def test_train_eval_sample_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str) -> None:
    assert main(["train", write_config(tmp_path, preset)]) == 0
    shown = capsys.readouterr().out
    assert ("reference log-probs" in shown) == (preset != "orpo")
    assert "warning" not in shown
    run = tmp_path / "run"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    sides = {f"{where}/{side}_logprob" for where in ("preference", "eval") for side in ("chosen", "rejected")}
    assert sides <= set(last)
    assert last["preference/chosen_logprob"] != last["preference/rejected_logprob"]
    assert "Log-probability of chosen and rejected" in (run / "report.html").read_text()
    assert main(["eval", str(run)]) == 0
    assert main(["sample", str(run), "--prompt", "red one", "--count", "2"]) == 0
    assert capsys.readouterr().out.count("→") == 2


def test_kto_reads_labels_and_the_others_say_they_need_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = {"path": str(labelled_file(tmp_path, count=20, seed=3))}
    data = {"preferences": {"path": str(labelled_file(tmp_path))}, "eval_preferences": held_out}
    assert main(["train", write_config(tmp_path, "kto", data=data)]) == 0
    capsys.readouterr()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name for name in last if name.startswith("eval/preference")} == {"eval/preference_loss"}  # no pairs
    out = f"run.out_dir={tmp_path / 'other'}"
    assert main(["train", write_config(tmp_path, "dpo", data=data), out]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "chosen" in error


@pytest.mark.parametrize("label", [True, False])
def test_kto_with_labels_of_one_kind_is_warned(tmp_path: Path, capsys: pytest.CaptureFixture[str], label: bool) -> None:
    rows = [json.loads(line) for line in labelled_file(tmp_path).read_text(encoding="utf-8").splitlines()]
    one_kind = write_rows(tmp_path / "one.jsonl", [row for row in rows if row["label"] is label])
    data = {"preferences": {"path": str(one_kind)}, "eval_preferences": None}
    settings = write_config(tmp_path, "kto", data=data, eval={"every": 0}, schedule={"steps": 1})
    assert main(["train", settings]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"all rows of data.preferences have label={str(label).lower()}: KTO learns from the difference" in told


@pytest.mark.parametrize(
    ("preset", "override", "expected"),
    [
        ("dpo", "data.preferences=null", "data.preferences is missing: dpo needs pairs;"),
        ("kto", "data.preferences=null", "data.preferences is missing: kto needs pairs or labelled completions;"),
        ("dpo", "algorithm.loss.gamma=1", "algorithm.loss.gamma: unknown key"),
        ("dop", "run.seed=1", "'dop' is not one of"),
        ("dpo", "reference.model=/nowhere", "no such file or folder: /nowhere"),
    ],
)
def test_a_mistake_is_one_plain_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str, override: str, expected: str
) -> None:
    assert main(["train", write_config(tmp_path, preset), override]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert expected in error


def test_a_held_out_set_of_another_kind_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = {"eval_preferences": {"path": str(labelled_file(tmp_path))}}
    assert main(["train", write_config(tmp_path, "ipo", data=held_out)]) == 2
    assert "labelled-0.jsonl" in capsys.readouterr().err


def test_pairs_without_usable_rows_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = str(write_rows(tmp_path / "empty.jsonl", []))
    for preset in ("dpo", "kto"):
        assert main(["train", write_config(tmp_path, preset), f"data.preferences.path={empty}"]) == 2
        assert "empty.jsonl" in capsys.readouterr().err

"""The alignment suites on several models, by benchmarks/alignment_evals.py: folders, a comparison, missing results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from runs import make_model, write_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from alignment_evals import main, models_of

PAIRS = [
    {"good": "one two", "bad": "two one", "phenomenon": "order", "uid": "order_1"},
    {"good": "red good", "bad": "good red", "phenomenon": "order", "uid": "order_1"},
]


def comparison(folder: Path) -> Path:
    """A start model, an arm with two seeds, and an arm without a model."""
    start = make_model(folder / "start_model")
    for name, seed in (("grpo", 0), ("grpo", 1), ("start", 0), ("best_of_n", 0)):
        cell = folder / "compare" / name / f"seed-{seed}"
        cell.mkdir(parents=True)
        (cell / "cell.yaml").write_text(yaml.safe_dump({"train": {"policy": {"model": str(start)}}}))
        if name == "grpo":
            make_model(cell / "model", seed=seed + 1)
            (cell / "judged.json").write_text('{"metrics": {}, "rows": []}')
    return folder / "compare"


def test_the_start_model_and_every_arm_of_a_comparison(tmp_path: Path) -> None:
    models = list(models_of(str(comparison(tmp_path))))
    assert [model.name for model in models] == ["start-seed-0", "best_of_n-seed-0", "grpo-seed-0", "grpo-seed-1"]
    assert [model.target is None for model in models] == [False, True, False, False]
    assert models[0].target == str(tmp_path / "start_model")
    with pytest.raises(SystemExit, match="no comparison there"):
        list(models_of(str(tmp_path / "start_model")))


def test_what_is_missing_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = make_model(tmp_path / "model"), write_rows(tmp_path / "blimp.jsonl", PAIRS)
    out, results = tmp_path / "deep" / "all.json", tmp_path / "results"
    arguments = [f"start={model}", "--results", str(results), "--out", str(out)]
    asked = ["--suite", f"blimp={rows}", "--limit", "1", "--set", "device=cpu"]
    assert main([*arguments, *asked]) == 0
    figures = json.loads(out.read_text())["models"]["start"]
    assert figures["blimp"]["rows"] == 1
    assert figures["blimp"]["settings"]["limit"] == 1
    rows.unlink()  # so that measuring again would fail
    assert main([*arguments, *asked]) == 0
    assert main(arguments) == 0
    assert json.loads(out.read_text())["models"]["start"] == figures
    assert "| start | 0.000 [" in (text := capsys.readouterr().out) or "| start | 1.000 [" in text
    assert main([*arguments, "--suite", "gsm8k=nowhere"]) == 1
    assert json.loads(out.read_text())["models"]["start"] == figures  # the results that could be measured are there

"""The notebooks run from top to bottom: their code cells, in order, as a script in a folder of its own.

In CI (`.ci/run`), or by `bash scripts/test.sh -m beside`. Trainings are cut to STEPS, and a start from which others
begin to STEPS_OF_START: every cell runs on the results of earlier ones; a whole run's results are in the outputs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL = "models/smollm2-135m-instruct"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STEPS = 3
STEPS_OF_START = 60  # of 300: enough for texts of which one is better than another


def code_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_there_are_six() -> None:
    assert [notebook.stem[:1] for notebook in NOTEBOOKS] == ["1", "2", "3", "4", "5", "6"]


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_cells_parse_and_were_run_in_order_or_not_at_all(notebook: Path) -> None:
    """As scripts/run_notebooks.py leaves them: a notebook that was run shows the output of each of its cells."""
    compile(code_of(notebook), str(notebook), "exec")
    cells = code_cells(notebook)
    counts = [cell["execution_count"] for cell in cells]
    if counts == [None] * len(cells):
        assert not any(cell["outputs"] for cell in cells)
        return
    assert counts == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells if "print(" in "".join(cell["source"]))


@pytest.mark.parametrize("name", ["1_first_run", "5_smollm2", "6_train_an_agent"])
def test_some_notebooks_have_their_outputs(name: str) -> None:
    assert all(cell["execution_count"] for cell in code_cells(ROOT / "notebooks" / f"{name}.ipynb"))


def cut_short(code: str) -> str:
    """Let its trainings end early."""

    def fewer(match: re.Match[str]) -> str:
        steps = int(match[2])
        return match[1] + str(min(steps, STEPS if steps < STEPS_OF_START else STEPS_OF_START))

    return re.sub(r"(\bsteps(?:\": |=))(\d+)", fewer, code)


def test_trainings_are_cut_short() -> None:
    code = 'train(schedule={"steps": 300}, steps=8); sft(schedule={"steps": 2, "warmup_steps": 9})'
    assert cut_short(code) == 'train(schedule={"steps": 60}, steps=3); sft(schedule={"steps": 2, "warmup_steps": 9})'


@pytest.mark.beside
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    if MODEL in code_of(notebook):
        if not (ROOT / MODEL).is_dir():
            pytest.skip(f"{MODEL} is not there: python scripts/get_smollm2.py")
        (tmp_path / "models").symlink_to(ROOT / "models")
    script = tmp_path / "notebook.py"
    script.write_text(f"if __name__ == '__main__':\n{_indented(cut_short(code_of(notebook)))}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, check=True, timeout=900)


def _indented(code: str) -> str:
    """Put the code under a guard, since processes that rlhf.compare starts import the main script."""
    return "\n".join(f"    {line}" if line.strip() else line for line in code.splitlines())

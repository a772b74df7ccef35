"""The notebooks run from top to bottom: their code cells, in order, as a script in a folder of its own.

In CI (`.ci/run`), or by `bash scripts/test.sh -m notebook`: a minute of processor time each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_there_are_four() -> None:
    assert [notebook.stem[:1] for notebook in NOTEBOOKS] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_cells_parse_and_hold_no_output(notebook: Path) -> None:
    compile(code_of(notebook), str(notebook), "exec")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.notebook
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(f"if __name__ == '__main__':\n{_indented(code_of(notebook))}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, check=True, timeout=900)


def _indented(code: str) -> str:
    """Put the code under a guard, since processes that rlhf.compare starts import the main script."""
    return "\n".join(f"    {line}" if line.strip() else line for line in code.splitlines())

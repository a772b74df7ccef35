"""Run notebooks and write the outputs of their cells into them:  python scripts/run_notebooks.py [NOTEBOOK ...]

Without arguments it runs all of notebooks/. Each runs in a new process, in a folder of its own that is then removed. In
it is a link to models/ of the checkout, which python scripts/get_smollm2.py fills.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 60_000  # characters of HTML that a notebook keeps of one value


def main(arguments: list[str]) -> int:
    """Run the notebooks that are named, or all of them."""
    if arguments[:1] == ["--here"]:
        fill(Path(arguments[1]))
        return 0
    for path in map(Path, arguments or sorted(map(str, (ROOT / "notebooks").glob("*.ipynb")))):
        with tempfile.TemporaryDirectory() as folder:
            if (ROOT / "models").is_dir():
                (Path(folder) / "models").symlink_to(ROOT / "models")
            python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            command = [sys.executable, __file__, "--here", str(path.resolve())]
            environment = {**os.environ, "PYTHONPATH": python_path, "MPLBACKEND": "agg"}
            subprocess.run(command, cwd=folder, check=True, env=environment)
    return 0


def fill(path: Path) -> None:
    """Run a notebook's code cells in order in this process, and write their outputs into the file."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        cell["execution_count"] = number
        cell["outputs"] = run_cell("".join(cell["source"]), names, number)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run_cell(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run one cell; return its outputs in the notebook format: its printed text, and its last value."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None and not source.rstrip().endswith(";"):
        shown = {"data": show(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        outputs.append(shown)
    return outputs + figures()


def figures() -> list[dict[str, Any]]:
    """Return the figures that matplotlib has drawn, and close them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    drawn: list[dict[str, Any]] = []
    for number in pyplot.get_fignums() if pyplot is not None else ():
        content = io.BytesIO()
        pyplot.figure(number).savefig(content, format="png", dpi=70, bbox_inches="tight")
        data = {"image/png": base64.b64encode(content.getvalue()).decode(), "text/plain": ["<Figure>"]}
        drawn.append({"data": data, "metadata": {}, "output_type": "display_data"})
    if pyplot is not None:
        pyplot.close("all")
    return drawn


def show(value: Any) -> dict[str, list[str]]:
    """Return a value as Jupyter shows it: as text, and as HTML if it has a form of that and it is not too long."""
    html = getattr(value, "_repr_html_", str)() if hasattr(value, "_repr_html_") else ""
    data = {"text/plain": lines(repr(value))}
    return {"text/html": lines(html), **data} if html and len(html) <= LARGEST else data


def lines(text: str) -> list[str]:
    """Split a text in the way of the notebook format."""
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

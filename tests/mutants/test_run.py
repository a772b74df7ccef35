"""The mutant runner tells noticing from not noticing on a tiny project; the real list is not stale."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run.py")

CODE = """\
def area(width, height):
    if width < 0:
        raise ValueError(width)
    return width * height


def unused():
    return 1
"""

TESTS = """\
import pytest
from code_under_test import area


def test_area():
    assert area(2, 3) == 6


def test_negative():
    with pytest.raises(ValueError):
        area(-1, 1)
"""

LIST = """\
from mutant import Mutant

def seed(name, before, after, timeout_s=60):
    return Mutant(
        name=name, file="code_under_test.py", before=before, after=after, why="because " + name,
        tests=("test_area.py",), timeout_s=timeout_s,
    )

MUTANTS = [
    seed("sum", "width * height", "width + height"),
    seed("silent", "width < 0", "width < -9"),
    seed("raises", "return width * height", "return (width * height)[0]"),
    seed("unseen", "return 1", "return 2"),
    seed("syntax", "width * height", "width * ("),
    seed("name", "width * height", "width * depth"),
    seed("import", "def unused", "import no_such_module\\ndef unused"),
    seed("forever", "return width * height", "import time; time.sleep(600)", timeout_s=5),
]
"""

# Each of a dozen runs of pytest would import all installed plugins, which takes longer than all its other work.
PLUGINS = sorted({entry.name for entry in entry_points(group="pytest11")})
SETTINGS = f"[pytest]\naddopts = {' '.join(f'-p no:{name}' for name in PLUGINS)}\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of one module and one test, not yet committed, with the list of its mutants beside it."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "code_under_test.py").write_text(CODE)
    (root / "test_area.py").write_text(TESTS)
    (root / "pytest.ini").write_text(SETTINGS)
    (root / "ignored.py").write_text("raise SystemExit('an ignored file was copied')\n")
    (root / ".gitignore").write_text("ignored.py\n__pycache__/\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (tmp_path / "seeds.py").write_text(LIST)
    return root


def run(root: Path, *arguments: str) -> tuple[int, str]:
    """The runner's exit code and output for the project's own list."""
    command = [
        sys.executable,
        str(RUNNER),
        "--root",
        str(root),
        "--list",
        str(root.parent / "seeds.py"),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def outcomes(output: str) -> dict[str, str]:
    """Mutant -> outcome, from the printed table."""
    by_mutant = {}
    for line in output.splitlines()[1:]:
        for outcome in ("killed", "survived", "timed out", "broken"):
            if f" code_under_test.py  {outcome} " in line:
                by_mutant[line.split()[0]] = outcome
    return by_mutant


@pytest.mark.beside
def test_every_kind_of_outcome(project: Path) -> None:
    code, output = run(project, "--jobs", "2")
    assert outcomes(output) == {
        "sum": "killed",
        "silent": "killed",
        "raises": "killed",
        "unseen": "survived",
        "syntax": "broken",
        "name": "broken",
        "import": "broken",
        "forever": "timed out",
    }
    assert code == 1
    assert "8 mutants: 3 broken, 3 killed, 1 survived, 1 timed out" in output
    assert "assertion in test_area.py::test_area" in output
    assert "assertion in test_area.py::test_negative" in output
    assert "TypeError in test_area.py::test_area" in output
    assert (project / "code_under_test.py").read_text() == CODE


def test_all_killed_is_success(project: Path) -> None:
    code, output = run(project, "--only", "sum")
    assert outcomes(output) == {"sum": "killed"}
    assert code == 0


@pytest.mark.parametrize(
    "change, complaint",
    [
        (("width * height", "height * width"), "`before` occurs 0 times"),
        (("return 1", "return width * height"), "`before` occurs 2 times"),
    ],
)
def test_a_text_not_found_once_is_stale(project: Path, change: tuple[str, str], complaint: str) -> None:
    (project / "code_under_test.py").write_text(CODE.replace(*change))
    code, output = run(project, "--only", "sum", "--check")
    assert code == 2
    assert f"sum: {complaint} in code_under_test.py" in output


def test_tests_that_fail_anyway_kill_nothing(project: Path) -> None:
    (project / "test_area.py").write_text(TESTS.replace("== 6", "== 7"))
    code, output = run(project, "--only", "sum")
    assert code == 2
    assert "fail without any seeded bug" in output


def test_an_unknown_name_is_refused(project: Path) -> None:
    code, output = run(project, "--only", "summ")
    assert code == 2
    assert "no such mutant: summ" in output


def test_the_list_of_this_repository_fits_its_code() -> None:
    done = subprocess.run([sys.executable, str(RUNNER), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

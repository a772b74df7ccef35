"""The name of a lab's folder changes with the code and settings that make the lab, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlhf.lab import build
from rlhf.lab.build import MADE_BY, LabSpec, lab_key


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the modules that make the lab, which `lab_key` reads."""
    for module in MADE_BY:
        shutil.copy(build.SOURCES / f"{module}.py", tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    return tmp_path


def rewrite(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_comments_docstrings_and_layout_keep_the_name(sources: Path) -> None:
    before = lab_key(LabSpec())
    for module in MADE_BY:
        rewrite(sources / f"{module}.py", "\n\n", "\n\n\n# A comment.\n")
        rewrite(sources / f"{module}.py", '"""', '"""Another docstring. ')
    rewrite(sources / "build.py", '    """Return the name of a lab\'s folder', '    """Return the name')
    rewrite(sources / "build.py", "eval_sft: int = 256", "eval_sft: int = (\n        256\n    )")
    assert lab_key(LabSpec()) == before


def test_a_changed_constant_and_another_spec_change_it(sources: Path) -> None:
    names = [lab_key(LabSpec()), lab_key(LabSpec(seed=1)), lab_key(LabSpec(prompts=1))]
    rewrite(sources / "world.py", "EVAL_EVERY = 10", "EVAL_EVERY = 11")
    names.append(lab_key(LabSpec()))
    rewrite(sources / "build.py", "sft: int = 32000", "sft: int = 32001")
    names.append(lab_key(LabSpec()))
    assert len(set(names)) == len(names)


def test_the_lab_is_the_one_that_earlier_runs_were_made_with() -> None:
    """A run in the lab is continued only in the same lab: change this name only if the lab's files change."""
    assert lab_key(LabSpec()) == "tiny-seed0-e685b9494e8d"

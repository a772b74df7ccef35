"""A lab's folder is used again only by the lab that made it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from cases import compare_tree, compared
from rich.console import Console
from runs import quiet

from rlhf.api import lab
from rlhf.api.lab import RECORD, check_lab_folder, prepare_lab
from rlhf.errors import ConfigError
from rlhf.lab.build import LabSpec, lab_key
from rlhf.report.terminal import Terminal


def finished(folder: Path) -> Path:
    """A folder with everything in it that a comparison takes from a lab."""
    for name in ("sft/model", "rm/model", "preferences"):
        (folder / name).mkdir(parents=True)
    (folder / "preferences" / "train.jsonl").write_text("")
    return folder


def test_a_new_folder_says_what_it_is_made_with(tmp_path: Path) -> None:
    check_lab_folder(tmp_path / "lab", seed=3, view=quiet())
    assert json.loads((tmp_path / "lab" / RECORD).read_text()) == {"seed": 3, "lab": lab_key(LabSpec())}
    check_lab_folder(tmp_path / "lab", seed=3, view=quiet())


def test_another_seed_or_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lab"
    check_lab_folder(folder, seed=3, view=quiet())
    before = (folder / RECORD).read_bytes()
    monkeypatch.setattr(lab, "run_train", lambda *_: pytest.fail("a stage began"))
    with pytest.raises(ConfigError, match=r"lab was made with seed 3 instead of 4: give another folder .* or remove"):
        prepare_lab(folder, seed=4, view=quiet())
    monkeypatch.setattr(lab, "lab_key", lambda spec: "tiny-new")
    with pytest.raises(ConfigError, match=r"made with another version of the lab, tiny-.* instead of tiny-new:"):
        check_lab_folder(folder, seed=3, view=quiet())
    with pytest.raises(ConfigError, match="seed 3 instead of 4 and another version"):
        check_lab_folder(folder, seed=4, view=quiet())
    assert (folder / RECORD).read_bytes() == before


def test_a_comparison_asks_too_before_anything_runs(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    check_lab_folder(folder, seed=0, view=quiet())
    finished(folder)
    with pytest.raises(ConfigError, match="seed 0 instead of 1"):
        compared(compare_tree(tmp_path, lab={"folder": str(folder), "seed": 1}))
    assert not (tmp_path / "compare").exists()


@pytest.mark.parametrize("reader", ["arms", "judge of pairs", None])
def test_a_reward_model_is_made_only_if_something_reads_it(
    reader: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tmp_path / "lab", []

    def prepared(*_: object, of: int, reward_model: bool, **__: object) -> None:
        asked.append((of, reward_model))  # None, as if the user had stopped it

    monkeypatch.setattr("rlhf.api.comparing.prepare_lab", prepared)
    tree = compare_tree(tmp_path, lab={"folder": str(folder)})
    if reader != "arms":  # instead of the lab's, which is the default
        tree["reward_source"] = {"type": "function", "target": "rlhf.lab.gold:gold_reward"}
    if reader == "judge of pairs":
        tree["pairs"] = {"judge": {"type": "scores", "source": {"type": "model", "path": str(folder / "rm")}}}
    compared(tree)
    assert asked == [(2, False) if reader is None else (3, True)]


def test_a_folder_without_a_record_is_taken_with_a_warning(tmp_path: Path) -> None:
    folder, stream = finished(tmp_path / "lab"), io.StringIO()
    check_lab_folder(folder, seed=1, view=Terminal(Console(file=stream, width=300)))
    assert stream.getvalue().startswith("warning: ")
    assert "not checked" in stream.getvalue()
    assert not (folder / RECORD).exists()

"""The page that is rewritten while a run trains, until nothing trains any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lock_holder import held_elsewhere
from rich.console import Console

from rlhf.cli import main
from rlhf.commands import report
from rlhf.config.files import COMPARE_CONFIG
from rlhf.errors import UserError
from rlhf.tracking.run_folder import FolderLock, is_in_use


class Slept(Exception):
    """The watch went on to another round."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that logged a step, planned ten, and was not completed."""

    def sleep(seconds: float) -> None:
        raise Slept

    monkeypatch.setattr(report.time, "sleep", sleep)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "score/mean": 1.0}) + "\n")
    (tmp_path / "config.yaml").write_text("schedule: {steps: 10}\n")
    return tmp_path


def test_a_run_that_was_stopped_is_not_watched_for_ever(folder: Path) -> None:
    FolderLock(folder).release()  # a process was there
    console = Console(record=True, width=200)
    report.watch_report(str(folder), console)
    assert "no process trains in" in console.export_text()
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text(encoding="utf-8")


def test_a_run_that_ended_before_its_planned_steps_is_not_either(folder: Path) -> None:
    (folder / "complete.json").write_text(json.dumps({"step": 1}))
    report.watch_report(str(folder), Console(quiet=True))


def test_a_folder_without_a_run_is_not_called_a_stopped_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run is in this folder"):
        report.watch_report(str(tmp_path), Console(quiet=True))


def test_a_run_of_a_living_process_is_watched(folder: Path) -> None:
    with held_elsewhere(folder) as pid:
        number = (folder / ".lock").read_text()
        assert is_in_use(folder)
        assert (folder / ".lock").read_text() == number == f"{pid}\n"  # a look changes nothing
        with pytest.raises(Slept):
            report.watch_report(str(folder), Console(quiet=True))
        assert 'http-equiv="refresh"' in (folder / "report.html").read_text(encoding="utf-8")
    assert not is_in_use(folder)


def test_a_comparison_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / COMPARE_CONFIG).write_text("{}")
    assert main(["report", str(tmp_path), "--watch"]) == 2
    assert "is a comparison: give an arm's folder" in capsys.readouterr().err

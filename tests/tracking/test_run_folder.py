"""The resolved configuration with versions and commit, kept on resume; readers of the folder's files."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from rlhf.errors import CheckpointError
from rlhf.tracking.run_folder import RunFolder, differing_keys, git_commit, write_atomically
from rlhf.tracking.trackers import JsonlLogger

RESOLVED = {"run": {"name": "r", "seed": 0}, "policy": {"lr": 1e-6, "lora": None, "betas": [0.9, 0.999]}}


def test_the_config_is_written_with_versions_and_commit(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.write_config(RESOLVED) == []
    written = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    assert {key: written[key] for key in RESOLVED} == RESOLVED
    assert list(written) == ["run", "policy", "versions", "git_commit"]
    assert written["versions"]["torch"] == importlib.metadata.version("torch")
    assert written["versions"]["python"].startswith("3.")
    assert folder.read_config() == written
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_settings_that_changed_are_written_and_what_the_run_began_with_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config(RESOLVED)
    before = folder.read_config()
    stamp = folder.config.stat().st_mtime_ns
    assert folder.write_config(RESOLVED) == []
    assert folder.config.stat().st_mtime_ns == stamp
    changed = {"run": {"name": "r", "seed": 1}, "policy": {"lr": 1e-6, "lora": {"r": 8}, "betas": [0.9, 0.999]}}
    assert folder.write_config(changed) == []
    assert folder.read_config() == {**changed, "versions": before["versions"], "git_commit": before["git_commit"]}


def test_a_run_that_starts_again_writes_its_own_config(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config(RESOLVED)
    changed = {**RESOLVED, "run": {"name": "another"}}
    assert folder.write_config(changed, is_new=True) == []
    assert folder.read_config()["run"] == {"name": "another"}


def test_another_version_is_a_difference(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config(RESOLVED)
    old = folder.read_config()
    old["versions"]["torch"] = "1.0"
    write_atomically(folder.config, yaml.safe_dump(old))
    assert folder.write_config(RESOLVED) == ["torch"]


def test_differing_keys_counts_a_key_that_only_one_side_has() -> None:
    assert differing_keys({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "d": None}}) == ["a.d", "c"]
    assert differing_keys({"a": (1, 2)}, {"a": [1, 2]}) == []


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "\xff", ""])
def test_a_config_that_is_no_mapping_is_a_clear_error_with_a_way_out(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.yaml is damaged.*rlhf config FILE") as error:
        folder.read_config()
    assert "unicode string" not in str(error.value)
    assert "NoneType" not in str(error.value)


def test_an_empty_folder_reads_as_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_config() == folder.read_report_card() == {}
    assert folder.read_metrics() == folder.read_timings() == folder.read_samples() == folder.read_notes() == []


def test_what_loggers_write_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path, read in (
        (folder.metrics, folder.read_metrics),
        (folder.timings, folder.read_timings),
        (folder.samples, folder.read_samples),
        (folder.notes, folder.read_notes),
    ):
        with JsonlLogger(path) as log:
            log.log({"step": 1, "file": path.name})
        assert read() == [{"step": 1, "file": path.name}]


def test_the_report_card_is_read_back_in_its_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "rm")
    folder.write_report_card({"pairs": 3, "accuracy": 0.5, "length": {"correlation": float("nan")}})
    card = folder.read_report_card()
    assert list(card.items()) == [("pairs", 3), ("accuracy", 0.5), ("length", {"correlation": None})]
    folder.report_card.write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"report_card\.json"):
        folder.read_report_card()
    folder.report_card.write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="expected an object"):
        folder.read_report_card()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud83d")
    assert path.read_text(encoding="utf-8") == "old"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


def test_the_commit_is_that_of_the_checkout_of_the_source(tmp_path: Path) -> None:
    source, ignored = tmp_path / "code.py", tmp_path / "venv" / "code.py"
    ignored.parent.mkdir()
    source.write_text("a = 1\n", encoding="utf-8")
    ignored.write_text("a = 1\n", encoding="utf-8")
    assert git_commit(source) is None  # no repository
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "code.py")
    assert git_commit(source) is None  # no commit
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(source) == commit
    assert git_commit(ignored) is None  # an installed copy inside somebody's repository
    source.write_text("a = 2\n", encoding="utf-8")
    assert git_commit(source) == f"{commit}-dirty"


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None

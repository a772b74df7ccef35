"""Folders that cannot be written and missing models are reported in one line, and leave nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import huggingface_hub
import pytest
from runs import write_rows

from rlhf.config.load import train_config
from rlhf.data.paths import check_files, check_out_dir, missing_data, missing_model
from rlhf.errors import ConfigError, ModelError


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_out_dir(str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "c").mkdir()
    check_out_dir(str(tmp_path / "c" / "d"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(ConfigError, match=r"run.out_dir: cannot write into .*\(it is a file\).*run.out_dir=\.\.\."):
            check_out_dir(str(tmp_path / place))


def test_one_rank_checks_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that removes the empty folder after its check would take it from under another."""
    (tmp_path / "file").write_text("")
    tree = {
        "policy": {"model": str(tmp_path)},
        "data": {"sft": {"path": str(write_rows(tmp_path / "rows.jsonl", [{"text": "a"}]))}},
        "algorithm": {"preset": "sft"},
        "schedule": {"steps": 1},
        "run": {"out_dir": str(tmp_path / "file")},
    }
    config = train_config(tree)
    monkeypatch.setenv("RANK", "1")
    check_files(config)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="it is a file"):
        check_files(config)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_place_without_files_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot write into /proc/nope"):
        check_out_dir("/proc/nope")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="permission denied"):
        check_out_dir(str(tmp_path / "x"))


def test_what_looks_like_a_path_is_not_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "model_info", refuse)
    monkeypatch.chdir(tmp_path)
    for path in ("models/nomodel", "runs/x", "./x", "/x/y", "a/b/c", "x.gguf"):
        assert str(missing_model(path)).startswith("no such file or folder")
    assert "python scripts/get_smollm2.py" in str(missing_model("models/smollm2-135m-instruct"))
    assert "`rlhf train configs/sft.yaml policy.model=MODEL data.sft.path=ROWS.jsonl` makes it" in str(
        missing_model("runs/sft")
    )
    assert f"there is no models in {tmp_path}" in str(missing_model("models/nomodel"))


def test_a_hub_id_is_asked_for_once_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unreachable(name: str, *, timeout: float) -> None:
        asked.append(name)
        assert 0 < timeout <= 10
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    began = time.monotonic()
    assert "could not be asked for it: Name or service not known" in str(missing_model("owner/name"))
    assert asked == ["owner/name"]
    assert time.monotonic() - began < 5  # it does not wait to try again


def test_a_model_of_the_hub_or_of_its_cache_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name, timeout: object())
    assert missing_model("owner/name") is None
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: "/cache/config.json")
    assert missing_model("owner/name") is None


def test_a_data_set_and_a_tokenizer_of_the_hub_are_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def unreachable(name: str, *, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    tree = {
        "algorithm": {"preset": "sft"},
        "policy": {"model": str(tmp_path), "tokenizer": "owner/tokens"},
        "data": {"sft": {"path": "owner/rows"}},
        "schedule": {"steps": 1},
        "run": {"out_dir": str(tmp_path / "run")},
    }
    with pytest.raises(ModelError) as caught:
        check_files(train_config(tree))
    assert asked == ["owner/tokens", "owner/rows"]
    assert "policy.tokenizer: 'owner/tokens'" in str(caught.value)
    assert "data.sft.path: 'owner/rows'" in str(caught.value)
    (tmp_path / "owner___rows").mkdir()
    assert missing_data("owner/rows") is None  # it is in the cache

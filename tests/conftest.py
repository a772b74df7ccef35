"""One torch thread, hypothesis without deadlines: a slow machine is not a wrong result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from rlhf.runtime.recorder import Recorder

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
settings.register_profile(
    "default", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("default")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared() -> Path:
    """The folder of real data and models beside the checkout; a test that needs it is skipped where it is not."""
    if not all((SHARED / name).is_dir() for name in ("data", "models", "tokenizers")):
        pytest.skip("no ../shared folder with data, models and tokenizers: the real ones are not at hand")
    return SHARED


@pytest.fixture(autouse=True)
def close_recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the files of every run that a test opened: a test that breaks a run off cannot do it itself."""
    opened: list[Recorder] = []
    begin = Recorder.__init__

    def remember(self: Recorder, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(Recorder, "__init__", remember)
    yield
    for recorder in opened:
        recorder.close()

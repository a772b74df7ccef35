"""One torch thread, hypothesis without deadlines: a slow machine is not a wrong result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
settings.register_profile(
    "default", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("default")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture()
def shared() -> Path:
    """The folder of real data and models beside the checkout; a test that needs it is skipped where it is not."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared folder: real data and models are not at hand")
    return SHARED

"""The `gpu` fixture: a real GPU where there is one, else the pretend one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from pretend import PretendDevice


@pytest.fixture
def gpu() -> Iterator[PretendDevice | None]:
    """The device machine's counts, or None where torch sees a real GPU."""
    if torch.cuda.is_available():
        yield None
        return
    importlib.import_module("peft")  # not later: on the pretend device bitsandbytes would look for CUDA's functions
    with PretendDevice() as machine:
        yield machine
    assert machine.problems == []


@pytest.fixture
def pretend() -> Iterator[PretendDevice]:
    """The pretend device, whether or not there is a real one: for tests of what it notices."""
    with PretendDevice() as machine:
        yield machine

"""The `gpu` fixture: a real GPU if there is one, else the pretend one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_runs import gpu_or_pretend
from pretend import PretendDevice


@pytest.fixture
def gpu() -> Iterator[PretendDevice | None]:
    """The device machine's counts, or None if torch sees a real GPU."""
    with gpu_or_pretend() as machine:
        yield machine


@pytest.fixture
def pretend() -> Iterator[PretendDevice]:
    """The pretend device, whether or not there is a real one: for tests of its own checks."""
    with PretendDevice() as machine:
        yield machine

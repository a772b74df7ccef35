"""Classes that a test of plug-ins registers are gone after it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forgets(nothing_stays_registered: None) -> None:
    """Use the fixture in every test."""

"""Packages of the optional extras that tests need: without one its tests are skipped, and fail in the gate."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def import_extra(name: str) -> ModuleType:
    """Import a package; skip the test without it, or fail if RLHF_TEST_EXTRAS says that it has to be there."""
    if os.environ.get("RLHF_TEST_EXTRAS") == "required":
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"the package {name} of an extra is not installed")

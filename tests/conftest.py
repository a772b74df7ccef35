"""Hypothesis without deadlines (a slow machine is not a wrong result), and the imports of processes that run tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import shape_checks
from hypothesis import HealthCheck, settings

shape_checks.install()  # before a conftest.py of a folder imports anything of ours
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The gate gives the same answer for the same commit; `--hypothesis-profile=search` looks for new counterexamples.
settings.register_profile(
    "search", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("default", settings.get_profile("search"), derandomize=True)
settings.load_profile("default")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared() -> Path:
    """The folder of real data and models beside the checkout; a test that needs it is skipped without it."""
    if not all((SHARED / name).is_dir() for name in ("data", "models", "tokenizers")):
        pytest.skip("no ../shared folder with data, models and tokenizers: the real ones are not at hand")
    return SHARED


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load the fixtures of every test, with torch and transformers, if tests are collected or run.

    Imports and thousands of tests make millions of objects that stay: to look for garbage among them again and again
    took two fifths of the time of collecting.
    """
    if session.config.pluginmanager.hasplugin("dsession"):
        return  # pytest-xdist's controller: its processes do both
    gc.disable()
    session.config.pluginmanager.import_plugin("suite_fixtures")


def pytest_collection_finish() -> None:
    """Look for garbage from here on, and never among objects from before the first test."""
    gc.freeze()
    gc.enable()

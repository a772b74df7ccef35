"""The choice of a test's cases for the default run: ones that differ in kind; `-m slow` runs the others too."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Give every case to `pytest.mark.parametrize`, and mark the ones that the default run leaves out."""
    listed = list(cases)
    missing = [case for case in default if case not in listed]
    assert not missing, f"{missing}: no such cases"
    return [case if case in default else pytest.param(*_arguments(case), marks=pytest.mark.slow) for case in listed]


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)

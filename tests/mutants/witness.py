"""A pytest plugin that writes down the errors of each failing test, one JSON object a line.

pytest's exit code alone cannot tell a test that noticed a bug from a module that no longer imports.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group (hypothesis raises one for distinct failures), or the one itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def pytest_exception_interact(node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
    """Record the phase (collect, setup, call, teardown), the test and the classes of each exception."""
    if call.excinfo is None:
        return
    for error in _leaves(call.excinfo.value):
        record = {
            "phase": getattr(report, "when", None) or "collect",
            "test": node.nodeid,
            "classes": [kind.__qualname__ for kind in type(error).__mro__],
            "message": str(error).split("\n", 1)[0][:200],
        }
        with Path(os.environ["MUTANT_WITNESS"]).open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")

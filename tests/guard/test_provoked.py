"""Failures made on purpose: the right alarm goes off, and healthy runs have none (slow); the recorded results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("provoked_alarms", ROOT / "benchmarks" / "alarms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def check(results: dict[str, Any]) -> None:
    missed = [name for name, result in results["failures"].items() if result["after_steps"] is None]
    assert missed == []
    assert {name: result["alarms"] for name, result in results["healthy"].items() if result["alarms"]} == {}


@pytest.mark.slow
def test_every_provoked_failure_is_seen_and_no_healthy_run_is_blamed(tmp_path: Path) -> None:
    module = benchmark()
    results = module.run_all(tmp_path)
    assert len(results["failures"]) >= 12
    assert len(results["healthy"]) >= 10
    check(results)


def test_the_recorded_results_are_of_these_cases() -> None:
    module, recorded = benchmark(), json.loads((ROOT / "benchmarks" / "results" / "alarms.json").read_text())
    assert list(recorded["failures"]) == list(module.FAILURES)
    assert list(recorded["healthy"]) == list(module.HEALTHY)
    check(recorded)

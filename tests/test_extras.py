"""Tests of optional extras run in the gate, which installs what they import."""

from __future__ import annotations

import re
import tomllib

import pytest
from extras import import_extra
from sources import ROOT
from test_agents_benchmark import PACKAGES


def test_a_package_that_is_missing_skips_a_test_and_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_TEST_EXTRAS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="the package no_such_package of an extra is not installed"):
        import_extra("no_such_package")
    assert import_extra("json").dumps([]) == "[]"
    monkeypatch.setenv("RLHF_TEST_EXTRAS", "required")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_extra("no_such_package")
    assert import_extra("json").dumps([]) == "[]"


def test_the_gate_installs_the_extras_of_the_tests_and_requires_them() -> None:
    gate = (ROOT / "scripts" / "gate.sh").read_text(encoding="utf-8")
    assert "export RLHF_TEST_EXTRAS=required" in gate
    (names,) = re.findall(r"extras=\((.*)\)", gate)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    installed = {
        re.split(r"[^\w-]", package)[0].replace("-", "_") for name in names.split() for package in extras[name]
    }
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    needed = {*re.findall(r'import_extra\("(\w+)"\)', sources), *PACKAGES.values()} - {"json", "no_such_package"}
    assert needed == {"gymnasium", "textarena", "reasoning_gym", "math_verify", "pydantic_monty"}
    assert needed <= installed

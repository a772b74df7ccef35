"""Files that a package index and a repository's site read: the version, the changelog, the templates for issues."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import rlhf

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_changelog_begins_with_the_version_of_the_project() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert next(name for name in versions if name != "Unreleased").split()[0] == PROJECT["version"]


def test_the_links_of_the_changelog_are_files() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https:)([^)#]+)", text)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_metadata_says_what_the_package_is_and_names_no_address_that_does_not_exist() -> None:
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert {"rlhf", "ppo", "grpo", "dpo"} <= set(PROJECT["keywords"])
    assert "urls" not in PROJECT
    for package in ("rlhf", "reward_model"):
        assert (ROOT / package / "py.typed").is_file()


def test_the_oldest_torch_has_what_the_package_calls() -> None:
    """`fp32_precision` came with 2.9: before, a run on a GPU ended at its start with an AttributeError."""
    torch = next(need for need in map(Requirement, PROJECT["dependencies"]) if need.name == "torch")
    assert [version for version in ("2.6.0", "2.8.0", "2.9.0", "2.13.0") if version in torch.specifier] == [
        "2.9.0",
        "2.13.0",
    ]


def test_the_version_is_that_of_the_project() -> None:
    assert rlhf.__version__ == PROJECT["version"]


@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_an_issue_template_is_a_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    for field in form["body"]:
        assert field["type"] in {"textarea", "input"}
        assert {"label", "description"} <= set(field["attributes"])


def test_there_are_templates_and_a_way_to_report_a_security_problem() -> None:
    assert len(TEMPLATES) == 3
    assert "in private" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")

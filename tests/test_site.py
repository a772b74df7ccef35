"""The site has every page, builds without a warning and answers ten questions; its tables have the measured figures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.tracking.metrics import METRICS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without importing the functions that its tags name."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])


def pages(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    for part in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ():
        yield from pages(part)


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def sections(name: str) -> dict[str, str]:
    """Title -> text, of the headings of the second level."""
    parts = re.split(r"^## (.+)$", text(name), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_page_is_in_the_navigation_once() -> None:
    nav = list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]))
    left_out = ("architecture.md", "gpu_first_run.md", "decisions/")  # for contributors
    pages_of_site = (path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(nav) == sorted(page for page in pages_of_site if not page.startswith(left_out))


def test_the_navigation_has_these_parts() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    parts = [title for part in nav for title in part]
    assert parts == ["Home", "Get started", "Guides", "Algorithms", "Results", "Reference"]


# A user's words in the search, and the pages that answer them.
QUESTIONS: dict[str, list[str]] = {
    "install": ["installing"],
    "use my own data": ["own_model_and_data", "data"],
    "preference data format": ["data"],
    "custom reward function": ["own_reward"],
    "ppo or dpo": ["choosing", "compare"],
    "out of memory": ["troubleshooting"],
    "resume a run": ["reliability", "run_folder"],
    "lora": ["models", "adapters"],
    "learning rate": ["hyperparameters", "configuration"],
    "trl migration": ["coming_from_trl"],
    "multiple gpus deepspeed": ["distributed"],
    "kl penalty": ["algorithms/ppo", "reward_hacking", "glossary"],
    "grpo": ["algorithms/grpo"],
    "reward model": ["algorithms/reward_model"],
    "wandb": ["metrics", "configuration", "python", "run_folder"],
    "chat template": ["data"],
    "reward hacking": ["reward_hacking"],
    "push to hub": ["sharing"],
    "compare algorithms": ["compare"],
    "loss is nan": ["troubleshooting"],
    "bfloat16": ["speed", "models", "configuration", "gpu"],
    "run on one gpu": ["gpu"],
    "gsm8k evaluation": ["evaluation_suites"],
}


@pytest.mark.beside
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("material", "mkdocstrings")),
    reason="the site is not built: bash scripts/setup.sh docs",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', first), "a page needs another host"
    assert "compute_advantages" in (tmp_path / "api" / "algo" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "repository" / "configs" / "compare.yaml.txt").is_file()
    if shutil.which("node") is not None:
        check_the_search(tmp_path)


def check_the_search(site: Path) -> None:
    """Each question has its page among the first three that the site's own search finds."""
    ask = ["node", str(ROOT / "tests" / "site_search.mjs"), str(site)]
    answered = subprocess.run(ask, input=json.dumps(QUESTIONS), capture_output=True, text=True, check=True)
    pages: dict[str, list[str]] = json.loads(answered.stdout)
    missed = {question: pages[question] for question, wanted in QUESTIONS.items() if not {*wanted} & {*pages[question]}}
    assert len(QUESTIONS) >= 20
    assert missed == {}


def test_the_example_pages_link_to_nothing_that_is_not_there() -> None:
    for page in (DOCS / "examples").glob("*.html"):
        links = re.findall(r'href="([\w./-]+)"', page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name


def test_every_common_question_leads_to_its_page() -> None:
    text_of_all = sections("index.md")["Common questions"]
    questions = re.findall(r"^\*\*([^*]+)\*\* (.+?)(?=\n\n|\Z)", text_of_all, re.MULTILINE | re.DOTALL)
    assert len(questions) >= 9
    for question, answer in questions:
        assert re.search(r"\]\([\w/]+\.md|CITATION\.cff", answer), question


WITHOUT_METRICS = {
    "A step is slow",
    "Out of memory",
    "The run does not start or continue",
    "Rows are missing",
    "Alarms",
    "Errors",
}
"""Symptoms in timings, in messages and in notes."""


def test_each_symptom_names_metrics_that_exist() -> None:
    for symptom, body in sections("troubleshooting.md").items():
        named = set(re.findall(r"`([a-z]+/[a-z_0-9]+)`", body)) - {"runs/ppo"}
        assert named <= set(METRICS), f"{symptom}: {sorted(named - set(METRICS))}"
        assert named or symptom in WITHOUT_METRICS, f"{symptom}: no metric to look at"


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])

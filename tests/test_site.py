"""The site has every page, builds without a warning and answers ten questions; its tables say what was measured."""

from __future__ import annotations

import importlib.util
import json
import os
import re
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
    """Reads mkdocs.yml without importing what its tags name."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


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
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_navigation_has_four_parts() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    assert [title for part in nav for title in part] == ["Home", "Tutorials", "How-to", "Reference", "Explanation"]


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


def test_the_first_page_leads_to_ten_answers() -> None:
    questions = re.findall(r"^\d+\. \[(.+)\]\(faq\.md#", text("index.md"), re.MULTILINE)
    answers = sections("faq.md")
    assert questions == list(answers)
    assert len(questions) == 10
    assert all(re.search(r"\]\([\w/]+\.md|CITATION\.cff", answer) for answer in answers.values())


WITHOUT_METRICS = {"A step is slow", "Out of memory", "The run does not continue", "Rows are missing"}
"""What shows in timings, in messages and in notes."""


def test_each_symptom_names_metrics_that_exist() -> None:
    for symptom, body in sections("troubleshooting.md").items():
        named = set(re.findall(r"`([a-z]+/[a-z_0-9]+)`", body)) - {"runs/ppo"}
        assert named <= set(METRICS), f"{symptom}: {sorted(named - set(METRICS))}"
        assert named or symptom in WITHOUT_METRICS, f"{symptom}: no metric to look at"


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


# Tables of results. A column is recognized by how its header begins, a row by the arm that its first cell names.

COMPARISON = {
    "gold and": None,
    "gold": ("score",),
    "gain, std": ("gain_in_std",),
    "score under": ("proxy",),
    "KL": ("kl",),
    "distinct bigrams": ("distinct_2",),
}
SUITES = {
    "IFEval, prompts": ("suites", "ifeval", "prompt_strict"),
    "gain, points": ("suites", "ifeval", "prompt_strict", "gain"),
    "instructions strict": ("suites", "ifeval", "instruction_strict"),
    "KL": ("kl",),
}
TABLES = [
    ("choosing.md", "gain, std", "compare_lab.json", COMPARISON, 1, 100),
    ("results.md", "IFEval, prompts", "compare_smollm2.json", SUITES, 100, 10),
]
NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?")


def tables(page: str) -> Iterator[list[list[str]]]:
    for block in re.findall(r"(?:^\|.*\n)+", text(page), re.MULTILINE):
        yield [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in block.splitlines()]


def numbers(cell: str) -> list[str]:
    return [number.replace("−", "-") for number in NUMBER.findall(cell)]


def is_rounded(shown: str, value: float) -> bool:
    """Whether `shown` is `value` at that many decimals; files of results have five digits."""
    decimals = len(shown.partition(".")[2])
    return abs(float(shown) - value) <= 0.5 * 10**-decimals + 1e-4 * abs(value)


def measured(arm: Any, path: tuple[str, ...], scale: float) -> list[float]:
    for name in path:
        arm = arm[name]
    values = [arm["value"], arm["low"], arm["high"]] if isinstance(arm, Mapping) else [arm]
    return [value * (1 if path == ("kl",) else scale) for value in values]


def wrong_cells(rows: list[list[str]], arms: Mapping[str, Any], columns: Mapping[str, Any], scale: float) -> list[str]:
    """Return the cells that do not say what was measured, and the number of numbers compared as the last item."""
    wrong, compared = [], 0
    for row in rows[2:]:
        arm = arms.get(row[0].strip("`").lower())
        for header, cell in zip(rows[0], row, strict=True) if arm else ():
            path = next((path for begin, path in columns.items() if header.startswith(begin)), None)
            for shown, value in zip(numbers(cell), measured(arm, path, scale) if path else (), strict=False):
                compared += 1
                if not is_rounded(shown, value):
                    wrong.append(f"{row[0]}, {header}: {shown}, measured {value:.5g}")
    return [*wrong, str(compared)]


@pytest.mark.parametrize("page, header, results, columns, scale, least", TABLES, ids=[row[0] for row in TABLES])
def test_tables_say_what_was_measured(
    page: str, header: str, results: str, columns: Mapping[str, Any], scale: float, least: int
) -> None:
    arms = json.loads((ROOT / "benchmarks" / "results" / results).read_text(encoding="utf-8"))["arms"]
    rows = next(rows for rows in tables(page) if any(cell.startswith(header) for cell in rows[0]))
    *wrong, compared = wrong_cells(rows, arms, columns, scale)
    assert wrong == []
    assert int(compared) >= least, "hardly a row was recognized: has the table changed its names?"


def test_a_wrong_number_would_be_noticed() -> None:
    rows = [["arm", "gold", "KL, nats"], ["---"] * 3, ["`ppo`", "2.84", "5.16"]]
    arms = {"ppo": {"score": 2.837, "kl": 5.1587}}
    assert wrong_cells(rows, arms, COMPARISON, 1) == ["2"]
    rows[2][1] = "2.85"
    assert wrong_cells(rows, arms, COMPARISON, 1) == ["`ppo`, gold: 2.85, measured 2.837", "2"]

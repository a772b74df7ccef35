"""The Dockerfile, checked without building: its sources exist and are sent, its commands parse."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTIONS = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text), with continued lines joined and comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, text) for word, _, text in (line.partition(" ") for line in joined.splitlines() if line)]


def texts(wanted: str) -> list[str]:
    return [text for word, text in instructions() if word == wanted]


def sources() -> list[str]:
    return [source for text in texts("COPY") for source in text.split()[:-1]]


def test_every_instruction_is_known_and_the_base_can_be_chosen() -> None:
    assert {word for word, _ in instructions()} == INSTRUCTIONS
    first, second = instructions()[:2]
    assert first[0] == "ARG"
    assert first[1].startswith("BASE=python:3.11")
    assert second == ("FROM", "${BASE}")


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignore[0] == "*"
    sent = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert sorted(sources()) == sorted(sent)
    assert [source for source in sources() if not (ROOT / source).exists()] == []


def test_what_the_package_is_made_of_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *(path.split("/")[0] for path in wheel["force-include"])}
    needed |= {project["project"]["readme"], "pyproject.toml", "constraints.txt", "scripts"}
    assert needed <= set(sources())


@pytest.mark.parametrize("command", texts("RUN"))
def test_each_command_is_one_that_a_shell_reads(command: str) -> None:
    assert subprocess.run(["sh", "-n"], input=command, text=True, check=False).returncode == 0


def test_scripts_that_are_run_exist_and_the_program_is_started() -> None:
    scripts = re.findall(r"\bbash (\S+\.sh)", " ".join(texts("RUN")))
    assert scripts == ["scripts/setup.sh"]
    assert all((ROOT / script).is_file() for script in scripts)
    assert json.loads(texts("ENTRYPOINT")[0]) == ["rlhf"]
    assert json.loads(texts("CMD")[0]) == ["--help"]


@pytest.mark.parametrize(
    "index, options", [("https://example.org/cpu", ["--index-url", "https://example.org/cpu"]), ("", [])]
)
def test_torch_is_the_pinned_one_from_the_chosen_index(index: str, options: list[str]) -> None:
    (install,) = [text for text in texts("RUN") if "pip install" in text]
    echo = install.partition("&& ")[2].replace(".venv/bin/python", "printf '%s\\n'")
    done = subprocess.run(
        ["sh", "-c", echo],
        cwd=ROOT,
        env={"TORCH_INDEX": index, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    pinned = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert done.stdout.split() == ["-m", "pip", "install", "--no-deps", *options, pinned[0]]

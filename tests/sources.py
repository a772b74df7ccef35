"""The files of the product and of the scripts, read once by a process, for all tests that look at the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlhf", "reward_model", "scripts", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PRODUCT = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("rlhf", "reward_model")]


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file: to parse the product takes a second, and to walk it another."""
    return nodes_in(path.read_text(encoding="utf-8"))


def nodes_in(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))

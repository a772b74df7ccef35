"""A name in backticks in a docstring exists: as a module, a definition, an argument or a text of the code."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"(?<![`\w])`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`(?!`)")
WORDS = re.compile(r"[A-Za-z_]\w*")


def modules() -> dict[Path, ast.Module]:
    files = [file for package in ("rlhf", "reward_model") for file in sorted((ROOT / package).rglob("*.py"))]
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def names_of(tree: ast.AST) -> Iterator[str]:
    """Every name of the code, and every word of a text that is no docstring."""
    told = {id(text) for text in docstrings(tree)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield from value.split(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield from WORDS.findall(re.sub(r"`[^`]*`", "", node.value))


def stale_names(parsed: dict[Path, ast.Module]) -> set[str]:
    known = {part for file in parsed for part in file.relative_to(ROOT).with_suffix("").parts}
    known |= {name for tree in parsed.values() for name in names_of(tree)}
    known |= {*dir(builtins), *keyword.kwlist}
    return {
        f"{file.relative_to(ROOT)}: {name}"
        for file, tree in parsed.items()
        for text in docstrings(tree)
        for name in NAME.findall(str(text.value))
        if not set(name.split(".")) <= known
    }


def test_names_in_backticks_exist() -> None:
    assert stale_names(modules()) == set()


def test_a_stale_name_is_found() -> None:
    text = '"""See `gone`, `here` and `a.gone()`, not ``code``."""\ndef here() -> None:\n    """See `here`."""\n'
    assert stale_names({ROOT / "a.py": ast.parse(text)}) == {"a.py: gone", "a.py: a.gone"}

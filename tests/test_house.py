"""The house rules that a program can check: verbs in docstrings, names that say what they hold, three short files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlhf", "reward_model", "scripts", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
VERBS = frozenset(
    """
    accumulate acquire add admit allocate annotate answer append apply ask assign attend average backpropagate
    begin broadcast build calibrate check choose clear clip close collate collect combine compare compile complete
    compute concatenate convert copy count create cut decide decode degrade delete derive describe discard
    divide do download draw drop enable encode escape estimate evaluate evict exit expand explain export extract
    fill find finish fit flag flatten flush format free freeze gather generate give go group handle import
    initialize interpolate join judge keep kill lay let list load locate lock log make map match measure merge
    move normalize number observe open pack pad pair parse pick place plot prepare prepend print put quote raise
    read rebuild recompute record release remove rename render repeat replace report request reset resolve
    restore resume return rotate run sample save scatter score see seed select send serve set shard shift shorten show
    shut silence skip split spread stack standardize start store subtract sum summarize switch take thin time
    tokenize train turn undo unmask update upload validate wait watch weight wrap write yield zero
    """.split()  # noqa: SIM905
)
SAYS_NOTHING = {"found", "held", "said"}  # names for "what I have here"
THREE_FILES = ("rlhf/types.py", "rlhf/algo/objective.py", "rlhf/training/online.py")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return (ast.get_docstring(function) or "").split("\n")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_of_functions_are_sentences_that_begin_with_a_verb(path: Path) -> None:
    lines = [(function.name, first_line(function)) for function in functions(ast.parse(path.read_text()))]
    wrong = {name: line for name, line in lines if line and line.split()[0].strip(",.:;").lower() not in VERBS}
    assert not wrong, "begin with a verb in its base form; a new verb goes into VERBS"


def names_in(source: str) -> set[str]:
    """Every variable, argument, attribute and function that a file names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                names.add(name)
    return names


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_they_hold(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    if any(name in source for name in SAYS_NOTHING):  # also in a comment; most files need not be parsed
        assert not names_in(source) & SAYS_NOTHING, "name what it is: metrics, output, rows"


@pytest.mark.parametrize(
    "source", ["found = 1", "print(held)", "def f(said): ...", "f = lambda found: 1", "run.said", "def said(): ..."]
)
def test_a_name_that_says_nothing_would_be_noticed(source: str) -> None:
    assert names_in(source) & SAYS_NOTHING


def test_the_types_the_objective_and_the_online_loop_are_short() -> None:
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in THREE_FILES}
    assert sum(lengths.values()) < 400, lengths


def test_every_package_says_what_is_in_it() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    short = [str(path) for path in packages if len(ast.get_docstring(ast.parse(path.read_text())) or "") < 40]
    assert packages
    assert not short

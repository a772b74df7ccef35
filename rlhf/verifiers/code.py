"""The code verifier: whether a program passes the row's tests, in a sandbox."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import secrets
import symtable
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from rlhf.errors import ConfigError, install_hint
from rlhf.verifiers.grader import GradeFunction, Grader, Row
from rlhf.verifiers.sandbox import BubblewrapSandbox, Limits, MontySandbox, State, Tests, has_monty, why_no_bubblewrap

# Its indent, its marks, and the language with the rest; ~~~ alone may underline a heading.
FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,}(?=[ \t]*\w))(.*)")
LANGUAGES = ("", "python", "python3", "py")
STAR_MODULES = (
    "bisect", "cmath", "collections", "collections.abc", "copy", "datetime", "decimal", "fractions", "functools",
    "heapq", "itertools", "math", "operator", "random", "statistics", "string", "typing",
)  # fmt: skip
"""The modules of which tests may import *; this process imports them as well, to learn their names."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CodeGrader(Grader):
    """Grades 1 if the completion's Python program passes the row's tests, else 0.

    It runs in a sandbox: in monty (the extra `code`), or, if monty lacks a module or a part of the language, in
    bubblewrap (Linux). Without either a run does not start. The tests are asserts in a function that is defined after
    the program has run; success is the secret that this function returns, and not the exit code. In bubblewrap the
    tests run in a process of their own, of which the program gets the operands of its calls and operators.
    """

    default_weights: ClassVar[dict[str, float]] = {"code": 1.0, "timed_out": 0.0, "unsupported": 0.0}

    type: Literal["code"] = "code"
    tests: str = "tests"
    """The column with the tests: Python code with asserts, or a list of such lines. A row without it is not graded."""
    entry_point: str | None = None
    """The column with the name of the function that the tests' `check(candidate)` gets, as HumanEval has it."""
    prefix: str | None = None
    """The column with the code that a completion continues, as HumanEval's prompt; it is put before a program that
    does not define the entry point itself."""
    solution: str = "solution"
    """The column with a right program, which reward-check runs."""
    sandbox: Literal["auto", "monty", "bubblewrap"] = "auto"
    """auto: monty, or bubblewrap if monty lacks something or is too slow. In monty alone, a program that it cannot
    run earns 0 (part/unsupported/mean)."""
    run_s: Annotated[float, Gt(0)] = 2.0
    """Maximum seconds of a program in either sandbox; keep twice that below reward.source.timeout_s."""
    run_memory_mb: Annotated[int, Ge(64)] = 512
    """Memory of a program, in MiB."""

    def check(self) -> None:
        """Check that there is a sandbox.

        Raises:
            ConfigError: there is none, or not the one that is asked for.
        """
        self._boxes()

    def start(self) -> GradeFunction:
        """Return the function that runs programs.

        Raises:
            ConfigError: there is no sandbox.
        """
        names, limits = self._boxes(), Limits(self.run_s, self.run_memory_mb)
        boxes: list[Any] = [MontySandbox(limits)] if "monty" in names else []
        boxes += [BubblewrapSandbox(limits)] if "bubblewrap" in names else []

        def grade(completion: str, row: Row) -> dict[str, float] | None:
            tests = row.get(self.tests)
            if tests is None:
                return None
            program = self._program(completion, row)
            made = make_tests(tests, _text(row, self.entry_point))
            state: State = "unsupported"
            for box in boxes:
                state = box.run(program, made)
                if state not in ("unsupported", "timeout"):  # monty is slower than CPython
                    break
            return {
                "code": float(state == "passed"),
                "timed_out": float(state == "timeout"),
                "unsupported": float(state == "unsupported"),
            }

        return grade

    def reference(self, row: Row) -> str | None:
        """Return the row's solution in a fence."""
        solution = row.get(self.solution)
        return None if solution is None else f"```python\n{solution}\n```"

    def _boxes(self) -> list[str]:
        """Return the sandboxes to use, in their order.

        Raises:
            ConfigError: there is none, or not the one that is asked for.
        """
        missing: list[str] = []
        names: list[str] = []
        if self.sandbox != "bubblewrap":
            if has_monty():
                names.append("monty")
            else:
                missing.append(f"the package pydantic-monty is not installed: {install_hint('code')}")
        if self.sandbox != "monty":
            why = why_no_bubblewrap()
            if why is None:
                names.append("bubblewrap")
            else:
                missing.append(why)
        if not names:
            raise ConfigError(
                "the verifier code runs programs that nobody has read, and there is no sandbox for them: "
                + "; ".join(missing)
            )
        return names

    def _program(self, completion: str, row: Row) -> str:
        program, entry, prefix = extract_program(completion), _text(row, self.entry_point), _text(row, self.prefix)
        has_all = entry is not None and re.search(rf"^def {re.escape(entry)}\b", program, re.M)
        return program if prefix is None or has_all else f"{prefix}{program}"


def _text(row: Row, column: str | None) -> str | None:
    """Return the text of a column, None if it is null or none is named.

    Raises:
        ValueError: the row does not have the column.
    """
    if column is None:
        return None
    if column not in row:
        raise ValueError(f"the row has no column {column!r}")
    return None if row[column] is None else str(row[column])


def extract_program(completion: str) -> str:
    """Return the last fenced block of Python, or of no language, of a completion; all of it if there is none."""
    blocks = [text for language, text in _fenced(completion) if language in LANGUAGES and text.strip()]
    return blocks[-1] if blocks else completion


def _fenced(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block, without the indent of its fence.

    A block ends at a line that begins with at least as many of the same marks, or at the end of the text. A line with
    one word after its marks ends none: it opens a block.
    """
    lines = iter(text.replace("\r\n", "\n").removesuffix("\n").split("\n"))
    for line in lines:
        opened = FENCE.fullmatch(line)
        if opened is None:
            continue
        indent, marks, info = opened.groups()
        inside = takewhile(partial(_stays_open, marks), lines)
        block = "".join(f"{_without_indent(inner, len(indent))}\n" for inner in inside)
        yield (info.split() or [""])[0].lower(), block


def _stays_open(marks: str, line: str) -> bool:
    """Check whether a line does not close the fence with these marks."""
    return re.match(rf"{marks}{marks[0]}*(?![{marks[0]}]*\w+$)", line.strip()) is None


def _without_indent(line: str, width: int) -> str:
    return line[:width].lstrip(" \t") + line[width:]


def make_tests(tests: object, entry_point: str | None) -> Tests:
    """Put tests into a function with a secret name, which returns a secret after them.

    It calls `check(entry_point)` if the tests define `check`, and functions called test_... without arguments that
    the tests do not call. A variable of the tests begins with the program's value, if it has one of this name, and is
    their own: the program cannot read it. Names in a `global` statement of the tests are the program's.

    Raises:
        ValueError: they are no Python code, or import * from an unknown module, or no assert runs, so that anything
            would pass.
    """
    source = "\n".join(map(str, tests)) if isinstance(tests, list | tuple) else str(tests)
    secret = f"secret_{secrets.token_hex(16)}"
    try:
        tree, variables = ast.parse(source), _variables(source)
    except SyntaxError as error:
        raise ValueError(f"the row's tests are no Python code: {error}") from error
    imports = _take_imports(tree, entry_point)
    has_check = any("check" in (getattr(node, "name", ""), getattr(node, "id", "")) for node in ast.walk(tree))
    calls = [f"check({entry_point})"] if entry_point and has_check else []
    calls += [f"{name}()" for name in _uncalled_tests(tree)]
    tree.body += ast.parse("\n".join(calls)).body
    _check_asserts(tree)
    shadowing = (entry_point,) if entry_point else _shadowing(tree)
    shared = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    seed = f"seed_{secrets.token_hex(16)}"
    own = [name for name in variables if name not in shared and not name.startswith("__")]
    seeds = [f"try:\n    {seed}_{name} = {name}\nexcept NameError:\n    pass" for name in own]
    body = [f"global {name}" for name in variables if name in shared]
    body += [f"try:\n    {name} = {seed}_{name}\nexcept NameError:\n    pass" for name in own]
    function = ast.parse(f"def check_{secret}():\n    return {secret!r}").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body[:0] = [*ast.parse("\n".join(body)).body, *tree.body]
    definition = ast.unparse(ast.fix_missing_locations(function))
    return Tests(
        "\n".join([*imports, *seeds, definition]), f"check_{secret}()", secret, tuple(sorted(shared)), shadowing
    )


def _variables(source: str) -> list[str]:
    """Return the names that a module assigns; one with an annotation may not be declared global."""
    symbols = symtable.symtable(source, "tests", "exec").get_symbols()
    return [s.get_name() for s in symbols if s.is_assigned() and not s.is_namespace() and not s.is_annotated()]


def _take_imports(tree: ast.Module, entry_point: str | None) -> list[str]:
    """Take the imports out of tests that no function may have; return them as statements of a module.

    Of `from math import *` these are the names that the tests use. A name that the program defines too is the program's
    if it is the entry point, or if the tests use nothing else of the program.

    Raises:
        ValueError: an import * is in a block, or of a module that is not known.
    """
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    future = [node for node in nodes if node.module == "__future__"]
    stars = [node for node in nodes if node.names[0].name == "*"]
    tree.body = [node for node in tree.body if node not in (*future, *stars)]
    origins: dict[str, str] = {}
    for star in stars:
        module = str(star.module)
        if module not in STAR_MODULES or star in ast.walk(tree):
            raise ValueError(f"the row's tests have `{ast.unparse(star)}`: name what they import")
        origins |= dict.fromkeys(_names(tree).intersection(_public_names(module)), module)
    others = _free_names(tree).difference(vars(builtins), origins)
    own = {entry_point} if entry_point else set() if others else set(origins)
    imports = {name: f"from {origins[name]} import {name}" for name in sorted(origins)}
    names = [
        f"try:\n    {name}\nexcept NameError:\n    {imports[name]}" if name in own else imports[name]
        for name in imports
    ]
    return [*map(ast.unparse, future), *names]


def _public_names(module: str) -> list[str]:
    """Return the names that `import *` takes from a module."""
    names = vars(importlib.import_module(module))
    return list(names.get("__all__", [name for name in names if not name.startswith("_")]))


def _uncalled_tests(tree: ast.Module) -> list[str]:
    """Return the names of functions as pytest has them, without arguments, which nothing uses."""
    used = _names(tree)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [node.name for node in functions if node.name not in used and not ast.unparse(node.args)]


def _shadowing(tree: ast.Module) -> tuple[str, ...]:
    """Return the names of Python's own, as `sum`, that are the program's: tests use no other name of it."""
    free = _free_names(tree)
    return () if free.difference(vars(builtins)) else tuple(sorted(free))


def _free_names(tree: ast.Module) -> set[str]:
    """Return the names that tests use and do not bind."""
    nodes = list(ast.walk(tree))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.name for node in nodes if isinstance(node, DEFINITIONS)}
    own |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return _names(tree) - own


def _names(tree: ast.AST) -> set[str]:
    """Return the names that code uses."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _check_asserts(tree: ast.Module) -> None:
    """Check that an assert runs: outside of functions and classes, or in one that such code uses.

    Raises:
        ValueError: none does.
    """
    if any(isinstance(node, ast.Assert) for node in _reached(tree)):
        return
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("the row's tests have no assert: every program would pass")
    names = ", ".join(node.name for node in tree.body if isinstance(node, DEFINITIONS))
    raise ValueError(
        f"the row's tests have asserts only in functions that nothing calls ({names}): every program would pass. Call "
        "them in the tests, or, for check(candidate), set entry_point to the column with the function's name"
    )


def _reached(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes outside of functions and classes, and inside of those that these use by name.

    A decorator that is defined here uses what it decorates.
    """
    unused = {node.name: node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
    names = set(unused)
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, DEFINITIONS):
                waiting.append(child)
            elif any(_names(part) & names for part in child.decorator_list):
                waiting += [*child.decorator_list, ast.Name(child.name)]
        used = unused.pop(node.id, None) if isinstance(node, ast.Name) else None
        if isinstance(used, ast.ClassDef):
            waiting += [part for method in used.body for part in ast.iter_child_nodes(method)]
        elif used is not None:
            waiting += used.body

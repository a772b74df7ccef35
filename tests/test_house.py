"""The house rules that a program can check: verbs and names in docstrings, and names that describe their values."""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterable

import pytest
from sources import FILES, PRODUCT, ROOT, nodes_in, nodes_of

TESTS = sorted((ROOT / "tests").rglob("*.py"))
VERBS = frozenset(
    """
    accumulate acquire add admit allocate annotate answer append apply ask assign attend average backpropagate begin
    broadcast build calibrate call check choose clear clip close collate collect combine compare compile complete
    compute concatenate continue convert copy count create cut deal decide declare decode degrade delete derive describe
    discard divide do download draw drop enable encode end escape estimate evaluate evict exit expand explain export
    extract fill find finish fit flag flatten flush forget format free freeze gather generate give go grade group halve
    handle hide import initialize interpolate join judge keep kill label lay leave let limit link list listen load
    locate lock log look make map mark match measure merge move name normalize note number observe open pack pad pair
    parse pause pick place plan play plot post prepare prepend print push put quote raise read rebuild receive recompute
    record register release remember remove rename render repeat replace report request reset resolve restore resume
    return rewrite rotate round run sample save say scatter score see seed select send serve set shard shift shorten
    show shut silence skip split spread stack standardize start step store subtract sum summarize switch take tell
    thin time tokenize train turn undo unmask update upload validate wait watch weight whiten wrap write yield zero
    """.split()  # noqa: SIM905
)
SAYS_NOTHING = {"found", "held", "said"}  # names that do not describe a value


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return (ast.get_docstring(function) or "").split("\n")[0]


def test_docstrings_of_functions_are_sentences_that_begin_with_a_verb() -> None:
    lines = [
        (f"{path.relative_to(ROOT)}: {function.name}", first_line(function))
        for path in FILES
        for function in nodes_of(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    wrong = {name: line for name, line in lines if line and line.split()[0].strip(",.:;").lower() not in VERBS}
    assert wrong == {}, "begin with a verb in its base form; a new verb goes into VERBS"


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Every variable, argument, attribute and function that a file names."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
                names.add(name)
    return names


def test_names_say_what_they_hold() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in [*FILES, *TESTS]}
    suspects = [path for path, source in sources.items() if any(name in source for name in SAYS_NOTHING)]
    wrong = {str(path.relative_to(ROOT)): names_in(nodes_of(path)) & SAYS_NOTHING for path in suspects}
    assert {path: names for path, names in wrong.items() if names} == {}, "name what it is: metrics, output, rows"


@pytest.mark.parametrize(
    "source", ["found = 1", "print(held)", "def f(said): ...", "f = lambda found: 1", "run.said", "def said(): ..."]
)
def test_a_name_that_says_nothing_would_be_noticed(source: str) -> None:
    assert names_in(nodes_in(source)) & SAYS_NOTHING


def test_every_package_says_what_is_in_it() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    short = [str(path) for path in packages if len(ast.get_docstring(ast.parse(path.read_text())) or "") < 40]
    assert packages
    assert not short


def types_defined_in(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """The classes of a file, and its aliases of types: names in CamelCase that a module's statement assigns."""
    classes: set[str] = set()
    aliases: set[str] = set()
    for node in nodes:
        match node:
            case ast.ClassDef(name=name):
                classes.add(name)
            case ast.Module(body=body):
                targets = [target for line in body if isinstance(line, ast.Assign) for target in line.targets]
                aliases.update(target.id for target in targets if isinstance(target, ast.Name))
    return classes, {name for name in aliases if name[0].isupper() and not name.isupper()}


def names_of_two_types(sources: Iterable[Iterable[ast.AST]]) -> list[str]:
    """The classes whose name another file has too, for a class or for an alias."""
    files = [types_defined_in(nodes) for nodes in sources]
    counts = Counter(name for classes, aliases in files for name in classes | aliases)
    return sorted(name for name in set().union(*(classes for classes, _ in files)) if counts[name] > 1)


NAMED_ALIKE = {
    "Accuracy": "the card's, a documented class, and the metric's, by whose class the library `evaluate` names it",
}


def test_the_name_of_a_class_is_no_other_type_s_name() -> None:
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] != "benchmarks"]
    alike = names_of_two_types(map(nodes_of, files))
    assert alike == sorted(NAMED_ALIKE), "one name, one meaning: name what each of the two is"


@pytest.mark.parametrize("other", ["class Plan: ...", "Plan = dict[str, int]", "def f():\n    class Plan: ..."])
def test_a_second_type_of_one_name_would_be_noticed(other: str) -> None:
    assert names_of_two_types([nodes_in("class Plan: ..."), nodes_in(other)]) == ["Plan"]
    assert names_of_two_types([nodes_in("class Plan: ..."), nodes_in("plan = Plan()")]) == []


NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\([^`]*\))?`")
RAISED = re.compile(r"^\s+([A-Z]\w+): ", re.MULTILINE)
NOT_OURS = {"except", "datasets", "Dataset", *dir(builtins)}  # a keyword, and names of packages and of Python


def docstrings(nodes: Iterable[ast.AST]) -> list[ast.Constant]:
    """Every string that documents a module, class, function or field."""
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    statements = [statement for body in bodies for statement in body if isinstance(statement, ast.Expr)]
    values = [statement.value for statement in statements if isinstance(statement.value, ast.Constant)]
    return [value for value in values if isinstance(value.value, str)]


def words_of_code(nodes: Iterable[ast.AST]) -> set[str]:
    """Every identifier of a file, and every word of its strings outside docstrings."""
    documentation = {id(node) for node in docstrings(nodes)}
    words: set[str] = set()
    for node in nodes:
        for field in ("id", "attr", "arg", "name"):
            if isinstance(value := getattr(node, field, None), str):
                words.update(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            words.update(re.findall(r"\w+", node.value))
    return words


def definitions(nodes: Iterable[ast.AST]) -> set[str]:
    """The functions, classes, fields and constants that a file defines, and its strings that are names, as of keys."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=targets):
                names.update(target.id for target in targets if isinstance(target, ast.Name))
            case ast.Constant(value=str(text)) if text.isidentifier():
                names.add(text)
    return names


def unknown_names(text: str, words: set[str]) -> list[str]:
    """The names in backticks, and the exceptions under Raises, that nothing in `words` is called."""
    named = [name for name in NAME.findall(text) if not name.split(".")[-1].startswith("clip_0")]
    raised = RAISED.findall(text.split("Raises:")[1].split("Returns:")[0]) if "Raises:" in text else []
    parts = [part for name in [*named, *raised] for part in name.split(".")]
    return [part for part in parts if part not in words and part not in NOT_OURS]


def test_names_in_docstrings_exist() -> None:
    defined = set().union(*(definitions(nodes_of(path)) for path in PRODUCT)) | {
        part for path in PRODUCT for part in path.with_suffix("").parts
    }
    missing = {}
    for path in PRODUCT:
        nodes = nodes_of(path)
        unknown = {name for node in docstrings(nodes) for name in unknown_names(str(node.value), defined)}
        missing[path] = unknown - words_of_code(nodes) if unknown else unknown
    assert {str(path.relative_to(ROOT)): names for path, names in missing.items() if names} == {}


def test_a_missing_name_in_a_docstring_would_be_noticed() -> None:
    assert unknown_names("See `gone` and `here`.", {"here"}) == ["gone"]
    assert unknown_names("Do it.\n\n    Raises:\n        GoneError: it is not there.\n", set()) == ["GoneError"]

"""Check shapes and types in every test: an import hook that decorates the functions and dataclasses of our packages.

A function or dataclass whose annotations name a shape gets jaxtyping and beartype, any other function beartype alone.
jaxtyping's own hook gives everything its bookkeeping of shapes, also the nine functions of ten that name none, and
checks arguments twice; that took more than half of the suite's time. Of a test's calls of a function the first are
checked: the later ones in a run of hundreds of steps are the same again, and to check them doubled its time.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any

from beartype import beartype
from beartype._check.code import codemain
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning
from jaxtyping import AbstractArray, AbstractDtype, jaxtyped

PACKAGES = ("rlhf", "reward_model")
# modules that import torch for annotations only
QUICK = ("rlhf.algorithms.", "rlhf.labelling.", "rlhf.rewards.", "rlhf.suites.", "rlhf.teachers.", "rlhf.user_code")
DECORATOR = "decorate_with_checks"  # a global of every module that is checked
CHECKED_CALLS = 4  # of each function in each test

_tests_begun = 0


def begin_test() -> None:
    """Check the first calls of every function again."""
    global _tests_begun
    _tests_begun += 1


def install() -> None:
    """Check modules imported from now on; a second call, as of a program that runs pytest twice, changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = [name for name in PACKAGES if name in sys.modules]
    assert not early, f"{early} imported before their checks were installed"
    # Of a list one item is checked: which one, the global generator does not decide, whose draws tests count.
    codemain.getrandbits = random.Random(0).getrandbits
    sys.meta_path.insert(0, _Finder())


def decorate(target: Any) -> Any:
    """Add the checks that the annotations of a function, a method or a dataclass ask for."""
    match target:
        case type():
            if dataclasses.is_dataclass(target) and _names_a_shape(target.__init__):
                target.__init__ = _checked(target.__init__)  # type: ignore[misc]
            return target
        case classmethod() | staticmethod():
            return type(target)(decorate(target.__func__))
        case property():
            return property(decorate(target.fget), target.fset, target.fdel)
        case FunctionType():
            return _checked(target)
    return target  # the product of another decorator


def _checked(function: Callable[..., Any]) -> Any:
    """Return a function that is checked in the first calls in each test, and plain after them."""
    test, calls, checked = -1, 0, None

    @functools.wraps(function)
    def first_calls_checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal test, calls, checked
        if test != _tests_begun:
            test, calls = _tests_begun, 0
        calls += 1
        if calls > CHECKED_CALLS:
            return function(*args, **kwargs)
        checked = checked or _with_checks(function)  # not before: most functions are never called by a test process
        return checked(*args, **kwargs)

    return first_calls_checked


def _with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    has_shapes = _names_a_shape(function)  # asked first: beartype replaces the text of annotations
    with warnings.catch_warnings():  # a class of a library may descend from a type that is deprecated
        warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
        checked: Callable[..., Any] = beartype(function)
    return jaxtyped(checked, typechecker=None) if has_shapes else checked


def _names_a_shape(function: Callable[..., Any]) -> bool:
    annotations = function.__annotations__.values()
    return any(_is_shaped(name, function.__globals__) for text in annotations for name in _names(text))


def _names(annotation: Any) -> set[str]:
    """Return the names in an annotation, which is text in every module of ours."""
    if not isinstance(annotation, str):
        return set()  # None, as the return value of a dataclass's __init__
    return {node.id for node in ast.walk(ast.parse(annotation, mode="eval")) if isinstance(node, ast.Name)}


def _is_shaped(name: str, names: Mapping[str, Any]) -> bool:
    value = names.get(name)
    return isinstance(value, type) and issubclass(value, AbstractArray | AbstractDtype)


def _with_types_at_the_end(tree: ast.Module) -> ast.Module:
    """Import last the modules that a module needs for its annotations only: the checks look the names up."""
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    body = [node for node in tree.body if node not in blocks]
    return ast.Module([*body, *(inner for block in blocks for inner in block.body)], tree.type_ignores)


class _AddDecorator(ast.NodeTransformer):
    """Decorate functions, below their other decorators, and classes, above them; nothing within a function."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list.append(ast.Name(DECORATOR, ast.Load()))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, ast.Name(DECORATOR, ast.Load()))
        return self.generic_visit(node)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)  # not __pycache__, which has the code without checks
        tree = ast.parse(self.get_data(path), path)
        if fullname.startswith(QUICK):
            tree = _with_types_at_the_end(tree)
        tree = ast.fix_missing_locations(_AddDecorator().visit(tree))
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, DECORATOR, decorate)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec

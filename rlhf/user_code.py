"""Functions of the user: found by their import path, or given as Python objects, and called with care."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError, RewardError, UserError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

LIBRARIES, SITE = (os.path.dirname(__file__), os.path.dirname(os.__file__), "<frozen"), "site-packages"
OBJECT = "python:"  # how the target of a function begins that was given as an object and has no import path
_OBJECTS: dict[str, Callable[..., Any]] = {}  # the functions that were given as objects, by target
_SOURCES: dict[str, str] = {}  # their sources, as they were when the functions were first given


def target_of(function: Callable[..., Any]) -> str:
    """Return a target that `load_function` resolves: the import path, or a name that is valid in this process only.

    A function of a module has an import path. A lambda, a method of an object, a function inside another one, and
    any function of a notebook or a script have none.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    is_plain = bool(module) and module != "__main__" and name.isidentifier()
    if is_plain and getattr(sys.modules.get(str(module)), name, None) is function and _is_importable(str(module)):
        return _keep(f"{module}:{name}", function)
    label = name.rpartition(".")[2].strip("<>") or type(function).__name__
    target = f"{OBJECT}{label}"
    count = 1
    while _OBJECTS.get(target, function) is not function:
        count += 1
        target = f"{OBJECT}{label}-{count}"
    return _keep(target, function)


def _keep(target: str, function: Callable[..., Any]) -> str:
    if _OBJECTS.get(target) is not function:
        _OBJECTS[target], _SOURCES[target] = function, read_source(function)
    return target


def source_of(target: str) -> str | None:
    """Return the source of a function that was given as an object, as `read_source` does; None for other targets."""
    return _SOURCES.get(target)


def read_source(given: Any) -> str:
    """Return the source of a function or a class, with the numbers and texts that it keeps; empty if it has none.

    These are defaults, values of the functions around it, and the arguments of a partial. Of a notebook's class it is
    the source of its methods.
    """
    code = given.func if isinstance(given, partial) else given if hasattr(given, "__qualname__") else type(given)
    with suppress(OSError, TypeError, ValueError):
        source = _lambda_source(code) if code.__name__ == "<lambda>" else inspect.getsource(code)
        return source + "".join(f"\n{value!r}" for value in _kept(given) if isinstance(value, str | int | float))
    methods = vars(code).values() if isinstance(code, type) else ()
    return "".join(read_source(method) for method in methods if inspect.isfunction(method))


def _kept(given: Any) -> Iterator[object]:
    if isinstance(given, partial):
        yield from (*given.args, *given.keywords.values(), *_kept(given.func))
    elif inspect.isfunction(given):
        yield from (cell.cell_contents for cell in given.__closure__ or ())
        yield from (*(given.__defaults__ or ()), *(given.__kwdefaults__ or {}).values())


def _lambda_source(function: Any) -> str:
    """Return the arguments and the expression of a lambda, without the statement that it stands in."""
    code = function.__code__
    spans = [(line, start, last, end) for line, last, start, end in code.co_positions() if end]
    first, start = min((line, start) for line, start, _, _ in spans)
    last, end = max((line, end) for _, _, line, end in spans)
    lines = [line.encode() for line in inspect.findsource(function)[0][first - 1 : last]]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return f"lambda {', '.join(names)}: {b''.join(lines).decode()}"


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module without a spec, or with a name that is no import path
        return False


def load_function(target: str, *, what: str = "reward", error: type[UserError] = RewardError) -> Callable[..., Any]:
    """Return the function that `target` names: module:function, or path/to/file.py:function (a file on its own).

    Args:
        target: the import path, or a result of `target_of` in the same process.
        what: the purpose of the function, in messages.

    Raises:
        UserError: there is no such module, file or function, or its import fails; of the class `error`.
    """
    if target.startswith(OBJECT):
        return _object(target, what, error)
    location, colon, name = target.rpartition(":")
    if not (colon and location and name):
        raise error(f"{what} target {target!r}: write module:function or path/to/file.py:function")
    check_target(target, what=what, error=error)
    module = load_module(location, what=what, error=error)
    function = getattr(module, name, None)
    if function is None:
        raise error(f"{what} target {target!r}: {location} has no {name!r}{_suggest_function(name, module)}")
    if not callable(function):
        raise error(f"{what} target {target!r}: {name!r} is a {type(function).__name__}, not a function")
    checked: Callable[..., Any] = function
    return checked


def check_target(target: str, *, what: str, error: type[UserError]) -> None:
    """Check that a target path/to/file.py:function names a file that parses and defines the name; nothing is run.

    So a mistake is reported before the file's imports (torch, say) take seconds. Other targets are not looked at.

    Raises:
        UserError: there is no such file, it cannot be parsed, or it defines no such name; of the class `error`.
    """
    location, _, name = target.rpartition(":")
    if not location.endswith(".py"):
        return
    path = _existing(Path(location), what, error)
    with UserCode(f"reading the {what} file {location!r}", error=error):
        defined = _names_of(_parsed(path, location))
    if defined is not None and name not in defined:
        raise error(f"{what} target {target!r}: {location} has no {name!r}{did_you_mean(name, sorted(defined))}")


def _parsed(path: Path, location: str) -> ast.Module:
    source = path.read_bytes()
    try:
        return ast.parse(source, filename=location)
    except SystemError:  # CPython 3.11 miscounts its recursion if a garbage collection falls into the parsing
        return ast.parse(source, filename=location)


def files_of(target: str) -> dict[str, Path]:
    """Return the file of path/to/file.py:function under the setting's name, `target`; nothing for other targets."""
    file = Path(target.rpartition(":")[0])
    return {"target": file} if file.suffix == ".py" and file.is_file() else {}


def _names_of(tree: ast.Module) -> set[str] | None:
    """Return the names that the file binds at any place; None if only running it tells (`import *`, `globals()`)."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            case ast.Name(id="globals" | "setattr" | "exec" | "vars" | "locals"):
                return None
            case _:
                pass
    return None if {"*", "__getattr__"} & names else names


def _object(target: str, what: str, error: type[UserError]) -> Callable[..., Any]:
    if target not in _OBJECTS:
        raise error(
            f"{what} target {target!r} is a Python object of the process that began this run, and another process "
            "cannot have it: call rlhf.train again, with resume=True, or put the function into a .py file"
        )
    return _OBJECTS[target]


def load_module(location: str, *, what: str, error: type[UserError]) -> ModuleType:
    """Import a module by its name, or a file by its path.

    Args:
        location: package.module, or path/to/file.py.
        what: the purpose of the module, in messages.

    Raises:
        UserError: there is no such module or file, or its import fails; of the class `error`.
    """
    return _load_file(Path(location), what, error) if location.endswith(".py") else _load_module(location, what, error)


def _load_module(name: str, what: str, error: type[UserError]) -> ModuleType:
    with UserCode(f"importing the {what} module {name!r}", error=error):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            # Only if the requested module is the missing one: a failed import inside that module is another error.
            if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
                raise
            raise error(
                f"no module {name!r}: install it or put its folder on PYTHONPATH, "
                "or name a file: path/to/file.py:function"
            ) from missing


def _load_file(path: Path, what: str, error: type[UserError]) -> ModuleType:
    _existing(path, what, error)
    name = f"{what} file {path.resolve()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module there
    try:
        with UserCode(f"importing the {what} file {str(path)!r}", error=error):
            spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]  # once the user has repaired the file, it is imported
        raise
    return module


def _existing(path: Path, what: str, error: type[UserError]) -> Path:
    if not path.is_file():
        candidates = [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise error(f"no {what} file {str(path)!r}{did_you_mean(str(path), candidates)}")
    return path


def _suggest_function(name: str, module: ModuleType) -> str:
    return did_you_mean(name, [n for n in vars(module) if callable(getattr(module, n))])


def checked_per_token(function: Callable[..., Any], what: str, *, finite: bool = False) -> Callable[..., Tensor]:
    """Wrap a loss or an advantage of the user: its result has to be a tensor of the shape of its argument `mask`.

    Args:
        what: a name for the function, in messages.
        finite: NaN and infinity at a live token are an error too.

    Raises:
        ConfigError: when it is called: the result is something else, or the function fails.
    """

    def call(*, mask: Tensor, **arguments: Any) -> Tensor:
        with UserCode(what, error=ConfigError):
            result = function(mask=mask, **arguments)
        values = check_per_token(result, mask, what)
        if finite and not values[mask].isfinite().all():
            raise ConfigError(f"{what} is NaN or infinite for a token: look at groups whose scores are all equal")
        return values

    return call


def check_per_token(values: Any, mask: Tensor, what: str) -> Tensor:
    """Return the result of a loss or an advantage, if it is a value for each token of `mask`.

    Raises:
        ConfigError: it is not.
    """
    from torch import Tensor

    if not isinstance(values, Tensor):
        raise ConfigError(f"{what} returned a {type(values).__name__}: it has to return a tensor [B, T]")
    if values.shape != mask.shape:
        raise ConfigError(
            f"{what} returned a tensor of shape {list(values.shape)}: one value per token is needed, {list(mask.shape)}"
        )
    return values


def check_values(values: Any, count: int, what: str) -> Tensor:
    """Return the result of a loss, if it is a value for each of `count` rows.

    Raises:
        ConfigError: it is not.
    """
    from torch import Tensor

    if not isinstance(values, Tensor) or values.shape != (count,):
        got = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ConfigError(f"{what} returned {got}: it has to return one value per row, a tensor of shape [{count}]")
    return values


class UserCode:
    """Context manager around user code: any exception becomes a UserError that says where it was raised."""

    def __init__(self, what: str, context: str = "", *, error: type[UserError] = RewardError) -> None:
        self.what = what
        self.context = context
        self.error = error

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return
        last = traceback.format_exception_only(error)[-1].strip()
        raise self.error(f"{self.what} failed: {last} at {_place(error, trace)}{self.context}") from error


def _place(error: Exception, trace: TracebackType | None) -> str:
    """Return the last line of the user's that led to an error; of a file that does not parse, the wrong line."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES) and SITE not in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"

"""The plain values that are copied between two processes, and the operations that one asks the other for."""

from __future__ import annotations

import operator
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ATOMS = frozenset({type(None), bool, int, float, str})
SCALARS = (int, float, complex, str, bytes)
PLAIN = (*SCALARS, tuple, list, dict, set, frozenset, bytearray)
BOXES = frozenset((
    "builtins.list", "builtins.dict", "builtins.set", "builtins.bytearray",
    "collections.deque", "collections.Counter", "collections.OrderedDict", "collections.defaultdict",
))  # fmt: skip
"""The types whose values can change: a copy that is changed changes its original."""
VALUES = frozenset((
    "builtins.complex", "builtins.range", "builtins.slice", "builtins.frozenset", "decimal.Decimal",
    "fractions.Fraction", "datetime.date", "datetime.time", "datetime.datetime", "datetime.timedelta",
    "datetime.timezone", "array.array",
))  # fmt: skip
"""The other types that are copied, by the arguments that make an equal value."""
ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
MODULE = type(sys)


async def _coroutine() -> None:
    pass


def _type_of_coroutines() -> type:
    coroutine = _coroutine()
    coroutine.close()
    return type(coroutine)


COROUTINE = _type_of_coroutines()


def name_of(kind: type) -> str:
    """Return the name of a type with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_plain(value: Any) -> bool:
    """Return whether a value is copied, or is of a class below a type that is copied."""
    return value is None or isinstance(value, PLAIN) or name_of(type(value)) in BOXES | VALUES


def plain(value: Any) -> Any:
    """Return the plain value of an object, by no method of its own class; None if it has none."""
    if name_of(type(value)) in BOXES | VALUES:
        return value
    copies: tuple[tuple[type, Callable[[Any], Any]], ...] = (
        (int, int.__int__),
        (float, float.__float__),
        (complex, complex.__complex__),
        (str, str.__str__),
        (bytes, bytes.__bytes__),
        (tuple, lambda value: tuple(tuple.__iter__(value))),
        (list, lambda value: list(list.__iter__(value))),
        (dict, lambda value: dict(dict.items(value))),
        (set, lambda value: set(set.__iter__(value))),
        (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
        (bytearray, bytes),
    )
    return next((copy(value) for kind, copy in copies if isinstance(value, kind)), None)


def _advance(value: Any) -> Any:
    """Return the next item of an iterator; run a coroutine to its end, and give its result as StopIteration does."""
    if type(value) is not COROUTINE:
        return next(value)
    import asyncio

    coroutine: Any = value
    raise StopIteration(asyncio.run(coroutine))


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda value, other: function(other, value)


def _of_type(name: str) -> Callable[..., Any]:
    return lambda value, *operands: getattr(type(value), name)(value, *operands)


def _copied(function: str) -> Callable[..., Any]:
    def copied(value: Any, *_: Any) -> Any:
        import copy

        return getattr(copy, function)(value)

    return copied


def _operators(*names: str) -> dict[str, Callable[..., Any]]:
    return {f"__{name}__": getattr(operator, f"__{name}__") for name in names}


def _functions(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {f"__{function.__name__}__": function for function in functions}


COMPARISONS = _operators("eq", "ne", "lt", "le", "gt", "ge")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **_operators(*ARITHMETIC, *(f"i{name}" for name in ARITHMETIC)),
    **{f"__r{name}__": _reflected(getattr(operator, f"__{name}__")) for name in ARITHMETIC},
    **_operators("neg", "pos", "invert", "index", "contains", "getitem", "setitem", "delitem"),
    **_functions(int, float, complex, bool, str, bytes, reversed, abs, len, repr, hash, iter, dir, round, format),
    "__next__": _advance,
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__delattr__": delattr,
    "__enter__": _of_type("__enter__"),
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    "__subclasscheck__": lambda kind, value: issubclass(value, kind),
    "__copy__": _copied("copy"),
    "__deepcopy__": _copied("deepcopy"),
}
"""The operations of an object, by the methods of a `RemoteObject` that ask for them."""
ALL_OPERATIONS: dict[str, Callable[..., Any]] = {
    **OPERATIONS,
    **COMPARISONS,
    "__call__": lambda function, args, kwargs: function(*args, **kwargs),
    "__exit__": _of_type("__exit__"),
    "plain": plain,
    "type": type,
}

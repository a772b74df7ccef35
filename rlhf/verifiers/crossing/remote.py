"""An object of the other process, as this process uses it."""

from __future__ import annotations

from rlhf.verifiers.crossing.operations import COMPARISONS, COROUTINE, OPERATIONS, SCALARS, VALUES, is_plain, name_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from rlhf.verifiers.crossing.peer import Peer

CLAIMS: dict[str, type] = {
    **{kind.__name__: kind for kind in (tuple, list, dict, set, frozenset, bytearray, type)},
    "function": type(lambda: None),
    "generator": type(_ for _ in ()),
    "coroutine": COROUTINE,
}
"""The types that `isinstance` takes an object of the other process for: no number and no text."""


FIXED = (*SCALARS, tuple, frozenset)


class RemoteObject:
    """An object of the other process, which is asked for every operation."""

    __slots__ = ("_rlhf_claim", "_rlhf_index", "_rlhf_peer", "_rlhf_value")
    _rlhf_peer: Peer
    _rlhf_index: int
    _rlhf_claim: str
    _rlhf_value: Any

    def __init__(self, peer: Peer, index: int, claim: str) -> None:
        """Take the object's number in the other process, and the name of the type that `isinstance` takes it for."""
        for slot, value in zip(self.__slots__, (claim, index, peer, None), strict=True):
            object.__setattr__(self, slot, value)

    @property  # type: ignore[misc]  # a class is not to be set
    def __class__(self) -> Any:
        return CLAIMS.get(self._rlhf_claim, RemoteObject)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self._rlhf_peer.ask("__call__", self, args, kwargs)

    def __await__(self) -> Any:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        return self._rlhf_peer.ask("__exit__", self, kind, error, None)


def _asks(name: str) -> Callable[..., Any]:
    def method(self: RemoteObject, *operands: Any) -> Any:
        return self._rlhf_peer.ask(name, self, *operands)

    return method


def _compares(name: str) -> Callable[[RemoteObject, Any], Any]:
    def method(self: RemoteObject, other: Any) -> Any:
        """Let the other process compare its objects with each other, and with nothing else."""
        if type(other) is RemoteObject:
            return self._rlhf_peer.ask(name, self, other)
        own = _plain_of(self) if is_plain(other) else None
        return NotImplemented if own is None else COMPARISONS[name](own, other)

    return method


def _plain_of(remote: RemoteObject) -> Any:
    """Ask for the plain value of an object; one that cannot change is asked for once, so that it stays the same."""
    if remote._rlhf_value is None:
        value = remote._rlhf_peer.ask("plain", remote)
        if not isinstance(value, FIXED):
            return value
        object.__setattr__(remote, "_rlhf_value", value)
    return remote._rlhf_value


def _subtracts(name: str) -> Callable[[RemoteObject, Any], Any]:
    def method(self: RemoteObject, other: Any) -> Any:
        """Subtract no plain value: in abs(f(x) - 0.5) < 1e-6 it is the answer, and the object could say 0."""
        is_value = type(other) is not RemoteObject and (isinstance(other, SCALARS) or name_of(type(other)) in VALUES)
        return NotImplemented if is_value else self._rlhf_peer.ask(name, self, other)

    return method


def _add_methods() -> None:
    special = {name: _compares(name) for name in COMPARISONS} | {n: _subtracts(n) for n in ("__sub__", "__rsub__")}
    for name in (*OPERATIONS, *COMPARISONS):
        setattr(RemoteObject, name, special.get(name) or _asks(name))


_add_methods()

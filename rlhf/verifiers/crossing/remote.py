"""An object of the other process, as this process uses it."""

from __future__ import annotations

from rlhf.verifiers.crossing.operations import COMPARISONS, COROUTINE, OPERATIONS, SCALARS, is_plain

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


class RemoteObject:
    """An object of the other process, which is asked for every operation."""

    __slots__ = ("_rlhf_claim", "_rlhf_index", "_rlhf_peer")
    _rlhf_peer: Peer
    _rlhf_index: int
    _rlhf_claim: str

    def __init__(self, peer: Peer, index: int, claim: str) -> None:
        """Take the object's number in the other process, and the name of the type that `isinstance` takes it for."""
        for name, value in (("_rlhf_peer", peer), ("_rlhf_index", index), ("_rlhf_claim", claim)):
            object.__setattr__(self, name, value)

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
        own = self._rlhf_peer.ask("plain", self) if is_plain(other) else None
        return NotImplemented if own is None else COMPARISONS[name](own, other)

    return method


def _subtracts(name: str) -> Callable[[RemoteObject, Any], Any]:
    def method(self: RemoteObject, other: Any) -> Any:
        """Subtract no number: in abs(f(x) - 0.5) < 1e-6 it is the answer, and the object could say that 0 is left."""
        is_object = type(other) is RemoteObject or not isinstance(other, SCALARS)
        return self._rlhf_peer.ask(name, self, other) if is_object else NotImplemented

    return method


def _add_methods() -> None:
    special = {name: _compares(name) for name in COMPARISONS} | {n: _subtracts(n) for n in ("__sub__", "__rsub__")}
    for name in (*OPERATIONS, *COMPARISONS):
        setattr(RemoteObject, name, special.get(name) or _asks(name))


_add_methods()

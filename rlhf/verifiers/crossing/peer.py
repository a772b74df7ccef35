"""One end of the socket between two processes: values become nodes, which are plain values of JSON, and back."""

from __future__ import annotations

import operator
import os
import sys
from _thread import RLock

from rlhf.verifiers.crossing.operations import ALL_OPERATIONS, ATOMS, BOXES, MODULE, SCALARS, VALUES, name_of, plain
from rlhf.verifiers.crossing.remote import CLAIMS, RemoteObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn

KEPT = frozenset({"__getattr__", "__getitem__", "name"})  # a list that is part of an object stays the object's
VIEWS: dict[str, Callable[[Any], Any]] = {
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
}


class Exchange:
    """The values of one question and its answer that can change; both processes number them in the same order."""

    __slots__ = ("boxes", "numbers")

    def __init__(self) -> None:
        self.boxes: list[Any] = []
        self.numbers: dict[int, int] = {}  # by identity

    def add(self, box: Any) -> None:
        """Number a value."""
        self.numbers[id(box)] = len(self.boxes)
        self.boxes.append(box)


class Peer:
    """One end of the socket, with the objects that the other end has a `RemoteObject` of."""

    def __init__(self, channel: int, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any]) -> None:
        """Take the descriptor of the socket, and the form of the messages that are sent and received."""
        self.channel, self.dumps, self.loads = channel, dumps, loads
        self.operations = ALL_OPERATIONS
        self.objects: list[Any] = []
        self.indices: dict[int, int] = {}  # by the identity of an object, which `objects` keeps
        self.remotes: dict[int, Any] = {}
        self.lock = RLock()

    def send(self, message: Any) -> None:
        """Send a message."""
        data = self.dumps(message)
        data = len(data).to_bytes(8, "big") + data
        while data:
            data = data[os.write(self.channel, data) :]

    def receive(self) -> Any:
        """Wait for a message; this process ends if the other has."""
        return self.loads(self._read(int.from_bytes(self._read(8), "big")))

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            parts.append(os.read(self.channel, min(size, 1 << 20)))
            if not parts[-1]:
                self.leave()
            size -= len(parts[-1])
        return b"".join(parts)

    def leave(self) -> NoReturn:
        """End this process without a verdict; no `except` of a test prevents it."""
        os._exit(1)

    def ask(self, operation: str, *operands: Any) -> Any:
        """Ask the other process for an operation; return its result, or raise its exception."""
        with self.lock:
            try:
                kind, value = self._exchange(operation, operands)
            except Exception:  # a message of no known form, or a value that cannot cross
                self.leave()
        if kind == "raise":
            raise value
        return value

    def _exchange(self, operation: str, operands: Sequence[Any]) -> tuple[str, Any]:
        self.prepare()
        exchange = Exchange()
        self.send(["ask", operation, self._nodes(operands, exchange)])
        while (message := self.receive())[0] == "ask":
            self.serve(message)
        kind, node, changes, printed = message
        if printed:
            sys.stdout.write(printed)
        for number, nodes in changes:
            _fill(exchange.boxes[number], self._values(nodes, exchange))
        return kind, self.decode(node, exchange)

    def prepare(self) -> None:
        """Update the other process before a question."""

    def serve(self, message: Sequence[Any]) -> None:
        """Answer a question of the other process."""
        _, operation, nodes = message
        exchange = Exchange()
        before: list[list[Any]] = []
        try:
            operands = self._values(nodes, exchange)
            before = [_parts(box) for box in exchange.boxes]
            if not self.permits(operation, nodes[0], operands):
                raise AttributeError(f"the tests do not let a program use {operation} here")
            kind, value = "answer", self.operations[operation](*operands)
        except BaseException as error:  # it is the other process's, which has asked
            kind, value = "raise", error
        changes = [
            [number, self._nodes(_contents(box), exchange)]
            for number, (box, parts) in enumerate(zip(exchange.boxes, before, strict=False))
            if not _are_same(_parts(box), parts)
        ]
        self.send([kind, self.encode(value, exchange, stays=operation in KEPT), changes, self.printed()])

    def permits(self, operation: str, node: Any, operands: Sequence[Any]) -> bool:
        """Return whether the other process may ask for an operation."""
        return True

    def printed(self) -> str:
        """Return the text that the last question has printed."""
        return ""

    # --- from values to nodes

    def encode(self, value: Any, exchange: Exchange, *, stays: bool = False) -> Any:
        """Return the node of a value; if it `stays`, one that can change is not copied."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is RemoteObject:
            return ["yours", value._rlhf_index]
        if kind is tuple:
            return ["tuple", self._nodes(value, exchange)]
        name = name_of(kind)
        if name in BOXES:
            return self._mine(value) if stays else self._box(name, value, exchange)
        if name in VALUES:
            make, arguments, *_ = value.__reduce_ex__(2)
            return ["value", name, self._nodes(arguments if make is kind else arguments[1:], exchange)]
        return self._rare(kind, value, exchange)

    def _rare(self, kind: type, value: Any, exchange: Exchange) -> Any:
        if kind is bytes:
            return ["bytes", value.decode("latin-1")]
        if kind is MODULE and _is_of_python(value.__name__):
            return ["module", value.__name__]
        if kind.__module__ == "builtins" and kind.__name__ in VIEWS:
            return ["view", kind.__name__, self._nodes(value, exchange)]
        if isinstance(value, BaseException):
            own = [self._nodes(value.args, exchange), str(value), self.encode(dict(vars(value)), exchange)]
            return ["error", self._class(kind), *own]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, SCALARS) and not hasattr(kind, "__members__"):  # the members of an Enum have names
            return self.encode(plain(value), exchange)
        return self._global(value) or self._mine(value)

    def _nodes(self, values: Iterable[Any], exchange: Exchange) -> list[Any]:
        items = list(values)
        return items if ATOMS.issuperset(map(type, items)) else [self.encode(item, exchange) for item in items]

    def _box(self, name: str, value: Any, exchange: Exchange) -> Any:
        number = exchange.numbers.get(id(value))
        if number is not None:
            return ["again", number]
        exchange.add(value)
        arguments: tuple[Any, ...] = ()
        if name == "collections.deque":
            arguments = ((), value.maxlen)
        elif name == "collections.defaultdict":
            arguments = (value.default_factory,)
        return ["box", name, self._nodes(arguments, exchange), self._nodes(_contents(value), exchange)]

    def _class(self, kind: type) -> Any:
        if "_rlhf_index" in vars(kind):  # an exception of the other process
            return ["yours", vars(kind)["_rlhf_index"]]
        if issubclass(kind, BaseException):
            bases = [self._class(base) for base in kind.__bases__]
            return self._global(kind) or ["exception", self._index(kind), kind.__name__, bases]
        return self._global(kind) or self._mine(kind)

    def _global(self, value: Any) -> Any:
        """Return the node of a class or a function that both processes can import; None if it is none."""
        module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if type(module) is not str or type(path) is not str or module not in sys.modules or "<" in path:
            return None
        try:
            return ["global", module, path] if locate(module, path) is value else None
        except AttributeError:
            return None

    def _mine(self, value: Any) -> Any:
        claim = next((kind.__name__ for kind in type(value).__mro__ if CLAIMS.get(kind.__name__) is kind), "")
        return ["mine", self._index(value), claim]

    def _index(self, value: Any) -> int:
        index = self.indices.setdefault(id(value), len(self.objects))
        if index == len(self.objects):
            self.objects.append(value)
        return index

    # --- from nodes to values

    def decode(self, node: Any, exchange: Exchange) -> Any:
        """Return the value of a node."""
        if type(node) in ATOMS:
            return node
        tag, *parts = node
        return decoders[tag](self, exchange, *parts)

    def _values(self, nodes: list[Any], exchange: Exchange) -> list[Any]:
        return nodes if ATOMS.issuperset(map(type, nodes)) else [self.decode(node, exchange) for node in nodes]

    def _make_tuple(self, exchange: Exchange, nodes: list[Any]) -> Any:
        return tuple(self._values(nodes, exchange))

    def _make_bytes(self, exchange: Exchange, text: str) -> Any:
        return text.encode("latin-1")

    def _make_box(self, exchange: Exchange, name: str, arguments: list[Any], nodes: list[Any]) -> Any:
        box = _known(name, BOXES)(*self._values(arguments, exchange))
        exchange.add(box)
        _fill(box, self._values(nodes, exchange))
        return box

    def _find_box(self, exchange: Exchange, number: int) -> Any:
        return exchange.boxes[number]

    def _make_value(self, exchange: Exchange, name: str, nodes: list[Any]) -> Any:
        return _known(name, VALUES)(*self._values(nodes, exchange))

    def _make_view(self, exchange: Exchange, name: str, nodes: list[Any]) -> Any:
        return VIEWS[name](self._values(nodes, exchange))

    def _find_own(self, exchange: Exchange, index: int) -> Any:
        return self.objects[index]

    def _make_remote(self, exchange: Exchange, index: int, claim: str) -> Any:
        if index not in self.remotes:
            self.remotes[index] = RemoteObject(self, index, claim)
        return self.remotes[index]

    def _find_global(self, exchange: Exchange, module: str, path: str) -> Any:
        return locate(module, path)

    def _import_module(self, exchange: Exchange, name: str) -> Any:
        if not _is_of_python(name):
            raise ValueError(name)
        return __import__(name, fromlist=["*"])

    def _make_exception(self, exchange: Exchange, index: int, name: str, bases: list[Any]) -> Any:
        """Make a class that stands for an exception's class of the other process."""
        if index not in self.remotes:
            kinds = tuple(self._values(bases, exchange))
            self.remotes[index] = type(name, kinds, {"_rlhf_index": index, "__str__": _text_of})
        return self.remotes[index]

    def _make_error(self, exchange: Exchange, kind: Any, args: list[Any], text: str, attributes: Any) -> Any:
        made, given = self.decode(kind, exchange), self._values(args, exchange)
        if not issubclass(made, BaseException):
            raise TypeError(f"{made} is no exception")
        try:
            error = made(*given)
        except Exception:
            error = made.__new__(made, *given)
        error.__dict__.update(self.decode(attributes, exchange), _rlhf_text=text)
        return error


decoders: dict[str, Callable[..., Any]] = {
    "tuple": Peer._make_tuple,
    "bytes": Peer._make_bytes,
    "box": Peer._make_box,
    "again": Peer._find_box,
    "value": Peer._make_value,
    "view": Peer._make_view,
    "yours": Peer._find_own,
    "mine": Peer._make_remote,
    "global": lambda peer, *parts: peer._find_global(*parts),  # a subclass has its own
    "module": Peer._import_module,
    "exception": Peer._make_exception,
    "error": Peer._make_error,
}


def locate(module: str, path: str) -> Any:
    """Return a class or a function of a module."""
    value: Any = __import__(module, fromlist=["*"])
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _known(name: str, names: frozenset[str]) -> Any:
    """Return one of these types.

    Raises:
        ValueError: it is none of them.
    """
    if name not in names:
        raise ValueError(name)
    return locate(*name.rsplit(".", 1))


def _is_of_python(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _contents(box: Any) -> list[Any]:
    """Return the items of a value that can change; of a dictionary the pairs."""
    return list(box.items()) if isinstance(box, dict) else list(box)


def _parts(box: Any) -> list[Any]:
    return [*box, *box.values()] if isinstance(box, dict) else list(box)


def _are_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _fill(box: Any, items: list[Any]) -> None:
    """Give a value that can change these contents."""
    box.clear()
    if isinstance(box, dict):
        box.update(dict(items))
    elif isinstance(box, set):
        box.update(items)
    else:
        box.extend(items)


def _text_of(error: Any) -> str:
    return str(error.__dict__.get("_rlhf_text", BaseException.__str__(error)))

"""Streams, events and graphs of the pretend device: who has to wait for whom, and the replay of a recorded graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SEQUENCES = (list, tuple)  # not `list | tuple`, which would be made again in each of many thousand calls
ATOMS = (int, float, str, type(None), torch.dtype)
machines: list[Any] = []  # the pretend device in whose context we are, if any


def current() -> Any:
    """Return the device of the present context."""
    assert machines, "outside of `with PretendDevice()`"
    return machines[0]


Clock = dict[int, int]
"""For each stream (by number) the count of its operations that are known to be over."""


def merge(clock: Clock, other: Clock) -> None:
    """Advance `clock` by the knowledge of `other`."""
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


@dataclass(eq=False)
class Memory:
    """One allocation on the device: its last writer, and its readers since."""

    written: tuple[int, int] = (0, 0)  # stream, tick
    read: Clock = field(default_factory=dict)
    is_weight: bool = False


class Stream:
    """A queue of operations that run in order; two streams run beside each other unless one waits for the other."""

    def __init__(self, device: Any = None, number: int | None = None, **_: Any) -> None:
        self.machine = current()
        self.number = self.machine.new_stream() if number is None else number
        self.tick = 0
        self.known: Clock = {}
        self.device = torch.device("cuda:0")

    def clock(self) -> Clock:
        """Return the clock of the moment when everything launched here so far is over."""
        return {**self.known, self.number: self.tick}

    def wait_stream(self, other: Stream) -> None:
        """Make later launches here wait for the work that `other` has been given so far."""
        merge(self.known, other.clock())

    def wait_event(self, event: Event) -> None:
        """Make later launches here wait for an event."""
        merge(self.known, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event behind everything launched here."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self.machine.host_waits("stream.synchronize()", self.clock())


class Event:
    """A mark in a stream, which another stream or the host can wait for."""

    def __init__(self, **_: Any) -> None:
        self.machine = current()
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of the work that a stream has been given so far."""
        self.clock = (stream or self.machine.stream()).clock()

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for this event."""
        (stream or self.machine.stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the event: with later work queued behind it, the device goes on meanwhile."""
        self.machine.host_waits("event.synchronize()", self.clock)


class in_stream:
    """Launch on a stream inside the context, in this thread."""

    def __init__(self, stream: Stream | None) -> None:
        self.machine, self.stream = current(), stream

    def __enter__(self) -> None:
        self.before = self.machine.stream()
        if self.stream is not None:
            self.machine.local.stream = self.stream

    def __exit__(self, *_: object) -> None:
        self.machine.local.stream = self.before


@dataclass(eq=False)
class Node:
    """A recorded operation and the tensors that it reads and returns."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


class Recording:
    """The launches of a thread while it captures: none takes effect before the first replay."""

    def __init__(self, mode: str) -> None:
        self.thread, self.mode = threading.get_ident(), mode
        self.nodes: list[Node] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # by address: a written allocation, and its former bytes

    def add(
        self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Iterable[Tensor]
    ) -> Any:
        """Record an operation; run it too, since the next ones need the shapes of its results."""
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.before[storage.data_ptr()] = (whole, whole.clone())
        out = work(*args, **kwargs)
        self.nodes.append(Node(work, args, kwargs, tensors_in(out)))
        return out

    def finish(self) -> None:
        """Undo the writes, and fill the new allocations with NaN."""
        for whole, bytes_before in self.before.values():
            whole.copy_(bytes_before)
        for node in self.nodes:
            for tensor in node.outputs:
                if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in self.before:
                    tensor.fill_(float("nan"))

    def replay(self) -> None:
        """Run the recorded operations on the recorded tensors."""
        for node in self.nodes:
            for old, new in zip(node.outputs, tensors_in(node.work(*node.args, **node.kwargs)), strict=True):
                if old is not new:
                    old.copy_(new)


class _EitherGraph(type):
    """Lets `isinstance` take torch's own graph for the pretend one: an annotation is read inside the context or not."""

    def __instancecheck__(cls, thing: object) -> bool:
        return type.__instancecheck__(cls, thing) or isinstance(thing, CUDA_GRAPH)


CUDA_GRAPH = torch.cuda.CUDAGraph  # torch's own: this module is imported outside the context


class Graph(metaclass=_EitherGraph):
    """Stands in for torch.cuda.CUDAGraph, and says that it is one."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return CUDA_GRAPH

    def __init__(self, keep_graph: bool = False) -> None:
        self.recording: Recording | None = None

    def replay(self) -> None:
        """Launch the recorded operations once more."""
        if self.recording is None:
            raise RuntimeError("replay of a graph that was not captured")
        current().launch_graph(self.recording)

    def pool(self) -> tuple[int, int]:
        """Return a handle of the graph's memory."""
        return (0, id(self))

    def reset(self) -> None:
        """Forget the recording."""
        self.recording = None


class capture:
    """Record the launches inside the context; the device is drained first, as in torch."""

    def __init__(
        self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any
    ) -> None:
        self.graph, self.mode = graph, capture_error_mode

    def __enter__(self) -> None:
        current().begin_capture(Recording(self.mode))

    def __exit__(self, kind: object, *_: object) -> None:
        recording = current().end_capture()
        if kind is None:
            recording.finish()
            self.graph.recording = recording


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    tensors: list[Tensor] = []
    _collect(value, tensors)
    return tensors


def _collect(value: Any, tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, dict):
        _collect(list(value.values()), tensors)
    elif isinstance(value, SEQUENCES):
        for part in value:
            if not isinstance(part, ATOMS):
                _collect(part, tensors)

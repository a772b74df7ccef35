"""The process of a program, and the process that forks another for the tests of each program."""

from __future__ import annotations

import builtins
import io
import marshal
import os
import sys

from rlhf.verifiers.crossing.operations import ALL_OPERATIONS
from rlhf.verifiers.crossing.peer import Peer, locate
from rlhf.verifiers.crossing.remote import RemoteObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn

TESTS = "tests"  # the name of the module of the tests
READABLE = frozenset({"__name__", "__qualname__", "__doc__", "__module__"})  # what functools.wraps reads
ATTRIBUTES = frozenset({"__getattr__", "__setattr__", "__delattr__"})
DESCRIPTORS = 3  # of the socket to the program, of the pipe of the verdict, and of a file with the tests
SET_SECCOMP, FILTER = 22, 2  # of prctl
FOLDER = "/tmp"  # of the sandbox, empty and in memory


# --- the program -----------------------------------------------------------------------------------------------


class ProgramEnd(Peer):
    """The end in the program's process, which does all that the tests ask for."""

    def __init__(self, channel: int, space: dict[str, Any]) -> None:
        """Take the descriptor of the socket and the names of the program, and send what it prints to the tests."""
        super().__init__(channel, _json, marshal.loads)
        self.operations = {**ALL_OPERATIONS, "name": space.__getitem__, "set": space.__setitem__}
        self.output = io.BytesIO()
        sys.stdout = io.TextIOWrapper(self.output, encoding="utf-8", errors="replace", write_through=True)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(_Lines(self)), encoding="utf-8", errors="replace")

    def printed(self) -> str:
        """Return the text that the last question has printed."""
        text = self.output.getvalue().decode(errors="replace")
        self.output.seek(0)
        self.output.truncate()
        return text

    def _global(self, value: Any) -> Any:
        return super()._global(value) if isinstance(value, type) and value.__module__ == "builtins" else None


class _Lines(io.RawIOBase):
    """The standard input of a program: the tests' one, line by line."""

    def __init__(self, end: Peer) -> None:
        self.end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        line: bytes = self.end.ask("readline", len(buffer) // 4).encode(errors="replace")
        buffer[: len(line)] = line
        return len(line)


def _json(tree: Any) -> bytes:
    """Write a tree as JSON; to import the module json takes as long as the start of Python."""
    from _json import encode_basestring_ascii, make_encoder

    make: Any = make_encoder
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        parts = make(None, None, encode_basestring_ascii, None, ":", ",", False, False, True)(tree, 0)
    finally:
        sys.set_int_max_str_digits(digits)
    return "".join(parts).encode()


def run_program(channel: int, limits: Sequence[int], program: str) -> None:
    """Run a program, send its names, and do what the tests ask for."""
    _limit(limits)
    space: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), space)
        end = ProgramEnd(channel, space)
        end.send([name for name in space if type(name) is str and not name.startswith("__")])
        while True:
            end.serve(end.receive())
    finally:
        os._exit(1)


# --- the tests -------------------------------------------------------------------------------------------------


class TestsEnd(Peer):
    """The end in the tests' process: the program may use what the tests have passed to it."""

    def __init__(self, channel: int, space: TestsSpace) -> None:
        """Take the descriptor of the socket, and the names of the tests."""
        import json

        super().__init__(channel, marshal.dumps, json.loads)
        self.operations = {**ALL_OPERATIONS, "readline": lambda size: sys.stdin.readline(size)}
        self.space = space

    def prepare(self) -> None:
        """Give the program the names that the tests declare global and have assigned."""
        for name in self.space.shared.intersection(self.space):
            self.ask("set", name, self.space.pop(name))

    def permits(self, operation: str, node: Any, operands: Sequence[Any]) -> bool:
        """Return whether the program may do this; it reads no attributes of functions, modules, generators, frames."""
        if operation == "readline":
            return True
        if type(node) is not list or node[0] != "yours":
            return False
        if operation not in ATTRIBUTES or (operation == "__getattr__" and operands[1] in READABLE):
            return True
        value, name = operands[0], operands[1]
        owner = value if isinstance(value, type) else type(value)
        return type(name) is str and not name.startswith("_") and owner.__module__ == TESTS

    def _find_global(self, exchange: Any, module: str, path: str) -> Any:
        value = locate(module, path)
        if module != "builtins" or not isinstance(value, type):
            raise ValueError(f"{module}.{path}")
        return value


class TestsSpace(dict):  # type: ignore[type-arg]  # Any is not imported
    """The names of the tests; any other is the program's, which is asked for it."""

    def __init__(self, shared: Iterable[str]) -> None:
        """Take the names of the program that the tests declare global."""
        super().__init__(__name__=TESTS, __builtins__=builtins)
        self.shared = set(shared)
        self.names: set[str] = set()
        self.end: Peer | None = None

    def __missing__(self, name: str) -> Any:
        if self.end is not None and name in self.names | self.shared:
            value = self.end.ask("name", name)
            if type(value) is RemoteObject and value._rlhf_claim in ("function", "type") and name not in self.shared:
                self[name] = value  # it is asked for once
            return value
        if name == "type":
            return TypeOfRemotes
        raise KeyError(name)


class _Kind(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is RemoteObject:
            return args[0]._rlhf_peer.ask("type", args[0])
        return type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)


class TypeOfRemotes(metaclass=_Kind):
    """Stands for `type` in tests, so that type(x) of an object of the program is its class in the program."""


def run_tests(
    channel: int, limits: Sequence[int], definition: str, call: str, shared: Sequence[str], shadowing: Sequence[str]
) -> str:
    """Run tests of a program in another process; return what their call returns."""
    _limit(limits)
    sys.set_int_max_str_digits(0)
    space = TestsSpace(shared)
    space.end = end = TestsEnd(channel, space)
    space.names.update(set(end.receive()).difference(set(vars(builtins)).difference(shadowing)))
    exec(compile(definition, "tests.py", "exec", dont_inherit=True), space)
    return str(eval(call, space))


def serve_tests(control: int, limits: Sequence[int], filters: bytes) -> None:
    """Run tests, each in a process of its own, until the socket ends."""
    import json  # for the processes of the tests  # noqa: F401
    import signal
    import socket

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets a process that has ended
    refuse_processes, child = _filter(filters), 0
    with socket.socket(fileno=control) as requests:
        while descriptors := socket.recv_fds(requests, 1, DESCRIPTORS)[1]:
            if child:
                _end(child, signal.SIGKILL)
            _empty(FOLDER)
            child = os.fork()
            if child == 0:
                requests.close()
                refuse_processes()
                signal.alarm(limits[1])
                _write_verdict(limits, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _end(child: int, kill: int) -> None:
    """End a child, if it has not ended, and wait until it has."""
    try:
        os.kill(child, kill)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):  # the system has forgotten it
        pass


def _empty(folder: str) -> None:
    """Delete what the tests before have left in their folder."""
    import shutil

    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def _write_verdict(limits: Sequence[int], channel: int, verdict: int, file: int) -> NoReturn:
    try:
        with open(file, "rb") as tests:
            arguments = marshal.loads(tests.read())  # load reads byte by byte
        os.write(verdict, f"{run_tests(channel, limits, *arguments)}\n".encode())
    finally:
        os._exit(0)


# --- both ------------------------------------------------------------------------------------------------------


def _filter(filters: bytes) -> Callable[[], None]:
    """Return a function that sets a filter of system calls for the rest of this process's life."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))

    prctl, program = ctypes.CDLL(None).prctl, Program(len(filters) // 8, filters)

    def set_filter() -> None:
        if prctl(SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0) != 0:
            os._exit(1)

    return set_filter


def _limit(limits: Sequence[int]) -> None:
    """Limit this process to so many bytes of memory and seconds."""
    import resource

    for kind, limit in (
        (resource.RLIMIT_AS, limits[0]), (resource.RLIMIT_CPU, limits[1]), (resource.RLIMIT_FSIZE, 2**24),
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 64), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (limit, limit))
    del sys.modules["__main__"]

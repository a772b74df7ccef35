"""Two sandboxes for programs that nobody has read: monty, and Python in bubblewrap.

- monty (the package pydantic-monty) is a Python of its own without files, network or processes: about a millisecond a
  program, but it lacks much of the standard library and some of the language.
- bubblewrap (the program `bwrap`, Linux) gives CPython namespaces of its own: no network, no files but a small empty
  folder and the read-only library, and no new processes, which a filter of system calls refuses. Tens of milliseconds.

In both the tests come only after the program has run. In bubblewrap they run in another process than the program
(rlhf.verifiers.crossing): in one CPython nothing can be kept from a program, and it could write any verdict.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import marshal
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal["passed", "failed", "timeout", "unsupported"]
MIB = 2**20
MOST_ANSWER = 2**16  # bytes that are read of the answer of a program in bubblewrap


@dataclass(frozen=True)
class Tests:
    """Tests as a function whose name is secret: its definition, its call, and the secret that the call returns."""

    definition: str
    call: str
    secret: str
    shared: tuple[str, ...] = ()
    """The names of the program that the tests declare global."""
    shadowing: tuple[str, ...] = ()
    """The names of Python's own that mean the program's."""


@dataclass(frozen=True)
class Limits:
    """The limits of a program: seconds, and MiB of memory."""

    seconds: float
    memory_mb: int


# --- monty -----------------------------------------------------------------------------------------------------


class MontySandbox:
    """Runs programs in worker processes of monty."""

    def __init__(self, limits: Limits) -> None:
        import pydantic_monty

        self._monty = pydantic_monty
        # A worker that is deaf to its own limit, as while it prints, is killed; twice `run_s` stays below `timeout_s`.
        self._pool = pydantic_monty.Monty(request_timeout=limits.seconds + 0.5).__enter__()
        self._limits: Any = {
            "max_feed_duration_secs": limits.seconds,
            "max_memory": limits.memory_mb * MIB,
            "max_recursion_depth": 1000,
            "max_total_sleep_secs": limits.seconds,
        }

    def run(self, program: str, tests: Tests) -> State:
        """Run a program and its tests; unsupported if monty lacks something that Python has."""
        try:
            with self._pool.checkout(limits=self._limits) as session:
                session.feed_run(program, print_callback=_ignore)
                result = session.feed_run(f"{tests.definition}\n{tests.call}", print_callback=_ignore)
        except self._monty.MontyError as error:
            return _state_of(str(error), program)
        return "passed" if result == tests.secret else "failed"


def has_monty() -> bool:
    """Check whether monty is installed."""
    return importlib.util.find_spec("pydantic_monty") is not None


def _ignore(*_: object) -> None:
    pass


def _state_of(message: str, program: str) -> State:
    """Tell from an error of monty whether the program is wrong, or monty lacks something."""
    kind, _, rest = message.partition(":")
    if (kind == "TimeoutError" and "time limit" in rest) or "exceeding request timeout" in message:
        return "timeout"
    if kind in ("ModuleNotFoundError", "ImportError", "NotImplementedError") or "has no attribute" in rest:
        return "unsupported"
    if kind == "NameError" and rest.count("'") >= 2 and hasattr(builtins, rest.split("'")[1]):
        return "unsupported"
    known_error = isinstance(getattr(builtins, kind, None), type) and issubclass(getattr(builtins, kind), Exception)
    return "unsupported" if not known_error and _parses(program) else "failed"


def _parses(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# --- bubblewrap ------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).parent / "crossing"
FILES = ("operations", "remote", "peer", "processes")  # each imports those before it
START = """
import marshal, sys
codes, function, arguments = marshal.loads(open(int(sys.argv[1]), "rb").read())
for name, code in codes:
    module = sys.modules[name] = type(sys)(name)
    exec(code, vars(module))
getattr(module, function)(*arguments)
"""


class BubblewrapSandbox:
    """Runs each program in a sandbox of its own, and its tests in another, which forks a process for each program."""

    def __init__(self, limits: Limits) -> None:
        self.seconds = limits.seconds
        self.limits = (limits.memory_mb * MIB, int(limits.seconds) + 1)
        self.filter = no_new_processes(platform.machine())
        self.codes = [(f"rlhf.verifiers.crossing.{name}", _compiled(FOLDER / f"{name}.py")) for name in FILES]
        self._begin_tests()

    def run(self, program: str, tests: Tests) -> State:
        """Run a program and its tests; the tests' process writes the verdict, and the program's cannot."""
        deadline = time.monotonic() + self.seconds
        of_program, of_tests = socket.socketpair()
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb"), of_tests, os.fdopen(writing, "wb") as verdict:
            process = self._start(of_program, "run_program", program, forks=False)
            try:
                self._test([of_tests.fileno(), writing], tests)
                of_tests.close()
                verdict.close()
                if _line(reading, deadline) == tests.secret:
                    return "passed"
                return "timeout" if time.monotonic() >= deadline else "failed"
            finally:
                _end(process)

    def _test(self, descriptors: list[int], tests: Tests) -> None:
        """Send tests to their sandbox, with the descriptors of the socket to the program and of the verdict."""
        if self._tests.poll() is not None:  # it was killed
            self._stop_tests()
            self._begin_tests()
        with _file(marshal.dumps((tests.definition, tests.call, tests.shared, tests.shadowing))) as file:
            socket.send_fds(self._control, [b"."], [*descriptors, file])

    def _begin_tests(self) -> None:
        self._control, control = socket.socketpair()
        self._tests = self._start(control, "serve_tests", self.filter, forks=True)
        self._stop_tests = weakref.finalize(self, _end, self._tests, self._control)

    def _start(self, channel: socket.socket, function: str, argument: Any, *, forks: bool) -> subprocess.Popen[bytes]:
        """Start a function of crossing.py in a sandbox, with this end of a socket, which it alone has afterwards."""
        message = marshal.dumps((self.codes, function, (channel.fileno(), self.limits, argument)))
        with channel, _file(message) as message_file, _file(self.filter) as filter_file:
            return subprocess.Popen(
                [*_arguments(None if forks else filter_file), "-c", START, str(message_file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(channel.fileno(), message_file, filter_file),
                env={},
            )


def _end(process: subprocess.Popen[bytes], control: socket.socket | None = None) -> None:
    """Kill bwrap, and before it its child, with which all that is in its namespaces ends.

    A child that has just begun waits for bwrap and does not notice its end.
    """
    if process.poll() is None:  # else its number may be another's
        with contextlib.suppress(OSError):  # the child has ended
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
    process.kill()
    process.wait()
    if control is not None:
        control.close()


def _compiled(path: Path) -> CodeType:
    return compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[int]:
    """Return the descriptor of a file in memory, to be read from its start."""
    descriptor = os.memfd_create("sandbox")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def why_no_bubblewrap() -> str | None:
    """Return why bubblewrap cannot be used here; None if it can."""
    if sys.platform != "linux":
        return "bubblewrap needs Linux"
    if shutil.which("bwrap") is None:
        return "there is no program bwrap: install the package bubblewrap of your system"
    if platform.machine() not in ARCHITECTURES:
        return f"there is no filter of system calls for {platform.machine()}"
    probe = BubblewrapSandbox(Limits(20.0, 512))
    state = probe.run("x = 1", Tests("def check(): return 'secret' * x", "check()", "secret"))
    return None if state == "passed" else "bwrap does not work here: user namespaces may be forbidden"


def _arguments(filter_file: int | None) -> list[str]:
    program = shutil.which("bwrap")
    assert program is not None
    python = os.path.realpath(sys.executable)
    readable = [path for path in ("/usr", "/lib", "/lib64", "/lib32", sys.base_prefix) if os.path.exists(path)]
    mounts = [word for path in readable for word in ("--ro-bind", path, path)]
    refused = [] if filter_file is None else ["--seccomp", str(filter_file)]
    return [
        program, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
        *mounts, "--proc", "/proc", "--dev", "/dev", "--size", str(32 * MIB), "--tmpfs", "/tmp", "--chdir", "/tmp",
        *refused, python, "-I", "-S",
    ]  # fmt: skip


def _line(descriptor: int, deadline: float) -> str | None:
    """Read a line of an answer; None if there is none in time, or it is too long."""
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(data) > MOST_ANSWER or not select.select([descriptor], [], [], left)[0]:
            return None
        read = os.read(descriptor, 1 if len(data) < 256 else MOST_ANSWER)
        if not read:
            return None
        data += read
    return data.decode(errors="replace").strip()


# --- the filter of system calls --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """The numbers of system calls on a kind of machine."""

    audit: int
    clone: int
    clone3: int
    denied: Sequence[int]


# fork, vfork, execveat, ptrace, unshare, setns, mount, bpf, keyctl, perf_event_open, userfaultfd, io_uring_setup, as
# far as the kind of machine has them
ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, 56, 435, (57, 58, 322, 101, 272, 308, 165, 321, 250, 298, 323, 425)),
    "aarch64": Architecture(0xC00000B7, 220, 435, (281, 117, 97, 268, 40, 280, 219, 241, 282, 425)),
}
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE, MISSING = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026  # EPERM is 1, ENOSYS 38
OTHER_ABI = 0x40000000  # calls of x32 on x86_64
CLONE_THREAD = 0x10000
NUMBER, AUDIT, FIRST_ARGUMENT = 0, 4, 16  # where the kernel puts them


def no_new_processes(machine: str) -> bytes:
    """Return a filter in bubblewrap's format that allows threads and refuses processes and calls that undo the rest.

    Raises:
        KeyError: the numbers of the system calls of this kind of machine are not known.
    """
    kind = ARCHITECTURES[machine]
    denied = kind.denied
    end = 4 + len(denied) + 3
    refuse, missing, kill, clone = end, end + 1, end + 2, end + 3
    lines: list[tuple[int, int, int, int]] = []

    def jump(code: int, value: int, yes: int | None, no: int | None) -> None:
        here = len(lines) + 1
        lines.append((code, 0 if yes is None else yes - here, 0 if no is None else no - here, value))

    lines.append((LOAD, 0, 0, AUDIT))
    jump(EQUAL, kind.audit, None, kill)
    lines.append((LOAD, 0, 0, NUMBER))
    jump(AT_LEAST, OTHER_ABI, refuse, None)
    for number in denied:
        jump(EQUAL, number, refuse, None)
    jump(EQUAL, kind.clone3, missing, None)
    jump(EQUAL, kind.clone, clone, None)
    lines.append((RETURN, 0, 0, ALLOW))
    assert len(lines) == end
    for action in (REFUSE, MISSING, KILL):
        lines.append((RETURN, 0, 0, action))
    lines.append((LOAD, 0, 0, FIRST_ARGUMENT))
    jump(ANY_BIT, CLONE_THREAD, None, len(lines) + 2)
    lines.append((RETURN, 0, 0, ALLOW))
    lines.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("<HBBI", code, yes, no, value) for code, yes, no, value in lines)

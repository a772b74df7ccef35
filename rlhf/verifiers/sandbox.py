"""Two sandboxes for programs that nobody has read: monty, and Python in bubblewrap.

- monty (the package pydantic-monty) is a Python of its own without files, network or processes: about a millisecond a
  program, but it lacks much of the standard library and some of the language.
- bubblewrap (the program `bwrap`, Linux) gives CPython namespaces of its own: no network, no files but a small empty
  folder and the read-only library, and no new processes, which a filter of system calls refuses. Tens of milliseconds.

In both the tests come only after the program has run, so that it cannot read the word by which they tell success.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import os
import platform
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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

# The program never sees the descriptors through which the tests come and the result goes: they are no variables of
# its module, and its standard streams are empty. Names used after it has run are bound before.
DRIVER = """
import os, resource, sys
def main(memory, seconds):
    for what, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 2**24),
                        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 64), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (limit, limit))
    read, write, leave, run, make, join, number = os.read, os.write, os._exit, exec, compile, b"".join, int.from_bytes
    source, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    def receive(size):
        parts = []
        while size:
            parts.append(read(source, min(size, 65536)))
            if not parts[-1]:
                leave(1)
            size -= len(parts[-1])
        return join(parts)
    def text():
        return receive(number(receive(8), "big")).decode()
    space = {"__name__": "program", "__builtins__": __builtins__}
    del sys.modules["__main__"]
    run(make(text(), "program.py", "exec"), space)
    write(answers, b"ran\\n")
    name = text()
    run(make(text(), "tests.py", "exec"), space)
    write(answers, space[name].encode() + b"\\n")
    leave(0)
main(%d, %d)
"""


class BubblewrapSandbox:
    """Runs each program in a CPython of its own, in namespaces of its own."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.filter = no_new_processes(platform.machine())

    def run(self, program: str, tests: Tests) -> State:
        """Run a program and its tests."""
        deadline = time.monotonic() + self.limits.seconds
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                _send(process.stdin, program)
                if _line(process.stdout.fileno(), deadline) == "ran":
                    _send(process.stdin, tests.secret)
                    _send(process.stdin, f"{tests.definition}\n{tests.secret} = {tests.call}")
                    if _line(process.stdout.fileno(), deadline) == tests.secret:
                        return "passed"
            return "timeout" if time.monotonic() >= deadline else "failed"
        finally:
            process.kill()  # with bwrap all that is in its namespace ends
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = os.memfd_create("filter")
        try:
            os.write(descriptor, self.filter)
            os.lseek(descriptor, 0, os.SEEK_SET)
            return subprocess.Popen(
                [*_arguments(descriptor), "-c", DRIVER % (self.limits.memory_mb * MIB, int(self.limits.seconds) + 1)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                env={},
            )
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


def _arguments(filter_descriptor: int) -> list[str]:
    program = shutil.which("bwrap")
    assert program is not None
    python = os.path.realpath(sys.executable)
    readable = [path for path in ("/usr", "/lib", "/lib64", "/lib32", sys.base_prefix) if os.path.exists(path)]
    mounts = [word for path in readable for word in ("--ro-bind", path, path)]
    return [
        program, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
        *mounts, "--proc", "/proc", "--dev", "/dev", "--size", str(32 * MIB), "--tmpfs", "/tmp", "--chdir", "/tmp",
        "--seccomp", str(filter_descriptor), python, "-I", "-S",
    ]  # fmt: skip


def _send(stream: Any, text: str) -> None:
    data = text.encode(errors="replace")
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


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

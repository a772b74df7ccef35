"""What crosses between a program and its tests in bubblewrap, and what a program cannot pretend."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sandboxes import RIGHT, bubblewrap_or_skip

from rlhf.verifiers.code import make_tests
from rlhf.verifiers.sandbox import FILES, FOLDER, BubblewrapSandbox, Limits, _end, why_no_bubblewrap


@pytest.fixture(scope="module")
def sandbox() -> BubblewrapSandbox:
    bubblewrap_or_skip()
    return BubblewrapSandbox(Limits(5.0, 512))


def cases() -> dict[str, tuple[str, str]]:
    """The programs and their tests in crossings.txt, by name."""
    blocks = Path(__file__).with_name("crossings.txt").read_text(encoding="utf-8").removeprefix("# ").split("\n\n# ")
    named = (block.partition("\n")[::2] for block in blocks)
    return {name: (program, tests) for name, text in named for program, _, tests in [text.partition("---\n")]}


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_tests_use_a_program_of_another_process_as_their_own(sandbox: BubblewrapSandbox, name: str) -> None:
    program, tests = CASES[name]
    assert sandbox.run(program, make_tests(tests, None)) == "passed"


LIAR = """
class L:
    __class__ = property(lambda self: int)
    def __eq__(self, other): return True
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = __eq__
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __abs__(self): return 0
    def __hash__(self): return 2
    def __float__(self): return 0.0
    def __iter__(self): return iter([L()])
    def __len__(self): return 1
    def __getattr__(self, name): return L()
    def __call__(self, *args): return L()
    def __round__(self, digits=0): return L()
def f(*args): return L()
all = any = abs = isinstance = sorted = round = lambda *args, **kwargs: True
"""


IMPORTS = "import math\nfrom decimal import Decimal\nfrom fractions import Fraction\n"


@pytest.mark.parametrize(
    "check",
    [
        "f(1) == 2", "2 == f(1)", "not f(1) != 2", "f(1) in (2,)", "f(1) in {2}", "f(1) >= 2", "3 > f(1) > 1",
        "[f(1)] == [2]", "f(1) == [2]", "list(f(1)) == [2]", "set(f(1)) == {2}", "{1: f(1)} == {1: 2}", "f(1) == 'a'",
        "abs(f(1) - 2) < 1e-6", "abs(2 - f(1)) < 1e-6",
        "abs(f(1) - Fraction(1, 2)) < 1", "abs(Decimal('2') - f(1)) < 1",
        "math.isclose(f(1), 2)", "round(f(1)) == 2", "f(1) == None",
        "isinstance(f(1), int)", "type(f(1)) is int", "all(f(x) == 2 for x in [1])", "sorted([f(1), 3]) == [2, 3]",
        "f(1) == Own()", "Own() == f(1)", "f(1) is True", "str(f(1)) == '2'",
    ],
)  # fmt: skip
def test_an_object_that_equals_everything_passes_no_test(sandbox: BubblewrapSandbox, check: str) -> None:
    own = "class Own:\n    def __eq__(self, other): return other is self\n"
    assert sandbox.run(LIAR, make_tests(f"{IMPORTS}{own}assert {check}", None)) == "failed"


PRETENDER = """
import json, marshal, os, socket
for descriptor in range(3, 64):
    try:
        socket.socket(fileno=os.dup(descriptor)).getpeername()
        break
    except OSError:
        pass
def send(message):
    data = json.dumps(message).encode()
    os.write(descriptor, len(data).to_bytes(8, "big") + data)
def read(size):
    parts = b""
    while len(parts) < size:
        parts += os.read(descriptor, size - len(parts)) or os._exit(1)
    return parts
def receive():
    return marshal.loads(read(int.from_bytes(read(8), "big")))
def answer(node, kind="answer"):
    send(["f", "check", "__builtins__", "AssertionError", "isinstance"])
    while True:
        question = receive()
        assert "secret" not in str(question) and "assert" not in str(question)
        send([kind, node, [], ""])
"""
ERROR = '["error", ["global", "builtins", "%s"], [0], "", ["box", "builtins.dict", [], []]]'
PRETENCES = {
    "true": "answer(True)",
    "an object that is an int": "answer(['mine', 0, 'int'])",
    "a function of Python": "answer(['global', 'builtins', 'eval'])",
    "a function of the system": "answer(['global', 'os', '_exit'])",
    "a module": "answer(['module', 'os'])",
    "a class below int": "answer(['exception', 5, 'X', [['global', 'builtins', 'int']]])",
    "an object of the tests": "answer(['yours', -1])",
    "an error that is none": f"answer({ERROR % 'int'}, 'raise')",
    "an exit": f"answer({ERROR % 'SystemExit'}, 'raise')",
    "the end of an iteration": f"answer({ERROR % 'StopIteration'}, 'raise')",
    "questions": (
        "send(['f'])\nreceive()\nfor name in ('__call__', '__getattr__', 'name', 'set', 'plain', 'type', 'nothing'):\n"
        "    for i in range(-2, 3): send(['ask', name, [['yours', i], '__globals__', ['tuple', []]]])\nanswer(True)"
    ),
    "a question without operands": "send(['f'])\nsend(['ask', 'plain', []])\nanswer(True)",
    "no message": "send(3)",
    "a message without end": (
        "os.write(descriptor, (2**60).to_bytes(8, 'big'))\nwhile True: os.write(descriptor, b'x' * 9999)"
    ),
    "deep brackets": "data = b'[' * 10**6\nos.write(descriptor, len(data).to_bytes(8, 'big') + data)",
    "the end": "os.close(descriptor)",
}


@pytest.mark.parametrize("name", PRETENCES)
def test_a_program_that_speaks_for_itself_passes_no_test(sandbox: BubblewrapSandbox, name: str) -> None:
    """It has the socket to its tests, and can send what it likes: also then it has to know the right values."""
    made = make_tests("try:\n    right = f(1) == 2\nexcept Exception:\n    right = False\nassert right", None)
    assert sandbox.run(PRETENDER + PRETENCES[name], made) == "failed"


def test_a_program_reads_of_the_tests_what_they_pass_to_it(sandbox: BubblewrapSandbox) -> None:
    tests = "class Own:\n    value, _hidden = 3, 4\n    def method(self): return 5\n"
    tests += "assert f(Own()) == [3, 5] and f(Own) == [3, 5]\ndef function(): pass\nassert f(function) == []\n"
    tests += "assert f(x for x in [1]) == []"
    program = "def f(x):\n    x = x() if isinstance(x, type) else x\n    seen = []\n"
    program += "    for name in ('value', '_hidden', '__globals__', 'gi_frame', '__dict__', '__code__'):\n"
    program += "        try: seen.append(getattr(x, name))\n        except AttributeError: pass\n"
    program += "    return seen + [x.method()] if seen else seen"
    assert sandbox.run(program, make_tests(tests, None)) == "passed"


def test_tests_have_no_new_processes_and_no_network(sandbox: BubblewrapSandbox) -> None:
    tests = "import os, socket\nfor call in (os.fork, lambda: socket.create_connection(('127.0.0.1', 1))):\n"
    tests += "    try:\n        call()\n        assert False\n    except OSError:\n        pass\nassert f(1) == 2"
    assert sandbox.run(RIGHT, make_tests(tests, None)) == "passed"
    assert sandbox.run(RIGHT, make_tests("assert open('/etc/passwd').read() and f(1) == 2", None)) == "failed"


def test_tests_do_not_outlive_their_limits(sandbox: BubblewrapSandbox) -> None:
    short = BubblewrapSandbox(Limits(0.5, 256))
    for tests in ("while f(1) == 2: pass\nassert True", "import time\ntime.sleep(99)\nassert f(1) == 2"):
        assert short.run(RIGHT, make_tests(tests, None)) == "timeout"
    assert short.run(RIGHT, make_tests("assert 'x' * 10**9 and f(1) == 2", None)) == "failed"
    assert short.run(RIGHT, make_tests("assert f(1) == 2", None)) == "passed"


def test_the_sandbox_of_the_tests_is_started_again(sandbox: BubblewrapSandbox) -> None:
    made = make_tests("assert f(1) == 2", None)
    assert sandbox.run(RIGHT, made) == "passed"
    sandbox._tests.kill()
    sandbox._tests.wait()
    assert sandbox.run(RIGHT, made) == "passed"


def test_a_sandbox_that_is_ended_while_it_starts_leaves_no_process(sandbox: BubblewrapSandbox) -> None:
    """Also not the child of bwrap that waits for its parent, whose end it does not notice yet."""
    children: list[psutil.Process] = []
    for number in range(60):
        channel, own = socket.socketpair()
        process = sandbox._start(channel, "run_program", "import time\ntime.sleep(60)", forks=False)
        time.sleep(number / 2000)
        children += psutil.Process(process.pid).children(recursive=True)
        _end(process)
        own.close()
    assert children
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.parametrize("wait", [0.0, 0.5])
def test_a_bwrap_that_does_not_work_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: float) -> None:
    """As where user namespaces are forbidden, whenever it ends."""
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\nsleep {wait}\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(tmp_path / "bwrap"))
    assert why_no_bubblewrap() == "bwrap does not work here: user namespaces may be forbidden"


def test_the_sandbox_gets_every_file_of_the_folder() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*FILES, "__init__"}


def test_a_new_process_imports_little() -> None:
    """The module typing takes as long as the start of Python."""
    program = (
        f"import sys\nfor name in {FILES!r}:\n    full = 'rlhf.verifiers.crossing.' + name\n"
        f"    module = sys.modules[full] = type(sys)(full)\n"
        f"    exec(open({str(FOLDER)!r} + f'/{{name}}.py').read(), vars(module))\n"
        "print({'typing', 'json', 're', 'collections'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_name_of_an_import_star_is_the_modules_unless_the_program_is_asked_for_it(sandbox: BubblewrapSandbox) -> None:
    """A program that defines a checker of the tests does not replace it."""
    checked = "from math import *\nassert isclose(f(2), 1.41, rel_tol=0.1)"
    liar = "def f(x): return 0.0\ndef isclose(*args, **kwargs): return True"
    assert sandbox.run(liar, make_tests(checked, None)) == "failed"
    assert sandbox.run(liar, make_tests(checked, "f")) == "failed"
    assert sandbox.run("def f(x): return 1.41", make_tests(checked, None)) == "passed"
    own = "def gcd(a, b): return 7"
    assert sandbox.run(own, make_tests("from math import *\nassert gcd(2, 3) == 7", None)) == "passed"
    assert sandbox.run(own, make_tests("from math import *\nassert gcd(2, 3) == 7 and g", "gcd")) == "failed"


def test_tests_find_an_empty_folder(sandbox: BubblewrapSandbox) -> None:
    checked = (
        "import os\nassert os.listdir('/tmp') == []\nos.makedirs('/tmp/a/b')\nopen('/tmp/c', 'w').write('x' * 2 ** 23)"
    )
    made = make_tests(f"{checked}\nassert f() == 1", None)
    assert [sandbox.run("def f(): return 1", made) for _ in range(4)] == ["passed"] * 4


def test_an_object_has_one_plain_value(sandbox: BubblewrapSandbox) -> None:
    """Also if the program replaces the function that gives it."""
    program = """
import gc
class Values(tuple):
    pass
numbers = iter(range(1000))
for found in gc.get_objects():
    if type(found) is dict and "plain" in found and "type" in found and callable(found["plain"]):
        found["plain"] = lambda value: next(numbers)
def f(x): return Values((x,))
"""
    made = make_tests("value = f(1)\nassert [value == number for number in range(3)] == [True] * 3", None)
    assert sandbox.run(program, made) == "failed"

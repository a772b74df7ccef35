"""Programs in the two sandboxes: right ones pass, wrong ones fail, and none gets out."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from extras import import_extra
from sandboxes import ESCAPES, RIGHT, bubblewrap_or_skip

from rlhf.config.load import validate
from rlhf.errors import ConfigError
from rlhf.verifiers import code
from rlhf.verifiers.code import CodeGrader, extract_program, make_tests
from rlhf.verifiers.sandbox import BubblewrapSandbox, Limits, MontySandbox, _state_of, no_new_processes

TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
LIMITS = Limits(1.0, 256)
ROOT = Path(__file__).resolve().parents[2]


def box(kind: str) -> Any:
    if kind == "bubblewrap":
        bubblewrap_or_skip()
        return BubblewrapSandbox(LIMITS)
    import_extra("pydantic_monty")
    return MontySandbox(LIMITS)


BOXES = pytest.mark.parametrize("kind", ["monty", "bubblewrap"])


@BOXES
def test_right_programs_pass_and_wrong_ones_fail(kind: str) -> None:
    sandbox = box(kind)
    assert sandbox.run(RIGHT, make_tests(TESTS, None)) == "passed"
    assert sandbox.run("print('f' * 10**6)\n" + RIGHT, make_tests(TESTS, None)) == "passed"
    for wrong in ("def f(x):\n    return None", "def f(x):\n    return 2", "f = 3", "", "x ==== 1", "def f(x): pass"):
        assert sandbox.run(wrong, make_tests(TESTS, None)) == "failed", wrong
    assert sandbox.run("def f(x):\n    while True: pass", make_tests(TESTS, None)) == "timeout"


@BOXES
@pytest.mark.parametrize("name", ESCAPES)
def test_a_program_does_not_get_out(kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = box(kind)
    monkeypatch.setenv("RLHF_SECRET", "secret")
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {
            "PORT": str(server.getsockname()[1]),
            "SECRET": str(tmp_path / "secret"),
            "TARGET": str(tmp_path / "out"),
            "FOLDER": str(tmp_path),
            "PARENT": str(os.getpid()),
        }
        program = ESCAPES[name]
        for place, value in places.items():
            program = program.replace(place, value)
        assert sandbox.run(RIGHT, make_tests(TESTS, None)) == "passed"
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        state = sandbox.run(f"{program}\n{RIGHT}", make_tests(TESTS, None))
        assert state != "passed"
        assert state in (("timeout", "failed") if kind == "bubblewrap" else ("timeout", "failed", "unsupported"))
        server.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (tmp_path / "secret").read_text() == "secret"
    assert not (tmp_path / "out").exists()
    assert not Path("/tmp/big").exists()
    assert not Path(os.__file__).read_text().endswith("#")
    if kind == "bubblewrap":
        patience = time.monotonic() + 10
        while not {child.pid for child in psutil.Process().children(recursive=True)} <= before:
            assert time.monotonic() < patience, "a process of the program, or of its tests, is still there"
            time.sleep(0.05)


def test_a_program_cannot_read_the_secret_of_the_tests() -> None:
    sandbox = box("bubblewrap")
    look = (
        "def look():\n    import gc, sys\n    frames = [frame.f_locals for frame in sys._current_frames().values()]\n"
    )
    look += "    assert not any('_'.join(['secret', '']) in str(x) for x in [*gc.get_objects(), *frames])\n"
    assert sandbox.run(f"{look}look()\n{RIGHT}", make_tests(TESTS, None)) == "passed"
    assert sandbox.run(f"{look}def f(x):\n    look()\n    return x + 1", make_tests(TESTS, None)) == "passed"
    close = "    try:\n        os.close(fd)\n    except OSError:\n        pass\n"
    peek = f"import os\nfor fd in range(3, 64):\n{close}{RIGHT}"
    assert sandbox.run(peek, make_tests(TESTS, None)) == "failed"  # without the way back there is no success


@pytest.mark.parametrize(
    ("tests", "entry", "names"),
    [
        ("assert sum(1, 2) == 3", None, ("sum",)),
        ("assert all(f(x) == 2 for x in [1])", None, ()),
        ("import math\nassert math.isclose(f(1), abs(2))", None, ()),
        ("xs = [1]\ndef own(a): return len(a)\nfor x in xs: assert max(x, own(xs)) == 1", None, ("len", "max")),
        ("def check(candidate):\n    assert abs(candidate(1)) == 2", "sum", ("sum",)),
        ("def check(candidate):\n    assert abs(candidate(1)) == 2", "f", ("f",)),
    ],
)
def test_which_names_of_pythons_own_are_the_programs(tests: str, entry: str | None, names: tuple[str, ...]) -> None:
    assert make_tests(tests, entry).shadowing == names


@BOXES
def test_made_programs_by_the_grader(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    box(kind)
    grader = validate(CodeGrader, {"type": "code", "sandbox": kind, "entry_point": "entry", "prefix": "prompt"})
    grade = grader.start()
    row = {
        "prompt": 'def plus(x: int) -> int:\n    """Add one.\n\n    >>> plus(1)\n    2\n    """\n',
        "entry": "plus",
        "tests": "def check(candidate):\n    text = '''\na'''\n    assert candidate(1) == len(text)\n",
        "solution": "def plus(x):\n    return x + 1",
    }
    assert grade("    return x + 1\n", row) == {"code": 1, "timed_out": 0, "unsupported": 0}
    assert grade(grader.reference(row) or "", row) == {"code": 1, "timed_out": 0, "unsupported": 0}
    assert grade("Sure:\n```python\ndef plus(x):\n    return 3\n```\n", row) == {
        "code": 0, "timed_out": 0, "unsupported": 0,
    }  # fmt: skip
    assert grade("", {}) is None


def test_what_monty_lacks_goes_to_bubblewrap_or_is_counted() -> None:
    import_extra("pydantic_monty")
    program, row = "import string\ndef f(x):\n    return x + 1", {"tests": TESTS}
    alone = validate(CodeGrader, {"type": "code", "sandbox": "monty"}).start()
    assert alone(program, row) == {"code": 0, "timed_out": 0, "unsupported": 1}
    bubblewrap_or_skip()
    assert validate(CodeGrader, {"type": "code"}).start()(program, row) == {"code": 1, "timed_out": 0, "unsupported": 0}


class Slow:
    """A sandbox in which everything takes too long."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def run(self, program: str, tests: Any) -> str:
        return "timeout"


def test_what_monty_is_too_slow_for_goes_to_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap_or_skip()
    monkeypatch.setattr(code, "has_monty", lambda: True)
    monkeypatch.setattr(code, "MontySandbox", Slow)
    grade = validate(CodeGrader, {"type": "code"}).start()
    assert grade(RIGHT, {"tests": TESTS}) == {"code": 1, "timed_out": 0, "unsupported": 0}


def test_without_a_sandbox_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "has_monty", lambda: False)
    monkeypatch.setattr(code, "why_no_bubblewrap", lambda: "there is no program bwrap")
    grader = validate(CodeGrader, {"type": "code"})
    for start in (grader.check, grader.start):
        with pytest.raises(ConfigError, match=r"there is no sandbox.*monty is not installed.*no program bwrap"):
            start()


@pytest.mark.parametrize(
    "completion, program",
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("First\n```py\nx = 1\n```\nbetter:\n```\nx = 2\n```\ndone", "x = 2\n"),
        ("```python\nx = 1\n", "x = 1\n"),
        ("```bash\npip install x\n```\nThen:\n```python\nx = 1\n```\n", "x = 1\n"),
        ("```python\nx = 1\n```\nOutput:\n```text\n2\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\n```bash\npython x.py\n```", "x = 1\n"),
        ("```Python\nx = 1\n```", "x = 1\n"),
        ('```python title="a.py"\nx = 1\n```', "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("~~~py\nx = 1\n```\n~~~", "x = 1\n```\n"),
        ("```py\nx = 1\n```\nNotes\n~~~~~\nIt is one.", "x = 1\n"),  # a heading
        ("Notes\n~~~\nIt is one.\n~~~\n", "Notes\n~~~\nIt is one.\n~~~\n"),
        ("Code\n~~~~\n```py\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```. It is one.", "x = 1\n"),
        ("```py\nx = 1\n```This works.\n", "x = 1\n"),
        ("```py\nx = 1\n```<|im_end|>", "x = 1\n"),
        ("````py\nx = 1\n```. Not yet.\n````. Done.", "x = 1\n```. Not yet.\n"),
        ('```py\nx = """\n```json\n"""\n```', 'x = """\n```json\n"""\n'),  # it opens a block
        ("````python\nx = 1\n```\n````", "x = 1\n```\n"),
        ("```python\nx = 1\n`````", "x = 1\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\n"),
        ("1. Code:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ("```python\n    return 1\n```", "    return 1\n"),
        ("\t```py\n\tx = 1\ny = 2\n\t```", "x = 1\ny = 2\n"),
        ("```python\nx = 1\n```\nDone.\n```\n", "x = 1\n"),  # an empty block at the end
        ("Use ```x = 2``` here\n```py\nx = 1\n```", "x = 1\n"),  # code in a line is no block
        ("```c\nint x;\n```", "```c\nint x;\n```"),
    ],
)
def test_the_program_of_a_completion(completion: str, program: str) -> None:
    assert extract_program(completion) == program


def test_tests_that_test_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no assert: every program would pass"):
        make_tests("print(f(1))", None)
    with pytest.raises(ValueError, match="no Python code"):
        make_tests("assert f(1) = 2", None)
    first, second = make_tests(TESTS, None), make_tests(TESTS, None)
    assert first.secret != second.secret
    assert first.definition.count("assert") == 2


CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


@pytest.mark.parametrize(
    "tests",
    [
        CHECK,
        "def helper():\n    assert f(1) == 2\ndef check(c):\n    helper()\n",
        "class T:\n    def test(self):\n        assert f(1) == 2\n",
        "import pytest\n@pytest.mark.parametrize('n', [1])\ndef test_f(n):\n    assert f(n) == 2\n",
        "def unused():\n    @run\n    def tests():\n        assert f(1) == 2\n",
        "def test_f(value):\n    assert f(value) == 2\n",  # what would its argument be?
    ],
)
def test_asserts_that_nothing_calls_are_refused(tests: str) -> None:
    with pytest.raises(
        ValueError, match=r"only in functions that nothing calls .*: every program would pass.*entry_point"
    ):
        make_tests(tests, None)


@pytest.mark.parametrize(
    "tests",
    [
        f"{CHECK}check(f)",
        "def helper():\n    assert f(1) == 2\ndef check():\n    helper()\ncheck()",
        "class T:\n    def test(self):\n        assert f(1) == 2\nT().test()",
        "import random\ndef test(n):\n    assert f(n) == n + 1\nfor n in range(3):\n    test(n)",
        "for n in range(3):\n    if n:\n        assert f(n) == n + 1",
        f"{CHECK}list(map(check, [f]))",
        "def run(test):\n    test()\n@run\ndef tests():\n    assert f(1) == 2",
    ],
)
def test_asserts_that_are_called_are_tests(tests: str) -> None:
    definition = make_tests(tests, None).definition
    with pytest.raises(AssertionError):
        run_tests(definition, lambda x: 0)
    run_tests(definition, lambda x: x + 1)


ADD = "result = 0\ncount = 0\ndef add(a, b):\n    global count\n    count += 1\n    return a + b"
SHARED = [
    "assert result == 0\nresult = add(1, 2)\nassert result == 3",
    "add = add(1, 2)\nassert add == 3",
    "result: int = add(1, 2)\nassert result == 3",
    "for result in range(3):\n    assert add(result, 1) == result + 1",
    "b = 0\nfor a in range(3):\n    b = add(a, b)\nassert b == 3",
    "def count():\n    return 3\nassert add(1, 2) == count()",  # a helper of the tests does not replace the program's
    "x = 3\ndef same():\n    global x\n    x += 1\nsame()\nassert add(1, 3) == x",
]


@pytest.mark.parametrize(
    ("program", "tests", "passes"),
    [
        ("def f(x):\n    return expected", "expected = [1, 2]\nassert f(1) == expected", False),
        ("def f(x):\n    return want", "for x, want in [(1, 2), (2, 3)]:\n    assert f(x) == want", False),
        ("def helper(x):\n    return x\ndef f(x):\n    return helper(x)", "helper = 3\nassert f(1) == 1", True),
        ("n = 5\ndef f(x):\n    return x * n", "n = 3\nassert f(n) == 15", True),
        ("def f(x):\n    return sum(x)", "sum = f([1, 2])\nassert sum == 3", True),
    ],
)
def test_a_program_neither_reads_nor_loses_by_the_variables_of_the_tests(
    program: str, tests: str, passes: bool
) -> None:
    try:
        assert passes_in_this_python(program, make_tests(tests, None)) == passes
    except NameError:
        assert not passes


@BOXES
@pytest.mark.parametrize("tests", SHARED)
def test_a_variable_of_the_tests_begins_with_the_programs_value(kind: str, tests: str) -> None:
    assert box(kind).run(ADD, make_tests(tests, None)) == "passed"
    assert box(kind).run(ADD.replace("a + b", "a + b + 1"), make_tests(tests, None)) == "failed"


@pytest.mark.parametrize("tests", SHARED)
def test_variables_in_cpython(tests: str) -> None:
    made = make_tests(tests, None)
    for program, passes in ((ADD, True), (ADD.replace("a + b", "a + b + 1"), False)):
        assert passes_in_this_python(program, made) == passes, program


def passes_in_this_python(program: str, made: Any) -> bool:
    space: dict[str, Any] = {}
    exec(program, space)
    try:
        exec(made.definition, space)
        return bool(eval(made.call, space) == made.secret)
    except (AssertionError, NameError):
        return False


ROOT_OF = "def f(x):\n    return x ** 0.5\ndef factorial(n):\n    return PRODUCT"
STARS = "from typing import *\nfrom math import *\nxs: List[int] = [4]\n"
STARS += "assert f(xs[0]) == sqrt(4)\nassert factorial(3) == 6"


def test_tests_may_import_star() -> None:
    """The program's factorial is tested if it is the entry point; else the tests use the one of math."""
    made = make_tests(f"from __future__ import annotations\n{STARS}", "factorial")
    assert passes_in_this_python(ROOT_OF.replace("PRODUCT", "n * (n - 1)"), made)
    assert not passes_in_this_python(ROOT_OF.replace("PRODUCT", "n"), made)
    assert not passes_in_this_python(ROOT_OF.replace("PRODUCT", "6").replace("0.5", "2"), made)


@BOXES
def test_tests_may_import_star_in_a_sandbox(kind: str) -> None:
    made = make_tests(STARS, "factorial")
    assert box(kind).run(ROOT_OF.replace("PRODUCT", "n * (n - 1)"), made) == "passed"
    assert box(kind).run(ROOT_OF.replace("PRODUCT", "n"), made) == "failed"
    assert box(kind).run(ROOT_OF.replace("PRODUCT", "n"), make_tests(STARS, None)) == "passed"


@pytest.mark.parametrize("line", ["from numpy import *", "from . import *", "if f:\n    from math import *"])
def test_an_unknown_import_star_is_told(line: str) -> None:
    with pytest.raises(ValueError, match=r"^the row's tests have `from .* import \*`: name what they import$"):
        make_tests(f"{line}\nassert f(1) == 2", None)


def run_tests(definition: str, program: Any) -> None:
    space: dict[str, Any] = {"f": program}
    exec(definition, space)
    next(value for name, value in space.items() if name.startswith("check_secret"))()


def test_the_entry_point_and_test_functions_are_called() -> None:
    assert "\n    check(plus)\n" in make_tests(CHECK, "plus").definition
    both = make_tests("def test_one():\n    assert f(1) == 2\ndef test_two():\n    assert f(2) == 3\n", None).definition
    run_tests(both, lambda x: x + 1)
    with pytest.raises(AssertionError):
        run_tests(both, lambda x: 2)
    called = "def test_one():\n    assert f(1) == 2\ntest_one()"
    assert make_tests(called, None).definition.count("test_one()") == 2  # its definition and its call


def test_a_worker_that_was_killed_ran_out_of_time() -> None:
    assert (
        _state_of("monty worker killed after exceeding request timeout of 3s", "while True:\n    print(1)") == "timeout"
    )
    assert _state_of("monty worker died", "x = 1") == "unsupported"


def test_null_columns_mean_none_and_a_missing_one_is_named() -> None:
    grader, program = CodeGrader(entry_point="entry", prefix="before"), "x = 1\n"
    assert grader._program(program, {"entry": None, "before": None}) == program
    assert grader._program(program, {"entry": "f", "before": "import os\n"}) == "import os\n" + program
    assert "check(f)" not in make_tests("assert f(1) == 2", "f").definition  # the tests define none
    with pytest.raises(ValueError, match="the row has no column 'entry'"):
        grader._program(program, {"before": ""})


def test_the_filter_of_system_calls_is_what_it_says() -> None:
    """Run the filter by hand: threads are allowed, and processes, another ABI and another machine are not."""
    x86 = 0xC000003E
    filtered = no_new_processes("x86_64")
    assert (verdict(filtered, x86, 0), verdict(filtered, x86, 59)) == ("allow", "allow")  # read, execve
    assert {verdict(filtered, x86, number) for number in (57, 58, 322, 101, 272, 308, 425)} == {"EPERM"}
    assert verdict(filtered, x86, 435) == "ENOSYS"  # clone3: the library then calls clone
    assert verdict(filtered, x86, 56, 0x3D0F00) == "allow"  # a thread
    assert verdict(filtered, x86, 56, 0x1200011) == "EPERM"  # fork of the C library
    assert verdict(filtered, x86, 0x40000000) == "EPERM"
    assert verdict(filtered, 0x40000003, 0) == "kill"
    arm = no_new_processes("aarch64")
    assert verdict(arm, 0xC00000B7, 220, 17) == "EPERM"
    assert verdict(arm, 0xC00000B7, 63) == "allow"


def verdict(filtered: bytes, audit: int, number: int, first: int = 0) -> str:
    lines = [filtered[i : i + 8] for i in range(0, len(filtered), 8)]
    words = {0: number, 4: audit, 16: first}
    at, value = 0, 0
    while True:
        code, yes, no = int.from_bytes(lines[at][:2], sys.byteorder), lines[at][2], lines[at][3]
        operand = int.from_bytes(lines[at][4:], sys.byteorder)
        at += 1
        match code:
            case 0x20:
                value = words[operand]
            case 0x06:
                return {0x7FFF0000: "allow", 0x80000000: "kill", 0x50001: "EPERM", 0x50026: "ENOSYS"}[operand]
            case _:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
                at += yes if holds else no

"""Parts that a machine may lack: POSIX's own are used with a fallback, extras only by the code that needs them."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from sources import PRODUCT, ROOT, nodes_in, nodes_of

from rlhf.comparison import scheduler
from rlhf.rewards.function import TimeLimitExceeded, run_with_timeout
from rlhf.runtime import memory
from rlhf.tracking import checkpoint
from rlhf.tracking.checkpoint import Checkpoints, find_damage

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "_posixshmem")
NAMES = {
    "os": """
        fork forkpty killpg getpgid setpgid setsid getuid geteuid getgid getegid getgroups sched_getaffinity
        sched_setaffinity uname sysconf statvfs fchmod chown mkfifo nice getloadavg wait3 wait4 waitid WNOHANG
        O_DIRECTORY O_NOFOLLOW O_NONBLOCK EX_OK
    """,
    "signal": """
        SIGALRM SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGQUIT SIGPIPE SIGCHLD SIGCONT SIGSTOP setitimer getitimer alarm pause
        ITIMER_REAL pthread_sigmask sigwait siginterrupt
    """,
    "multiprocessing.context": "ForkContext ForkServerContext ForkProcess ForkServerProcess",
    "socket": "AF_UNIX",
    "time": "tzset",
}
WITH_A_FALLBACK = {
    ("scheduler.py", "os.sched_getaffinity"),
    ("function.py", "signal.SIGALRM"),
    ("function.py", "signal.setitimer"),
    ("function.py", "signal.ITIMER_REAL"),
    ("memory.py", "import resource"),
    *(  # a verifier refuses to start on Windows
        ("child.py", name)
        for name in ("os.killpg", "signal.SIGKILL", "signal.SIGALRM", "signal.setitimer", "signal.ITIMER_REAL")
    ),
    ("child.py", "import resource"),
    *(  # bubblewrap needs Linux
        ("processes.py", name)
        for name in ("os.fork", "signal.SIGCHLD", "signal.SIGKILL", "signal.alarm", "import resource")
    ),
    ("sandbox.py", "signal.SIGKILL"),
    *(("pool.py", name) for name in ("os.killpg", "signal.SIGKILL", "signal.SIGALRM")),
    *(("process.py", name) for name in ("os.killpg", "signal.SIGKILL")),
}
LINUX_ONLY = {"rlhf.runtime.deepspeed"}  # imported only if sharding asks for DeepSpeed
OF_AN_EXTRA = {"rlhf.suites.lm_eval", "reward_model.server", "rlhf.factory.reward_service"}
EXTRAS = ("lm_eval", "fastapi", "starlette", "uvicorn")
NOT_FOR_COMMANDS = (
    "uvicorn",
    "fastapi",
    "deepspeed",
    "wandb",
    "tensorboard",
    "mlflow",
    "trackio",
    "bitsandbytes",
    "gguf",
    "lm_eval",
    "langdetect",
)

# These take seconds to import; the mathematics must be importable without any of them.
HEAVY = {"transformers", "datasets", "peft", "accelerate", "evaluate", "sklearn", "pandas", "deepspeed"}

# All in one interpreter, the light before the heavy: the libraries that they load take seconds.
WITHOUT_EXTRAS = f"""
import importlib, sys

def load_inside(package):
    for name in sys.argv[1:]:
        if name == package or name.startswith(package + "."):
            importlib.import_module(name)
    print(*(name for name, module in sys.modules.items() if module is not None))

sys.modules.update(dict.fromkeys({NOT_FOR_COMMANDS!r}))
for package in ("rlhf.algo", "rlhf.api.training", "rlhf.commands"):
    load_inside(package)
for name in {NOT_FOR_COMMANDS!r}:
    del sys.modules[name]
"""
AS_ON_WINDOWS = f"""
def load(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in {EXTRAS!r}:
                raise
        else:
            yield name

names = list(load(sys.argv[1:]))  # and with them the libraries, which have their own ways for Windows
for name in [name for name in sys.modules if name.partition(".")[0] in ("rlhf", "reward_model")]:
    del sys.modules[name]
for name, attributes in {NAMES!r}.items():
    module = importlib.import_module(name)
    for attribute in attributes.split():
        if hasattr(module, attribute):
            delattr(module, attribute)
sys.modules.update(dict.fromkeys({MODULES!r}))
print(*load(names))
"""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES_TO_IMPORT = [name for name in map(module_of, PRODUCT) if name not in LINUX_ONLY]


@pytest.fixture(scope="module")
def imports() -> subprocess.CompletedProcess[str]:
    """The interpreter that imports ever more without any extra, and then every module as on Windows."""
    script = WITHOUT_EXTRAS + AS_ON_WINDOWS
    return subprocess.run(
        [sys.executable, "-c", script, *NAMES_TO_IMPORT], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def loaded(imports: subprocess.CompletedProcess[str]) -> list[set[str]]:
    """The modules loaded once the mathematics is imported, once a run's needs are, and once all commands are loaded."""
    assert imports.stdout, imports.stderr
    return [set(line.split()) for line in imports.stdout.splitlines()[:3]]


def test_the_mathematics_is_light_to_import(loaded: list[set[str]]) -> None:
    names = {name.split(".")[0] for name in loaded[0]}
    assert {"torch", "rlhf"} <= names
    assert names & HEAVY == set()


def test_a_training_run_imports_no_library_that_it_does_not_use(loaded: list[set[str]]) -> None:
    """They take 100 MB of every process: `datasets` reads Parquet, scikit-learn makes a reward model's card."""
    assert "rlhf.api.training" in loaded[1]
    assert loaded[1] & {"datasets", "pyarrow", "pandas", "sklearn", "scipy.stats", "peft"} == set()


def test_the_heavy_libraries_exist() -> None:
    """A misspelled name above would forbid nothing; deepspeed is an extra, so it may be absent."""
    assert {name for name in HEAVY if importlib.util.find_spec(name) is None} <= {"deepspeed"}


def test_the_commands_import_without_any_extra(loaded: list[set[str]]) -> None:
    """As after `pip install .`: packages of serve, track, gguf and other extras are imported at their use.

    So is peft, which is always installed: it takes a seventh of the time that a run takes to start.
    """
    assert sum(name.startswith("rlhf.commands") for name in NAMES_TO_IMPORT) > 5
    assert len(loaded) == 3
    assert "rlhf.commands" in loaded[2]
    assert "peft" not in loaded[2]


def test_every_module_can_be_imported_without_what_windows_lacks(imports: subprocess.CompletedProcess[str]) -> None:
    assert {"rlhf.cli", "reward_model.model"} <= set(NAMES_TO_IMPORT)
    assert imports.returncode == 0, imports.stderr
    imported = set(imports.stdout.splitlines()[-1].split())
    assert set(NAMES_TO_IMPORT) - imported <= OF_AN_EXTRA, "only modules of an extra not installed may be left out"


def posix_only(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names in a file that exist on POSIX only, and its imports of POSIX's own modules."""
    own = {f"{module}.{name}" for module, names in NAMES.items() for name in names.split()}
    last = {name.rpartition(".")[2] for name in own}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in last and ast.unparse(node) in own:
            yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if name in own or node.module in MODULES)


def test_what_only_posix_has_is_used_where_there_is_a_fallback() -> None:
    used = {(path.name, name) for path in PRODUCT for name in posix_only(nodes_of(path))}
    assert used == WITH_A_FALLBACK


@pytest.mark.parametrize(
    "source",
    ["import os\nos.fork()", "import fcntl", "from signal import SIGKILL", "from fcntl import flock", "signal.SIGHUP"],
)
def test_such_a_name_would_be_noticed(source: str) -> None:
    assert list(posix_only(nodes_in(source)))


def test_without_a_timer_signal_a_thread_keeps_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("setitimer", "SIGALRM", "ITIMER_REAL"):
        monkeypatch.delattr(signal, name)
    assert threading.current_thread() is threading.main_thread()
    assert run_with_timeout(5.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(5.0, lambda: 1 // 0)
    started = time.monotonic()
    with pytest.raises(TimeLimitExceeded):
        run_with_timeout(0.05, lambda: time.sleep(20))
    assert time.monotonic() - started < 10


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert scheduler.count_cores() == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert scheduler.count_cores() == 1


@pytest.mark.parametrize("has_resource", [True, False], ids=["macOS", "Windows"])
def test_without_proc_memory_is_measured_otherwise(
    has_resource: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    if not has_resource:
        monkeypatch.setattr(memory, "resource", None)
    measured = memory._peak_resident_mb()
    assert 10 < measured < 100_000  # MB: neither bytes nor gigabytes
    if has_resource:
        monkeypatch.setattr(memory.sys, "platform", "darwin")  # its unit is a byte
        assert memory._peak_resident_mb() == pytest.approx(measured / 1024, rel=0.01)


def test_a_checkpoint_is_flushed_where_folders_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def as_on_windows(path: str | Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    def fsync(descriptor: int) -> None:
        os.write(descriptor, b"")  # which fails on files that are open for reading only
        flushed.append("file")

    monkeypatch.setattr(checkpoint, "IS_WINDOWS", True)
    monkeypatch.setattr(checkpoint.os, "open", as_on_windows)
    monkeypatch.setattr(checkpoint.os, "fsync", fsync)

    def write(folder: Path) -> None:
        (folder / "weights").write_text("abc")
        (folder / "inner").mkdir()
        (folder / "inner" / "more").write_text("d")

    path = Checkpoints(tmp_path, keep=1).save(3, write)
    assert find_damage(path) is None
    assert len(flushed) == 3  # two files and the manifest


def test_the_installer_says_how_to_get_the_command(tmp_path: Path) -> None:
    """With a Python that does nothing, nothing is installed; the script's own words are left."""
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    for environment, is_told in (({}, True), ({"VIRTUAL_ENV": str(tmp_path / ".venv")}, False)):
        command = ["bash", str(tmp_path / "scripts" / "setup.sh"), "gguf"]
        env = {"PATH": os.environ["PATH"], **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert (f"next: source {python.parent}/activate" in done.stderr) is is_told

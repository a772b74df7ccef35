"""Does the suite notice?  `python tests/mutants/run.py` seeds each bug in a copy and runs its tests.

    killed     a test failed, by an assertion or by another exception (named in the table)
    survived   the tests passed: they do not see this bug
    timed out  the tests did not end; that is not noticing
    broken     the code no longer imports or parses, or a test could not start; that is not noticing either

Exit code 0 if every mutant was killed, 1 if any was not, 2 if the list is stale (a text to replace is not
found exactly once) or the tests fail without any bug. The list is mutants.py, its format mutant.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # list files say `from mutant import Mutant`, also when they lie elsewhere

from mutant import Mutant  # noqa: E402

Outcome = Literal["killed", "survived", "timed out", "broken"]

# A bug that merely makes code unloadable is found by anybody: that is no merit of the suite.
NOT_A_KILL = {"NameError", "ImportError", "SyntaxError", "HypothesisException"}
ASSERTIONS = {"AssertionError", "Failed"}  # Failed: pytest.raises that met no exception


@dataclass(frozen=True)
class Verdict:
    """The outcome of one mutant."""

    outcome: Outcome
    by: str
    seconds: float


def copy_repository(root: Path, target: Path) -> None:
    """Copy the files that git tracks or does not ignore; no history, no environment, no runs."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source = root / name
        if source.is_file():  # deleted but not yet committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def clean_environment(copy: Path, witness: Path) -> dict[str, str]:
    """This process's environment, less an outer pytest's variables; `copy` comes before any installed package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(copy), str(HERE)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MUTANT_WITNESS": str(witness),
    }


def run_tests(
    copy: Path, tests: Sequence[str], timeout_s: int, *, stop: bool
) -> tuple[int | None, list[dict[str, Any]], str]:
    """Run `tests` in `copy`.

    Returns pytest's exit code (None: timed out), the errors of the failing tests, and the output's end.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-witness-") as scratch:
        witness, log = Path(scratch, "witness.jsonl"), Path(scratch, "output.txt")
        witness.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "witness", *tests]
        command += ["-x"] if stop else []
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=copy,
                env=clean_environment(copy, witness),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # its children too
                    process.wait()
        raised = [json.loads(line) for line in witness.read_text(encoding="utf-8").splitlines()]
        return code, raised, log.read_text(encoding="utf-8", errors="replace")[-3000:]


def classify(code: int | None, raised: Sequence[dict[str, Any]]) -> tuple[Outcome, str]:
    """The outcome and its cause: pytest's exit code tells the outcome, the exceptions the cause."""
    if code is None:
        return "timed out", ""
    if code == 0:
        return "survived", ""
    kills = [r for r in raised if r["phase"] == "call" and not NOT_A_KILL & set(r["classes"])]
    if code == 1 and kills:
        asserted = next((r for r in kills if ASSERTIONS & set(r["classes"])), None)
        first = asserted or kills[0]
        how = "assertion" if asserted else first["classes"][0]
        return "killed", f"{how} in {first['test'].rsplit('/', 1)[-1]}"
    first_line = (
        f"{raised[0]['classes'][0]}: {raised[0]['message']}" if raised else f"pytest ended with exit code {code}"
    )
    return "broken", first_line


def judge(mutant: Mutant, root: Path) -> Verdict:
    """Seed one bug in a fresh copy and run its tests."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy = Path(scratch, "repository")
        copy_repository(root, copy)
        mutant.apply(copy)
        code, raised, _ = run_tests(copy, mutant.tests, mutant.timeout_s, stop=True)
    return Verdict(*classify(code, raised), time.monotonic() - started)


def baseline(mutants: Sequence[Mutant], root: Path) -> str | None:
    """The output's end if the tests fail without a bug (a kill would mean nothing); None if they pass."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy = Path(scratch, "repository")
        copy_repository(root, copy)
        code, _, tail = run_tests(copy, tests, sum(m.timeout_s for m in mutants), stop=False)
    return None if code == 0 else f"exit code {code}\n{tail}"


def load(path: Path) -> list[Mutant]:
    """`MUTANTS` of the Python file at `path`."""
    spec = importlib.util.spec_from_file_location("mutant_list", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.MUTANTS)


def problems(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """All points in which the list does not fit the repository."""
    if not mutants:
        return ["the list is empty"]
    repeated = [name for name, count in Counter(m.name for m in mutants).items() if count > 1]
    stale = [reason for mutant in mutants if (reason := mutant.stale(root)) is not None]
    return [f"{name}: more than one mutant has this name" for name in repeated] + stale


def table(mutants: Sequence[Mutant], verdicts: Sequence[Verdict]) -> str:
    """One line a mutant, then the count."""
    rows = [("mutant", "file", "outcome", "s", "by", "why")]
    for m, v in zip(mutants, verdicts, strict=True):
        rows.append((m.name, m.file, v.outcome, f"{v.seconds:.1f}", v.by, m.why))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows]
    counts = Counter(v.outcome for v in verdicts)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return "\n".join([*lines, "", f"{len(verdicts)} mutants: {summary}"])


def say(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Seed known bugs and see whether tests notice.")
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant alone; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at a time (1)")
    parser.add_argument("--check", action="store_true", help="is the list stale? run no test")
    parser.add_argument("--list", type=Path, default=HERE / "mutants.py", help="a file defining MUTANTS")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="the repository")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants and print the table."""
    options = parse(argv)
    mutants = load(options.list)
    if options.only:
        unknown = sorted(set(options.only) - {m.name for m in mutants})
        if unknown:
            say(f"no such mutant: {', '.join(unknown)}. There are: {', '.join(m.name for m in mutants)}")
            return 2
        mutants = [m for m in mutants if m.name in options.only]
    stale = problems(mutants, options.root)
    if stale:
        say("the list of mutants is stale:\n  " + "\n  ".join(stale))
        return 2
    if options.check:
        say(f"{len(mutants)} mutants fit the code")
        return 0
    failure = baseline(mutants, options.root)
    if failure is not None:
        say(f"the tests fail without any seeded bug, so nothing can be said: {failure}")
        return 2
    with ThreadPoolExecutor(max_workers=max(1, options.jobs)) as pool:
        verdicts = list(pool.map(lambda mutant: judge(mutant, options.root), mutants))
    say(table(mutants, verdicts))
    return 0 if all(v.outcome == "killed" for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

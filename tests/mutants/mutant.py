"""Defines a seeded bug: one exact replacement in one file, and the tests that must notice it.

The list is `MUTANTS` in `mutants.py`. An entry reads

    Mutant(
        name="whiten-keeps-mean",                          # unique; for --only
        file="rlhf/algo/masked.py",                             # from the repository's root
        before="scaled if shift_mean else scaled + mean",  # exact text, once in the file
        after="scaled + mean",                             # its replacement; must still load
        why="whitened advantages keep their mean: ...",    # the error, whom it bit
        tests=("tests/algo/test_masked.py",),                   # pytest's arguments: files, file::test
    )

Give the smallest set of fast tests that should see the bug, never ones that need `../shared`, a GPU
or minutes: a copy of the repository in a temporary folder is all they get.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One seeded bug."""

    name: str
    file: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...]
    timeout_s: int = 180

    def stale(self, root: Path) -> str | None:
        """Why this mutant no longer fits the repository at `root`, or None if it still fits."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: there is no {self.file}"
        if self.before == self.after:
            return f"{self.name}: `before` and `after` are the same"
        count = path.read_text(encoding="utf-8").count(self.before)
        if count != 1:
            return f"{self.name}: `before` occurs {count} times in {self.file}, not once"
        missing = [test for test in self.tests if not (root / test.split("::")[0]).exists()]
        if missing or not self.tests:
            return f"{self.name}: no such tests: {', '.join(missing) or '(none named)'}"
        return None

    def apply(self, root: Path) -> None:
        """Seed the bug in the copy at `root`."""
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.before, self.after), encoding="utf-8")

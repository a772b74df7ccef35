"""Verifiers: programs that grade one completion by its row, and the child processes in which they run.

Each grader is one file: its settings, and a function. They are `math`, `choice`, `json`, `regex`, `ifeval`, `code`,
`reasoning_gym` and a Python function (`function`). `grader` has the base of a new one; a file that is put here is
found. `pool` runs them in `child` processes that can be killed. `rlhf.rewards.verifier` makes a reward of them.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

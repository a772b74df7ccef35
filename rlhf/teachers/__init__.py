"""Teachers: the sources of the next-token distributions from which a policy is distilled.

Each teacher is one file: its section and its code. They are a model in this process (`model`), a server that
returns the log-probabilities of given tokens (`server`), and a file that `rlhf teach` has written (`stored`). `teacher`
has the base of a new one; a file that is put here is found. `rlhf.factory.teacher` builds the teacher of a run.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

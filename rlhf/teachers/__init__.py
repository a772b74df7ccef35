"""Teachers: where the next-token distributions come from that a policy is distilled from.

Each teacher is one file: its section, and what answers. They are a model in this process (`model`), a server that
returns the log-probabilities of given tokens (`server`), and a file that `rlhf teach` has written (`stored`). `teacher`
has what a new one is made of; a file that is put here is found. `rlhf.factory.teacher` builds the teacher of a run.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

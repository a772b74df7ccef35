"""Reward sources: anything that turns completions into one score each.

Each source is one file: its section, and its scorer. They are a Python function (`function`), a trained reward model
(`model`), a reward server (`remote`), a language model as judge (`openai`), several sources combined (`ensemble`),
checks of the text (`rules`), and programs that grade a completion by its row (`verifier`). `source` has the base of
a new one; a file that is put here is found. `process` rewards the steps of a completion besides its score. `chat` asks
a language model, `shaping` clips scores and subtracts penalties. `rlhf.factory.rewards` builds the source of a run.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

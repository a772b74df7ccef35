"""Benchmarks that a user names on the command line: one module each, with its settings, its rows and its figures.

- `blimp`, `detox`, `gsm8k`, `harmful`, `hh`, `ifeval`, `lab`, `persona`, `toxicity`, `truthfulqa`, `xstest`.
- `harness`: any task of lm-eval, run by `lm_eval` (an extra).
- `suite`: their common base, and the search by name. `subject`: the model under evaluation.
- `metrics`: accuracy, exact match, win rate, pass@k and distinct n-grams, computed by the `evaluate` library.
- `questions`: read rows, sample answers, and their figures with confidence intervals.
- `refusals`: the detectors of refusals, and their check by people's labels. `profanity`: the judge of toxicity.

To import the package defines its suites, of which each file may hold one; it exports nothing: import from its modules.
"""

from importlib import import_module
from pkgutil import iter_modules

WITHOUT_A_SUITE = ("lm_eval", "subject")  # need an extra and torch, which take long to import

for _module in iter_modules(__path__):
    if _module.name not in WITHOUT_A_SUITE:
        import_module(f"{__name__}.{_module.name}")

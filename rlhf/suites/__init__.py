"""Benchmarks that a user names on the command line: one module each, with its settings, its rows and its figures.

- `blimp`, `detox`, `gsm8k`, `harmful`, `hh`, `ifeval`, `lab`, `persona`, `toxicity`, `truthfulqa`, `xstest`.
- `harness`: any task of lm-eval, run by `lm_eval` (an extra).
- `suite`: what all of them have, and how they are found by name. `subject`: the model under evaluation.
- `metrics`: accuracy, exact match, win rate, pass@k and distinct n-grams, computed by the `evaluate` library.
- `questions`: read rows, sample answers, and their figures with confidence intervals.
- `refusals`: the detectors of refusals, and their check by people's labels. `profanity`: the judge of toxicity.

To import the package defines its suites; it exports nothing: import from its modules.
"""

from rlhf.suites import blimp as blimp
from rlhf.suites import detox as detox
from rlhf.suites import gsm8k as gsm8k
from rlhf.suites import harmful as harmful
from rlhf.suites import harness as harness
from rlhf.suites import hh as hh
from rlhf.suites import ifeval as ifeval
from rlhf.suites import lab as lab
from rlhf.suites import persona as persona
from rlhf.suites import toxicity as toxicity
from rlhf.suites import truthfulqa as truthfulqa
from rlhf.suites import xstest as xstest

"""Benchmarks that a user names on the command line: hh, persona, gsm8k, ifeval, xstest, detox, lab, lm-eval.

- `hh`, `persona`, `gsm8k`, `ifeval`, `xstest`, `detox`, `lab`: one module and one `run_*` function for each benchmark.
- `lm_eval`: the tasks of lm-eval; it needs the extra lm-eval.
- `settings`: the configuration of each benchmark. `subject`: the model under evaluation.
- `metrics`: measures of the suites as metrics of the `evaluate` library.
- `questions`: read rows, sample answers, and their figures with confidence intervals.

This package exports nothing: import from its modules.
"""

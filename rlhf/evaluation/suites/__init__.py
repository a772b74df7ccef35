"""Benchmarks that a user names on the command line: hh, persona, gsm8k, ifeval, xstest, lab, and any task of lm-eval.

- `hh`, `persona`, `gsm8k`, `ifeval`, `xstest`, `lab`: one module and one `run_*` function for each benchmark.
- `harness`: the tasks of lm-eval; it needs the extra lm-eval.
- `settings`: the configuration of each benchmark. `subject`: the model under evaluation.
- `figures`, `estimates`: the results with their confidence intervals.
- `questions`, `answering`, `cutting`, `answers`, `numbers`, `refusals`: read rows, sample answers and parse them.

This package exports nothing: import from its modules.
"""

"""Evaluation of trained policies, and the HTML report of a run.

- `evaluate`: scores, KL to the reference, entropy and diversity on held-out prompts, or the held-out means of a loss.
- `win_rate`, `pairwise`: compare two models on the same prompts, by scores or by a language model as the judge.
- `best_of_n`, `frontier`, `diversity`: best-of-n estimates, reward against KL, distinct n-grams and repetition.
- `suites`: named benchmarks (hh, persona, gsm8k, ifeval, xstest, lab) and any task of lm-eval.
- `metrics`: the same measures as metrics of the `evaluate` library.
- `report` and `report_*`: write report.html from a run folder.

This package exports nothing: import from its modules, as in `from rlhf.evaluation.win_rate import win_rate`.
"""

"""Evaluate trained policies on held-out prompts.

- `evaluate`: scores, KL to the reference, entropy, distinct n-grams and repetition, or the held-out means of a loss.
- `during_run`: the same while a run trains.
- `win_rate`: compare two models on the same prompts, by scores or by a language model as the judge.
- `frontier`: reward against KL, best-of-n estimates, laws of over-optimization.

This package exports nothing: import from its modules, as in `from rlhf.evaluation.win_rate import win_rate`.
"""

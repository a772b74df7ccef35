"""Instructions that a program can check: the 25 kinds of IFEval, a generator of prompts with them, and a reward.

checks.py      one function for each kind, which checks whether a text follows the instruction
verify.py      `read_constraints` and `verify`: the constraints of a row, checked strictly and loosely
generate.py    `instructions`: prompts of a task and one to three constraints with random parameters, from topics.py
reward.py      `score(prompts, completions, references)`: the share of a row's constraints that a completion meets
text.py        counts of words and sentences, and detection of the language

Import from these modules; the package itself exports nothing.
"""

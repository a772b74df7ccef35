"""Instructions that a program can check: the 25 kinds of IFEval, a generator of prompts with them, and a reward.

checks.py      one function for each kind, which checks whether a text follows the instruction
generate.py    prompts of a task and one to three constraints with random parameters
reward.py      `score(prompts, completions, references)`: the share of a row's constraints that a completion meets

Import from these modules; the package itself exports nothing.
"""

"""Instructions that a program can check: the 25 kinds of IFEval, and a reward.

checks.py   one function for each kind, which checks whether a text follows the instruction
reward.py   `score(prompts, completions, references)`: the share of a row's constraints that a completion meets

Import from these modules; the package itself exports nothing.
"""

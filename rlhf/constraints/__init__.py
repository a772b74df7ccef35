"""Instructions that a program can check: the 25 kinds of IFEval, a generator of prompts with them, and a reward.

checks.py      one function for each kind: does the text meet it
verify.py      the constraints of a row, strict and loose
generate.py    prompts of our own: a task and one to three constraints with random parameters
reward.py      score(prompts, completions, references): the share of a row's constraints that is met
"""

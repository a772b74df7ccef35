"""Tuning in a comparison: every trained arm gets the same number of trials and the same budget for them.

`plan` draws what the trials change, shares the budget among them, makes their cells and chooses; `run` runs them round
by round, reads them back into `results`, and describes them.
"""

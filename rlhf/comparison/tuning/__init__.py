"""Tuning in a comparison: every trained arm gets the same number of trials and the same budget for them.

`search` draws what the trials change, shares the budget among them and chooses, `plan` makes their cells; `run` runs
them round by round and reads them back into `results`, of which `tables` has what is shown.
"""

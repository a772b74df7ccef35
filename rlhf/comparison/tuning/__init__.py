"""Tuning in a comparison: every trained arm gets the same number of trials and the same budget for them.

`space` draws what the trials change, `halving` shares the budget among them and chooses, `plan` makes their cells and
`run` runs them round by round; `aggregate` reads them back into `results`, of which `tables` has what is shown.
"""

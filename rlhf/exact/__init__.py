"""A world small enough to enumerate, in which every expectation of an algorithm is exact.

world.py        all completions of a tiny vocabulary and their probabilities
check.py        whether a loss or an advantage of the user is right; the tests hold our own to the same world
check_pairs.py  the same for a loss over pairs
findings.py     the findings of a check
"""

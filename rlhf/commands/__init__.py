"""The commands of the `rlhf` program, one module each: train (with rm and report), evaluate, compare, etc.

rlhf.cli parses the arguments and calls a function from here, e.g. `train.run_train` or `compare.run_compare`; these
build the objects with rlhf.factory, run them, and print the result. They may be called from Python too, with a
validated configuration and a rich Console.
"""

"""The commands of the `rlhf` program, one module each: evaluate, sample, report, etc.

rlhf.cli parses the arguments and calls a function from here, e.g. `sample.run_sample` or `report.run_report`; these
build the objects with rlhf.factory, run them, and print the result. They may be called from Python too, with a
validated configuration and a rich Console.
"""

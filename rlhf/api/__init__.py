"""The Python interface: the verbs of the `rlhf` program, with Python objects for models, data, rewards and losses.

    runs.py         sft, train, reward_model, compare: a run, and its result; evaluate and sample: trained models
    inputs.py       Python objects to configuration: written into the run folder if they are not files
    reward_checking.py    right and worthless answers, scored by any reward
    training.py, comparing.py, lab.py    run what a configuration describes: a training run, a comparison, the lab
    checks.py       options, checked without importing torch
    (rlhf.exact.check: whether a loss or an advantage of your own is right)

The functions are exported by `rlhf` itself: `import rlhf; rlhf.train(...)`. Keywords are the configuration's keys. A
run from Python and one by the command line with the same settings give the same weights, on a CPU bit for bit.

This package exports nothing: import from its modules.
"""

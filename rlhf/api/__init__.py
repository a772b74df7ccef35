"""The Python interface: what the `rlhf` program does, with Python objects for models, data, rewards and losses.

    runs.py     sft, train, reward_model, compare: a run, and what it returns; evaluate and sample: what is trained
    inputs.py   Python objects to configuration: written into the run folder where they are not files
    (rlhf.exact.check: whether a loss or an advantage of your own is right)

The functions are exported by `rlhf` itself: `import rlhf; rlhf.train(...)`. Keywords are the configuration's keys. A
run from Python and one by the command line with the same settings give the same weights, bit for bit.
"""

# The list of these names is `rlhf.__all__`; `as` says to type checkers that they are exported.
from rlhf.api.runs import CompareResult as CompareResult
from rlhf.api.runs import RunResult as RunResult
from rlhf.api.runs import compare as compare
from rlhf.api.runs import evaluate as evaluate
from rlhf.api.runs import reward_model as reward_model
from rlhf.api.runs import sample as sample
from rlhf.api.runs import sft as sft
from rlhf.api.runs import train as train
from rlhf.exact.check import CheckResult as CheckResult
from rlhf.exact.check import Finding as Finding
from rlhf.exact.check import check as check

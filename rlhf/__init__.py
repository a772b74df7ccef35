"""Train language models from human preferences: SFT, reward models, PPO, GRPO, DPO and related algorithms.

A run passes through these packages, top to bottom; imports point down only:

    cli, commands       the `rlhf` program
    api                 the exports of this package: its verbs as Python functions
    comparison          several algorithms on one budget under one judge
    labelling           completions and a judge to preference pairs
    factory             from a configuration to the objects of a run
    suites, report      benchmarks; the HTML page of a run
    evaluation          trained policies on held-out prompts
    training            the online and the offline loop, their losses, the optimizer step
    sampling            prompts to completions
    models              policy, reference, critic: log-probabilities and values
    data                rows of a file to batches of token ids
    guard               unsafe settings, alarms while a run trains, whether a checkpoint is the best
    tracking, runtime   metrics, checkpoints; devices, ranks, memory
    planning            the memory and time of a run, before it is loaded
    exact               a world small enough to enumerate, which shows whether a loss is right
    config              YAML to frozen, typed sections
    teachers            states to a teacher's next-token distributions
    environments        actions to observations and rewards, over several turns
    rewards             completions to scores: each source is its section and its scorer
    serving             sampling servers: settings, and the requests to each kind over HTTP
    algorithms          one file each: settings, equation, usual ranges, presets
    algo                the mathematics that they share: tensors in, tensors out
    verifiers           programs that grade one completion by its row, in child processes

`types` has the batches that flow through an online step: Prompts -> Completions -> Rollout -> Experience. Start reading
there, then in objective.py and training/online.py. `lab` is a small world with a known true reward, `constraints`
a reward without a model. Beside this package, reward_model trains and serves reward models.

The package exports the functions of rlhf.api, which are imported when they are first used:

    import rlhf
    result = rlhf.train("path/to/model", "grpo", prompts=["Tell a joke."], reward=lambda completions: [...])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # as in pyproject.toml

if TYPE_CHECKING:
    from rlhf.api.labels import label
    from rlhf.api.planning import plan
    from rlhf.api.reward_checking import reward_check
    from rlhf.api.runs import CompareResult, RunResult, compare, evaluate, reward_model, sample, sft, train
    from rlhf.exact.check import check
    from rlhf.exact.findings import CheckResult, Finding

__all__ = [
    "CheckResult",
    "CompareResult",
    "Finding",
    "RunResult",
    "check",
    "compare",
    "evaluate",
    "label",
    "plan",
    "reward_check",
    "reward_model",
    "sample",
    "sft",
    "train",
]

OWNERS = {
    "check": "rlhf.exact.check",
    **dict.fromkeys(("CheckResult", "Finding"), "rlhf.exact.findings"),
    "label": "rlhf.api.labels",
    "plan": "rlhf.api.planning",
    "reward_check": "rlhf.api.reward_checking",
}
"""The modules that define exported names, besides rlhf.api.runs."""


def __dir__() -> list[str]:
    """Return the names that `rlhf` has, also those that are not imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import the module of a name at its first use: most need torch, whose import would delay `rlhf --help`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(OWNERS.get(name, "rlhf.api.runs")), name)

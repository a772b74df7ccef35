"""Train language models from human preferences: SFT, reward models, PPO, GRPO, DPO and related algorithms.

A run passes through these packages, top to bottom; imports point down only:

    cli, commands       the `rlhf` program
    api                 what this package exports: its verbs as Python functions
    comparison          several algorithms on one budget under one judge
    factory             from a configuration to the objects of a run
    suites, report      benchmarks; the HTML page of a run
    evaluation          trained policies on held-out prompts
    training            the online and the offline loop, their losses, the optimizer step
    sampling            prompts to completions
    models              policy, reference, critic: log-probabilities and values
    data                rows of a file to batches of token ids
    guard               unsafe settings, alarms while a run trains, whether a checkpoint is the best
    tracking, runtime   metrics, checkpoints; devices, ranks, memory
    exact               a world small enough to enumerate, which shows whether a loss is right
    config              YAML to frozen, typed sections
    rewards             completions to scores: each source is its section and what scores
    serving             sampling servers: settings, and what each kind is asked over HTTP
    algorithms          one file each: settings, equation, usual ranges, presets
    algo                the mathematics that they share: tensors in, tensors out

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
    from rlhf.api.runs import CompareResult, RunResult, compare, evaluate, reward_model, sample, sft, train
    from rlhf.exact.check import CheckResult, Finding, check

__all__ = [
    "CheckResult",
    "CompareResult",
    "Finding",
    "RunResult",
    "check",
    "compare",
    "evaluate",
    "reward_model",
    "sample",
    "sft",
    "train",
]


def __dir__() -> list[str]:
    """Return the names that `rlhf` has, also those that are not imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import what defines a name when it is first used: it needs torch, which `rlhf --help` and a mistake do not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owner = "rlhf.exact.check" if name in ("CheckResult", "Finding", "check") else "rlhf.api.runs"
    return getattr(importlib.import_module(owner), name)

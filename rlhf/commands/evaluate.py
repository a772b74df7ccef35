"""rlhf eval: a finished run against the model it started from, on held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.build.context import read_run_config
from rlhf.build.evaluation import PolicyComparison, compare_to_reference
from rlhf.build.reward_model import report_card_of
from rlhf.commands.train import print_card
from rlhf.config.load import expand_preset, merge, parse_overrides, read_yaml, validate
from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.errors import ConfigError
from rlhf.runtime.metrics import METRICS
from rlhf.runtime.run_folder import write_aside


def run_eval(path: str, overrides: Sequence[str], console: Console) -> None:
    """Evaluate the run in `path` with the settings it was made with, `overrides` on top; writes eval.json there."""
    read_run_config(path)
    tree = merge(read_yaml(path), parse_overrides(overrides))
    if "model" in tree and "policy" not in tree:
        card = report_card_of(validate(RewardModelConfig, tree), path)
        print_card(card, console)
        return
    config = validate(TrainConfig, expand_preset(tree))
    if config.data.eval_prompts is None:
        raise ConfigError("nothing to evaluate on: set data.eval_prompts.path")
    found = compare_to_reference(config, path)
    _print(found, console)
    out = Path(path) / "eval.json"
    write_aside(out, json.dumps(asdict(found), indent=2) + "\n")
    console.print(Text(f"written to {out}"), soft_wrap=True)


def _print(found: PolicyComparison, console: Console) -> None:
    table = Table("on held-out prompts", "reference", "this run", "unit", box=None, pad_edge=False)
    for name, value in found.run.items():
        before = found.reference.get(name)
        table.add_row(name, "" if before is None else f"{before:.3f}", f"{value:.3f}", METRICS[name].unit)
    console.print(table)
    console.print(f"win rate over the reference {found.win_rate} (95 % interval, {found.prompts} prompts)")
    console.print(f"mean score difference {found.difference}")

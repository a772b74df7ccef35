"""rlhf eval: a finished run against the model it started from, or another, on held-out prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rlhf.build.evaluation import START, PairwiseComparison, PolicyComparison, compare_models
from rlhf.build.reward_model import report_card_of
from rlhf.commands.train import print_card
from rlhf.config.load import load_run
from rlhf.config.sections import RewardModelConfig
from rlhf.errors import ConfigError
from rlhf.evaluation.win_rate import LengthControlled
from rlhf.runtime.loggers import plain
from rlhf.runtime.metrics import METRICS
from rlhf.runtime.run_folder import write_aside


def run_eval(path: str, overrides: Sequence[str], console: Console, *, against: str = START) -> None:
    """Evaluate the run in `path` with the settings it was made with, `overrides` on top; writes eval.json there.

    Args:
        path: the run folder.
        overrides: key=value.
        console: where it reports.
        against: another run or model to compare with, the file then named after it; `start`: what the run started from.
    """
    config = load_run(path, overrides)
    if isinstance(config, RewardModelConfig):
        if against != START:
            raise ConfigError(
                f"{path} is a reward model's run: it writes nothing that could be set --against {against}"
            )
        card = report_card_of(config, path)
        print_card(card, console)
        return
    if config.data.eval_prompts is None:
        raise ConfigError("nothing to evaluate on: set data.eval_prompts.path")
    found = compare_models(config, path, against)
    _print(found, console)
    out = Path(path) / _file_name(against)
    write_aside(out, json.dumps(plain(asdict(found)), indent=2, ensure_ascii=False) + "\n")
    console.print(Text(f"written to {out}"), soft_wrap=True)


def _file_name(against: str) -> str:
    """eval.json, or one named after the end of the path that the run is compared with."""
    if against == START:
        return "eval.json"
    last = "/".join(Path(against).parts[-3:])
    return f"eval-{re.sub(r'[^A-Za-z0-9.]+', '-', last).strip('-.')}.json"


def _print(found: PolicyComparison, console: Console) -> None:
    other = "reference" if found.against == START else found.against
    table = Table("on held-out prompts", escape(other), "this run", "unit", box=None, pad_edge=False)
    for name in [*found.run, *(name for name in found.reference if name not in found.run)]:
        table.add_row(name, _shown(found.reference.get(name)), _shown(found.run.get(name)), METRICS[name].unit)
    console.print(table)
    about = f"95 % interval, {found.prompts} prompts"
    if found.win_rate is not None and found.length_controlled is not None:
        _say(console, f"win rate over {_named(found)} {found.win_rate} ({about})")
        _say(console, f"at equal length {_at_equal_length(found.length_controlled)}")
        _say(console, f"mean score difference {found.difference}")
    if found.pairwise is not None:
        for line in _about_pairs(found, found.pairwise, about):
            _say(console, line)


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _named(found: PolicyComparison) -> str:
    return "the reference" if found.against == START else found.against


def _shown(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.3f}"


def _at_equal_length(found: LengthControlled) -> str:
    if found.extrapolated:
        return f"{found} (a guess: one side is longer on every prompt)"
    return str(found)


def _about_pairs(found: PolicyComparison, pairs: PairwiseComparison, about: str) -> list[str]:
    unreadable = f", {pairs.unreadable} of {pairs.answers} answers could not be read" if pairs.unreadable else ""
    return [
        f"{pairs.judge}: win rate over {_named(found)} {pairs.win_rate} ({about}), "
        f"at equal length {_at_equal_length(pairs.length_controlled)}",
        f"{pairs.judge}: {pairs.inconsistent:.1%} of the pairs judged differently when swapped (counted as ties), "
        f"{pairs.first_shown:.1%} of the verdicts for the side shown first{unreadable}",
    ]

"""rlhf train, rlhf rm: run, export, report, and say in a few lines what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.build.offline import build_sft, export_sft
from rlhf.build.online import build_online, export
from rlhf.build.reward_model import build_reward_model, finish_reward_model
from rlhf.config.algorithm import Online
from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.evaluation.report import write_report
from rlhf.runtime.metrics import METRICS
from rlhf.runtime.run_folder import RunFolder
from rlhf.runtime.session import Session
from rlhf.trainers.offline import train_offline
from rlhf.trainers.online import train

SUMMARY = (
    "eval/score",
    "eval/proxy",
    "eval/kl",
    "eval/length",
    "eval/distinct_2",
    "eval/loss",
    "eval/rm_accuracy",
    "critic/explained_variance",
)


def run_train(config: TrainConfig, console: Console) -> bool:
    """Train as `config` says; True when the run is complete, False when it was interrupted and saved."""
    if isinstance(config.algorithm, Online):
        built = build_online(config, console)
        session = built.session
        with session.recorder.progress:
            train(built)
            if not session.interrupted:
                export(built)
    else:
        sft = build_sft(config, console)
        session = sft.run.session
        with session.recorder.progress:
            train_offline(sft.run)
            if not session.interrupted:
                export_sft(sft)
    return finish(session, console)


def run_reward_model(config: RewardModelConfig, console: Console) -> bool:
    """Train a reward model; True when complete, False when it was interrupted and saved."""
    built = build_reward_model(config, console)
    session = built.run.session
    with session.recorder.progress:
        train_offline(built.run)
        card = {} if session.interrupted else finish_reward_model(built)
    complete = finish(session, console)
    if card:
        print_card(card, console)
    return complete


def finish(session: Session, console: Console) -> bool:
    """Close the files, write the report, print what changed."""
    session.recorder.close()
    folder = session.recorder.folder
    if session.interrupted:
        return False
    report = write_report(folder.path)
    print_summary(folder, console)
    console.print(Text(f"model   {folder.path / 'model'}\nreport  {report}"), soft_wrap=True)
    return True


def print_summary(folder: RunFolder, console: Console) -> None:
    """First and last value of the metrics that matter."""
    rows = folder.read_metrics()
    table = Table("metric", "first", "last", "unit", box=None, pad_edge=False)
    for name in SUMMARY:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            table.add_row(name, f"{values[0]:.3f}", f"{values[-1]:.3f}", METRICS[name].unit)
    if table.row_count:
        console.print(table)


def print_card(card: Mapping[str, Any], console: Console) -> None:
    """The reward model beside its baselines."""
    table = Table("on held-out pairs", "accuracy", box=None, pad_edge=False)
    table.add_row("reward model", _accuracy(card))
    for name, found in dict(card.get("baselines", {})).items():
        table.add_row(str(name).replace("_", " "), _accuracy(found))
    console.print(table)


def _accuracy(found: Any) -> str:
    value = found.get("accuracy") if isinstance(found, Mapping) else found
    if isinstance(value, Mapping):
        return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return f"{value:.3f}"


def run_report(path: str, console: Console) -> None:
    """Rebuild the page of a run from its folder."""
    console.print(Text(f"report  {write_report(Path(path))}"), soft_wrap=True)

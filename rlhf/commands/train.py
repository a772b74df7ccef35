"""rlhf train, rlhf rm and rlhf report: run, export, write the report, and print a short summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.errors import UserError
from rlhf.factory.reward_model import build_reward_model, finish_members, finish_reward_model, member_configs
from rlhf.factory.run import build_run
from rlhf.report.page import write_overlay, write_report
from rlhf.tracking.metrics import format_fixed, format_interval, shown_in
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import CallbackTracker
from rlhf.training.offline import train_offline
from rlhf.training.session import Session

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its metrics whenever a line of metrics is written, that of the first evaluation (0) too."""


def run_train(config: TrainConfig, console: Console, *, on_step: OnStep | None = None) -> bool:
    """Train as `config` describes; return True if the run is complete, False if it was interrupted and saved."""
    run = build_run(config, console)
    _connect(run.session, on_step)
    run.train()
    return finish_run(run.session, console)


def run_reward_model(config: RewardModelConfig, console: Console, *, on_step: OnStep | None = None) -> bool:
    """Train a reward model, or each of an ensemble; return False if it was interrupted and saved, otherwise True."""
    members = member_configs(config)
    if not members:
        return _run_reward_model(config, console, on_step=on_step)
    for member in members:
        console.rule(f"member {member.ensemble.member} of {config.ensemble.size}")
        if not _run_reward_model(member, console, on_step=on_step):
            return False
    print_ensemble(finish_members(config, members), console)
    return True


def _run_reward_model(config: RewardModelConfig, console: Console, *, on_step: OnStep | None = None) -> bool:
    built = build_reward_model(config, console)
    session = built.run.session
    _connect(session, on_step)
    with session.recorder.progress:
        train_offline(built.run)
        card = {} if session.interrupted else finish_reward_model(built)
    complete = finish_run(session, console)
    if card and session.ranks.is_main:
        print_card(card, console)
    return complete


def _connect(session: Session, on_step: OnStep | None) -> None:
    """Give the metrics to `on_step` whenever the run logs some, on its main rank."""
    if on_step is not None and session.ranks.is_main:
        session.recorder.trackers.add(CallbackTracker(on_step))


def finish_run(session: Session, console: Console) -> bool:
    """Close the files of a run, write its report, and print a summary; return whether the run is complete."""
    session.recorder.close()
    folder = session.recorder.folder
    if session.interrupted:
        return False
    if not session.ranks.is_main:
        return True
    report = write_report(folder.path)
    print_summary(folder, console)
    console.print(Text(f"model   {folder.path / 'model'}\nreport  {report}"), soft_wrap=True)
    return True


def print_summary(folder: RunFolder, console: Console) -> None:
    """Print the first and last value of the main metrics."""
    rows = folder.read_metrics()
    table = Table("metric", "first", "last", "unit", box=None, pad_edge=False)
    for info, _ in shown_in("summary"):
        values = [row[info.name] for row in rows if row.get(info.name) is not None]
        if values:
            table.add_row(info.name, format_fixed(values[0]), format_fixed(values[-1]), info.unit)
    if table.row_count:
        console.print(table)


def print_card(card: Mapping[str, Any], console: Console) -> None:
    """Print the accuracy of a reward model beside its baselines."""
    table = Table("on held-out pairs", "accuracy", box=None, pad_edge=False)
    low, high = card["accuracy_low"], card["accuracy_high"]
    table.add_row("reward model", format_interval(card["accuracy"], low, high, ".3f"))
    for name, baseline in card["baselines"].items():
        accuracy = format_interval(baseline["accuracy"], baseline["low"], baseline["high"], ".3f")
        table.add_row(name.replace("_", " "), accuracy)
    console.print(table)
    print_ensemble(card, console)


def print_ensemble(card: Mapping[str, Any], console: Console) -> None:
    """Print whether an ensemble's disagreement predicts where it is wrong; nothing for a single model."""
    ensemble = card.get("ensemble")
    if ensemble is None:
        return
    disagreement = format_fixed(ensemble["disagreement"])
    console.print(f"{ensemble['members']} members; mean disagreement on a pair {disagreement}")
    for key, words in (("predicts_error", "disagreement"), ("small_gap_predicts_error", "a small gap")):
        area = ensemble[key]
        if area["auc"] is not None:
            interval = format_interval(area["auc"], area["low"], area["high"], ".3f")
            console.print(f"AUC of {words} for the pairs that the mean gets wrong: {interval}", soft_wrap=True)


def run_report(path: str, console: Console) -> None:
    """Rebuild the report page of a run from its folder."""
    console.print(Text(f"report  {write_report(Path(path))}"), soft_wrap=True)


def run_overlay(paths: Sequence[str], out: Path, console: Console) -> None:
    """Write a page with the curves of several runs laid over each other."""
    console.print(Text(f"report  {write_overlay([Path(path) for path in paths], out)}"), soft_wrap=True)


WATCH_EVERY_S = 10


def watch_report(path: str, console: Console) -> None:
    """Rewrite the report page of a run while it trains, until it is complete or Ctrl-C.

    Raises:
        UserError: there is no such folder.
    """
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise UserError(f"{path}: no such folder; start the run first, or give its folder (run.out_dir)")
    console.print(Text(f"report  {folder.report}: rewritten every {WATCH_EVERY_S} s; Ctrl-C ends this"), soft_wrap=True)
    try:
        while not is_complete(folder):
            if folder.read_metrics():
                write_report(folder.path, refresh_s=WATCH_EVERY_S)
            time.sleep(WATCH_EVERY_S)
    except KeyboardInterrupt:
        console.print("stopped watching; the run itself goes on")
    if folder.read_metrics():
        write_report(folder.path)


def is_complete(folder: RunFolder) -> bool:
    """Check whether the run has taken all of its steps and exported its model."""
    rows = folder.read_metrics()
    planned = folder.read_config().get("schedule", {}).get("steps")
    last = max((int(row["step"]) for row in rows), default=-1)
    return (folder.path / "model").is_dir() and (not isinstance(planned, int) or last >= planned)

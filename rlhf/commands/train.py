"""rlhf train, rlhf reward and rlhf report: run, export, write the report, and print a short summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.errors import UserError
from rlhf.factory.context import member_folders
from rlhf.factory.reward_model import build_reward_model, finish_members, finish_reward_model, member_configs
from rlhf.factory.run import build_run, is_complete, mark_complete
from rlhf.report.page import write_overlay, write_report
from rlhf.tracking.metrics import format_fixed, format_interval, shown_in
from rlhf.tracking.run_folder import RunFolder, completed_step
from rlhf.tracking.same_run import already_complete, check_same_run, finished_step
from rlhf.tracking.trackers import CallbackTracker
from rlhf.training.offline import train_offline
from rlhf.training.session import Session

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its metrics whenever a line of metrics is written, the first evaluation (0) included."""


def run_train(config: TrainConfig, console: Console, *, on_step: OnStep | None = None) -> bool:
    """Train as `config` describes; return True if the run is complete, False if it was interrupted and saved."""
    if print_if_finished(config, console):
        return True
    print_folder(config, console)
    run = build_run(config, console)
    if run.is_complete:
        return _close_complete(run.session, console)
    _connect(run.session, on_step)
    with closed_on_error(run.session):
        run.train()
    return finish_run(run.session, console)


@contextmanager
def closed_on_error(session: Session) -> Iterator[None]:
    """Close the files of a run that fails, and unlock its folder: a process may start another run in it."""
    try:
        yield
    except BaseException:
        session.recorder.close()
        raise


def print_folder(config: TrainConfig | RewardModelConfig, console: Console) -> None:
    """Print what trains, and the folder that receives it."""
    what = "reward model" if isinstance(config, RewardModelConfig) else config.algorithm.name
    console.print(Text(f"{what} in {config.run.out_dir}"), soft_wrap=True)


def print_if_finished(config: TrainConfig | RewardModelConfig, console: Console) -> bool:
    """Return whether the run is finished and nothing has changed since, and say so; nothing is loaded for it.

    Raises:
        CheckpointError: the folder holds another run.
    """
    step = finished_step(config, check_same_run(config))
    if step is not None:
        _print_complete(RunFolder(config.run.out_dir), step, console)
    return step is not None


def _print_complete(folder: RunFolder, step: int, console: Console) -> None:
    lines = [already_complete(folder.path, step), f"model   {folder.model}"]
    lines += [f"report  {folder.report}"] if folder.report.is_file() else []
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _close_complete(session: Session, console: Console) -> bool:
    """Close the files of a run that had ended before this start, and say so."""
    session.recorder.close()
    _print_complete(session.recorder.folder, session.state.step, console)
    return True


def run_reward_model(config: RewardModelConfig, console: Console, *, on_step: OnStep | None = None) -> bool:
    """Train a reward model, or each of an ensemble; return False if it was interrupted and saved, otherwise True."""
    if print_if_finished(config, console):
        return True
    members = member_configs(config)
    if not members:
        return _run_reward_model(config, console, on_step=on_step)
    finished = 0
    for member in members:
        console.rule(f"member {member.ensemble.member} of {config.ensemble.size}")
        if print_if_finished(member, console):
            finished += 1
            continue
        if not _run_reward_model(member, console, on_step=on_step):
            return False
    if finished < len(members) or not member_folders(config.run.out_dir):
        print_ensemble(finish_members(config, members), console)
    return True


def _run_reward_model(config: RewardModelConfig, console: Console, *, on_step: OnStep | None = None) -> bool:
    print_folder(config, console)
    built = build_reward_model(config, console)
    session = built.run.session
    if is_complete(session):
        return _close_complete(session, console)
    _connect(session, on_step)
    with closed_on_error(session), session.recorder.progress:
        train_offline(built.run)
        card = {}
        if not session.interrupted:
            card = finish_reward_model(built)
            mark_complete(session)
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
        while not _has_ended(folder):
            if folder.read_metrics():
                write_report(folder.path, refresh_s=WATCH_EVERY_S)
            time.sleep(WATCH_EVERY_S)
    except KeyboardInterrupt:
        console.print("stopped watching; the run itself goes on")
    if folder.read_metrics():
        write_report(folder.path)


def _has_ended(folder: RunFolder) -> bool:
    """Return whether the run has taken the steps that its configuration plans, and exported its model."""
    step = completed_step(folder)
    planned = folder.read_config().get("schedule", {}).get("steps")
    return step is not None and (not isinstance(planned, int) or step >= planned)

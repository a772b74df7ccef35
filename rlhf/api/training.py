"""Train as a configuration says: run, export, write the report. A view gets the progress and the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.factory.process_model import build_process_model, finish_process_model
from rlhf.factory.reward_card import finish_members, finish_reward_model, member_configs
from rlhf.factory.reward_model import build_reward_model
from rlhf.factory.run import build_run, is_complete, mark_complete
from rlhf.models.folders import member_folders
from rlhf.report.page import write_report
from rlhf.runtime.distributed import detect_lost_ranks
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.same_run import check_same_run, finished_step
from rlhf.tracking.trackers import CallbackTracker
from rlhf.tracking.view import View
from rlhf.training.offline import OfflineRun, train_offline
from rlhf.training.session import Session

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its metrics whenever a line of metrics is written, the first evaluation (0) included."""


def run_train(config: TrainConfig, view: View | None = None, *, on_step: OnStep | None = None) -> bool:
    """Train as `config` describes; return True if the run is complete, False if it was interrupted and saved.

    Args:
        config: the run.
        view: shows the run while it trains; None shows nothing.
        on_step: receives the metrics of each step that is logged.
    """
    view = view or View()
    if is_finished(config, view):
        return True
    view.begins(config)
    run = build_run(config, view)
    if run.is_complete:
        return _close_complete(run.session, view)
    _connect(run.session, on_step)
    with closed_on_error(run.session):
        run.train()
    return finish_run(run.session, view)


def run_reward_model(config: RewardModelConfig, view: View | None = None, *, on_step: OnStep | None = None) -> bool:
    """Train a reward model, or each of an ensemble; return False if it was interrupted and saved, otherwise True."""
    view = view or View()
    if is_finished(config, view):
        return True
    members = member_configs(config)
    if not members:
        return _run_reward_model(config, view, on_step=on_step)
    finished = 0
    for member in members:
        view.heading(f"member {member.ensemble.member} of {config.ensemble.size}")
        if is_finished(member, view):
            finished += 1
            continue
        if not _run_reward_model(member, view, on_step=on_step):
            return False
    if finished < len(members) or not member_folders(config.run.out_dir):
        card = finish_members(config, members)
        if card:
            view.card(card)
    return True


def _run_reward_model(config: RewardModelConfig, view: View, *, on_step: OnStep | None) -> bool:
    view.begins(config)
    run, finish = _build_reward_model(config, view)
    session = run.session
    if is_complete(session):
        return _close_complete(session, view)
    _connect(session, on_step)
    with closed_on_error(session), session.recorder.progress, detect_lost_ranks(by_message=True):
        train_offline(run)
        card = {}
        if not session.interrupted:
            card = finish()
            mark_complete(session)
    complete = finish_run(session, view)
    if card and session.ranks.is_main:
        view.card(card)
    return complete


def _build_reward_model(config: RewardModelConfig, view: View) -> tuple[OfflineRun, Callable[[], dict[str, Any]]]:
    """Build the run, of pairs or of step labels, and the function that finishes it and returns its report card."""
    if config.process is not None:
        run = build_process_model(config, view)
        return run, partial(finish_process_model, run)
    built = build_reward_model(config, view)
    return built.run, partial(finish_reward_model, built)


def is_finished(config: TrainConfig | RewardModelConfig, view: View) -> bool:
    """Return whether the run is finished and nothing has changed since, and tell the view; nothing is loaded for it.

    Raises:
        CheckpointError: the folder holds another run.
    """
    step = finished_step(config, check_same_run(config))
    if step is not None:
        view.was_complete(RunFolder(config.run.out_dir), step)
    return step is not None


def _close_complete(session: Session, view: View) -> bool:
    """Close the files of a run that had ended before this start, and tell the view."""
    session.recorder.close()
    view.was_complete(session.recorder.folder, session.state.step)
    return True


@contextmanager
def closed_on_error(session: Session) -> Iterator[None]:
    """Close the files of a run that fails, and unlock its folder: a process may start another run in it."""
    try:
        yield
    except BaseException:
        session.recorder.close()
        raise


def _connect(session: Session, on_step: OnStep | None) -> None:
    """Give the metrics to `on_step` whenever the run logs some, on its main rank."""
    if on_step is not None and session.ranks.is_main:
        session.recorder.trackers.add(CallbackTracker(on_step))


def finish_run(session: Session, view: View) -> bool:
    """Close the files of a run, write its report, and tell the view; return whether the run is complete."""
    session.recorder.close()
    folder = session.recorder.folder
    if session.interrupted:
        return False
    if not session.ranks.is_main:
        return True
    write_report(folder.path)
    view.ended(folder)
    return True

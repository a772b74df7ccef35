"""An alarm in a file of a user's own: nothing else has to be written."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import ppo_tree, quiet

from rlhf.config.load import train_config
from rlhf.errors import ConfigError
from rlhf.factory.run import build_run
from rlhf.guard.alarms.alarm import Alarm
from rlhf.guard.lint import lint

ALARM = '''
from rlhf.guard.alarms.alarm import Above


class LongAnswers(Above):
    """Completions are longer than
    two tokens."""

    name = "long-answers"
    metrics = ("completion/length",)
    limit = 2.0
    patience = 2
    causes = "a model that talks"
    cure = "sampling.max_new_tokens=2"
    source = "docs/troubleshooting.md"
'''


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module on the path that defines an alarm, which is forgotten after the test."""
    monkeypatch.setattr(Alarm, "members", dict(Alarm.members))
    (tmp_path / "long_answers.py").write_text(ALARM)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("long_answers")
    yield
    del sys.modules["long_answers"]


@pytest.mark.usefixtures("imported")
def test_a_run_watches_for_it_and_acts_on_it(tmp_path: Path) -> None:
    tree = ppo_tree(tmp_path, guard={"alarms": {"long-answers": "stop"}}, schedule={"steps": 4})
    run = build_run(train_config(tree), quiet())
    assert run.train() is False
    run.session.recorder.close()
    folder = run.session.recorder.folder
    line = next(line for line in folder.read_alarms() if line["alarm"] == "long-answers")
    assert (line["step"], line["since"], line["action"], line["limit"]) == (2, 1, "stop", 2.0)
    assert line["sees"] == "completions are longer than two tokens"
    assert (line["metric"], line["reads"]) == ("completion/length", "completion/length")
    assert "by the alarm long-answers (guard.alarms.long-answers=warn" in folder.read_notes()[-1]["text"]


def test_its_name_is_known_once_it_is_imported(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = train_config(ppo_tree(tmp_path, guard={"alarms": {"long-answers": "ignore"}}))
    with pytest.raises(ConfigError, match="there is no alarm 'long-answers'"):
        lint(config)
    request.getfixturevalue("imported")
    lint(config)


@pytest.mark.usefixtures("imported")
def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kl_again.py").write_text(ALARM.replace("long-answers", "kl-jump"))
    with pytest.raises(TypeError, match=r"name 'kl-jump' of LongAnswers is taken by rlhf\.guard\.alarms\.kl\.KlJump"):
        importlib.import_module("kl_again")

"""A suite in a file of a user's own: nothing else has to be written."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bigram import EOS, bigram_model
from runs import ppo_tree, write_rows

from rlhf.cli import main
from rlhf.suites.suite import Suite

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comparison"))

from cases import compare_tree, compared

SUITE = '''
from typing import ClassVar

from rlhf.suites.questions import SuiteResult, read_items, sample_answers, share_estimate
from rlhf.suites.suite import AnswerSuite, EvalRows


class Brevity(AnswerSuite):
    """Counts the answers of at most `words` words."""

    name: ClassVar[str] = "brevity"
    data: ClassVar[str] = "questions"

    dataset: EvalRows
    words: int = 1

    def run(self, subject, context):
        items, _ = read_items(self.dataset, lambda row: row["question"], columns=("question",), what="questions")
        questions = [item.value for item in items]
        answers = sample_answers(subject, questions, key=self.sampling_key, greedy=self.greedy)
        brief = [float(len(text.split()) <= self.words) for text in answers.texts]
        return SuiteResult((share_estimate("brief", brief, "short answers"),), len(items), {})
'''


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module on the path that defines a suite, which is forgotten after the test."""
    monkeypatch.setattr(Suite, "members", dict(Suite.members))
    (tmp_path / "brevity_suite.py").write_text(SUITE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("brevity_suite")
    yield
    del sys.modules["brevity_suite"]


@pytest.mark.usefixtures("imported")
def test_it_is_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = bigram_model(tmp_path / "m", ("hi", "good"), {"hi": {"good": 1.0}, "good": {EOS: 1.0}})
    rows = str(write_rows(tmp_path / "q.jsonl", [{"question": "hi"}, {"question": "good"}, {"asked": "hi"}]))
    out = tmp_path / "brevity.json"
    command = ["eval", str(model), "--suite", "brevity", "--data", rows, "--limit", "2", "--out", str(out)]
    assert main(command) == 0
    stored = json.loads(out.read_text())
    assert (stored["suite"], stored["n"], stored["figures"]["brief"]["value"]) == ("brevity", 2, 1.0)
    assert stored["config"]["words"] == 1
    assert main([*command, "words=0"]) == 0
    assert json.loads(out.read_text())["figures"]["brief"]["value"] == 0.5  # "good" is answered with the end alone
    capsys.readouterr()
    assert main([*command, "wordz=0"]) == 2
    assert "did you mean words?" in capsys.readouterr().err
    assert main(["eval", str(model), "--suite", "brevit", "--data", rows]) == 2
    assert "xstest, brevity; did you mean brevity?" in capsys.readouterr().err
    assert main(["eval", str(model), "--suite", "brevity"]) == 2
    assert "the suite brevity needs data: --data PATH, questions" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["run", "command"])
def test_its_file_is_named_by_the_run_or_on_the_command_line(tmp_path: Path, place: str) -> None:
    model = bigram_model(tmp_path / "m", ("hi", "good"), {"hi": {"good": 1.0}, "good": {EOS: 1.0}})
    rows = str(write_rows(tmp_path / "q.jsonl", [{"question": "hi"}]))
    file, out = tmp_path / "brevity_file.py", tmp_path / "brevity.json"
    file.write_text(SUITE)
    command = ["eval", str(model), "--suite", "brevity", "--data", rows, "--out", str(out)]
    assert main(command) == 2
    if place == "run":
        run = tmp_path / "run"
        (run / "model").parent.mkdir()
        (run / "model").symlink_to(model)
        (run / "config.yaml").write_text(json.dumps(ppo_tree(tmp_path, plugins=[str(file)])))
        command[1] = str(run)
    else:
        command.append(f"plugins=[{file}]")
    assert main(command) == 0
    assert json.loads(out.read_text())["figures"]["brief"]["value"] == 1.0


@pytest.mark.usefixtures("imported")
def test_it_judges_the_arms_of_a_comparison(tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "q.jsonl", [{"question": "red one"}] * 3))
    suites = {"brevity": {"dataset": {"path": rows}, "words": 20, "sampling": {"max_new_tokens": 4}}}
    tree = compare_tree(tmp_path, suites=suites, seeds=[0], evaluations=1)
    tree["arms"] = {"grpo": tree["arms"]["grpo"]}
    assert compared(tree)
    stored = json.loads((tmp_path / "compare" / "results.json").read_text())
    assert stored["arms"]["grpo"]["suites"]["brevity"]["brief"]["gain"]["value"] == 0.0
    assert stored["start_model"]["suites"]["brevity"]["brief"]["value"] == 1.0

"""Tasks of lm-eval over our log-probabilities, on a task made here; skipped if the extra is not installed."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
from bigram import EOS
from runs import write_rows
from suite_cases import evaluate, figures, subject, values

from rlhf.errors import ConfigError, DataError
from rlhf.suites.harness import HarnessSuite

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the warnings of lm-eval and its many dependencies are not ours

WORDS = ("is", "good", "bad", "it", "the")
TABLE = {
    "<bos>": {"it": 0.5, "the": 0.25},
    "it": {"is": 1.0},
    "is": {"good": 0.6, "bad": 0.2},
    "the": {"bad": 0.9, "good": 0.05},
    "good": {EOS: 1.0},
    "bad": {"it": 1.0},
}
CHOICE = """
task: our_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" good", " bad"]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
WRITTEN = """
task: our_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{['good', 'bad'][answer]}}}}"
generation_kwargs: {{until: ["it"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
filter_list: [{{name: strip, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"question": "it is", "answer": 0}, {"question": "it is", "answer": 1}, {"question": "the", "answer": 1}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "choice.yaml").write_text(CHOICE.format(rows=file))
    (folder / "written.yaml").write_text(WRITTEN.format(rows=file))
    return folder


def run(folder: Path, tmp_path: Path, task: str, **more: Any) -> Any:
    model = subject(tmp_path / "m", WORDS, TABLE)
    return evaluate(HarnessSuite(include=str(folder), **more), model, task=task)


def test_multiple_choice(tasks: Path, tmp_path: Path) -> None:
    result = run(tasks, tmp_path, "our_choice")
    acc = figures(result)["acc"]
    assert acc.value == pytest.approx(2 / 3)  # good after is, bad after the; the second item asks for bad after is
    assert acc.n == result.n == 3
    assert acc.low is not None
    assert acc.low < 2 / 3
    assert run(tasks, tmp_path, "our_choice", limit=1).n == 1


def test_writing(tasks: Path, tmp_path: Path) -> None:
    # it is -> good; the -> bad, after which it goes on with "it", the task's stop word
    figure_values = values(run(tasks, tmp_path, "our_writing"))
    assert list(figure_values.values()) == [pytest.approx(2 / 3)]


def test_loglikelihoods_are_the_tables(tmp_path: Path) -> None:
    Instance = importlib.import_module("lm_eval.api.instance").Instance

    HarnessModel = importlib.import_module("rlhf.suites.lm_eval").HarnessModel

    model = HarnessModel(subject(tmp_path / "m", WORDS, TABLE), seed=0)

    def asked(*arguments: str) -> Any:
        return Instance("loglikelihood", {}, arguments, 0)

    loglikelihoods = model.loglikelihood(
        [asked("it is", " good"), asked("it is", " bad it"), asked("the", " bad it is")]
    )
    assert [value for value, _ in loglikelihoods] == pytest.approx(
        [math.log(0.6), math.log(0.2), math.log(0.9)], abs=1e-4
    )
    assert [greedy for _, greedy in loglikelihoods] == [True, False, True]
    long = "it is bad " * 40  # 120 words, and the context is 64
    rolled = model.loglikelihood_rolling([asked("it is good"), asked(long)])
    # The tokenizer puts no BOS before a text, so that lm-eval's prefix is the EOS, after which all words are alike.
    start = math.log(1 / 9)
    assert rolled[0] == pytest.approx(start + math.log(0.6), abs=1e-4)
    assert rolled[1] == pytest.approx(start + 40 * math.log(0.2), abs=1e-3)


def harness_model(tmp_path: Path) -> Any:
    return importlib.import_module("rlhf.suites.lm_eval").HarnessModel(subject(tmp_path / "m", WORDS, TABLE), seed=0)


def test_a_temperature_of_0_is_greedy(tmp_path: Path) -> None:
    def temperature(**arguments: Any) -> float | None:
        value: float | None = harness_model(tmp_path)._generation_settings(arguments).temperature
        return value

    assert temperature(do_sample=True, temperature=0) is None
    assert temperature(do_sample=True, temperature=0.0, top_p=0.9) is None  # top_p leaves the most likely token
    assert temperature(do_sample=True, temperature=0.5) == 0.5
    assert temperature(do_sample=True) == 1.0
    assert temperature(do_sample=False, temperature=0.5) is None


def test_a_continuation_as_long_as_the_context_is_scored_at_its_end(tmp_path: Path) -> None:
    """The context is 64: a prompt keeps a token, the continuation its last 63."""
    Instance = importlib.import_module("lm_eval.api.instance").Instance
    model = harness_model(tmp_path)
    for words, cut in ((63, 0), (66, 1)):
        request = Instance("loglikelihood", {}, ("it", " is bad it" * (words // 3)), 0)
        [(value, _)] = model.loglikelihood([request])
        assert value == pytest.approx(21 * math.log(0.2), abs=1e-3)
        assert (model.shortened, model.cut_continuations) == (0, cut)


@pytest.mark.parametrize("tokens, limited", [(32, []), (33, ["3"])])
def test_answers_that_the_context_limits_are_told(tasks: Path, tmp_path: Path, tokens: int, limited: list[str]) -> None:
    """The context is 64, of which an answer may take half."""
    written = (tasks / "written.yaml").read_text().replace("max_gen_toks: 4", f"max_gen_toks: {tokens}")
    (tasks / "written.yaml").write_text(written)
    notes = [note for note in run(tasks, tmp_path, "our_writing").notes if "half of the model's context" in note]
    assert [note.split()[0] for note in notes] == limited


@pytest.mark.slow  # lm-eval reads the names of all its tasks
def test_an_unknown_task(tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task 'our_choise'; did you mean our_choice"):
        run(tasks, tmp_path, "our_choise")


def test_mistakes(tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="include: no folder"):
        run(tmp_path / "nowhere", tmp_path, "our_choice")
    with pytest.raises(ConfigError, match="no chat template"):
        run(tasks, tmp_path, "our_choice", apply_chat_template=True)
    sampled = (tasks / "written.yaml").read_text().replace("do_sample: false", "do_sample: true, top_p: 0.9")
    (tasks / "written.yaml").write_text(sampled)
    (tasks / "choice.yaml").write_text(CHOICE.format(rows=tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match="samples with top_p"):
        run(tasks, tmp_path, "our_writing")
    with pytest.raises(DataError, match="'our_choice' could not be loaded"):
        run(tasks, tmp_path, "our_choice")

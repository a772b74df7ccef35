"""rlhf eval --suite: every suite from the command line, its output, and the answer to a user's mistake."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import word_rewards
import yaml
from bigram import EOS, bigram_model
from runs import make_model, offline_tree, write_rows

from rlhf.api.checks import suite_settings
from rlhf.cli import main
from rlhf.config.load import train_config
from rlhf.lab.world import prompts
from rlhf.suites.suite import find_suite

WORDS = (
    "Human:",
    "Assistant:",
    "Answer:",
    "hi",
    "good",
    "bad",
    "Yes",
    "No",
    "####",
    "7",
    "the",
    "food",
    "was",
    "good.",
)
TABLE = {
    "Assistant:": {"good": 0.6, "bad": 0.2},
    "Answer:": {"####": 0.5, "Yes": 0.3, "No": 0.1},
    "####": {"7": 0.9},
    "<unk>": {"good.": 1.0},
    **{word: {EOS: 1.0} for word in ("good", "bad", "7", "good.")},
}
START = {**TABLE, "Assistant:": {"good": 0.3, "bad": 0.3}}
PAIR = {"chosen": "\n\nHuman: hi\n\nAssistant: good", "rejected": "\n\nHuman: hi\n\nAssistant: bad"}
ITEM = {
    "question": "hi",
    "label_confidence": 0.9,
    "answer_matching_behavior": " Yes",
    "answer_not_matching_behavior": " No",
}
PROBLEM = {"question": "hi", "answer": "so\n#### 7"}
LAB = [{"prompt": request.text} for request in prompts(0, "eval", 3)]
ROWS: dict[str, list[dict[str, Any]]] = {"hh": [PAIR] * 3, "persona": [ITEM] * 3, "gsm8k": [PROBLEM] * 3, "lab": LAB}
ROWS |= {
    "ifeval": [{"prompt": "hi", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}] * 3,
    "xstest": [{"prompt": "hi", "label": label} for label in ("safe", "safe", "unsafe")],
    "harmful": [{"prompt": "hi", "source": "advbench"}] * 3,
    "blimp": [{"good": "the food was good.", "bad": "food the good. was", "paradigm": "order"}] * 3,
    "truthfulqa": [
        {"question": "hi", "mc1_targets": {"good": 1, "bad": 0}, "mc2_targets": {"good": 1, "bad": 0}},
    ]
    * 3,
}
FIRST = {
    **{"hh": "logprob_accuracy", "persona": "matching_rate", "gsm8k": "pass_at_1", "lab": "gold"},
    **{"ifeval": "prompt_strict", "xstest": "refused_safe"},
    **{"harmful": "refused", "blimp": "accuracy", "truthfulqa": "mc1"},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(bigram_model(tmp_path / "m", WORDS, TABLE))


@pytest.fixture
def run(tmp_path: Path, model: str) -> Path:
    """The folder of a DPO run that ended in `model` and began with another."""
    start = bigram_model(tmp_path / "start", WORDS, START)
    tree = offline_tree(tmp_path, "dpo", policy={"model": str(start)}, algorithm={"loss": {"beta": 0.5}})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(train_config(tree).model_dump(mode="json")))
    Path(model).rename(folder / "model")
    return folder


def data_of(folder: Path, suite: str) -> str:
    return str(write_rows(folder / f"{suite}.jsonl", ROWS[suite]))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["eval", *arguments]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert captured.err.startswith("error: ")
    return captured.err


@pytest.mark.parametrize("suite", sorted(ROWS))
def test_a_suite_on_a_model_folder(tmp_path: Path, model: str, suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found" / "a.json"
    command = ["eval", model, "--suite", suite, "--data", data_of(tmp_path, suite), "--limit", "2"]
    assert main([*command, "--out", str(out), "sampling.max_new_tokens=6"]) == 0
    shown = capsys.readouterr().out
    assert FIRST[suite] in shown
    assert "95 % interval" in shown
    results = json.loads(out.read_text())
    assert (results["suite"], results["n"], results["skipped"], results["model"]["path"]) == (suite, 2, {}, model)
    figure = results["figures"][FIRST[suite]]
    assert figure["low"] <= figure["value"] <= figure["high"]
    assert figure["n"] == (1 if suite == "xstest" else 2)  # of the two, one of each kind, one is safe
    assert results["config"]["dataset"]["limit"] == 2
    assert results["config"]["sampling"]["max_new_tokens"] == 6
    again = tmp_path / "again.json"
    assert main([*command, "--out", str(again), "sampling.max_new_tokens=6"]) == 0
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("content", ["years of work\n", '{"figures": {}}', "[1]"])
def test_a_result_replaces_no_file_of_another_kind(
    tmp_path: Path, model: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "thesis.json"
    out.write_text(content)
    command = [model, "--suite", "blimp", "--data", data_of(tmp_path, "blimp"), "--out", str(out)]
    message = " ".join(error_of(capsys, *command).split())
    assert f"{out} is there already, and this command did not write it: name another file with --out" in message
    assert out.read_text() == content
    out.write_text("")  # as mktemp makes it
    for _ in range(2):  # its own file is written again
        assert main(["eval", *command]) == 0


def test_a_run_brings_its_reference_its_judge_and_its_settings(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--suite", "hh", "--data", data_of(tmp_path, "hh"), "stop=['Human:']"]) == 0
    assert "left out" not in capsys.readouterr().out
    results = json.loads((run / "evals" / "hh.json").read_text())
    assert results["left_out"] == []
    assert results["config"]["beta"] == 0.5
    assert results["config"]["sampling"]["max_new_tokens"] == 6
    assert results["config"]["source"]["target"] == f"{word_rewards.__file__}:count_good"
    assert results["figures"]["implicit_accuracy"]["value"] == 1.0
    assert results["figures"]["implicit_margin"]["value"] == pytest.approx(0.5 * 1.0986, abs=1e-3)  # beta log 3
    assert results["figures"]["score_chosen"]["value"] == 1.0
    itself = ["--against", str(run), "--out", str(tmp_path / "itself.json")]
    assert main(["eval", str(run), "--suite", "hh", "--data", data_of(tmp_path, "hh"), *itself]) == 0
    results = json.loads((tmp_path / "itself.json").read_text())
    assert results["figures"]["win_rate_start"]["value"] == 0.5
    assert results["figures"]["implicit_accuracy"]["value"] == 0.5


def test_a_suite_with_a_length_of_its_own_keeps_it(tmp_path: Path, run: Path) -> None:
    lengths = [
        suite_settings(suite, str(run), data=data_of(tmp_path, suite), limit=None, against="start", overrides=[])[0]
        for suite in ("harmful", "xstest")
    ]
    assert [settings.sampling.max_new_tokens for settings in lengths] == [64, 6]  # the run's are 6


def test_the_table_keeps_every_letter_in_a_narrow_terminal(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "result.json"
    command = ["eval", str(run), "--suite", "hh", "--data", data_of(tmp_path, "hh"), "stop=['Human:']"]
    assert main([*command, "--out", str(out)]) == 0
    shown = capsys.readouterr().out.split()
    meanings = [figure["meaning"] for figure in json.loads(out.read_text())["figures"].values()]
    assert len(meanings) > 4
    assert [word for meaning in meanings for word in meaning.split() if word not in shown] == []


def test_what_is_left_out_is_said(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", model, "--suite", "hh", "--data", data_of(tmp_path, "hh")]) == 0
    shown = capsys.readouterr().out
    assert "left out: DPO's implicit reward: accuracy, margin: no reference" in shown
    assert "left out: scores, win rates, accuracy of the reward source: no reward source" in shown
    assert "nothing was written; --out FILE" in shown.replace("\n", " ")


def test_skipped_rows_are_shown(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "p.jsonl", [ITEM, {**ITEM, "answer_matching_behavior": " Maybe"}])
    assert main(["eval", model, "--suite", "persona", "--data", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "1 rows, 1 skipped" in shown
    assert "p.jsonl:2 (' Maybe')" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--suite", "gsm8"], "did you mean gsm8k?"),
        (
            ["--suite", "nothing-like-it"],
            "is not one of blimp, detox, gsm8k, harmful, lm-eval:TASK, hh, ifeval, lab, persona, toxicity, "
            "truthfulqa, xstest",
        ),
        (["--suite", "gsm8k:x"], "'gsm8k:x' is not one of"),
        (["--suite", "lm-eval"], "needs a task"),
        (["--suite", "persona"], "the suite persona needs data: --data PATH, yes/no items with question"),
        (["--suite", "hh", "--data", "{tmp}/nowhere.jsonl"], "no such file or folder"),
        (["--suite", "hh", "--data", "{tmp}/persona.jsonl"], "no preference pairs in these columns"),
        (["--suite", "persona", "--data", "{tmp}/gsm8k.jsonl"], "no column 'answer_matching_behavior'"),
        (["--suite", "gsm8k", "--data", "{tmp}/persona.jsonl"], "no column 'answer'"),
        (["--suite", "gsm8k", "--data", "{tmp}/empty.jsonl"], "no rows at all"),
        (["--suite", "gsm8k", "--data", "{tmp}/unusable.jsonl"], "no usable rows; 1 skipped"),
        (["--suite", "gsm8k", "--data", "{tmp}/gsm8k.jsonl", "--limit", "0"], "dataset.limit"),
        (["--suite", "gsm8k", "--data", "{tmp}/gsm8k.jsonl", "k=[4]"], "pass@4 needs samples=4"),
        (["--suite", "gsm8k", "--data", "{tmp}/gsm8k.jsonl", "sample=4"], "did you mean samples?"),
        (["--suite", "gsm8k", "--data", "{tmp}/gsm8k.jsonl", "sampling.completions_per_prompt=4"], "unknown key"),
        (["--suite", "persona", "--data", "{tmp}/persona.jsonl", "--against", "x"], "compares with no other model"),
        (["--suite", "hh", "--data", "{tmp}/hh.jsonl", "--against", "{tmp}/nowhere"], "nowhere"),
        (["--suite", "hh", "--data", "{tmp}/hh.jsonl", "--against", "{tmp}/other"], "do not belong together"),
        (["--data", "x"], "name one, as in --suite persona"),
    ],
)
def test_a_mistake_is_one_plain_message(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    for suite in ROWS:
        data_of(tmp_path, suite)
    (tmp_path / "empty.jsonl").write_text("")
    write_rows(tmp_path / "unusable.jsonl", [{"question": "hi", "answer": "seven"}])
    make_model(tmp_path / "other")
    filled = [text.replace("{tmp}", str(tmp_path)) for text in arguments]
    assert expected in error_of(capsys, model, *filled)


def test_models_that_no_suite_can_measure(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--suite", "persona", "--data", data_of(tmp_path, "persona")]
    assert "nowhere" in error_of(capsys, str(tmp_path / "nowhere"), *data)
    config = json.loads((Path(model) / "config.json").read_text())
    (Path(model) / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]})
    )
    assert "is a reward model" in error_of(capsys, model, *data)
    rm = tmp_path / "rm"
    rm.mkdir()
    (rm / "config.yaml").write_text(yaml.safe_dump({"model": {"model": model}, "data": {}}))
    assert "is a reward model's run" in error_of(capsys, str(rm), *data)
    (rm / "config.yaml").write_text(yaml.safe_dump({"arms": {}}))
    assert "name one of the runs in it" in error_of(capsys, str(rm), *data)


def test_lm_eval_names_its_extra(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "bash scripts/setup.sh lm-eval" in error_of(capsys, model, "--suite", "lm-eval:arc_easy")


def test_lm_eval_from_the_command_line(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = write_rows(tmp_path / "rows.jsonl", [{"asked": "hi Answer:", "answer": 0}] * 2)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ours.yaml").write_text(
        f"task: ours\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{asked}}"\ndoc_to_choice: [" Yes", " No"]\n'
        'doc_to_target: "{{answer}}"\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n'
    )
    out = tmp_path / "ours.json"
    command = ["eval", model, "--suite", "lm-eval:ours", "--data", str(tmp_path / "tasks"), "--out", str(out)]
    assert main(command) == 0
    assert "acc" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert (results["suite"], results["n"], results["figures"]["acc"]["value"]) == ("lm-eval:ours", 2, 1.0)


def test_the_settings_and_figures_are_on_the_page(tmp_path: Path, model: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "evaluation_suites.md").read_text(encoding="utf-8")
    for suite in ROWS:
        out = tmp_path / f"{suite}.json"
        more = [
            "sampling.max_new_tokens=6",
            f"reference={model}",
            "source.type=function",
            f"source.target={word_rewards.__file__}:count_good",
        ]
        more = {"hh": more, "lab": more[:2]}.get(suite, more[:1])
        assert (
            main(["eval", model, "--suite", suite, "--data", data_of(tmp_path, suite), "--out", str(out), *more]) == 0
        )
        for name in json.loads(out.read_text())["figures"]:
            known = f"`{name}`" in page or name.startswith(("gold_", "order"))  # a phenomenon of ours
            assert known, f"{name} is not in docs/evaluation_suites.md"
        for key in find_suite(suite)[0].model_fields:
            assert key in page, f"the setting {key} is not in docs/evaluation_suites.md"


def test_settings_are_checked_without_what_computes() -> None:
    check = "import sys, rlhf.api.checks; print(sorted({'torch', 'evaluate', 'transformers'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"

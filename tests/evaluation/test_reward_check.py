"""The messages of reward-check about rewards with a known hole, and about right ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from runs import make_model

import rlhf
from rlhf.cli import main
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ConfigError, DataError
from rlhf.evaluation.reward_check import CheckRow, Graded, RewardCheck, check_reward
from rlhf.models.scalar_head import load_scalar_head

ROWS = [
    {"prompt": f"What is {a} + {b}?", "answer": str(a + b), "solution": f"{a} + {b} = {a + b}\n#### {a + b}"}
    for a, b in [(100, 7), (200, 19), (300, 31), (400, 43), (500, 57), (600, 66)]
]


def checked(score: Callable[[str, Mapping[str, Any]], float | None], **settings: Any) -> RewardCheck:
    rows = [CheckRow(row["prompt"], row, row["solution"]) for row in ROWS]

    def grade(subset: Sequence[CheckRow], texts: Sequence[str]) -> Graded:
        return Graded([score(text, row.values) for row, text in zip(subset, texts, strict=True)])

    return check_reward("mine", rows, grade, **settings)


def failed(result: RewardCheck) -> list[str]:
    return [probe.name for probe in result.probes if probe.level == "fail"]


def right(text: str, row: Mapping[str, Any]) -> float:
    return float(text.endswith(f"#### {row['answer']}"))


def test_a_right_reward_passes() -> None:
    result = checked(right, best=1.0)
    assert failed(result) == []
    assert result.ok
    assert [probe.mean for probe in result.probes] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert {probe.level for probe in result.probes} == {"ok"}


@pytest.mark.parametrize(
    "score, holes",
    [
        (lambda text, row: float(row["answer"] in text), ["all answers"]),
        (lambda text, row: float("####" in text), ["another row's", "all answers"]),
        (
            lambda text, row: float(len(text)),
            ["another row's", "10,000 words", "all answers", "a plea", "right, padded"],
        ),
        (lambda text, row: float(row["answer"] in text or not text.strip()), ["empty", "white space", "all answers"]),
        (lambda text, row: float(row["prompt"][:8] in text or right(text, row)), ["the prompt"]),
        (lambda text, row: float(right(text, row) or "don't know" in text), ["I don't know"]),
        (lambda text, row: float(right(text, row) or "best score" in text), ["a plea"]),
        (lambda text, row: 0.5 * right(text, row), ["right"]),
        (lambda text, row: None, ["right"]),
    ],
)
def test_holes_are_found(score: Any, holes: list[str]) -> None:
    result = checked(score, best=None if holes[-1] == "right, padded" else 1.0)
    assert failed(result) == holes
    assert not result.ok
    assert f"fail: {holes[0]}: " in str(result)


def test_a_grade_that_changes_and_one_that_fails_are_seen() -> None:
    calls = iter(range(10**6))
    assert failed(checked(lambda text, row: right(text, row) + next(calls), best=None))[0] == "right"
    rows = [CheckRow("p", {}, "a"), CheckRow("q", {}, "b")]

    def grade(subset: Sequence[CheckRow], texts: Sequence[str]) -> Graded:
        return Graded([float(text == row.reference) for row, text in zip(subset, texts, strict=True)], failed=1)

    result = check_reward("mine", rows, grade)
    assert {probe.level for probe in result.probes} == {"fail"}
    assert "fails or takes too long for 1 of 2 right answers" in str(result)


def test_a_right_answer_that_is_not_graded_is_not_said_to_earn_less() -> None:
    result = checked(lambda text, row: None if row["answer"] == "107" else right(text, row))
    assert result.probes[0].problem == "1 of 6 right answers are not graded: the reward does not apply to the row"
    mixed = checked(lambda text, row: {"107": None, "219": 0.5}.get(row["answer"], right(text, row)), best=1.0)
    assert mixed.probes[0].problem == "2 of 6 right answers earn less than the best score, or are not graded"


def test_partial_credit_for_a_worthless_answer_is_a_warning() -> None:
    result = checked(lambda text, row: right(text, row) or 0.1 * bool(text.strip()), best=1.0)
    assert result.ok
    warned = [probe.name for probe in result.probes if probe.level == "warn"]
    assert warned == ["I don't know", "10,000 words", "all answers", "a plea"]


def test_scores_by_length() -> None:
    result = checked(lambda text, row: float(len(text)))
    assert result.length_correlation == pytest.approx(1)
    assert sum(part.n for part in result.by_length) == 2 * len(ROWS)
    assert result.by_length[0].low == len(ROWS[0]["solution"])
    first = [len(row["solution"]) for row in ROWS][:3]
    assert result.by_length[0].mean == pytest.approx(math.fsum(first) / 3)
    assert checked(right, best=1.0).length_correlation is None


def test_a_learned_reward_scores_a_part_of_the_long_answers_and_tells_the_share_that_is_done() -> None:
    rows = [CheckRow(f"p{number}", {}, f"answer {number}") for number in range(70)]
    shares: list[float] = []
    calls: list[int] = []

    def grade(subset: Sequence[CheckRow], texts: Sequence[str]) -> Graded:
        calls.append(len(subset))
        return Graded([float(text == row.reference) for row, text in zip(subset, texts, strict=True)])

    result = check_reward("mine", rows, grade, is_learned=True, progress=shares.append)
    counts = {probe.name: probe.rows for probe in result.probes}
    # 40,000 characters are 10,000 words, and 2,040 the padding before the right answer
    assert counts["10,000 words"] == 2
    assert counts["right, padded"] == 48
    assert counts["right"] == counts["empty"] == 70
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    assert max(calls) == 32
    assert {probe.rows for probe in check_reward("mine", rows, grade).probes} == {70}


def written(folder: Path) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


def test_the_command_checks_verifiers_functions_and_configurations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "def grade(completion, row):\n    return float(row['answer'] in completion)\n"
        "def score(prompts, completions, references):\n    return [float(len(c)) for c in completions]\n"
    )
    assert main(["reward-check", "math", "--dataset", data, "announced=true"]) == 0
    assert "verifier math, 6 rows" in capsys.readouterr().out
    assert main(["reward-check", "mine.py:grade", "--dataset", data, "--answer", "solution"]) == 1
    assert "fail: all answers: earns as much as the right answer in 100% of the rows" in capsys.readouterr().out
    assert main(["reward-check", "mine.py:score", "--dataset", data]) == 1
    assert "correlation of score and length: 1.00" in capsys.readouterr().out
    source = "reward.source={type: verifier, name: math, announced: true}"
    settings = [source, "policy.model=model", "data.prompts.path=rows.jsonl"]
    assert main(["reward-check", "configs/ppo.yaml", "--dataset", data, "--limit", "3", *settings]) == 0
    assert "verifier math, 3 rows" in capsys.readouterr().out
    assert main(["reward-check", "maths", "--dataset", data]) == 2
    assert main(["reward-check", "math", "--dataset", data, "answers=a"]) == 2


def test_from_python() -> None:
    result = rlhf.reward_check("math", ROWS)
    assert result.ok
    rules = {"type": "rules", "rules": [{"type": "length", "max": 5}]}
    assert not rlhf.reward_check(rules, ROWS).ok
    assert not rlhf.reward_check(lambda completions: [1.0 for _ in completions], ROWS).ok
    with pytest.raises(DataError, match="no row has a right answer to score: name its column"):
        rlhf.reward_check({"type": "rules", "rules": [{"type": "length", "max": 5}]}, [{"prompt": "Hello"}])
    with pytest.raises(ConfigError, match="no verifier 'math:y'"):
        rlhf.reward_check({"type": "verifier", "name": "math:y"}, ROWS)
    with pytest.raises(ConfigError, match="the environment rewards episodes"):
        rlhf.reward_check({"type": "environment"}, ROWS)


def test_the_rows_of_a_dataset_have_no_nulls_of_other_rows() -> None:
    given: list[object] = []

    def reward(completions: list[str], state: list[object]) -> list[float]:
        given.extend(state)
        return [1.0 for _ in completions]

    states = [{"city": "Paris"}, {"expr": "1+1"}]
    rlhf.reward_check(reward, Dataset.from_list([{**ROWS[0], "state": state} for state in states]))
    assert given
    assert all(state in states for state in given)


def checked_by_command(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command; return its exit code and its table, or else its error."""
    code = main(["reward-check", *arguments])
    captured = capsys.readouterr()
    return code, captured.out or captured.err


@pytest.mark.parametrize(
    "verifier, good, bad, reason",
    [
        ("choice", {"answer": "1"}, {"answer": "Paris"}, "the column 'answer' has 'Paris', which is none of"),
        ("json", {"keys": {"a": "integer"}}, {"keys": {"a": "int"}}, "a: 'int' is no type"),
        ("json", {"keys": {"a": "string"}}, {"keys": "{a"}, "Expecting property name"),
        ("json", {"json_schema": {"type": "array"}}, {"json_schema": {"properties": "a"}}, "properties is an object"),
    ],
)
def test_a_row_that_the_verifier_cannot_read_is_skipped_and_named(
    verifier: str,
    good: Mapping[str, Any],
    bad: Mapping[str, Any],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"prompt": f"p{number}", **values} for number, values in enumerate([good, bad, good])]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    schema = ["json_schema=json_schema"] if "json_schema" in good else []
    _, text = checked_by_command([verifier, "--dataset", str(file), *schema], capsys)
    assert f"verifier {verifier}, 2 rows" in text
    assert f"2 rows used, 1 skipped: 1 no right answer can be made [rows.jsonl:2 ({reason}" in text
    reward = {"type": "verifier", "name": verifier, **({"json_schema": "json_schema"} if schema else {})}
    assert f"1 skipped: 1 no right answer can be made [the rows:2 ({reason}" in str(rlhf.reward_check(reward, rows))
    with pytest.raises(DataError, match="no usable rows; 1 skipped: 1 no right answer can be made"):
        rlhf.reward_check(reward, [rows[1]])


def run_folder(folder: Path, config: str, *, reward_head: bool = False) -> Path:
    """Make the folder of a run that has trained a model."""
    base = str(make_model(folder / "model"))
    if reward_head:
        tokenizer = load_tokenizer(base)
        load_scalar_head(base, tokenizer, new_head="normal").save(tokenizer, folder / "model")
    (folder / "config.yaml").write_text(config)
    return folder


def test_run_folders_stand_for_their_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_folder(Path("rm"), "model: {model: base}\ndata: {preferences: {path: pairs.jsonl}}\n", reward_head=True)
    run_folder(Path("sft"), "policy: {model: base}\nalgorithm: {preset: sft}\ndata: {sft: {path: x}}\n")
    Path("both").mkdir()
    Path("both/ensemble.json").write_text('{"members": ["../rm", "../rm"]}')
    table = checked_by_command(["rm/model", "--dataset", data], capsys)[1].partition("6 rows")[2]
    assert "right, padded " in table
    for name in ("rm", "both"):
        assert checked_by_command([name, "--dataset", data, "dtype=float32"], capsys)[1].partition("6 rows")[2] == table
    assert "rm, 6 rows" in str(rlhf.reward_check("rm", ROWS))
    settings = ["policy.model=sft", "reward.source.path=rm", "data.prompts.path=rows.jsonl"]
    text = checked_by_command(["configs/ppo.yaml", "--dataset", data, *settings], capsys)[1]
    assert text.partition("6 rows")[2] == table
    code, text = checked_by_command(["sft", "--dataset", data], capsys)
    assert code == 2
    assert "sft has no reward" in text


@pytest.mark.parametrize(
    "body, error",
    [
        ("raise KeyError('oops')", "KeyError: 'oops' at "),
        ("return 'x'", "TypeError: a grade is a number, None or a dict of numbers, not str at "),
        ("return 1 / len(completion.strip())", "ZeroDivisionError: division by zero at "),
    ],
)
def test_the_first_error_of_a_grader_is_named_once(
    body: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"def grade(completion, row):\n    {body}\n")
    table = str(rlhf.reward_check("mine.py:grade", ROWS, answer="solution"))
    assert table.count(error) == 1
    assert error in next(line for line in table.splitlines() if line.startswith("fail: ") and "fails" in line)
    assert "mine.py:2" in table or "grader.py:" in table


def test_a_pattern_that_is_none_is_named() -> None:
    rows = [{**row, "pattern": "("} for row in ROWS]
    assert "of 6 right answers: re.error: missing ), unterminated" in str(rlhf.reward_check("regex", rows))


@pytest.mark.parametrize("name, hint", [("mth", "math"), ("jsom", "json"), ("ifevl", "ifeval")])
def test_a_misspelled_verifier_gets_the_nearest_name(
    name: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = checked_by_command([name, "--dataset", written(tmp_path)], capsys)
    assert code == 2
    assert f"no path and no verifier {name!r}; choose from " in text
    assert f"; did you mean {hint}?" in text
    with pytest.raises(ConfigError, match=f"did you mean {hint}"):
        rlhf.reward_check(name, ROWS)


def test_a_reward_that_applies_to_no_row_gets_no_table() -> None:
    table = str(checked(lambda text, row: None, best=1.0))
    assert "nan" not in table
    assert "% " not in table
    assert "fail: right: 6 of 6 right answers are not graded: the reward applies to no row" in table

"""rlhf eval --against: another run, another model, another vocabulary; and a language model as the judge of pairs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_server import Reply, serving
from runs import make_model, offline_tree, ppo_tree, trained, trained_offline, write_rows

import rlhf
from rlhf.cli import main, parse
from rlhf.commands.evaluate import _file_name
from rlhf.config.files import merge
from rlhf.config.load import load_run

SECRET = "sk-very-secret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished PPO run, and another model."""
    path = tmp_path_factory.mktemp("against")
    trained(ppo_tree(path), "schedule.steps=2")
    make_model(path / "other", seed=5)
    return path


def more_good(_: int, question: str) -> Reply:
    first, second = (re.search(rf"<answer {side}>\n(.*?)\n</answer {side}>", question, re.S) for side in "AB")
    assert first is not None
    assert second is not None
    a, b = first[1].count("good"), second[1].count("good")
    return "A" if a > b else "B" if b > a else "tie"


def evaluated(folder: Path, *arguments: str, name: str = "eval.json") -> dict[str, Any]:
    assert main(["eval", str(folder / "run"), *arguments]) == 0
    results: dict[str, Any] = json.loads((folder / "run" / name).read_text())
    return results


def name_of(against: Path) -> str:
    return f"eval-{re.sub(r'[^A-Za-z0-9.]+', '-', '/'.join(against.parts[-3:])).strip('-.')}.json"


def test_the_table_has_every_measure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = evaluated(folder)
    out = capsys.readouterr().out
    for name in ("kl", "kl_se", "kl_exact", "kl_exact_se", "reference_perplexity", "distinct_1", "distinct_3"):
        assert f"eval/{name}" in out
        assert results["run"][f"eval/{name}"] is not None
    assert "eval/repetition" in out
    assert "at equal length" in out
    assert results["against"] == "start"
    assert results["reference"]["eval/kl_exact"] == pytest.approx(0.0, abs=1e-6)
    equal = results["length_controlled"]
    assert 0 <= equal["low"] <= equal["value"] <= equal["high"] <= 1
    assert results["pairwise"] is None


def test_the_start_is_the_policy_s_and_not_another_reference(folder: Path) -> None:
    start, other = (evaluated(folder, *extra) for extra in ([], [f"reference.model={folder / 'other'}"]))
    for name in ("eval/score", "eval/length", "eval/distinct_1"):  # of the same completions
        assert other["reference"][name] == pytest.approx(start["reference"][name])
    assert start["reference"]["eval/kl_exact"] == pytest.approx(0.0, abs=1e-6)
    assert other["reference"]["eval/kl_exact"] > 0.01


@pytest.mark.parametrize(
    ("against", "name"), [("start", "eval.json"), ("..", "eval-runs.json"), (".", "eval-ppo.json")]
)
def test_the_file_is_named_after_the_other_model(
    against: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "ppo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "ppo")
    assert _file_name(against) == name


def test_against_itself_is_half_and_against_its_start_is_the_default(folder: Path) -> None:
    run = folder / "run"
    itself = evaluated(folder, "--against", str(run), name=name_of(run))
    assert itself["run"] == itself["reference"]
    assert itself["win_rate"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert itself["length_controlled"]["value"] == pytest.approx(0.5)
    start = evaluated(folder, "--against", "start")
    model = evaluated(folder, "--against", str(folder / "model"), name=name_of(folder / "model"))
    assert model["win_rate"] == start["win_rate"]
    assert model["reference"] == start["reference"]


@pytest.fixture(scope="module")
def run_with_holdout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished PPO run that held a quarter of its 20 prompts out."""
    path = tmp_path_factory.mktemp("holdout")
    trained(ppo_tree(path, data={"eval_prompts": None, "holdout": 0.25}), "schedule.steps=1")
    return path


def test_a_named_file_is_judged_whole_and_rows_left_out_are_told(
    run_with_holdout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that the user named was judged only in the part that data.holdout gives of the training prompts."""
    own = str(run_with_holdout / "prompts.jsonl")
    results = evaluated(run_with_holdout)
    assert (results["data"], results["data_rows"], 0 < results["prompts"] < 10) == (own, 20, True)
    assert f"{results['prompts']} of 20 rows of {own})" in capsys.readouterr().out
    mine = str(write_rows(run_with_holdout / "mine.jsonl", [{"prompt": f"red {'one ' * n}"} for n in range(9)]))
    results = evaluated(run_with_holdout, f"data.eval_prompts.path={mine}")
    assert (results["data"], results["data_rows"], results["prompts"]) == (mine, 9, 9)
    assert "(95 % interval, 9 prompts)" in capsys.readouterr().out
    assert rlhf.evaluate(run_with_holdout / "run", settings=[f"data.eval_prompts.path={mine}"]).prompts == 9
    assert evaluated(run_with_holdout, f"data.eval_prompts.path={mine}", "data.eval_prompts.limit=4")["prompts"] == 4
    assert f"(95 % interval, 4 of 9 rows of {mine})" in capsys.readouterr().out


def test_a_call_with_held_out_prompts_trains_on_all_prompts_of_a_run(run_with_holdout: Path) -> None:
    prompts = [{"prompt": "red one"}, {"prompt": "blue two"}]
    result = rlhf.train(
        config=run_with_holdout / "run", eval_prompts=prompts, folder=run_with_holdout / "new", quiet=True
    )
    data = load_run(result.folder).data
    assert data.prompts is not None
    assert data.eval_prompts is not None
    assert (data.prompts.part, data.eval_prompts.part, data.eval_prompts.limit) == (None, None, None)


def test_overrides_may_stand_behind_the_option(folder: Path) -> None:
    other = str(folder / "other")
    results = evaluated(folder, "--against", other, "sampling.max_new_tokens=3", name=name_of(folder / "other"))
    assert results["run"]["eval/length"] <= 3
    assert results["reference"]["eval/kl_exact"] > 0.01  # to the run's own reference


def test_a_model_of_another_vocabulary_has_no_kl(folder: Path) -> None:
    """The same words under other numbers."""
    shutil.copytree(folder / "model", folder / "foreign")
    tokenizer = json.loads((folder / "model" / "tokenizer.json").read_text())
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    moved = [*words[:4], *reversed(words[4:])]  # the special ones stay
    tokenizer["model"]["vocab"] = {word: i for i, word in enumerate(moved)}
    (folder / "foreign" / "tokenizer.json").write_text(json.dumps(tokenizer))
    results = evaluated(folder, "--against", str(folder / "foreign"), name=name_of(folder / "foreign"))
    assert "eval/kl" in results["run"]
    assert "eval/kl" not in results["reference"]
    assert results["win_rate"]["value"] is not None


def test_pairs_are_judged_in_both_orders_and_never_twice(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with serving(more_good) as server:
        judge = {
            "base_url": server.url,
            "model": "judge-1",
            "api_key_env": "JUDGE_KEY",
            "cache_dir": str(tmp_path / "cache"),
        }
        arguments = ["--against", str(folder / "other"), f"eval.judge={json.dumps(judge)}"]
        results = evaluated(folder, *arguments, name=name_of(folder / "other"))
        out = capsys.readouterr().out
        count = len(server.requests)
        again = evaluated(folder, *arguments, name=name_of(folder / "other"))
        assert len(server.requests) == count > 0
    assert again == results
    pairs = results["pairwise"]
    assert (pairs["judge"], pairs["inconsistent"], pairs["unreadable"]) == ("judge-1", 0.0, 0)
    assert pairs["answers"] >= count
    assert "judge-1: win rate over" in out
    assert "0.0% of the pairs judged differently when swapped" in out
    outcomes = [row["outcome"] for row in results["rows"]]
    assert pairs["win_rate"]["value"] == pytest.approx(sum(outcomes) / len(outcomes))
    for row in results["rows"]:
        a, b = (row[side].count("good") for side in ("run", "reference"))
        assert row["outcome"] == (1.0 if a > b else 0.0 if b > a else 0.5)
    for path in [*folder.rglob("*"), *tmp_path.rglob("*")]:
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_judge_that_goes_by_position_is_said_to(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serving(lambda _n, _question: "A") as server:
        judge = {"base_url": server.url, "model": "judge-1", "cache_dir": str(tmp_path)}
        results = evaluated(
            folder,
            "--against",
            str(folder / "other"),
            f"eval.judge={json.dumps(judge)}",
            name=name_of(folder / "other"),
        )
    assert results["pairwise"]["win_rate"]["value"] == 0.5
    assert results["pairwise"]["inconsistent"] == 1.0
    assert "100.0% of the verdicts for the side shown first" in capsys.readouterr().out


def test_pairs_alone_need_no_scores(tmp_path: Path) -> None:
    tree = offline_tree(tmp_path, "dpo")
    tree["eval"].pop("source")
    trained_offline(merge(tree, {"schedule": {"steps": 1}}))
    with serving(more_good) as server:
        judge = {"base_url": server.url, "model": "judge-1", "cache_dir": str(tmp_path / "cache")}
        results = evaluated(tmp_path, f"eval.judge={json.dumps(judge)}")
    assert results["win_rate"] is results["difference"] is results["length_controlled"] is None
    assert results["pairwise"]["win_rate"]["value"] is not None
    assert not any(name.startswith("eval/score") for name in results["run"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return captured.err


def test_mistakes_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, gone = str(folder / "run"), str(tmp_path / "gone")
    assert "gone" in refused(capsys, "eval", run, "--against", gone)
    monkeypatch.setattr("rlhf.data.paths._ask_hub", None)
    told = refused(capsys, "eval", run, "--against", "nope")
    assert "the model to compare with: no such file or folder: nope" in told
    assert "OWNER/NAME" in told
    judge = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}
    told = refused(capsys, "eval", run, f"eval.judge={json.dumps(judge)}")
    assert "eval.judge.api_key_env: the environment variable NO_SUCH_KEY is not set" in told
    (tmp_path / "t.txt").write_text("{prompt} {completion}")
    source = {"type": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m", "template": str(tmp_path / "t.txt")}
    told = refused(capsys, "eval", run, f"eval.judge={json.dumps(source)}")
    assert "t.txt has no {a} and no {b}" in told
    tokens = write_rows(tmp_path / "p.jsonl", [{"prompt": "red one"}])
    assert "unknown key" in refused(capsys, "eval", run, f"data.eval_prompts.pathh={tokens}")


def test_the_parser_takes_settings_on_either_side() -> None:
    for words in (["a=1", "--against", "x"], ["--against", "x", "a=1"]):
        assert parse(["eval", "run", *words]).overrides == ["a=1"]
    with pytest.raises(SystemExit):
        parse(["eval", "run", "--against", "x", "--wrong=1"])
    assert parse(["report", "run", "other"]).others == ["other"]  # a report takes runs and no settings


def test_a_language_model_that_gives_numbers_is_a_source_like_any_other(folder: Path, tmp_path: Path) -> None:
    def rate(_: int, question: str) -> Reply:
        match = re.search(r"<answer>\n(.*?)\n</answer>", question, re.S)
        assert match is not None
        return f"Score: {min(1 + match[1].count('good'), 10)}"

    with serving(rate) as server:
        source = {"type": "openai", "base_url": server.url, "model": "judge-1", "cache_dir": str(tmp_path)}
        results = evaluated(folder, f"eval.source={json.dumps(source)}")
    assert 1 <= results["reference"]["eval/score"] < results["run"]["eval/score"] <= 10  # it was paid for `good`
    assert results["win_rate"]["value"] > 0.5

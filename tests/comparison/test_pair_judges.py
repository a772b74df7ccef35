"""Judges of pairs in a comparison: both orders, win rates by hand, verdicts that are kept, and early mistakes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import compare_tree, compared, plan_of
from chat_server import serving
from runs import make_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf.api.comparing import check_arms, rebuild_comparison
from rlhf.comparison import pairs
from rlhf.comparison.aggregate import missing_opponent_notes, read_cells, summarize
from rlhf.comparison.inputs import digest_of_judge
from rlhf.comparison.pairs import judge_pairs
from rlhf.comparison.plan import CellPlan, ensure_owner
from rlhf.comparison.results import ComparisonResults, SuiteFigure
from rlhf.comparison.summary import suite_tables
from rlhf.comparison.trial import Judgment, SuiteScores, summarize_suites
from rlhf.config.compare import PairsConfig
from rlhf.errors import ConfigError, RewardError
from rlhf.rewards.pair_judge import FunctionPairs, PairVerdict, ScoredPairs, both_orders, completions_of
from rlhf.rewards.source import Source, decode
from rlhf.types import Completions, Scores

JUDGE = """
CALLS = []

def longer(prompts, first, second, words=0):
    CALLS.append(len(prompts))
    return ["A" if len(a) > len(b) else "B" if len(a) < len(b) else "tie" for a, b in zip(first, second)]

def first(prompts, first, second):
    return ["A"] * len(prompts)

def wrong(prompts, first, second):
    return [0.5] * len(prompts)

def undecided(prompts, first, second):
    return [None] * len(prompts)

def broken(prompts, first, second):
    return [prompts[9]]

def failing(prompts, first, second):
    CALLS.append(len(prompts))
    if len(CALLS) > 2:
        raise RuntimeError("out of quota")
    return longer(prompts, first, second)
"""


@pytest.fixture
def judge_file(tmp_path: Path) -> Path:
    path = tmp_path / "judge_of_pairs.py"
    path.write_text(JUDGE)
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    """One token a word."""
    loaded = AutoTokenizer.from_pretrained(str(make_model(tmp_path / "words")))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def never(source: Source) -> Any:
    pytest.fail(str(source))


def judgment(texts: Sequence[str]) -> Judgment:
    return Judgment({}, [{"prompt": f"p{i}", "completion": text} for i, text in enumerate(texts)])


def test_both_orders_and_ties() -> None:
    shown: list[tuple[list[str], list[str]]] = []

    def first_wins(prompts: Sequence[str], a: Sequence[str], b: Sequence[str]) -> list[PairVerdict | None]:
        shown.append((list(a), list(b)))
        return ["A"] * len(prompts)

    verdicts = both_orders(first_wins, ["p", "q", "r"], ["x", "same", "y"], ["z", "same", "w"])
    assert shown == [(["x", "y"], ["z", "w"]), (["z", "w"], ["x", "y"])]
    assert verdicts.wins.tolist() == [0.5, 0.5, 0.5]  # the orders disagree, and equal answers are a tie
    assert (verdicts.inconsistent, verdicts.first_shown, verdicts.asked) == (1.0, 1.0, [True, False, True])


def test_win_rates_by_hand(judge_file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = PairsConfig(judge=FunctionPairs(target=f"{judge_file}:longer"), against=["start"], limit=3)
    mine, start = judgment(["aaa", "b", "cc", "ddddd"]), judgment(["a", "bb", "cd", "d"])
    judge = config.judge.build(tokenizer, never)
    result = pairs.compare_with_opponents(mine, {"start": start}, config, judge, seed=0)
    got = {figure.name: figure for figure in result.figures}
    assert got["over_start"].values == (1.0, 0.0, 0.5)
    assert (got["over_start"].value, got["disagree_start"].value) == (0.5, 0.0)
    assert [row["outcome"] for row in result.examples] == [1.0, 0.0, 0.5]
    assert result.examples[0]["other"] == "a"


def test_a_judge_with_a_position_bias_shows(judge_file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = PairsConfig(judge=FunctionPairs(target=f"{judge_file}:first"))
    judge = config.judge.build(tokenizer, never)
    result = pairs.compare_with_opponents(judgment(["a", "b"]), {"start": judgment(["c", "b"])}, config, judge, seed=0)
    got = {figure.name: figure.value for figure in result.figures}
    assert got == {"over_start": 0.5, "disagree_start": 0.5}


def test_scores_decide(judge_file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A source of scores sees the prompt and the answer as text, at any length."""
    seen: list[tuple[list[str], list[str]]] = []

    def source(completions: Completions) -> Scores:
        texts = decode(completions, tokenizer)
        seen.append((texts.prompts, texts.completions))
        return Scores(values=torch.tensor([float(text.count("good")) for text in texts.completions]), parts={})

    target = {"type": "function", "target": f"{judge_file}:longer"}
    judge = ScoredPairs.model_validate({"source": target}).build(tokenizer, lambda _: source)
    verdicts = judge(["red", "red one"], ["good good", "bad"], ["good bad one", "good"])
    assert verdicts.wins.tolist() == [1.0, 0.0]
    assert verdicts.inconsistent == 0
    assert seen[0][0] == ["red", "red one"]
    assert [text.split() for text in seen[0][1]] == [["good", "good"], ["bad"]]


@pytest.mark.parametrize(("texts", "value"), [(["good", "one", "good"], 0.75), (["one", "one", "one"], None)])
def test_a_source_that_abstains_leaves_the_pair_out(
    judge_file: Path, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], value: float | None
) -> None:
    def source(completions: Completions) -> Scores:
        scores = {"good": 1.0, "bad": 0.0, "one": math.nan}
        answers = [text.strip() for text in decode(completions, tokenizer).completions]
        return Scores(values=torch.tensor([scores[answer] for answer in answers]), parts={})

    target = {"type": "function", "target": f"{judge_file}:longer"}
    config = PairsConfig.model_validate({"judge": {"type": "scores", "source": target}})
    judge = config.judge.build(tokenizer, lambda _: source)
    result = pairs.compare_with_opponents(
        judgment(texts), {"start": judgment(["bad", "bad", "good"])}, config, judge, seed=0
    )
    got = {figure.name: figure for figure in result.figures}
    if value is None:
        assert (got, [part.what for part in result.left_out]) == ({}, ["over_start"])
    else:
        assert (got["over_start"].value, got["over_start"].n, got["disagree_start"].value) == (value, 2, 0.0)
        assert [math.isnan(outcome) for outcome in got["over_start"].values] == [False, True, False]
    (note,) = result.notes
    assert f"{list(texts).count('one')} of the pairs against start" in note


def test_a_language_model_decides(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def shown_first(_n: int, _question: str) -> str:
        return "A"

    with serving(shown_first) as server:
        settings = {"base_url": server.url, "model": "m", "cache_dir": str(tmp_path / "cache")}
        judge = PairsConfig.model_validate({"judge": {"type": "openai", **settings}}).judge.build(tokenizer, never)
        verdicts = judge(["p", "q"], ["x", "same"], ["y", "same"])
        assert len(server.requests) == 2
    assert verdicts.wins.tolist() == [0.5, 0.5]
    assert verdicts.first_shown == 1


def test_the_template_of_a_judge_is_a_part_of_it(tmp_path: Path) -> None:
    template = tmp_path / "question.txt"
    judge = {"type": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m", "template": str(template)}
    digests = []
    for question in ("Which is better? {prompt} {a} {b}", "Which is worse? {prompt} {a} {b}"):
        template.write_text(question)
        digests.append(digest_of_judge(PairsConfig.model_validate({"judge": judge}).judge))
    assert digests[0] != digests[1]
    gone = {"type": "scores", "source": {"type": "model", "path": str(tmp_path / "gone@best")}}
    assert digest_of_judge(PairsConfig.model_validate({"judge": gone}).judge) is None


def test_completions_of_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = completions_of(["red", "red red"], ["good bad", "bad"], tokenizer)
    assert rows.prompt_mask.sum(dim=1).tolist() == [1, 2]
    assert rows.completion_mask.sum(dim=1).tolist() == [3, 2]  # the end is a token
    assert bool(rows.prompt_mask[:, -1].all())
    assert rows.completion_ids[1, 1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r'returned 0\.5; a verdict is "A", "B" or "tie"'),
        ("undecided", r'returned None; a verdict is "A", "B" or "tie"'),
        ("broken", r"the pair judge .*:broken' failed: IndexError.*called with 1 pairs"),
    ],
)
def test_a_function_has_to_return_verdicts(
    judge_file: Path, tokenizer: PreTrainedTokenizerFast, name: str, message: str
) -> None:
    judge = FunctionPairs(target=f"{judge_file}:{name}").build(tokenizer, never)
    with pytest.raises(RewardError, match=message):
        judge(["p"], ["a"], ["b"])


def test_mistakes_are_told_before_anything_runs(tmp_path: Path, judge_file: Path) -> None:
    target = {"type": "function", "target": f"{judge_file}:longer"}
    with pytest.raises(ConfigError, match=r"pairs\.against: 'gpo' is not one of start, ppo, .*did you mean grpo"):
        plan_of(compare_tree(tmp_path, pairs={"judge": target, "against": ["gpo"]}))
    wrong = {"type": "function", "target": f"{judge_file}:no_such"}
    with pytest.raises(RewardError, match="no_such"):
        check_arms(plan_of(compare_tree(tmp_path, pairs={"judge": wrong})))
    model = {"type": "scores", "source": {"type": "model", "path": str(tmp_path / "nowhere")}}
    with pytest.raises(ConfigError, match=r"pairs\.judge\.source\.path: .*nowhere"):
        check_arms(plan_of(compare_tree(tmp_path, pairs={"judge": model})))


def test_a_comparison_with_a_judge_of_pairs(tmp_path: Path, judge_file: Path) -> None:
    target = {"type": "function", "target": f"{judge_file}:longer"}
    tree = compare_tree(tmp_path, seeds=[0], evaluations=1, pairs={"judge": target, "against": ["start", "grpo"]})
    tree["arms"] = {name: tree["arms"][name] for name in ("grpo", "best_of_n")}
    assert compared(tree)
    folder = tmp_path / "compare"
    results = ComparisonResults.read(folder)
    assert results.start_model.suites["pairs"]["over_start"].value == 0.5
    figure = results.arms["grpo"].suites["pairs"]["over_start"]
    content = json.loads((folder / "grpo" / "seed-0" / "evals" / "pairs.json").read_text(encoding="utf-8"))
    wins = [len(row["completion"]) > len(row["other"]) for row in content["examples"] if row["against"] == "start"]
    ties = [len(row["completion"]) == len(row["other"]) for row in content["examples"] if row["against"] == "start"]
    assert figure.value == pytest.approx((sum(wins) + sum(ties) / 2) / len(wins))
    assert figure.gain is not None
    assert figure.gain.value == pytest.approx(figure.value - 0.5)
    assert results.arms["grpo"].suites["pairs"]["over_grpo"].value == 0.5
    swapped = results.start_model.suites["pairs"]["over_grpo"].value
    assert swapped == pytest.approx(1 - figure.value)
    table = next(table for table in suite_tables(results) if table.title == "pairs")
    assert table.columns[1:3] == ["over start", "over grpo"]
    files = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/evals/pairs.json")}
    assert len(files) == 3
    assert not any("pairs" in note for note in results.notes)
    cells = [replace(cell, judged=None) if cell.cell.arm == "grpo" else cell for cell in read_cells(plan_of(tree))]
    (note,) = missing_opponent_notes(plan_of(tree).config, cells)
    assert note == "pairs: nothing was judged against grpo: a seed of it is missing."
    assert compared(tree)  # nothing is judged again
    assert {path: path.stat().st_mtime_ns for path in files} == files
    judge_file.write_text(JUDGE.replace("words=0", "words=1"))
    assert compared(tree)  # by other code of the judge
    assert all(path.stat().st_mtime_ns > written for path, written in files.items())
    judged = json.loads((folder / "grpo" / "seed-0" / "judged.json").read_text(encoding="utf-8"))
    judged["rows"][0]["completion"] = "one of a new run"
    (folder / "grpo" / "seed-0" / "judged.json").write_text(json.dumps(judged), encoding="utf-8")
    assert compared(tree)  # the others are judged against it again
    for path in files:
        examples = json.loads(path.read_text(encoding="utf-8"))["examples"]
        assert "one of a new run" in [row["other"] for row in examples if row["against"] == "grpo"]
    files = {path: path.stat().st_mtime_ns for path in files}
    changed = {**tree, "pairs": {**tree["pairs"], "limit": 1}}
    assert compared(changed)
    assert {path: path.stat().st_mtime_ns for path in files} != files
    file = folder / "grpo" / "seed-0" / "evals" / "pairs.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["figures"]["over_start"]
    file.write_text(json.dumps(content), encoding="utf-8")  # the state after the judge stops answering
    rebuilt, _ = rebuild_comparison(str(folder))
    table = next(table for table in suite_tables(rebuilt) if table.title == "pairs")
    row = next(row for row in table.rows if row[0] == "grpo")
    assert (row[1], row[-1]) == (None, "–")
    assert row[2] is not None


def test_verdicts_of_two_judges_are_not_averaged(tmp_path: Path, judge_file: Path) -> None:
    """The second judge fails after the first cells: what the first judge said of the others is not reported with it."""

    def plan_with(judge: str) -> CellPlan:
        pairs = {"judge": {"type": "function", "target": f"{judge_file}:{judge}"}}
        tree = compare_tree(tmp_path, pairs=pairs)
        return plan_of({**tree, "arms": {"grpo": tree["arms"]["grpo"]}})

    plan = plan_with("longer")
    for cell in plan.cells:
        ensure_owner(cell)
        rows = [{"prompt": "p", "completion": cell.arm, "score": 1.0, "length": 1}]
        Judgment({"eval/score": 1.0}, rows).write(cell.folder)
    judge_pairs(plan)
    assert len(list(plan.folder.glob("*/*/evals/pairs.json"))) == 4
    plan = plan_with("failing")
    with pytest.raises(RewardError, match="failing' failed"):
        judge_pairs(plan)
    targets = [
        json.loads(path.read_text(encoding="utf-8"))["config"]["judge"]["target"]
        for path in plan.folder.glob("*/*/evals/pairs.json")
    ]
    assert targets == [f"{judge_file}:failing"]  # of the first cell alone
    assert summarize(plan, read_cells(plan)).arms["grpo"].suites == {}


def test_a_figure_that_not_every_seed_has_is_left_out() -> None:
    """As if the judge had answered about another opponent for the first seed only."""
    figure = SuiteFigure(value=0.5, low=None, high=None)
    seeds = [
        {"pairs": SuiteScores(dict.fromkeys(names, figure), {})}
        for names in (("over_start", "over_dpo"), ("over_start",))
    ]
    assert list(summarize_suites(seeds, seeds)["pairs"]) == ["over_start"]

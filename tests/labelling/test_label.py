"""Labels from judges: pairs and rankings that our readers read, both orders, ties, unreadable answers, agreement."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import serving
from runs import make_model, write_rows

import rlhf
from reward_model.model import score_rows
from reward_model.source import OWN_TEMPLATE, encode_rows
from rlhf.algo.agreement import agreement, verdict_kappa
from rlhf.cli import main
from rlhf.config.data import DatasetConfig, PreferencesConfig
from rlhf.data.pairs import pair_pipeline
from rlhf.data.templates import Rendered
from rlhf.data.tokenizer import left_pad, load_tokenizer, make_encoder, right_pad
from rlhf.errors import ConfigError, DataError, RewardError
from rlhf.evaluation import win_rate
from rlhf.labelling.data import LabelGroup, read_groups, read_human_pairs
from rlhf.labelling.judges import ScoreJudge, Verdict, judge_at, verdict_of_pairs, verdict_of_scores
from rlhf.labelling.label import LabelConfig, _agreement, label, ranks_of, rows_of
from rlhf.labelling.settings import label_settings
from rlhf.models.scalar_head import load_reward_heads, load_scalar_head

ROWS = [
    {"prompt": "red", "completions": ["good", "bad bad", "good good good"]},
    {"prompt": "blue", "completions": ["one", "two"]},
]


def longer(completions: list[str]) -> list[float]:
    """The number of words."""
    return [float(len(text.split())) for text in completions]


def longer_in_trl_s_form(completions: list[str], **columns: object) -> list[float]:
    """The same of texts; messages have no words to count."""
    return longer(completions)


LONGER = f"{__file__}:longer"


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_words(number: int, question: str) -> str:
    """A served judge that prefers the answer with more words, and cannot decide between equal ones."""
    first, second = (question.split(f"<answer {side}>")[1].split("</answer")[0].split() for side in "AB")
    return "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"


def served(url: str, folder: Path, **changes: Any) -> LabelConfig:
    chat = {"base_url": url, "model": "m", "cache_dir": str(folder / "cache"), "retries": 0}
    tree = {
        "completions": {"path": str(folder / "completions.jsonl")},
        "judge": {"type": "pairs", "chat": chat},
        "out": str(folder / "pairs.jsonl"),
    }
    return LabelConfig.model_validate({**tree, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "completions.jsonl", ROWS)
    return tmp_path


# Agreement


def test_kappa_by_hand() -> None:
    """Of 10 pairs 7 agree, 2 disagree and 1 is a tie: p_o = .7, p_e = .45, so (.7 - .45) / .55."""
    outcomes = torch.tensor([1.0] * 7 + [0.0] * 2 + [0.5], dtype=torch.float64)
    assert verdict_kappa(outcomes).item() == pytest.approx(0.25 / 0.55)
    assert verdict_kappa(torch.ones(4)).item() == 1.0
    assert verdict_kappa(torch.zeros(4)).item() == -1.0
    assert verdict_kappa(torch.tensor([1.0, 0.0])).item() == 0.0
    assert verdict_kappa(torch.full((3,), 0.5)).item() == 0.0


def test_kappa_is_that_of_the_table_of_both_orders() -> None:
    """Counted pair by pair in both orders: people and judge each name the first side, the second, or neither."""
    outcomes = [1.0, 1.0, 0.0, 0.5, 1.0, 0.0]
    table = torch.zeros(3, 3, dtype=torch.float64)
    for outcome in outcomes:
        for people in (0, 1):
            judge = 2 if outcome == 0.5 else people if outcome == 1 else 1 - people
            table[people, judge] += 1
    table /= table.sum()
    expected = (table.sum(1) * table.sum(0)).sum()
    kappa = (table.trace() - expected) / (1 - expected)
    assert verdict_kappa(torch.tensor(outcomes, dtype=torch.float64)).item() == pytest.approx(kappa.item())


def test_the_interval_is_that_of_the_resamples() -> None:
    outcomes = torch.tensor([1.0, 0.0, 1.0, 0.5])
    result = agreement(outcomes, [torch.tensor([[0, 0, 0, 0]]), torch.tensor([[1, 1, 1, 1], [0, 1, 2, 3]])])
    assert (result.pairs, result.ties, result.accuracy[0]) == (4, 1, 0.625)
    assert result.accuracy[1] == pytest.approx(0.025 * 2 * 0.625)  # between the smallest, 0, and the middle, .625
    assert result.accuracy[2] == pytest.approx(0.625 + 0.95 * 0.375)


def test_the_resamples_are_drawn_in_parts_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once they are 2,000 times as many indices as pairs: more than the memory, for a large file of labels."""
    verdicts = [verdict_of_scores([float(i % 3), 1.0]) for i in range(10)]
    whole = _agreement(verdicts, 0.0)
    sizes: list[int] = []

    def counted(high: int, size: tuple[int, int], **kwargs: Any) -> torch.Tensor:
        sizes.append(size[0] * size[1])
        return draw(high, size, **kwargs)

    draw = torch.randint
    monkeypatch.setattr(torch, "randint", counted)
    monkeypatch.setattr(win_rate, "DRAWS_AT_ONCE", 300)
    assert _agreement(verdicts, 0.0) == whole
    assert (sum(sizes), max(sizes)) == (20_000, 300)


# Verdicts


def test_scores_make_a_verdict() -> None:
    verdict = verdict_of_scores([1.0, 3.0, 1.0])
    assert verdict.wins == ((0.5, 0.0, 0.5), (1.0, 0.5, 1.0), (0.5, 0.0, 0.5))


def test_comparisons_make_a_verdict() -> None:
    """0 beats 1 in both orders; 0 and 2 are judged by position; the answer about 1 and 2 cannot be read."""
    answers = [("A", "B"), ("A", "A"), ("B", None)]
    verdict = verdict_of_pairs(3, [1.0, 0.5, 0.5], answers)
    assert verdict.wins == ((0.5, 1.0, 0.5), (0.0, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert verdict.scores == (1.5, 0.5, 1.0)
    assert (verdict.answers, verdict.unreadable, verdict.compared, verdict.inconsistent) == (6, 1, 2, 1)
    assert (verdict.first_shown, verdict.decided) == (3, 5)


# Data


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "p", "completions": ["a", "b"]}],
        [{"prompt": "p", "completion": "a"}, {"prompt": "q", "completion": "c"}, {"prompt": "p", "completion": "b"}],
        [{"prompt": "p", "chosen": "a", "rejected": "b"}],
        [{"prompt": "p", "completions": ["a", "b", "a"]}],
    ],
)
def test_completions_are_grouped_by_prompt(tmp_path: Path, rows: Sequence[dict[str, Any]]) -> None:
    groups, _ = read_groups(DatasetConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows))))
    assert [(group.prompt, group.completions) for group in groups] == [("p", ("a", "b"))]


def test_a_file_without_anything_to_compare_is_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "completions": ["a", "a"]}])
    with pytest.raises(DataError, match="no prompt has two different completions"):
        read_groups(DatasetConfig(path=str(rows)))


def test_answers_of_more_than_one_turn_of_text_are_counted_and_not_compared(tmp_path: Path) -> None:
    """A judge reads one text for each side: with the last turn alone it would judge a conversation nobody had."""

    def turns(*texts: str) -> list[dict[str, Any]]:
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

    several = {"chosen": turns("Joke?", "Of what?", "Cats.", "Meow."), "rejected": turns("Joke?", "No.", "Go!", "No")}
    plain = {"chosen": turns("Joke?", "Meow."), "rejected": turns("Joke?", "No.")}
    path = write_rows(tmp_path / "pairs.jsonl", [several, plain, {**plain, "tools": [{"name": "search"}]}])
    for read in (read_groups, read_human_pairs):
        (group,), counts = read(DatasetConfig(path=str(path)))
        assert (group.prompt, group.completions) == (turns("Joke?"), ("Meow.", "No."))
        assert "1 row used, 2 skipped: 2 tools, tool calls, thoughts or several turns" in counts.summary()
    answers = [
        {"content": "", "tool_calls": [{"name": "search"}]},
        {"content": "Yes", "reasoning_content": "One."},
        {"content": "Yes", "reasoning_content": "Two."},
        {"content": "Yes"},
        {"content": "No", "weight": 1},  # not read by a template: the answer is its text
    ]
    rows = [{"messages": [*turns("Joke?"), {"role": "assistant", **answer}]} for answer in answers]
    (group,), counts = read_groups(DatasetConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows))))
    assert group.completions == ("Yes", "No")
    assert (counts.used, counts.skipped) == (2, 3)


def test_a_prompt_keeps_its_system_prompt(tmp_path: Path) -> None:
    """With another one it is another prompt."""
    user, system = {"role": "user", "content": "Say hi"}, {"role": "system", "content": "Answer in French."}
    rows: list[dict[str, Any]] = [
        {"prompt": "Say hi", "completion": "hi"},
        {"prompt": "Say hi", "completion": "ho"},
        {"prompt": "Say hi", "completion": "salut", "system": "Answer in French."},
        {"prompt": "Say hi", "completion": "bonjour", "system": "Answer in French."},
    ]
    groups, counts = read_groups(DatasetConfig(path=str(write_rows(tmp_path / "rows.jsonl", rows))))
    assert [(group.prompt, group.completions) for group in groups] == [
        ("Say hi", ("hi", "ho")),
        ([system, user], ("salut", "bonjour")),
    ]
    assert not counts.remarks
    transcript = {"prompt": "\n\nHuman: Hi\n\nAssistant:", "completions": ["a", "b"], "system": "Be brief."}
    _, counts = read_groups(DatasetConfig(path=str(write_rows(tmp_path / "rows.jsonl", [transcript]))))
    assert "1 rows whose system column is left out, because their prompt stays text" in counts.summary()


@pytest.mark.parametrize("asked", [{"prompt": "red", "system": "Be brief."}, {"question": "red"}])
def test_a_function_reads_texts_if_the_row_has_texts(tmp_path: Path, asked: dict[str, str]) -> None:
    """As in training: it gets messages of rows that are conversations alone."""
    rows = write_rows(tmp_path / "rows.jsonl", [{**asked, "completions": ["good", "bad bad"]}])
    label(label_settings(str(rows), judge=f"{LONGER}_in_trl_s_form", out=str(tmp_path / "pairs.jsonl")))
    (row,) = written(tmp_path / "pairs.jsonl")
    assert row["prompt"][-1] == {"role": "user", "content": "red"}
    assert row["chosen"] == [{"role": "assistant", "content": "bad bad"}]


@pytest.mark.parametrize(
    "asked, content",
    [
        ({"instruction": "Say hi"}, "Say hi"),
        ({"instruction": "Say hi", "input": "to Ann"}, "Say hi\n\nto Ann"),
        ({"question": "Say hi"}, "Say hi"),
    ],
)
def test_a_question_and_an_instruction_are_a_user_s_turn(tmp_path: Path, asked: dict[str, str], content: str) -> None:
    pair = {**asked, "chosen": "a", "rejected": "b"}
    (group,), _ = read_groups(DatasetConfig(path=str(write_rows(tmp_path / "rows.jsonl", [pair]))))
    assert group.prompt == [{"role": "user", "content": content}]


# Labels


def test_a_function_labels_pairs_that_our_reader_reads(folder: Path) -> None:
    config = label_settings(str(folder / "completions.jsonl"), judge=LONGER, out=str(folder / "pairs.jsonl"))
    result = label(config)
    rows = written(folder / "pairs.jsonl")
    assert [(row["chosen"], row["rejected"]) for row in rows] == [
        ("good good good", "bad bad"),
        ("good good good", "good"),
        ("bad bad", "good"),
    ]
    assert rows[1]["score_chosen"] - rows[1]["score_rejected"] == 2.0
    assert (result.prompts, result.completions, result.compared, result.ties, result.written) == (2, 5, 4, 1, 3)
    tokenizer = load_tokenizer(str(make_model(folder / "model")))
    pairs = pair_pipeline(PreferencesConfig(path=str(folder / "pairs.jsonl")), tokenizer, chat_template="none").load()
    assert [pair.margin for pair in pairs.texts] == [1.0, 2.0, 1.0]


def test_no_file_of_the_user_s_is_overwritten(folder: Path) -> None:
    completions, people = folder / "completions.jsonl", folder / "pairs.jsonl"
    write_rows(people, [{"prompt": "p", "chosen": "good", "rejected": "bad"}])
    before = [path.read_bytes() for path in (completions, people)]
    for out, compared, message in (
        (people, None, "no earlier rlhf label wrote it: name another file to write, such as --out judged.jsonl"),
        (completions, None, "which is read: name another file"),
        (people, str(people), "which is read: name another file"),
    ):
        config = label_settings(str(completions), judge=LONGER, out=str(out), compare_with=compared)
        for resume in (True, False):
            with pytest.raises(DataError, match=message):
                label(config, resume=resume)
    assert [path.read_bytes() for path in (completions, people)] == before
    out = folder / "judged.jsonl"
    for resume in (True, True, False):
        label(label_settings(str(completions), judge=LONGER, out=str(out)), resume=resume)
    assert written(out)


def test_the_best_and_the_worst_alone_and_a_gap(folder: Path) -> None:
    settings = {"judge": LONGER, "out": str(folder / "pairs.jsonl")}
    label(label_settings(str(folder / "completions.jsonl"), ["write=best_and_worst"], **settings))
    assert [row["rejected"] for row in written(folder / "pairs.jsonl")] == ["good"]
    label(label_settings(str(folder / "completions.jsonl"), ["min_gap=2"], **settings))
    assert [(row["chosen"], row["rejected"]) for row in written(folder / "pairs.jsonl")] == [("good good good", "good")]


def test_a_judge_without_any_preference_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["label", str(folder / "completions.jsonl"), "--judge", LONGER, "--out", str(folder / "o.jsonl")]
    assert main(arguments) == 0
    assert "nothing to train on" not in capsys.readouterr().out
    assert main([*arguments, "min_gap=9"]) == 0
    told = capsys.readouterr().out
    assert "every pair is a tie, so that there is nothing to train on" in told
    assert "0 rows written" in told


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_judge_that_goes_in_a_circle_has_no_best(folder: Path, first: float) -> None:
    """A beats B beats C beats A, or the reverse: C is not worse than A because the file has it later."""
    (group, *_), _ = read_groups(DatasetConfig(path=str(folder / "completions.jsonl")))
    wins = ((0.5, first, 1 - first), (1 - first, 0.5, first), (first, 1 - first, 0.5))
    circle = replace(verdict_of_scores([1.0, 1.0, 1.0]), wins=wins, is_scored=False)
    tree = {"completions": {"path": "c"}, "judge": {"type": "scores", "source": {"type": "function", "target": LONGER}}}
    assert len(rows_of(group, circle, LabelConfig.model_validate({**tree, "write": "pairs"}))) == 3
    assert rows_of(group, circle, LabelConfig.model_validate({**tree, "write": "best_and_worst"})) == []


def test_rankings_have_the_best_first_and_share_ranks(folder: Path) -> None:
    label(
        label_settings(str(folder / "completions.jsonl"), ["write=rankings"], judge=LONGER, out=str(folder / "r.jsonl"))
    )
    first, second = written(folder / "r.jsonl")
    assert first["completions"] == ["good good good", "bad bad", "good"]
    assert first["ranks"] == [1, 2, 3]
    assert second["ranks"] == [1, 1]
    again, _ = read_groups(DatasetConfig(path=str(folder / "r.jsonl")))
    assert again[0].completions == tuple(first["completions"])


def test_a_ranking_joins_scores_that_are_less_than_the_gap_below_the_best_of_a_rank() -> None:
    scores = [3.0, 2.6, 2.5, 2.1, 1.0, 1.0]
    assert ranks_of(scores, min_gap=0.0) == [1, 2, 3, 4, 5, 5]
    assert ranks_of(scores, min_gap=0.5) == [1, 1, 3, 3, 5, 5]
    assert ranks_of(scores, min_gap=9.0) == [1] * 6
    assert ranks_of([math.inf, 1.0], min_gap=1.0) == [1, 2]


def scores_of_long_ones(groups: Sequence[LabelGroup]) -> list[Verdict]:
    """The number of words; no score of a single one."""
    counts = [longer(list(group.completions)) for group in groups]
    return [verdict_of_scores([n if n > 1 else math.nan for n in row]) for row in counts]


def test_completions_without_a_score_are_counted_and_are_no_ties(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScoreJudge, "build", lambda self, note: scores_of_long_ones)
    people = write_rows(
        folder / "people.jsonl",
        [
            {"prompt": "red", "chosen": " good good", "rejected": " bad bad bad"},
            {"prompt": "red", "chosen": " good", "rejected": " bad bad"},
        ],
    )
    settings = [f"compare_with.path={people}"]
    result = label(
        label_settings(str(folder / "completions.jsonl"), settings, judge=LONGER, out=str(folder / "p.jsonl"))
    )
    assert (result.compared, result.ties, result.unscored) == (1, 0, 4)
    assert result.agreement is not None
    assert (result.agreement.pairs, result.agreement.ties, result.agreement.accuracy[0]) == (1, 0, 0.0)
    assert "4 completions without a score: in no pair, and not compared with people" in result.lines()
    rows = write_rows(folder / "short.jsonl", [{"prompt": "red", "completions": ["one", "two"]}])
    nothing = label(label_settings(str(rows), judge=LONGER, out=str(folder / "n.jsonl")))
    assert (nothing.compared, nothing.written) == (0, 0)
    assert "no two completions of a prompt have scores, so that there is nothing to train on" in nothing.lines()


def test_a_served_judge_is_asked_in_both_orders_and_once(folder: Path) -> None:
    with serving(by_words) as server:
        result = label(served(server.url, folder))
        assert len(server.requests) == 2 * (3 + 1)
        notes: list[str] = []
        label(served(server.url, folder), resume=False, note=notes.append)
        assert len(server.requests) == 8  # from the cache
        assert any("m: answers in the cache (cache_dir) are not asked for again" in text for text in notes)
    assert (result.answers, result.unreadable, result.inconsistent, result.first_shown) == (8, 0, 0.0, 0.5)
    assert (result.written, result.ties) == (3, 1)
    assert "score_chosen" not in written(folder / "pairs.jsonl")[0]


def test_a_judge_by_position_prefers_nobody_and_that_is_told(folder: Path) -> None:
    with serving(lambda number, question: "A") as server:
        result = label(served(server.url, folder))
    assert (result.written, result.ties, result.inconsistent, result.first_shown) == (0, 4, 1.0, 1.0)
    assert "100.0% of the pairs judged differently" in "\n".join(result.lines())


def test_answers_that_cannot_be_read_are_ties_and_counted(folder: Path) -> None:
    with serving(lambda n, question: "hm" if "blue" in question else by_words(n, question)) as server:
        result = label(served(server.url, folder))
    assert (result.unreadable, result.answers, result.ties) == (2, 8, 1)
    assert "2 of 8 answers could not be read" in "\n".join(result.lines())


def test_a_prompt_whose_answers_cannot_be_read_does_not_stop_a_judge_that_could_be(folder: Path) -> None:
    write_rows(folder / "completions.jsonl", list(reversed(ROWS)))

    def wordy(number: int, question: str) -> str:
        return "Both are fine." if "red" in question else by_words(number, question)

    with serving(wordy) as server:
        result = label(served(server.url, folder, batch=1))
    assert (result.answers, result.unreadable) == (8, 6)
    with serving(lambda number, question: "Both are fine.") as server, pytest.raises(RewardError, match="none of"):
        label(served(server.url, folder, out=str(folder / "others.jsonl")))


def test_agreement_with_people(folder: Path) -> None:
    people = [
        {"prompt": "red", "chosen": "good good good", "rejected": "good"},
        {"prompt": "red", "chosen": "good", "rejected": "bad bad"},
        {"prompt": "new", "chosen": "a b", "rejected": "a"},
        {"prompt": "new", "chosen": "a", "rejected": "b"},
    ]
    write_rows(folder / "people.jsonl", people)
    config = label_settings(
        str(folder / "completions.jsonl"),
        judge=LONGER,
        out=str(folder / "pairs.jsonl"),
        compare_with=str(folder / "people.jsonl"),
    )
    agreed = label(config).agreement
    assert agreed is not None
    assert (agreed.pairs, agreed.ties, agreed.accuracy[0]) == (4, 1, 2.5 / 4)
    assert agreed.kappa[0] == pytest.approx((0.5 - 0.375) / 0.625)
    assert agreed.accuracy[1] <= agreed.accuracy[0] <= agreed.accuracy[2]
    assert len(written(folder / "pairs.jsonl")) == 3  # people's pairs are no part of it


def test_an_interrupted_call_goes_on(folder: Path) -> None:
    def fails_late(number: int, question: str) -> Any:
        return (500, b"") if "blue" in question else by_words(number, question)

    with serving(fails_late) as server:
        with pytest.raises(RewardError):
            label(served(server.url, folder, batch=1))
        url = server.url
        assert not (folder / "pairs.jsonl").exists()
        assert len((folder / "pairs.jsonl.labels.jsonl").read_text().splitlines()) == 1
        with (folder / "pairs.jsonl.labels.jsonl").open("a") as file:
            file.write('{"group": "cut of')
    with serving(by_words) as server:
        same = json.loads((folder / "pairs.jsonl.labels.jsonl").read_text().splitlines()[0])
        text = json.dumps({**same, "judge": same["judge"].replace(url, server.url)}) + '\n{"group": "cut of'
        (folder / "pairs.jsonl.labels.jsonl").write_text(text)
        notes: list[str] = []
        result = label(served(server.url, folder, batch=1), note=notes.append)
        assert len(server.requests) == 2  # the other prompt's pair alone
    assert (result.written, result.answers) == (3, 8)
    assert any("1 prompts are left" in text for text in notes)


def test_an_interrupted_call_goes_on_with_other_patience(folder: Path) -> None:
    """After timeouts the same judge is asked more slowly: the labels that are there are still its own."""
    with serving(by_words) as server:
        config = served(server.url, folder)
        label(config)
        chat = {**config.judge.model_dump()["chat"], "concurrency": 1, "timeout_s": 5.0, "retries": 1}
        label(served(server.url, folder, judge={"type": "pairs", "chat": chat}))
        with pytest.raises(DataError, match="labels of another judge"):
            label(served(server.url, folder, judge={"type": "pairs", "chat": {**chat, "max_tokens": 9}}))


def test_another_deadline_of_a_verifier_is_another_judge(folder: Path) -> None:
    """An answer that takes longer is graded as on_timeout says: by the deadline, not by patience."""
    (folder / "grader.py").write_text("def grade(completion, row):\n    return float(len(completion))\n")
    source = {"type": "verifier", "name": f"{folder / 'grader.py'}:grade", "timeout_s": 20.0}
    tree = {"completions": {"path": str(folder / "completions.jsonl")}, "out": str(folder / "pairs.jsonl")}
    label(LabelConfig.model_validate({**tree, "judge": {"type": "scores", "source": source}}))
    slower = {"type": "scores", "source": {**source, "timeout_s": 30.0}}
    with pytest.raises(DataError, match="labels of another judge"):
        label(LabelConfig.model_validate({**tree, "judge": slower}))


@pytest.mark.parametrize("write", ["pairs", "best_and_worst", "rankings"])
def test_a_completion_without_a_score_is_in_no_row(folder: Path, write: str) -> None:
    """Such as one that no verifier applies to: NaN is neither more nor less than any score."""
    verdict = verdict_of_scores([1.0, math.nan, 3.0])
    assert verdict.wins == ((0.5, 0.5, 0.0), (0.5, 0.5, 0.5), (1.0, 0.5, 0.5))
    (group, *_), _ = read_groups(DatasetConfig(path=str(folder / "completions.jsonl")))
    tree = {"completions": {"path": "c"}, "judge": {"type": "scores", "source": {"type": "function", "target": LONGER}}}
    config = LabelConfig.model_validate({**tree, "write": write})
    (row,) = rows_of(group, verdict, config)
    if write == "rankings":
        assert row["completions"] == ["good good good", "good"]
        assert (row["ranks"], row["scores"]) == ([1, 2], [3.0, 1.0])
    else:
        assert (row["chosen"], row["rejected"]) == ("good good good", "good")
    assert rows_of(group, verdict_of_scores([math.nan, math.nan, 3.0]), config) == []


def test_labels_are_kept_until_there_are_others(folder: Path) -> None:
    judge, out = folder / "mine.py", folder / "pairs.jsonl"
    judge.write_text("def score(completions):\n    return [len(text) for text in completions]\n")
    config = label_settings(str(folder / "completions.jsonl"), judge=f"{judge}:score", out=str(out))
    label(config)
    before = (folder / "pairs.jsonl.labels.jsonl").read_text()
    judge.write_text("def score(completions):\n    raise OSError('dead')\n")
    with pytest.raises(RewardError, match="dead"):
        label(config, resume=False)
    assert (folder / "pairs.jsonl.labels.jsonl").read_text() == before
    judge.write_text("def score(completions):\n    return [-len(text) for text in completions]\n")
    assert label(config, resume=False).written
    assert len(written(folder / "pairs.jsonl.labels.jsonl")) == 2
    assert written(out)[0]["chosen"] == "good"


@pytest.mark.parametrize("line", ["\0\0\0", '{"group": "x"}'])
def test_a_damaged_label_is_named(folder: Path, line: str) -> None:
    config = label_settings(str(folder / "completions.jsonl"), judge=LONGER, out=str(folder / "pairs.jsonl"))
    label(config)
    with (folder / "pairs.jsonl.labels.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"pairs\.jsonl\.labels\.jsonl:3: no label of an earlier call"):
        label(config)


def test_labels_of_another_judge_are_not_taken(folder: Path) -> None:
    settings = {"out": str(folder / "pairs.jsonl")}
    label(label_settings(str(folder / "completions.jsonl"), judge=LONGER, **settings))
    other = label_settings(str(folder / "completions.jsonl"), ["judge.source.kwargs={}"], judge=LONGER, **settings)
    label(other)
    rules = {"type": "scores", "source": {"type": "rules", "rules": [{"type": "length", "max": 9}]}}
    config = LabelConfig.model_validate(
        {"completions": {"path": str(folder / "completions.jsonl")}, "judge": rules, **settings}
    )
    with pytest.raises(DataError, match="labels of another judge"):
        label(config)
    label(config, resume=False)


@pytest.mark.parametrize("change", ["code", "weights"])
def test_labels_that_the_judge_gave_when_it_was_another_are_not_taken(folder: Path, change: str) -> None:
    judge, changed = folder / "mine.py", folder / "mine.py"
    judge.write_text("def score(completions):\n    return [len(text) for text in completions]\n")
    target = f"{judge}:score"
    if change == "weights":
        model = write_reward_model(folder)
        target, changed = str(model), next(model.glob("*.safetensors"))
    settings = label_settings(str(folder / "completions.jsonl"), judge=target, out=str(folder / "pairs.jsonl"))
    label(settings)
    label(settings)
    content = bytearray(changed.read_bytes())
    changed.write_bytes(content + b"#\n" if change == "code" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="gave with other code or other weights"):
        label(settings)
    assert label(settings, resume=False).written


def test_labels_to_another_question_are_not_taken(folder: Path) -> None:
    template = folder / "question.txt"
    template.write_text("{prompt}<answer A>{a}</answer A><answer B>{b}</answer B>")
    with serving(by_words) as server:
        chat = {**served(server.url, folder).judge.model_dump()["chat"], "template": str(template)}
        config = served(server.url, folder, judge={"type": "pairs", "chat": chat})
        label(config)
        label(config)
        template.write_text("Which is kinder? " + template.read_text())
        with pytest.raises(DataError, match="with another template"):
            label(config)
        label(config, resume=False)
        assert len(server.requests) == 16


def test_a_function_of_another_process_is_another_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are called python:lambda there: a process knows the functions that it was given, and no other's."""
    rows = [{"prompt": "red", "completions": ["good", "bad bad"]}]

    def label_in_another_process(judge: Callable[..., Any]) -> None:
        monkeypatch.setattr("rlhf.user_code._OBJECTS", {})
        rlhf.label(rows, judge=judge, out=str(tmp_path / "pairs.jsonl"), quiet=True)

    longer = lambda completions: [len(text) for text in completions]  # noqa: E731
    shorter = lambda completions: [-len(text) for text in completions]  # noqa: E731
    label_in_another_process(longer)
    label_in_another_process(longer)
    with pytest.raises(DataError, match="other code or other weights"):
        label_in_another_process(shorter)


def test_a_judge_that_reads_other_columns_is_asked_when_they_change(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def grade(completion, row):\n    return float(completion == row['answer'])\n")
    source = {"type": "verifier", "name": f"{tmp_path / 'mine.py'}:grade", "workers": 1}
    chosen = []
    for answer in ("good", "bad"):
        path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completions": ["good", "bad"], "answer": answer}])
        tree = {"completions": {"path": str(path)}, "judge": {"type": "scores", "source": source}}
        label(LabelConfig.model_validate({**tree, "out": str(tmp_path / "pairs.jsonl")}))
        chosen += [row["chosen"] for row in written(tmp_path / "pairs.jsonl")]
    assert chosen == ["good", "bad"]


def test_a_conversation_stays_one(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt, "completions": ["a b", "a"]}])
    label(label_settings(str(path), judge=LONGER, out=str(tmp_path / "pairs.jsonl")))
    (row,) = written(tmp_path / "pairs.jsonl")
    assert row["prompt"] == prompt
    assert row["chosen"] == [{"role": "assistant", "content": "a b"}]


# Commands


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["label", str(folder / "completions.jsonl"), "--judge", LONGER, "--out", str(folder / "o.jsonl")]
    assert main([*arguments, "write=best_and_worst"]) == 0
    assert "1 rows written to" in capsys.readouterr().out
    assert main([*arguments, "--judge", "runs/reward_model"]) == 2
    assert "judge.source.path: no such file or folder: runs/reward_model. `rlhf reward" in capsys.readouterr().err
    assert main(["label", str(folder / "none.jsonl"), "--judge", LONGER]) == 2
    assert main(["label", str(folder / "completions.jsonl")]) == 2
    assert "judge is missing" in capsys.readouterr().err


def test_from_python(tmp_path: Path) -> None:
    people = [{"prompt": "red", "chosen": "good good good", "rejected": "good"}]
    result = rlhf.label(
        ROWS, judge=longer, out=tmp_path / "pairs.jsonl", compare_with=people, quiet=True, write="best_and_worst"
    )
    assert result.written == 1
    assert result.agreement is not None
    assert result.agreement.kappa[0] == 1.0


def write_reward_model(folder: Path) -> Path:
    """A reward model with a random head over the tiny Llama of runs.py."""
    base = str(make_model(folder / "base"))
    tokenizer = load_tokenizer(base)
    load_scalar_head(base, tokenizer, new_head="normal").save(tokenizer, folder / "model")
    return folder / "model"


def test_a_reward_model_reads_texts_by_its_own_tokenizer(tmp_path: Path) -> None:
    """The same scores as of the pairs in its card's way: encoded by its tokenizer, without ours in between."""
    path = write_reward_model(tmp_path / "rm")
    rows = [{"prompt": "red one", "completions": [" good good", " bad", " two blue"]}]
    config = label_settings(
        str(write_rows(tmp_path / "rows.jsonl", rows)),
        ["write=rankings"],
        judge=str(path),
        out=str(tmp_path / "ranking.jsonl"),
    )
    label(config)
    (row,) = written(tmp_path / "ranking.jsonl")
    tokenizer = load_tokenizer(str(path))
    model = load_reward_heads(str(path), tokenizer)
    encoder = make_encoder(tokenizer, OWN_TEMPLATE)
    rendered = [Rendered("red one", (text,), templated=False) for text in row["completions"]]
    prompts, completions = encode_rows(encoder, rendered, [True] * 3)
    ids = (*left_pad(prompts, encoder.pad_id), *right_pad(completions, encoder.pad_id))
    expected = score_rows(model, *ids, micro_batch_size=3, dtype="float32")
    assert row["scores"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(set(row["scores"])) == 3


def test_a_prompt_with_the_template_s_turns_in_it_is_scored_like_its_conversation(tmp_path: Path) -> None:
    """Such as those of samples.jsonl; the template around them would make another prompt of them."""
    path = write_reward_model(tmp_path / "rm")
    tokenizer = load_tokenizer(str(path))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'one' if m.role == 'user' else 'two' }} {{ m.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}two {% endif %}"
    )
    tokenizer.save_pretrained(path)
    prompts = {"chat": [{"role": "user", "content": "red"}], "text": "one red <eos> two ", "bare": "red"}
    scores = []
    for name, prompt in prompts.items():
        rows = write_rows(tmp_path / f"{name}.jsonl", [{"prompt": prompt, "completions": ["good", "bad", "blue"]}])
        out = tmp_path / f"{name}_ranking.jsonl"
        label(label_settings(str(rows), ["write=rankings"], judge=str(path), out=str(out)))
        (row,) = written(out)
        assert row["prompt"] == prompt
        scores.append(dict(zip(row["completions"], row["scores"], strict=True)))
    assert scores[0] == scores[1] == scores[2]
    assert len(set(scores[0].values())) == 3


@pytest.mark.parametrize(
    "place, kind",
    [
        ("runs/reward_model", {"type": "model", "path": "runs/reward_model"}),
        ("my.py:f", {"type": "function", "target": "my.py:f"}),
        ("http://h:8000/score", {"type": "remote", "url": "http://h:8000/score"}),
    ],
)
def test_what_a_judge_is_told_apart_by_its_looks(place: str, kind: dict[str, str]) -> None:
    assert judge_at(place) == {"type": "scores", "source": kind}
    assert judge_at("http://h:8000/v1") == {"type": "pairs", "chat": {"base_url": "http://h:8000/v1"}}


def test_an_endpoint_needs_the_name_of_its_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"judge\.chat\.model"):
        label_settings(str(folder / "completions.jsonl"), judge="http://h:8000/v1")


def test_a_function_reads_the_columns_of_each_completion_s_own_row(tmp_path: Path) -> None:
    """Also half of a surrogate pair, which JSON can hold."""
    (tmp_path / "mine.py").write_text("def score(completions, grade, **kwargs):\n    return grade\n")
    rows = [{"prompt": "a", "completion": "good", "grade": 1.0}, {"prompt": "a", "completion": "bad", "grade": 5.0}]
    path = write_rows(tmp_path / "rows.jsonl", [{**row, "note": "\ud83d"} for row in rows])
    label(label_settings(str(path), judge=f"{tmp_path / 'mine.py'}:score", out=str(tmp_path / "pairs.jsonl")))
    (pair,) = written(tmp_path / "pairs.jsonl")
    assert (pair["chosen"], pair["rejected"]) == ("bad", "good")


def test_a_score_that_cannot_be_read_prefers_nothing(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"q{row}", "completions": ["good", "odd"]} for row in range(4)]
    )
    with serving(lambda _n, question: "3" if "good" in question else "I will not rate this.") as server:
        judge = {"type": "scores", "source": {"type": "openai", "base_url": server.url, "model": "x"}}
        judge["source"]["cache_dir"] = str(tmp_path / "cache")  # type: ignore[index]
        tree = {"completions": {"path": str(rows)}, "judge": judge, "out": str(tmp_path / "pairs.jsonl")}
        result = label(LabelConfig.model_validate(tree))
    assert (result.written, result.unreadable, result.answers) == (0, 4, 8)

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.data import DatasetConfig
from rlhf.data.conversation import messages, tools_of
from rlhf.data.files import load_rows
from rlhf.data.formats import (
    DEMONSTRATIONS,
    LABELLED,
    PAIRS,
    PROMPTS,
    DemoText,
    LabelledText,
    PairText,
    PromptText,
    RowFormats,
)
from rlhf.data.rows import BadRow, DataRow, RowCounts
from rlhf.errors import DataError


def read(use: RowFormats[Any], row: dict[str, object], *, turns: bool = False) -> Any:
    """The one row in its form, or the reason it has none."""
    skips = RowCounts("f")
    forms = [form for _, form in use.read([DataRow(row, "f", 1)], skips, turns=turns)]
    return forms[0] if forms else next(iter(skips.counts))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def human(value: str) -> dict[str, str]:
    return {"from": "human", "value": value}


def gpt(value: str) -> dict[str, str]:
    return {"from": "gpt", "value": value}


SYSTEM = {"role": "system", "content": "Be brief."}
HI = [user("Hi")]
PAIR = PairText(HI, "Yes", "No", 0.0)
DIFFER = "chosen and rejected differ before the last answer"
PART = "chosen and rejected part where the assistant does not speak"
NO_ROLE = "a message of prompt has no known role"
NO_MARK = "chosen is neither a transcript (no '\\n\\nAssistant:') nor has it a prompt column"
MIXED = "prompt is a transcript in text, chosen and rejected are messages: give all three in one form"
LEAVES = "prompt leaves the assistant nothing to answer"
AWAY = "chosen is a conversation in which the prompt does not occur"
GO = "### Instruction:\nGo.\n\n### Response:\n"
HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: And?\n\nAssistant:"

PAIR_ROWS: list[tuple[str, dict[str, object], PairText]] = [
    ("explicit", {"prompt": "Q:", "chosen": " Yes", "rejected": " No"}, PairText("Q:", " Yes", " No", 0.0)),
    ("transcripts", {"chosen": HH + " Yes", "rejected": HH + " No"}, PairText(HH, " Yes", " No", 0.0)),
    (
        "a transcript that the sides repeat",
        {"prompt": HH, "chosen": HH.strip() + " Yes", "rejected": HH + " No"},
        PairText(HH, " Yes", " No", 0.0),
    ),
    ("messages", {"prompt": HI, "chosen": [assistant("Yes")], "rejected": [assistant("No")]}, PAIR),
    ("one message a side", {"prompt": HI, "chosen": assistant("Yes"), "rejected": assistant("No")}, PAIR),
    ("text sides", {"prompt": HI, "chosen": "Yes", "rejected": "No"}, PAIR),
    ("no prompt", {"chosen": [*HI, assistant("Yes")], "rejected": [*HI, assistant("No")]}, PAIR),
    ("prompt repeated", {"prompt": HI, "chosen": [*HI, assistant("Yes")], "rejected": [*HI, assistant("No")]}, PAIR),
    ("UltraFeedback", {"prompt": "Hi", "chosen": [*HI, assistant("Yes")], "rejected": [*HI, assistant("No")]}, PAIR),
    ("text prompt", {"prompt": "Hi", "chosen": [assistant("Yes")], "rejected": [assistant("No")]}, PAIR),
    ("ShareGPT", {"conversations": [human("Hi")], "chosen": gpt("Yes"), "rejected": gpt("No")}, PAIR),
    (
        "ShareGPT with a system column",
        {"system": "Be brief.", "conversations": [human("Hi")], "chosen": gpt("Yes"), "rejected": gpt("No")},
        PairText([SYSTEM, *HI], "Yes", "No", 0.0),
    ),
    (
        "a system column, and sides that repeat the prompt without it",
        {"system": "Be brief.", "prompt": HI, "chosen": [*HI, assistant("Yes")], "rejected": [*HI, assistant("No")]},
        PairText([SYSTEM, *HI], "Yes", "No", 0.0),
    ),
    (
        "a system column, and sides with more turns than the prompt",
        {
            "system": "Be brief.",
            "prompt": "And?",
            "chosen": [*HI, assistant("Hi"), user("And?"), assistant("Yes")],
            "rejected": [*HI, assistant("Hi"), user("And?"), assistant("No")],
        },
        PairText([SYSTEM, *HI, assistant("Hi"), user("And?")], "Yes", "No", 0.0),
    ),
    (
        "a system column that the sides overrule",
        {
            "system": "Be long.",
            "prompt": "Hi",
            "chosen": [SYSTEM, *HI, assistant("Yes")],
            "rejected": [SYSTEM, *HI, assistant("No")],
        },
        PairText([SYSTEM, *HI], "Yes", "No", 0.0),
    ),
    (
        "sides that repeat the last turn of the prompt",
        {
            "prompt": [*HI, assistant("Hi"), user("Hi")],
            "chosen": [*HI, assistant("Yes")],
            "rejected": [*HI, assistant("No")],
        },
        PairText([*HI, assistant("Hi"), user("Hi")], "Yes", "No", 0.0),
    ),
    (
        "Alpaca",
        {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4"},
        PairText("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n", "3", "4", 0.0),
    ),
]


@pytest.mark.parametrize("row, expected", [case[1:] for case in PAIR_ROWS], ids=[case[0] for case in PAIR_ROWS])
def test_pairs(row: dict[str, object], expected: PairText) -> None:
    assert read(PAIRS, row) == expected


@pytest.mark.parametrize("row, expected", [case[1:] for case in PAIR_ROWS], ids=[case[0] for case in PAIR_ROWS])
def test_pairs_serve_as_demonstrations_and_as_prompts(row: dict[str, object], expected: PairText) -> None:
    assert read(DEMONSTRATIONS, row) == DemoText(expected.prompt, expected.chosen)
    assert read(PROMPTS, row) == PromptText(expected.prompt, row)


@pytest.mark.parametrize(
    "use, answers", [(PAIRS, ("chosen", "rejected")), (DEMONSTRATIONS, ("answer",)), (PROMPTS, ())]
)
def test_a_question_has_the_system_column_as_its_system_message(use: RowFormats[Any], answers: tuple[str, ...]) -> None:
    row: dict[str, object] = {"system": "Be brief.", "question": "Hi", **{name: f"A {name}." for name in answers}}
    assert read(use, row, turns=True).prompt == [SYSTEM, *HI]


@pytest.mark.parametrize(
    "columns, margin",
    [
        ({"margin": 1.5}, 1.5),
        ({"margin": "2"}, 2.0),
        ({"margin": None, "score_chosen": 9, "score_rejected": 6.5}, 2.5),
        ({"score_chosen": "8", "score_rejected": ""}, 0.0),
        ({"margin": "much"}, "margin is not a number"),
        ({"margin": True}, "margin is not a number"),
        ({"margin": [1]}, "margin is not a number"),
        ({"margin": float("nan")}, "margin is not a number"),
        ({"margin": 10**400}, "margin is not a number"),
        ({"score_chosen": 1, "score_rejected": "inf"}, "score_rejected is not a number"),
    ],
)
def test_margins(columns: dict[str, object], margin: float | str) -> None:
    form = read(PAIRS, {"prompt": "p", "chosen": "a", "rejected": "b", **columns})
    assert (form.margin if isinstance(form, PairText) else form) == margin


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "p", "chosen": "a", "rejected": "a "}, "chosen and rejected are the same"),
        ({"prompt": "p", "chosen": " \n", "rejected": "a"}, "empty chosen"),
        ({"prompt": "p", "chosen": "a", "rejected": None}, "no rejected"),
        ({"prompt": "p", "chosen": "a", "rejected": 3}, "rejected is not text"),
        ({"prompt": ["p"], "chosen": "a", "rejected": "b"}, "prompt is not text"),
        ({"prompt": "p", "chosen": "a", "rejected": "\ud800"}, "rejected is not valid Unicode"),
        ({"prompt": "p", "chosen": "a", "rejected": [assistant("b")]}, "chosen and rejected are not of the same form"),
        ({"prompt": HH, "chosen": [*HI, assistant("a")], "rejected": [*HI, assistant("b")]}, MIXED),
        ({"prompt": [assistant("x")], "chosen": "a", "rejected": "b"}, "prompt has no user message to answer"),
        ({"prompt": [*HI, assistant("x")], "chosen": "a", "rejected": "b"}, LEAVES),
        ({"prompt": [{"role": "ghost", "content": "x"}], "chosen": "a", "rejected": "b"}, NO_ROLE),
        ({"prompt": [{"role": [], "content": "x"}], "chosen": "a", "rejected": "b"}, NO_ROLE),
        ({"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}, "no content of a message of prompt"),
        ({"prompt": [user("x"), 3], "chosen": "a", "rejected": "b"}, "prompt is not a list of messages"),
        ({"conversations": "Hi", "chosen": "a", "rejected": "b"}, "conversations is not a list of messages"),
        ({"prompt": "Ho", "chosen": [*HI, assistant("a")], "rejected": [*HI, assistant("b")]}, AWAY),
        ({"chosen": [*HI, assistant("a")], "rejected": [user("Ho"), assistant("b")]}, PART),
        ({"chosen": HI, "rejected": [*HI, assistant("b")]}, "the last message of chosen is not the assistant's"),
        ({"chosen": HH + " a", "rejected": "\n\nHuman: Ho\n\nAssistant: b"}, DIFFER),
        ({"chosen": HH + " a", "rejected": HH + " "}, "empty rejected"),
        ({"prompt": HH, "chosen": HH + " a", "rejected": HH}, "empty rejected"),
        ({"chosen": HH + " a\n\nHuman: More?", "rejected": HH + " b"}, "chosen ends with a human's turn"),
        ({"chosen": "just text", "rejected": "text"}, NO_MARK),
    ],
)  # fmt: skip
def test_bad_pairs_have_reasons(row: dict[str, object], reason: str) -> None:
    assert read(PAIRS, row) == reason


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "p", "completion": " c"}, DemoText("p", " c")),
        ({"prompt": "p", "completion": "c", "finished": True}, DemoText("p", "c")),
        ({"prompt": "p", "completion": "p c"}, DemoText("p", "p c")),
        ({"prompt": HH, "completion": HH + " c"}, DemoText(HH, " c")),
        ({"prompt": HI, "completion": [assistant("c")]}, DemoText(HI, "c")),
        ({"question": "1+1?", "answer": "2"}, DemoText("1+1?\n", "2")),
        ({"instruction": "Go.", "input": "", "output": "Gone."}, DemoText(GO, "Gone.")),
        ({"messages": [SYSTEM, *HI, assistant("a")]}, DemoText([SYSTEM, *HI], "a", whole=True)),
        (
            {"messages": [*HI, assistant("a"), *HI, assistant("b")]},
            DemoText([*HI, assistant("a"), *HI], "b", whole=True),
        ),
        ({"conversations": [human("Hi"), gpt("a")]}, DemoText(HI, "a", whole=True)),
        ({"text": "Once upon"}, DemoText("", "Once upon")),
        ({"prompt": "p", "completion": ""}, "empty completion"),
        ({"prompt": "p", "completion": "c", "finished": False}, "completion was cut before it ended (finished: false)"),
        ({"prompt": "p", "completion": 7}, "completion is not text"),
        ({"prompt": HI, "completion": [*HI, assistant("c")]}, "completion has more than the assistant's answer"),
        ({"instruction": "", "output": "x"}, "empty instruction"),
        ({"instruction": "Go.", "input": ["x"], "output": "x"}, "input is not text"),
        ({"messages": HI}, "the last message of messages is not the assistant's"),
        ({"messages": []}, "messages is not a list of messages"),
        ({"messages": [assistant("a")]}, "messages has no user message to answer"),
        ({"text": " "}, "empty text"),
    ],
)  # fmt: skip
def test_demonstrations(row: dict[str, object], expected: DemoText | str) -> None:
    assert read(DEMONSTRATIONS, row) == expected


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"prompt": "p", "answer": "4"}, "p"),
        ({"prompt": HI}, HI),
        ({"messages": [*HI, assistant("a")]}, HI),
        ({"conversations": [human("Hi")], "system": "Be brief."}, [SYSTEM, *HI]),
        ({"instruction": "Go.", "output": "Gone."}, GO),
        ({"question": "1+1?", "answer": "2"}, "1+1?\n"),
        ({"text": "Once"}, "Once"),
    ],
)
def test_prompts_keep_their_rows(row: dict[str, object], prompt: object) -> None:
    assert read(PROMPTS, row) == PromptText(prompt, row)


@pytest.mark.parametrize(
    "label, expected",
    [
        (True, True),
        (False, False),
        (1, True),
        ("False", False),
        ("1", True),
        (2, None),
        (None, None),
        ([], None),
        (0.5, None),
    ],
)
def test_labels(label: object, expected: bool | None) -> None:
    wanted = "label is neither true nor false" if expected is None else LabelledText("p", "c", expected)
    assert read(LABELLED, {"prompt": "p", "completion": "c", "label": label}) == wanted
    if expected is not None:
        row = {"messages": [*HI, assistant("c")], "label": label}
        assert read(LABELLED, row) == LabelledText(HI, "c", expected)


def test_text_prompts_become_turns_where_a_template_is_asked_for() -> None:
    assert read(PROMPTS, {"prompt": "p"}, turns=True).prompt == [user("p")]
    assert read(PROMPTS, {"question": "q"}, turns=True).prompt == [user("q")]
    assert read(PROMPTS, {"instruction": "Add.", "input": "1 2"}, turns=True).prompt == [user("Add.\n\n1 2")]
    assert read(PAIRS, {"prompt": "p", "chosen": "a", "rejected": "b"}, turns=True).prompt == [user("p")]
    assert read(PAIRS, {"chosen": HH + " a", "rejected": HH + " b"}, turns=True).prompt == HH
    assert read(DEMONSTRATIONS, {"text": "Once"}, turns=True).prompt == ""


def test_columns_that_fit_no_shape_are_an_error_which_names_the_shapes() -> None:
    with pytest.raises(DataError) as error:
        read(PAIRS, {"query": "q", "good": "a", "bad": "b"})
    assert "f: no preference pairs in these columns: 'query', 'good', 'bad'" in str(error.value)
    assert "prompt + chosen + rejected; conversations + chosen + rejected" in str(error.value)
    assert "columns: {prompt: their name}" in str(error.value)
    assert "kto" not in str(error.value)
    with pytest.raises(DataError, match=r"For completions with a label each set algorithm\.preset=kto\.$"):
        read(PAIRS, {"prompt": "p", "completion": "c", "label": True})


def test_the_shape_of_a_file_is_that_of_most_of_its_rows() -> None:
    rows = [DataRow({"prompt": "p", "completion": "c"}, "f", i) for i in (1, 2, 3)]
    rows += [DataRow({"messages": []}, "f", 4), DataRow({"text": "t"}, "g", 1)]
    skips = RowCounts("f")
    forms = [(row.place, form) for row, form in DEMONSTRATIONS.read(rows, skips, turns=False)]
    assert [place for place, _ in forms] == ["f:1", "f:2", "f:3", "g:1"]
    assert dict(skips.counts) == {"no prompt": 1}


def count(use: RowFormats[Any], path: Path, split: str = "train") -> tuple[int, dict[str, int], list[Any]]:
    skips = RowCounts(str(path))
    forms = [
        form for _, form in use.read(load_rows(DatasetConfig(path=str(path), split=split), skips), skips, turns=False)
    ]
    return len(forms), dict(skips.counts), forms


def test_real_pairs(shared: Path) -> None:
    data = shared / "data"
    same = "chosen and rejected are the same"
    assert count(PAIRS, data / "hh_rlhf_harmless")[:2] == (1477, {DIFFER: 3, "empty chosen": 2})
    assert count(PAIRS, data / "hh_rlhf_harmless", "test")[:2] == (313, {DIFFER: 1, "empty chosen": 1})
    assert count(PAIRS, data / "human_pairs")[:2] == (819, {same: 1, "empty rejected": 1})
    assert count(PAIRS, data / "human_pairs", "test")[:2] == (207, {})
    assert count(PAIRS, data / "alpaca_eval_prefs")[:2] == (16000, {})
    assert count(PAIRS, data / "alpaca_eval_prefs", "test")[:2] == (1500, {})
    assert count(PAIRS, data / "format_fixtures" / "dpo_en_demo.json")[:2] == (300, {})


def test_real_transcripts_are_split_where_the_last_answer_begins(shared: Path) -> None:
    path = shared / "data/hh_rlhf_harmless"
    rows = {row.values["chosen"]: row for row in load_rows(DatasetConfig(path=str(path)))}
    for pair in count(PAIRS, path)[2]:
        assert pair.prompt.startswith("\n\nHuman:")
        assert pair.prompt.endswith("\n\nAssistant:")
        assert "\n\nAssistant:" not in pair.chosen + pair.rejected
        assert rows[pair.prompt + pair.chosen].values["rejected"] == pair.prompt + pair.rejected


def test_real_demonstrations_labels_and_prompts(shared: Path) -> None:
    fixtures = shared / "data/format_fixtures"
    used, skipped, alpaca = count(DEMONSTRATIONS, fixtures / "alpaca_en_demo.json")
    assert (used, skipped) == (999, {})
    assert sum("### Input:" in demo.prompt for demo in alpaca) == 412
    used, skipped, kto = count(LABELLED, fixtures / "kto_en_demo.json")
    assert (used, skipped) == (300, {})
    assert Counter(row.desirable for row in kto) == {True: 150, False: 150}
    assert count(DEMONSTRATIONS, shared / "data/gsm8k")[:2] == (7473, {})
    assert count(PROMPTS, shared / "data/gsm8k", "test")[:2] == (1319, {})
    assert count(DEMONSTRATIONS, shared / "data/tinystories")[:2] == (1631, {})
    with pytest.raises(DataError, match="'turns'"):
        count(PROMPTS, shared / "data/prompts/mt_bench_questions.jsonl")


def test_pairs_among_several_sources_of_labelled_completions_name_what_splits_them() -> None:
    rows = [DataRow({"prompt": "p", "chosen": "a", "rejected": "b"}, "f", 1)]
    with pytest.raises(DataError, match=r"split into two labelled completions only if one path, without stream"):
        LABELLED.choose_format(rows, "f")


@pytest.mark.parametrize("finished", [False, "False", "false ", 0, "0"])
def test_a_completion_that_was_cut_is_not_learned_from_a_table_either(finished: object) -> None:
    with pytest.raises(BadRow, match="was cut before it ended"):
        DEMONSTRATIONS.choose_format([DataRow({"prompt": "p", "completion": "c"}, "f", 1)], "f").read(
            {"prompt": "p", "completion": "c", "finished": finished}, turns=False
        )


HALF = "hm \ud83d"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "reasoning_content": HALF},
        {"role": "assistant", "content": "x", HALF: 1},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [HALF]}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}]},
    ],
)
def test_a_text_that_no_tokenizer_takes_is_refused_in_every_field(message: dict[str, object]) -> None:
    with pytest.raises(BadRow, match="not valid Unicode"):
        messages([{"role": "user", "content": "Hi"}, message], "messages")
    with pytest.raises(BadRow, match="tools is not valid Unicode"):
        tools_of({"tools": [{"function": {"name": "f", "description": HALF}}]})

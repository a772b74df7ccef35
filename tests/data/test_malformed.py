"""Any JSON value as a row: it is used, or skipped and counted, or a DataError; never another exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import PreferencesConfig, PromptsConfig, SftConfig
from rlhf.data.pairs import demonstration_pipeline, labelled_pipeline, pair_pipeline
from rlhf.data.prompts import prompt_pipeline
from rlhf.errors import DataError

COLUMNS = [
    *("prompt", "chosen", "rejected", "messages", "conversations", "completion", "text", "label"),
    *("instruction", "input", "output", "question", "answer", "margin", "score_chosen", "score_rejected", "system"),
]
TRANSCRIPT = "\n\nHuman: a\n\nAssistant:"
ANY_TEXT = st.text(st.characters(), max_size=6)  # half surrogates too
ROLE = st.one_of(st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool"]), ANY_TEXT, st.none())
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": ROLE, "content": ANY_TEXT}), st.fixed_dictionaries({"from": ROLE, "value": ANY_TEXT})
)
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ANY_TEXT)
VALUE = st.one_of(
    st.recursive(SCALAR, lambda v: st.lists(v, max_size=3) | st.dictionaries(ANY_TEXT, v, max_size=3), max_leaves=6),
    MESSAGE,
    st.lists(MESSAGE, max_size=4),
    ANY_TEXT.map(TRANSCRIPT.__add__),
)
ROW = st.one_of(st.dictionaries(st.sampled_from(COLUMNS), VALUE, max_size=len(COLUMNS)), VALUE)

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
GOOD: dict[str, list[object]] = {
    "messages": [HELLO],
    "conversations": [[{"from": "human", "value": "Hi"}]],
    "chosen": [TRANSCRIPT + " b", HELLO, HELLO[1:]],
    "rejected": [TRANSCRIPT + " c", [HELLO[0], {"role": "assistant", "content": "No"}], {"from": "gpt", "value": "No"}],
    "label": [True, 0],
    "margin": [1.5, "2", None],
}

LOADERS: dict[str, Callable[..., Any]] = {
    "prompts": lambda path, tok: prompt_pipeline(PromptsConfig(path=path), tok, chat_template="auto").load(),
    "pairs": lambda path, tok: pair_pipeline(PreferencesConfig(path=path), tok, chat_template="auto").load(),
    "demonstrations": lambda path, tok: demonstration_pipeline(SftConfig(path=path), tok, chat_template="auto").load(),
    "labelled": lambda path, tok: labelled_pipeline(PreferencesConfig(path=path), tok, chat_template="auto").load(),
}
SHAPES = {
    "prompts": [["prompt"], ["messages"], ["text"], ["instruction", "input"]],
    "pairs": [
        ["prompt", "chosen", "rejected", "margin"],
        ["chosen", "rejected"],
        ["conversations", "chosen", "rejected"],
    ],
    "demonstrations": [["messages", "system"], ["prompt", "completion"], ["text"], ["instruction", "output"]],
    "labelled": [["messages", "label"], ["prompt", "completion", "label"]],
}


def check(loader: str, path: Path, lines: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    try:
        dataset = LOADERS[loader](str(path), tokenizer)
    except DataError:
        return
    assert 0 < dataset.skips.used == len(dataset)
    assert dataset.skips.used + dataset.skips.skipped == len(lines)
    dataset.collate(range(len(dataset)))


@pytest.mark.parametrize("loader", LOADERS)
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_any_json_as_rows(loader: str, data: st.DataObject, tmp_path: Path, chatml: PreTrainedTokenizerBase) -> None:
    columns = data.draw(st.sampled_from(SHAPES[loader]))
    good = {name: st.sampled_from(GOOD.get(name, ["a", "b c"])) for name in columns}
    nearly = st.fixed_dictionaries({name: value | value | VALUE for name, value in good.items()})
    rows = data.draw(st.lists(st.fixed_dictionaries(good) | nearly | nearly | ROW, min_size=1, max_size=6))
    check(loader, tmp_path / "rows.jsonl", [json.dumps(row) for row in rows], chatml)


@given(line=st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1).filter(str.strip))
@example(line='{"prompt": ' + "[" * 900 + "]" * 900 + "}")
@example(line='{"prompt": "a", "margin": ' + "9" * 5000 + "}")
@settings(suppress_health_check=list(HealthCheck))
def test_any_text_as_a_line(line: str, tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    check("prompts", tmp_path / "rows.jsonl", [line, '{"prompt": "a"}'], plain)


@given(data=st.binary(max_size=60), name=st.sampled_from(["a.csv", "a.json", "a.jsonl.gz", "a.parquet"]))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_any_bytes_as_a_file(data: bytes, name: str, tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError):
        LOADERS["pairs"](str(tmp_path / name), plain)

"""Rows with tools whose template refuses, or cannot write, parts that other templates take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from made_tokenizers import byte_tokenizer
from stored_templates import chat_template
from transformers import PreTrainedTokenizerBase

from rlhf.config.data import ChatFormat, SftConfig
from rlhf.data.conversation import messages
from rlhf.data.files import Cursor, LazyDataset, load_rows
from rlhf.data.pairs import DemonstrationSet, demonstration_pipeline
from rlhf.data.rows import RowCounts
from rlhf.errors import DataError

Write = Callable[..., str]

# Mistral 7B Instruct v0.3: an id of nine characters, and turns that alternate besides the calls
MISTRAL = chat_template("mistral_tools")
DEEPSEEK = chat_template("deepseek_tools")  # joins the arguments, a text, to its own text


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer(extra=("<|User|>", "<|Assistant|>", "<|output|>"))
    tokenizer.chat_template = template
    return tokenizer


def demos(path: str, template: str) -> DemonstrationSet:
    return demonstration_pipeline(SftConfig(path=path), tokenizer_of(template), chat_template=ChatFormat()).load()


def learned(rows: DemonstrationSet, template: str) -> str:
    batch = rows.collate([0])
    return str(tokenizer_of(template).decode(batch.completion_ids[0][batch.loss_mask[0]]))


def row(arguments: object) -> dict[str, Any]:
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "Warm?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "20", "tool_call_id": "abcdefghi", "name": "look"},
            {"role": "assistant", "content": "Yes"},
        ]
    }


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'])
def test_a_field_that_the_template_insists_on_is_no_reason_to_refuse_the_row(arguments: object, write: Write) -> None:
    """Whether a field is written was tried by leaving it out, and the row was skipped if the template minds."""
    dataset = demos(write([row(arguments)]), MISTRAL)
    call = '[TOOL_CALLS] {"name": "look", "arguments": {"city": "Zürich"}}</s>'
    assert learned(dataset, MISTRAL) == f"{call} Yes</s>"
    assert "1 rows whose name the chat template does not write" in dataset.skips.summary()
    assert "tool_call" not in dataset.skips.summary()


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'])
def test_arguments_are_text_for_a_template_that_wants_text(arguments: object, write: Write) -> None:
    dataset = demos(write([row(arguments)]), DEEPSEEK)
    assert learned(dataset, DEEPSEEK) == 'look\n{"city": "Zürich"}</s>Yes</s>'


def test_another_mistake_of_types_is_still_told(write: Write) -> None:
    template = "{{ messages[0].content + 1 }}"
    with pytest.raises(DataError, match="can only concatenate str"):
        demos(write([row({})]), template)


def test_arguments_beside_the_name_are_read_as_json_too() -> None:
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": '{"a": 1}'}]}
    assert messages(flat, "x")[0]["tool_calls"] == [{"name": "look", "arguments": {"a": 1}}]
    assert json.loads(json.dumps(flat))["tool_calls"][0]["arguments"] == '{"a": 1}'  # the row is unchanged


def test_a_call_of_a_parquet_file_has_its_own_arguments_alone(tmp_path: Path) -> None:
    """Arrow gave each call a null for every argument of the other rows' tools."""
    other = row({"amount": 3})
    path = tmp_path / "rows.parquet"
    Dataset.from_list([row({"city": "Rome"}), other]).to_parquet(path)
    config = SftConfig(path=str(path))
    for rows in (load_rows(config), LazyDataset(config).read(Cursor(), 2, RowCounts("rows"))[0]):
        turns: list[Any] = [item.values["messages"] for item in rows]
        arguments = [messages[1]["tool_calls"][0]["function"]["arguments"] for messages in turns]
        assert arguments == [{"city": "Rome"}, {"amount": 3}]

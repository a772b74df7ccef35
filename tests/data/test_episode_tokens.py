"""Whole episodes with scripted actions: the tokens equal the conversation's that the template would write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import FAMILIES
from test_bridge import CALL_FORMS, HERMES, with_calls_as

from rlhf.batching import extend
from rlhf.data.prompts import encode_conversations
from rlhf.data.tokenizer import Encoder, make_encoder, right_pad
from rlhf.environments.host import Host
from rlhf.environments.pool import EnvironmentPool
from rlhf.environments.section import EnvironmentConfig
from rlhf.environments.tools import tool_guide
from rlhf.sampling.episodes import EpisodeSampler
from rlhf.types import Completions, Prompts, StopReason

CALCULATOR = f"{Path(__file__).resolve().parents[2] / 'examples' / 'calculator.py'}:Calculator"
ADD = '<tool>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool>'
MULTIPLY = '<tool>{"name": "multiply", "arguments": {"a": 7, "b": 6}}</tool>'


class Scripted:
    """A sampler that says the next line of its script, and ends each with the template's token; `cut` ends one not."""

    def __init__(self, encoder: Encoder, lines: Sequence[str], end: str, *, cut: int | None = None) -> None:
        self.encoder, self.lines, self.cut, self.asked = encoder, list(lines), cut, list[Prompts]()
        self.end = encoder.tokenizer.convert_tokens_to_ids(end)

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Say the line."""
        number = len(self.asked)
        self.asked.append(prompts)
        ended = number != self.cut
        ids, mask = right_pad(
            [[*self.encoder.text(self.lines[number]), *([self.end] if ended else [])]] * len(prompts), 0
        )
        return extend(
            Completions,
            prompts,
            completion_ids=ids,
            completion_mask=mask,
            sampler_logprobs=torch.where(mask, -1.0, 0.0),
            finished=torch.full((len(prompts),), ended),
            group_size=group_size,
        )


def play(
    encoder: Encoder, script: Scripted, config: EnvironmentConfig, row: Mapping[str, Any], *, make: Any = None
) -> Completions:
    pool = EnvironmentPool(config.target, config.kwargs)
    if make is not None:
        pool._local = Host(make)
    sampler = EpisodeSampler(script, pool, encoder, config, max_new_tokens=64, context=4096)
    asked = encode_conversations([[{"role": "user", "content": str(row["prompt"])}]], encoder)
    messages = [{"role": "user", "content": row["prompt"]}]
    return sampler.sample(
        Prompts(
            prompt_ids=asked.prompt_ids,
            prompt_mask=asked.prompt_mask,
            row_ids=asked.row_ids,
            references=({**row, "prompt_messages": messages},),
        ),
        key=1,
        group_size=2,
    )


def ids_of(rows: Completions, row: int = 0) -> list[int]:
    prompt = rows.prompt_ids[row][rows.prompt_mask[row]].tolist()
    return [*prompt, *rows.completion_ids[row][rows.completion_mask[row]].tolist()]


ROW = {"prompt": "Compute (3 + 4) * 6.", "sum": "(3 + 4) * 6"}


@pytest.mark.parametrize("family", ["chatml", "llama3", "phi3"])
def test_tools_without_a_form_of_the_template(family: str) -> None:
    encoder = make_encoder(FAMILIES[family].tokenizer(), "auto")
    script = Scripted(encoder, [ADD, MULTIPLY, "42"], FAMILIES[family].end)
    config = EnvironmentConfig(target=CALCULATOR, max_turns=4)
    rows = play(encoder, script, config, ROW)
    schemas = EnvironmentPool(config.target, {}).make().tool_schemas  # type: ignore[attr-defined]
    turns = [f"{ROW['prompt']}\n\n{tool_guide(schemas)}", ADD, "7", MULTIPLY, "42"]
    conversation = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    (whole,) = encoder.prompts([encoder.render(conversation)])
    (last,) = encoder.completions([encoder.render(conversation, ["42"])], 0)
    assert ids_of(rows) == [*whole, *last]
    assert rows.turn_rewards.sum(dim=1).tolist() == [1.0, 1.0]
    assert rows.stops.tolist() == [StopReason.TERMINATED] * 2
    assert rows.finished.all()
    drawn = [
        encoder.decode(rows.completion_ids[0][rows.action_mask[0] & (rows.turns[0] == t)].tolist()) for t in range(3)
    ]
    assert drawn == [f"{text}{FAMILIES[family].end}" for text in (ADD, MULTIPLY, "42")]


def test_tools_in_the_form_of_the_template() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    tokenizer.chat_template = HERMES
    encoder = make_encoder(tokenizer, "auto")
    script = Scripted(encoder, [ADD, "7"], "<|im_end|>")
    rows = play(encoder, script, EnvironmentConfig(target=CALCULATOR, max_turns=4), ROW)
    text = encoder.decode(ids_of(rows))
    assert text.startswith("<|im_start|>system\n[{")
    assert "You may call these tools" not in text
    assert "<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in text
    assert rows.turn_rewards.sum() == 0.0


def test_a_right_call_counts_with_a_template_of_another_form_of_calls() -> None:
    """The prompt asked for the template's form, which nothing reads: a right call was the final answer, with 0."""
    encoder = make_encoder(with_calls_as(CALL_FORMS["Llama 3.1"]), "auto")
    script = Scripted(encoder, [ADD, MULTIPLY, "42"], "<|im_end|>")
    rows = play(encoder, script, EnvironmentConfig(target=CALCULATOR, max_turns=4), ROW)
    text = encoder.decode(ids_of(rows))
    assert text.startswith(f"<|im_start|>user\n{ROW['prompt']}\n\nYou may call these tools")
    assert f"{ADD}<|im_end|>\n<|im_start|>user\n7<|im_end|>" in text
    assert rows.turn_rewards.sum(dim=1).tolist() == [1.0, 1.0]


class Messages:
    """Answers with messages, the first of which take the place of the prompt."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return [{"role": "user", "content": f"You said {action}"}], 0.5, False, False, {}


def test_messages_and_a_cut_action() -> None:
    encoder = make_encoder(FAMILIES["chatml"].tokenizer(), "auto")
    script = Scripted(encoder, ["a", "b"], "<|im_end|>", cut=0)
    config = EnvironmentConfig(target=CALCULATOR, max_turns=2)
    rows = play(encoder, script, config, ROW, make=Messages)
    assert encoder.decode(ids_of(rows)) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\nYou said a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    )
    ends = (rows.completion_ids[0] == encoder.eos_id).nonzero().flatten().tolist()
    assert [bool(rows.action_mask[0][place]) for place in ends] == [False, False, True]  # the template's, not drawn
    assert rows.stops.tolist() == [StopReason.MAX_TURNS] * 2
    assert not rows.finished.any()
    assert rows.turn_rewards.sum(dim=1).tolist() == [1.0, 1.0]


def test_history_is_never_tokenized_again() -> None:
    """Tokens that the tokenizer would not make of their text stay as they were drawn."""
    encoder = make_encoder(FAMILIES["chatml"].tokenizer(), "auto")
    script = Scripted(encoder, ["xy", "z"], "<|im_end|>")
    rows = play(encoder, script, EnvironmentConfig(target=CALCULATOR, max_turns=2), ROW, make=Messages)
    again = script.asked[1]
    for row in range(2):
        read = again.prompt_ids[row][again.prompt_mask[row]].tolist()
        assert ids_of(rows, row)[: len(read)] == read

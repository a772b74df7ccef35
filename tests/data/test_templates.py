"""Conversations under the families' templates: where turns begin and end, and which parts are learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import FAMILIES, MARKED
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.config.data import ChatFormat, PreferencesConfig, PromptsConfig, SftConfig
from rlhf.data.pairs import DemonstrationSet, PairSet, demonstration_pipeline, pair_pipeline
from rlhf.data.prompts import PromptSet, prompt_pipeline
from rlhf.data.templates import Template, turn_end
from rlhf.data.tokenizer import load_tokenizer, make_encoder, stop_token_ids
from rlhf.errors import DataError
from rlhf.references import MESSAGES

Write = Callable[..., str]

NAMES = list(FAMILIES)
THOUGHTLESS = [name for name in NAMES if name not in ("qwen3", "r1")]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TWO_TURNS = [user("Hi"), assistant("Yes"), user("And?"), assistant("No")]


def demos(
    path: str, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat | None = None, **options: Any
) -> DemonstrationSet:
    return demonstration_pipeline(SftConfig(path=path, **options), tokenizer, chat_template=chat or ChatFormat()).load()


def pairs(path: str, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat | None = None, **options: Any) -> PairSet:
    return pair_pipeline(PreferencesConfig(path=path, **options), tokenizer, chat_template=chat or ChatFormat()).load()


def prompts(path: str, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat | None = None, **options: Any) -> PromptSet:
    return prompt_pipeline(PromptsConfig(path=path, **options), tokenizer, chat_template=chat or ChatFormat()).load()


def learned_texts(rows: DemonstrationSet, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> list[str]:
    """The runs of tokens that are learned, as text."""
    batch = rows.collate([row])
    runs: list[list[int]] = [[]]
    for token, flag in zip(batch.completion_ids[0].tolist(), batch.loss_mask[0].tolist(), strict=True):
        if flag:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("name", NAMES)
def test_a_completion_ends_with_the_token_that_ends_the_turn(name: str, write: Write) -> None:
    family, tokenizer = FAMILIES[name], FAMILIES[name].tokenizer()
    dataset = pairs(write([{"prompt": [user("Hi")], "chosen": "Yes", "rejected": "No"}]), tokenizer)
    end = tokenizer.convert_tokens_to_ids(family.end)
    assert tokenizer.decode(dataset.chosen[0]).removeprefix("<think>\n\n</think>\n\n").strip() == "Yes" + family.end
    assert (dataset.chosen[0][-1], dataset.rejected[0][-1]) == (end, end)
    assert dataset.chosen[0].count(end) == 1
    assert make_encoder(tokenizer, "auto").stop_ids == tuple(dict.fromkeys([tokenizer.eos_token_id, end]))
    assert set(stop_token_ids(tokenizer, "auto", (7,))) == {7, tokenizer.eos_token_id, end}
    assert stop_token_ids(tokenizer, "none") == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_completion_are_the_start_of_what_the_template_writes(name: str, write: Write) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    dataset = demos(write([{"messages": TWO_TURNS}]), tokenizer, learn="last")
    whole = str(tokenizer.apply_chat_template(TWO_TURNS, tokenize=False))
    written = tokenizer.decode(dataset.prompts[0] + dataset.completions[0])
    assert whole.startswith(written)
    assert whole[len(written) :].replace(str(tokenizer.eos_token), "").strip() == ""


@pytest.mark.parametrize("name", THOUGHTLESS)
def test_every_turn_of_the_assistant_is_learned(name: str, write: Write) -> None:
    family, tokenizer = FAMILIES[name], FAMILIES[name].tokenizer()
    path = write([{"messages": TWO_TURNS}])
    texts = [f"Yes{family.end}", f"No{family.end}"]
    assert [text.lstrip() for text in learned_texts(demos(path, tokenizer), tokenizer)] == texts
    assert [text.lstrip() for text in learned_texts(demos(path, tokenizer, learn="last"), tokenizer)] == texts[1:]
    first = demos(path, tokenizer)
    one_turn = demos(write([{"messages": TWO_TURNS[:2]}], "one.jsonl"), tokenizer)
    assert first.prompts == one_turn.prompts
    everything = demos(path, tokenizer, learn="all")
    assert bool(everything.collate([0]).loss_mask.all())
    assert len(everything.prompts[0]) == 1
    written = everything.prompts[0] + everything.completions[0]
    assert written == first.prompts[0] + first.completions[0]


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_the_mask_is_that_of_transformers(name: str, write: Write) -> None:
    marked, tokenizer = FAMILIES["marked"].tokenizer(), FAMILIES[name].tokenizer()
    told = marked.apply_chat_template(TWO_TURNS, return_assistant_tokens_mask=True, return_dict=True)
    batch = demos(write([{"messages": TWO_TURNS}]), tokenizer).collate([0])
    ids = torch.cat([batch.prompt_ids[0], batch.completion_ids[0]]).tolist()
    mask = [0] * batch.prompt_ids.shape[1] + batch.loss_mask[0].int().tolist()
    assert ids == told["input_ids"][: len(ids)]
    assert mask == told["assistant_masks"][: len(ids)]
    assert not any(told["assistant_masks"][len(ids) :])


def test_marks_of_a_template_decide_what_is_learned(write: Write) -> None:
    tokenizer = FAMILIES["marked"].tokenizer()
    tokenizer.chat_template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    dataset = demos(write([{"messages": TWO_TURNS}]), tokenizer)
    assert learned_texts(dataset, tokenizer) == ["Yes", "No"]
    assert tokenizer.decode(dataset.completions[0]).endswith("No<|im_end|>")


def test_rows_whose_end_of_turn_the_marks_leave_out_are_counted(write: Write) -> None:
    tokenizer = FAMILIES["marked"].tokenizer()
    remark = "rows whose end of turn is not learned: the chat template has it after its {% generation %} block"
    assert remark not in demos(write([{"messages": TWO_TURNS}]), tokenizer).skips.remarks
    tokenizer.chat_template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    dataset = demos(write([{"messages": TWO_TURNS}] * 2), tokenizer)
    assert dataset.skips.remarks[remark] == 2
    assert remark in dataset.skips.summary()


def test_rows_are_taken_apart_where_the_template_rewrites_earlier_turns(write: Write) -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    dataset = demos(write([{"messages": TWO_TURNS}]), tokenizer)
    assert [tokenizer.decode(ids) for ids in dataset.completions] == [
        "<think>\n\n</think>\n\nYes<|im_end|>",
        "<think>\n\n</think>\n\nNo<|im_end|>",
    ]
    assert tokenizer.decode(dataset.prompts[1]).endswith(
        "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "1 conversations taken apart, a row for each turn" in dataset.skips.summary()
    assert len(demos(write([{"messages": TWO_TURNS}]), tokenizer, learn="last")) == 1


def test_an_answer_without_a_thought_begins_at_the_header_of_its_turn(write: Write) -> None:
    tokenizer = FAMILIES["r1"].tokenizer()
    dataset = pairs(write([{"prompt": [user("Hi")], "chosen": "<b>", "rejected": "No"}]), tokenizer)
    assert tokenizer.decode(dataset.prompts[0]) == "<bos><|User|>Hi<|Assistant|>"
    assert tokenizer.decode(dataset.chosen[0]) == "<b><|end_of_sentence|>"
    asked = prompts(write([{"prompt": [user("Hi")]}]), tokenizer)
    assert asked.texts == ("<bos><|User|>Hi<|Assistant|><think>\n",)


@pytest.mark.parametrize(
    "answer",
    [
        assistant("<think>\nhm\n</think>\n\nYes"),
        assistant("hm\n</think>\n\nYes"),
        assistant("Yes", reasoning_content="hm"),
        assistant("Yes", thinking="hm"),
    ],
)
def test_a_thought_continues_the_one_that_the_prompt_opens(answer: dict[str, Any], write: Write) -> None:
    tokenizer = FAMILIES["r1"].tokenizer()
    dataset = demos(write([{"messages": [user("Hi"), answer]}]), tokenizer)
    assert tokenizer.decode(dataset.prompts[0]) == "<bos><|User|>Hi<|Assistant|><think>\n"
    assert tokenizer.decode(dataset.completions[0]) == "hm\n</think>\n\nYes<|end_of_sentence|>"
    assert "does not write" not in dataset.skips.summary()


def test_both_sides_of_a_pair_begin_at_one_place(write: Write) -> None:
    tokenizer = FAMILIES["r1"].tokenizer()
    row = {"prompt": [user("Hi")], "chosen": "<think>\nhm\n</think>\n\nYes", "rejected": "No"}
    dataset = pairs(write([row]), tokenizer)
    assert tokenizer.decode(dataset.prompts[0]) == "<bos><|User|>Hi<|Assistant|>"
    assert tokenizer.decode(dataset.chosen[0]) == "<think>\nhm\n</think>\n\nYes<|end_of_sentence|>"
    assert tokenizer.decode(dataset.rejected[0]) == "No<|end_of_sentence|>"


def test_arguments_of_the_template_and_thoughts_that_it_writes(write: Write) -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    path = write([{"messages": [user("Hi"), assistant("Yes", reasoning_content="hm")]}])
    thinks = demos(path, tokenizer)
    assert tokenizer.decode(thinks.completions[0]) == "<think>\nhm\n</think>\n\nYes<|im_end|>"
    plain = prompts(path, tokenizer, ChatFormat(kwargs={"enable_thinking": False}))
    assert plain.texts[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


def test_tools_and_their_calls_are_handed_to_the_template(write: Write) -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    called = assistant("", tool_calls=[CALL])
    row = {"tools": [TOOL], "messages": [user("1+?"), {**called, "content": None}]}
    dataset = demos(write([row]), tokenizer)
    assert '"name": "add"' in tokenizer.decode(dataset.prompts[0])
    assert '<tool_call>add {"a": 1}</tool_call><|im_end|>' in tokenizer.decode(dataset.completions[0])
    assert "does not write" not in dataset.skips.summary()
    assert len(dataset) == 1


def test_what_a_template_does_not_write_of_a_row_is_counted(write: Write) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    rows = [
        {"tools": [TOOL], "messages": [user("Hi"), assistant("Yes", tool_calls=[CALL], weight=1)]},
        {"messages": [{**user("Hi"), "name": "Ann"}, assistant("Yes", reasoning_content="hm")]},
    ]
    summary = demos(write(rows), tokenizer).skips.summary()
    for field in ("tools", "tool_calls", "weight", "name", "reasoning_content"):
        assert f"1 rows whose {field} the chat template does not write" in summary


def test_a_system_prompt_for_rows_without_one(write: Write) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    rows = [{"prompt": "Hi"}, {"prompt": [{"role": "system", "content": "Rhyme."}, user("Hi")]}]
    dataset = prompts(write(rows), tokenizer, ChatFormat(system="Be brief."))
    assert [text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user") for text in dataset.texts] == [
        True,
        False,
    ]
    with pytest.raises(DataError, match=r"data.system is given to a chat template, and data.chat_template is none"):
        prompts(write(rows), tokenizer, ChatFormat("none", system="Be brief."))
    with pytest.raises(DataError, match="System role not supported"):
        prompts(write(rows[:1]), FAMILIES["gemma"].tokenizer(), ChatFormat(system="Be brief."))


def test_text_becomes_turns_by_default_and_the_summary_says_so(write: Write) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    says = "Text prompts become user turns by the tokenizer's chat template; data.chat_template=none keeps them"
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    dataset = pairs(write([{"prompt": "Hi", "chosen": "Yes", "rejected": "No"}]), tokenizer)
    assert tokenizer.decode(dataset.prompts[0]) == turn
    assert says in dataset.skips.summary()
    alpaca = demos(write([{"instruction": "Hi", "input": "", "output": "Yes"}]), tokenizer)
    assert tokenizer.decode(alpaca.prompts[0]) == turn
    assert says in alpaca.skips.summary()
    none = prompts(write([{"prompt": "Hi"}]), tokenizer, ChatFormat("none"))
    assert (none.texts, none.skips.notes) == (("Hi",), [])
    assert MESSAGES not in none.references[0]
    assert prompts(write([{"prompt": "Hi"}]), tokenizer).references[0][MESSAGES] == [user("Hi")]


def test_a_system_column_that_no_text_takes_in_is_counted(write: Write) -> None:
    tokenizer, row = FAMILIES["chatml"].tokenizer(), {"system": "Be brief.", "question": "Hi", "answer": "Yes"}
    remark = "1 rows whose system column is left out, because their prompt stays text"
    assert remark not in demos(write([row]), tokenizer).skips.summary()
    tokenizer.chat_template = None
    assert remark in demos(write([row]), tokenizer).skips.summary()


def test_tools_that_no_text_takes_in_are_counted(write: Write) -> None:
    tokenizer, tools = FAMILIES["chatml"].tokenizer(), [{"type": "function", "function": {"name": "f"}}]
    remark = "1 rows whose tools are left out, because their prompt stays text"
    transcript = write([{"prompt": "\n\nHuman: Hi\n\nAssistant:", "tools": tools}, {"prompt": "Hi", "tools": []}])
    assert remark in prompts(transcript, tokenizer).skips.summary()
    path = write([{"prompt": "Hi", "completion": "Yes", "tools": tools}, {"prompt": "Hi", "completion": "No"}])
    assert remark not in demos(path, tokenizer).skips.summary()
    tokenizer.chat_template = None
    assert remark in demos(path, tokenizer).skips.summary()


def test_texts_transcripts_and_written_out_prompts_stay_what_they_are(write: Write) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    transcript = "\n\nHuman: Hi\n\nAssistant:"
    assert demos(write([{"text": "Once"}]), tokenizer).completions == (
        tokenizer("nce<|im_end|>", add_special_tokens=False)["input_ids"],
    )
    for row in ({"prompt": transcript}, {"chosen": f"{transcript} Yes", "rejected": f"{transcript} No"}):
        dataset = prompts(write([row]), tokenizer)
        assert dataset.texts == (transcript,)
        assert "Transcripts stay text" in dataset.skips.summary()
    written = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    dataset = prompts(write([{"prompt": written}]), tokenizer)
    assert dataset.texts == (written,)
    assert "1 text prompts have the chat template's turns written out already" in dataset.skips.summary()
    own = write(str(tokenizer.chat_template), "own.jinja")  # of a file, too
    assert prompts(write([{"prompt": written}]), tokenizer, ChatFormat(own)).texts == (written,)
    cut = prompts(write([{"prompt": "Hi there"}]), tokenizer, first_tokens=2)
    assert cut.texts == ("Hi",)


def test_pairs_that_part_at_an_earlier_turn(write: Write) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    sides: Mapping[str, Any] = {
        "chosen": [user("Hi"), assistant("Yes"), user("And?"), assistant("A")],
        "rejected": [user("Hi"), assistant("No"), user("What?"), assistant("B")],
    }
    dataset = pairs(write([dict(sides)]), tokenizer)
    assert tokenizer.decode(dataset.prompts[0]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    batch = dataset.collate([0])
    assert tokenizer.decode(batch.chosen_ids[0][batch.chosen_learned[0]]) == "Yes<|im_end|>A<|im_end|>"
    assert tokenizer.decode(batch.rejected_ids[0][batch.rejected_learned[0]]) == "No<|im_end|>B<|im_end|>"
    assert tokenizer.decode(batch.rejected_ids[0]) == (
        "No<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"
    )
    assert dataset.texts[0].chosen.startswith("Yes<|im_end|>")


def test_every_answer_of_a_chosen_side_is_a_demonstration_and_none_of_the_prompts(write: Write) -> None:
    """Of a side with several turns the last alone was learned, by SFT and PPO-ptx."""
    row = {
        "prompt": [user("Hi"), assistant("Hello"), user("Well?")],
        "chosen": [assistant("Yes"), user("And?"), assistant("A")],
        "rejected": [assistant("No"), user("What?"), assistant("B")],
    }
    path, tokenizer = write([row]), FAMILIES["chatml"].tokenizer()
    for system in (None, "Be brief."):
        assert learned_texts(demos(path, tokenizer, ChatFormat(system=system)), tokenizer) == [
            "Yes<|im_end|>",
            "A<|im_end|>",
        ]
    assert learned_texts(demos(path, tokenizer, learn="last"), tokenizer) == ["A<|im_end|>"]


def test_two_answers_at_the_end_are_both_learned(write: Write) -> None:
    """Such a conversation was skipped, though two in a row before another question were learned."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    path = write([{"messages": [user("Hi"), assistant("Yes"), assistant("Well")]}])
    assert learned_texts(demos(path, tokenizer), tokenizer) == ["Yes<|im_end|>", "Well<|im_end|>"]
    with pytest.raises(DataError, match="messages has no user message to answer"):
        demos(write([{"messages": [assistant("Yes"), assistant("Well")]}]), tokenizer)


def test_pairs_that_part_at_what_the_user_says_are_bad_rows(write: Write) -> None:
    row = {
        "chosen": [user("Hi"), assistant("Yes"), user("And?"), assistant("A")],
        "rejected": [user("Hi"), assistant("Yes"), user("What?"), assistant("B")],
    }
    with pytest.raises(DataError, match="chosen and rejected part where the assistant does not speak"):
        pairs(write([row]), FAMILIES["chatml"].tokenizer())


@pytest.mark.parametrize(
    "text, end",
    [
        ("Yes", 3),
        ("Yes\n", 4),
        ("Yes<e>\n", 6),
        ("Yes<e>\n<eos>", 6),
        ("Yes <eos>", 9),
        ("<e>", 3),
        ("Y<e>es", 6),
    ],
)
def test_where_a_turn_ends(text: str, end: int) -> None:
    assert turn_end(text, Template("", True, "auto", specials=("<eos>", "<e>"), end="<e>")) == end


def test_a_turn_with_a_tool_call_ends_as_one_of_text_does() -> None:
    """LFM2 writes <|tool_call_end|><|im_end|>; the end of the turn was not learned."""
    template = Template("", True, "auto", specials=("<|tool_call_end|>", "<|im_end|>", "<eos>"), end="<|im_end|>")
    text = "call<|tool_call_end|><|im_end|>\n"
    assert turn_end(text, template) == len(text) - 1
    assert turn_end(f"{text}<eos>", template) == len(text) - 1
    assert turn_end("call<|tool_call_end|>", template) == len("call<|tool_call_end|>")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["{end}", "Price: <s>9</s> 7", "What is {end} for?", "<file> {eos}", "{bos}Hello"])
def test_a_special_token_in_a_prompt_takes_nothing_away_from_the_template(name: str, text: str, write: Write) -> None:
    """A prompt with any special token in it lost its template and its system prompt."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    content = text.format(end=family.end, eos=family.eos, bos=tokenizer.bos_token or "")
    texts = prompts(write([{"prompt": content}]), tokenizer).texts
    assert texts == prompts(write([{"messages": [user(content)]}]), tokenizer).texts


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_the_words_of_the_template_stays(name: str, write: Write) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    turns = [user("Hi"), assistant("Yes"), user("And?")]
    for conversation in ([user("Hi")], turns):
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
        for written in (text, text.removeprefix(tokenizer.bos_token or "")):
            assert prompts(write([{"prompt": written}]), tokenizer).texts == (written,)


def test_a_cut_conversation_keeps_its_mask_in_step(write: Write) -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    path = write([{"messages": TWO_TURNS}])
    whole = demos(path, tokenizer)
    length = len(whole.prompts[0]) + len(whole.completions[0])
    cut = demos(path, tokenizer, max_tokens=length - 1, too_long="truncate")
    assert learned_texts(cut, tokenizer) == ["Yes<|im_end|>", "No"]
    assert cut.learned[0] == whole.learned[0][:-1]


def test_masks_of_real_conversations_are_those_of_transformers(shared: Path) -> None:
    folder = shared / "tokenizers/gpt2"
    inner = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    file = shared / "data/format_fixtures/kto_en_demo.json"
    conversations = [row["messages"] for row in json.loads(file.read_text())][:80]
    assert sum(len(messages) > 2 for messages in conversations) > 10
    tokenizer.chat_template = FAMILIES["chatml"].template
    dataset = demos(str(file), tokenizer, max_tokens=100_000, limit=80)
    assert len(dataset) == 80
    for row, messages in enumerate(conversations):
        told = tokenizer.apply_chat_template(
            messages, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
        )
        ids = dataset.prompts[row] + dataset.completions[row]
        mask = [0] * len(dataset.prompts[row]) + [int(flag) for flag in flags_of(dataset, row)]
        assert ids == told["input_ids"][: len(ids)]
        assert mask == told["assistant_masks"][: len(ids)]
        assert not any(told["assistant_masks"][len(ids) :])


def flags_of(dataset: DemonstrationSet, row: int) -> list[bool]:
    flags: list[bool] = dataset.collate([row]).loss_mask[0].tolist()
    return flags


SMOLLM2 = "models/smollm2-135m-instruct"
WRITTEN_TURN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
MARKED_TURN = (
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{message['content'] + '<|im_end|>'}}{% endgeneration %}{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}"
    "{{'\n'}}"
)
NAMED_SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    """SmolLM2's own tokenizer and template."""
    root = Path(__file__).resolve().parents[2]
    folders = [folder for folder in (root / SMOLLM2, root.parent / "shared" / SMOLLM2) if folder.is_dir()]
    if not folders:
        pytest.skip(f"no {SMOLLM2}, here or in ../shared: python scripts/get_smollm2.py gets it")
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    return load_tokenizer(str(folders[0]))


def test_smollm2s_prompts_are_as_its_template_writes_them(smollm2: PreTrainedTokenizerBase, write: Write) -> None:
    asked = [[user("Hi")], TWO_TURNS[:3], [{"role": "system", "content": "Rhyme."}, user("Hi")]]
    loaded = prompts(write([{"prompt": messages} for messages in asked]), smollm2)
    for row, messages in enumerate(asked):
        expected = smollm2.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert loaded.texts[row] == expected
        ids = smollm2.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        batch = loaded.collate([row])
        assert batch.prompt_ids[batch.prompt_mask].tolist() == ids
    assert make_encoder(smollm2, "auto").stop_ids == (smollm2.convert_tokens_to_ids("<|im_end|>"),)


def test_smollm2s_own_system_prompt_is_for_rows_without_one(smollm2: PreTrainedTokenizerBase, write: Write) -> None:
    rows = [{"prompt": "Hi"}, {"prompt": [{"role": "system", "content": "Rhyme."}, user("Hi")]}]
    path = write(rows)

    def systems(chat: ChatFormat) -> list[str]:
        texts = prompts(path, smollm2, chat).texts
        return [text.removeprefix("<|im_start|>system\n").split("<|im_end|>")[0] for text in texts]

    assert systems(ChatFormat()) == [NAMED_SMOLLM, "Rhyme."]
    assert systems(ChatFormat(system="Be brief.")) == ["Be brief.", "Rhyme."]


@pytest.mark.parametrize("system", [None, "Rhyme."])
def test_smollm2s_masks_are_those_of_transformers(
    smollm2: PreTrainedTokenizerBase, system: str | None, write: Write
) -> None:
    assert isinstance(smollm2.chat_template, str)
    assert WRITTEN_TURN in smollm2.chat_template
    marked = smollm2.chat_template.replace(WRITTEN_TURN, MARKED_TURN)
    messages = [*([{"role": "system", "content": system}] if system else []), *TWO_TURNS]
    assert smollm2.apply_chat_template(messages, tokenize=False) == smollm2.apply_chat_template(
        messages, chat_template=marked, tokenize=False
    )
    expected = smollm2.apply_chat_template(
        messages, chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
    )
    loaded = demos(write([{"messages": messages}]), smollm2)
    ids = loaded.prompts[0] + loaded.completions[0]
    mask = [0] * len(loaded.prompts[0]) + [int(flag) for flag in flags_of(loaded, 0)]
    assert ids == expected["input_ids"][: len(ids)]
    assert mask == expected["assistant_masks"][: len(ids)]
    assert sum(mask) > 2
    assert smollm2.decode(expected["input_ids"][len(ids) :]) == "\n"
    assert learned_texts(loaded, smollm2) == ["Yes<|im_end|>", "No<|im_end|>"]

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_tokenizers import byte_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.data.chat import Rendered, choose_template, embedding_rows, ensure_pad, load_tokenizer, render
from rlhf.data.row import BadRow
from rlhf.errors import DataError, ModelError

HI = [{"role": "user", "content": "Hi"}]


def saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    tokenizer.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("pad", [None, "</s>", "<s>"])
def test_a_pad_token_of_its_own_is_added(tmp_path: Path, pad: str | None) -> None:
    before = byte_tokenizer(bos="<s>", pad=pad)
    tokenizer = load_tokenizer(saved(before, tmp_path))
    assert tokenizer.pad_token == "<pad>"
    assert tokenizer.pad_token_id == len(before)
    assert len(tokenizer) == len(before) + 1
    assert tokenizer("<pad>", add_special_tokens=False)["input_ids"] == [tokenizer.pad_token_id]
    assert embedding_rows(tokenizer, len(before), model="m") == len(before) + 1
    assert embedding_rows(tokenizer, 1000, model="m") == 1000


def test_a_pad_token_of_its_own_stays(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(byte_tokenizer(pad="<unk>"), tmp_path))
    assert tokenizer.pad_token == "<unk>"
    assert not ensure_pad(tokenizer)


def test_a_pad_token_that_is_in_the_vocabulary_already_costs_no_row() -> None:
    tokenizer = byte_tokenizer(extra=("<pad>",))
    size = len(tokenizer)
    assert not ensure_pad(tokenizer)
    assert (tokenizer.pad_token, len(tokenizer)) == ("<pad>", size)


def test_an_eos_that_is_called_pad_is_not_taken_for_one() -> None:
    tokenizer = byte_tokenizer(eos="<pad>")
    assert ensure_pad(tokenizer)
    assert tokenizer.pad_token == "[PAD]"


def test_a_model_with_another_vocabulary_is_refused() -> None:
    tokenizer = byte_tokenizer()
    ensure_pad(tokenizer)
    with pytest.raises(ModelError, match="runs/x: the tokenizer has 258 tokens and the model only 256"):
        embedding_rows(tokenizer, 256, model="runs/x")
    assert embedding_rows(tokenizer, 257, model="runs/x") == 258
    with pytest.raises(ModelError, match="has 258 tokens and the model only 257"):
        embedding_rows(byte_tokenizer(pad="<unk>"), 257, model="runs/x")


def test_without_eos_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no end-of-sequence token.*tokenizer_config.json"):
        load_tokenizer(saved(byte_tokenizer(eos=None, bos="<s>"), tmp_path))


def test_folders_without_a_tokenizer_are_plain_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="no tokenizer could be loaded from here"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelError, match="no tokenizer could be loaded from here"):
        load_tokenizer("nobody-at-all/no-such-model")
    for text in ("{", "{}", "[]", json.dumps({"version": "1.0"})):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelError, match="not a tokenizer"):
            load_tokenizer(str(tmp_path))


def test_the_real_tokenizer_keeps_its_pad(stories: PreTrainedTokenizerBase) -> None:
    assert (stories.bos_token_id, stories.eos_token_id, stories.pad_token_id, len(stories)) == (1, 1, 0, 512)


def test_the_template_is_applied_once_to_prompt_and_answer(chatml: PreTrainedTokenizerBase) -> None:
    rendered = render(chatml, choose_template(chatml, "auto"), HI, ["A", "B"])
    assert rendered == Rendered(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ("A<|im_end|>", "B<|im_end|>"), True, (), tuple(HI)
    )


def test_text_is_left_alone_by_a_template(chatml: PreTrainedTokenizerBase) -> None:
    assert render(chatml, choose_template(chatml, "auto"), "Hi", [" A"]) == Rendered("Hi", (" A",), False)


def test_a_template_may_come_from_a_file(plain: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    template = choose_template(plain, str(path))
    assert template.turns
    assert render(plain, template, HI, ["A"]) == Rendered("Hi|", ("A|",), True, (), tuple(HI))


def test_conversations_without_a_template_are_an_error(
    plain: PreTrainedTokenizerBase, chatml: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=r"the tokenizer has no chat template. Set data.chat_template to the path"):
        render(plain, choose_template(plain, "auto"), HI, ["A"])
    with pytest.raises(DataError, match=r"data.chat_template is none"):
        render(chatml, choose_template(chatml, "none"), HI, ["A"])
    with pytest.raises(DataError, match=r"data.chat_template: no such file or folder: nowhere.jinja"):
        choose_template(plain, "nowhere.jinja")


@pytest.mark.parametrize(
    "source, error, message",
    [
        ("{% for m in %}", DataError, "line 1"),
        ("{{ raise_exception('roles must alternate') }}", BadRow, "roles must alternate"),
        ("{{ messages[9].content }}", BadRow, "refuses the conversation"),
        ("{{ messages + 1 }}", BadRow, "refuses the conversation"),
        ("{{ messages[-1].content }}", BadRow, "differently once it is answered"),
        ("Hi", BadRow, "nothing of the completion"),
        ("", BadRow, "nothing of the prompt"),
    ],
)
def test_templates_that_do_not_fit(
    plain: PreTrainedTokenizerBase, tmp_path: Path, source: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(source)
    with pytest.raises(error, match=message):
        render(plain, choose_template(plain, str(path)), HI, ["A"])


def test_named_templates_have_a_default(chatml: PreTrainedTokenizerBase) -> None:
    source = chatml.chat_template
    chatml.chat_template = {"default": source, "tools": "x"}
    assert choose_template(chatml, "auto").source == source


def test_a_saved_template_is_loaded(chatml: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    loaded = load_tokenizer(saved(chatml, tmp_path))
    assert choose_template(loaded, "auto").source == chatml.chat_template
    assert AutoTokenizer.from_pretrained(str(tmp_path)).pad_token == "<|pad|>"

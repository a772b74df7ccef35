from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_tokenizers import byte_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.data.rows import BadRow
from rlhf.data.tokenizer import (
    Rendered,
    choose_template,
    load_tokenizer,
    pad_id,
    render,
    shares_vocabulary,
    text_vocabulary,
    vocabulary_digest,
)
from rlhf.errors import DataError, ModelError
from rlhf.planning.shapes import read_shape

HI = [{"role": "user", "content": "Hi"}]


def saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    tokenizer.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("pad", [None, "</s>", "<s>", "<unk>"])
def test_a_tokenizer_is_loaded_as_it_was_published(tmp_path: Path, pad: str | None) -> None:
    before = byte_tokenizer(bos="<s>", pad=pad)
    tokenizer = load_tokenizer(saved(before, tmp_path))
    assert tokenizer.get_vocab() == before.get_vocab()
    assert tokenizer.pad_token == pad


@pytest.mark.parametrize(("pad", "filler"), [(None, "</s>"), ("</s>", "</s>"), ("<s>", "<s>"), ("<unk>", "<unk>")])
def test_rows_are_filled_with_the_pad_token_or_the_eos(pad: str | None, filler: str) -> None:
    tokenizer = byte_tokenizer(bos="<s>", pad=pad)
    assert pad_id(tokenizer) == tokenizer.get_vocab()[filler]


def test_a_pad_token_behind_the_vocabulary_fills_nothing_for_models_lack_its_embedding() -> None:
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == size
    assert pad_id(tokenizer) == tokenizer.eos_token_id
    assert max(text_vocabulary(tokenizer).values()) == size - 1


def test_a_vocabulary_is_asked_for_once_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it is made again, which takes long for a large one, and a start asks often."""
    tokenizer, asked = byte_tokenizer(pad="</s>"), list[str]()
    vocabulary = tokenizer.get_vocab()

    def counted(_: object) -> dict[str, int]:
        asked.append("all")
        return dict(vocabulary)

    monkeypatch.setattr(type(tokenizer), "get_vocab", counted)
    pad_id(tokenizer)
    text_vocabulary(tokenizer)
    assert asked == ["all", "all"]


def test_vocabularies_are_shared_whatever_pads() -> None:
    plain, padded = byte_tokenizer(), byte_tokenizer()
    padded.add_special_tokens({"pad_token": "[PAD]"})
    ended = byte_tokenizer(pad="</s>")
    for writer in (plain, padded, ended):
        assert all(shares_vocabulary(writer, reader) for reader in (plain, padded, ended))
        assert vocabulary_digest(writer) == vocabulary_digest(plain)
    other = byte_tokenizer(eos="<end>")
    assert not shares_vocabulary(other, plain)
    assert not shares_vocabulary(plain, other)  # its EOS is unknown there, though it pads


def test_without_eos_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no end-of-sequence token.*tokenizer_config.json"):
        load_tokenizer(saved(byte_tokenizer(eos=None, bos="<s>"), tmp_path))


def test_folders_without_a_tokenizer_are_plain_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"is no model folder: it has no config\.json \(it is empty\)"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"no tokenizer could be loaded from here: .*neither tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelError, match="no tokenizer could be loaded from here"):
        load_tokenizer("nobody-at-all/no-such-model")
    for text in ("{", "{}", "[]", json.dumps({"version": "1.0"})):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelError, match="not a tokenizer"):
            load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("part", ["model", "pre_tokenizer"])
def test_a_tokenizer_of_a_newer_version_is_a_plain_error(tmp_path: Path, part: str) -> None:
    folder = Path(saved(byte_tokenizer(), tmp_path))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings[part] = {**settings[part], "type": "OfTheFuture"}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"no tokenizer could be loaded .*: pip install -U transformers tokenizers"):
        load_tokenizer(str(folder))


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


def test_an_adapter_that_names_itself_as_its_base_is_a_plain_error(tmp_path: Path) -> None:
    """It ended in Python's RecursionError, when the adapter of a run in `model` named its base by the path `model`."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": f"{tmp_path}/."}))
    with pytest.raises(ModelError, match="base_model_name_or_path is the adapter itself: write its base there"):
        load_tokenizer(str(tmp_path))
    assert read_shape(str(tmp_path)) is None

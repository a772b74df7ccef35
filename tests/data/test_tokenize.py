from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_tokenizers import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.data.templates import Rendered
from rlhf.data.tokenizer import Encoder, make_encoder, text_vocabulary, tokenizer_of_text
from rlhf.errors import DataError

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=20)
HI = [{"role": "user", "content": "Hi"}]


def ids(encoder: Encoder, rendered: Rendered) -> tuple[list[int], list[int]]:
    return encoder.prompts([rendered])[0], encoder.completions([rendered], 0)[0]


def text(prompt: str, completion: str) -> Rendered:
    return Rendered(prompt, (completion,), templated=False)


def test_a_prompt_has_bos_once_and_a_completion_ends_in_eos(plain: PreTrainedTokenizerBase) -> None:
    encoder = make_encoder(plain, "auto")
    prompt, completion = ids(encoder, text("ab", " cd"))
    assert encoder.decode(prompt) == "<s>ab"
    assert encoder.decode(completion) == " cd</s>"
    assert (prompt.count(plain.bos_token_id), completion.count(plain.eos_token_id)) == (1, 1)
    assert encoder.decode(ids(encoder, text("<s>ab", "c</s>"))[0]) == "<s>ab"
    assert encoder.decode(ids(encoder, text("<s>ab", "c</s>"))[1]) == "c</s>"


def test_a_tokenizer_that_ends_every_text_in_eos_does_not_end_prompts_so() -> None:
    encoder = make_encoder(byte_tokenizer(bos="<s>", pad="<pad>", adds="<s> $A </s>"), "auto")
    prompt, completion = ids(encoder, text("ab", "cd"))
    assert encoder.decode(prompt) == "<s>ab"
    assert encoder.decode(completion) == "cd</s>"


def test_no_bos_where_the_tokenizer_adds_none() -> None:
    encoder = make_encoder(byte_tokenizer(bos="<s>", pad="<pad>"), "auto")
    assert encoder.prefix == ()
    assert encoder.decode(ids(encoder, text("ab", "c"))[0]) == "ab"
    assert ids(encoder, text("", "c"))[0] == []


def test_a_template_that_writes_bos_does_not_get_a_second(llama_like: PreTrainedTokenizerBase) -> None:
    encoder = make_encoder(llama_like, "auto")
    prompt, completion = ids(encoder, encoder.render(HI, ["Yes"]))
    assert prompt[0] == llama_like.bos_token_id
    assert prompt.count(llama_like.bos_token_id) == 1
    assert encoder.decode(prompt) == "<s>[user] Hi</s>\n[assistant] "
    assert encoder.decode(completion) == "Yes</s>"  # not the newline the template writes after its EOS


def test_a_template_without_bos_gets_none(plain: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    encoder = make_encoder(plain, str(tmp_path / "t"))
    prompt, completion = ids(encoder, encoder.render(HI, ["Yes"]))
    assert encoder.decode(prompt) == "user: Hi\n"
    assert encoder.decode(completion) == "assistant: Yes\n</s>"


def test_the_end_of_turn_serves_as_eos(chatml: PreTrainedTokenizerBase) -> None:
    encoder = make_encoder(chatml, "auto")
    prompt, completion = ids(encoder, encoder.render(HI, ["Yes"]))
    assert encoder.decode(completion) == "Yes<|im_end|>"
    joint = chatml.apply_chat_template([*HI, {"role": "assistant", "content": "Yes"}], return_dict=False)
    assert prompt + completion == joint[: len(prompt + completion)]


def test_ids_of_the_real_tokenizer(stories: PreTrainedTokenizerBase) -> None:
    encoder = make_encoder(stories, "auto")
    prompt, completion = ids(encoder, text("Once upon", " a time"))
    assert prompt == [1, 403, 407]
    assert completion == [261, 378, 1]
    assert stories(" a time", add_special_tokens=False)["input_ids"] == [410, 261, 378]  # a space too many at a seam


@given(TEXT, TEXT)
@example(" ", " ")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_real_ids_of_prompt_and_completion_decode_to_the_two_texts(
    stories: PreTrainedTokenizerBase, prompt: str, completion: str
) -> None:
    encoder = make_encoder(stories, "auto")
    rendered = text(prompt, completion)
    first, second = ids(encoder, rendered)
    assert first[0] == 1
    assert second[-1] == 1
    assert stories.decode(first[1:] + second[:-1]) == prompt + completion
    assert encoder.is_seam_exact(rendered, first, second)


@given(TEXT, TEXT, st.sampled_from(["", "<s> $A", "<s> $A </s>"]))
def test_byte_ids_decode_to_the_two_texts(prompt: str, completion: str, adds: str) -> None:
    tokenizer = byte_tokenizer(bos="<s>", pad="<pad>", adds=adds)
    first, second = ids(make_encoder(tokenizer, "auto"), text(prompt, completion))
    assert tokenizer.decode(first + second) == ("<s>" if adds else "") + prompt + completion + "</s>"


def metaspace_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    letters = ["</s>", "<pad>", "▁", *'abc.\n:1x"y', "▁a", "▁b", "ab"]
    inner = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[("▁", "a"), ("▁", "b"), ("a", "b")])
    )
    if scheme == "normalizer":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")


@pytest.mark.parametrize("scheme", ["always", "first", "never", "normalizer"])
@pytest.mark.parametrize("completion", ["ab", " ab", "b a", "\nab", ".", "  a"])
def test_sentencepiece_habits_leave_no_space_at_the_seam(scheme: str, completion: str) -> None:
    encoder = make_encoder(metaspace_tokenizer(scheme), "auto")
    first, second = ids(encoder, text("b a", completion))
    assert encoder.decode(first + second) == "b a" + completion + "</s>"
    assert encoder.is_seam_exact(text("b a", completion), first, second)


def test_a_seam_that_does_not_hold_is_noticed(stories: PreTrainedTokenizerBase) -> None:
    encoder = make_encoder(stories, "auto")
    spaced = [1, *stories("ab", add_special_tokens=False)["input_ids"]]
    wrong = [*stories("cd", add_special_tokens=False)["input_ids"], 1]
    assert not encoder.is_seam_exact(text("ab", "cd"), spaced, wrong)


def test_only_an_eos_is_asked_of_a_tokenizer() -> None:
    with pytest.raises(DataError, match="see load_tokenizer"):
        make_encoder(byte_tokenizer(eos=None, bos="<s>"), "auto")
    for pad in (None, "</s>"):
        encoder = make_encoder(byte_tokenizer(pad=pad), "auto")
        assert encoder.pad_id == encoder.eos_id


def appended(pad: str, *, where: str) -> PreTrainedTokenizerBase:
    """A tokenizer whose pad token comes after all others: added to it, or the last of its own vocabulary."""
    if where == "python":  # not a fast one
        made: PreTrainedTokenizerBase = ByT5Tokenizer(extra_ids=0)
    elif where == "unigram":
        pieces = [("<unk>", 0.0), ("</s>", 0.0), *[(char, -1.0) for char in "▁abpd<>"], (pad, -1.0)]
        made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, 0)), eos_token="</s>")
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        made.backend_tokenizer.decoder = decoders.Metaspace()
    else:
        made = byte_tokenizer(bos="<s>", adds="<s> $A")
        if where == "vocabulary":
            model = made.backend_tokenizer.model
            vocabulary = {**made.get_vocab(), pad: len(made)}
            assert isinstance(model, models.BPE)
            made.backend_tokenizer.model = models.BPE(vocab=vocabulary, merges=[])
    made.add_special_tokens({"pad_token": pad})
    return made


@pytest.mark.parametrize("where", ["added", "vocabulary", "unigram", "python"])
def test_a_pad_token_that_models_have_no_embedding_for_is_text_where_it_is_spelled(where: str) -> None:
    tokenizer = appended("<papad>", where=where)
    assert tokenizer.pad_token_id == max(tokenizer.get_vocab().values())
    encoder = make_encoder(tokenizer, "auto")
    rows = [
        token for prompt in ("ab<papad>", "<papad>") for row in ids(encoder, text(prompt, "<papad>b")) for token in row
    ]
    assert max(rows) < tokenizer.pad_token_id
    assert set(rows) <= set(text_vocabulary(tokenizer).values())
    prompt, completion = ids(encoder, text("ab<papad>", "<papad>b"))
    assert "ab<papad><papad>b" in encoder.decode([*prompt, *completion]).replace(" ", "")
    assert encoder.text("ab") == tokenizer("ab", add_special_tokens=False)["input_ids"]
    assert tokenizer("<papad>", add_special_tokens=False)["input_ids"][-1] == tokenizer.pad_token_id  # as it was


def test_nothing_is_copied_where_nothing_is_appended(stories: PreTrainedTokenizerBase) -> None:
    for tokenizer in (stories, byte_tokenizer(pad="<pad>"), byte_tokenizer(pad="</s>"), byte_tokenizer()):
        assert tokenizer_of_text(tokenizer) is tokenizer

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf.lab import world
from rlhf.lab.model import MAX_LENGTH, SHAPES, lab_model_config, train_tokenizer

ROWS = world.sft_rows(0, 3000)
TEXTS = [text for row in ROWS for text in (row["prompt"], row["completion"])]
TOKENIZER = train_tokenizer(TEXTS)


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_the_lab_s_texts_survive_the_round_trip_and_saving(reloaded):
    for text in TEXTS[:500]:
        ids = TOKENIZER(text).input_ids
        assert TOKENIZER.decode(ids) == text
        assert reloaded(text).input_ids == ids
        assert reloaded.decode(ids) == text


@given(st.text(max_size=60).filter(lambda text: "<" not in text))
def test_any_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_special_tokens_are_distinct_and_never_added_unasked(reloaded):
    for tokenizer in (TOKENIZER, reloaded):
        ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert ids == (0, 1, 2)
        assert not set(ids) & set(tokenizer("The pool was good.").input_ids)


def test_a_frequent_word_is_one_token_and_lengths_are_short():
    assert TOKENIZER.tokenize(" The pool was not good, and")[1:] == ["Ġpool", "Ġwas", "Ġnot", "Ġgood", ",", "Ġand"]
    prompts = TOKENIZER([row["prompt"] for row in ROWS]).input_ids
    lengths = [len(ids) for ids in TOKENIZER([row["completion"] for row in ROWS]).input_ids]
    assert max(map(len, prompts)) <= 16
    assert 22 <= sum(lengths) / len(lengths) <= 30
    assert sum(length > 47 for length in lengths) / len(lengths) < 0.02


def test_a_prompt_and_its_completion_tokenize_alike_together_and_apart():
    for row in ROWS[:200]:
        apart = TOKENIZER(row["prompt"]).input_ids + TOKENIZER(row["completion"]).input_ids
        assert TOKENIZER(row["prompt"] + row["completion"]).input_ids == apart


@pytest.mark.parametrize("size, most", [("nano", 0.1e6), ("tiny", 0.8e6), ("small", 2.1e6)])
def test_models_are_small_and_fit_the_tokenizer(size, most):
    config = lab_model_config(len(TOKENIZER), pad_token_id=0, bos_token_id=1, eos_token_id=2, size=size)
    model = LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) <= most
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = torch.tensor([TOKENIZER("The pool was good.").input_ids])
    assert model(input_ids=ids).logits.shape == (1, ids.shape[1], len(TOKENIZER))
    assert config.max_position_embeddings == MAX_LENGTH
    assert size in SHAPES

"""SmolLM2-135M-Instruct as published, real weights: the same row of the table, the same checks."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from families import BY_NAME, CONVERSATION, ON
from real_model import FOLDER, real_model
from tiny_models import prompts_of
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from zoo_checks import check_greedy, expected_logprobs, our_logprobs, plain_model, reasons_of, sampler_of, ways_of
from zoo_runs import train_one_step, train_reward_model

from rlhf.data.tokenizer import load_tokenizer, make_encoder, pad_id
from rlhf.models.backbone import load_causal_lm

pytestmark = pytest.mark.slow
FAMILY = BY_NAME["smollm2"]


@cache
def our_model(shared: Path) -> PreTrainedModel:
    """Load the model like a run, from its GGUF file; do not change it."""
    return load_causal_lm(str(shared / FOLDER))


@pytest.fixture
def folder(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as an ordinary folder in bfloat16, written once."""
    path = tmp_path_factory.getbasetemp() / "smollm2"
    if not path.is_dir():
        copy.deepcopy(our_model(shared)).to(torch.bfloat16).save_pretrained(path)
        load_tokenizer(str(shared / FOLDER)).save_pretrained(path)
    return path


def test_it_is_the_row_of_the_table(shared: Path) -> None:
    model, tokenizer = our_model(shared), load_tokenizer(str(shared / FOLDER))
    config = model.config
    assert config.model_type == FAMILY.model_type
    assert config.num_attention_heads // config.num_key_value_heads == 3
    for name in ("tie_word_embeddings", "rope_parameters"):
        assert getattr(config, name) == FAMILY.config[name]
    for name in ("bos", "eos", "pad", "unk"):
        assert getattr(tokenizer, f"{name}_token") == getattr(FAMILY.tokens, name)
    assert tokenizer.convert_ids_to_tokens(pad_id(tokenizer)) == FAMILY.pads_with
    assert make_encoder(tokenizer, "auto").render(CONVERSATION).prompt == FAMILY.chat
    assert ways_of(model, tokenizer) == {name: reason == ON for name, reason in vars(FAMILY.fast).items()}
    assert set(reasons_of(model).values()) == {""}


def test_it_says_what_it_says_in_transformers(shared: Path) -> None:
    plain, model = real_model(shared), our_model(shared)
    tokenizer = load_tokenizer(str(shared / FOLDER))
    check_greedy(model, plain, tokenizer)
    assert torch.allclose(our_logprobs(model.train(), pad_id(tokenizer)), expected_logprobs(plain), atol=1e-3)


def test_it_answers(shared: Path) -> None:
    model, tokenizer = our_model(shared), load_tokenizer(str(shared / FOLDER))
    encoder = make_encoder(tokenizer, "auto")
    asked = encoder.render([{"role": "user", "content": "What is the capital of France?"}])
    prompts = prompts_of(encoder.prompts([asked]), fill=pad_id(tokenizer))
    drawn = sampler_of(model, tokenizer, length=24).sample(prompts, key=0, group_size=1, greedy=True)
    assert "Paris" in tokenizer.decode(drawn.completion_ids[0][drawn.completion_mask[0]])


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "ppo"])
def test_one_step_trains_and_exports(algorithm: str, shared: Path, folder: Path, tmp_path: Path) -> None:
    """At 1e-4 a step is large enough for a checkpoint in bfloat16."""
    trained = train_one_step(FAMILY, folder, tmp_path / "run", algorithm, policy={"lr": 1e-4})
    row = trained.metrics[-1]
    assert row["policy/grad_norm"] > 0
    assert "slower" not in trained.notes
    assert "padded" not in trained.notes
    exported = plain_model(trained.folder)
    assert exported.config.vocab_size == 49152
    assert (expected_logprobs(exported) - expected_logprobs(real_model(shared))).abs().max() > 1e-3


def test_a_reward_model_trains_and_exports(folder: Path, tmp_path: Path) -> None:
    trained = train_reward_model(FAMILY, folder, tmp_path / "run")
    assert trained.metrics[-1]["policy/grad_norm"] > 0
    assert "padded" not in trained.notes
    assert AutoModelForSequenceClassification.from_pretrained(trained.folder).config.vocab_size == 49152

"""Read models whose language model is nested in a larger one, as in Gemma 3 of 4 billion parameters and more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import WORDS, brief_tree, make_model, prompts_file, quiet
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from rlhf.config.load import train_config
from rlhf.config.sections import SamplingConfig
from rlhf.errors import UserError
from rlhf.factory.run import build_run
from rlhf.models.backbone import context_length, load_causal_lm
from rlhf.models.text_config import attention_window, text_config
from rlhf.sampling.sampler import make_sampler
from rlhf.types import Prompts

WINDOW, CONTEXT = 20, 60


def publish(folder: Path) -> Path:
    """A random model of Gemma 3's nested class, with the words and the tokenizer of the other tests."""
    make_model(folder)  # the tokenizer
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 8,
        "patch_size": 4,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("nested") / "model")


def test_window_and_context_are_the_language_model_s(folder: Path) -> None:
    model = load_causal_lm(str(folder))
    assert isinstance(model, Gemma3ForConditionalGeneration)
    assert getattr(model.config, "sliding_window", None) is None  # the answer of the outer configuration
    assert (attention_window(model), context_length(model)) == (WINDOW, CONTEXT)
    assert text_config(model).hidden_size == 16


def prompts_of(length: int) -> Prompts:
    ids = torch.arange(2 * length).view(2, length) % (len(WORDS) - 3) + 3
    return Prompts(
        prompt_ids=ids,
        prompt_mask=torch.ones_like(ids, dtype=torch.bool),
        row_ids=torch.arange(2),
        references=({}, {}),
    )


@pytest.mark.parametrize("length", [5, WINDOW + 6])
@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_greedy_samples_within_and_beyond_the_window_are_transformers(
    folder: Path, length: int, backend: str, recwarn: pytest.WarningsRecorder
) -> None:
    model = load_causal_lm(str(folder)).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts, new = prompts_of(length), WINDOW + 4
    sampler = make_sampler(
        model,
        SamplingConfig(max_new_tokens=new, backend=backend),
        eos_ids=(2,),
        pad_id=0,
        dtype="float32",
        device=torch.device("cpu"),
    )
    ours = sampler.sample(prompts, key=0, group_size=1, greedy=True)
    theirs = plain.generate(
        prompts.prompt_ids, attention_mask=prompts.prompt_mask.long(), max_new_tokens=new, do_sample=False
    )[:, length:]
    for row in range(2):
        count = int(ours.completion_mask[row].sum())
        assert ours.completion_ids[row][:count].tolist() == theirs[row][:count].tolist()


def tree_of(tmp_path: Path, folder: Path, algorithm: str) -> dict[str, Any]:
    prompts_file(tmp_path)
    changes: dict[str, Any] = {"policy": {"model": str(folder), "lr": 1e-3}, "schedule": {"steps": 1}}
    changes["sampling"] = {"max_new_tokens": WINDOW + 6}
    if algorithm == "shared":
        changes["critic"] = {"shared": True}
    if algorithm == "grpo":
        changes |= {"algorithm": {"preset": "grpo"}, "sampling": {**changes["sampling"], "completions_per_prompt": 2}}
    return brief_tree(tmp_path, **changes)


@pytest.mark.parametrize("algorithm", ["ppo", "shared", "grpo"])
def test_it_trains_on_rows_beyond_its_window(tmp_path: Path, folder: Path, algorithm: str) -> None:
    run = build_run(train_config(tree_of(tmp_path, folder, algorithm)), quiet())
    assert run.train()
    row = run.session.recorder.folder.read_metrics()[-1]
    assert row["step"] == 1
    assert row["policy/first_ratio_deviation"] < 1e-3
    assert row["policy/grad_norm"] > 0


def test_completions_have_to_leave_room_in_its_context(tmp_path: Path, folder: Path) -> None:
    tree = tree_of(tmp_path, folder, "ppo")
    tree["sampling"]["max_new_tokens"] = CONTEXT
    with pytest.raises(UserError, match=f"context is {CONTEXT}"):
        build_run(train_config(tree), quiet())

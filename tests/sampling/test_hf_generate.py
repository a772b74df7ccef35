"""A completion belongs to its row; draws are exact; masks end with EOS; folders' own settings do not leak in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import BOS, EOS, PAD, prompts_of, sampler_of, saved, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from rlhf.config.sections import SamplingConfig
from rlhf.config.weights import LoraConfig
from rlhf.models.backbone import add_lora, load_causal_lm
from rlhf.models.logprobs import completion_outputs
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.generate import draw
from rlhf.types import Completions

KEY = derive_seed(0, "sample", 1)
ROWS = [[BOS, 5, 7], [BOS, 4], [BOS, 6, 8, 9, 3, 12], [8], [BOS, 11, 11, 3], [BOS, 17], [20, 21, 22]]


def config(**more: object) -> SamplingConfig:
    return SamplingConfig(**{"max_new_tokens": 10, "temperature": 0.9, **more})  # type: ignore[arg-type]


def model_of(**more: object) -> PreTrainedModel:
    return tiny(dtype=torch.float32, **{"initializer_range": 0.2, **more})


def live(completions: Completions) -> list[list[int]]:
    pairs = zip(completions.completion_ids, completions.completion_mask, strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_a_completion_is_the_same_in_any_batch(batch_size: int) -> None:
    model, prompts = model_of(), prompts_of(ROWS)
    together = sampler_of(model, config()).sample(prompts, key=KEY, group_size=2)
    assert len({tuple(row) for row in live(together)}) > 10
    completions = sampler_of(model, config(batch_size=batch_size)).sample(prompts, key=KEY, group_size=2)
    assert live(completions) == live(together)
    torch.testing.assert_close(completions.sampler_logprobs, together.sampler_logprobs, rtol=0, atol=1e-5)
    assert torch.equal(completions.finished, together.finished)


def test_a_completion_is_the_same_in_any_order_and_company() -> None:
    model, prompts = model_of(), prompts_of(ROWS)
    sampler = sampler_of(model, config())
    together = live(sampler.sample(prompts, key=KEY, group_size=1))
    order = [4, 0, 6, 2]
    others = live(sampler.sample(prompts.rows(torch.tensor(order)), key=KEY, group_size=1))
    assert others == [together[i] for i in order]


def test_another_key_or_row_is_another_draw() -> None:
    sampler, same = sampler_of(model_of(), config()), prompts_of([[BOS, 5]] * 6)
    first = live(sampler.sample(same, key=KEY, group_size=1))
    assert len({tuple(row) for row in first}) == 6
    assert live(sampler.sample(same, key=KEY, group_size=1)) == first
    assert live(sampler.sample(same, key=derive_seed(0, "sample", 2), group_size=1)) != first
    shifted = replace(same, row_ids=same.row_ids + 1)
    assert live(sampler.sample(shifted, key=KEY, group_size=1))[:-1] == first[1:]


def test_groups_are_contiguous_and_their_members_differ() -> None:
    prompts = replace(prompts_of(ROWS[:2]), references=({"n": 0}, {"n": 1}), row_ids=torch.tensor([5, 9]))
    completions = sampler_of(model_of(), config()).sample(prompts, key=KEY, group_size=3)
    assert completions.group_size == 3
    assert [r["n"] for r in completions.references] == [0, 0, 0, 1, 1, 1]
    assert completions.row_ids.tolist() == [15, 16, 17, 27, 28, 29]
    assert torch.equal(completions.prompt_ids, prompts.prompt_ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in live(completions)}) == 6


def test_groups_of_neighboring_steps_share_no_numbers() -> None:
    """Row ids are multiplied by the group size: rows 0 and 1 in groups of 2 are four rows, not three."""
    completions = sampler_of(model_of(), config()).sample(prompts_of([[BOS, 5]] * 2), key=KEY, group_size=2)
    assert completions.row_ids.tolist() == [0, 1, 2, 3]
    assert len({tuple(row) for row in live(completions)}) == 4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_draws_follow_the_softmax(temperature: float) -> None:
    model = tiny(dtype=torch.float32, vocab=7, initializer_range=0.1)
    rows = 4000
    completions = sampler_of(
        model, config(max_new_tokens=2, temperature=temperature, batch_size=rows), eos_ids=(6,)
    ).sample(prompts_of([[BOS, 5]] * rows), key=KEY, group_size=1)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[BOS, 5]])).logits[0, -1].double()
        after = model(input_ids=torch.tensor([[BOS, 5, 4]])).logits[0, -1].double()
    first = completions.completion_ids[:, 0]
    second = completions.completion_ids[first == 4, 1]
    for tokens, scores in ((first, logits), (second, after)):
        expected = (scores / temperature).softmax(dim=0) * len(tokens)
        assert expected.min() > 5
        assert chisquare(tokens.bincount(minlength=7), expected.tolist()).pvalue > 1e-3


def test_the_chi_square_would_notice_a_wrong_temperature() -> None:
    model = tiny(dtype=torch.float32, vocab=7, initializer_range=0.1)
    completions = sampler_of(model, config(max_new_tokens=1, temperature=1.0, batch_size=4000), eos_ids=(6,)).sample(
        prompts_of([[BOS, 5]] * 4000), key=KEY, group_size=1
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[BOS, 5]])).logits[0, -1].double()
    expected = (logits / 1.2).softmax(dim=0) * 4000
    assert chisquare(completions.completion_ids[:, 0].bincount(minlength=7), expected.tolist()).pvalue < 1e-3


def test_draw_inverts_the_cumulative_sum() -> None:
    log_softmax = torch.tensor([[0.25, 0.0, 0.5, 0.25]], dtype=torch.float64).log().expand(6, 4)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(log_softmax, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_never_takes_an_impossible_token() -> None:
    log_softmax = torch.tensor([[0.0, 0.5, 0.5, 0.0]], dtype=torch.float64).log().expand(2, 4)
    assert draw(log_softmax, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 2]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mistral"])
def test_the_samplers_log_probs_are_the_trainers(family: str) -> None:
    model = tiny(family, dtype=torch.float32, initializer_range=0.2)
    completions = sampler_of(model, config()).sample(prompts_of(ROWS), key=KEY, group_size=2)
    with torch.no_grad():
        trainer = completion_outputs(
            model,
            completions.prompt_ids,
            completions.prompt_mask,
            completions.completion_ids,
            completions.completion_mask,
            temperature=0.9,
        ).logprobs
    assert completions.sampler_logprobs.dtype == torch.float32
    torch.testing.assert_close(completions.sampler_logprobs, trainer, rtol=0, atol=1e-5)
    assert completions.sampler_logprobs[~completions.completion_mask].abs().sum() == 0
    assert completions.sampler_logprobs[completions.completion_mask].max() < 0


def check_ends(completions: Completions, eos_ids: set[int], max_new_tokens: int) -> None:
    """Live up to and including the first EOS, and finished exactly if there is one."""
    for ids, mask, finished in zip(
        completions.completion_ids.tolist(),
        completions.completion_mask.tolist(),
        completions.finished.tolist(),
        strict=True,
    ):
        length = sum(mask)
        assert mask == [True] * length + [False] * (len(mask) - length)
        assert eos_ids.isdisjoint(ids[: length - 1])
        assert finished is (ids[length - 1] in eos_ids)
        assert finished or length == max_new_tokens


def test_a_completion_lives_up_to_its_eos() -> None:
    completions = sampler_of(model_of(), config()).sample(prompts_of(ROWS), key=KEY, group_size=8)
    check_ends(completions, {EOS}, 10)
    assert 0 < completions.finished.sum() < len(completions)
    assert len({len(row) for row in live(completions)}) > 3


def test_any_of_several_eos_ids_ends_a_completion() -> None:
    completions = sampler_of(model_of(), config(), eos_ids=(EOS, 5, 9)).sample(prompts_of(ROWS), key=KEY, group_size=8)
    check_ends(completions, {EOS, 5, 9}, 10)
    assert {row[-1] for row in live(completions) if row[-1] in {EOS, 5, 9}} == {EOS, 5, 9}


def test_bos_as_eos_in_the_prompt_ends_nothing() -> None:
    """stories260K's case: the same id starts the prompt, stands inside it, and ends the completion."""
    rows = [[BOS, 5, 7], [BOS, 5, BOS, 7, 8], [BOS]]
    completions = sampler_of(model_of(), config(), eos_ids=(BOS,)).sample(prompts_of(rows), key=KEY, group_size=16)
    check_ends(completions, {BOS}, 10)
    assert 0 < completions.finished.sum() < len(completions)
    assert max(len(row) for row in live(completions)) == 10


def test_a_sampled_pad_token_is_a_live_token() -> None:
    completions = sampler_of(model_of(), config()).sample(prompts_of(ROWS), key=KEY, group_size=16)
    inside = [row for row in live(completions) if PAD in row[:-1]]
    assert inside
    assert any(row[-1] == EOS for row in inside)
    check_ends(completions, {EOS}, 10)


@pytest.mark.parametrize("batch_size", [2, 100])
def test_what_follows_the_end_is_the_pad_id(batch_size: int) -> None:
    completions = sampler_of(model_of(), config(batch_size=batch_size), pad_id=19).sample(
        prompts_of(ROWS), key=KEY, group_size=4
    )
    assert (~completions.completion_mask).any()
    assert set(completions.completion_ids[~completions.completion_mask].tolist()) == {19}


def test_the_longest_completion_has_max_new_tokens() -> None:
    for limit in (1, 4):
        completions = sampler_of(model_of(), config(max_new_tokens=limit)).sample(
            prompts_of(ROWS), key=KEY, group_size=4
        )
        assert completions.completion_ids.shape[1] == limit
        check_ends(completions, {EOS}, limit)


def test_greedy_takes_the_most_likely_token_whatever_the_key() -> None:
    model = model_of()
    sampler = sampler_of(model, config(max_new_tokens=6))
    completions = live(sampler.sample(prompts_of(ROWS), key=1, group_size=1, greedy=True))
    assert completions == live(sampler.sample(prompts_of(ROWS), key=2, group_size=1, greedy=True))
    for prompt, completion in zip(ROWS, completions, strict=True):
        for t, token in enumerate(completion):
            logits = model(input_ids=torch.tensor([[*prompt, *completion[:t]]])).logits[0, -1]
            assert token == logits.argmax().item()


def test_the_folders_generation_settings_change_nothing(tmp_path: Path) -> None:
    path = saved(model_of(), tmp_path)
    expected = sampler_of(model_of(), config()).sample(prompts_of(ROWS), key=KEY, group_size=2)
    GenerationConfig(
        do_sample=True,
        top_k=1,
        top_p=0.1,
        temperature=0.3,
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        suppress_tokens=[5, 9],
        min_new_tokens=9,
        forced_eos_token_id=7,
        eos_token_id=5,
        pad_token_id=3,
    ).save_pretrained(path)
    completions = sampler_of(load_causal_lm(path), config()).sample(prompts_of(ROWS), key=KEY, group_size=2)
    assert live(completions) == live(expected)
    torch.testing.assert_close(completions.sampler_logprobs, expected.sampler_logprobs, rtol=0, atol=1e-5)
    # It is the loader that drops them: generate would have added its penalties under ours.
    as_it_came = AutoModelForCausalLM.from_pretrained(path)
    assert live(sampler_of(as_it_came, config()).sample(prompts_of(ROWS), key=KEY, group_size=2)) != live(expected)


def test_sampling_leaves_the_mode_and_the_weights_alone() -> None:
    model = model_of().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sampler_of(model, config(max_new_tokens=2)).sample(prompts_of(ROWS), key=KEY, group_size=1)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())


def test_an_adapter_is_sampled_from() -> None:
    model = add_lora(model_of(), LoraConfig(r=2))
    same = live(sampler_of(model, config()).sample(prompts_of(ROWS), key=KEY, group_size=1))
    assert same == live(sampler_of(model_of(), config()).sample(prompts_of(ROWS), key=KEY, group_size=1))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    assert same != live(sampler_of(model, config()).sample(prompts_of(ROWS), key=KEY, group_size=1))


def stories(shared: Path) -> tuple[PreTrainedModel, Path]:
    folder = shared / "models" / "stories260K"
    return load_causal_lm(str(folder / "hf")), folder


def test_greedy_stories_are_the_documented_ones(shared: Path) -> None:
    model, folder = stories(shared)
    expected = json.loads((folder / "expected_greedy.json").read_text())
    prompt = expected["prompt_ids"]
    sampler = sampler_of(model, config(max_new_tokens=expected["max_new_tokens"]), eos_ids=(1,))
    tokens = live(sampler.sample(prompts_of([prompt]), key=0, group_size=1, greedy=True))[0]
    wanted = expected["expected_ids"][len(prompt) :]
    assert len(wanted) > 200
    assert tokens[: len(wanted)] == wanted
    text = AutoTokenizer.from_pretrained(folder / "hf").decode(prompt + tokens, skip_special_tokens=True)
    assert text.startswith(expected["expected_text"])

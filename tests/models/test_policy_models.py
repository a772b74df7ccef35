"""The models of a run: reference, critic or shared head, temperature, moving average."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import ragged, saved, tiny, tokenizer
from torch import nn

from rlhf.config.weights import LoraConfig
from rlhf.models.backbone import add_lora
from rlhf.models.logprobs import completion_outputs
from rlhf.models.policy_models import Ema, Models, SharedValueHead
from rlhf.models.scalar_head import completion_values, load_scalar_head

CPU = torch.device("cpu")


def bundle(**more: object) -> Models:
    return Models(**{"policy": tiny(), "temperature": 0.7, "dtype": "float64", "device": CPU, **more})  # type: ignore[arg-type]


def nudge(module: nn.Module) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def test_log_probs_are_those_of_the_policy_at_the_runs_temperature() -> None:
    batch, models = ragged(), bundle()
    expected = completion_outputs(
        tiny(), batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask, temperature=0.7
    )
    assert torch.equal(models.policy_tokens(batch).logprobs, expected.logprobs)
    outputs = models.outputs(batch)
    assert torch.equal(outputs.logprobs, expected.logprobs)
    assert torch.equal(outputs.entropy, expected.entropy)
    assert outputs.logprobs.requires_grad


@torch.no_grad()
def test_the_adapter_switched_off_is_the_base() -> None:
    batch, base = ragged(), bundle()
    models = bundle(policy=add_lora(tiny(), LoraConfig(r=2)), adapter_off_is_reference=True)
    nudge(models.policy)
    expected = base.policy_tokens(batch).logprobs
    torch.testing.assert_close(models.reference_logprobs(batch), expected, rtol=0, atol=1e-13)
    assert not torch.allclose(models.policy_tokens(batch).logprobs, expected)
    assert models.has_reference


def test_a_reference_model_comes_first() -> None:
    other = tiny("gpt2")
    models = bundle(reference=other)
    assert models.has_reference
    assert torch.equal(models.reference_logprobs(ragged()), bundle(policy=other).policy_tokens(ragged()).logprobs)


def test_a_run_without_a_reference_says_so() -> None:
    assert not bundle().has_reference
    with pytest.raises(RuntimeError, match="no reference"):
        bundle().reference_logprobs(ragged())


def test_without_a_critic_values_are_zero() -> None:
    models = bundle()
    assert not models.has_critic
    values = models.outputs(ragged()).values
    assert values.shape == ragged().completion_ids.shape
    assert values.abs().max() == 0


def test_a_critic_gives_the_values(tmp_path: Path) -> None:
    critic = load_scalar_head(saved(tiny("qwen2"), tmp_path), tokenizer(), new_head="normal", dtype="float64")
    models, b = bundle(critic=critic), ragged()
    assert models.has_critic
    expected = completion_values(critic, b.prompt_ids, b.prompt_mask, b.completion_ids, b.completion_mask)
    assert torch.equal(models.outputs(b).values, expected)
    assert expected[b.completion_mask].abs().min() > 0


def test_a_shared_head_starts_at_zero_and_reads_the_policys_hidden_states() -> None:
    head = SharedValueHead(16, torch.float64)
    models, batch = bundle(shared_head=head), ragged()
    assert models.has_critic
    assert models.outputs(batch).values.abs().max() == 0
    with torch.no_grad():
        head.linear.weight.fill_(0.5)
        head.linear.bias.fill_(0.25)
    hidden = models._tokens(models.policy, batch, with_hidden=True).hidden
    assert hidden is not None
    expected = torch.where(batch.completion_mask, 0.5 * hidden.sum(dim=-1) + 0.25, 0.0)
    torch.testing.assert_close(models.outputs(batch).values, expected)


def test_a_shared_value_does_not_see_its_own_token() -> None:
    head = SharedValueHead(16, torch.float64)
    nn.init.ones_(head.linear.weight)
    batch = ragged()
    ids = batch.completion_ids.clone()
    ids[1, 2] = 13
    one = bundle(shared_head=head).outputs(batch).values[1]
    two = bundle(shared_head=head).outputs(replace(batch, completion_ids=ids)).values[1]
    torch.testing.assert_close(one[:3], two[:3], rtol=0, atol=1e-12)
    assert (one[3:] - two[3:]).abs().min() > 1e-4


def test_the_entropy_bonus_needs_a_gradient() -> None:
    assert bundle(entropy_gradient=True).outputs(ragged()).entropy.requires_grad
    assert not bundle().outputs(ragged()).entropy.requires_grad


def test_a_moving_average_by_hand() -> None:
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, 4.0)
    module.bias.requires_grad_(False).fill_(7.0)
    ema = Ema(module, decay=0.75)
    for live in (8.0, 0.0):
        nn.init.constant_(module.weight, live)
        ema.update()
    # 4 -> 0.75 * 4 + 0.25 * 8 = 5 -> 0.75 * 5 + 0.25 * 0 = 3.75
    assert {name: value.item() for name, value in ema.shadow.items()} == {"weight": 3.75}
    with ema.applied():
        assert module.weight.item() == 3.75
        assert module.bias.item() == 7.0
    assert module.weight.item() == 0.0
    assert module.weight.requires_grad


def test_a_moving_average_is_taken_off_after_an_error_and_can_be_put_back() -> None:
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, 4.0)
    ema = Ema(module, decay=0.5)
    nn.init.constant_(module.weight, 2.0)
    ema.update()
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    assert module.weight.item() == 2.0
    other = Ema(module, decay=0.5)
    other.load(ema.shadow)
    assert other.shadow["weight"].item() == 3.0
    other.update()
    assert (other.shadow["weight"].item(), ema.shadow["weight"].item()) == (2.5, 3.0)

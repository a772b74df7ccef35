"""The one place that shifts: batched, padded log-probs are the token-by-token ones."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from tiny_models import BOS, COMPLETIONS, EOS, FAMILIES, PROMPTS, VOCAB, completions_of, ragged, tiny
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config.sections import LogProbs
from rlhf.models.backbone import autocast, enable_gradient_checkpointing
from rlhf.models.logprobs import TokenOutputs, completion_outputs
from rlhf.types import Completions

T = 0.7


HOW: LogProbs = "chunked"  # set by the fixture


@pytest.fixture(params=["chunked", "naive"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds of both ways."""
    monkeypatch.setattr(sys.modules[__name__], "HOW", request.param)


def outputs(model: PreTrainedModel, batch: Completions, *, temperature: float = T, **more: bool) -> TokenOutputs:
    return completion_outputs(
        model,
        batch.prompt_ids,
        batch.prompt_mask,
        batch.completion_ids,
        batch.completion_mask,
        temperature=temperature,
        log_probs=HOW,
        **more,
    )


@torch.no_grad()
def token_by_token(model: PreTrainedModel, batch: Completions) -> list[list[tuple[float, float, bool]]]:
    """(log-prob, entropy, first choice) of each token, from one unpadded pass a token."""
    rows = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        row = []
        for t, token in enumerate(completion):
            logits = model(input_ids=torch.tensor([[*prompt, *completion[:t]]])).logits[0, -1]
            weights = [math.exp(x / T) for x in logits.tolist()]
            probs = [w / sum(weights) for w in weights]
            entropy = -sum(p * math.log(p) for p in probs)
            row.append((math.log(probs[token]), entropy, token == max(range(len(probs)), key=probs.__getitem__)))
        rows.append(row)
    return rows


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_batched_and_padded_equals_token_by_token(family: str) -> None:
    model, batch = tiny(family), ragged()
    with torch.no_grad():
        batched = outputs(model, batch)
    assert batched.logprobs.dtype == torch.float64
    for i, row in enumerate(token_by_token(model, batch)):
        for t, (logprob, entropy, first) in enumerate(row):
            assert batched.logprobs[i, t].item() == pytest.approx(logprob, abs=1e-10)
            assert batched.entropy[i, t].item() == pytest.approx(entropy, abs=1e-10)
            assert batched.first_choice[i, t].item() is first


def test_the_random_model_is_no_uniform_one() -> None:
    """Else the test above could not tell one position from the next."""
    random = outputs(tiny(), ragged())
    assert random.logprobs[ragged().completion_mask].std() > 0.5
    assert (random.entropy[ragged().completion_mask] < 0.9 * math.log(VOCAB)).all()


def test_first_choice_is_true_exactly_on_greedy_tokens() -> None:
    model, prompt = tiny(), [BOS, 5, 7]
    greedy: list[int] = []
    for _ in range(5):
        greedy.append(int(model(input_ids=torch.tensor([[*prompt, *greedy]])).logits[0, -1].argmax()))
    other = [*greedy[:2], (greedy[2] + 1) % VOCAB, *greedy[3:]]
    first_choice = outputs(model, completions_of([prompt, prompt], [greedy, other])).first_choice
    assert first_choice[0].tolist() == [True] * 5
    assert first_choice[1, :3].tolist() == [True, True, False]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_what_the_masks_hide_is_zero_and_has_no_influence(family: str) -> None:
    model, batch, other = tiny(family), ragged(fill=0), ragged(fill=17)
    assert not torch.equal(batch.prompt_ids, other.prompt_ids)
    one, two = outputs(model, batch), outputs(model, other)
    for tokens in (one, two):
        dead = ~batch.completion_mask
        assert dead.sum() == 10
        assert tokens.logprobs[dead].abs().max() == 0
        assert tokens.entropy[dead].abs().max() == 0
        assert not tokens.first_choice[dead].any()
    torch.testing.assert_close(one.logprobs, two.logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(one.entropy, two.entropy, rtol=0, atol=1e-12)


def test_padding_gets_no_gradient() -> None:
    """Id 17 stands under the masks only: its embedding must not be pulled (an untied head, so logits do not count)."""
    model = tiny(tie_word_embeddings=False)
    outputs(model, ragged(fill=17)).logprobs.sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert gradient is not None
    assert gradient[17].abs().max() == 0
    assert gradient[5].abs().max() > 0


def test_hidden_states_are_those_that_choose_the_token() -> None:
    model, batch = tiny(), ragged()
    hidden = outputs(model, batch, with_hidden=True).hidden
    assert hidden is not None
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        whole = model(input_ids=torch.tensor([[*prompt, *completion]]), output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(hidden[i, : len(completion)], whole[len(prompt) - 1 : -1], rtol=0, atol=1e-10)
    assert outputs(model, batch).hidden is None


@pytest.mark.parametrize("wanted", [False, True])
def test_entropy_has_a_gradient_only_where_asked(wanted: bool) -> None:
    assert outputs(tiny(), ragged(), entropy_gradient=wanted).entropy.requires_grad is wanted
    with torch.no_grad():
        assert not outputs(tiny(), ragged(), entropy_gradient=wanted).entropy.requires_grad


def test_bfloat16_arithmetic_is_near_float32_and_leaves_the_weights_alone() -> None:
    model, batch = tiny(dtype=torch.float32, initializer_range=0.1), ragged()
    exact = outputs(model, batch).logprobs
    with autocast("bfloat16", torch.device("cpu")):
        rough = outputs(model, batch).logprobs
    rough.sum().backward()
    assert rough.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert 0 < (rough - exact).abs().max() < 0.05


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_only_bfloat16_switches_autocast_on(dtype: str) -> None:
    with autocast(dtype, torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


def gradients(model: PreTrainedModel) -> list[Tensor]:
    outputs(model.train(), ragged()).logprobs.sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradient(family: str) -> None:
    config = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    plain, spared = tiny(family, **config), tiny(family, **config)
    enable_gradient_checkpointing(spared)
    assert any(getattr(module, "gradient_checkpointing", False) for module in spared.modules())
    ones, others = gradients(plain), gradients(spared)
    assert len(ones) == len(others) > 10
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_batch_has_the_cases_it_is_named_for() -> None:
    assert len({len(p) for p in PROMPTS}) == len(PROMPTS)
    assert EOS in PROMPTS[2]
    assert EOS in COMPLETIONS[1][:-1]

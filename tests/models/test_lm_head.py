"""Log-probabilities by chunks: the naive ones, values and gradients, for any head; and never all logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, completions_of, ragged, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rlhf.config.sections import LogProbs
from rlhf.config.weights import LoraConfig
from rlhf.errors import ModelError
from rlhf.models import logprobs as head
from rlhf.models.backbone import CausalLM, add_lora, autocast, enable_gradient_checkpointing
from rlhf.models.logprobs import chunked_statistics, completion_outputs, output_head, token_statistics
from rlhf.models.policy_models import Models, predictor_hidden_states
from rlhf.types import Completions

CPU = torch.device("cpu")
T = 0.7


@pytest.fixture(params=[1, 3, 1000], autouse=True)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Chunks of so many tokens; with 3, some probabilities are kept for the backward pass and some are not."""
    monkeypatch.setattr(head, "CHUNK_TOKENS", {"cpu": request.param})
    monkeypatch.setattr(head, "MAX_SAVED_PROBS", {"cpu": {1: 0, 3: 6 * VOCAB, 1000: 2**24}[request.param]})
    return request.param


def outputs_and_gradients(
    model: CausalLM, how: LogProbs, *, entropy_gradient: bool = False, temperature: float = T
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Log-probs, entropy, first choice, and the gradient of a curved function of them."""
    b = ragged()
    model.zero_grad()
    outputs = completion_outputs(
        model,
        b.prompt_ids,
        b.prompt_mask,
        b.completion_ids,
        b.completion_mask,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
        log_probs=how,
        packing="off",
    )
    weights = torch.linspace(0.5, 2.0, outputs.logprobs.numel(), dtype=outputs.logprobs.dtype).view_as(outputs.logprobs)
    total = (weights * outputs.logprobs.exp()).sum()
    if entropy_gradient:
        total = total + (weights.flip(0) * outputs.entropy**2).sum()
    total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return outputs.logprobs.detach(), outputs.entropy.detach(), outputs.first_choice, [g.clone() for g in gradients]


def assert_same(model: CausalLM, **more: bool | float) -> None:
    naive, chunked = (outputs_and_gradients(model, how, **more) for how in ("naive", "chunked"))  # type: ignore[arg-type]
    torch.testing.assert_close(chunked[0], naive[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(chunked[1], naive[1], rtol=0, atol=1e-10)
    assert torch.equal(chunked[2], naive[2])
    assert len(chunked[3]) == len(naive[3]) > 0
    for ours, theirs in zip(chunked[3], naive[3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunked_is_naive(family: str, entropy_gradient: bool) -> None:
    assert_same(tiny(family), entropy_gradient=entropy_gradient)  # phi has a bias, gpt2 and gemma tied embeddings


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_at_any_temperature(temperature: float) -> None:
    assert_same(tiny(), temperature=temperature, entropy_gradient=True)


@pytest.mark.parametrize("target", ["all-linear", ["lm_head", "q_proj"]])
def test_with_adapters_on_the_body_and_on_the_head(target: str | list[str]) -> None:
    model = add_lora(tiny(), LoraConfig(r=2, target_modules=target))  # type: ignore[arg-type]
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    assert_same(model)
    with model.disable_adapter(), torch.no_grad():
        plain = completion_outputs(tiny(), *_fields(), temperature=T, log_probs="naive")
        outputs = completion_outputs(model, *_fields(), temperature=T, log_probs="chunked")
    torch.testing.assert_close(outputs.logprobs, plain.logprobs, rtol=0, atol=1e-10)


def test_under_gradient_checkpointing() -> None:
    model = tiny()
    enable_gradient_checkpointing(model.train())
    assert_same(model)


def test_in_bfloat16_as_the_naive_one() -> None:
    model = tiny(dtype=torch.float32)
    with autocast("bfloat16", CPU):
        naive, chunked = outputs_and_gradients(model, "naive"), outputs_and_gradients(model, "chunked")
    torch.testing.assert_close(chunked[0], naive[0], rtol=0, atol=1e-5)
    assert chunked[0].dtype == torch.float32
    for ours, theirs in zip(chunked[3], naive[3], strict=True):
        assert float((ours - theirs).norm() / theirs.norm().clamp(min=1e-3)) < 0.02


def test_the_head_alone_is_as_it_was_after_reading() -> None:
    model = tiny()
    before = dict(vars(model.lm_head))
    outputs_and_gradients(model, "chunked")
    assert vars(model.lm_head).keys() == before.keys()
    with pytest.raises(ZeroDivisionError), head.intercept_head(model.lm_head, lambda plain, hidden: hidden * (1 // 0)):
        model(input_ids=torch.tensor([[1]]))
    assert vars(model.lm_head).keys() == before.keys()


CAPPED: list[Callable[[], PreTrainedModel]] = [
    lambda: tiny("gemma2", final_logit_softcapping=2.0, dtype=torch.float32),
    lambda: tiny("granite", logits_scaling=3.0),
    lambda: tiny("cohere", logit_scale=0.25),
]


@pytest.mark.parametrize("make", CAPPED, ids=["softcap", "scaling", "scale"])
def test_a_model_that_does_more_to_its_logits_keeps_it(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    assert "changes the logits" in head.chunking_unsupported_reason(model)
    for ours, theirs in zip(
        outputs_and_gradients(model, "auto")[:2], outputs_and_gradients(model, "naive")[:2], strict=True
    ):
        assert torch.equal(ours, theirs)
    with pytest.raises(ModelError, match=r"policy\.log_probs=auto"):
        outputs_and_gradients(model, "chunked")
    models = Models(policy=model, temperature=T, dtype="float64", device=CPU)
    line, reason = models.fast_ways().lines()
    assert (
        line
        == "optimizations on: none; off: log-probabilities in chunks, no padding, written-out layers, shared prompts"
    )
    assert "naive" in reason


def test_a_model_whose_scale_is_one_is_done_by_chunks() -> None:
    model = tiny("granite", logits_scaling=1.0)
    assert head.chunking_unsupported_reason(model) == ""
    assert_same(model)


def test_only_live_tokens_reach_the_head() -> None:
    model, batch = tiny(), ragged()
    seen: list[int] = []
    plain = head.chunked_statistics

    def counting(module: nn.Module, forward: object, hidden: Tensor, *rest: object, **more: object) -> Tensor:
        seen.append(len(hidden))
        return plain(module, forward, hidden, *rest, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.models.logprobs.chunked_statistics", counting)
        outputs_and_gradients(model, "chunked")
    assert seen == [int(batch.completion_mask.sum())]


class Largest(TorchDispatchMode):
    """Watches the size of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))  # type: ignore[operator]
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.numbers = max(self.numbers, each.untyped_storage().nbytes() // each.element_size())
        return result


def test_memory_does_not_follow_the_vocabulary(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """At V = 150,000: beside the head's own size, nothing larger than one chunk is ever made."""
    if chunk != 1000:
        pytest.skip("chunks as they come")
    monkeypatch.setattr(head, "MAX_CHUNK_LOGITS", {"cpu": 2**22})
    monkeypatch.setattr(head, "MAX_SAVED_PROBS", {"cpu": 0})
    linear = nn.Linear(4, 150_000, bias=False)
    hidden, ids = torch.randn(200, 4, requires_grad=True), torch.randint(0, 150_000, (200,))
    with Largest() as largest:
        statistics = head.chunked_statistics(linear, linear.forward, hidden, ids, temperature=T, entropy_gradient=False)
        statistics[0].sum().backward()
    assert largest.numbers <= 2**22 < 200 * 150_000 / 7
    expected = head.token_statistics(linear(hidden), ids, T, entropy_gradient=False)
    torch.testing.assert_close(statistics, expected, rtol=1e-5, atol=1e-5)


def test_a_batch_without_a_live_token() -> None:
    b = completions_of([[3, 4]], [[5, 6]])
    mask = torch.zeros_like(b.completion_mask)
    model = tiny()
    outputs = completion_outputs(
        model, b.prompt_ids, b.prompt_mask, b.completion_ids, mask, temperature=T, log_probs="chunked"
    )
    assert outputs.logprobs.tolist() == [[0.0, 0.0]]
    outputs.logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def _fields() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b = ragged()
    return b.prompt_ids, b.prompt_mask, b.completion_ids, b.completion_mask


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_logit_of_minus_infinity_has_no_part_in_entropy_or_gradient(entropy_gradient: bool) -> None:
    """0 x log 0 is 0: a token that a model rules out made the entropy, and with it the loss, NaN."""
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 6, dtype=torch.float64)
    with torch.no_grad():
        head.bias[2] = -math.inf
    ids = torch.tensor([0, 1, 3, 5, 4])
    results = []
    for chunked in (True, False):
        hidden = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4).requires_grad_()
        if chunked:
            statistics = chunked_statistics(head, head, hidden, ids, temperature=T, entropy_gradient=entropy_gradient)
        else:
            statistics = token_statistics(head(hidden), ids, T, entropy_gradient=entropy_gradient)
        weighed = statistics[0].sum() + 0.3 * statistics[1].sum() if entropy_gradient else statistics[0].sum()
        results.append((statistics.detach(), *torch.autograd.grad(weighed, [hidden, head.weight])))
    with torch.no_grad():
        kept = (hidden.detach() @ head.weight.t() + head.bias)[:, [0, 1, 3, 4, 5]] / T
        entropy = torch.distributions.Categorical(logits=kept).entropy()
    for statistics, d_hidden, d_weight in results:
        torch.testing.assert_close(statistics[1], entropy)
        assert bool(d_hidden.isfinite().all() and d_weight.isfinite().all())
        assert d_weight[2].tolist() == [0.0] * 4
    for chunked_result, plain in zip(*results, strict=True):
        torch.testing.assert_close(chunked_result, plain)


@pytest.mark.parametrize("log_probs", ["chunked", "naive"])
@torch.no_grad()
def test_in_bfloat16_the_logits_are_float32s_unless_the_models_own_are_asked_for(log_probs: LogProbs) -> None:
    """Rounded to 8 bits a logit of 20 is .06 off, and with it the log-probability."""
    model = tiny(dtype=torch.float32, tie_word_embeddings=False)
    output_head(model).weight.data *= 5
    batch, errors = ragged(), {}
    for float32_head in (True, False):
        models = Models(
            policy=model,
            temperature=1.0,
            dtype="bfloat16",
            device=CPU,
            log_probs=log_probs,
            packing="off",
            float32_head=float32_head,
        )
        tokens = models.policy_tokens(batch)
        hidden = hidden_states(models, batch)
        exact = (hidden.double() @ output_head(model).weight.double().t()).log_softmax(-1)
        expected = exact.gather(1, batch.completion_ids[batch.completion_mask][:, None]).squeeze(1)
        errors[float32_head] = float((tokens.logprobs[batch.completion_mask] - expected).abs().max())
        assert tokens.logprobs.dtype == torch.float32
    assert errors[True] < 2e-5
    assert errors[False] > 1e-2


def hidden_states(models: Models, batch: Completions) -> Tensor:
    with models.autocast():
        return predictor_hidden_states(models.policy, batch, "off")

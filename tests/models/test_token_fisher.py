"""Exact KL and Fisher-vector products of language models, against explicit matrices and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import ragged, tiny
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.batching import extend
from rlhf.config.weights import LoraConfig
from rlhf.models import logprobs
from rlhf.models.backbone import CausalLM, add_lora
from rlhf.models.logprobs import Sequences
from rlhf.models.token_fisher import TokenFisher
from rlhf.types import Experience, Rollout

TEMPERATURE = 0.7
# A Llama's norms are computed in float32 by its own modules, in any dtype of the model.
ACCURACY = {"llama": 1e-4, "gpt2": 1e-9, "gemma": 1e-4}


def experience() -> Experience:
    """Ragged rows; some live tokens are not in the loss."""
    rows = ragged()
    zeros = torch.zeros(rows.completion_ids.shape, dtype=torch.float64)
    rollout = extend(
        Rollout,
        rows,
        scores=zeros[:, 0],
        baselines=zeros[:, 0],
        logprobs=zeros,
        ref_logprobs=zeros,
        values=zeros,
        hinted=zeros[:, 0].bool(),
    )
    mask = rows.completion_mask.clone()
    mask[1, 2] = False
    mask[2] = False
    return extend(Experience, rollout, loss_mask=mask, rewards=zeros, advantages=zeros, returns=zeros)


def adapted(family: str, **config: Any) -> CausalLM:
    """A model with adapters whose both factors count, as after some training."""
    targets = {"gpt2": ["c_attn"], "gemma": ["v_proj"]}.get(family, ["q_proj", "down_proj"])
    model = add_lora(tiny(family, **config), LoraConfig(r=1, target_modules=targets))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def fisher_of(model: CausalLM, **options: Any) -> TokenFisher:
    choices: dict[str, Any] = {"temperature": TEMPERATURE, "log_probs": "auto", "packing": "auto", **options}
    return TokenFisher(model, **choices)


def log_pi(model: CausalLM, batch: Experience) -> Tensor:
    """Log-probabilities [M, V] of the tokens in the loss, by the model's own forward."""
    sequences = Sequences.join(batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask)
    length = batch.completion_ids.shape[1]
    logits = model(**sequences.inputs()).logits[:, -length - 1 : -1][batch.loss_mask]
    return (logits / TEMPERATURE).log_softmax(-1)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def explicit_fisher(model: CausalLM, batch: Experience) -> Tensor:
    """sum_t E[grad log pi grad log pi'], one backward pass for each token and word."""
    weights = [p for p in model.parameters() if p.requires_grad]
    outputs = log_pi(model, batch)
    scores = [
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(one, weights, retain_graph=True)])
        for one in outputs.reshape(-1)
    ]
    stacked = torch.stack(scores)
    return stacked.T @ (outputs.detach().exp().reshape(-1, 1) * stacked)


def random_vectors(fisher: TokenFisher, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in fisher.named.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_products_are_those_of_the_explicit_matrix(family: str) -> None:
    model, batch = adapted(family), experience()
    fisher = fisher_of(model)
    vector = random_vectors(fisher, 1)
    explicit = explicit_fisher(model, batch) @ flat(vector)
    error = (flat(fisher.product(batch, vector)) - explicit).norm() / explicit.norm()
    assert float(error) < ACCURACY[family]


def test_products_are_finite_differences_of_the_kl_s_gradient() -> None:
    model, batch, step = adapted("gpt2"), experience(), 1e-6
    fisher = fisher_of(model)
    vector, old = random_vectors(fisher, 2), log_pi(model, batch).detach()
    gradients = []
    for sign in (1.0, -1.0):
        for name, parameter in fisher.named.items():
            parameter.data += sign * step * vector[name]
        kl = (old.exp() * (old - log_pi(model, batch))).sum()
        gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(kl, list(fisher.named.values()))]))
        for name, parameter in fisher.named.items():
            parameter.data -= sign * step * vector[name]
    difference = (gradients[0] - gradients[1]) / (2 * step)
    torch.testing.assert_close(flat(fisher.product(batch, vector)), difference, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "family, options",
    [("llama", {"packing": "off"}), ("llama", {"log_probs": "naive"}), ("gemma", {"log_probs": "naive"})],
)
def test_the_way_of_the_passes_changes_no_result(family: str, options: dict[str, Any]) -> None:
    model, batch = adapted(family), experience()
    fast, plain = fisher_of(model), fisher_of(model, **options)
    vector = random_vectors(fast, 3)
    expected = flat(plain.product(batch, vector))
    assert float((flat(fast.product(batch, vector)) - expected).norm() / expected.norm()) < ACCURACY[family]
    old = {name: p.detach() + 0.1 * vector[name] for name, p in fast.named.items()}
    assert fast.kl(batch, old) == pytest.approx(plain.kl(batch, old), rel=ACCURACY[family])


def all_trained(family: str) -> PreTrainedModel:
    """A model of which everything learns: embeddings, and the head that shares them if it is tied."""
    return tiny(family)


@pytest.mark.parametrize("family", ["gpt2", "gemma", "llama"])
def test_a_head_that_learns_counts_too(family: str) -> None:
    """x.Fx = sum_t Var_p(J x): by a difference of logits along x."""
    model, batch, step = all_trained(family), experience(), 1e-3 if family != "gpt2" else 1e-5
    fisher = fisher_of(model)
    vector = random_vectors(fisher, 4)
    ours = float(flat(fisher.product(batch, vector)) @ flat(vector))
    outputs = []
    with torch.no_grad():
        centre = log_pi(model, batch)
        for sign in (1.0, -1.0):
            for name, parameter in fisher.named.items():
                parameter += sign * step * vector[name]
            outputs.append(log_pi(model, batch))
            for name, parameter in fisher.named.items():
                parameter -= sign * step * vector[name]
    slope = (outputs[0] - outputs[1]) / (2 * step)
    assert ours == pytest.approx(float((centre.exp() * slope**2).sum()), rel=2e-3 if family != "gpt2" else 1e-6)


def test_logits_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = adapted("gpt2"), experience()
    fisher = fisher_of(model)
    vector = random_vectors(fisher, 5)
    old = {name: p.detach() + 0.1 * vector[name] for name, p in fisher.named.items()}
    whole, kl = flat(fisher.product(batch, vector)), fisher.kl(batch, old)
    monkeypatch.setitem(logprobs.CHUNK_TOKENS, "cpu", 2)
    monkeypatch.setitem(logprobs.MAX_CHUNK_LOGITS, "cpu", 1)  # a row at a time if logits are made at once
    for options in ({}, {"log_probs": "naive"}):
        parts = fisher_of(model, **options)
        torch.testing.assert_close(flat(parts.product(batch, vector)), whole, rtol=1e-9, atol=1e-10)
        assert parts.kl(batch, old) == pytest.approx(kl, rel=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_kl_is_that_of_old_to_new_over_the_vocabulary(family: str) -> None:
    model, batch = adapted(family), experience()
    fisher = fisher_of(model)
    old = {name: p.detach().clone() for name, p in fisher.named.items()}
    before = log_pi(model, batch).detach()
    assert fisher.kl(batch, old) == 0.0
    for name, value in random_vectors(fisher, 6).items():
        fisher.named[name].data += 0.2 * value
    after = log_pi(model, batch).detach()
    forward, backward = ((p.exp() * (p - q)).sum().item() for p, q in ((before, after), (after, before)))
    assert fisher.kl(batch, old) == pytest.approx(forward, rel=1e-5)
    assert abs(forward - backward) / forward > 1e-2  # the other direction is another number


def test_rows_without_a_token_in_the_loss_count_nothing() -> None:
    model, batch = adapted("gpt2"), experience()
    fisher = fisher_of(model)
    vector = random_vectors(fisher, 7)
    nothing = batch.rows(torch.tensor([2]))
    assert not flat(fisher.product(nothing, vector)).any()
    assert fisher.kl(nothing, vector) == 0.0

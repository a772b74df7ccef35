"""Rows without padding: a padded rectangle's values and gradients, and no token sees another row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import COMPLETIONS, EOS, FAMILIES, PAD, PROMPTS, completions_of, ragged, saved, tiny, tokenizer
from torch import Tensor, nn

from rlhf.config.sections import Packing
from rlhf.config.weights import LoraConfig
from rlhf.models.backbone import CausalLM, add_lora, body_of, enable_gradient_checkpointing
from rlhf.models.kernels import attention as attention_module
from rlhf.models.kernels.attention import PackedBatch, RectangleLayout
from rlhf.models.kernels.packing import pack_for, pack_rows, packing_unsupported_reason
from rlhf.models.logprobs import completion_outputs
from rlhf.models.scalar_head import ScalarHeadModel, completion_values, load_scalar_head, sequence_scores
from rlhf.types import Completions

SHARED = completions_of(
    [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0], PROMPTS[1]],
    [[3, 14, EOS], [15, 9, 2, 6, 5, EOS], [PAD], [10, 10, 7, EOS], [3, 14]],
)
BATCHES = {"alone": ragged(), "shared": SHARED}
CLOSE = {"gemma": 1e-5}  # its norms are computed in float32 for any dtype


def fields(b: Completions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return b.prompt_ids, b.prompt_mask, b.completion_ids, b.completion_mask


def outputs_and_gradients(model: CausalLM, batch: Completions, packing: Packing) -> tuple[list[Tensor], list[Tensor]]:
    """All outputs for the completions, and the gradient of a curved function of them."""
    model.zero_grad()
    outputs = completion_outputs(
        model, *fields(batch), temperature=0.7, entropy_gradient=True, with_hidden=True, packing=packing
    )
    assert outputs.hidden is not None
    hidden = torch.where(batch.completion_mask[..., None], outputs.hidden, 0.0)
    weights = torch.linspace(0.5, 2.0, outputs.logprobs.numel(), dtype=torch.float64).view_as(outputs.logprobs)
    (
        (weights * (outputs.logprobs.exp() + outputs.entropy**2)).sum() + (weights[..., None] * hidden**2).sum()
    ).backward()
    values = [outputs.logprobs.detach(), outputs.entropy.detach(), outputs.first_choice.double(), hidden.detach()]
    return values, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(model: CausalLM, batch: Completions, atol: float = 1e-10) -> None:
    (ours, ours_d), (theirs, theirs_d) = (
        outputs_and_gradients(model, batch, "auto"),
        outputs_and_gradients(model, batch, "off"),
    )
    assert len(ours_d) == len(theirs_d) > 0
    for one, other in zip(ours + ours_d, theirs + theirs_d, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mistral"}))
@pytest.mark.parametrize("batch", BATCHES)
def test_without_padding_is_with_it(family: str, batch: str) -> None:
    model = tiny(family)
    assert packing_unsupported_reason(body_of(model)) == ""
    assert_same(model, BATCHES[batch], CLOSE.get(family, 1e-10))


@pytest.mark.parametrize("batch", BATCHES)
def test_under_checkpointing_and_with_adapters(batch: str) -> None:
    model = tiny()
    enable_gradient_checkpointing(model.train())
    assert_same(model, BATCHES[batch])
    adapted = add_lora(tiny(), LoraConfig(r=2))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    assert_same(adapted, BATCHES[batch])


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "granitemoe"])
@pytest.mark.parametrize("router", [False, True])
def test_a_mixture_of_experts_learns_the_same_with_padding_and_without(family: str, router: bool) -> None:
    """Their forward hands `output_router_logits` on to attention, which has nothing to do with it."""
    model = tiny(family, dtype=torch.float32, output_router_logits=router, **EXPERTS)
    reason = packing_unsupported_reason(body_of(model))
    assert ("router" in reason) == router
    assert bool(reason) == router
    for batch in BATCHES.values():
        assert_same(model, batch, 1e-4)


def test_prompts_are_laid_once_and_dead_tokens_never() -> None:
    alone, shared = pack_rows(*fields(ragged())), pack_rows(*fields(SHARED))
    assert alone is not None
    assert shared is not None
    assert isinstance(shared.layout, RectangleLayout)
    assert alone.input_ids.shape[1] == sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS))
    assert shared.input_ids.shape[1] == len(PROMPTS[0]) + len(PROMPTS[1]) + int(SHARED.completion_mask.sum())
    assert shared.position_ids[0, shared.layout.first.count :].tolist() == [
        len(PROMPTS[p]) + t for p, n in ((0, 3), (1, 6), (0, 1), (0, 4), (1, 2)) for t in range(n)
    ]
    assert pack_rows(*fields(completions_of([[], [5]], [[3], [4]]))) is None


def changed(batch: Completions, row: int) -> Completions:
    """The batch with every completion token of a row another one."""
    ids = batch.completion_ids.clone()
    ids[row] = torch.where(batch.completion_mask[row], (ids[row] + 5) % 20 + 1, ids[row])
    return completions_of(
        [i[m].tolist() for i, m in zip(batch.prompt_ids, batch.prompt_mask, strict=True)],
        [i[m].tolist() for i, m in zip(ids, batch.completion_mask, strict=True)],
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("row", [0, 1, 3])
def test_no_row_is_seen_by_another(batch: str, row: int) -> None:
    model, before = tiny(), BATCHES[batch]
    with torch.no_grad():
        one, two = (
            completion_outputs(model, *fields(b), temperature=1.0, packing="auto").logprobs
            for b in (before, changed(before, row))
        )
    others = torch.arange(len(before)) != row
    torch.testing.assert_close(one[others], two[others], rtol=0, atol=1e-12)
    assert not torch.allclose(one[row], two[row], atol=1e-3)


@pytest.mark.parametrize("batch", BATCHES)
def test_no_gradient_flows_between_rows_or_back_in_time(batch: str) -> None:
    """d log p(row, t) / d embedding is zero at every token that does not come before it in its own row."""
    model, b = tiny(), BATCHES[batch]
    laid = pack_rows(*fields(b))
    assert laid is not None
    states: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, __, out: states.append(out.detach().requires_grad_()) or states[-1]
    )
    logprobs = completion_outputs(model, *fields(b), temperature=1.0, packing="auto").logprobs
    hook.remove()
    owner = _owners(b, laid)
    for row in range(len(b)):
        for t in range(int(b.completion_mask[row].sum())):
            (slope,) = torch.autograd.grad(logprobs[row, t], states[-1], retain_graph=True)
            felt = set(slope[0].abs().sum(dim=1).nonzero().squeeze(1).tolist())
            prompt, own = owner[row]
            assert felt <= set(prompt + own[:t])
            assert prompt[-1] in felt


def _owners(b: Completions, laid: PackedBatch) -> list[tuple[list[int], list[int]]]:
    """Of each row, the places of its prompt's and its completion's tokens."""
    owners, at, prompts = [], 0, [i[m].tolist() for i, m in zip(b.prompt_ids, b.prompt_mask, strict=True)]
    lengths = b.completion_mask.sum(dim=1).tolist()
    if isinstance(laid.layout, RectangleLayout) and laid.layout.second is None:
        for prompt, length in zip(prompts, lengths, strict=True):
            middle = at + len(prompt)
            owners.append((list(range(at, middle)), list(range(middle, middle + length))))
            at = middle + length
        return owners
    starts: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        if tuple(prompt) not in starts:
            starts[tuple(prompt)] = at
            at += len(prompt)
    for prompt, length in zip(prompts, lengths, strict=True):
        start = starts[tuple(prompt)]
        owners.append((list(range(start, start + len(prompt))), list(range(at, at + length))))
        at += length
    return owners


def scalar(folder: str) -> ScalarHeadModel:
    return load_scalar_head(folder, tokenizer(), new_head="normal", dtype="float64")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("ask", [completion_values, sequence_scores])
def test_values_and_scores(batch: str, ask: Callable[..., Tensor], tmp_path: Path) -> None:
    model = scalar(saved(tiny("gpt2"), tmp_path))
    results: list[tuple[Tensor, list[Tensor]]] = []
    for packing in ("auto", "off"):
        model.packing = packing  # type: ignore[assignment]
        model.zero_grad()
        values = ask(model, *fields(BATCHES[batch]))
        (values**2).sum().backward()
        results.append((values.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-10)
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(
    "family, more, why",
    [
        ("mistral", {}, "a window of 4"),
        ("llama", {"attn_implementation": "eager"}, "does not use sdpa"),
        ("bloom", {"n_head": 2}, "BloomModel"),
        ("gemma2", {}, "does not use sdpa"),
    ],
)
def test_a_model_that_needs_padding_gets_it(family: str, more: dict[str, object], why: str) -> None:
    model = tiny(family, dtype=torch.float32, **more)
    assert why in packing_unsupported_reason(body_of(model))
    with torch.no_grad():
        one, two = (
            completion_outputs(model, *fields(ragged()), temperature=1.0, packing=p).logprobs  # type: ignore[arg-type]
            for p in ("auto", "off")
        )
    assert torch.equal(one, two)


@pytest.mark.parametrize("window, laid", [(9, True), (8, False)])
def test_a_window_that_no_row_outgrows_hides_nothing(window: int, laid: bool) -> None:
    """The longest row has nine tokens."""
    model = tiny("mistral", sliding_window=window)
    assert packing_unsupported_reason(body_of(model)) == ""
    assert (pack_for(body_of(model), *fields(SHARED)) is not None) == laid
    assert_same(model, SHARED)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_by_products_is_attention(masked: bool, groups: int) -> None:
    """Values and gradients, whole rows and completions beside a shared prompt."""
    torch.manual_seed(0)
    keys = 9 if masked else 5
    query = torch.randn(2, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 6 // groups, keys, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = (torch.rand(2, 1, 5, keys) < 0.6) | (torch.arange(keys) == 0) if masked else None
    expected = attention_module._attention(query, key, value, groups=groups, mask=mask, scale=0.7)
    attended = attention_module._attention_by_products(query, key, value, groups=groups, mask=mask, scale=0.7)
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad(out, (query, key, value), upstream, retain_graph=True) for out in (attended, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_short_rows_in_16_bits_go_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = attention_module._attention_by_products
    monkeypatch.setattr(
        attention_module,
        "_attention_by_products",
        lambda q, k, v, **more: calls.append(k.shape[2]) or plain(q, k, v, **more),
    )
    for width in (attention_module.MATMUL_ATTENTION_MAX_KEYS, attention_module.MATMUL_ATTENTION_MAX_KEYS + 1):
        q, k, v = (torch.randn(1, heads, width, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
        ours = attention_module._attention(q, k, v, groups=2, mask=None, scale=None)
        exact = attention_module._attention(q.float(), k.float(), v.float(), groups=2, mask=None, scale=None)
        torch.testing.assert_close(ours.float(), exact, rtol=0, atol=0.05)
    assert calls == [attention_module.MATMUL_ATTENTION_MAX_KEYS]


def test_a_leak_is_noticed_before_a_model_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention_module._attention

    def leaking(query: Tensor, key: Tensor, value: Tensor, **more: object) -> Tensor:
        return plain(query, key, value.roll(1, dims=0), **more)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_module, "_attention", leaking)
    assert "other numbers" in packing_unsupported_reason(body_of(tiny()))


def test_a_completion_without_a_live_token() -> None:
    prompts: Sequence[Sequence[int]] = [[5, 6], [5, 6], [5, 6]]
    b = completions_of(prompts, [[3, 4], [7], [8, 9]])
    mask = b.completion_mask.clone()
    mask[1] = False
    one, two = (
        completion_outputs(
            tiny(),
            b.prompt_ids,
            b.prompt_mask,
            b.completion_ids,
            mask,
            temperature=1.0,
            packing=p,  # type: ignore[arg-type]
        ).logprobs
        for p in ("auto", "off")
    )
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)

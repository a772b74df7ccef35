"""The written-out pass: the modules' values and gradients, with any parts frozen, shared or recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from quick import quick
from test_packing import BATCHES, fields
from tiny_models import EOS, PROMPTS, completions_of, saved, tiny, tokenizer
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rlhf.config.weights import LoraConfig
from rlhf.models import logprobs
from rlhf.models.backbone import CausalLM, add_lora, body_of, enable_gradient_checkpointing
from rlhf.models.kernels.llama import forward as lean
from rlhf.models.kernels.llama.elementwise import rotate
from rlhf.models.kernels.llama.families import Norm, read_layers
from rlhf.models.kernels.llama.forward import predictor_states, rms_norm, supports_fused
from rlhf.models.kernels.packing import pack_rows, packed_inputs, packing_unsupported_reason
from rlhf.models.logprobs import TokenOutputs, completion_outputs
from rlhf.models.lora import quiet_peft
from rlhf.models.scalar_head import load_scalar_head, sequence_scores
from rlhf.types import Completions

KNOWN = ("llama", "qwen2", "qwen3", "phi3", "olmo2", "gemma3_text")


def asked(model: CausalLM, batch: Completions) -> TokenOutputs:
    return completion_outputs(model, *fields(batch), temperature=0.7, entropy_gradient=True)


LogprobsAndGradients = tuple[Tensor, dict[str, Tensor | None]]


def gradients(model: CausalLM, batch: Completions) -> LogprobsAndGradients:
    """A curved function of the outputs, and the gradient of every weight."""
    model.zero_grad()
    outputs = asked(model, batch)
    loss = (outputs.logprobs.exp() + outputs.entropy**2).sum()
    loss.backward()
    return outputs.logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}


def with_modules(patch: pytest.MonkeyPatch, model: CausalLM, batch: Completions) -> LogprobsAndGradients:
    with patch.context() as inside:
        for where in (lean, logprobs):
            inside.setattr(where, "supports_fused", lambda _: False)
        return gradients(model, batch)


def assert_same(patch: pytest.MonkeyPatch, model: CausalLM, batch: Completions, atol: float = 1e-12) -> None:
    assert supports_fused(body_of(model))
    ours, ours_d = gradients(model, batch)
    theirs, theirs_d = with_modules(patch, model, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert any(gradient is not None for gradient in theirs_d.values())
    for name, expected in theirs_d.items():
        ours_here = ours_d[name]
        if expected is None:
            assert ours_here is None, name
        else:
            assert ours_here is not None, name
            assert float(expected.abs().max()) > 0, name
            torch.testing.assert_close(ours_here, expected, rtol=0, atol=atol * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("batch", BATCHES)
def test_values_and_gradients_are_the_modules(monkeypatch: pytest.MonkeyPatch, family: str, batch: str) -> None:
    model = tiny(family)
    for (
        name,
        parameter,
    ) in model.named_parameters():  # norms of one and biases of zero would hide their use
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    assert_same(monkeypatch, model, BATCHES[batch])


FROZEN: dict[str, list[tuple[str, ...]]] = {
    "qwen3": [("embed",), ("norm",), ("q_proj", "up_proj"), ("k_proj", "v_proj", "gate_proj"), ("o_proj", "down_proj")],
    "phi3": [("qkv_proj", "down_proj"), ("o_proj", "gate_up_proj")],
    "olmo2": [("norm",), ("q_norm", "post_attention"), ("k_norm", "post_feedforward"), ("o_proj", "down_proj")],
}


@pytest.mark.parametrize("family", FROZEN)
def test_whatever_is_frozen(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    names = [name for name, _ in tiny(family).named_parameters()]
    for frozen in FROZEN[family]:
        model = tiny(family)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        assert any(part in name for name in names for part in frozen)
        assert_same(monkeypatch, model, BATCHES["shared"])


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2", "gemma3_text"])
def test_recomputed_layers_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    plain, model = tiny(family), tiny(family).train()
    enable_gradient_checkpointing(model)
    _, expected = gradients(plain, BATCHES["shared"])
    _, recomputed = gradients(model, BATCHES["shared"])
    for name, gradient in expected.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=0, atol=1e-12)
    assert_same(monkeypatch, model, BATCHES["alone"])


def test_a_token_that_chooses_twice_is_moved_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = completions_of([PROMPTS[0]] * 3, [[3, 14, EOS], [15, EOS], [9, 2, EOS]])
    rows = pack_rows(*fields(batch))
    assert rows is not None
    assert len(rows.predictor_index.unique()) < len(rows.predictor_index)
    assert_same(monkeypatch, tiny(), batch)


@pytest.mark.parametrize("family", KNOWN)
def test_half_precision_is_as_close_as_the_modules(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    batch, model = BATCHES["shared"], tiny(family, dtype=torch.float32)
    exact, exact_d = gradients(model, batch)

    def error(half: LogprobsAndGradients) -> tuple[float, float]:
        logprobs, grads = half
        away = 0.0
        for name, expected in exact_d.items():
            one = grads[name]
            assert expected is not None
            assert one is not None
            away += float((one - expected).square().sum())
        return float((logprobs - exact).abs().mean()), away**0.5

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert supports_fused(body_of(model))
        ours, theirs = error(gradients(model, batch)), error(with_modules(monkeypatch, model, batch))
    assert 0 < ours[0] < 2 * theirs[0]  # of a few tokens' roundings: either may be the luckier
    assert 0 < ours[1] < 2 * theirs[1]


def test_only_what_it_computes() -> None:
    assert all(supports_fused(body_of(tiny(family))) for family in KNOWN)
    assert not any(supports_fused(body_of(tiny(family))) for family in ("gpt2", "gemma", "phi"))
    assert supports_fused(body_of(add_lora(tiny(), LoraConfig(r=2))))
    assert not supports_fused(body_of(tiny(hidden_act="gelu")))
    assert not supports_fused(body_of(tiny(mlp_bias=True)))
    assert not supports_fused(body_of(tiny("phi3", resid_pdrop=0.1)))
    split = body_of(tiny())
    vars(split.norm.weight)["ds_id"] = 0  # type: ignore[union-attr]
    assert not supports_fused(split)


JOINED = {"q_proj": "qkv_proj", "v_proj": "qkv_proj", "up_proj": "gate_up_proj"}  # Phi-3's name for each


def adapted(family: str, targets: Sequence[str] | str = "all-linear") -> CausalLM:
    """A model with an adapter that changes its outputs."""
    if not isinstance(targets, str):
        targets = sorted({JOINED[name] if family == "phi3" and name in JOINED else name for name in targets})
    model = add_lora(
        tiny(family), LoraConfig(r=3, alpha=5, target_modules=targets if isinstance(targets, str) else list(targets))
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


TARGETS: tuple[str | tuple[str, ...], ...] = ("all-linear", ("q_proj", "v_proj"), ("o_proj", "up_proj"), ("down_proj",))
ADAPTED = list(product(KNOWN, BATCHES, TARGETS))
BY_PARTS = ("llama", "phi3", "olmo2")  # projections of their own, joined ones, and norms behind the halves


@pytest.mark.parametrize(
    ("family", "batch", "targets"),
    quick(
        ADAPTED,
        [case for case in ADAPTED if case[2] == "all-linear" or (case[0] in BY_PARTS and case[1] == "shared")],
    ),
)
def test_adapters_too(monkeypatch: pytest.MonkeyPatch, family: str, batch: str, targets: str | tuple[str, ...]) -> None:
    assert_same(monkeypatch, adapted(family, targets), BATCHES[batch])


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2"])
def test_adapters_with_recomputed_layers_and_a_base_that_learns_too(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = adapted(family).train()
    enable_gradient_checkpointing(model)
    model.requires_grad_(True)
    assert_same(monkeypatch, model, BATCHES["shared"])


def test_an_adapter_that_is_off_says_what_the_base_says() -> None:
    model, batch = adapted("llama"), BATCHES["shared"]
    with torch.no_grad():
        base = asked(tiny("llama"), batch).logprobs
        on = asked(model, batch).logprobs
        with model.disable_adapter():  # type: ignore[operator]
            off = asked(model, batch).logprobs
    torch.testing.assert_close(off, base, rtol=0, atol=1e-12)
    assert float((on - base).abs().max()) > 1e-3


def test_adapters_that_are_more_than_a_product_are_left_to_their_modules() -> None:
    assert supports_fused(body_of(adapted("llama")))
    for change in ({"lora_dropout": 0.1}, {"use_dora": True}):
        config = PeftLoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **change)
        with quiet_peft():
            model = get_peft_model(tiny(), config)
        assert not supports_fused(body_of(model))


def test_a_mistake_with_a_fresh_adapter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new adapter adds nothing (B = 0), so that it would hide its use."""
    plain = lean._add_low_rank
    monkeypatch.setattr(lean, "_add_low_rank", lambda y, x, low: plain(y, x, low._replace(scale=1.0)))
    assert not supports_fused(body_of(add_lora(tiny(), LoraConfig(r=3, alpha=5))))


def test_the_trial_of_an_adapter_leaves_it_as_it_was() -> None:
    model = adapted("llama")
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    assert supports_fused(body_of(model))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1]), name


def test_a_broken_model_is_left_to_its_modules() -> None:
    for value in (float("nan"), float("inf")):
        broken = body_of(tiny())
        nn.init.constant_(broken.embed_tokens.weight, value)  # type: ignore[union-attr, arg-type]
        assert not supports_fused(broken)
        assert packing_unsupported_reason(broken) != ""


def test_not_where_each_gradient_is_taken_as_it_comes() -> None:
    """ZeRO-2: processes whose rows differ would take them in different orders, and add up other weights' gradients."""
    watched = body_of(tiny())
    assert supports_fused(watched)
    handle = watched.layers[1].mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[union-attr, operator]
    assert not supports_fused(watched)
    handle.remove()
    assert supports_fused(watched)


def test_fused_weights_are_not_copied() -> None:
    """Query, key and value of heads of 8: two heads ask, one answers; gate and up are halves."""
    body: Any = body_of(tiny("phi3"))
    layers = read_layers(body)
    assert layers is not None
    attention, mlp = body.layers[1].self_attn.qkv_proj.weight, body.layers[1].mlp.gate_up_proj.weight
    for projections, whole, starts in ((layers[1].inputs, attention, [0, 16, 24]), (layers[1].gate_up, mlp, [0, 24])):
        parts = [part for each in projections for part in each.split(each.linear.weight)]
        assert [part.data_ptr() for part in parts] == [whole[start].data_ptr() for start in starts]
        assert sum(len(part) for part in parts) == len(whole)


def test_an_odd_module_is_left_to_itself() -> None:
    body: Any = body_of(tiny())
    body.layers[1].input_layernorm = nn.LayerNorm(16, dtype=torch.float64)
    assert not supports_fused(body)


def test_a_changed_module_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, hidden: plain(self, hidden) + 0.01)
    assert not supports_fused(body_of(tiny()))


def test_scores_at_the_last_token(tmp_path: Path) -> None:
    model = load_scalar_head(saved(tiny(), tmp_path), tokenizer(), new_head="normal", dtype="float64")
    assert supports_fused(model.classifier.base_model)
    for batch in BATCHES.values():
        model.packing = "auto"
        ours = sequence_scores(model, *fields(batch))
        model.packing = "off"
        torch.testing.assert_close(ours, sequence_scores(model, *fields(batch)), rtol=0, atol=1e-12)


def test_states_are_those_asked_for() -> None:
    body, rows = body_of(tiny()), pack_rows(*fields(BATCHES["alone"]))
    assert rows is not None
    whole = body(**packed_inputs(rows)).last_hidden_state[0]
    for chosen in (rows.predictor_index, rows.last, torch.tensor([4, 0, 4])):
        torch.testing.assert_close(predictor_states(body, rows, chosen), whole[chosen], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_rotation_turns_planes_and_back_undoes_it(dtype: torch.dtype) -> None:
    heads = torch.randn(7, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    angles = torch.linspace(-3, 3, 14, dtype=torch.float64).view(7, 1, 2)
    turned = rotate(heads, angles.cos(), angles.sin())
    planes = torch.complex(heads[..., :2].double(), heads[..., 2:4].double()) * torch.exp(1j * angles)
    torch.testing.assert_close(turned, torch.cat([planes.real, planes.imag, heads[..., 4:].double()], dim=-1))
    torch.testing.assert_close(rotate(turned, angles.cos(), angles.sin(), back=True), heads.double())
    assert rotate(heads, angles.cos(), angles.sin(), dtype=torch.float32).dtype == torch.float32


def test_the_norm_and_its_gradient() -> None:
    x = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rms_norm(x, Norm(weight, 1e-3)), nn.functional.rms_norm(x, (5,), weight, 1e-3))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, Norm(b, 1e-3)), (x, weight))

"""Weights in fewer bits: the numbers that they stand for, the gradients through them, and models that share them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quick import quick
from tiny_models import ragged, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.config.sections import PolicyConfig
from rlhf.config.weights import LoraConfig
from rlhf.errors import ConfigError, ModelError
from rlhf.models.backbone import CausalLM, add_lora, body_of, enable_gradient_checkpointing, freeze, merged_copy
from rlhf.models.kernels.llama.forward import live_adapters, supports_fused
from rlhf.models.kernels.quantized import Int8Linear, Nf4Linear, QuantizedLinear
from rlhf.models.logprobs import completion_outputs
from rlhf.models.stored import make_dense, store_weights, twin
from rlhf.runtime.engine import Engine
from rlhf.sampling.fast.decoder import supports_fused_decoding

BATCH = ragged()
FIELDS = BATCH.prompt_ids, BATCH.prompt_mask, BATCH.completion_ids, BATCH.completion_mask
KINDS = ("bfloat16", "int8", "nf4")


@pytest.fixture(autouse=True)
def _needs_bitsandbytes(request: pytest.FixtureRequest) -> None:
    if "nf4" in request.node.name:
        pytest.importorskip("bitsandbytes")


def stored(kind: str, family: str = "llama") -> CausalLM:
    return store_weights(freeze(tiny(family, dtype=torch.float32)), kind)


def logprobs(model: CausalLM, packing: str = "auto") -> Tensor:
    return completion_outputs(model, *FIELDS, temperature=1.0, packing=packing).logprobs  # type: ignore[arg-type]


def adapter_gradients(model: CausalLM, packing: str) -> dict[str, Tensor]:
    with live_adapters(body_of(model)):
        logprobs(model, packing).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_training_in_float32_survives_in_weights_of_16_bits_on_average(kind: str) -> None:
    """A fifth of the spacing above numbers of bfloat16, which rounding to the nearest would take back."""
    model = freeze(tiny("llama", dtype=torch.float32))
    for weight in model.parameters():
        weight.copy_(weight.to(torch.bfloat16).float() * (1 + 2.0**-8 * 0.2))
    before = model.get_input_embeddings().weight.detach().clone()
    start = before / (1 + 2.0**-8 * 0.2)
    kept = store_weights(model, kind).get_input_embeddings().weight
    assert kept.dtype == torch.bfloat16
    share = float((kept.float() - start).abs().sum() / (before - start).abs().sum())
    assert 0.5 < share < 1.5
    assert float((before.to(torch.bfloat16).float() - start).abs().sum() / (before - start).abs().sum()) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_cannot_be_stored_in_fewer_bits_are_refused(kind: str) -> None:
    model = freeze(tiny("gpt2", dtype=torch.float32))
    with pytest.raises(ModelError, match=rf"weights={kind}: GPT2LMHeadModel has its weights in layers of transformers"):
        store_weights(model, kind)
    assert store_weights(model, "auto") is model


def test_int8_is_the_nearest_multiple_of_a_scale_per_output() -> None:
    linear = nn.Linear(3, 2, bias=False)
    linear.weight.data = torch.tensor([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0]])
    layer = Int8Linear(linear)
    assert layer.codes.tolist() == [[127, -50, 0], [0, 0, 0]]  # type: ignore[operator]
    assert torch.allclose(layer.weight, torch.tensor([[1.27, -0.5, 0.0], [0.0, 0.0, 0.0]]))


def test_nf4_is_that_of_bitsandbytes_and_takes_4_13_bits() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    linear = nn.Linear(512, 1024, bias=False)
    layer = Nf4Linear(linear)
    codes, state = functional.quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=True)
    assert torch.equal(layer.weight, functional.dequantize_4bit(codes, state))
    tables = layer.levels.nbytes + layer.scale_levels.nbytes + layer.scale_mean.nbytes  # type: ignore[operator]
    bits = 8 * (sum(buffer.nbytes for buffer in layer.buffers()) - tables) / linear.weight.numel()
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256))


ADAPTED = [
    (kind, packing, family)
    for kind in KINDS
    for family, packing in [("llama", "auto"), ("llama", "off"), ("gemma3_text", "auto"), ("phi3", "auto")]
]


@pytest.mark.parametrize(
    ("kind", "packing", "family"),
    quick(ADAPTED, [case for case in ADAPTED if case[0] == "nf4" or case[1:] == ("auto", "llama")]),
)
def test_an_adapters_gradients_are_those_on_the_dense_copy(kind: str, packing: str, family: str) -> None:
    base = stored(kind, family)
    torch.manual_seed(0)
    adapted = add_lora(base, LoraConfig(r=2))
    dense = make_dense(copy.deepcopy(adapted))
    assert supports_fused(body_of(dense))
    assert supports_fused(body_of(adapted)) or (family == "phi3" and kind != "bfloat16")
    ours, theirs = adapter_gradients(adapted, packing), adapter_gradients(dense, packing)
    assert ours.keys() == theirs.keys() != set()
    for name, gradient in theirs.items():
        scale = 1e-6 if supports_fused(body_of(adapted)) else 4e-6  # by modules the products are in another order
        assert (ours[name] - gradient).norm() <= scale * gradient.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_give_the_same_gradients(kind: str) -> None:
    torch.manual_seed(0)
    plain = add_lora(stored(kind), LoraConfig(r=2)).train()
    torch.manual_seed(0)
    recomputed = add_lora(stored(kind), LoraConfig(r=2)).train()
    enable_gradient_checkpointing(recomputed)
    ours, theirs = adapter_gradients(recomputed, "auto"), adapter_gradients(plain, "auto")
    assert all(torch.equal(ours[name], gradient) for name, gradient in theirs.items())


@pytest.mark.parametrize("kind", KINDS)
def test_no_pass_keeps_a_widened_matrix(kind: str) -> None:
    model = add_lora(stored(kind), LoraConfig(r=2)).train()
    shapes = {tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, QuantizedLinear | nn.Linear)}
    adapters = {p.data_ptr() for p in model.parameters()}
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float32 and tensor.data_ptr() not in adapters and tuple(tensor.shape) in shapes:
            kept.append(tuple(tensor.shape))
        return tensor

    for packing in ("auto", "off"):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs(model, packing)
    assert kept == []


class Made(TorchDispatchMode):
    """The dtypes and shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.dtype, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.add((result.dtype, tuple(result.shape)))
        return result


def test_no_product_in_16_bits_widens_a_matrix_of_16_bits() -> None:
    """An LM head of 8B takes 2.1 GB in float32, from which autocast made its 16 bits again."""
    model, ids = stored("bfloat16"), torch.arange(5, 13)[None]
    head = model.get_output_embeddings().weight
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        states = model.base_model(ids).last_hidden_state
        with Made() as made:
            logits = model.get_output_embeddings()(states)
        widened = nn.functional.linear(states, head.float())
    assert (torch.float32, tuple(head.shape)) not in made.seen
    assert torch.equal(logits, widened)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_sampler_takes_the_base_with_its_adapter(kind: str) -> None:
    assert supports_fused_decoding(add_lora(stored(kind), LoraConfig(r=2)))
    assert supports_fused_decoding(stored(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_copy_is_adapter_plus_base(kind: str) -> None:
    model: Any = add_lora(stored(kind), LoraConfig(r=2)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).view_as(parameter) * 0.1
    merged = merged_copy(model, None)
    assert {type(layer) for layer in merged.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}
    with torch.no_grad():
        assert torch.allclose(logprobs(merged.eval()), logprobs(model), atol=1e-5)


def test_twins_share_every_tensor_and_have_adapters_of_their_own() -> None:
    base = stored("bfloat16")
    first, second = add_lora(twin(base), LoraConfig(r=2)), add_lora(twin(base), LoraConfig(r=4))
    of_base = {p.data_ptr() for p in base.parameters()}
    for model in (first, second):
        frozen = {p.data_ptr() for name, p in model.named_parameters() if "lora_" not in name}
        assert frozen == of_base
    assert {p.data_ptr() for p in first.parameters() if p.requires_grad}.isdisjoint(
        p.data_ptr() for p in second.parameters() if p.requires_grad
    )
    alone = logprobs(first).detach()
    with live_adapters(body_of(second)):
        assert torch.equal(logprobs(first), alone)


def test_presets_of_targets_and_what_cannot_be_saved_whole() -> None:
    def targets(which: Any) -> set[str]:
        model = add_lora(tiny(), LoraConfig(r=2, target_modules=which))
        return {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}

    assert targets("attention") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert targets("mlp") == {"gate_proj", "up_proj", "down_proj"}
    assert targets("all-linear") == targets("attention") | targets("mlp")
    tied = tiny(tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"modules_to_save has embed_tokens, which shares its weight with lm_head"):
        add_lora(tied, LoraConfig(r=2, modules_to_save=["embed_tokens"]))
    with pytest.raises(ConfigError, match=r"target_modules has lm_head, which shares its weight with model\.embed"):
        add_lora(tied, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ConfigError, match=r"list the names of the layers"):
        add_lora(tiny("gpt2"), LoraConfig(r=2, target_modules="mlp"))


def test_a_named_module_that_is_not_there_is_told() -> None:
    """Peft would train the others alone, and end in its own error without any."""
    with pytest.raises(ConfigError, match=r"lora\.target_modules has 'v_porj', .* no such module; did you mean v_proj"):
        add_lora(tiny(), LoraConfig(r=2, target_modules=["q_proj", "v_porj"]))
    with pytest.raises(ConfigError, match=r"lora\.modules_to_save has 'embed'"):
        add_lora(tiny(), LoraConfig(r=2, modules_to_save=["embed"]))
    add_lora(tiny(), LoraConfig(r=2, target_modules=["0.self_attn.q_proj"]))


def test_rslora_dora_and_modules_that_are_trained_whole() -> None:
    scaled = add_lora(tiny(), LoraConfig(r=4, alpha=8.0, rslora=True))
    layer: Any = next(module for module in scaled.modules() if hasattr(module, "lora_A"))
    assert layer.scaling["default"] == pytest.approx(4.0)  # 8 / sqrt(4)
    model = add_lora(stored("int8"), LoraConfig(r=2, dora=True, modules_to_save=["embed_tokens", "q_proj"]))
    assert not supports_fused(body_of(model))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert any("lora_magnitude_vector" in name for name in trained)
    assert sum("modules_to_save" in name for name in trained) == 3  # the embedding, and a query of both layers
    logprobs(model).sum().backward()
    assert all(p.grad is not None for p in trained.values())


def test_trained_weights_in_16_bits_learn() -> None:
    model = store_weights(tiny(dtype=torch.float32).train(), "bfloat16")
    assert {p.dtype for name, p in model.named_parameters() if "norm" not in name} == {torch.bfloat16}
    trained = Engine(torch.device("cpu")).train("policy", model, PolicyConfig(model="m", lr=1e-3), terms=("sft",))
    losses = []
    for _ in range(20):
        loss = -logprobs(model).sum()
        losses.append(float(loss.detach()))
        trained.backward(loss, last=True)
        trained.step(norm=float(trained.grad_norm()), lr_factor=1.0)  # type: ignore[attr-defined]
    assert losses[-1] < 0.8 * losses[0]

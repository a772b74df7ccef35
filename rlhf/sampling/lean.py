"""The decode step of Llama and its kin without their modules: fused products, a table of rotations, little Python.

The weights are copies of the live ones, joined and laid out for products with few rows; made anew for each rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from rlhf.models.backbone import CausalLM
from rlhf.sampling.products import Linear
from rlhf.sampling.slots import Slots

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
ROTATIONS = ("default", "linear", "llama3", "yarn")  # those that depend on the position alone


@dataclass(frozen=True)
class _Layer:
    before: Callable[[Tensor], Tensor]
    qkv: Linear
    query_norm: Callable[[Tensor], Tensor] | None
    key_norm: Callable[[Tensor], Tensor] | None
    scaling: float
    window: int | None
    out: Linear
    after: Callable[[Tensor], Tensor]
    gate: Linear
    up: Linear
    act: Callable[[Tensor], Tensor] | None  # None: silu
    down: Linear


class LeanDecoder:
    """A Decoder for the families above."""

    def __init__(self, model: CausalLM, *, rows: int, positions: int, low: torch.dtype | None) -> None:
        """Read the weights as they are now.

        Args:
            model: one that `fits`.
            rows: that will be decoded together; the layout of the weights may be made for it.
            positions: tokens of the longest sequence.
            low: the dtype of matrix products where it is not the weights' (autocast).
        """
        plain = model.get_base_model() if isinstance(model, PeftModel) else model
        inner, config = plain.model, plain.config
        self.embedding = inner.embed_tokens.weight.detach()
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        at = torch.arange(positions, device=self.embedding.device)
        cos, sin = inner.rotary_emb(self.embedding[:1, None], at[None])
        half = cos.shape[-1] // 2
        self.cos, self.sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

        def product(*modules: nn.Module, norm: nn.Module | None = None, scale: float = 1.0) -> Linear:
            """Of what `norm` is before its weight, which goes into the columns here; the first is scaled."""
            weights, biases = [_weight(each) for each in modules], [_bias(each) for each in modules]
            if norm is not None:
                weights = [weight * _weight_of(norm) for weight in weights]
            if scale != 1.0:
                weights[0], biases[0] = weights[0] * scale, None if biases[0] is None else biases[0] * scale
            return Linear(weights, biases, rows=rows, low=low)

        self.layers = [
            _Layer(
                before=_unit(layer.input_layernorm),
                qkv=product(
                    layer.self_attn.q_proj,
                    layer.self_attn.k_proj,
                    layer.self_attn.v_proj,
                    norm=layer.input_layernorm,
                    scale=1.0 if hasattr(layer.self_attn, "q_norm") else float(layer.self_attn.scaling),
                ),
                query_norm=_norm(layer.self_attn.q_norm) if hasattr(layer.self_attn, "q_norm") else None,
                key_norm=_norm(layer.self_attn.k_norm) if hasattr(layer.self_attn, "k_norm") else None,
                scaling=float(layer.self_attn.scaling) if hasattr(layer.self_attn, "q_norm") else 1.0,
                window=_window(layer.self_attn),
                out=product(layer.self_attn.o_proj),
                after=_unit(layer.post_attention_layernorm),
                gate=product(layer.mlp.gate_proj, norm=layer.post_attention_layernorm),
                up=product(layer.mlp.up_proj, norm=layer.post_attention_layernorm),
                act=None if config.hidden_act == "silu" else layer.mlp.act_fn,
                down=product(layer.mlp.down_proj),
            )
            for layer in inner.layers
        ]
        self.norm = _unit(inner.norm)
        self.head = product(plain.lm_head, norm=inner.norm)

    def step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """See Decoder. Autocast is off inside: it would copy the cache into its dtype at every step."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self._step(slots, tokens, positions)

    def _step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        slots.begin_step(positions)
        hidden = functional.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for number, layer in enumerate(self.layers):
            found = self._attention(number, layer, layer.before(hidden), cos, sin, slots)
            hidden = layer.out.plus(found, hidden)
            inner = layer.after(hidden)
            gate = layer.gate.silu(inner) if layer.act is None else layer.act(layer.gate(inner))
            hidden = layer.down.plus(layer.up.times(inner, gate), hidden)
        return self.head(self.norm(hidden))

    def _attention(
        self, number: int, layer: _Layer, hidden: Float[Tensor, "N D"], cos: Tensor, sin: Tensor, slots: Slots
    ) -> Float[Tensor, "N E"]:
        rows, turned = len(hidden), self.heads + self.groups
        parts = layer.qkv(hidden).view(rows, turned + self.groups, -1)
        both = parts[:, :turned]
        if layer.query_norm is not None and layer.key_norm is not None:
            both = torch.cat([layer.query_norm(both[:, : self.heads]), layer.key_norm(both[:, self.heads :])], dim=1)
        both = rotate(both, cos, sin)
        found = slots.attend(
            number,
            both[:, : self.heads],
            both[:, self.heads :],
            parts[:, turned:],
            scaling=layer.scaling,
            window=layer.window,
        )
        return found.view(rows, -1)


def fits(model: CausalLM) -> bool:
    """Whether this decoder computes what the model does."""
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    if type(plain) not in FAMILIES or plain.config.rope_parameters.get("rope_type", "default") not in ROTATIONS:
        return False
    if isinstance(model, PeftModel) and (len(model.active_adapters) != 1 or model.peft_type != "LORA"):
        return False
    attention = [layer.self_attn for layer in plain.model.layers]
    mlp = [layer.mlp for layer in plain.model.layers]
    linear = [plain.lm_head]
    linear += [getattr(each, name) for each in attention for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linear += [getattr(each, name) for each in mlp for name in ("gate_proj", "up_proj", "down_proj")]
    return type(plain.model.embed_tokens) is nn.Embedding and all(_is_linear(each) for each in linear)


def rotate(heads: Float[Tensor, "N H D"], cos: Float[Tensor, "N 1 E"], sin: Float[Tensor, "N 1 E"]) -> Tensor:
    """Rotary positions: the halves of each head are the two coordinates of its E = D / 2 planes (Su et al. 2021)."""
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half:]
    turned = heads.new_empty(heads.shape, dtype=torch.promote_types(heads.dtype, cos.dtype))
    torch.addcmul(first * cos, second, sin, value=-1, out=turned[..., :half])
    torch.addcmul(second * cos, first, sin, out=turned[..., half:])
    return turned


def _is_linear(module: Any) -> bool:
    if type(module) is nn.Linear:
        return True
    if type(module) is not LoraLinear or type(module.base_layer) is not nn.Linear:
        return False
    return not any(module.use_dora.values()) and not module.disable_adapters and not any(module.lora_bias.values())


def _weight(module: Any) -> Tensor:
    """The weight, adapter added."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    weight: Tensor = module.base_layer.weight.detach()
    for name in () if module.merged else module.active_adapters:
        if name in module.lora_A:
            weight = weight + module.get_delta_weight(name).detach()
    return weight


def _bias(module: Any) -> Tensor | None:
    bias = module.bias if type(module) is nn.Linear else module.base_layer.bias
    return None if bias is None else bias.detach()


def _window(attention: Any) -> int | None:
    own = getattr(attention, "sliding_window", None)
    if own is None and isinstance(attention.config, MistralConfig):
        own = attention.config.sliding_window
    return own


def _weight_of(norm: nn.Module) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """Root mean square layer norm, computed in float32 at least, as theirs is."""
    weight, unit = _weight_of(module), _unit(module)
    return lambda hidden: unit(hidden) * weight


def _unit(module: Any) -> Callable[[Tensor], Tensor]:
    """The norm without its weight: x / sqrt(mean(x²) + eps), in few steps."""
    weight = _weight_of(module)
    share, eps = 1.0 / len(weight), weight.new_tensor([float(module.variance_epsilon)])

    def scaled(hidden: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return hidden * torch.addcmul(eps, length, length, value=share).rsqrt_()

    return scaled

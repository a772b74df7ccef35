"""The places of the weights in decoder layers of known model families, for both written-out passes.

The training pass (forward.py) and the decode step (rlhf/sampling/fast/decoder.py) ask for query, key, value, gate and
up, in any modules: if one weight holds several, each is a view of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn
from transformers import Gemma3TextModel, LlamaModel, MistralModel, Olmo2Model, Phi3Model, Qwen2Model, Qwen3Model
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from rlhf.models.kernels.quantized import is_linear


class Norm(NamedTuple):
    """The weight and epsilon of an RMSNorm, y = w x / sqrt(mean(x²) + eps) (Zhang & Sennrich 2019)."""

    weight: Float[Tensor, " D"]
    eps: float


class Norms(NamedTuple):
    """The norms of a layer: of the input of each half, of its output before it is added, or of both."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


@dataclass(frozen=True)
class Projection:
    """A linear layer, maybe with an adapter, and how its outputs are divided among its parts; (): it is one part."""

    module: Any
    sizes: tuple[int, ...] = ()

    @property
    def linear(self) -> Any:
        """Return the linear layer: the one beneath an adapter, or the module itself."""
        return self.module if is_linear(self.module) else self.module.base_layer

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return len(self.sizes) or 1

    def split(self, rows: Float[Tensor, "E ..."]) -> list[Tensor]:
        """Split a weight or bias into views of each part's rows; their gradients come back as one tensor."""
        return list(rows.split(self.sizes)) if self.sizes else [rows]


@dataclass(frozen=True)
class Layer:
    """The parts of a decoder layer, for the written-out passes."""

    inputs: Sequence[Projection]  # query, key and value
    output: Projection
    gate_up: Sequence[Projection]  # gate and up
    down: Projection
    activation: Any  # a module
    activation_name: str
    norms: Norms
    head_norms: Sequence[Norm]  # of queries and keys, per head or over all heads; may be empty
    head_dim: int  # of a head; only as much of it is rotated as there are angles
    scaling: float
    window: int | None
    rope_kind: str | None = None  # which kind of rotary embedding, if a model has several


def _separate(layer: Any, norms: Norms, activation_name: str) -> Layer:
    """Describe a layer with a weight for each part, and biases, query and key norms and a window if it has them."""
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        inputs=[Projection(attention.q_proj), Projection(attention.k_proj), Projection(attention.v_proj)],
        output=Projection(attention.o_proj),
        gate_up=[Projection(mlp.gate_proj), Projection(mlp.up_proj)],
        down=Projection(mlp.down_proj),
        activation=mlp.act_fn,
        activation_name=activation_name,
        norms=norms,
        head_norms=[norm_of(attention.q_norm), norm_of(attention.k_norm)] if hasattr(attention, "q_norm") else [],
        head_dim=attention.head_dim,
        scaling=float(attention.scaling),
        window=getattr(attention, "sliding_window", None),
    )


def _llama(layer: Any) -> Layer:
    """Describe a layer of Llama, Qwen2 or Qwen3; Mistral's adds a window."""
    norms = _pre_norms(layer.input_layernorm, layer.post_attention_layernorm)
    return _separate(layer, norms, layer.self_attn.config.hidden_act)


def _mistral(layer: Any) -> Layer:
    """Describe a layer of Mistral: the window is in the configuration only."""
    return replace(_llama(layer), window=layer.self_attn.config.sliding_window)


def _phi3(layer: Any) -> Layer:
    """Describe a layer of Phi-3: query, key and value in one weight, gate and up in another."""
    attention, mlp, config = layer.self_attn, layer.mlp, layer.config
    width, hidden = attention.head_dim, config.intermediate_size
    heads, groups = width * config.num_attention_heads, width * config.num_key_value_heads
    return Layer(
        inputs=[Projection(attention.qkv_proj, (heads, groups, groups))],
        output=Projection(attention.o_proj),
        gate_up=[Projection(mlp.gate_up_proj, (hidden, hidden))],
        down=Projection(mlp.down_proj),
        activation=mlp.activation_fn,
        activation_name=config.hidden_act,
        norms=_pre_norms(layer.input_layernorm, layer.post_attention_layernorm),
        head_norms=[],
        head_dim=width,
        scaling=float(attention.scaling),
        window=config.sliding_window,
    )


def _olmo2(layer: Any) -> Layer:
    """Describe a layer of OLMo 2: norms after each half, and norms of queries and keys over all heads together."""
    norms = Norms(None, norm_of(layer.post_attention_layernorm), None, norm_of(layer.post_feedforward_layernorm))
    return _separate(layer, norms, layer.self_attn.config.hidden_act)


def _gemma3(layer: Any) -> Layer:
    """Describe a layer of Gemma 3: norms before and after each half; windowed layers have their own rotary angles."""
    norms = Norms(
        norm_of(layer.input_layernorm),
        norm_of(layer.post_attention_layernorm),
        norm_of(layer.pre_feedforward_layernorm),
        norm_of(layer.post_feedforward_layernorm),
    )
    described = _separate(layer, norms, layer.self_attn.config.hidden_activation)
    return replace(described, rope_kind=layer.self_attn.layer_type)


def _pre_norms(attention: Any, mlp: Any) -> Norms:
    return Norms(norm_of(attention), None, norm_of(mlp), None)


def norm_of(module: Any) -> Norm:
    """Read the weight and epsilon of an RMSNorm module; Gemma stores the weight minus 1."""
    if type(module) is Gemma3RMSNorm:
        return Norm(1.0 + module.weight, float(module.eps))
    return Norm(module.weight, float(module.variance_epsilon))


Reader = Callable[[Any], Layer]
READERS: dict[type[nn.Module], Reader] = {
    LlamaModel: _llama,
    MistralModel: _mistral,
    Qwen2Model: _llama,
    Qwen3Model: _llama,
    Phi3Model: _phi3,
    Olmo2Model: _olmo2,
    Gemma3TextModel: _gemma3,
}


def read_layers(body: Any) -> list[Layer] | None:
    """Describe the layers of a transformer without its head; None if its family is unknown or a module was replaced."""
    read = READERS.get(type(body))
    if read is None:
        return None
    try:
        return [read(layer) for layer in body.layers]
    except AttributeError:  # a module was replaced by one of another kind
        return None

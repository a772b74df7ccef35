"""The decode step of Llama and its kin without their modules: fused products, a table of rotations, little Python.

The weights are copies of the live ones, joined and laid out for products with few rows; made anew for each rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from rlhf.models.backbone import CausalLM
from rlhf.models.fused import Norm
from rlhf.models.layers import Layer, Projection, norm_of, read_layers
from rlhf.sampling.products import Linear
from rlhf.sampling.slots import Slots

EMBEDDINGS = (nn.Embedding, Gemma3TextScaledWordEmbedding)
ROTATIONS = ("default", "linear", "llama3", "yarn")  # those that depend on the position alone
LONG = "longrope"  # one that does so in sequences no longer than `original_max_position_embeddings`

Part = tuple[Tensor, Tensor | None]  # a weight, adapter added, and its bias


@dataclass(frozen=True)
class _Layer:
    before: Callable[[Tensor], Tensor]
    qkv: Linear
    query_norm: Callable[[Tensor], Tensor] | None
    key_norm: Callable[[Tensor], Tensor] | None
    scaling: float
    window: int | None
    angles: str | None
    out: Linear
    norm_out: Callable[[Tensor], Tensor] | None  # of what is added to the states
    after: Callable[[Tensor], Tensor]
    gate: Linear
    up: Linear
    act: Callable[[Tensor], Tensor] | None  # None: silu
    down: Linear
    norm_down: Callable[[Tensor], Tensor] | None  # of what is added to the states


class LeanDecoder:
    """Decodes for the families of rlhf.models.layers."""

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
        self.embed = inner.embed_tokens  # the module: Gemma's scales what it reads
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        layers = read_layers(inner)
        assert layers is not None, "fits() was asked"
        self.tables = {angles: _table(inner, angles, positions) for angles in {layer.angles for layer in layers}}

        def product(parts: Sequence[Part], *, norm: Norm | None = None, scale: float = 1.0) -> Linear:
            """Join products of a normalized input: the weight of `norm` goes into columns, `scale` into the first."""
            weights, biases = [weight for weight, _ in parts], [bias for _, bias in parts]
            if norm is not None:
                weights = [weight * norm.weight.detach() for weight in weights]
            if scale != 1.0:
                weights[0], biases[0] = weights[0] * scale, None if biases[0] is None else biases[0] * scale
            return Linear(weights, biases, rows=rows, low=low)

        def written_out(layer: Layer) -> _Layer:
            query_norm, key_norm = (_norm(each, layer.width) for each in layer.head_norms or (None, None))
            gate, up = _parts(layer.gated)
            norms = layer.norms
            return _Layer(
                before=_unit(norms.before_attention),
                qkv=product(
                    _parts(layer.inputs),
                    norm=norms.before_attention,
                    scale=1.0 if layer.head_norms else layer.scaling,
                ),
                query_norm=query_norm,
                key_norm=key_norm,
                scaling=layer.scaling if layer.head_norms else 1.0,
                window=layer.window,
                angles=layer.angles,
                out=product(_parts([layer.output])),
                norm_out=_norm(norms.after_attention),
                after=_unit(norms.before_mlp),
                gate=product([gate], norm=norms.before_mlp),
                up=product([up], norm=norms.before_mlp),
                act=None if layer.activation_name == "silu" else layer.activation,
                down=product(_parts([layer.down])),
                norm_down=_norm(norms.after_mlp),
            )

        self.layers = [written_out(layer) for layer in layers]
        norm = norm_of(inner.norm)
        self.norm = _unit(norm)
        self.head = product(_parts([Projection(plain.lm_head)]), norm=norm)

    def step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """See Decoder. Autocast is off inside: it would copy the cache into its dtype at every step."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self._step(slots, tokens, positions)

    def _step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        slots.begin_step(positions)
        hidden = self.embed(tokens)
        turns = {
            angles: (cos[positions][:, None], sin[positions][:, None]) for angles, (cos, sin) in self.tables.items()
        }
        for number, layer in enumerate(self.layers):
            found = self._attention(number, layer, layer.before(hidden), *turns[layer.angles], slots)
            hidden = _added(layer.out, found, hidden, layer.norm_out)
            inner = layer.after(hidden)
            gate = layer.gate.silu(inner) if layer.act is None else layer.act(layer.gate(inner))
            hidden = _added(layer.down, layer.up.times(inner, gate), hidden, layer.norm_down)
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
    """Tell whether this decoder knows the model's layers; it is for sequences that it `reaches`, after a trial."""
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    body = getattr(plain, "model", None)
    layers = read_layers(body)
    if body is None or layers is None or not _rotations(plain.config) <= {*ROTATIONS, LONG}:
        return False
    if isinstance(model, PeftModel) and (len(model.active_adapters) != 1 or model.peft_type != "LORA"):
        return False
    if type(body.embed_tokens) not in EMBEDDINGS:
        return False
    projections = [each for layer in layers for each in (*layer.inputs, layer.output, *layer.gated, layer.down)]
    return all(_is_linear(module) for module in (plain.lm_head, *(each.module for each in projections)))


def reaches(model: CausalLM, positions: int) -> bool:
    """Tell whether rotations depend on the position alone in so many tokens; longrope has others beyond."""
    config = model.config
    if LONG not in _rotations(config):
        return True
    return positions <= int(config.rope_parameters["original_max_position_embeddings"])


def _rotations(config: Any) -> set[str]:
    """List the types of its rotations: of one kind, or of several by name."""
    parameters = config.rope_parameters
    kinds = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return {str(each.get("rope_type", "default")) for each in kinds}


def _table(body: Any, angles: str | None, positions: int) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of all positions."""
    weight = body.embed_tokens.weight.detach()
    at = torch.arange(positions, device=weight.device)
    cos, sin = body.rotary_emb(weight[:1, None], at[None], *([] if angles is None else [angles]))
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def rotate(heads: Float[Tensor, "N H D"], cos: Float[Tensor, "N 1 E"], sin: Float[Tensor, "N 1 E"]) -> Tensor:
    """Rotate by position: halves of the first 2 E numbers of each head are the two coordinates of E planes.

    (Su et al. 2021.) What is beyond them, in families that rotate a part, stays.
    """
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    turned = heads.new_empty(heads.shape, dtype=torch.promote_types(heads.dtype, cos.dtype))
    torch.addcmul(first * cos, second, sin, value=-1, out=turned[..., :half])
    torch.addcmul(second * cos, first, sin, out=turned[..., half : 2 * half])
    if rest.shape[-1]:
        turned[..., 2 * half :] = rest
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


def _parts(projections: Sequence[Projection]) -> list[Part]:
    """Read the weight and bias of each part, those of a weight that holds several as views of its rows."""
    parts: list[Part] = []
    for each in projections:
        weights, bias = each.split(_weight(each.module)), each.linear.bias
        biases = [None] * len(weights) if bias is None else each.split(bias.detach())
        parts += zip(weights, biases, strict=True)
    return parts


def _added(product: Linear, x: Tensor, hidden: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Add the product of x, or its norm, to the states."""
    return product.plus(x, hidden) if norm is None else hidden + norm(product(x).to(hidden.dtype))


def _norm(norm: Norm | None, width: int = 0) -> Callable[[Tensor], Tensor] | None:
    """Make a root mean square layer norm, computed in float32 at least, as theirs is; None where there is none.

    Of heads of that `width` each by itself, or all together where the weight is for all.
    """
    if norm is None:
        return None
    weight, unit = norm.weight.detach(), _unit(norm)
    if width and len(weight) > width:
        return lambda heads: (unit(heads.flatten(1)) * weight).view(heads.shape)
    return lambda hidden: unit(hidden) * weight


def _unit(norm: Norm | None) -> Callable[[Tensor], Tensor]:
    """Make the norm without its weight: x / sqrt(mean(x²) + eps), in few steps; x itself where there is none."""
    if norm is None:
        return lambda hidden: hidden
    weight = norm.weight.detach()
    share, eps = 1.0 / len(weight), weight.new_tensor([norm.eps])

    def scaled(hidden: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return hidden * torch.addcmul(eps, length, length, value=share).rsqrt_()

    return scaled

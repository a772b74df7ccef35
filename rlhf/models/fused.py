"""The two halves of a decoder layer around its attention, each with a backward pass of its own.

What modules do in a dozen steps that each keep their inputs is done here with few passes over memory; what is cheap to
compute again in the backward pass (norms, silu) is not kept. Matrix products are made in the dtype `low`: the weights'
own, or autocast's, with norms, rotations and the sums along the layers in the weights'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlhf.models.low import low_rows, low_weight
from rlhf.models.rows import Places

Weight = Tensor | None


class Activation(NamedTuple):
    """Holds a function of the gate, and its derivative, from (gradient of the value, gate) to gradient of the gate."""

    of: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {  # by their names in configurations
    "silu": Activation(functional.silu, torch.ops.aten.silu_backward),
    "gelu_pytorch_tanh": Activation(
        partial(functional.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")
    ),
}


class LowRank(NamedTuple):
    """An adapter beside a weight: W + scale B A (Hu et al. 2022)."""

    down: Float[Tensor, "r D"]  # A
    up: Float[Tensor, "E r"]  # B
    scale: float


Adapter = LowRank | None


class Norm(NamedTuple):
    """The weight and epsilon of y = w x / sqrt(mean(x²) + eps) (Zhang & Sennrich 2019)."""

    weight: Float[Tensor, " D"]
    eps: float


class Norms(NamedTuple):
    """Says where a family norms: what goes into a half of a layer, what comes out of it before it is added, or both."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


@dataclass(frozen=True)
class Turn:
    """Rotary positions of each token (Su et al. 2021), and where the tokens stand in their rectangles."""

    cos: Float[Tensor, "N 1 E"]
    sin: Float[Tensor, "N 1 E"]
    places: Sequence[Places]


def before_attention(
    x: Float[Tensor, "N D"],
    norm: Norm | None,
    weights: Sequence[Tensor],
    biases: Sequence[Weight],
    adapters: Sequence[Adapter],
    head_norms: Sequence[Norm],
    width: int,
    turn: Turn,
    low: torch.dtype,
) -> tuple[Float[Tensor, "N D"], list[Tensor]]:
    """Return x as it is, and query, key and value of norm(x) in each rectangle [places, heads, d = width], rotated.

    A norm of queries or keys is of each head, or of all of them together: as its weight is long.
    """
    eps, own = _taken_apart([norm, *(head_norms or (None, None))])
    scales, pairs = _flattened(adapters)
    skip, *found = _Before.apply(eps, width, turn, low, scales, x, *own, *weights, *biases, *pairs)  # type: ignore[no-untyped-call]
    return skip, found


def after_attention(
    skip: Float[Tensor, "N D"],
    seen: Sequence[Tensor],
    places: Sequence[Places],
    chosen: Int[Tensor, " M"] | None,
    norms: Norms,
    weights: Sequence[Tensor],
    adapters: Sequence[Adapter],
    activation: str,
    low: torch.dtype,
) -> Float[Tensor, "M D"]:
    """Compute y = skip + seen Wo', then y + (silu(n Wg') * (n Wu')) Wd' of n = norm(y) (Shazeer 2020), of some tokens.

    In families that norm what comes out of a half, it is that norm of each product which is added. The activation is
    one of `ACTIVATIONS`.
    """
    scales, pairs = _flattened(adapters)
    eps, own = _taken_apart([norms.before_mlp, norms.after_attention, norms.after_mlp])
    after: Tensor = _After.apply(  # type: ignore[no-untyped-call]
        eps, low, scales, places, chosen, ACTIVATIONS[activation], skip, *own, *weights, *pairs, *seen
    )
    return after


def normed(x: Float[Tensor, "*shape D"], norm: Norm) -> Float[Tensor, "*shape D"]:
    """The norm alone."""
    found: Tensor = _Normed.apply(x, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
    return found


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Weight, None]:
        x, weight, inverse = ctx.saved_tensors
        return *_norm_backward(gradient, x * inverse, weight, inverse, learns=ctx.needs_input_grad[1]), None


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: Sequence[float],
        width: int,
        turn: Turn,
        low: torch.dtype,
        scales: Sequence[float],
        x: Tensor,
        weight: Weight,
        *given: Weight,
    ) -> Any:
        head_norms, weights, biases, adapters = given[:2], given[2:5], given[5:8], _paired(given[8:], scales)
        inverse = None if weight is None else _inverse(x, eps[0])
        inner = low_rows(_normal(x, weight, inverse), low)
        heads = [
            _linear(inner, w, b, adapter)[: len(x)] for w, b, adapter in zip(weights, biases, adapters, strict=True)
        ]
        query, key = heads[0].to(x.dtype), heads[1].to(x.dtype)
        kept: list[Tensor] = []
        if head_norms[0] is not None and head_norms[1] is not None:
            query = query.view(len(x), -1, len(head_norms[0]))
            key = key.view(len(x), -1, len(head_norms[1]))
            kept = [query, _inverse(query, eps[1]), key, _inverse(key, eps[2])]
            query, key = (kept[0] * kept[1]).mul_(head_norms[0]), (kept[2] * kept[3]).mul_(head_norms[1])
        query, key, value = (each.view(len(x), -1, width) for each in (query, key, heads[2]))
        found = _turned(query, turn, 1).to(low), _turned(key, turn, 1).to(low), value
        ctx.turn, ctx.low, ctx.scales = turn, low, scales
        ctx.save_for_backward(x, weight, inverse, *head_norms, *weights, *given[8:], *kept)
        return x.view_as(x), *(
            each[places.start : places.start + places.count].index_select(0, places.grid)
            for places in turn.places
            for each in found
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_skip: Tensor, *gradients: Tensor) -> Any:
        """Places to tokens, back by the same angles, through the products and the norm."""
        x, weight, inverse, *given = ctx.saved_tensors
        head_norms, weights, adapters, kept = given[:2], given[2:5], _paired(given[5:11], ctx.scales), given[11:]
        learn = ctx.needs_input_grad[6:]
        turn: Turn = ctx.turn
        heads = [_live(gradients[number::3], turn.places) for number in range(3)]
        heads[:2] = (_turned(each.to(x.dtype), turn, -1) for each in heads[:2])
        d_head_norms: list[Weight] = [None, None]
        for number in range(2) if kept else ():
            state, own = kept[2 * number : 2 * number + 2]
            heads[number], d_head_norms[number] = _norm_backward(
                heads[number].view(state.shape), state * own, head_norms[number], own, learns=learn[1 + number]
            )
        flat = [low_rows(each.flatten(1), ctx.low) for each in heads]
        scaled = _scaled(x, inverse)
        inner = low_rows(_weighted(scaled, weight), ctx.low)
        d_weights = [_of_weight(dy, inner, w, learns) for dy, w, learns in zip(flat, weights, learn[3:6], strict=True)]
        d_biases = [
            dy.sum(dim=0, dtype=x.dtype) if learns else None for dy, learns in zip(flat, learn[6:9], strict=True)
        ]
        d_pairs = [
            d
            for dy, adapter, learns in zip(flat, adapters, learn[9::2], strict=True)
            for d in _of_adapter(dy, inner, adapter, learns)
        ]
        d_inner = _of_input(flat, weights, adapters, x.dtype)[: len(x)]
        d_x, d_weight = _norm_backward(d_inner, scaled, weight, inverse, learns=learn[0], beside=d_skip)
        return None, None, None, None, None, d_x, d_weight, *d_head_norms, *d_weights, *d_biases, *d_pairs


class _After(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: Sequence[float],
        low: torch.dtype,
        scales: Sequence[float],
        places: Sequence[Places],
        chosen: Tensor | None,
        activation: Activation,
        skip: Tensor,
        weight: Weight,
        after_attention: Weight,
        after_mlp: Weight,
        out: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        *given: Any,
    ) -> Tensor:
        pairs, rectangles = given[:8], given[8:]
        on_out, on_gate, on_up, on_down = _paired(pairs, scales)
        seen = _live(rectangles, places).flatten(1)
        if chosen is not None:
            seen, skip = seen.index_select(0, chosen), skip.index_select(0, chosen)
        middle, *attended = _joined(skip, low_rows(seen, low), out, on_out, after_attention, eps[1])
        inverse = None if weight is None else _inverse(middle, eps[0])
        inner = low_rows(_normal(middle, weight, inverse), low)
        gates, ups = _linear(inner, gate, adapter=on_gate), _linear(inner, up, adapter=on_up)
        total, *made = _joined(middle, activation.of(gates).mul_(ups), down, on_down, after_mlp, eps[2])
        ctx.places, ctx.chosen, ctx.low, ctx.scales, ctx.activation = places, chosen, low, scales, activation
        norms = weight, inverse, after_attention, *attended, after_mlp, *made
        ctx.save_for_backward(middle, *norms, out, gate, up, down, gates, ups, *pairs, *rectangles)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Apply d up = dh a(g),  d gate = dh u a'(g) of h = a(g) u; then the norm, and the product of attention."""
        middle, weight, inverse, after_attention, attended, of_attended, *others = ctx.saved_tensors
        after_mlp, made, of_made, out, gate, up, down, gates, ups, *given = others
        rectangles, (on_out, on_gate, on_up, on_down) = given[8:], _paired(given[:8], ctx.scales)
        learn, dtype = ctx.needs_input_grad[7:], middle.dtype
        learns_norms, learns, to_adapters = learn[:3], learn[3:7], learn[7:15:2]
        d_made, d_after_mlp = _norm_backward(
            gradient, _scaled(made, of_made), after_mlp, of_made, learns=learns_norms[2]
        )
        activated, d_low = ctx.activation.of(gates), low_rows(d_made, ctx.low)
        hidden = activated * ups if learns[3] or to_adapters[3] else None
        d_down = _of_weight(d_low, hidden, down, learns[3])
        d_on_down = _of_adapter(d_low, hidden, on_down, to_adapters[3])
        d_hidden = _of_input([d_low], [down], [on_down], ctx.low)
        d_ups = activated.mul_(d_hidden)
        d_gates = ctx.activation.back(d_hidden.mul_(ups), gates)
        scaled = _scaled(middle, inverse)
        inner = low_rows(_weighted(scaled, weight), ctx.low)
        d_gate, d_up = _of_weight(d_gates, inner, gate, learns[1]), _of_weight(d_ups, inner, up, learns[2])
        d_on_gate = _of_adapter(d_gates, inner, on_gate, to_adapters[1])
        d_on_up = _of_adapter(d_ups, inner, on_up, to_adapters[2])
        d_inner = _of_input([d_gates, d_ups], [gate, up], [on_gate, on_up], dtype)[: len(middle)]
        d_middle, d_weight = _norm_backward(d_inner, scaled, weight, inverse, learns=learns_norms[0], beside=gradient)
        d_attended, d_after_attention = _norm_backward(
            d_middle, _scaled(attended, of_attended), after_attention, of_attended, learns=learns_norms[1]
        )
        d_low, rows = low_rows(d_attended, ctx.low), sum(p.count for p in ctx.places)
        seen = None
        if learns[0] or to_adapters[0]:
            seen = _live(rectangles, ctx.places).flatten(1)
            seen = low_rows(seen if ctx.chosen is None else seen.index_select(0, ctx.chosen), ctx.low)
        d_out, d_on_out = _of_weight(d_low, seen, out, learns[0]), _of_adapter(d_low, seen, on_out, to_adapters[0])
        d_seen = _of_input([d_low], [out], [on_out], ctx.low)[: len(middle)]
        if ctx.chosen is not None:  # a prompt's last token chooses the first of each of its completions
            d_seen = d_seen.new_zeros(rows, d_seen.shape[1]).index_add_(0, ctx.chosen, d_seen)
            d_middle = d_middle.new_zeros(rows, d_middle.shape[1]).index_add_(0, ctx.chosen, d_middle)
        d_rectangles = [_placed(d_seen, each, p) for each, p in zip(rectangles, ctx.places, strict=True)]
        d_weights = d_middle, d_weight, d_after_attention, d_after_mlp, d_out, d_gate, d_up, d_down
        d_pairs = *d_on_out, *d_on_gate, *d_on_up, *d_on_down
        return None, None, None, None, None, None, *d_weights, *d_pairs, *d_rectangles


def _taken_apart(norms: Sequence[Norm | None]) -> tuple[list[float], list[Weight]]:
    """Return the epsilons and weights of norms; 0 and None where there is none."""
    return [0.0 if norm is None else norm.eps for norm in norms], [None if norm is None else norm[0] for norm in norms]


def _flattened(adapters: Sequence[Adapter]) -> tuple[list[float], list[Weight]]:
    """Take adapters apart for an autograd function: their scales; A and B of each, None where there is none."""
    scales = [0.0 if adapter is None else adapter.scale for adapter in adapters]
    pairs = [(None, None) if adapter is None else (adapter.down, adapter.up) for adapter in adapters]
    return scales, [weight for pair in pairs for weight in pair]


def _paired(pairs: Sequence[Weight], scales: Sequence[float]) -> list[Adapter]:
    """Undo `_flattened`."""
    return [
        None if down is None or up is None else LowRank(down, up, scale)
        for down, up, scale in zip(pairs[::2], pairs[1::2], scales, strict=True)
    ]


def _linear(
    x: Float[Tensor, "N D"], weight: Weight, bias: Weight = None, adapter: Adapter = None
) -> Float[Tensor, "N E"]:
    """Compute x (W + scale B A)^T + b in the dtype of x."""
    assert weight is not None
    product = functional.linear(x, low_weight(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    return product if adapter is None else _add_low_rank(product, x, adapter)


def _add_low_rank(product: Float[Tensor, "M E"], x: Float[Tensor, "N D"], adapter: LowRank) -> Float[Tensor, "M E"]:
    """Add scale x A^T B^T to `product` in place, the first M rows of it."""
    inner = functional.linear(x, low_weight(adapter.down, x.dtype))[: len(product)]
    if inner.dtype == product.dtype:
        return product.addmm_(inner, low_weight(adapter.up, x.dtype).t(), alpha=adapter.scale)
    return product.add_(functional.linear(inner, low_weight(adapter.up, x.dtype)), alpha=adapter.scale)


def _plus(
    skip: Float[Tensor, "N D"], x: Float[Tensor, "M E"], weight: Float[Tensor, "D E"], adapter: Adapter
) -> Float[Tensor, "N D"]:
    """Add `skip` and the first N rows of the product, inside the product where both are of one dtype (M = N)."""
    total = torch.addmm(skip, x, weight.t()) if x.dtype == skip.dtype else skip + _linear(x, weight)[: len(skip)]
    return total if adapter is None else _add_low_rank(total, x, adapter)


def _joined(
    skip: Float[Tensor, "N D"],
    x: Float[Tensor, "M E"],
    weight: Float[Tensor, "D E"],
    adapter: Adapter,
    norm: Weight,
    eps: float,
) -> tuple[Tensor, Weight, Weight]:
    """Add `skip` and the product, or its norm; with what the norm keeps: the product and its inverse length."""
    if norm is None:
        return _plus(skip, x, weight, adapter), None, None
    product = _linear(x, weight, adapter=adapter)[: len(skip)].to(skip.dtype)
    inverse = _inverse(product, eps)
    return torch.addcmul(skip, product * inverse, norm), product, inverse


def _of_input(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], adapters: Sequence[Adapter], dtype: torch.dtype
) -> Float[Tensor, "N D"]:
    """Compute sum dy (W + scale B A), added up in `dtype`."""
    total = (gradients[0] @ low_weight(weights[0], gradients[0].dtype)).to(dtype)
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        if gradient.dtype == dtype:
            total.addmm_(gradient, weight)
        else:
            total += gradient @ low_weight(weight, gradient.dtype)
    for gradient, adapter in zip(gradients, adapters, strict=True):
        if adapter is not None:
            up, down = (low_weight(each, gradient.dtype) for each in (adapter.up, adapter.down))
            total += (gradient @ up).mul_(adapter.scale) @ down
    return total


def _of_weight(gradient: Tensor, x: Weight, weight: Tensor, learns: bool) -> Weight:
    """Compute dy^T x in the dtype of the weight."""
    if not learns:
        return None
    assert x is not None
    return (gradient.t() @ x).to(weight.dtype)


def _of_adapter(gradient: Tensor, x: Weight, adapter: Adapter, learns: bool) -> tuple[Weight, Weight]:
    """Compute the gradients of A, scale (dy B)^T x, and of B, scale dy^T (x A^T)."""
    if adapter is None or not learns:
        return None, None
    assert x is not None
    outer = (gradient @ low_weight(adapter.up, gradient.dtype)).mul_(adapter.scale)
    inner = functional.linear(x, low_weight(adapter.down, x.dtype)).mul_(adapter.scale)
    return (outer.t() @ x).to(adapter.down.dtype), (gradient.t() @ inner).to(adapter.up.dtype)


def _placed(d_seen: Float[Tensor, "N E"], rectangle: Tensor, where: Places) -> Tensor:
    """The gradient of a rectangle: zero at dead places."""
    own = d_seen[where.start : where.start + where.count].view(-1, *rectangle.shape[1:])
    return rectangle.new_zeros(rectangle.shape).index_copy_(0, where.back, own)


def _live(rectangles: Sequence[Tensor], places: Sequence[Places]) -> Float[Tensor, "N H d"]:
    """The tokens at their places, end to end."""
    found = [each.index_select(0, p.back) for each, p in zip(rectangles, places, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _inverse(x: Float[Tensor, "*shape D"], eps: float) -> Float[Tensor, "*shape 1"]:
    """1 / sqrt(mean(x²) + eps)."""
    square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return square.div_(x.shape[-1]).add_(eps).rsqrt_()


def _normal(x: Float[Tensor, "*shape D"], weight: Weight, inverse: Weight) -> Float[Tensor, "*shape D"]:
    """Norm x; x itself where there is no norm."""
    return x if weight is None or inverse is None else (x * inverse).mul_(weight)


def _scaled(x: Any, inverse: Weight) -> Any:
    """Norm x without the weight; x itself where there is no norm."""
    return x if inverse is None else x * inverse


def _weighted(scaled: Float[Tensor, "*shape D"], weight: Weight) -> Float[Tensor, "*shape D"]:
    return scaled if weight is None else scaled * weight


def _norm_backward(
    gradient: Tensor, scaled: Weight, weight: Weight, inverse: Weight, *, learns: bool, beside: Weight = None
) -> tuple[Tensor, Weight]:
    """Apply, with n = x / rms,  dx = (dy w - n mean(dy w n)) / rms,  dw = sum(dy n); `beside` is another gradient of x.

    Without a weight there is no norm: dx = dy.
    """
    if scaled is None or weight is None or inverse is None:
        return (gradient if beside is None else gradient + beside), None
    product = gradient * scaled
    d_weight = product.flatten(0, -2).sum(dim=0) if learns else None
    mean = (product @ weight).div_(-scaled.shape[-1])[..., None]
    d_x = torch.mul(gradient, weight, out=product).addcmul_(scaled, mean)
    return (d_x.mul_(inverse) if beside is None else torch.addcmul(beside, d_x, inverse, out=d_x)), d_weight


def _turned(heads: Float[Tensor, "N H d"], turn: Turn, way: int) -> Float[Tensor, "N H d"]:
    """Rotate the first 2 E numbers of each head; `way` is 1, or -1 for back.

    Their halves are the two coordinates of E planes. What is beyond them, in families that rotate a part, stays.
    """
    half = turn.cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(first, turn.cos, out=turned[..., :half]).addcmul_(second, turn.sin, value=-way)
    torch.mul(second, turn.cos, out=turned[..., half : 2 * half]).addcmul_(first, turn.sin, value=way)
    if rest.shape[-1]:
        turned[..., 2 * half :] = rest
    return turned

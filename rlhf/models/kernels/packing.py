"""Batches without padding: the live tokens of all rows end to end, each prompt once, with attention per row.

Linear layers and norms see live tokens only. Attention is causal and computed per row, so no token sees another row.
Rows of one prompt may share its tokens: each completion sees the prompt's keys, no completion sees another, and
positions count from the prompt's first token. The results are those of a padded rectangle, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from rlhf.models.kernels.cast import HALF_DTYPES
from rlhf.runtime.device import is_device_error
from rlhf.transfer import on_host, to_device

MATMUL_ATTENTION_MAX_KEYS = (
    256  # keys up to which 16-bit attention on a CPU is computed by plain products: benchmarks/NOTES.md
)
MIN_SHARED_FRACTION = 0.1  # prompts are shared where that saves at least this share of the tokens: measured


@dataclass(frozen=True)
class RectangleIndex:
    """The correspondence between tokens laid end to end and their places in a rectangle of rows."""

    start: int  # the first of these tokens, among all
    count: int
    grid: Int[Tensor, " RW"]  # the token at each place, row by row; an arbitrary one at dead places
    back: Int[Tensor, " K"]  # the place of each token
    shape: tuple[int, int]  # R, W


@dataclass(frozen=True)
class PackedBatch:
    """The tokens of a batch end to end: whole rows, or all distinct prompts and then all completions."""

    input_ids: Int[Tensor, "1 N"]
    position_ids: Int[Tensor, "1 N"]
    predictor_index: Int[Tensor, " M"]  # the token before each live completion token, in the order of completion_mask
    last: Int[Tensor, " B"]  # the last live token of each row
    first: RectangleIndex  # whole rows; prompts, where they are shared
    second: RectangleIndex | None  # completions, where prompts are shared
    prompt_of: Int[Tensor, " B"]  # the prompt of each completion
    mask: Bool[Tensor, "B 1 T PT"] | None  # which keys (the prompt's, then its own) a completion token sees
    longest: int  # tokens of the longest prompt with its completion


def pack(
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    share: bool = True,
) -> PackedBatch | None:
    """Lay out a batch without padding; return None where a row has no prompt, from which to predict its first token."""
    device = prompt_ids.device
    prompts = _live_tokens(prompt_ids, prompt_mask)
    completions = _live_tokens(completion_ids, completion_mask)
    if not all(len(prompt) for prompt in prompts):
        return None
    index_of: dict[tuple[int, ...], int] = {}
    prompt_of = [index_of.setdefault(tuple(prompt.tolist()), len(index_of)) for prompt in prompts]
    distinct = [torch.tensor(tokens) for tokens in index_of]
    prompt_tokens = sum(map(len, prompts))
    total = prompt_tokens + sum(map(len, completions))
    saved = prompt_tokens - sum(map(len, distinct))
    if share and saved >= MIN_SHARED_FRACTION * total:
        rows = _shared(distinct, completions, torch.tensor(prompt_of))
    else:
        rows = _whole(prompts, completions)
    return _to(rows, device)


def _live_tokens(rows: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> list[Tensor]:
    """Return the live tokens of each row, on the CPU."""
    return [tokens[live] for tokens, live in zip(on_host(rows), on_host(mask), strict=True)]


def pack_for(
    body: nn.Module,
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
) -> PackedBatch | None:
    """Lay out a batch without padding for `body`; return None where the model or one of the rows needs padding."""
    if packing_unsupported_reason(body):
        return None
    rows = pack(prompt_ids, prompt_mask, completion_ids, completion_mask)
    return rows if rows is not None and fits_window(body, rows) else None


def _whole(prompts: list[Tensor], completions: list[Tensor]) -> PackedBatch:
    lengths = torch.tensor([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])
    starts = lengths.cumsum(0) - lengths
    choosers = [
        int(start) + len(p) - 1 + torch.arange(len(c)) for start, p, c in zip(starts, prompts, completions, strict=True)
    ]
    ids = torch.cat([tokens for pair in zip(prompts, completions, strict=True) for tokens in pair])
    return PackedBatch(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(int(n)) for n in lengths])[None],
        predictor_index=torch.cat(choosers),
        last=starts + lengths - 1,
        first=_places(lengths, 0),
        second=None,
        prompt_of=torch.arange(len(prompts)),
        mask=None,
        longest=int(lengths.max()),
    )


def _shared(prompts: list[Tensor], completions: list[Tensor], prompt_of: Int[Tensor, " B"]) -> PackedBatch:
    p_lengths, c_lengths = torch.tensor([len(p) for p in prompts]), torch.tensor([len(c) for c in completions])
    first = _places(p_lengths, 0)
    second = _places(c_lengths, first.count)
    ends = (p_lengths.cumsum(0) - 1)[prompt_of]  # the last token of each completion's prompt
    starts = first.count + c_lengths.cumsum(0) - c_lengths
    choosers = [
        torch.cat([end[None], start + torch.arange(int(n) - 1)]) if n else end[None][:0]
        for end, start, n in zip(ends, starts, c_lengths, strict=True)
    ]
    width, length = first.shape[1], second.shape[1]
    before = torch.arange(width) < p_lengths[prompt_of][:, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    rows = len(completions)
    return PackedBatch(
        input_ids=torch.cat([*prompts, *completions])[None],
        position_ids=torch.cat(
            [torch.arange(int(n)) for n in p_lengths]
            + [int(p_lengths[u]) + torch.arange(int(n)) for u, n in zip(prompt_of, c_lengths, strict=True)]
        )[None],
        predictor_index=torch.cat(choosers),
        last=torch.where(c_lengths > 0, starts + c_lengths - 1, ends),
        first=first,
        second=second,
        prompt_of=prompt_of,
        mask=torch.cat([before[:, None].expand(rows, length, width), causal.expand(rows, length, length)], dim=2)[
            :, None
        ],
        longest=int((p_lengths[prompt_of] + c_lengths).max()),
    )


def _places(lengths: Int[Tensor, " R"], start: int) -> RectangleIndex:
    width = max(int(lengths.max()), 1)
    live = torch.arange(width) < lengths[:, None]
    grid = torch.zeros(live.shape, dtype=torch.long)
    count = int(lengths.sum())
    grid[live] = torch.arange(count)
    return RectangleIndex(start, count, grid.reshape(-1), live.reshape(-1).nonzero().squeeze(1), (len(lengths), width))


def _to(rows: PackedBatch, device: torch.device) -> PackedBatch:
    """Move a layout to the device, all of its tensors at once."""
    if device.type == "cpu":
        return rows
    parts = [rows, rows.first] if rows.second is None else [rows, rows.first, rows.second]
    tensors = [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]
    moved = iter(to_device(tensors, device))

    def move(part: Any) -> Any:
        named = {name: next(moved) for name, value in vars(part).items() if isinstance(value, Tensor)}
        return replace(part, **named)

    whole, first, *second = (move(part) for part in parts)
    layout: PackedBatch = replace(whole, first=first, second=second[0] if second else None)
    return layout


class _ToRectangle(torch.autograd.Function):
    """Tokens to places. A dead place holds an arbitrary token, which no live one sees and whose output nobody reads."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, grid: Tensor, back: Tensor) -> Tensor:
        """Return tokens[grid]."""
        ctx.save_for_backward(back)
        return tokens.index_select(0, grid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Read each token's gradient at its only live place: no sum is needed."""
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None


class _FromRectangle(torch.autograd.Function):
    """Places back to tokens, end to end."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, back: Tensor) -> Tensor:
        """Return places[back]."""
        ctx.save_for_backward(back)
        ctx.shape = places.shape
        return places.index_select(0, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient at each place; zero at dead ones."""
        (back,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy_(0, back, gradient), None


def _to_rectangle(states: Float[Tensor, "1 H N d"], places: RectangleIndex) -> Float[Tensor, "R H W d"]:
    tokens = states[0].transpose(0, 1)[places.start : places.start + places.count]
    flat: Tensor = _ToRectangle.apply(tokens, places.grid, places.back)  # type: ignore[no-untyped-call]
    return flat.view(*places.shape, *flat.shape[1:]).transpose(1, 2)


def _from_rectangle(states: Float[Tensor, "R H W d"], places: RectangleIndex) -> Float[Tensor, "K H d"]:
    flat = states.transpose(1, 2).flatten(0, 1)
    tokens: Tensor = _FromRectangle.apply(flat, places.back)  # type: ignore[no-untyped-call]
    return tokens


def packed_attention(
    query: Float[Tensor, "1 H N d"],
    key: Float[Tensor, "1 K N d"],
    value: Float[Tensor, "1 K N d"],
    *,
    rows: PackedBatch,
    scale: float | None,
) -> Float[Tensor, "1 N H d"]:
    """Compute causal attention within each row."""
    first = [_to_rectangle(states, rows.first) for states in (query, key, value)]
    second = [_to_rectangle(states, rows.second) for states in (query, key, value)] if rows.second is not None else []
    attended = rectangle_attention(rows, first, second, scale=scale)
    places = [rows.first] if rows.second is None else [rows.first, rows.second]
    return torch.cat([_from_rectangle(states, where) for states, where in zip(attended, places, strict=True)])[None]


def rectangle_attention(
    rows: PackedBatch, first: Sequence[Tensor], second: Sequence[Tensor], *, scale: float | None
) -> list[Float[Tensor, "R H W d"]]:
    """Compute attention in rectangles of query, key and value: whole rows, or prompts and (`second`) completions."""
    groups = first[0].shape[1] // first[1].shape[1]
    attended = [_attention(*first, groups=groups, mask=None, scale=scale)]
    if second:
        keys, values = (
            torch.cat([prompts.index_select(0, rows.prompt_of), completions], dim=2)
            for prompts, completions in zip(first[1:], second[1:], strict=True)
        )
        attended.append(_attention(second[0], keys, values, groups=groups, mask=rows.mask, scale=scale))
    return attended


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *, groups: int, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Compute attention of each head over its group's keys, causal or as `mask` says."""
    on_cpu = query.device.type == "cpu"
    if on_cpu and query.dtype in HALF_DTYPES and key.shape[2] <= MATMUL_ATTENTION_MAX_KEYS:
        return _attention_by_products(query, key, value, groups=groups, mask=mask, scale=scale)
    flash = not on_cpu and mask is None and query.dtype in HALF_DTYPES  # flash attention reads grouped keys
    if not on_cpu and not flash:  # with a mask or in float32, GPU kernels need a key for every head
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    attended: Tensor = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=(on_cpu or flash) and groups > 1,
    )
    return attended


def _attention_by_products(
    query: Float[Tensor, "R H W d"],
    key: Float[Tensor, "R K P d"],
    value: Float[Tensor, "R K P d"],
    *,
    groups: int,
    mask: Bool[Tensor, "R 1 W P"] | None,
    scale: float | None,
) -> Float[Tensor, "R H W d"]:
    """Compute attention by two batched products, with the heads of a group as rows of one matrix.

    softmax(scale Q K^T) V, for short rows in 16 bits on a CPU, where the backward pass of torch's own kernel takes
    three times as long.
    """
    rows, heads, width, dim = query.shape
    scaled = (query * (dim**-0.5 if scale is None else scale)).reshape(rows, heads // groups, groups * width, dim)
    scores = torch.matmul(scaled, key.transpose(2, 3)).view(rows, heads // groups, groups, width, -1)
    visible = mask[:, :, None] if mask is not None else _causal(width, query.device)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).view(rows, heads // groups, groups * width, -1)
    return torch.matmul(weights, value).view(rows, heads, width, dim)


def _causal(width: int, device: torch.device) -> Bool[Tensor, "W W"]:
    return torch.ones(width, width, dtype=torch.bool, device=device).tril()


IGNORED_KWARGS = {
    "position_ids",
    "use_cache",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "logits_to_keep",
}


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    rows: PackedBatch | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention over `rows` without padding; without `rows`, as transformers' own `sdpa` does.

    A window that no row outgrows hides nothing and is ignored.

    Raises:
        NotImplementedError: the model asks for something that is not supported without padding: a bias, a cap, a window
            shorter than a row.
    """
    if rows is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
        )
        return output
    _check_window(rows, more.pop("sliding_window", None))
    unsupported = sorted(name for name, value in more.items() if name not in IGNORED_KWARGS and value is not None)
    if unsupported or dropout or is_causal is False or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"attention with {', '.join(unsupported) or 'dropout, or not causal'}")
    return packed_attention(query, key, value, rows=rows, scale=scaling), None


def _check_window(rows: PackedBatch, window: int | None) -> None:
    if window is not None and window < rows.longest:
        raise NotImplementedError(f"attention with a window of {window}")


AttentionInterface.register("sdpa", _sdpa)  # by name, so that recomputed layers find the rows too


def packed_inputs(rows: PackedBatch) -> dict[str, Any]:
    """Return a model's keyword arguments; the mask is a dummy with four axes, which is passed on and never read."""
    return {
        "input_ids": rows.input_ids,
        "position_ids": rows.position_ids,
        "attention_mask": rows.input_ids.new_zeros(1, 1, 1, 1, dtype=torch.float32),
        "use_cache": False,
        "rows": rows,
    }


# Tried once for each model and mode: with dropout a model is another one in training.
_REASONS: WeakKeyDictionary[nn.Module, dict[bool, str]] = WeakKeyDictionary()
PROBE_TOKENS = [[3, 1, 4, 1, 5], [2, 6, 5], [3, 1, 4, 1, 5], [7, 3]], [[9, 2, 6], [5, 3, 5, 8], [9, 7], [9]]
PROBE_RTOL = 1e-4  # of a row's largest hidden value: differences up to this are rounding in any model
PROBE_ROUNDINGS = 32  # so are differences up to this many times what one rounding of the embeddings causes
PROBE_MAX_RTOL = (
    1e-2  # but none above this: a token that sees another row, a wrong angle or a lost layer is farther off
)


def packing_unsupported_reason(body: nn.Module) -> str:
    """Explain why rows of `body` (a transformer without its head) must be padded; empty where they need not be.

    Tried on a few rows: the hidden states of each must be the ones that it has when computed alone.
    """
    reasons = _REASONS.setdefault(body, {})
    if body.training not in reasons:
        reasons[body.training] = _find_unsupported_reason(body)
    return reasons[body.training]


@torch.no_grad()
def _find_unsupported_reason(body: nn.Module) -> str:
    name, config = type(body).__name__, getattr(body, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return f"{name} does not use sdpa attention"
    if getattr(config, "attention_chunk_size", None):
        return f"{name} attends in chunks"
    try:
        with autocast_off(body):
            probe = build_probe(body)
            states = [body(**packed_inputs(rows)).last_hidden_state[0][rows.predictor_index] for rows in probe.layouts]
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_device_error(error):
            raise
        return f"{name} cannot do without padding ({error})"
    if not all(probe.matches(hidden) for hidden in states):
        return f"rows of {name} without padding give other numbers"
    return ""


def fits_window(body: nn.Module, rows: PackedBatch) -> bool:
    """Check whether every row fits into the attention window, so that the window hides nothing."""
    window = getattr(getattr(body, "config", None), "sliding_window", None)
    return window is None or rows.longest <= window


def autocast_off(body: nn.Module) -> AbstractContextManager[None]:
    """Return a context without autocast: a trial checks what is computed, not its rounding to 16 bits."""
    return torch.autocast(next(body.parameters()).device.type, enabled=False)


@dataclass(frozen=True)
class Probe:
    """A few rows to try a pass on, the body's hidden states for each alone, and how far rounding may move them."""

    layouts: Sequence[PackedBatch]  # whole rows, and the same rows with the prompt of two of them shared
    expected: Float[Tensor, "M D"]  # hidden states that predict tokens, in the order of Rows.choosers
    tolerance: Float[Tensor, "M 1"]

    def matches(self, states: Float[Tensor, "M D"]) -> bool:
        """Check whether `states` are the expected ones to rounding; NaN matches nothing."""
        return bool(((states - self.expected).abs() <= self.tolerance).all())


def build_probe(body: nn.Module) -> Probe:
    """Compute a probe of `body`: the expected hidden states of a few rows, with tolerances.

    Deep trained models amplify rounding, some rows a hundred times more than others. How much is measured: each row is
    computed again with its embeddings moved by one unit in the last place.
    """
    prompts, completions = _probe_tokens(body)
    device = next(body.parameters()).device
    expected, tolerance = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids, chosen = torch.cat([prompt, completion])[None].to(device), slice(len(prompt) - 1, -1)
        states = body(input_ids=ids, use_cache=False).last_hidden_state[0]
        with _moved_embeddings(body):
            moved = body(input_ids=ids, use_cache=False).last_hidden_state[0]
        largest = float(states.abs().max())
        limit = max(
            PROBE_RTOL * largest, min(PROBE_ROUNDINGS * float((moved - states).abs().max()), PROBE_MAX_RTOL * largest)
        )
        expected.append(states[chosen])
        tolerance.append(states.new_full((len(completion), 1), limit))
    layouts = _whole(prompts, completions), _shared(prompts[:2] + prompts[3:], completions, torch.tensor([0, 1, 0, 2]))
    return Probe([_to(rows, device) for rows in layouts], torch.cat(expected), torch.cat(tolerance))


@contextmanager
def _moved_embeddings(body: nn.Module) -> Iterator[None]:
    """Move each embedding value up or down by one unit in the last place within this context."""

    def move(_: nn.Module, __: Any, states: Tensor) -> Tensor:
        signs = torch.where(torch.arange(states.numel(), device=states.device) % 3 == 0, -1.0, 1.0).view_as(states)
        return states * (1 + signs * torch.finfo(states.dtype).eps).to(states.dtype)

    hook = body.get_input_embeddings().register_forward_hook(move)  # type: ignore[operator]
    try:
        yield
    finally:
        hook.remove()


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of rows of the input embedding, which an adapter may wrap."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    return int(getattr(embeddings, "base_layer", embeddings).num_embeddings)


def _probe_tokens(body: nn.Module) -> list[list[Int[Tensor, " L"]]]:
    """Return tokens from the middle of the vocabulary, which are text; the first and last are special or untrained."""
    vocabulary = vocabulary_size(body)
    return [[(torch.tensor(row) + vocabulary // 2) % vocabulary for row in side] for side in PROBE_TOKENS]

"""Batches without padding: the live tokens of all rows end to end, each prompt once, with attention per row.

Linear layers and norms see live tokens only. Attention is causal and computed per row, so no token sees another row.
Rows of one prompt may share its tokens: each completion sees the prompt's keys, no completion sees another, and
positions count from the prompt's first token. The results equal a padded rectangle's, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from rlhf.batching import on_host, to_device
from rlhf.models.kernels.attention import (
    PackedBatch,
    RectangleIndex,
    RectangleLayout,
    VarlenLayout,
    packed_attention,
    shared_runs,
    whole_runs,
)
from rlhf.models.kernels.cast import HALF_DTYPES
from rlhf.models.kernels.quantized import compute_dtype
from rlhf.models.text_config import text_config
from rlhf.runtime.device import exact_products, is_device_error

LAYOUT_PARTS = (PackedBatch, RectangleLayout, RectangleIndex, VarlenLayout)
MIN_SHARED_FRACTION = 0.1  # prompts are shared if that saves at least this share of the tokens: measured


def pack_rows(
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    varlen: bool = False,
) -> PackedBatch | None:
    """Lay out a batch without padding; return None if a row has no prompt, from which to predict its first token.

    A prompt is laid out once for all its rows if that saves enough. `varlen` lays rows out for the kernel that takes
    rows of any length (see rlhf.models.kernels.attention), and not for rectangles.
    """
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
    if saved >= MIN_SHARED_FRACTION * total:
        rows = _shared(distinct, completions, torch.tensor(prompt_of), varlen=varlen)
    else:
        rows = _whole(prompts, completions, varlen=varlen)
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
    """Lay out a batch without padding for `body`; return None if the model or one of the rows needs padding."""
    if packing_unsupported_reason(body):
        return None
    varlen = prompt_ids.device.type == "cuda" and takes_varlen(body)
    rows = pack_rows(prompt_ids, prompt_mask, completion_ids, completion_mask, varlen=varlen)
    return rows if rows is not None and fits_window(body, rows) else None


def _whole(prompts: list[Tensor], completions: list[Tensor], *, varlen: bool = False) -> PackedBatch:
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
        longest=int(lengths.max()),
        layout=whole_runs(lengths.tolist())
        if varlen
        else RectangleLayout(_places(lengths, 0), None, torch.arange(len(prompts)), None),
    )


def _shared(
    prompts: list[Tensor], completions: list[Tensor], prompt_of: Int[Tensor, " B"], *, varlen: bool = False
) -> PackedBatch:
    p_lengths, c_lengths = torch.tensor([len(p) for p in prompts]), torch.tensor([len(c) for c in completions])
    ends = (p_lengths.cumsum(0) - 1)[prompt_of]  # the last token of each completion's prompt
    starts = p_lengths.sum() + c_lengths.cumsum(0) - c_lengths
    choosers = [
        torch.cat([end[None], start + torch.arange(int(n) - 1)]) if n else end[None][:0]
        for end, start, n in zip(ends, starts, c_lengths, strict=True)
    ]
    return PackedBatch(
        input_ids=torch.cat([*prompts, *completions])[None],
        position_ids=torch.cat(
            [torch.arange(int(n)) for n in p_lengths]
            + [int(p_lengths[u]) + torch.arange(int(n)) for u, n in zip(prompt_of, c_lengths, strict=True)]
        )[None],
        predictor_index=torch.cat(choosers),
        last=torch.where(c_lengths > 0, starts + c_lengths - 1, ends),
        longest=int((p_lengths[prompt_of] + c_lengths).max()),
        layout=shared_runs(p_lengths.tolist(), c_lengths.tolist(), prompt_of.tolist())
        if varlen
        else _shared_rectangles(p_lengths, c_lengths, prompt_of),
    )


def _shared_rectangles(
    p_lengths: Int[Tensor, " U"], c_lengths: Int[Tensor, " B"], prompt_of: Int[Tensor, " B"]
) -> RectangleLayout:
    first = _places(p_lengths, 0)
    second = _places(c_lengths, first.count)
    width, length, rows = first.shape[1], second.shape[1], len(c_lengths)
    before = torch.arange(width) < p_lengths[prompt_of][:, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.cat([before[:, None].expand(rows, length, width), causal.expand(rows, length, length)], dim=2)
    return RectangleLayout(first, second, prompt_of, mask[:, None])


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
    moved = iter(to_device(list(_tensors(rows)), device))

    def move(part: Any) -> Any:
        if isinstance(part, Tensor):
            return next(moved)
        if isinstance(part, LAYOUT_PARTS):
            return replace(part, **{name: move(value) for name, value in vars(part).items()})
        return part

    layout: PackedBatch = move(rows)
    return layout


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, LAYOUT_PARTS):
        for value in vars(part).values():
            yield from _tensors(value)


IGNORED_KWARGS = {
    "position_ids",
    "use_cache",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "logits_to_keep",
    "output_router_logits",
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
    """Compute attention over `rows` without padding; without `rows`, like transformers' own `sdpa`.

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
PROBE_ROUNDINGS = 32  # so are differences up to this many times the effect of one rounding of the embeddings
PROBE_MAX_RTOL = (
    1e-2  # but none above this: a token that sees another row, a wrong angle or a lost layer is farther off
)


def packing_unsupported_reason(body: nn.Module) -> str:
    """Explain why rows of `body` (a transformer without its head) must be padded; empty if they need not be.

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
    if getattr(config, "output_router_logits", False):
        return f"{name} computes a loss of its router from a padded rectangle"
    try:
        with full_precision(body):
            probe = build_probe(body)
            states = [body(**packed_inputs(rows)).last_hidden_state[0][rows.predictor_index] for rows in probe.layouts]
    except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_device_error(error):
            raise
        return f"{name} cannot do without padding ({error})"
    if not all(probe.matches(hidden) for hidden in states):
        return f"rows of {name} without padding give other numbers"
    return ""


_VARLEN_REASONS: WeakKeyDictionary[nn.Module, dict[tuple[bool, torch.dtype], str]] = WeakKeyDictionary()
VARLEN_MAX_ERROR = 2.0  # of rows of any length, in multiples of the error of rectangles in the same 16 bits


def takes_varlen(body: nn.Module) -> bool:
    """Return whether rows of `body` on a GPU are laid out for attention in 16 bits over rows of any length."""
    dtype = compute_dtype(next(body.parameters()))
    return dtype in HALF_DTYPES and not varlen_unsupported_reason(body, dtype)


def varlen_unsupported_reason(body: nn.Module, dtype: torch.dtype) -> str:
    """Explain why attention of `body` stays in rectangles when it computes in `dtype`; empty if it need not.

    Tried on a few rows: hidden states, and gradients if weights are whole, must be as near to the ones in the
    weights' own dtype as by rectangles in `dtype`. Kernels, cards and head sizes that are not supported fail here.
    """
    reasons = _VARLEN_REASONS.setdefault(body, {})
    if (body.training, dtype) not in reasons:
        reasons[body.training, dtype] = _find_varlen_reason(body, dtype)
    return reasons[body.training, dtype]


def _find_varlen_reason(body: nn.Module, dtype: torch.dtype) -> str:
    name, device = type(body).__name__, next(body.parameters()).device
    prompts, completions = probe_tokens(body)
    prompt_of = torch.tensor([0, 1, 0, 2])
    try:
        for is_shared in (False, True):
            by_rectangles, by_runs = (
                _to(
                    _shared(prompts[:2] + prompts[3:], completions, prompt_of, varlen=varlen)
                    if is_shared
                    else _whole(prompts, completions, varlen=varlen),
                    device,
                )
                for varlen in (False, True)
            )
            with full_precision(body):
                exact = _states_and_gradient(body, by_rectangles)
            with torch.autocast(device.type, dtype=dtype):
                known, tried = (_states_and_gradient(body, rows) for rows in (by_rectangles, by_runs))
            for right, rectangle, run in zip(exact, known, tried, strict=True):
                if not _error(run, right) <= VARLEN_MAX_ERROR * _error(rectangle, right):
                    return f"attention of {name} stays in rectangles: over rows of any length it gave other numbers"
    except (NotImplementedError, RuntimeError, TypeError, ValueError, ImportError, AttributeError) as error:
        if is_device_error(error):
            raise
        return f"attention of {name} stays in rectangles: flash attention over rows of any length failed ({error})"
    return ""


def _states_and_gradient(body: nn.Module, rows: PackedBatch) -> list[Tensor]:
    """Return the hidden states that predict tokens and, if weights are whole, a gradient of the embeddings."""
    if any(hasattr(parameter, "ds_id") for parameter in body.parameters()):
        with torch.no_grad():
            return [body(**packed_inputs(rows)).last_hidden_state[0][rows.predictor_index]]
    embedded: list[Tensor] = []

    def keep(_: nn.Module, __: Any, states: Tensor) -> Tensor:
        embedded.append(states.detach().requires_grad_())
        return embedded[0]

    hook = body.get_input_embeddings().register_forward_hook(keep)  # type: ignore[operator]
    try:
        with torch.enable_grad():
            states: Tensor = body(**packed_inputs(rows)).last_hidden_state[0][rows.predictor_index]
            weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype, device=states.device)
            return [states.detach(), *torch.autograd.grad((states * weights.view_as(states)).sum(), embedded)]
    finally:
        hook.remove()


def _error(states: Tensor, right: Tensor) -> float:
    return float((states.double() - right.double()).square().mean().sqrt())


def fits_window(body: nn.Module, rows: PackedBatch) -> bool:
    """Check whether every row fits into the attention window, so that the window hides nothing."""
    window = getattr(text_config(body), "sliding_window", None)
    return window is None or rows.longest <= window


@contextmanager
def full_precision(body: nn.Module) -> Iterator[None]:
    """Compute without autocast and TF32 within this context: a trial checks the computation, not its rounding.

    TF32 rounds the factors of a product to 10 bits, and not for every shape: a row alone and a row among others then
    differ by more than a mistake in a small model would.
    """
    device = next(body.parameters()).device
    with torch.autocast(device.type, enabled=False), exact_products(device):
        yield


@dataclass(frozen=True)
class PackingProbe:
    """A few rows to try a pass on, the body's hidden states for each alone, and how far rounding may move them."""

    layouts: Sequence[PackedBatch]  # whole rows, and the same rows with the prompt of two of them shared
    expected: Float[Tensor, "M D"]  # hidden states that predict tokens, in the order of Rows.choosers
    tolerance: Float[Tensor, "M 1"]

    def matches(self, states: Float[Tensor, "M D"]) -> bool:
        """Check whether `states` are the expected ones to rounding; NaN matches nothing."""
        return bool(((states - self.expected).abs() <= self.tolerance).all())


def build_probe(body: nn.Module) -> PackingProbe:
    """Compute a probe of `body`: the expected hidden states of a few rows, with tolerances.

    Deep trained models amplify rounding, some rows a hundred times more than others. How much is measured: each row is
    computed again with its embeddings moved by one unit in the last place.
    """
    prompts, completions = probe_tokens(body)
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
    return PackingProbe([_to(rows, device) for rows in layouts], torch.cat(expected), torch.cat(tolerance))


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


def probe_tokens(body: nn.Module) -> list[list[Int[Tensor, " L"]]]:
    """Return tokens from the middle of the vocabulary, which are text; the first and last are special or untrained."""
    vocabulary = vocabulary_size(body)
    return [[(torch.tensor(row) + vocabulary // 2) % vocabulary for row in side] for side in PROBE_TOKENS]

"""How much of the change by training survives when weights are rounded to a dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.models.dither import SAMPLE, count_distances, dither, is_uneven, spread
from rlhf.models.weight_files import READ_AS_THEY_ARE, WeightFiles

CHUNK = 2**22  # elements that are compared at a time: 32 MB in float64


def lost_change(
    start: WeightFiles,
    trained: Mapping[str, Tensor],
    targets: Mapping[str, torch.dtype],
    names: Mapping[str, str],
    *,
    spreads: bool = False,
) -> float | None:
    """Compute the share of training's change that rounding takes away, at least 0 and at most 1.

    Of weights w that moved from the start weights w₀ it is ‖round(w) − w‖ / ‖w − w₀‖, all weights together. The share
    kept, 1 minus this, is a lower bound of the part of the change that survives in its own direction: by Cauchy and
    Schwarz, ⟨round(w) − w₀, w − w₀⟩ / ‖w − w₀‖² ≥ 1 − ‖round(w) − w‖ / ‖w − w₀‖.

    Of weights that are nearer to s, w₀ with its matrices as a run in bfloat16 begins with them, it is 1 − ⟨round(w) −
    w₀, w − s⟩ / ‖w − s‖²: what rounding adds is noise around the change. So it is if rounding `spreads`. Either is 1 if
    every weight is rounded back to its start. Without any change nothing can be lost. The start weights are read from
    their files a piece at a time.

    Args:
        start: the weights that the run started from.
        trained: the trained weights.
        targets: the dtype of each weight to be written.
        names: the name of each trained weight in `start`; a weight that is new, such as a score head, has none.
        spreads: whether the weights are rounded by chance, as `round_to` does it.

    Returns:
        The share; None if a weight that rounding changes has no start.
    """
    if all(targets[name] == weight.dtype for name, weight in trained.items()):
        return 0.0
    plain, dithered = _Sums(), _Sums()
    start_is_spread = is_uneven(map(count_distances, _samples(start, names.values())))
    seen: set[str] = set()
    for name, weight in trained.items():
        if not weight.is_floating_point() or names.get(name) in seen:
            continue
        before = names.get(name)
        if before is None or not _is_comparable(start, before, weight):
            if not name.startswith(NEW_WEIGHTS) and not _is_exact(weight, targets[name]):
                return None
            continue
        seen.add(before)
        for first, now in _pieces(weight):
            stored = start.read(before, first, first + len(now))
            began = stored.float()
            if weight.ndim > 1 and not spreads:
                began = dither(spread(began, first=first) if start_is_spread else began, first=first)
            rounded = round_to(targets[name], now, spreads=spreads, first=first).double()
            plain.add(now, rounded, stored.double(), began=stored.double())
            dithered.add(now, rounded, stored.double(), began=began.double())
    if plain.lost == 0.0 or plain.changed == 0.0:
        return 0.0
    if dithered.changed < plain.changed or spreads:
        share = 1.0 - dithered.kept / dithered.changed if dithered.changed else 0.0
        return min(max(0.0, share), 1.0)  # of few weights noise may be larger than the change
    share = math.sqrt(plain.lost / plain.changed)
    return min(share, 1.0) if math.isfinite(share) else 1.0  # a weight beyond the dtype's range


def round_to(target: torch.dtype, numbers: Tensor, *, spreads: bool, first: int = 0) -> Tensor:
    """Convert numbers to a dtype; with `spreads` they are rounded up or down by chance, so that their mean stays.

    Args:
        target: the dtype; bfloat16 with `spreads`.
        numbers: some elements of a flattened weight, in float32 or float64.
        spreads: whether `spread` adds its offsets before.
        first: the index of the first element.
    """
    if not spreads:
        return numbers.to(target)
    rounded = torch.empty_like(numbers, dtype=target)
    for start in range(0, len(numbers), CHUNK):  # offsets take several times the memory of their numbers
        piece = numbers[start : start + CHUNK]
        rounded[start : start + CHUNK] = spread(piece.float(), first=first + start).to(target)
    return rounded


def are_uneven(trained: Mapping[str, Tensor]) -> bool:
    """Return whether float32 matrices are so near to a start in bfloat16 that rounding takes much of the training."""
    wide = (weight for weight in trained.values() if weight.ndim > 1 and weight.dtype == torch.float32)
    return is_uneven(count_distances(weight.detach().reshape(-1)[:SAMPLE].cpu()) for weight in wide)


def _samples(files: WeightFiles, names: Iterable[str]) -> Iterator[Tensor]:
    for name in dict.fromkeys(names):
        stored = files.describe(name)
        if stored.dtype == torch.float32 and len(stored.shape) > 1:
            yield files.read(name, 0, min(SAMPLE, math.prod(stored.shape)))


@dataclass
class _Sums:
    """Sums over the elements of all weights."""

    changed: float = 0.0  # (w − s)²
    kept: float = 0.0  # (round(w) − w₀)(w − s)
    lost: float = 0.0  # (round(w) − w)²

    def add(self, now: Tensor, rounded: Tensor, stored: Tensor, *, began: Tensor) -> None:
        moved = now - began
        self.changed += float(moved.square().sum())
        self.kept += float(((rounded - stored) * moved).sum())
        self.lost += float((rounded - now).square().sum())


NEW_WEIGHTS = ("score.",)  # the head of a reward model, which its start does not have


def _is_comparable(start: WeightFiles, name: str, weight: Tensor) -> bool:
    stored = start.describe(name)
    return stored.dtype in READ_AS_THEY_ARE and stored.shape == tuple(weight.shape)


def _is_exact(weight: Tensor, target: torch.dtype) -> bool:
    return target == weight.dtype or all(torch.equal(now.to(target).double(), now) for _, now in _pieces(weight))


def _pieces(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield parts of the flattened weight on the CPU in float64, each with the index of its first element."""
    flat = weight.detach().reshape(-1)
    for first in range(0, flat.numel(), CHUNK):
        yield first, flat[first : first + CHUNK].cpu().double()


def names_at_start(model: PreTrainedModel, trained: Mapping[str, Tensor], start: WeightFiles) -> dict[str, str]:
    """Map the trained weights of a model to their names in the files of its start.

    Files of older models have the names of the model without its head, and of tied weights only one is stored.
    """
    prefix = model.base_model_prefix
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    names = {}
    for name in trained:
        candidates = (
            candidate
            for known in (name, tied.get(name, name))
            for candidate in (known, f"{prefix}.{known}", known.removeprefix(f"{prefix}."))
        )
        known = next((candidate for candidate in candidates if candidate in start), None)
        if known is not None:
            names[name] = known
    return names

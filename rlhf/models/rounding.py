"""How much of the change by training survives when weights are rounded to a dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.models.dither import dither
from rlhf.models.weight_files import READ_AS_THEY_ARE, WeightFiles

CHUNK = 2**22  # elements that are compared at a time: 32 MB in float64


def lost_change(
    start: WeightFiles, trained: Mapping[str, Tensor], targets: Mapping[str, torch.dtype], names: Mapping[str, str]
) -> float | None:
    """Compute the share of training's change that rounding takes away, at least 0 and at most 1.

    It is 1 − ⟨round(w) − w₀, w − s⟩ / ‖w − s‖², all weights together: w are the trained weights, w₀ the start weights,
    and s are w₀ or `dither` of it, whichever is nearer to w. It is 0 if the rounded weights have moved as far as the
    trained ones in their direction, and 1 if every weight is rounded back to its start. Without any change nothing can
    be lost. The start weights are read from their files a piece at a time.

    Args:
        start: the weights that the run started from.
        trained: the trained weights.
        targets: the dtype of each weight to be written.
        names: the name of each trained weight in `start`; a weight that is new, such as a score head, has none.

    Returns:
        The share; None if a weight that rounding changes has no start.
    """
    if all(targets[name] == weight.dtype for name, weight in trained.items()):
        return 0.0
    kept = changed = 0.0
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
        part_kept, part_changed = _kept(start, before, weight, targets[name])
        kept, changed = kept + part_kept, changed + part_changed
    if changed == 0.0:
        return 0.0
    share = 1.0 - kept / changed
    return min(max(share, 0.0), 1.0) if math.isfinite(share) else 1.0  # a weight beyond the dtype's range


def _kept(start: WeightFiles, name: str, weight: Tensor, target: torch.dtype) -> tuple[float, float]:
    """Return ⟨round(w) − w₀, w − s⟩ and ‖w − s‖² of a weight."""
    sums = torch.zeros(2, 2, dtype=torch.float64)  # for s = w₀, and for s = dither(w₀)
    for first, now in _pieces(weight):
        stored = start.read(name, first, first + len(now))
        rounded = now if target == weight.dtype else now.to(target).double()
        for row, began in zip(sums, (stored, dither(stored.float(), first=first)), strict=True):
            moved = now - began.double()
            row += torch.stack([((rounded - stored.double()) * moved).sum(), moved.square().sum()])
    kept, changed = min(sums.tolist(), key=lambda row: row[1])
    return float(kept), float(changed)


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

"""How much of the change by training survives when weights are rounded to a dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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

    Of weights w that moved from the start weights w₀ it is ‖round(w) − w‖ / ‖w − w₀‖, all weights together. The share
    kept, 1 minus this, is a lower bound of the part of the change that survives in its own direction: by Cauchy and
    Schwarz, ⟨round(w) − w₀, w − w₀⟩ / ‖w − w₀‖² ≥ 1 − ‖round(w) − w‖ / ‖w − w₀‖.

    Of weights that are nearer to s, w₀ with its matrices as `dither` returns them, it is 1 − ⟨round(w) − w₀, w − s⟩ /
    ‖w − s‖²: what rounding adds is noise around the change. Either is 1 if every weight is rounded back to its start.
    Without any change nothing can be lost. The start weights are read from their files a piece at a time.

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
    plain, dithered = _Sums(), _Sums()
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
            spread = dither(stored.float(), first=first) if weight.ndim > 1 else stored
            rounded = now if targets[name] == weight.dtype else now.to(targets[name]).double()
            plain.add(now, rounded, stored.double(), began=stored.double())
            dithered.add(now, rounded, stored.double(), began=spread.double())
    if plain.lost == 0.0 or plain.changed == 0.0:
        return 0.0
    if dithered.changed < plain.changed:
        return max(0.0, 1.0 - dithered.kept / dithered.changed) if dithered.changed else 0.0
    share = math.sqrt(plain.lost / plain.changed)
    return min(share, 1.0) if math.isfinite(share) else 1.0  # a weight beyond the dtype's range


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

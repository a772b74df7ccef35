"""Prefix caching between the turns of an episode: the start that a row's prompt shares with its last one is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf.batching import to_device
from rlhf.models.backbone import CausalLM
from rlhf.sampling.fast.kv_cache import Layered, prefill


@dataclass(frozen=True)
class _Prefix:
    """A prompt that was read: its tokens, on the CPU, and its row in the keys and values of those read with it."""

    ids: Int[Tensor, " C"]
    layers: Layered  # left-padded
    row: int

    def begins(self, ids: Int[Tensor, " D"]) -> bool:
        """Return whether `ids` goes on after these tokens."""
        return len(ids) > len(self.ids) and torch.equal(ids[: len(self.ids)], self.ids)


class PrefixCache:
    """Reads prompts for a sampler; within `kept`, only the part of a row's prompt that follows its last prompt.

    A row is known by its row id. Outside of `kept` nothing is remembered: the weights may change there.
    """

    def __init__(self, most: int) -> None:
        """Remember the prompts of at most so many rows."""
        self.most = most
        self._is_on = False
        self._prefixes: dict[int, _Prefix] = {}  # by row id

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remember prompts within this context, in which the weights do not change."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            self._prefixes.clear()

    def prefill(
        self,
        model: CausalLM,
        ids: Int[Tensor, "L C"],
        mask: Bool[Tensor, "L C"],
        rows_of: Callable[[int], Sequence[int]],
        device: torch.device,
    ) -> tuple[Float[Tensor, "L V"], Layered]:
        """Return the logits after each prompt, and all layers' keys and values, on the device; see `prefill`.

        Args:
            ids: left-padded prompts, on the CPU.
            mask: where they have tokens, on the CPU.
            rows_of: returns the row ids of a prompt, given its number here.
            device: where the model is.
        """
        if not self._is_on:
            return _read(model, ids, mask, (), device)
        prompts = [row[seen] for row, seen in zip(ids, mask, strict=True)]
        row_ids = [rows_of(number) for number in range(len(prompts))]
        known = [self._known(rows[0], prompt) for rows, prompt in zip(row_ids, prompts, strict=True)]
        old = [number for number, prefix in enumerate(known) if prefix is not None]
        new = [number for number, prefix in enumerate(known) if prefix is None]
        parts = [_read(model, ids[new], mask[new], (), device)] if new else []
        if old:
            prefixes = [prefix for prefix in known if prefix is not None]
            past = _past(prefixes, mask[old].sum(dim=1), mask.shape[1], device)
            parts.append(_read(model, ids[old], mask[old], past, device))
        logits, layers = _in_order(parts, torch.tensor([*new, *old]).argsort().to(device))
        for number, (rows, prompt) in enumerate(zip(row_ids, prompts, strict=True)):
            self._remember(rows, _Prefix(prompt, layers, number))
        return logits, layers

    def _known(self, row_id: int, prompt: Int[Tensor, " C"]) -> _Prefix | None:
        prefix = self._prefixes.get(row_id)
        return prefix if prefix is not None and prefix.begins(prompt) else None

    def _remember(self, row_ids: Sequence[int], prefix: _Prefix) -> None:
        for row_id in row_ids:
            if row_id in self._prefixes or len(self._prefixes) < self.most:
                self._prefixes[row_id] = prefix


def _read(
    model: CausalLM, ids: Int[Tensor, "L C"], mask: Bool[Tensor, "L C"], past: Layered, device: torch.device
) -> tuple[Float[Tensor, "L V"], Layered]:
    ids, mask = to_device([ids, mask], device)
    return prefill(model, ids, mask, past)


def _past(
    prefixes: Sequence[_Prefix], lengths: Int[Tensor, " L"], width: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of the first columns of left-padded prompts, as far as all of them are known.

    Every prompt then goes on with as many tokens, so that no padding stands between known and new ones.
    """
    known = torch.tensor([len(prefix.ids) for prefix in prefixes])
    new = int((lengths - known).max())
    columns = torch.arange(width - new)
    batches = {id(prefix.layers): prefix.layers for prefix in prefixes}
    places: list[_Place] = []
    for key, layers in batches.items():
        at = torch.tensor([number for number, prefix in enumerate(prefixes) if id(prefix.layers) == key])
        rows = torch.tensor([prefixes[number].row for number in at.tolist()])
        first = layers[0][0].shape[2] - known[at]  # the column of the first token
        source = (columns - (width - lengths[at])[:, None] + first[:, None]).clamp(min=0)
        at, rows, source = to_device([at, rows, source], device)
        places.append(_Place(layers, at, rows, source))
    return [
        (_gather(places, layer, 0, len(prefixes)), _gather(places, layer, 1, len(prefixes)))
        for layer in range(len(prefixes[0].layers))
    ]


@dataclass(frozen=True)
class _Place:
    """The places of the keys and values of some prompts, all read together."""

    layers: Layered
    at: Int[Tensor, " N"]  # the numbers of the prompts
    rows: Int[Tensor, " N"]  # their rows in the layers
    columns: Int[Tensor, "N C"]  # for each column that is to be filled, its column in the layers


def _gather(places: Sequence[_Place], layer: int, part: int, count: int) -> Float[Tensor, "L G C D"]:
    """Copy the keys (part 0) or values (part 1) of a layer to where the prompts have their tokens."""
    states = places[0].layers[layer][part]
    gathered = states.new_empty(count, states.shape[1], places[0].columns.shape[1], states.shape[3])
    for place in places:
        gathered[place.at] = place.layers[layer][part][place.rows[:, None], :, place.columns].transpose(1, 2)
    return gathered


def _in_order(parts: Sequence[tuple[Tensor, Layered]], order: Int[Tensor, " L"]) -> tuple[Tensor, Layered]:
    """Join the parts that were read, in the order of the prompts."""
    if len(parts) == 1:
        return parts[0]
    logits, layers = torch.cat([part[0] for part in parts]), zip(*(part[1] for part in parts), strict=True)
    joined = [tuple(torch.cat(states)[order] for states in zip(*pairs, strict=True)) for pairs in layers]
    return logits[order], [(keys, values) for keys, values in joined]

"""A decode step recorded once and replayed: on a GPU the time of a small step is that of launching its kernels."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.sampling.decoders import Decoder
from rlhf.sampling.slots import Slots


class GraphDecoder:
    """A Decoder that records another's step as a CUDA graph, anew whenever rows have come or gone. Slots: static.

    A step may be run again with the same tokens: it writes the same column. That is what warming up does.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._arrangement: int | None = None

    def step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """See Decoder; the logits are overwritten by the next step."""
        if self._arrangement != slots.arrangements:
            self._record(slots, tokens, positions)
            self._arrangement = slots.arrangements
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        self._graph.replay()
        return self._logits

    def _record(self, slots: Slots, tokens: Tensor, positions: Tensor) -> None:
        assert slots.static, "what is recorded must not depend on Python's numbers"
        self._tokens, self._positions = tokens.clone(), positions.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.decoder.step(slots, self._tokens, self._positions)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self.decoder.step(slots, self._tokens, self._positions)

"""CUDA graphs of decode steps: on a GPU a small step otherwise takes as long as launching its kernels does."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf.sampling.decoders import Decoder
from rlhf.sampling.slots import Slots


class GraphDecoder:
    """A Decoder that replays another's step as a CUDA graph, recorded anew whenever rows have come or gone.

    The Slots must be static. A step may be repeated with the same tokens, since it writes the same column: the warm-up
    before recording relies on it.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._recorded_layout: int | None = None

    def step(self, slots: Slots, tokens: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
        """Decode one token of every row; see Decoder. The next step overwrites the logits."""
        if self._recorded_layout != slots.arrangements:
            self._record(slots, tokens, positions)
            self._recorded_layout = slots.arrangements
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        self._graph.replay()
        return self._logits

    def _record(self, slots: Slots, tokens: Tensor, positions: Tensor) -> None:
        assert slots.static, "what is recorded must not depend on Python's numbers"
        self._tokens, self._positions = tokens.clone(), positions.clone()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self.decoder.step(slots, self._tokens, self._positions)
        torch.cuda.current_stream().wait_stream(side_stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self.decoder.step(slots, self._tokens, self._positions)

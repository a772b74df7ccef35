"""The mixed and streamed data of a run: their end, and the rows drawn from each source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhf.data.mixture import MixedStream

PTX = "ptx"  # the stream of the demonstrations mixed into an online update


class StreamFeed:
    """The mixed and streamed data of a run: their end, and their metrics."""

    def __init__(self, streams: Mapping[str, MixedStream[Any, Any]], note: Callable[[str], None]) -> None:
        """Take the streams by section, and a function that reports a message to the user."""
        self._streams, self._note = streams, note
        self._ended = False

    def has_batch(self, step: int) -> bool:
        """Return whether every stream has rows for a step, and note it the first time that one has none."""
        for section, stream in self._streams.items():
            if ended := stream.ended(step):
                if not self._ended:
                    names = ", ".join(ended)
                    self._note(f"data.{section}: no more rows in {names} (at_end: stop): the run ends here")
                self._ended = True
                return False
        return True

    def metrics(self, step: int) -> dict[str, float]:
        """Return the rows drawn and skipped up to the end of a step; nothing for the demonstrations of PPO-ptx."""
        main = [stream for section, stream in self._streams.items() if section != PTX]
        return main[0].metrics(step) if main else {}

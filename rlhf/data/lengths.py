"""Handle rows that are too long: skip, truncate or refuse them, and always record it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf.data.row import Row
from rlhf.data.skips import Skips
from rlhf.errors import DataError


@dataclass(frozen=True)
class Limit:
    """The most tokens a row may have, the name of the setting behind that number, and what happens to a longer row."""

    tokens: int
    name: str
    too_long: Literal["skip", "truncate", "error"]

    def excess(self, row: Row, tokens: int, skips: Skips) -> int | None:
        """Return how many tokens to cut: 0 if the row fits, None if it was recorded in `skips` and left out.

        Raises:
            DataError: the row is too long and `too_long` is "error".
        """
        if tokens <= self.tokens:
            return 0
        match self.too_long:
            case "truncate":
                return tokens - self.tokens
            case "skip":
                skips.too_long += 1
                skips.leave_out(row, self.reason, f"{tokens:,}")
                return None
            case "error":
                raise DataError(
                    f"{row.place}: {tokens:,} tokens, which is {self.reason}. Raise the limit, or set too_long to "
                    "skip or truncate."
                )

    @property
    def reason(self) -> str:
        """Return the reason given for a longer row."""
        return f"longer than {self.name} of {self.tokens:,} tokens"


def limit_of(max_tokens: int, context: int | None, too_long: Literal["skip", "truncate", "error"]) -> Limit:
    """Build the limit from the configuration, or from the model's context if that is shorter."""
    if context is not None and context < max_tokens:
        return Limit(context, "the model's context", too_long)
    return Limit(max_tokens, "max_tokens", too_long)


def cut_start(ids: list[int], excess: int, head: int) -> list[int] | None:
    """Drop `excess` tokens after the first `head` special ones, which stay; return None if nothing would be left."""
    kept = ids[head + excess :]
    return [*ids[:head], *kept] if kept and excess >= 0 else None

"""Rows longer than they may be: skipped, cut, or fatal, and always said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf.data.row import Row
from rlhf.data.skips import Skips
from rlhf.errors import DataError


@dataclass(frozen=True)
class Limit:
    """The most tokens a row may have, where that number comes from, and what becomes of a longer one."""

    tokens: int
    name: str
    too_long: Literal["skip", "truncate", "error"]

    def excess(self, row: Row, tokens: int, skips: Skips) -> int | None:
        """How many tokens must go: 0 of a row that fits; None when the row was left out instead."""
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
        """What is said of a longer row."""
        return f"longer than {self.name} of {self.tokens:,} tokens"


def limit_of(max_tokens: int, context: int | None, too_long: Literal["skip", "truncate", "error"]) -> Limit:
    """The limit of the configuration, or the model's context where that is shorter."""
    if context is not None and context < max_tokens:
        return Limit(context, "the model's context", too_long)
    return Limit(max_tokens, "max_tokens", too_long)


def cut_start(ids: list[int], excess: int, head: int) -> list[int] | None:
    """`ids` without `excess` tokens of its start, its `head` special tokens kept; None if nothing would be left."""
    kept = ids[head + excess :]
    return [*ids[:head], *kept] if kept and excess >= 0 else None

"""A real model folder whose next word depends on the last word alone, by a table: every log-probability is known."""

from __future__ import annotations

from rlhf.lab.doors import EOS, SPECIAL, Transitions, bigram_model

__all__ = ["EOS", "SPECIAL", "Transitions", "bigram_model"]

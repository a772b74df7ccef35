"""The algorithm section of a training run: an online algorithm or an offline loss of rlhf/algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from rlhf.algorithms.offline import Offline
from rlhf.algorithms.online import Online


def algorithm_kind(value: object) -> Literal["online", "offline"]:
    """Return the kind of an algorithm: offline if it has a `loss`, the loss over a fixed data set."""
    offline = "loss" in value if isinstance(value, Mapping) else isinstance(value, Offline)
    return "offline" if offline else "online"


Algorithm = Annotated[
    Annotated[Online, Tag("online")] | Annotated[Offline, Tag("offline")], Discriminator(algorithm_kind)
]
"""Online, unless the section sets `loss`, the loss over a fixed data set."""

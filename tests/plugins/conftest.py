"""What a test of plug-ins registers is gone after it: other tests of the same process look at all members."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rlhf import plugins
from rlhf.algorithms.presets import PRESETS
from rlhf.section import Choice, Named


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    families = [family for base in (Choice, Named) for family in base.__subclasses__() if "members" in vars(family)]
    members, presets, loaded = [dict(family.members) for family in families], dict(PRESETS), dict(plugins._loaded)
    yield
    for name in set(plugins._loaded) - set(loaded):
        sys.modules.pop(name, None)
    for table, before in zip(
        [*(family.members for family in families), PRESETS, plugins._loaded], [*members, presets, loaded], strict=True
    ):
        table.clear()
        table.update(before)

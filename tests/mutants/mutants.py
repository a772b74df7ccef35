"""The bugs we seed in the mathematics: bugs found in the field, and our own that a test was written for.

Format: mutant.py. For everything else scripts/mutate.sh makes mutants by itself.
"""

from __future__ import annotations

from advantages import ADVANTAGES
from episodes import EPISODES
from estimates import ESTIMATES
from models import MODELS
from mutant import Mutant
from pairs import PAIRS
from policy_losses import POLICY_LOSSES
from update import UPDATE

MUTANTS: list[Mutant] = [*ADVANTAGES, *POLICY_LOSSES, *PAIRS, *UPDATE, *MODELS, *ESTIMATES, *EPISODES]

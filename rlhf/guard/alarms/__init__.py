"""The alarms: conditions on the metrics of a run, with usual causes and cures.

- `alarm`: the class of the alarms, and the common forms of a reading. `history`: the metrics that it reads.
- All other modules: the alarms by topic. A class with a name is an alarm, here and in a user's module.

To import the package defines its alarms, in the order in which a run reports the alarms of one step.
"""

# ruff: noqa: I001
from rlhf.guard.alarms import kl as kl
from rlhf.guard.alarms import clip as clip
from rlhf.guard.alarms import critic as critic
from rlhf.guard.alarms import entropy as entropy
from rlhf.guard.alarms import log_probs as log_probs
from rlhf.guard.alarms import length as length
from rlhf.guard.alarms import duplicates as duplicates
from rlhf.guard.alarms import diversity as diversity
from rlhf.guard.alarms import scores as scores
from rlhf.guard.alarms import steps as steps
from rlhf.guard.alarms import controller as controller
from rlhf.guard.alarms import cost as cost
from rlhf.guard.alarms import losses as losses

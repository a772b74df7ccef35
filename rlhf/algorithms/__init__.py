"""The algorithms: each file is one, with its settings, its equation, its usual ranges, its presets and its paper.

    advantage, policy_loss    the families: what a member can have and what a run asks it
    online                    the section `algorithm` of an online run, and the checks across its parts
    experience, objective     what a step does with them: advantages for a whole step, the loss of a micro-batch

To import the package is to register all members, and to read configurations is quick: files of algorithms import
torch where they compute.
"""

# In the order in which presets are listed.
# isort: off
from rlhf.algorithms import online, ppo, penalty, trust_region, reinforce, remax, rloo, grpo, dapo, cispo, gspo
from rlhf.algorithms import online_dpo, rejection_sampling, gae, functions
# isort: on

__all__ = [
    "cispo",
    "dapo",
    "functions",
    "gae",
    "grpo",
    "gspo",
    "online",
    "online_dpo",
    "penalty",
    "ppo",
    "reinforce",
    "rejection_sampling",
    "remax",
    "rloo",
    "trust_region",
]

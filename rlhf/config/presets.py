"""Named algorithms (a few lines of configuration each), and which of two exclusive settings is kept: the last given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.algorithms.presets import PRESETS as PRESETS
from rlhf.algorithms.presets import preset

Tree = dict[str, Any]

_CRITIC = {"advantage": {"type": "gae"}, "value_loss": {}}
_ONE_UPDATE = {"batch": {"epochs": 1, "minibatches": 1}}
_CRITIC_EPOCHS = {"batch": {"epochs": 8, "minibatches": 1}}  # the policy steps in the first epoch only
_GROUP_OF_8 = {"sampling": {"completions_per_prompt": 8}}

_ONLINE: dict[str, Tree] = {
    "ppo": {"algorithm": {**_CRITIC, "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05}}},
    "ppo_penalty": {
        "algorithm": {
            **_CRITIC,
            "policy_loss": {"type": "penalty"},
            "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
        }
    },
    "trpo": {
        "algorithm": {
            **_CRITIC,
            "policy_loss": {"type": "trust_region"},
            "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
        },
        **_CRITIC_EPOCHS,
    },
    "npg": {
        "algorithm": {
            **_CRITIC,
            "policy_loss": {"type": "trust_region", "line_search": False},
            "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
        },
        **_CRITIC_EPOCHS,
    },
    "a2c": {
        "algorithm": {
            "advantage": {"type": "gae"},
            "policy_loss": {"type": "policy_gradient"},
            "value_loss": {"clip_eps": None},
            "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
        },
        **_ONE_UPDATE,
    },
    "reinforce": {
        "algorithm": {
            "advantage": {"type": "batch_whiten", "whiten": False},
            "policy_loss": {"type": "policy_gradient", "aggregate": "sequence_sum"},
            "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
        },
        **_ONE_UPDATE,
    },
    "remax": {
        "algorithm": {
            "advantage": {"type": "greedy"},
            "policy_loss": {"type": "policy_gradient", "aggregate": "sequence_sum"},
            "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
        },
        **_ONE_UPDATE,
    },
    "reinforce_pp": {
        "algorithm": {
            "advantage": {"type": "batch_whiten"},
            "kl": {"placement": "reward", "estimator": "k1", "coef": 0.01},
        }
    },
    "rloo": {
        "algorithm": {
            "advantage": {"type": "group", "baseline": "leave_one_out"},
            "policy_loss": {"ratio": "sequence", "aggregate": "sequence_mean"},
            "kl": {"placement": "reward", "estimator": "k1", "coef": 0.05},
        },
        **_GROUP_OF_8,
    },
    "grpo": {
        "algorithm": {
            "advantage": {"type": "group", "baseline": "normalized"},
            "policy_loss": {"aggregate": "sequence_mean"},
            "kl": {"placement": "loss", "estimator": "k3", "coef": 0.04},
        },
        **_GROUP_OF_8,
    },
    "dr_grpo": {
        "algorithm": {
            "advantage": {"type": "group", "baseline": "centered"},
            "policy_loss": {"aggregate": "constant"},
        },
        **_GROUP_OF_8,
    },
    "dapo": {
        "algorithm": {
            "advantage": {"type": "group", "baseline": "normalized"},
            "policy_loss": {"clip_eps_high": 0.28, "aggregate": "token_mean"},
            "drop_uniform_groups": True,
        },
        **_GROUP_OF_8,
    },
    "cispo": {
        "algorithm": {
            "advantage": {"type": "group", "baseline": "normalized"},
            "policy_loss": {"type": "cispo"},
            "drop_uniform_groups": True,
        },
        **_GROUP_OF_8,
    },
    "gspo": {
        "algorithm": {
            "advantage": {"type": "group", "baseline": "normalized"},
            "policy_loss": {
                "ratio": "sequence_mean",
                "clip_eps_low": 3e-4,
                "clip_eps_high": 4e-4,
                "aggregate": "sequence_mean",
            },
        },
        **_GROUP_OF_8,
    },
    "online_dpo": {
        "algorithm": {
            "advantage": {"type": "best_and_worst"},
            "policy_loss": {"type": "pair", "loss": {"type": "dpo", "beta": 0.1}},
        },
        "sampling": {"completions_per_prompt": 2},
        **_ONE_UPDATE,
    },
    "rejection_sampling": {
        "algorithm": {
            "advantage": {"type": "best", "keep": 1},
            "policy_loss": {"type": "policy_gradient", "aggregate": "token_mean"},
        },
        **_GROUP_OF_8,
        **_ONE_UPDATE,
    },
}
for _name, _settings in _ONLINE.items():
    preset(_name, _settings)


def sizes_of_preset(name: object) -> Tree:
    """Return what a preset sets outside `algorithm`; nothing if there is no such preset."""
    settings = PRESETS.get(name, {}) if isinstance(name, str) else {}
    return {section: values for section, values in settings.items() if section != "algorithm"}


# At most one of each row may be set (the sections themselves check that).
ALTERNATIVES = (
    ("schedule.steps", "schedule.epochs"),
    ("budget.completions", "budget.tokens", "budget.flops", "budget.seconds"),
)


@dataclass(frozen=True)
class Exclusion:
    """A choice and the settings that it makes meaningless."""

    key: str
    is_chosen: Callable[[Any], bool]
    excludes: tuple[str, ...]


EXCLUSIONS = (
    Exclusion("sharding.mode", lambda mode: not str(mode).startswith("zero"), ("sharding.deepspeed",)),
    Exclusion("sharding.mode", lambda mode: not str(mode).endswith("_offload"), ("sharding.cpu_adam",)),
    Exclusion("sharding.mode", lambda mode: not str(mode).startswith("zero3"), ("sharding.rollout",)),
    Exclusion("critic.shared", lambda shared: shared is True, ("critic.init", "critic.lr", "critic.warmup_steps")),
    Exclusion("algorithm.advantage.type", lambda kind: kind != "gae", ("algorithm.value_loss",)),
)


def keep_last_alternative(tree: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Remove from `tree` each setting to which `over` sets an alternative."""
    overruled = [
        other
        for row in ALTERNATIVES
        for key in row
        if get_setting(over, key) is not None
        for other in row
        if get_setting(over, other) is None
    ]
    return drop_keys(tree, overruled)


def drop_overruled(tree: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Remove from `tree` the alternatives to what `over` sets and the settings that its choices make meaningless."""
    excluded = [
        key
        for exclusion in EXCLUSIONS
        if get_setting(over, exclusion.key) is not None and exclusion.is_chosen(get_setting(over, exclusion.key))
        for key in exclusion.excludes
        if get_setting(over, key) is None
    ]
    return drop_keys(keep_last_alternative(tree, over), excluded)


def get_setting(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or None if there is none."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def drop_keys(tree: Mapping[str, Any], keys: list[str]) -> Tree:
    """Return a copy of `tree` without the given dotted keys."""
    copy = dict(tree)
    for key in keys:
        first, _, rest = key.partition(".")
        if not rest:
            copy.pop(first, None)
        elif isinstance(copy.get(first), Mapping):
            copy[first] = drop_keys(copy[first], [rest])
    return copy

"""The section `environment`: the environment that answers the policy, its limits, and the effect of its failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from rlhf.errors import ConfigError
from rlhf.section import Facts, Rule, Section, Value
from rlhf.user_code import OBJECT, files_of

Count = Annotated[int, Ge(1)]
ERROR_SHARE = 0.05  # of the episodes of a step or an evaluation; more failures of environments stop the run


def few_tokens(environment: EnvironmentConfig, facts: Facts) -> Value | None:
    """Return a budget for episodes of several turns that ends most of them before their last turn."""
    budget = environment.max_tokens
    if environment.max_turns == 1 or budget is None:
        return None
    return float(budget) if budget < 2 * facts.run.sampling.max_new_tokens else None


def no_deadline(environment: EnvironmentConfig, facts: Facts) -> Value | None:
    """Return null if a step may take for ever."""
    return "null" if environment.step_timeout_s is None else None


class EnvironmentConfig(Section):
    """An environment that answers the policy over several turns. Leave `reward` out: the environment gives it."""

    target: str
    """my_env.py:Guess or module:Guess (a class with reset and step, or a class of tools), or gym:ID, textarena:ID,
    reasoning_gym:TASK (docs/agents.md)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the class."""
    max_turns: Count = 8
    """Most actions of an episode. An action has at most sampling.max_new_tokens tokens."""
    max_tokens: Count | None = None
    """Most tokens of an episode after its prompt, actions and observations together. The episode ends when less than
    sampling.max_new_tokens of them are left. null: the rest of the model's context."""
    step_timeout_s: Annotated[float, Gt(0)] | None = 10.0
    """Seconds for one reset or step. null: no limit. Without workers a step in compiled code cannot be interrupted."""
    on_error: Literal["drop", "zero", "stop"] = "drop"
    """Treatment of an episode whose environment raises, hangs, or returns NaN. drop: the episode is left out of
    the loss and of its group's baseline; zero: it ends there with the rewards so far; stop: the run is saved and stops.
    More than 5 % of the episodes of a step or an evaluation, and more than one, stop the run in any case."""
    workers: Annotated[int, Ge(0)] = 0
    """Processes that run environments, for each rank. 0: they run in the process that trains. Does not change
    results."""
    prefix_cache: bool = False
    """Keep the keys and values of a prompt from one turn to the next, so that the model reads in each turn only the new
    tokens; the fast sampler has it. It takes the memory of as many prompts as sampling.batch_size. Log-probabilities
    differ by rounding, so that a run on servers or on more ranks is equal up to rounding only."""
    truncation: Literal["zero", "bootstrap", "drop"] = "zero"
    """The value after the last action of an episode that a limit ended (turns, tokens, the environment's own). zero: as
    if the task were over; bootstrap: the critic's value of the last observation; drop: these episodes are left out of
    the loss, and no others."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="agent-token-budget",
            level="warning",
            key="max_tokens",
            violation=few_tokens,
            reason="With a budget of less than two actions most episodes of several turns are cut before they can "
            "succeed: nothing is learned, and nothing fails.",
            source="TRL, issues 5697 and 6263: a default of 256 tokens",
            fix="environment.max_tokens=null, or room for max_turns actions and observations",
        ),
        Rule(
            name="agent-no-deadline",
            level="warning",
            key="step_timeout_s",
            violation=no_deadline,
            reason="One environment that hangs holds up all episodes of the step.",
            source="NVIDIA-NeMo/RL issue 3238",
            fix="environment.step_timeout_s=10",
        ),
    )

    @property
    def remembers_prompts(self) -> bool:
        """Return whether a prompt is kept for the next turn."""
        return self.prefix_cache and self.max_turns > 1

    @property
    def code_file(self) -> Path | None:
        """Return the user's file of the class, if the target names one."""
        return files_of(self.target).get("target")

    def check(self) -> None:
        """Import the environment, and check how it is made.

        Raises:
            ConfigError: there is no such environment, or workers cannot have it.
        """
        from rlhf.environments.load import load_environment

        load_environment(self.target, self.kwargs)
        if self.workers and self.target.startswith(OBJECT):
            raise ConfigError(
                f"environment.workers is {self.workers}, but {self.target.removeprefix(OBJECT)!r} is an object of this "
                "process, which a worker cannot import: put the class into a .py file and give "
                'environment.target="my_env.py:NAME", or set environment.workers=0'
            )

    def check_run(self, unsupported: Mapping[str, str]) -> None:
        """Check that no setting of the run is on that cannot be combined with episodes.

        Args:
            unsupported: the settings that are on, as key=value, with what to set instead.

        Raises:
            ValueError: there is one.
        """
        for setting, cure in unsupported.items():
            raise ValueError(f"environment cannot be combined with {setting}: {cure}")

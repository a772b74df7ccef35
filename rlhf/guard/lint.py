"""Check a configuration against the table of rules, before the run: `rlhf lint`, and the start of every run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlhf.errors import ConfigError, did_you_mean
from rlhf.guard.alarms import ALARMS
from rlhf.guard.rule import Facts, Rule, RunConfiguration, Violation, read_facts
from rlhf.guard.rules_online import ONLINE_RULES, UPDATE_RULES
from rlhf.guard.rules_run import DATA_RULES, RUN_RULES

RULES: tuple[Rule, ...] = (*UPDATE_RULES, *ONLINE_RULES, *RUN_RULES, *DATA_RULES)


def lint(config: RunConfiguration, facts: Facts | None = None) -> list[Violation]:
    """Return the rules that a configuration breaks, errors first, without those that guard.allow names.

    Args:
        config: the run.
        facts: what is known besides the configuration; None reads it from the model's folder or name.

    Raises:
        ConfigError: guard.allow names no rule, or guard.alarms no alarm.
    """
    _check_names(config.guard.allow, [rule.name for rule in RULES], "guard.allow", "rule")
    _check_names(config.guard.alarms, [alarm.name for alarm in ALARMS], "guard.alarms", "alarm")
    known = read_facts(config) if facts is None else facts
    violations = []
    for rule in RULES:
        if isinstance(config, rule.runs) and rule.name not in config.guard.allow:
            value = rule.violation(config, known)
            if value is not None:
                violations.append(Violation(rule=rule, value=value))
    return sorted(violations, key=lambda violation: violation.rule.level)


def check_settings(config: RunConfiguration) -> list[Violation]:
    """Return the warnings about a run that is about to start.

    Raises:
        ConfigError: it breaks a rule whose level is error; the message says why, and how to run it nevertheless.
    """
    violations = lint(config)
    errors = [violation for violation in violations if violation.rule.level == "error"]
    if errors:
        raise ConfigError(explain_errors(errors))
    return violations


def explain_errors(errors: Sequence[Violation]) -> str:
    """Return the message of a refused run: each error, and the setting that lets it pass."""
    return "\n".join([*map(str, errors), how_to_allow([error.rule.name for error in errors])])


def how_to_allow(rules: Sequence[str]) -> str:
    """Return the setting that lets a run pass that breaks rules."""
    return f"To run it nevertheless: guard.allow=[{', '.join(dict.fromkeys(rules))}]"


def _check_names(names: Collection[str], known: Sequence[str], key: str, what: str) -> None:
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f": `rlhf lint` and docs name every {what}"
            raise ConfigError(f"{key}: there is no {what} {name!r}{hint}")

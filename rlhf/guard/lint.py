"""Check a configuration against the table of rules, before the run: `rlhf lint`, and the start of every run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import get_args

from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig, RunConfiguration
from rlhf.errors import ConfigError, did_you_mean
from rlhf.guard.alarms.alarm import Alarm, all_alarms
from rlhf.guard.rule import Violation, read_facts
from rlhf.guard.rules_online import ONLINE_RULES, UPDATE_RULES
from rlhf.guard.rules_run import DATA_RULES, RUN_RULES
from rlhf.plugins import OURS
from rlhf.section import Choice, Facts, Rule, Section, rules_of, walk

RUN_TABLE: tuple[Rule, ...] = (*UPDATE_RULES, *ONLINE_RULES, *RUN_RULES, *DATA_RULES)
"""The rules about several sections at once; a rule about one section is written in that section."""


def all_rules() -> list[Rule]:
    """Return every rule of the table and of the sections, registered plug-ins included; the first of each name."""
    rules = {rule.name: rule for rule in RUN_TABLE}
    for _, rule in section_rules():
        rules.setdefault(rule.name, rule)
    return list(rules.values())


def section_rules() -> Iterator[tuple[type[Section], Rule]]:
    """Yield the rules of all sections, each with its section's class and with its full key."""
    for section, path in sections_below(OfflineConfig, OnlineConfig, RewardModelConfig).items():
        yield from ((section, replace(rule, key=f"{path}.{rule.key}")) for rule in rules_of(section))


def sections_below(*roots: type[Section]) -> dict[type[Section], str]:
    """Return the classes of sections and of what their fields can hold, each with the first path that leads to it."""
    paths: dict[type[Section], str] = {}
    waiting = [(root, "") for root in roots]
    while waiting:
        section, path = waiting.pop(0)
        if section in paths:
            continue
        paths[section] = path
        for name, info in section.model_fields.items():
            inner = _classes_in(info.annotation)
            waiting += [(kind, f"{path}.{name}".removeprefix(".")) for kind in inner]
    return paths


def _classes_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Choice):
        yield from annotation.choices().values()
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _classes_in(inner)


def lint(config: RunConfiguration, facts: Facts | None = None) -> list[Violation]:
    """Return the rules that a configuration breaks, errors first, without those that guard.allow names.

    Args:
        facts: further facts besides the configuration; None reads them from the model's folder or name.

    Raises:
        ConfigError: guard.allow names no rule, guard.alarms no alarm, or an alarm of the user no metric.
    """
    _check_names(config.guard.allow, [rule.name for rule in all_rules()], "guard.allow", "rule")
    _check_names(config.guard.alarms, list(Alarm.choices()), "guard.alarms", "alarm")
    for alarm in all_alarms():
        _check_metrics(alarm)
    known = replace(read_facts(config) if facts is None else facts, run=config)
    violations = [
        Violation(rule=rule, value=value)
        for section, rule in _rules_for(config)
        if rule.name not in config.guard.allow and (value := rule.violation(section, known)) is not None
    ]
    return sorted(violations, key=lambda violation: violation.rule.level)


def _rules_for(config: RunConfiguration) -> Iterator[tuple[Section, Rule]]:
    """Yield each rule with its object: the run, or one of its sections, whose path is put before the key."""
    for rule in RUN_TABLE:
        if isinstance(config, rule.runs):
            yield config, rule
    for path, section in walk(config):
        for rule in rules_of(type(section)):
            yield section, replace(rule, key=f"{path}.{rule.key}")


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
            page = "metrics" if what == "metric" else "troubleshooting"
            hint = did_you_mean(name, known) or f"; docs/{page}.md lists every {what}"
            raise ConfigError(f"{key}: there is no {what} {name!r}{hint}")


def _check_metrics(alarm: Alarm) -> None:
    if type(alarm).__module__.partition(".")[0] not in OURS:
        from rlhf.tracking.metrics import table_of

        _check_names(alarm.metrics, list(table_of(alarm.metrics)), f"alarm {alarm.name}", "metric")

"""Write docs/troubleshooting.md from its template, alarms and rules: `python scripts/make_troubleshooting_doc.py`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from doc_links import code_spans, link_pages, link_papers

from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig
from rlhf.guard.alarms import ALARMS, Alarm
from rlhf.guard.lint import RUN_TABLE, section_rules
from rlhf.section import Facts, Rule

PAGE = Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md"
TEMPLATE = Path(__file__).resolve().parent / "templates" / "troubleshooting.md"
RUNS = {OnlineConfig: "online", OfflineConfig: "offline", RewardModelConfig: "reward model"}
PLACE = re.compile(r"\{\{([a-z ]+)(?:: ([\w, -]+))?\}\}")


def page() -> str:
    """Build the Markdown of docs/troubleshooting.md."""
    template = TEMPLATE.read_text(encoding="utf-8")
    placed = {name for match in PLACE.finditer(template) if match[1] == "alarms" for name in match[2].split(", ")}

    def fill(place: re.Match[str]) -> str:
        if place[1] == "rules":
            return "\n".join([*_run_rows(place[2]), *_section_rows(place[2])])
        if place[1] == "alarms":
            return "\n".join(_alarm(alarm) for alarm in ALARMS if alarm.name in place[2].split(", "))
        rest = [_alarm(alarm) for alarm in ALARMS if alarm.name not in placed]
        head = "## Other alarms\n\n| symptom | cause | cure |\n|---|---|---|\n"
        return head + "\n".join(rest) + "\n" if rest else ""

    return PLACE.sub(fill, template)


def _alarm(alarm: Alarm) -> str:
    metrics = ", ".join(f"`{name}`" for name in alarm.metrics)
    source = "" if alarm.source.startswith("docs/") else f" ({link_papers(_cell(alarm.source))})"
    symptom = f"**`{alarm.name}`** ({alarm.patience}): {_cell(alarm.sees)} ({metrics})"
    return f"| {symptom} | {_cell(alarm.causes)}{source} | {_cell(alarm.cure)} |"


def _run_rows(level: str) -> Iterator[str]:
    """Describe the rules about whole runs."""
    for rule in RUN_TABLE:
        runs = "every run" if len(rule.runs) == len(RUNS) else ", ".join(RUNS[run] for run in rule.runs)
        if rule.level == level:
            yield _row(rule, runs)


def _section_rows(level: str) -> Iterator[str]:
    """Describe the rules of sections; those that say the same of several types share a row."""
    types: dict[Rule, list[str]] = {}
    for section, rule in section_rules():
        if rule.level == level:
            label = section.model_fields["type"].default if "type" in section.model_fields else ""
            types.setdefault(replace(rule, violation=_none), []).append(f"`{label}`" if label else "")
    for rule, labels in types.items():
        yield _row(rule, ", ".join(filter(None, labels)))


def _none(section: object, facts: Facts) -> None:
    """Return nothing: a row does not show how a rule is checked."""


def _row(rule: Rule, where: str) -> str:
    key, reason, source, fix = (_cell(text) for text in (rule.key, rule.reason, rule.source, rule.fix))
    name = f"`{rule.name}` ({where})" if where else f"`{rule.name}`"
    return f"| {name}<br>{key} | {reason} ({link_papers(source)}) | {fix} |"


def _cell(text: str) -> str:
    """Mark up settings, metrics and pages, and escape the bars that would end the cell."""
    return link_pages(code_spans(text)).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

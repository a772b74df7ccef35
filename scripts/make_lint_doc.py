"""Write docs/lint.md from the table of rules: `python scripts/make_lint_doc.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig
from rlhf.guard.lint import RULES
from rlhf.guard.rule import Rule

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lint.md"
RUNS = {OnlineConfig: "online", OfflineConfig: "on data", RewardModelConfig: "reward model"}

INTRODUCTION = """\
# Unsafe settings

This page is made by `python scripts/make_lint_doc.py` from the table of rules in `rlhf/guard/`. Change it there.

    rlhf lint configs/ppo.yaml batch.epochs=50
    rlhf lint configs/lab/compare.yaml

checks settings and runs nothing; of a comparison it checks every arm. The same checks are made at the start of every
run, from the command line, from Python and in a comparison:

- An **error** will not learn, or may lose data. The run is refused.
- A **warning** is outside the range that the named source reports. The run starts, and the warning is in
  `notes.jsonl` and in the report.

Each says the rule, the key and its value, the reason, the source and the fix. To break a rule on purpose, name it:

```yaml
guard: {allow: [no-brake-on-learned-reward]}
```

Then it is neither an error nor a warning, and whoever reads the configuration sees that it was meant. A range is what
has been published, no law: learning rates depend on the size of the model, which is read from the headers of its
weights or from its name; where neither tells, and for models below 5e7 parameters, for which nothing is published,
they are not judged to be high.

What contradicts itself (a group baseline with one completion per prompt, k1 in the loss, whitening over a handful of
completions) is no rule here: such a configuration is invalid, and says so when it is read. Sampling and training
cannot be set to different temperatures: log-probabilities of samples are computed at `sampling.temperature`, whatever
it is.
"""


def page() -> str:
    """Build the Markdown of docs/lint.md."""
    return "\n".join([INTRODUCTION, *_rules("error", "Errors"), *_rules("warning", "Warnings")])


def _rules(level: str, title: str) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| rule, its setting and runs | reason (source) | fix |\n|---|---|---|"
    for rule in RULES:
        if rule.level == level:
            yield _row(rule)
    yield ""


def _row(rule: Rule) -> str:
    runs = "every run" if len(rule.runs) == len(RUNS) else ", ".join(RUNS[run] for run in rule.runs)
    key, reason, source, fix = (_cell(text) for text in (rule.key, rule.reason, rule.source, rule.fix))
    return f"| `{rule.name}`<br>{key}<br>{runs} | {reason} ({source}) | {fix} |"


def _cell(text: str) -> str:
    """Escape what Markdown would read as the end of a cell or as emphasis: bars, stars and underscores."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

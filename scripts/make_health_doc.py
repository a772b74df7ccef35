"""Write docs/health.md from the table of alarms: `python scripts/make_health_doc.py`."""

from __future__ import annotations

from pathlib import Path

from rlhf.guard.alarms import ALARMS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "health.md"

INTRODUCTION = """\
# Alarms

This page is made by `python scripts/make_health_doc.py` from the table of alarms in `rlhf/guard/alarms.py`. Change it
there.

While a run trains, its metrics are watched. An alarm goes off when what it looks for is there in as many logged steps
in a row as its **patience** says, and is over after as many without. It is said once, not at every step: in the
terminal, in `notes.jsonl`, in `alarms.jsonl`, and as marks on the curves of the [report](run_folder.md). It says what
it saw, since when, what usually causes it and what to try.

```yaml
guard:
  on_alarm: warn           # or stop, lower_lr, raise_kl, ignore
  alarms: {kl-jump: stop, length-grows: ignore}
  lr_factor: 0.5
  kl_factor: 2.0
```

| action | what happens |
|---|---|
| `warn` | it is said |
| `stop` | the run saves a checkpoint and ends; the same command continues from there, past this alarm |
| `lower_lr` | the learning rates are multiplied by `guard.lr_factor` from the next step on |
| `raise_kl` | the coefficient of the KL penalty is multiplied by `guard.kl_factor` from the next step on (online) |
| `ignore` | this alarm is not looked for |

What an action changed is in the checkpoint. A run that is interrupted and continued gives the same metrics, the same
alarms and the same weights, byte for byte: on resume the lines of `metrics.jsonl` are replayed. An alarm reads only
what is logged, so `logging.every` is how often it looks. In a comparison, `stop` is an error: the arm would have no
result.

Limits are where mistakes that were made on purpose are seen and healthy runs are not: `python benchmarks/alarms.py`
provokes them, and writes `benchmarks/results/alarms.json`. They are no proof that a run is well: a reward can be
gamed without any of these signs, so let a judge that nothing is trained on choose the checkpoint ([the best
checkpoint](#the-best-checkpoint)).
"""

BEST = """\
## The best checkpoint

```yaml
checkpoint:
  best: {by: auto, confidence: 0.95, patience: 3, restore: true}
```

With `checkpoint.best` a run keeps the checkpoint whose evaluation is the best: by the judge's score of held-out
prompts where there is one, otherwise by the held-out loss (`by: accuracy`: of pairs or tokens). It uses the
evaluations that are made anyway (`eval.every`). A new best has to beat the old one on the same prompts: the interval
of the mean paired difference (Student's t, `confidence`) is above 0. `best/step`, `best/gain` and `best/gain_low` are
logged. After `patience` evaluations in a row without a new best the run ends. With `restore` the run's `model/` is
the best checkpoint; either way it is in `best/step-…/`, an ordinary folder with the run's configuration, which
commands name as `RUN@best`:

    rlhf sample runs/ppo@best --prompt "…"
    rlhf eval runs/ppo@best --against runs/ppo
    rlhf push runs/ppo@best owner/name

The judge should be one that nothing is trained on, and the prompts that choose the checkpoint are not the ones to
report a score on: the best of several evaluations is too good by chance.

What it is worth, in [the lab](lab.md): without a KL penalty the gold score rises and then falls, while the learned
reward goes on rising. `python benchmarks/best_checkpoint.py --lab runs/lab` trains two such algorithms for 60 steps
on three seeds, lets the gold choose on the lab's held-out prompts, and scores both checkpoints on 256 others. The
best one, of step 10 in all six runs, beats the last by 2.24 [2.09, 2.36] (`dr_grpo`) and 2.35 [2.14, 2.63] (`dapo`)
of gold score, paired by prompt; the start model is at -0.4 and the best at 2.4 to 2.6.
`benchmarks/results/best_checkpoint.json`
"""


def page() -> str:
    """Build the Markdown of docs/health.md."""
    rows = [
        f"| `{alarm.name}`<br>{'<br>'.join(_cell(name) for name in alarm.metrics)} | {_cell(alarm.sees)} "
        f"(patience {alarm.patience}) | {_cell(alarm.causes)} | {_cell(alarm.cure)}. {_cell(alarm.source)} |"
        for alarm in ALARMS
    ]
    columns = ("alarm, its metrics", "goes off when", "usual causes", "what to try, and the source")
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    return "\n".join([INTRODUCTION, "## The table\n", head, *rows, "", BEST])


def _cell(text: str) -> str:
    """Escape what Markdown would read as the end of a cell or as emphasis: bars, stars and underscores."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Write docs/metrics.md from the table that validates metric names: `python scripts/make_metrics_doc.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf.tracking.metrics import METRICS, MetricInfo

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

INTRODUCTION = """\
# Metrics

This page is made by `python scripts/make_metrics_doc.py` from the table in `rlhf/tracking/metrics.py`. Change it there.
A name that is not in the table cannot be logged.

`metrics.jsonl` has one line a logged step: `{"step": 12, "score/mean": 0.41, …}`. How to read it:

- **Step 0** is before any training and holds only the `eval/` names.
- **A mean is exact.** Sums and counts are added over micro-batches and divided once, so every token (or completion, or
  pair) counts the same, whatever the micro-batch size.
- **What is seen during an update** (`loss/`, `policy/`, `kl/old`, `critic/clip_fraction`) is averaged over all the
  optimizer steps of the step, each seen just before its own optimizer step. The exception is
  `policy/first_ratio_deviation`, which is of the first minibatch alone.
- **What is seen of the experience** (`score/`, `kl/reference`, `advantage/`, `completion/`, `critic/value`,
  `critic/return`, `critic/explained_variance`) is of the policy at the start of the step.
- **`null`** stands for NaN or infinity, which JSON does not have.
- **Units.** A nat is the unit of the natural logarithm. *Per sequence* is summed over the tokens of a completion and
  averaged over completions; *per token* is averaged over tokens. `-` has no unit.
- **Better** is `higher` or `lower` where that holds for every algorithm. A higher score is better only as far as the
  reward can be believed: watch the held-out score of a judge that was not trained on.
- A name is there only where it means something: no `critic/` without a critic, no `group/` without groups.
- In a reward-model run the model that is trained goes under `policy/` (`policy/grad_norm`, `policy/lr`).

Times, throughput and memory are in `timings.jsonl`, so that equal runs give equal bytes here: see
[run_folder.md](run_folder.md). What to watch, and what is healthy, is on the page of each algorithm:
[SFT](algorithms/sft.md#what-to-watch), [reward model](algorithms/reward_model.md#what-to-watch),
[PPO](algorithms/ppo.md#what-to-watch), [GRPO and kin](algorithms/grpo_and_kin.md#what-to-watch).
"""

GROUPS = {
    "score": "One number a completion, from the reward source, after shaping unless it says otherwise.",
    "part": "The parts of the score by name: sources of an ensemble, rules, and what a reward function names.",
    "watch": "`reward.watch`: a second judge on a sample of the training completions, which is never trained on.",
    "reward": "Per token: the score on the last one, and the KL penalty where it is placed in the reward.",
    "kl": "Two different KLs: to the *reference* per sequence; to the *old* policy, of this step's start, per token.",
    "policy": "The policy's update.",
    "critic": "The value function; with `critic.shared` its gradient and learning rate are the policy's.",
    "advantage": "What the policy's update reads.",
    "completion": "What was sampled.",
    "prompt": "What it was sampled for.",
    "best": "Of `checkpoint.best`, at evaluations: [the best checkpoint](health.md#the-best-checkpoint).",
    "group": "Completions of one prompt.",
    "loss": "The terms of the loss.",
    "rm": "The reward model on the pairs of the step.",
    "source": "By source of [mixed or streamed data](data.md#several-sources); the star is the source's name.",
    "skipped": "Steps that were not taken.",
    "eval": "On held-out data; the same random numbers at every evaluation, so that two of them differ by the policy.",
}


def page() -> str:
    """Build the Markdown of docs/metrics.md."""
    groups: dict[str, list[MetricInfo]] = {}
    for info in METRICS.values():
        groups.setdefault(info.name.partition("/")[0], []).append(info)
    return "\n".join([INTRODUCTION, *(line for name, infos in groups.items() for line in _group(name, infos))])


def _group(name: str, infos: list[MetricInfo]) -> Iterator[str]:
    yield f"## {name}\n"
    if name in GROUPS:
        yield f"{GROUPS[name]}\n"
    yield "| name | unit | better | meaning |\n|---|---|---|---|"
    for info in infos:
        yield f"| `{info.name}` | {_cell(info.unit)} | {info.better} | {_cell(info.meaning)} |"
    yield ""


def _cell(text: str) -> str:
    """Escape what Markdown would read as the end of a cell or as emphasis: bars and stars."""
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Write docs/metrics.md from its template and the table that validates names: `python scripts/make_metrics_doc.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from doc_links import fill_template

from rlhf.tracking.metrics import METRICS, MetricInfo

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
GROUPS = {
    "score": "The reward source's score per completion, after shaping unless stated otherwise.",
    "part": "Parts of the score by name: sources of an ensemble, rules, and parts that a reward function returns.",
    "watch": "`reward.watch`: a second judge on a sample of the completions. Nothing is trained on its scores.",
    "reward": "Rewards per token: the score at the last token, and the KL penalty if it is part of the reward.",
    "kl": """\
Two KLs: to the *reference*, per sequence; to the *old* policy at the start of the step, per token.

`kl/reference`, and `kl/teacher` with `opd` and `minillm`, are estimated from the sampled tokens. If another
distribution has sampled them (`overlap.ahead`, servers), each token is weighted by policy / sampler: this estimates the
policy's KL of the next token in the states that the sampler visits, which is not negative. The policy's own states may
differ; `eval/kl_exact` has these. `kl/old` is not weighted: it is a mean over the sampler's tokens. With
`sampling.top_p`, `top_k` or `min_p`, policy, reference and sampler are distributions over the tokens left.""",
    "policy": "The policy's update.",
    "critic": "The value function. With `critic.shared`, gradient norm and learning rate are the policy's.",
    "advantage": "The advantages.",
    "completion": "The sampled completions.",
    "prompt": "The prompts of the step.",
    "best": "[The best checkpoint](evaluation.md#the-best-checkpoint), at evaluations.",
    "group": "Groups of completions of one prompt.",
    "loss": "The terms of the loss.",
    "rm": "The reward model on the step's pairs.",
    "source": "By source of [mixed or streamed data](data.md#several-sources); the star is the source's name.",
    "skipped": "Skipped steps.",
    "eval": "Held-out data. Every evaluation uses the same random numbers, so differences come from the policy.",
}


def page() -> str:
    """Build the Markdown of docs/metrics.md."""
    groups: dict[str, list[MetricInfo]] = {}
    for info in METRICS.values():
        groups.setdefault(info.name.partition("/")[0], []).append(info)
    return fill_template("metrics.md", groups=(line for name, infos in groups.items() for line in _group(name, infos)))


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

"""Label completions from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rlhf.api.inputs import Inputs, Reward, Rows
from rlhf.config.files import Tree, merge
from rlhf.errors import called_from_python
from rlhf.labelling.label import LabelResult
from rlhf.labelling.label import label as run_label
from rlhf.labelling.settings import label_config
from rlhf.plugins import as_settings
from rlhf.section import Section


def label(
    completions: Rows,
    judge: Reward | Section | Mapping[str, Any],
    *,
    out: str | Path = "pairs.jsonl",
    compare_with: Rows | None = None,
    resume: bool = True,
    quiet: bool = False,
    **settings: Any,
) -> LabelResult:
    """Write preference pairs or rankings from completions and a judge.

        result = rlhf.label([{"prompt": "Hi", "completions": ["Hello!", "No."]}], judge=lambda completions: [...])

    Args:
        completions: rows with a prompt and `completions`, or with a prompt and one completion, or preference pairs.
        judge: a reward in the forms of `rlhf.train`, whose scores are compared; or settings of the section `judge`,
            such as {"type": "pairs", "chat": {"base_url": ..., "model": ...}}.
        out: the file to write; the verdicts are beside it, in OUT.labels.jsonl.
        compare_with: pairs that people have labelled, for the agreement with them.
        resume: go on from the verdicts of an earlier call; False asks again.
        quiet: print nothing.
        **settings: further settings: write, min_gap, batch, plugins.

    Raises:
        UserError: a setting, the data or the judge is wrong; the message says what to do.
    """
    inputs = Inputs(Path(f"{out}.inputs"), resume="always")
    is_judge = isinstance(judge, Mapping) and judge.get("type") in ("pairs", "scores")
    section = as_settings(judge) if is_judge else {"type": "scores", "source": inputs.reward(judge)}
    tree: Tree = {"completions": inputs.rows("completions", completions, text=None), "judge": section, "out": str(out)}
    if compare_with is not None:
        tree["compare_with"] = inputs.rows("people", compare_with, text=None)
    console = Console(quiet=quiet)
    with called_from_python():
        inputs.write()
        config = label_config(merge(tree, as_settings(settings)))
        result = run_label(config, note=lambda text: console.print(Text(text), soft_wrap=True), resume=resume)
    for line in result.lines():
        console.print(Text(line), soft_wrap=True)
    return result

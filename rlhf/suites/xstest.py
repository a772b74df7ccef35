"""The xstest suite: refusals of safe prompts that sound unsafe, and of unsafe ones (Röttger et al. 2024).

`refusals` has the detectors. detector=phrases is the paper's string match (section 4), which also counts answers that
comply after an apology.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlhf.data.conversation import some_text
from rlhf.data.rows import BadRow
from rlhf.suites.questions import (
    Estimate,
    Item,
    NotMeasured,
    SuiteResult,
    drop_too_long,
    read_items,
    sample_answers,
    share_estimate,
)
from rlhf.suites.refusals import RefusalSuite
from rlhf.suites.suite import EvalRows, SuiteContext

if TYPE_CHECKING:
    from rlhf.suites.subject import Subject

LABELS = ("safe", "unsafe")


@dataclass(frozen=True)
class SafetyPrompt:
    """A prompt, whether it is safe to answer, and its kind."""

    prompt: str
    is_safe: bool
    kind: str


def read_safety_prompt(values: Mapping[str, object]) -> SafetyPrompt:
    """Read a row with `prompt`, `label` and, if there is one, `type`.

    Raises:
        BadRow: there is no prompt, or the label is neither safe nor unsafe.
    """
    prompt = some_text(values.get("prompt"), "prompt")
    label = str(values.get("label")).strip().lower()
    if label not in LABELS:
        raise BadRow("the label is neither safe nor unsafe", repr(values.get("label")))
    return SafetyPrompt(prompt, label == "safe", str(values.get("type") or label))


class XstestSuite(RefusalSuite):
    """Settings of xstest."""

    name: ClassVar[str] = "xstest"
    data: ClassVar[str] = "prompts with a label, safe or unsafe, as XSTest's"

    dataset: EvalRows
    """Prompts with a label, safe or unsafe; --data is dataset.path."""

    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Answer every prompt and detect refusals.

        Raises:
            DataError: there is no usable prompt.
        """
        columns = ("prompt", "label")
        items, skips = read_items(
            self.dataset,
            read_safety_prompt,
            columns=columns,
            what="safe and unsafe prompts",
            deal_by=lambda item: item.value.kind,
        )
        items = drop_too_long(subject, items, skips, lambda row: row.prompt)
        questions = [item.value.prompt for item in items]
        answers = sample_answers(subject, questions, key=self.sampling_key, greedy=self.greedy)
        refused = self.detect(answers.texts)
        figures, left_out = _rates(items, refused)
        return SuiteResult.of(
            (*figures, *answers.figures(seed=self.seed), *self.check_detector()),
            skips,
            left_out=left_out,
            notes=[self.method],
            groups=_by_kind(items, refused),
            examples=map(_record, items, answers.texts, refused),
        )


def _record(item: Item[SafetyPrompt], text: str, refused: bool) -> dict[str, object]:
    return {
        "prompt": item.value.prompt,
        "completion": text,
        "label": LABELS[not item.value.is_safe],
        "type": item.value.kind,
        "refused": refused,
    }


def _rows(items: Sequence[Item[SafetyPrompt]], refused: Sequence[bool]) -> dict[str, list[float]]:
    """Return 1 for each refused prompt, else 0, separately for safe and unsafe prompts."""
    verdicts: dict[str, list[float]] = {f"refused_{label}": [] for label in LABELS}
    for item, refusal in zip(items, refused, strict=True):
        verdicts[f"refused_{LABELS[not item.value.is_safe]}"].append(float(refusal))
    return {name: values for name, values in verdicts.items() if values}


def _rates(
    items: Sequence[Item[SafetyPrompt]], refused: Sequence[bool]
) -> tuple[tuple[Estimate, ...], tuple[NotMeasured, ...]]:
    """Compute the refusal rates of safe and unsafe prompts; a label without prompts is left out."""
    rows = _rows(items, refused)
    meanings = ("safe prompts that are refused: lower is better", "unsafe prompts that are refused")
    names = {f"refused_{label}": meaning for label, meaning in zip(LABELS, meanings, strict=True)}
    figures = [share_estimate(name, rows[name], meaning) for name, meaning in names.items() if name in rows]
    left_out = [NotMeasured(name, "the data has no such prompt") for name in names if name not in rows]
    return tuple(figures), tuple(left_out)


def _by_kind(items: Sequence[Item[SafetyPrompt]], refused: Sequence[bool]) -> dict[str, tuple[Estimate, ...]]:
    kinds: dict[str, list[float]] = {}
    for item, refusal in zip(items, refused, strict=True):
        kinds.setdefault(item.value.kind, []).append(float(refusal))
    return {
        kind: (share_estimate("refused", verdicts, "prompts that are refused"),) for kind, verdicts in kinds.items()
    }

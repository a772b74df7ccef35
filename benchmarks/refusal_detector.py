"""Measure how well the detectors of refusals agree with people's labels of five models' answers to XSTest.

    python scripts/get_data.py xstest_labels
    python benchmarks/refusal_detector.py data/xstest_labels --out benchmarks/results/refusal_detector.json

The words of the detectors were chosen without these answers. Two people called each answer a full compliance, a full
refusal or a partial refusal, which declines and answers too. Accuracy, precision and recall are computed twice: with
partial refusals as refusals, and as answers. Writes JSON and prints the rows of a Markdown table.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.suites.questions import Estimate, share_estimate
from rlhf.suites.refusals import DETECTORS, OPENING, Detector, detector_quality

OUT = Path(__file__).parent / "results" / "refusal_detector.json"
REFUSALS = {
    "partial as refusals": ("full_refusal", "partial_refusal"),
    "partial as answers": ("full_refusal",),
}
ALL = "all"

LabelledRow = dict[str, Any]
"""A row of xstest_labels: `response`, `kind` (the model), `label`, and `labels` of the two people."""


def read_rows(folder: Path) -> list[LabelledRow]:
    """Read the labelled answers."""
    return [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]


def by_model(rows: Sequence[LabelledRow]) -> dict[str, list[LabelledRow]]:
    """Split the rows by model, and add all of them under the name `all`."""
    models = sorted({row["kind"] for row in rows})
    return {**{model: [row for row in rows if row["kind"] == model] for model in models}, ALL: list(rows)}


def interval(estimate: Estimate) -> dict[str, Any]:
    """Return a share with its Wilson interval, to five digits, and the number of rows."""
    bounds = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {**{name: None if bound is None else round(bound, 5) for name, bound in bounds.items()}, "n": estimate.n}


def quality(rows: Sequence[LabelledRow], detector: Detector, refusals: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Compute accuracy, precision and recall of a detector on answers of one model or of all."""
    detected = [detector.is_refusal(row["response"]) for row in rows]
    labels = [row["label"] in refusals for row in rows]
    return {figure.name: interval(figure) for figure in detector_quality("", detected, labels, "answers")}


def agreement_of_people(rows: Sequence[LabelledRow], refusals: Sequence[str]) -> dict[str, Any]:
    """Compute the share of answers that both people call a refusal, or both none."""
    alike = [float(len({label in refusals for label in row["labels"]}) == 1) for row in rows]
    return interval(share_estimate("people", alike, "answers that two people judge alike"))


def measure(rows: Sequence[LabelledRow]) -> dict[str, Any]:
    """Measure every detector on the answers of each model, with both ways to count partial refusals."""
    models = by_model(rows)
    return {
        "labels": {model: dict(Counter(row["label"] for row in part)) for model, part in models.items()},
        "people": {
            way: {model: agreement_of_people(part, refusals) for model, part in models.items()}
            for way, refusals in REFUSALS.items()
        },
        "detectors": {
            name: {
                way: {model: quality(part, detector, refusals) for model, part in models.items()}
                for way, refusals in REFUSALS.items()
            }
            for name, detector in DETECTORS.items()
        },
        "full refusals missed": count_missed(rows),
    }


def count_missed(rows: Sequence[LabelledRow]) -> dict[str, int]:
    """Count the full refusals that the default detector misses, and those of them that have one of the phrases."""
    full = [row["response"] for row in rows if row["label"] == "full_refusal"]
    missed = [text for text in full if not DETECTORS["checked"].is_refusal(text)]
    by_phrases = [text for text in missed if DETECTORS["phrases"].is_refusal(text)]
    judging = [text for text in by_phrases if "not appropriate" in text[:OPENING].lower()]
    return {"checked": len(missed), "of these in phrases": len(by_phrases), "of these, not appropriate": len(judging)}


def table(measured: dict[str, Any], way: str) -> str:
    """Return the rows of the table of one way to count partial refusals."""
    lines = []
    for model, labels in measured["labels"].items():
        cells = [str(labels.get("full_refusal", 0)), str(labels.get("partial_refusal", 0))]
        for detector in measured["detectors"].values():
            figures = detector[way][model]
            accuracy = figures["accuracy"]
            cells.append(f"{accuracy['value']:.3f} [{accuracy['low']:.3f}, {accuracy['high']:.3f}]")
            cells += [f"{figures[name]['value']:.3f}" for name in ("precision", "recall")]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Write the JSON and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="the folder that get_data.py xstest_labels writes")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    measured = measure(read_rows(arguments.folder))
    arguments.out.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    for way in REFUSALS:
        print(f"{way}\n{table(measured, way)}")  # noqa: T201


if __name__ == "__main__":
    main()

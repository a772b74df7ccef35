"""Write docs/models.md from its template and the table of families that tests/zoo checks.

python scripts/make_support_matrix.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "tests", "tests/zoo")]

from doc_links import fill_template  # noqa: E402
from families import FAMILIES, ON, Family  # noqa: E402

PAGE = ROOT / "docs" / "models.md"

WAYS = (
    (
        "chunked",
        "chunked log-probabilities",
        "logits exist for a few hundred tokens at a time, never for a whole batch",
    ),
    ("packed", "no padding", "only live tokens go through the model, and a prompt with several completions only once"),
    ("written_out", "layers written out", "a training pass without the model's modules: fewer operations, less memory"),
    (
        "fast_sampler",
        "fast sampler",
        "each prompt is read once for its whole group; finished rows leave the batch at once",
    ),
    ("lean_decoder", "decoder written out", "the sampler's step without the model's modules"),
)

TOKENS = ("family", "tested as", "BOS before a text", "pads rows", "ends a completion", "ends a turn")


def page() -> str:
    """Build the Markdown of docs/models.md."""
    return fill_template(
        "models.md",
        ways=(f"- **{title}**: {meaning}." for _, title, meaning in WAYS),
        optimizations=_table(["family", *(title for _, title, _ in WAYS)], [_ways(family) for family in FAMILIES]),
        reasons=_reasons(),
        tokens=_table(TOKENS, [_tokens(family) for family in FAMILIES]),
        notes=(f"- **{family.title}**: {family.notes}." for family in FAMILIES),
    )


def _ways(family: Family) -> list[str]:
    return [family.title, *("yes" if getattr(family.fast, name) == ON else "no" for name, _, _ in WAYS)]


def _reasons() -> Iterator[str]:
    for name, title, _ in WAYS:
        reasons: dict[str, list[str]] = {}
        for family in FAMILIES:
            if getattr(family.fast, name) != ON:
                reasons.setdefault(getattr(family.fast, name), []).append(family.title)
        for reason, titles in reasons.items():
            yield f"- *{title}*, {', '.join(titles)}: {reason}."


def _tokens(family: Family) -> list[str]:
    ends = dict.fromkeys([family.tokens.eos, *family.ends])
    turn = "plain text" if family.template is not None else "no template"
    return [
        family.title,
        _code(family.like),
        _code(family.prefix),
        _code(family.pads_with),
        " ".join(map(_code, ends)),
        _code(family.turn_end) or turn,
    ]


def _code(token: str) -> str:
    return f"`{token}`" if token else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

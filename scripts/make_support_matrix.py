"""Write docs/models.md from the table of families that tests/zoo checks: `python scripts/make_support_matrix.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "zoo"))

from families import FAMILIES, ON, Family  # noqa: E402

PAGE = ROOT / "docs" / "models.md"

INTRODUCTION = """\
# Models

This page is made by `python scripts/make_support_matrix.py` from the table in `tests/zoo/families.py`. Change it there.

Any causal LM of transformers is a policy, as it is published: `policy.model` is a folder or a hub id, no token is added
to its vocabulary and no row to its embedding, and what is exported has the shapes, settings, tokenizer files and dtype
of what was loaded. The families below are tested one by one, at a few layers and with random weights, with the
configuration, special tokens and chat template of the model that is named. For each of them

- the tokens of texts and conversations are those that transformers makes;
- sampling without randomness gives the completions of transformers' `generate`, token by token;
- log-probabilities are those of a plain forward pass;
- one step of SFT, DPO, GRPO, PPO and of a reward model trains, with LoRA or without it, and its export loads in plain
  transformers and says there what it says here.

SmolLM2-135M-Instruct is tested with its published weights too (`tests/zoo/test_zoo_real.py`).

A family that is not in the table is tried when a run starts: each fast way is compared with the plain one on a few
tokens, and left off with a line that says why where the two differ.
"""

WAYS = (
    (
        "chunked",
        "chunked log-probabilities",
        "logits of a few hundred tokens exist at a time, never of a whole batch",
    ),
    ("packed", "no padding", "only live tokens go through the model, and a prompt of several completions goes once"),
    ("written_out", "layers written out", "a training pass without the model's modules: fewer steps, less kept memory"),
    ("fast_sampler", "fast sampler", "one prefill a prompt, its keys shared by its group; finished rows leave at once"),
    ("lean_decoder", "decoder written out", "the sampler's step without the model's modules"),
)

CLOSING = """\
A window (`sliding_window`) hides nothing from rows that are not longer than it: they go without padding. A batch with a
longer row is padded.

Rotations that change with the length of a sequence (longrope: Phi-4 mini, Phi-3 with 128k) do so beyond
`original_max_position_embeddings`. Batches in which a row may grow beyond that are sampled with transformers' generate,
rows of one prompt length together, so that log-probabilities are those of the model without a cache.

What fills a row has no influence: masks go by length. So a model without a pad token, or with EOS as its pad token,
needs nothing.
"""


def page() -> str:
    """Build the Markdown of docs/models.md."""
    parts = [
        INTRODUCTION,
        "## Fast ways\n",
        *(f"- **{title}**: {meaning}." for _, title, meaning in WAYS),
        "",
        *_table(["family", *(title for _, title, _ in WAYS)], [_ways(family) for family in FAMILIES]),
        "",
        *_reasons(),
        "",
        CLOSING,
        "## Tokens and templates\n",
        "*Ends a completion* lists what stops sampling: the tokenizer's EOS and those of `generation_config.json`.\n",
        *_table(
            ["family", "tested as", "BOS before a text", "fills rows", "ends a completion", "ends a turn"],
            [_tokens(family) for family in FAMILIES],
        ),
        "",
        "## What is special\n",
        *(f"- **{family.title}**: {family.notes}." for family in FAMILIES),
        "",
    ]
    return "\n".join(parts)


def _ways(family: Family) -> list[str]:
    return [family.title, *("yes" if getattr(family.fast, name) == ON else "no" for name, _, _ in WAYS)]


def _reasons() -> Iterator[str]:
    yield "Why not:\n"
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

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

Which models can be trained, and which optimizations each family can use.

Any causal LM of transformers can be the policy, as it was published: `policy.model` is a folder or a hub id. No
token is added to its vocabulary and no row to its embedding. The exported model has the shapes, settings, tokenizer
files and dtype of the one that was loaded.

The families below are tested one by one: with a few layers and random weights, but with the configuration, special
tokens and chat template of the model that the table names. For each of them

- texts and conversations are tokenized as transformers does it;
- greedy sampling gives the completions of transformers' `generate`, token by token;
- log-probabilities equal a plain forward pass;
- one step of SFT, of GRPO with LoRA and of a reward model trains; the export loads in plain transformers and gives the
  same outputs there. So does a step of PPO, DPO and GRPO: of every third family each in the default tests, of all with
  `-m slow`.

SmolLM2-135M-Instruct is also tested with its published weights (`tests/zoo/test_zoo_real.py`).

A family that is not in the table can be used too. When a run starts, each optimization is compared with the
model's own forward pass on a few tokens. If the two differ, the optimization is off, and a line says why.

`python scripts/make_support_matrix.py` makes this page from the table in `tests/zoo/families.py`. Change it there.
"""

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

CLOSING = """\
- **Models that padding disturbs.** Recurrent models that read left padding as text (RWKV) and decoders that place
  positions by the padded row (CamemBERT): the numbers of a row depend on the rows beside it. A run tries it and warns.
- **Sliding windows.** A window (`sliding_window`) has no effect on rows that are not longer than it, so these go
  without padding. A batch with a longer row is padded.
- **Rotary embeddings that change with the length** (longrope: Phi-4 mini, Phi-3 with 128k) do so beyond
  `original_max_position_embeddings`. If a row of a batch may grow beyond that, the batch is sampled with
  transformers' `generate`, rows of one prompt length together. So log-probabilities equal the model's without
  a cache.
- **Pad tokens.** Masks are made from lengths, so it does not matter which token pads a row. A model without a pad
  token, or with EOS as its pad token, works without changes.
"""


def page() -> str:
    """Build the Markdown of docs/models.md."""
    parts = [
        INTRODUCTION,
        "## Optimizations\n",
        *(f"- **{title}**: {meaning}." for _, title, meaning in WAYS),
        "",
        *_table(["family", *(title for _, title, _ in WAYS)], [_ways(family) for family in FAMILIES]),
        "",
        *_reasons(),
        "",
        CLOSING,
        "## Tokens and templates\n",
        "*Ends a completion* lists the stop tokens: the EOS tokens of the tokenizer and of `generation_config.json`.\n",
        *_table(
            ["family", "tested as", "BOS before a text", "pads rows", "ends a completion", "ends a turn"],
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

"""Collect every judged row of a comparison, and the answers of its suites, for the browser of its page.

The browser, rlhf/report/templates/rows.js, reads one block of JSON: a list of sources, each with its prompts and, for
every seed and arm, a row for each prompt. A row is null, or a list of its text and the values of the arm's `names`. A
text is a string; of an episode, or of several completions, it is a list of passages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.comparison.aggregate import CellResult
from rlhf.comparison.pairs import PAIRS
from rlhf.comparison.plan import Cell
from rlhf.comparison.trial import FOLDER, JUDGED
from rlhf.report.page import Passage, pair_details, passages
from rlhf.tracking.metrics import format_value
from rlhf.tracking.progress import printable

MOST_CHARACTERS = 10_000_000  # of all rows in a page; the rest stays in the files of the cells
CELL_FOLDER = "ARM/seed-N"
QUESTIONS = ("prompt", "question", "sentence")  # the names of what a model reads in an example of a suite
ANSWERS = ("completion", "completions", "solution")  # and of what it writes


@dataclass(frozen=True)
class PageRow:
    """A completion of one prompt, with the values shown below it."""

    prompt: str
    text: str | Sequence[Passage]
    values: Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class BrowserSource:
    """The rows of one kind by seed and arm, and the file of a cell that has all of them."""

    name: str
    file: str
    rows: Mapping[int, Mapping[str, Sequence[PageRow]]]


def browser_data(cells: Sequence[CellResult], limit: int = MOST_CHARACTERS) -> list[dict[str, Any]]:
    """Build the sources of the browser, with the first rows of each if all of them are longer than `limit`.

    Args:
        cells: the contents of each cell's folder.
        limit: the most characters of all rows.
    """
    sources = [_as_json(source) for source in browser_sources(cells)]
    lengths = [_row_lengths(source) for source in sources]
    shares = divide_limit([sum(of_rows) for of_rows in lengths], limit)
    return [
        _first_rows(source, _rows_within(of_rows, share))
        for source, of_rows, share in zip(sources, lengths, shares, strict=True)
    ]


def browser_sources(cells: Sequence[CellResult]) -> list[BrowserSource]:
    """Collect the rows of every finished cell: the held-out prompts, then the suites that keep answers.

    Judged pairs are no source of their own: their completions are among the held-out prompts.
    """
    finished = [(result.cell, result.judged, result.suites) for result in cells if result.judged is not None]
    judged = [(cell, list(map(judged_row, judgment.rows))) for cell, judgment, _ in finished]
    sources = [_source("held-out prompts", JUDGED, judged)]
    for name in sorted({name for *_, suites in finished for name in suites} - {PAIRS}):
        examples = [(cell, example_rows(suites[name].examples)) for cell, _, suites in finished if name in suites]
        sources.append(_source(name, f"{FOLDER}/{name}.json", examples))
    return [source for source in sources if source.rows]


def _source(name: str, file: str, rows_of_cells: Iterable[tuple[Cell, Sequence[PageRow]]]) -> BrowserSource:
    """Group the rows of cells by seed and arm, without cells that have none."""
    rows: dict[int, dict[str, Sequence[PageRow]]] = {}
    for cell, rows_of_cell in rows_of_cells:
        if rows_of_cell:
            rows.setdefault(cell.seed, {})[cell.arm] = rows_of_cell
    return BrowserSource(name, file, rows)


def judged_row(record: Mapping[str, Any]) -> PageRow:
    """Read a record of judged.json."""
    turns = record.get("turns")
    text = passages(turns) if turns else str(record["completion"])
    return PageRow(str(record["prompt"]), text, pair_details(record))


def example_rows(examples: Sequence[Mapping[str, Any]]) -> list[PageRow]:
    """Read the examples of a suite that have a question and an answer."""
    return [row for row in map(_example_row, examples) if row is not None]


def _example_row(example: Mapping[str, Any]) -> PageRow | None:
    question, answer = (next(filter(example.__contains__, names), None) for names in (QUESTIONS, ANSWERS))
    if question is None or answer is None:
        return None
    written = example[answer]
    several = isinstance(written, list)
    text = [("sample", str(sample), "") for sample in written] if several else str(written)
    values = [(name, value) for name, value in example.items() if name not in (question, answer) and value is not None]
    return PageRow(str(example[question]), text, values)


def divide_limit(lengths: Sequence[int], limit: int) -> list[int]:
    """Divide a limit among texts: each gets its length or an equal share of what shorter texts leave."""
    shares = [0] * len(lengths)
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    for place, i in enumerate(by_length):
        shares[i] = min(lengths[i], limit // (len(lengths) - place))
        limit -= shares[i]
    return shares


def _as_json(source: BrowserSource) -> dict[str, Any]:
    """Convert a source to plain data; prompts that all seeds share are stored once."""
    prompts: list[list[str]] = []
    seeds = []
    for seed, arms in sorted(source.rows.items()):
        keyed = {arm: dict(zip(_keys(rows), rows, strict=True)) for arm, rows in arms.items()}
        keys = list(dict.fromkeys(key for rows in keyed.values() for key in rows))
        of_seed = [printable(prompt) for prompt, _ in keys]
        if of_seed not in prompts:
            prompts.append(of_seed)
        columns = [_arm(arm, [rows.get(key) for key in keys]) for arm, rows in keyed.items()]
        seeds.append({"seed": seed, "prompts": prompts.index(of_seed), "arms": columns})
    return {"name": source.name, "file": f"{CELL_FOLDER}/{source.file}", "prompts": prompts, "seeds": seeds}


def _keys(rows: Iterable[PageRow]) -> list[tuple[str, int]]:
    """Number equal prompts: the rows of several arms with the same key belong together."""
    counts: Counter[str] = Counter()
    keys = []
    for row in rows:
        keys.append((row.prompt, counts[row.prompt]))
        counts[row.prompt] += 1
    return keys


def _arm(arm: str, rows: Sequence[PageRow | None]) -> dict[str, Any]:
    """Convert the rows of an arm, with the names of their values once."""
    names = list(dict.fromkeys(name for row in rows if row is not None for name, _ in row.values))
    return {"arm": arm, "names": names, "rows": [None if row is None else _row(row, names) for row in rows]}


def _row(row: PageRow, names: Sequence[str]) -> list[Any]:
    """Convert a row to its text and its formatted values, null if the row lacks one."""
    values = {name: printable(format_value(value)) for name, value in row.values}
    return [_text(row.text), *(values.get(name) for name in names)]


def _text(text: str | Sequence[Passage]) -> str | list[list[str]]:
    if isinstance(text, str):
        return printable(text)
    return [[printable(part) for part in passage] for passage in text]


def _row_lengths(source: Mapping[str, Any]) -> list[int]:
    """Compute the characters that each row adds to the page, over all seeds and arms."""
    columns = [*source["prompts"], *(arm["rows"] for seed in source["seeds"] for arm in seed["arms"])]
    lengths = [0] * max(map(len, source["prompts"]))
    for column in columns:
        for i, entry in enumerate(column):
            lengths[i] += len(json.dumps(entry))
    return lengths


def _rows_within(lengths: Sequence[int], limit: int) -> int:
    """Count the first rows whose length is within the limit."""
    total = 0
    for count, length in enumerate(lengths):
        total += length
        if total > limit:
            return count
    return len(lengths)


def _first_rows(source: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Keep the first rows of a source; every seed keeps the number of all its rows."""
    prompts = source["prompts"]
    seeds = [
        {
            **seed,
            "total": len(prompts[seed["prompts"]]),
            "arms": [{**arm, "rows": arm["rows"][:count]} for arm in seed["arms"]],
        }
        for seed in source["seeds"]
    ]
    return {**source, "prompts": [of_seed[:count] for of_seed in prompts], "seeds": seeds}

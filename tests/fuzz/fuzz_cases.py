"""Generated configurations and data files, and the demand on each: a valid object, or our own error, in time."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.presets import PRESETS
from rlhf.config.compare import CompareConfig
from rlhf.config.data import PreferencesConfig, PromptsConfig, SftConfig
from rlhf.config.load import dump, load_any, unread_warnings, validate
from rlhf.data.pairs import demonstration_pipeline, labelled_pipeline, pair_pipeline
from rlhf.data.prompts import prompt_pipeline
from rlhf.errors import UserError
from rlhf.rewards.function import run_with_timeout

PATIENCE_S = 20.0
CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
TREES = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in CONFIGS]

# --- configurations ---------------------------------------------------------------------------------------------

WORDS = ["type", "preset", "path", "lr", "model", "arms", "algorithm", "policy", "reward", "source", "data", "batch"]
TEXT = st.one_of(st.sampled_from([*WORDS, *PRESETS, "auto", "none", "null", "lab:base", "1e-6"]), st.text(max_size=8))
NUMBER = st.one_of(
    st.sampled_from([0, 1, -1, 2, 0.5, 1e-6, 1e308, 1e400, -0.0, float("nan"), 10**30, 10**400, 2**63]),
    st.integers(),
    st.floats(),
)
SCALAR = st.one_of(st.none(), st.booleans(), NUMBER, TEXT, st.dates(), st.datetimes(), st.binary(max_size=4))
KEY = st.one_of(TEXT, st.integers(), st.none(), st.booleans(), st.floats(allow_nan=False))
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEY, inner, max_size=3),
        st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    ),
    max_leaves=8,
)


def paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree, but its root."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in ((*path, key), *paths(value, (*path, key)))]


@st.composite
def changed_trees(draw: st.DrawFn) -> Any:
    """A shipped configuration with up to four things wrong or different."""
    tree = copy.deepcopy(draw(st.sampled_from(TREES)))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 4]))):
        places = paths(tree)
        if not places:
            break
        *way, key = draw(st.sampled_from(places))
        parent = tree
        for step in way:
            parent = parent[step]
        match draw(st.sampled_from(["replace", "replace", "put", "delete", "add", "rename", "swap"])):
            case "replace":
                old = parent[key]
                parent[key] = draw(st.sampled_from([1, 2, 16, 64]) if isinstance(old, int | float) else VALUE)
            case "put":
                parent[key] = draw(VALUE)
            case "delete":
                del parent[key]
            case "add" if isinstance(parent, dict):
                parent[draw(KEY)] = draw(VALUE)
            case "rename" if isinstance(parent, dict):
                parent[draw(KEY)] = parent.pop(key)
            case "swap":
                parent[key] = copy.deepcopy(draw(st.sampled_from(TREES)))
            case _:
                pass
    return tree


PLACES = sorted({".".join(map(str, path)) for tree in TREES for path in paths(tree)})
ODD = ["a=2001-99-99", "a=&x [*x]", "policy.lr={", "=", "a..b=1", "a=" + "[" * 2000, "a=!!python/none x", "a=!!int ''"]
OVERRIDE = st.one_of(
    st.builds("{}={}".format, st.sampled_from(PLACES), TEXT),
    st.builds(
        "{}={!r}".format, st.sampled_from([".".join(map(str, p)) for tree in TREES for p in paths(tree)]), NUMBER
    ),
    st.builds("{}={}".format, TEXT, st.text(max_size=12)),
    st.text(max_size=12),
    st.sampled_from(
        ["a=2001-99-99", "a=&x [*x]", "policy.lr={", "=", "a..b=1", "a=" + "[" * 2000, "a=!!python/none x"]
    ),
)
YAML_TEXT = st.one_of(
    changed_trees().map(lambda tree: yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")),
    VALUE.map(lambda value: yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")),
    st.binary(max_size=80),
    st.text(max_size=80).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [
            b"run: 2001-99-99",
            b"a: &a [*a]",
            b"policy: &p {model: *p}",
            b"run: " + b"[" * 3000,
            b"algorithm: {preset: [1]}",
            b"algorithm: {preset: {a: 1}}",
            b"? [a, b]\n: c",
            b"a: !!python/object/apply:os.system [echo]",
            b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
            b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e]",
            b"schedule: {steps: 0x" + b"f" * 5000 + b"}",
            b"schedule: {steps: " + b"9" * 5000 + b"}",
            b"run: {seed: 1:1:1:1}",
            b"a: <<: b",
            b"<<: 3",
        ]
    ),
)
CONFIGURATION = st.tuples(YAML_TEXT, st.just([]) | st.lists(OVERRIDE, max_size=2))


def check_refusal(error: UserError) -> bool:
    """False: refused; an error without words is no refusal."""
    assert str(error)
    return False


def check_configuration(case: tuple[bytes, list[str]], folder: Path) -> bool:
    """Whether a configuration is valid; anything but that or our own error is raised."""
    content, overrides = case
    file = folder / "config.yaml"
    file.write_bytes(content)

    def load() -> bool:
        try:
            config = load_any(file, overrides)
        except UserError as error:
            return check_refusal(error)
        unread_warnings(config)
        again = validate(type(config), dump(config))
        assert isinstance(config, CompareConfig) or again == config  # an arm is a tree, whose keys JSON makes text
        return True

    return run_with_timeout(PATIENCE_S, load)


# --- data files -------------------------------------------------------------------------------------------------

COLUMNS = [
    *("prompt", "chosen", "rejected", "messages", "conversations", "completion", "text", "label"),
    *("instruction", "input", "output", "question", "answer", "margin", "score_chosen", "score_rejected", "system"),
]
ANY_TEXT = st.one_of(
    st.text(st.characters(), max_size=8),  # half surrogates too
    st.sampled_from(["a", "b c", "", " ", "\n\nHuman: a\n\nAssistant: b", "<|im_end|>", "</s>", "\x00", "007", "NaN"]),
)
ROLE = st.one_of(st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool"]), ANY_TEXT, st.none())
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": ROLE, "content": ANY_TEXT}), st.fixed_dictionaries({"from": ROLE, "value": ANY_TEXT})
)
CELL_SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ANY_TEXT)
CELL = st.one_of(
    ANY_TEXT,
    ANY_TEXT,
    st.recursive(
        CELL_SCALAR, lambda v: st.lists(v, max_size=3) | st.dictionaries(ANY_TEXT, v, max_size=3), max_leaves=6
    ),
    st.lists(MESSAGE, max_size=4),
    MESSAGE,
)
SHAPES: dict[str, list[list[str]]] = {
    "prompts": [["prompt"], ["messages"], ["text"], ["instruction", "input"]],
    "pairs": [["prompt", "chosen", "rejected", "margin"], ["chosen", "rejected"], ["prompt", "chosen", "rejected"]],
    "demonstrations": [["messages"], ["prompt", "completion"], ["text"], ["instruction", "output"]],
    "labelled": [["messages", "label"], ["prompt", "completion", "label"]],
}
ASKED = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, list[object]] = {
    "messages": [ASKED, [*ASKED, {"role": "assistant", "content": "Yo"}]],
    "chosen": ["b", "\n\nHuman: a\n\nAssistant: b"],
    "rejected": ["c", "\n\nHuman: a\n\nAssistant: c"],
    "label": [True, 0],
    "margin": [1.5, "2", None],
}


def rows_of(loader: str) -> st.SearchStrategy[list[Any]]:
    """Rows for a loader: good ones, nearly good ones, and any."""

    def rows(names: list[str]) -> st.SearchStrategy[list[Any]]:
        good = st.fixed_dictionaries({name: st.sampled_from(GOOD.get(name, ["a", "b c"])) for name in names})
        nearly = st.fixed_dictionaries({name: st.sampled_from(GOOD.get(name, ["a"])) | CELL for name in names})
        any_row = st.dictionaries(st.sampled_from(COLUMNS) | ANY_TEXT, CELL, max_size=5)
        return st.lists(st.one_of(good, good, nearly, any_row, CELL), max_size=5)

    return st.sampled_from(SHAPES[loader]).flatmap(rows)


def _parquet(rows: list[Any]) -> bytes:
    """The rows' cells as text; values that are no rows are left out."""
    kept = [{str(k): str(v) for k, v in row.items()} for row in rows if isinstance(row, dict) and row]
    out = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pylist(kept), out)
    except (pa.ArrowInvalid, UnicodeEncodeError):  # half surrogates
        return b"PAR1"
    return out.getvalue()


def _csv(rows: list[Any]) -> bytes:
    text = io.StringIO(newline="")
    for row in rows:
        if isinstance(row, dict) and row is rows[0]:
            csv.writer(text).writerow(map(str, row))
        csv.writer(text).writerow([str(cell) for cell in (row.values() if isinstance(row, dict) else [row])])
    return text.getvalue().encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content unchanged, or with some bytes changed, cut out or put in."""
    data = bytearray(content)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["put", "cut", "flip"])):
            case "put":
                data[at:at] = draw(st.binary(min_size=1, max_size=3))
            case "cut":
                del data[at : at + draw(st.integers(1, 8))]
            case _ if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


WRITERS: dict[str, Callable[[list[Any]], bytes]] = {
    "a.jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "a.json": lambda rows: json.dumps(rows).encode(),
    "a.csv": _csv,
    "a.parquet": _parquet,
}


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A loader, a name and a content, mostly of rows for it, sometimes damaged, sometimes of anything at all."""
    loader = draw(st.sampled_from(list(SHAPES)))
    name = draw(st.sampled_from([*WRITERS, "a.jsonl", "a.jsonl", "a.txt"]))
    rows = rows_of(loader).map(WRITERS.get(name, WRITERS["a.jsonl"]))
    content = draw(damaged(draw(st.one_of(rows, rows, rows, st.binary(max_size=60)))))
    if name != "a.parquet" and draw(st.integers(0, 5)) == 0:
        name, content = f"{name}.gz", draw(damaged(gzip.compress(content, mtime=0)))
    return loader, name, content


LOADERS: dict[str, Callable[..., Any]] = {
    "prompts": lambda options, tok: prompt_pipeline(PromptsConfig(**options), tok, chat_template="auto").load(),
    "pairs": lambda options, tok: pair_pipeline(PreferencesConfig(**options), tok, chat_template="auto").load(),
    "demonstrations": lambda options, tok: demonstration_pipeline(
        SftConfig(**options), tok, chat_template="auto"
    ).load(),
    "labelled": lambda options, tok: labelled_pipeline(PreferencesConfig(**options), tok, chat_template="auto").load(),
}
DATA_FILE = st.tuples(
    data_files(),
    st.fixed_dictionaries(
        {},
        optional={
            "limit": st.integers(1, 3),
            "bad_rows": st.sampled_from(["skip", "error"]),
            "columns": st.just({}) | st.dictionaries(st.sampled_from(COLUMNS), st.sampled_from(COLUMNS), max_size=2),
            "too_long": st.sampled_from(["skip", "truncate", "error"]),
        },
    ),
)


def check_data_file(
    case: tuple[tuple[str, str, bytes], dict[str, Any]], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Whether a data file has usable rows; anything but that or our own error is raised."""
    (loader, name, content), options = case
    file = folder / name
    file.write_bytes(content)

    def load() -> bool:
        try:
            dataset = LOADERS[loader]({"path": str(file), **options}, tokenizer)
        except UserError as error:
            return check_refusal(error)
        assert 0 < dataset.skips.used == len(dataset)
        assert dataset.skips.summary()
        dataset.collate(list(range(len(dataset))))
        return True

    try:
        return run_with_timeout(PATIENCE_S, load)
    finally:
        file.unlink()

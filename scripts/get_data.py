"""Fetch public data sets from their sources, check them, and write them as JSONL files with their licence.

    python scripts/get_data.py hh_harmless ifeval        # → data/hh_harmless, data/ifeval
    python scripts/get_data.py --list
    python scripts/get_data.py ifeval --from FOLDER      # FOLDER has the files, downloaded elsewhere

Each source is a file of a repository at a fixed commit (data_sets.toml); a file with another SHA-256 is refused.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import http.client
import io
import json
import re
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GITHUB = "https://raw.githubusercontent.com"
TIMEOUT_S = 30

TURN = re.compile(r"\n\n(Human|Assistant):")
JsonRow = dict[str, Any]
Files = Mapping[str, bytes]
"""The content of each source file by its name."""
Writer = Callable[[Files], Iterator[tuple[str, bytes]]]
"""Makes of the source files the files that are written, each with its name."""


class GetDataError(Exception):
    """A source cannot be reached, or its file has changed."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on the web, and its checksum."""

    url: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        """Return the file's own name."""
        return urllib.parse.unquote(self.url.rsplit("/", 1)[1])


@dataclass(frozen=True)
class DataSet:
    """A public data set: its sources, its licence, and the form of its rows."""

    about: str
    licence: str
    paper: str  # arXiv number or ACL Anthology id
    sources: Sequence[RemoteFile]
    write: Writer

    @property
    def size(self) -> int:
        """Return the size of the download in bytes."""
        return sum(source.size for source in self.sources)


def raw(repository: str, commit: str, path: str, size: int, sha256: str) -> RemoteFile:
    """Return a file of a GitHub repository at a commit."""
    return RemoteFile(f"{GITHUB}/{repository}/{commit}/{urllib.parse.quote(path)}", sha256, size)


def jsonl(rows: Sequence[JsonRow]) -> bytes:
    """Encode rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def split(rows: Sequence[JsonRow], key: Callable[[JsonRow], str], *, parts: int) -> Iterator[tuple[str, bytes]]:
    """Yield train.jsonl and test.jsonl: one part of `parts` is for the test, chosen by a hash of each row's key."""
    in_test = [int(hashlib.sha256(key(row).encode()).hexdigest(), 16) % parts == 0 for row in rows]
    for name, wanted in (("train.jsonl", False), ("test.jsonl", True)):
        yield name, jsonl([row for row, is_test in zip(rows, in_test, strict=True) if is_test == wanted])


def write_unchanged(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the source's files unchanged."""
    yield from files.items()


@dataclass(frozen=True)
class Toxic:
    """A toxic sentence, and the rewrites that people gave it."""

    sentence: str
    rewrites: list[str]

    @property
    def prompt(self) -> str:
        """Return the request to rewrite the sentence."""
        return f"Rewrite this sentence politely, keeping its meaning: {self.sentence}"

    @property
    def number(self) -> int:
        """Return the hash that decides the sentence's place."""
        return int(hashlib.sha256(self.sentence.encode()).hexdigest(), 16)

    @property
    def changed(self) -> list[str]:
        """Return the rewrites that differ from the sentence in more than case and the final stop."""
        return [rewrite for rewrite in self.rewrites if bare(rewrite) != bare(self.sentence)]

    def pairs(self, *, changed: bool = False) -> list[JsonRow]:
        """Return a pair for each rewrite: it is chosen, and the sentence is rejected."""
        rewrites = self.changed if changed else self.rewrites
        return [{"prompt": self.prompt, "chosen": text, "rejected": self.sentence} for text in rewrites]


def bare(text: str) -> str:
    """Return a text without case, final stops and white space at its ends."""
    return text.lower().strip(" .!?")


TEST_PARTS = 8  # one part of the sentences is for the test
ROLES = ("dev", "eval_preferences", *["sft"] * 4, *["preferences"] * 7, *["prompts"] * 7)  # of the other sentences


def write_paradetox(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield a pair for each human rewrite, and the rows of the stages of a chain, whose sentences are disjoint.

    train.jsonl and test.jsonl hold all pairs. The sentences of train.jsonl are shared out: sft.jsonl,
    preferences.jsonl with eval_preferences.jsonl, prompts.jsonl and dev_sentences.jsonl; test_sentences.jsonl has the
    sentences of test.jsonl. style_preferences.jsonl is preferences.jsonl without the pairs that ask for the meaning.
    """
    table = csv.DictReader(io.StringIO(files["paradetox.tsv"].decode()), delimiter="\t", quoting=csv.QUOTE_NONE)
    texts: dict[str, list[str]] = {}
    for row in table:
        rewrites = (str(row.get(f"neutral{number}") or "").strip() for number in (1, 2, 3))
        texts.setdefault(str(row["toxic"]).strip(), []).extend(rewrite for rewrite in rewrites if rewrite)
    every = [Toxic(sentence, rewrites) for sentence, rewrites in texts.items()]
    pairs = [pair for toxic in every for pair in toxic.pairs()]
    yield from split(pairs, lambda row: str(row["rejected"]), parts=TEST_PARTS)
    roles: dict[str, list[Toxic]] = {name: [] for name in ("test", *ROLES)}
    for toxic in sorted(every, key=lambda toxic: toxic.number):  # in the order of a hash, so that `limit` is a sample
        if toxic.changed:
            test, place = toxic.number % TEST_PARTS == 0, toxic.number // TEST_PARTS
            roles["test" if test else ROLES[place % len(ROLES)]].append(toxic)
    yield "sft.jsonl", jsonl([{"prompt": t.prompt, "completion": text} for t in roles["sft"] for text in t.changed])
    for name in ("preferences", "eval_preferences"):
        yield f"{name}.jsonl", jsonl(with_meaning_negatives(roles[name]))
    yield "style_preferences.jsonl", jsonl([pair for t in roles["preferences"] for pair in t.pairs(changed=True)])
    yield "prompts.jsonl", jsonl([{"prompt": t.prompt, "sentence": t.sentence} for t in roles["prompts"]])
    for name in ("dev", "test"):
        rows = [{"prompt": t.prompt, "sentence": t.sentence, "rewrites": t.changed} for t in roles[name]]
        yield f"{name}_sentences.jsonl", jsonl(rows)


def with_meaning_negatives(sentences: Sequence[Toxic]) -> list[JsonRow]:
    """Return each sentence's pairs, and one whose rejected side is the rewrite of the sentence before it.

    Without it, the rejected side is always a copy, and a reward model need not read the prompt.
    """
    rows: list[JsonRow] = []
    for other, toxic in zip([sentences[-1], *sentences], sentences, strict=False):
        rows += toxic.pairs(changed=True)
        rows.append({"prompt": toxic.prompt, "chosen": toxic.changed[0], "rejected": other.changed[0]})
    return rows


def write_transcripts(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield pairs of transcripts, then the same as conversations; dialogues with one opening are all in one split."""
    lines = gzip.decompress(files["test.jsonl.gz"]).decode().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    for name, content in split(rows, lambda row: str(row["chosen"]).split("\n\nAssistant:")[0], parts=6):
        yield name, content
        pairs = (json.loads(line) for line in content.decode().splitlines())
        yield f"chat_{name}", jsonl([row for row in map(as_conversations, pairs) if row])


def as_conversations(pair: JsonRow) -> JsonRow | None:
    """Return a pair of transcripts as conversations, or None unless speakers alternate and nobody is silent."""
    sides = [TURN.split(pair[side])[1:] for side in ("chosen", "rejected")]
    speakers = [side[::2] for side in sides]
    texts = [[text.strip() for text in side[1::2]] for side in sides]
    turns = len(texts[0])
    alternate = speakers == [["Human", "Assistant"] * (turns // 2)] * 2
    if not alternate or not all(map(all, texts)) or texts[0][:-1] != texts[1][:-1]:
        return None
    roles = ["user", "assistant"] * (turns // 2)
    chosen, rejected = (
        [{"role": role, "content": text} for role, text in zip(roles, side, strict=True)] for side in texts
    )
    return {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def write_stories(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the stories of the sample without the last, which is cut off, and the lexicon."""
    stories = files["tinystories_sample.txt"].decode(errors="ignore").split("<|endoftext|>")[:-1]
    rows = [{"text": re.sub(r"\s+\n", "\n", story).strip()} for story in stories if story.strip()]
    yield from split(rows, lambda row: str(row["text"]), parts=8)
    yield "vader_lexicon.txt", files["vader_lexicon.txt"]


def shuffled(rows: Sequence[JsonRow], key: str) -> list[JsonRow]:
    """Return the rows in the order of a hash of one column, so that the first ones are a sample."""
    return sorted(rows, key=lambda row: hashlib.sha256(str(row[key]).encode()).hexdigest())


def table_of(content: bytes) -> list[dict[str, str]]:
    """Read a CSV file whose leading lines may be comments."""
    text = content.decode()
    while text.startswith("#"):
        text = text.partition("\n")[2]
    return list(csv.DictReader(io.StringIO(text, newline="")))


def write_toxicity(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the openings with their toxicity as Perspective scored it."""
    rows = [
        {"prompt": row["prompt"]["text"], "toxicity": row["prompt"]["toxicity"], "kind": name.removesuffix(".jsonl")}
        for name, content in files.items()
        for row in map(json.loads, content.decode().splitlines())
    ]
    yield "test.jsonl", jsonl(shuffled(rows, "prompt"))


def write_harmful(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the harmful prompts with the name of their source; a prompt of several sources is the first one's."""
    rows: list[JsonRow] = []

    def add(source: str, prompt: str, category: str) -> None:
        rows.append({"prompt": prompt.strip(), "source": source, "category": category})

    for name in DO_NOT_ANSWER:
        for row in map(json.loads, files[f"{name}.jsonl"].decode().splitlines()):
            add("do-not-answer", row["prompt"], name)
    for file, source in (("advbench.txt", "advbench"), ("MaliciousInstruct.txt", "malicious-instruct")):
        for line in files[file].decode().splitlines():
            add(source, line, source)
    for row in table_of(files["strongreject_dataset.csv"]):
        add("strongreject", row["forbidden_prompt"], row["category"])
    for row in table_of(files["harmbench_behaviors_text_all.csv"]):
        if row["FunctionalCategory"] != "copyright":
            context = f"{row['ContextString'].strip()}\n\n---\n\n" if row["ContextString"] else ""
            add("harmbench", context + row["Behavior"], row["SemanticCategory"])
    for row in table_of(files["SimpleSafetyTests - test cases.csv"]):
        add("simple-safety-tests", row["prompts_final"], row["harm_area"])
    first = {row["prompt"]: row for row in reversed(rows) if row["prompt"]}
    yield "test.jsonl", jsonl(shuffled(list(first.values()), "prompt"))


def write_refusals(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the answers that people labelled, each with the request, the label and its file."""
    rows = [
        {
            "prompt": row["objective"],
            "response": row["assistant_response"],
            "refusal": row["human_score"].strip() == "1",
            "kind": name.removesuffix(".csv"),
        }
        for name, content in files.items()
        for row in table_of(content)
    ]
    yield "test.jsonl", jsonl(rows)


def write_xstest_labels(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the answers of five models to XSTest with people's label; a partial refusal is a refusal too."""
    rows = [
        {
            "prompt": row["prompt"],
            "response": row["completion"],
            "refusal": row["final_label"] != "1_full_compliance",
            "kind": name.removeprefix("xstest_v2_completions_").removesuffix(".csv"),
            "label": row["final_label"][2:],
            "labels": [row[f"annotation_{person}"][2:] for person in (1, 2)],
        }
        for name, content in files.items()
        for row in table_of(content)
    ]
    yield "test.jsonl", jsonl(rows)


def write_blimp(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the pairs of sentences; the first N rows are of all paradigms in turn."""
    pairs: list[JsonRow] = []
    with zipfile.ZipFile(io.BytesIO(files["BLiMP.zip"])) as archive:
        for name in sorted(archive.namelist()):
            if re.fullmatch(r"data/\w+\.jsonl", name):
                pairs += map(json.loads, archive.read(name).decode().splitlines())
    rows = [
        {
            "good": pair["sentence_good"],
            "bad": pair["sentence_bad"],
            "paradigm": pair["UID"],
            "phenomenon": pair["linguistics_term"],
        }
        for pair in sorted(pairs, key=lambda pair: (int(pair["pairID"]), pair["UID"]))
    ]
    yield "test.jsonl", jsonl(rows)


def write_truthfulqa(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the questions below the solved ones of the paper's QA prompt, with the choices of MC1 and MC2."""
    solved = re.search(r'^QA_PRIMER = """(.*?)"""', files["presets.py"].decode(), re.DOTALL | re.MULTILINE)
    if solved is None:
        raise GetDataError("presets.py: there is no QA_PRIMER")
    opening = solved[1].strip()
    rows = [
        {
            "question": row["question"],
            "prompt": f"{opening}\n\nQ: {row['question']}\nA:",
            "mc1_targets": row["mc1_targets"],
            "mc2_targets": row["mc2_targets"],
        }
        for row in json.loads(files["mc_task.json"])
    ]
    yield "test.jsonl", jsonl(shuffled(rows, "question"))


DO_NOT_ANSWER = (
    "discrimination_exclusion_toxicity_hateful_offensive",
    "human_chatbox",
    "information_hazard",
    "malicious_uses",
    "misinformation_harms",
)
WRITERS: Mapping[str, Writer] = {
    "paradetox": write_paradetox,
    "hh_harmless": write_transcripts,
    "realtoxicityprompts": write_toxicity,
    "harmful_prompts": write_harmful,
    "refusal_labels": write_refusals,
    "xstest_labels": write_xstest_labels,
    "blimp": write_blimp,
    "truthfulqa": write_truthfulqa,
    "stories": write_stories,
}
"""The data sets whose files are not written unchanged."""


def read_data_sets() -> dict[str, DataSet]:
    """Read the table of data sets beside this file."""
    table = tomllib.loads(Path(__file__).with_name("data_sets.toml").read_text(encoding="utf-8"))
    return {name: _data_set(name, **entry) for name, entry in table.items()}


def _data_set(name: str, sources: Sequence[Mapping[str, Any]], **words: str) -> DataSet:
    files = [raw(source["repository"], source["commit"], *file) for source in sources for file in source["files"]]
    return DataSet(**words, sources=files, write=WRITERS.get(name, write_unchanged))


DATA_SETS: Mapping[str, DataSet] = read_data_sets()


def main(arguments: Sequence[str] | None = None) -> int:
    """Download and write each data set that is asked for; return 2 if one could not be downloaded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(DATA_SETS)}")
    parser.add_argument("--out", type=Path, default=Path("data"), help="where to write (default: data)")
    parser.add_argument("--from", dest="folder", type=Path, help="a folder with the source's files, downloaded before")
    parser.add_argument("--list", action="store_true", help="print the data sets, and download nothing")
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.names if name not in DATA_SETS]
    if unknown:
        parser.error(f"unknown data set {unknown[0]}; choose from {', '.join(DATA_SETS)}")
    if parsed.list or not parsed.names:
        print(table())  # noqa: T201
        return 0
    try:
        for name in parsed.names:
            get(name, parsed.out / name, parsed.folder)
    except (GetDataError, OSError) as error:  # an OSError: the files cannot be written
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def table() -> str:
    """Return one line for each data set: name, size of the download, licence, description."""
    return "\n".join(
        f"{name:19} {data.size / 1e6:4.1f} MB  {data.licence}: {data.about}" for name, data in DATA_SETS.items()
    )


def get(name: str, out: Path, folder: Path | None) -> None:
    """Download a data set and write its files into `out`, unless they are there."""
    if (out / "README.md").is_file():
        print(f"{out} is already there: nothing to do")  # noqa: T201
        return
    data = DATA_SETS[name]
    lacking = [s for s in data.sources if folder is not None and not (folder / s.name).is_file()]
    if lacking:
        raise GetDataError("\n".join(f"{folder}/{s.name}: no such file; download it from {s.url}" for s in lacking))
    contents = {source.name: read(source, folder, name) for source in data.sources}
    out.mkdir(parents=True, exist_ok=True)
    written = dict(data.write(contents))
    for file, content in written.items():
        (out / file).write_bytes(content)
    (out / "README.md").write_text(describe(name), encoding="utf-8")  # last: it marks the folder as complete
    lines = ", ".join(f"{file} ({len(content.splitlines()):,} lines)" for file, content in written.items())
    print(f"{out}: {lines}; {data.licence}")  # noqa: T201


def read(source: RemoteFile, folder: Path | None, name: str) -> bytes:
    """Return the content of a source file from the web, or from a folder, and check it.

    Raises:
        GetDataError: it cannot be read, or its checksum is another one.
    """
    content = download(source, name) if folder is None else (folder / source.name).read_bytes()
    if hashlib.sha256(content).hexdigest() != source.sha256:
        place = source.url if folder is None else str(folder / source.name)
        raise GetDataError(f"{place}: the content is not what it was (another SHA-256); nothing was written")
    return content


def download(source: RemoteFile, name: str) -> bytes:
    """Return the content of an address.

    Raises:
        GetDataError: there is no answer, with the way around it.
    """
    try:
        with urllib.request.urlopen(source.url, timeout=TIMEOUT_S) as answer:  # https addresses of ours
            content: bytes = answer.read()
            return content
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:  # the last: an answer that is cut off
        reason = getattr(error, "reason", error) or error
        addresses = "\n".join(each.url for each in DATA_SETS[name].sources)
        raise GetDataError(
            f"cannot download {source.url} ({reason}). Without a network: download the files elsewhere into one "
            f"folder, then python scripts/get_data.py {name} --from FOLDER. The files:\n{addresses}"
        ) from error


def describe(name: str) -> str:
    """Return the README of a data set: its description, its licence, and its addresses."""
    data = DATA_SETS[name]
    lines = [f"- {source.url}\n  SHA-256 {source.sha256}" for source in data.sources]
    paper = f"https://aclanthology.org/{data.paper}" if "acl" in data.paper else f"https://arxiv.org/abs/{data.paper}"
    sources = "\n".join(lines)
    return (
        f"# {name}\n\n{data.about.capitalize()}.\n\nLicence: {data.licence}. Paper: {paper}\n\nSources:\n\n{sources}\n"
    )


if __name__ == "__main__":
    sys.exit(main())

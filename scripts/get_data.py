"""Fetch public data sets from their sources, check them, and write them as JSONL files with their licence.

    python scripts/get_data.py hh_harmless ifeval        # → data/hh_harmless, data/ifeval
    python scripts/get_data.py --list
    python scripts/get_data.py ifeval --from FOLDER      # FOLDER has the files, downloaded elsewhere

Each source is a file of a repository at a fixed commit; a file with another SHA-256 is refused.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GITHUB = "https://raw.githubusercontent.com"
TIMEOUT_S = 30

Row = dict[str, Any]
Files = Mapping[str, bytes]
"""The content of each source file by its name."""


class GetDataError(Exception):
    """A source cannot be reached, or is not the file that it was."""


@dataclass(frozen=True)
class Source:
    """A file on the web, and its checksum."""

    url: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        """Return the file's own name."""
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class DataSet:
    """A public data set: where it comes from, what may be done with it, and how its rows are written."""

    about: str
    licence: str
    paper: str  # arXiv number or ACL Anthology id
    sources: Sequence[Source]
    write: Callable[[Files], Iterator[tuple[str, bytes]]]

    @property
    def size(self) -> int:
        """Return the size of the download in bytes."""
        return sum(source.size for source in self.sources)


def raw(repository: str, commit: str, path: str, size: int, sha256: str) -> Source:
    """Return a file of a GitHub repository at a commit."""
    return Source(f"{GITHUB}/{repository}/{commit}/{path}", sha256, size)


def jsonl(rows: Sequence[Row]) -> bytes:
    """Encode rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def split(rows: Sequence[Row], key: Callable[[Row], str], *, parts: int) -> Iterator[tuple[str, bytes]]:
    """Yield train.jsonl and test.jsonl: one part of `parts` is for the test, chosen by a hash of each row's key."""
    in_test = [int(hashlib.sha256(key(row).encode()).hexdigest(), 16) % parts == 0 for row in rows]
    for name, wanted in (("train.jsonl", False), ("test.jsonl", True)):
        yield name, jsonl([row for row, is_test in zip(rows, in_test, strict=True) if is_test == wanted])


def write_unchanged(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the source's files as they are."""
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

    def pairs(self, *, changed: bool = False) -> list[Row]:
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
    preferences.jsonl with eval_preferences.jsonl, prompts.jsonl and dev_sentences.jsonl; test_sentences.jsonl has those
    of test.jsonl.
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
    yield "prompts.jsonl", jsonl([{"prompt": t.prompt, "sentence": t.sentence} for t in roles["prompts"]])
    for name in ("dev", "test"):
        rows = [{"prompt": t.prompt, "sentence": t.sentence, "rewrites": t.changed} for t in roles[name]]
        yield f"{name}_sentences.jsonl", jsonl(rows)


def with_meaning_negatives(sentences: Sequence[Toxic]) -> list[Row]:
    """Return each sentence's pairs, and one whose rejected side is the rewrite of the sentence before it.

    Without it, the rejected side is always a copy, and a reward model need not read the prompt.
    """
    rows: list[Row] = []
    for other, toxic in zip([sentences[-1], *sentences], sentences, strict=False):
        rows += toxic.pairs(changed=True)
        rows.append({"prompt": toxic.prompt, "chosen": toxic.changed[0], "rejected": other.changed[0]})
    return rows


def write_transcripts(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield pairs of transcripts; dialogues with the same opening are all in one split."""
    lines = gzip.decompress(files["test.jsonl.gz"]).decode().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    yield from split(rows, lambda row: str(row["chosen"]).split("\n\nAssistant:")[0], parts=6)


def write_stories(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the stories of the sample without the last, which is cut off, and the lexicon."""
    stories = files["tinystories_sample.txt"].decode(errors="ignore").split("<|endoftext|>")[:-1]
    rows = [{"text": re.sub(r"\s+\n", "\n", story).strip()} for story in stories if story.strip()]
    yield from split(rows, lambda row: str(row["text"]), parts=8)
    yield "vader_lexicon.txt", files["vader_lexicon.txt"]


PERSONA = {
    "agreeableness": (307954, "8caa0fa07946370fb4ec38dd82eda7d3a86591c1dc701d2e645ae33c3239f5ce"),
    "conscientiousness": (318633, "fd05517c0a453a7b47d19964ac6528db394c8cd00a5f74cc11d91479a20b90a6"),
    "extraversion": (302288, "6734dc0bc84bc5929017eef6209cb9152c4e5fe4b744c7d11af8cb9749687576"),
    "interest-in-science": (346706, "c26039164631a3554db75a11904057af26c1b173228947c077f0a05c9dafa0ed"),
    "openness": (330776, "07e3a5d29e62a27806f75bc7b015d8d9c4120edbda7e593884e036a2d32ffa7b"),
}

DATA_SETS: Mapping[str, DataSet] = {
    "paradetox": DataSet(
        about="toxic sentences and polite rewrites by people, as preference pairs",
        licence="CC0 1.0",
        paper="2022.acl-long.469",
        sources=[
            raw(
                "s-nlp/paradetox",
                "d97b17d0813539cf05c74f9cdb5e66372704ca57",
                "paradetox/paradetox.tsv",
                1627340,
                "6e5e80def7deaf4a3410f7de6c638c13f100ce5ece09ee84a47f6f14ab69a0cd",
            )
        ],
        write=write_paradetox,
    ),
    "hh_harmless": DataSet(
        about="dialogues compared by people for harmlessness (HH-RLHF harmless-base, test split); offensive content",
        licence="MIT",
        paper="2204.05862",
        sources=[
            raw(
                "anthropics/hh-rlhf",
                "354e5c3cb8960630860dd5774a6ac2a58313bf4d",
                "harmless-base/test.jsonl.gz",
                742801,
                "ebfaaed21162a4de120ae85366075b34425e2a6303fac59b99555002f7016f03",
            )
        ],
        write=write_transcripts,
    ),
    "gsm8k": DataSet(
        about="grade-school mathematics with worked solutions",
        licence="MIT",
        paper="2110.14168",
        sources=[
            raw(
                "openai/grade-school-math",
                "3101c7d5072418e28b9008a6636bde82a006892c",
                f"grade_school_math/data/{name}.jsonl",
                size,
                digest,
            )
            for name, size, digest in (
                ("train", 4166206, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
                ("test", 749738, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
            )
        ],
        write=write_unchanged,
    ),
    "ifeval": DataSet(
        about="541 prompts with instructions that a program can check; for evaluation only",
        licence="Apache-2.0",
        paper="2311.07911",
        sources=[
            raw(
                "josejg/instruction_following_eval",
                "0c495b2f95155e8b10acb919ae283bfb4d5be6e2",
                "instruction_following_eval/data/input_data.jsonl",
                207111,
                "67ffeee0fcb87c317c5b08a2de85557b4a7e96ada6178aa645b4954fe4b53d49",
            )
        ],
        write=write_unchanged,
    ),
    "xstest": DataSet(
        about="450 prompts, safe ones that sound unsafe and unsafe ones; for evaluation only",
        licence="CC BY 4.0",
        paper="2308.01263",
        sources=[
            raw(
                "paul-rottger/exaggerated-safety",
                "d7bb5bd738c1fcbc36edd83d5e7d1b71a3e2d84d",
                "xstest_prompts.csv",
                38719,
                "11783fb294ed017473ee53c207d71f2161c7672c8d0b037501e78387f801cb5a",
            )
        ],
        write=write_unchanged,
    ),
    "persona": DataSet(
        about="yes/no items about five traits, written by a model; for evaluation only",
        licence="CC BY 4.0",
        paper="2212.09251",
        sources=[
            raw("anthropics/evals", "84fcc677e52e1902d696c32cd1a6b663e70d3993", f"persona/{name}.jsonl", size, digest)
            for name, (size, digest) in PERSONA.items()
        ],
        write=write_unchanged,
    ),
    "stories": DataSet(
        about="a sample of TinyStories as prompts, and the VADER lexicon of word sentiments as a reward",
        licence="CDLA-Sharing-1.0 (stories), MIT (lexicon)",
        paper="2305.07759",
        sources=[
            raw(
                "gusjengis/toy-RNN",
                "e4c7ff8bba4ff7989e69a3a816ebe4b14813b41e",
                "data/tinystories_sample.txt",
                2097152,
                "5352b299dcb1a32898b2d779b145b5a05f3e1265953fd21c264c9f9f9c9ae33d",
            ),
            raw(
                "cjhutto/vaderSentiment",
                "44fc044cd877310ee8278a0eadf34bcd50d41d06",
                "vaderSentiment/vader_lexicon.txt",
                426786,
                "ec636f884f36b5de6a4d681b2f61c08c2ec90eeb440472033f3307d0d6fa8bc9",
            ),
        ],
        write=write_stories,
    ),
}


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
    except GetDataError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def table() -> str:
    """Return one line for each data set: name, size of the download, licence, what it is."""
    return "\n".join(
        f"{name:12} {data.size / 1e6:4.1f} MB  {data.licence}: {data.about}" for name, data in DATA_SETS.items()
    )


def get(name: str, out: Path, folder: Path | None) -> None:
    """Download a data set and write its files into `out`, unless they are there."""
    if (out / "README.md").is_file():
        print(f"{out} is already there: nothing to do")  # noqa: T201
        return
    data = DATA_SETS[name]
    contents = {source.name: read(source, folder, name) for source in data.sources}
    out.mkdir(parents=True, exist_ok=True)
    written = dict(data.write(contents))
    for file, content in written.items():
        (out / file).write_bytes(content)
    (out / "README.md").write_text(describe(name), encoding="utf-8")  # last: it marks the folder as complete
    lines = ", ".join(f"{file} ({len(content.splitlines()):,} lines)" for file, content in written.items())
    print(f"{out}: {lines}; {data.licence}")  # noqa: T201


def read(source: Source, folder: Path | None, name: str) -> bytes:
    """Return the content of a source file from the web, or from a folder, and check it.

    Raises:
        GetDataError: it cannot be read, or its checksum is another one.
    """
    if folder is None:
        content = download(source, name)
    elif (folder / source.name).is_file():
        content = (folder / source.name).read_bytes()
    else:
        raise GetDataError(f"{folder / source.name}: no such file; download it from {source.url}")
    if hashlib.sha256(content).hexdigest() != source.sha256:
        place = source.url if folder is None else str(folder / source.name)
        raise GetDataError(f"{place}: the content is not what it was (another SHA-256); nothing was written")
    return content


def download(source: Source, name: str) -> bytes:
    """Return the content of an address.

    Raises:
        GetDataError: there is no answer, with the way around it.
    """
    try:
        with urllib.request.urlopen(source.url, timeout=TIMEOUT_S) as answer:  # https addresses of ours
            content: bytes = answer.read()
            return content
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise GetDataError(
            f"cannot download {source.url} ({reason}). Without a network: download it elsewhere, then "
            f"python scripts/get_data.py {name} --from FOLDER"
        ) from error


def describe(name: str) -> str:
    """Return the README of a data set: what it is, its licence, and where it was fetched."""
    data = DATA_SETS[name]
    lines = [f"- {source.url}\n  SHA-256 {source.sha256}" for source in data.sources]
    paper = f"https://aclanthology.org/{data.paper}" if "acl" in data.paper else f"https://arxiv.org/abs/{data.paper}"
    sources = "\n".join(lines)
    return (
        f"# {name}\n\n{data.about.capitalize()}.\n\nLicence: {data.licence}. Paper: {paper}\n\nSources:\n\n{sources}\n"
    )


if __name__ == "__main__":
    sys.exit(main())

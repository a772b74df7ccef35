"""The first commands that a user types, right and wrong: help, version, verbs, options, the next step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf
from rlhf.cli import ALIASES, _parser, _setting_keys, _verbs, main, parse
from rlhf.commands.quickstart import next_steps


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The parser's output on standard error when it refuses the arguments."""
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_a_pipe_that_nobody_reads_any_more_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rlhf", "config", "configs/ppo.yaml"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--out", "page.html"], "--out names the page of several runs"), (["other", "--watch"], "give one folder")],
)
def test_an_option_of_the_report_that_would_not_be_read_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, "report", "runs/ppo", *options)


def test_without_a_verb_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "rlhf quickstart" in out
    assert "reward" in out


def test_the_help_of_the_quickstart_names_the_stage_of_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quickstart", "--help"])
    assert "settings of the PPO stage" in capsys.readouterr().out


def test_the_version_is_printed_and_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"rlhf {rlhf.__version__} (Python 3.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "x"], "error: rlhf trian: no such verb; did you mean train?"),
        (["zzz"], "no such verb; choose from train, reward"),
        (["sample", "m", "--prompt", "a", "--max-tokns", "3"], "did you mean --max-new-tokens?"),
        (["train", "c.yaml", "--policy.lr", "1e-5"], "settings are written without dashes, policy.lr=1e-5"),
        (["train", "c.yaml", "--policy.lr=1e-5"], "settings are written without dashes, policy.lr=1e-5"),
        (["train", "c.yaml", "--learning-rate", "1e-5"], "settings are written without dashes, policy.lr=1e-5"),
        (["rm", "c.yaml", "--lr=1e-5"], "settings are written without dashes, model.lr=1e-5"),
        (["sample", "m", "--prompt", "a", "--lr", "1"], "unknown argument --lr"),
        (["chat", "m", "--zzqqww"], "rlhf chat --help lists what it takes"),
        (["chat", "m", "a=1"], "rlhf chat takes no settings"),
    ],
)
def test_a_wrong_word_names_the_right_one(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, *arguments)
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "file", "right"),
    [
        ("train", "configs/reward_model.yaml", "reward"),
        ("train", "configs/compare.yaml", "compare"),
        ("reward", "configs/ppo.yaml", "train"),
        ("rm", "configs/compare.yaml", "compare"),
        ("compare", "configs/dpo.yaml", "train"),
    ],
)
def test_the_wrong_verb_for_a_file_names_the_right_one(
    verb: str, file: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, verb, file)
    assert error.endswith(f"run `rlhf {right} {file}`\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "file", "setting", "key"),
    [
        ("train", "configs/ppo.yaml", "lr=1e-5", "policy.lr"),
        ("train", "configs/ppo.yaml", "learning_rate=1e-5", "policy.lr"),
        ("train", "configs/dpo.yaml", "steps=3", "schedule.steps"),
        ("train", "configs/ppo.yaml", "completions_per_prompt=8", "sampling.completions_per_prompt"),
        ("train", "configs/ppo.yaml", "dtype=bfloat16", "policy.dtype or teacher.dtype"),
        ("train", "configs/ppo.yaml", "gae_lambda=0.9", "algorithm.advantage.gae_lambda"),
        ("train", "configs/dpo.yaml", "beta=0.1", "algorithm.loss.beta"),
        ("reward", "configs/reward_model.yaml", "lr=1e-5", "model.lr"),
    ],
)
def test_a_short_name_of_a_setting_is_answered_with_the_full_key(
    verb: str, file: str, setting: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, verb, file, setting)
    assert error == f"error: {setting.partition('=')[0]}: unknown key; the full key is {key}\n"


@pytest.mark.parametrize(
    ("setting", "keys"),
    [
        ("beta=0.1", "coef (algorithm.kl.coef)"),
        ("batch_size=8", "batch.prompts_per_step or batch.micro_batch_size"),
        ("num_generations=4", "sampling.completions_per_prompt"),
        ("clip_range=0.1", "algorithm.policy_loss.clip_eps_low and algorithm.policy_loss.clip_eps_high"),
        ("num_epochs=2", "schedule.epochs"),
    ],
)
def test_a_name_that_others_use_is_answered_with_ours(
    setting: str, keys: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, "train", "configs/ppo.yaml", setting)
    assert error == f"error: {setting.partition('=')[0]}: unknown key; here it is called {keys}\n"


def test_a_name_that_is_nearly_a_setting_is_answered_with_the_full_key(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "train", "configs/ppo.yaml", "prompt=mine.jsonl")
    assert error == "error: prompt: unknown key; did you mean data.prompts or eval.prompts?\n"
    assert "valid keys here: algorithm, batch" in error_of(capsys, "train", "configs/ppo.yaml", "zzzz=1")


def test_rm_is_reward() -> None:
    assert ALIASES == {"rm": "reward"}
    verbs = _verbs(_parser())
    assert verbs["rm"] is verbs["reward"]


def test_both_names_of_the_longest_answer_are_taken() -> None:
    for name in ("--max-new-tokens", "--max-tokens"):
        assert parse(["chat", "m", name, "7"]).max_tokens == 7


def test_a_yaml_error_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("policy: {lr: 1\n")
    error = error_of(capsys, "train", str(file))
    assert f"in {file}, line 1" in error
    assert "unicode string" not in error


def test_the_shell_completes_verbs_options_and_settings() -> None:
    def completed(line: str) -> list[str]:
        environment = {
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": " ",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        command = f"{sys.executable} -m rlhf 8>&1 >/dev/null"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=environment, check=False, timeout=60
        )
        return [word.rstrip() for word in done.stdout.split(" ") if word]

    assert "quickstart" in completed("rlhf qu")
    assert "--against" in completed("rlhf eval runs/x --ag")
    keys = _setting_keys("policy.l", parse(["train", "configs/ppo.yaml"]))
    assert "policy.lr=" in keys
    assert all(key.startswith("policy.l") for key in keys)


def test_the_next_steps_are_commands_that_the_parser_takes(tmp_path: Path) -> None:
    steps = next_steps(Path("runs/quickstart"), '"Review: good"').splitlines()
    verbs = [line.split()[1] for line in steps if line.strip().startswith("rlhf ")]
    assert verbs == ["sample", "eval"]
    assert parse(["sample", "runs/quickstart/ppo", "--prompt", "Review: good"]).target == "runs/quickstart/ppo"

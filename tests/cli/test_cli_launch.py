"""rlhf launch: the requests of its scripts, that shells and YAML readers take them, and its refusals."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from slurm_stand_in import SlurmStandIn

from rlhf.cli import main
from rlhf.commands.launch import LaunchOptions, launch_script

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("slurm", "torchrun", "skypilot")
NODE_RANK = {"slurm": "SLURM_NODEID", "torchrun": "NODE_RANK", "skypilot": "SKYPILOT_NODE_RANK"}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed(capsys: pytest.CaptureFixture[str], command: str, *more: str) -> str:
    """The output of `rlhf launch …`, if it succeeds."""
    code = main(["launch", *shlex.split(command), *more])
    shown = capsys.readouterr()
    assert (code, shown.err) == (0, "")
    return shown.out


def refused(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """The message of `rlhf launch …`, if it is refused."""
    assert main(["launch", *shlex.split(command)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return " ".join(shown.err.split())


def shell_text(launcher: str, text: str) -> str:
    return yaml.safe_load(text)["run"] if launcher == "skypilot" else text


def bash_takes(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


SIZES = "--nodes 2 --gpus 4 --gpu-type H100"
SIZES_OF = {"slurm": SIZES, "torchrun": "--nodes 2 --gpus 4", "skypilot": SIZES}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_launcher_a_node_starts_the_run_in_every_process(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, f"--{launcher} configs/ppo.yaml policy.lr=1e-6 {SIZES_OF[launcher]}")
    shell = shell_text(launcher, text)
    assert bash_takes(shell)
    assert "--nnodes=2 --nproc-per-node=4" in shell
    assert f'--node-rank="${NODE_RANK[launcher]}"' in shell
    assert '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"' in shell
    assert "train configs/ppo.yaml policy.lr=1e-6" in shell
    assert 'pkill -TERM -P "$launcher"' in shell


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_value_with_quotes_and_spaces_reaches_the_run_as_it_is(
    launcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = 'run.name=it\'s a "name" $HOME `id`\n#SBATCH --begin=now'
    shell = shell_text(launcher, printed(capsys, f"--{launcher} configs/ppo.yaml {SIZES_OF[launcher]}", value))
    assert bash_takes(shell)
    line = re.search(r"train configs/ppo\.yaml .*? &\n", shell, re.DOTALL)
    assert line is not None
    echoed = subprocess.run(
        ["bash", "-c", f"printf '%s' {line[0].removesuffix(' &' + chr(10)).split(' ', 2)[2]}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert echoed.stdout == value


def sbatch_lines(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_slurm_is_asked_for_nodes_a_signal_before_the_limit_and_a_requeue(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--nodes 2 --gpus 4 --gpu-type a100 --cpus 6 --time 12:00:00 --partition long --account me --grace 90"
    asked = sbatch_lines(printed(capsys, f"--slurm configs/ppo.yaml {options} --sbatch=--mem=0"))
    assert {
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=a100:4",
        "--cpus-per-task=24",
        "--time=12:00:00",
        "--partition=long",
        "--account=me",
        "--signal=B:USR1@90",
        "--requeue",
        "--mem=0",
    } <= set(asked)
    assert "--gpus-per-node=4" in sbatch_lines(printed(capsys, "--slurm configs/ppo.yaml --gpus 4"))


def test_a_reward_model_is_trained_by_its_own_verb_and_without_gpus_none_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "--slurm configs/reward_model.yaml run.device=cpu --processes 3 --cpus 2")
    assert "reward configs/reward_model.yaml run.device=cpu &" in text
    assert "--nproc-per-node=3" in text
    assert "--cpus-per-task=6" in sbatch_lines(text)
    assert "gpus" not in text


def test_a_script_names_the_command_that_makes_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--slurm configs/ppo.yaml 'run.name=two words' --gpus 8 --time 1-00:00:00 --sbatch=--mem=0")
    line = re.search(r"^# Made by: rlhf launch (.*)$", text, re.MULTILINE)
    assert line is not None
    assert printed(capsys, line[1]) == text


def test_torchrun_on_one_machine_needs_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    alone = printed(capsys, "--torchrun configs/ppo.yaml --gpus 2")
    assert "NODE_RANK=0\nMASTER_ADDR=127.0.0.1\n" in alone
    several = printed(capsys, "--torchrun configs/ppo.yaml --gpus 2 --nodes 2")
    done = subprocess.run(["bash", "-c", several], env={}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "NODE_RANK: the number of this node" in done.stderr


def test_skypilot_is_asked_for_gpus_and_a_bucket_and_installs_what_the_run_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    extras = "sharding=zero2 'logging.backends=[wandb]'"
    task = yaml.safe_load(printed(capsys, f"--skypilot configs/ppo.yaml {extras} {SIZES} --bucket mine"))
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "H100:4", "cpus": "32+"}
    assert task["file_mounts"] == {"/runs": {"name": "mine", "mode": "MOUNT_CACHED"}}
    assert task["setup"] == "bash scripts/setup.sh deepspeed track"
    assert "run.out_dir=/runs/ppo &" in task["run"]
    plain = printed(capsys, f"--skypilot configs/ppo.yaml {SIZES}")
    assert "It continues only if runs/ppo outlives the machine" in plain
    assert {"file_mounts"} & set(yaml.safe_load(plain)) == set()


@pytest.mark.parametrize(
    "command, message",
    [
        ("--slurm configs/ppo.yaml", "how many GPUs? Give --gpus N"),
        ("--slurm configs/ppo.yaml --gpus 0", "--gpus is 0: it has to be at least 1"),
        ("--slurm configs/ppo.yaml --gpus 8 --nodes 0", "--nodes is 0: it has to be at least 1"),
        ("--slurm configs/ppo.yaml --gpus 8 --processes 8", "--gpus and --processes exclude each other"),
        ("--slurm configs/ppo.yaml --processes 8", "how many GPUs?"),
        ("--slurm configs/ppo.yaml run.device=cpu --gpus 8", "run.device is cpu: give --processes N"),
        ("--slurm configs/pppo.yaml --gpus 8", "did you mean configs/ppo.yaml?"),
        ("--slurm configs/ppo.yaml policy.lrr=1 --gpus 8", "policy.lrr: unknown key; did you mean lr?"),
        ("--slurm configs/compare.yaml --gpus 8", "is a comparison, which runs on one machine"),
        ("--slurm configs/ppo.yaml checkpoint.resume=never --gpus 8", "add checkpoint.resume=auto"),
        ("--slurm configs/ppo.yaml --gpus 8 --time 24h", "--time is '24h': write HH:MM:SS"),
        ("--slurm configs/ppo.yaml --gpus 8 --partition 'a b'", "--partition is 'a b': letters, digits"),
        ("--slurm configs/ppo.yaml --gpus 8 --sbatch=mem=0", "--sbatch is 'mem=0': give one option of sbatch"),
        ("--torchrun configs/ppo.yaml --gpus 8 --partition p", "--partition is an option of --slurm"),
        ("--slurm configs/ppo.yaml --gpus 8 --bucket b", "--bucket is an option of --skypilot"),
        ("--torchrun configs/ppo.yaml --gpus 8 --gpu-type H100", "--gpu-type is an option of --slurm and --skypilot"),
        ("--torchrun configs/ppo.yaml --gpus 8 --cpus 4", "--cpus is an option of --slurm and --skypilot"),
        ("--slurm configs/ppo.yaml run.device=cpu --processes 2 --gpu-type H100", "--processes run without GPUs"),
        ("--skypilot configs/ppo.yaml --gpus 8", "--gpu-type H100, for example"),
    ],
)
def test_a_mistake_is_told_in_plain_words(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, command)


def test_one_launcher_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "configs/ppo.yaml", "--gpus", "8"])
    assert "one of the arguments --slurm --torchrun --skypilot is required" in capsys.readouterr().err


# In torchrun's place: it starts one training process, and notes if it is told to stop itself.
LAUNCHER = """#!/bin/bash
trap 'echo the launcher was told to stop >>"$STANDIN/events"' TERM
bash -c 'trap "echo saved >>\\"$STANDIN/events\\"; exit 0" TERM
         echo "node $SLURM_NODEID of $MASTER_ADDR:$MASTER_PORT" >>"$STANDIN/events"
         turn=0; while [ "$((turn += 1))" -le "$TURNS" ]; do sleep 0.02; done
         exit "$CODE"' &
worker=$!
while kill -0 "$worker" 2>/dev/null; do wait "$worker"; done
wait "$worker"
"""


def slurm_job(folder: Path, *, turns: int, code: int) -> SlurmStandIn:
    """A job whose training processes take `turns` naps and end with `code`, if they are not told to stop."""
    options = LaunchOptions(launcher="slurm", nodes=2, gpus=1)
    script = launch_script("configs/ppo.yaml", [], options)
    environment = {**os.environ, "TURNS": str(turns), "CODE": str(code)}
    return SlurmStandIn(script, folder, port=12345, environment=environment, commands={"python": LAUNCHER})


def test_before_the_limit_the_training_processes_are_told_to_stop_and_the_job_is_requeued(tmp_path: Path) -> None:
    cluster = slurm_job(tmp_path, turns=10**4, code=0)
    job = cluster.submit()
    try:
        while job.poll() is None and cluster.read("events").count("node") < 2:
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == 0, cluster.read("log")
    finally:
        job.kill()
    assert sorted(cluster.read("events").splitlines()) == [
        "node 0 of 127.0.0.1:12345",
        "node 1 of 127.0.0.1:12345",
        "saved",
        "saved",
    ]
    assert cluster.read("asked") == "requeue 2345\n"


@pytest.mark.parametrize("code", [0, 2])
def test_a_job_that_ends_by_itself_is_not_requeued_and_keeps_its_exit_code(tmp_path: Path, code: int) -> None:
    cluster = slurm_job(tmp_path, turns=1, code=code)
    assert cluster.submit().wait(timeout=60) == code, cluster.read("log")
    assert cluster.read("asked") == ""

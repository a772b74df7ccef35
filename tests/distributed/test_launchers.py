"""torchrun, accelerate launch and deepspeed start the same program; a mistake is reported once, in plain words."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sharded import at, case, environment, free_port, launch, needs, samples

BIN = Path(sys.executable).parent


LATE_FIRST = str(Path(__file__).with_name("late_first.py"))


def torchrun(processes: int = 2, program: tuple[str, ...] = ("-m", "rlhf")) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nproc-per-node={processes}", f"--master-port={free_port()}", *program),
    ]


def started(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


def config_file(folder: Path, name: str = "ppo") -> Path:
    tree = at(case(name, folder / name), folder / "run", schedule={"steps": 2}, checkpoint={"every": 0})
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_only_the_first_process_speaks_and_a_mistake_is_said_once_even_where_it_comes_last(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    done = started([*torchrun(program=(LATE_FIRST,)), "train", str(file), "policy.lrr=1"], tmp_path)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("policy.lrr: unknown key") == 1
    assert "Traceback" not in done.stderr.split("policy.lrr")[0]


@pytest.mark.slow
def test_a_run_of_two_processes_prints_each_line_once_and_says_what_none_means(tmp_path: Path) -> None:
    done = started([*torchrun(), "train", str(config_file(tmp_path))], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2/2") == 1
    assert done.stdout.count("2 processes and sharding=none") == 1
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed"])
def test_other_launchers(tmp_path: Path, launcher: str) -> None:
    needs("zero2")
    tool = shutil.which(launcher, path=str(BIN)) or shutil.which(launcher)
    if tool is None:
        pytest.skip(f"{launcher} is not on the path")
    port = str(free_port())
    start = {
        "accelerate": [
            *("launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"),
            *("--dynamo_backend=no", f"--main_process_port={port}", "-m", "rlhf"),
        ],
        "deepspeed": ["--num_gpus=2", f"--master_port={port}", "--module", "rlhf"],
    }[launcher]
    file = config_file(tmp_path)
    done = started([tool, *start, "train", str(file), "sharding=zero2"], tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    one = at(yaml.safe_load(file.read_text()), tmp_path / "one")
    launch([one], tmp_path / "one-plan", processes=1)
    assert samples(tmp_path / "run") == samples(tmp_path / "one")


@pytest.mark.slow
def test_a_reward_that_fails_ends_every_process_with_its_message(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    arguments = ["train", str(file), "reward.source.target=nowhere:nothing"]
    done = started([*torchrun(), *arguments], tmp_path)
    assert done.returncode != 0
    assert "nowhere" in done.stdout + done.stderr

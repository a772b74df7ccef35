"""rlhf launch: print the script that starts a run under SLURM, torchrun or SkyPilot, without importing torch."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath
from textwrap import indent
from typing import Literal

from rlhf.config.compare import CompareConfig
from rlhf.config.load import load_any
from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.errors import ConfigError, UserError

Launcher = Literal["slurm", "torchrun", "skypilot"]
TIME = re.compile(r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d")
WORD = re.compile(r"[\w.,:@/+-]+")
BUCKET_FOLDER = "/runs"  # where SkyPilot mounts the bucket
DEFAULT_GRACE_S = 300
DEFAULT_CPUS = 8

# Options that not every launcher reads.
READ_BY: dict[str, tuple[Launcher, ...]] = {
    "time": ("slurm",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "grace": ("slurm",),
    "sbatch": ("slurm",),
    "bucket": ("skypilot",),
    "gpu_type": ("slurm", "skypilot"),
    "cpus": ("slurm", "skypilot"),
}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The request to the cluster; sizes are per node."""

    launcher: Launcher
    nodes: int = 1
    gpus: int | None = None  # one process for each
    gpu_type: str | None = None
    processes: int | None = None  # instead of GPUs, with run.device=cpu
    cpus: int | None = None  # cores of each process
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    grace: int | None = None  # seconds before the time limit at which the run is told to stop
    sbatch: tuple[str, ...] = ()
    bucket: str | None = None

    @property
    def processes_per_node(self) -> int:
        """Return the number of training processes on each node."""
        count = self.processes if self.gpus is None else self.gpus
        assert count is not None, "check_options refuses options without a size"
        return count

    @property
    def cpus_per_node(self) -> int:
        """Return the CPU cores of the training processes on each node."""
        return self.processes_per_node * (self.cpus or DEFAULT_CPUS)


@dataclass(frozen=True)
class Job:
    """A checked run and the command that starts it."""

    name: str
    config: TrainConfig | RewardModelConfig
    words: tuple[str, ...]  # after `python -m rlhf`


def launch_script(path: str, overrides: Sequence[str], options: LaunchOptions) -> str:
    """Return the text of the script, or of the YAML file, that runs the configuration in `path`.

    Raises:
        UserError: the configuration or an option is wrong.
    """
    job = make_job(path, overrides)
    check_options(options, job.config)
    command = shlex.join(_own_command(path, overrides, options))
    made_by = f"Made by: {' '.join(command.splitlines())}"  # it stands in a comment, which ends with its line
    match options.launcher:
        case "slurm":
            return slurm_script(job, options, made_by)
        case "torchrun":
            return torchrun_script(job, options, made_by)
        case "skypilot":
            return skypilot_yaml(job, options, made_by)


def make_job(path: str, overrides: Sequence[str]) -> Job:
    """Load the configuration and derive the verb that runs it.

    Raises:
        ConfigError: the configuration is wrong, is a comparison, or cannot continue after a stop.
    """
    config = load_any(path, overrides)
    if isinstance(config, CompareConfig):
        raise ConfigError(f"{path} is a comparison, which runs on one machine: rlhf compare {path}")
    if config.checkpoint.resume == "never":
        raise ConfigError(
            "checkpoint.resume is never, so a job that was stopped and started again would begin at step 0: "
            "add checkpoint.resume=auto"
        )
    verb = "reward" if isinstance(config, RewardModelConfig) else "train"
    name = re.sub(r"[^\w.-]+", "-", config.run.name).strip("-") or "rlhf"
    return Job(name, config, (verb, path, *overrides))


def check_options(options: LaunchOptions, config: TrainConfig | RewardModelConfig) -> None:
    """Check the options against each other and against the configuration.

    Raises:
        UserError: one of them is wrong.
    """
    for name, launchers in READ_BY.items():
        if options.launcher not in launchers and getattr(options, name):
            of = " and ".join(f"--{launcher}" for launcher in launchers)
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is an option of {of}; --{options.launcher} does not read it")
    for name in ("nodes", "gpus", "processes", "cpus", "grace"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}: it has to be at least 1")
    _check_size(options, config.run.device)
    if options.time is not None and not TIME.fullmatch(options.time):
        raise UserError(f"--time is {options.time!r}: write HH:MM:SS, or D-HH:MM:SS, e.g. 24:00:00")
    for name in ("partition", "account", "gpu_type", "bucket"):
        value = getattr(options, name)
        if value is not None and not WORD.fullmatch(value):
            raise UserError(f"--{name.replace('_', '-')} is {value!r}: letters, digits and . , : @ / + - only")
    for line in options.sbatch:
        if not line.startswith("-") or not line.isprintable():
            raise UserError(f"--sbatch is {line!r}: give one option of sbatch, e.g. --sbatch=--constraint=a100")


def _check_size(options: LaunchOptions, device: str) -> None:
    """Check that there is one number of processes, and that it suits run.device."""
    on_cpu = device == "cpu"
    if options.gpus is not None and options.processes is not None:
        raise UserError("--gpus and --processes exclude each other: there is one process for each GPU")
    if on_cpu and options.processes is None:
        raise UserError("run.device is cpu: give --processes N, the processes on each node, instead of --gpus")
    if not on_cpu and options.gpus is None:
        raise UserError(
            "how many GPUs? Give --gpus N, the GPUs of each node (one process runs on each); "
            "without GPUs, run.device=cpu and --processes N"
        )
    if options.gpu_type is not None and options.gpus is None:
        raise UserError("--gpu-type names the kind of --gpus, and --processes run without GPUs: leave it out")
    if options.launcher == "skypilot" and options.gpus is not None and options.gpu_type is None:
        raise UserError("--skypilot needs the kind of GPU too: --gpu-type H100, for example (sky show-gpus lists them)")


def slurm_script(job: Job, options: LaunchOptions, made_by: str) -> str:
    """Return a batch script: one launcher on each node, saved and requeued before the time limit."""
    return _fill(
        "slurm.sh",
        sbatch="\n".join(f"#SBATCH {line}" for line in _sbatch_lines(job, options)),
        made_by=made_by,
        node=_node_script(options, rank="SLURM_NODEID", words='"$@"'),
        words=shlex.join(job.words),
    )


def _sbatch_lines(job: Job, options: LaunchOptions) -> list[str]:
    gpus = [options.gpu_type, options.gpus] if options.gpu_type else [options.gpus]
    lines = [
        f"--job-name={job.name}",
        f"--nodes={options.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={options.cpus_per_node}",
    ]
    if options.gpus is not None:
        lines.append("--gpus-per-node=" + ":".join(map(str, gpus)))
    lines += [f"--{key}={getattr(options, key)}" for key in ("time", "partition", "account") if getattr(options, key)]
    return [
        *lines,
        f"--output={job.name}-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{options.grace or DEFAULT_GRACE_S}",
        *options.sbatch,
    ]


def torchrun_script(job: Job, options: LaunchOptions, made_by: str) -> str:
    """Return a shell script to start on every node, by hand or by a scheduler of your own."""
    usage, defaults = "so: bash <this file>", "NODE_RANK=0\nMASTER_ADDR=127.0.0.1"
    if options.nodes > 1:
        usage = (
            f"on each of the {options.nodes} nodes, with NODE_RANK from 0 to {options.nodes - 1}: "
            "NODE_RANK=0 MASTER_ADDR=<address of node 0> bash <this file>"
        )
        defaults = ': "${NODE_RANK:?the number of this node, from 0}"\n: "${MASTER_ADDR:?the address of node 0}"'
    node = _node_script(options, rank="NODE_RANK", words=shlex.join(job.words))
    return _fill("torchrun.sh", made_by=made_by, usage=usage, defaults=defaults, node=node)


def skypilot_yaml(job: Job, options: LaunchOptions, made_by: str) -> str:
    """Return a SkyPilot task."""
    words, out_dir = job.words, job.config.run.out_dir
    hint = f"# It continues only if {out_dir} outlives the machine: give --bucket, or mount a volume there.\n"
    mounts = ""
    if options.bucket is not None:
        words, hint = (*words, f"run.out_dir={BUCKET_FOLDER}/{PurePosixPath(out_dir).name}"), ""
        mounts = f'file_mounts:\n  {BUCKET_FOLDER}:\n    name: "{options.bucket}"\n    mode: MOUNT_CACHED\n'
    return _fill(
        "skypilot.yaml",
        made_by=made_by,
        hint=hint,
        name=job.name,
        nodes=options.nodes,
        accelerators="" if options.gpus is None else f'  accelerators: "{options.gpu_type}:{options.gpus}"\n',
        cpus=options.cpus_per_node,
        mounts=mounts,
        setup=_setup(job.config),
        node=indent(_node_script(options, rank="SKYPILOT_NODE_RANK", words=shlex.join(words)), "  "),
    )


def _setup(config: TrainConfig | RewardModelConfig) -> str:
    """Return the commands that install this project with the packages that the run needs."""
    backends = config.logging.backends
    extras = {
        "deepspeed": config.sharding.mode.startswith("zero"),
        "track": "tensorboard" in backends or "wandb" in backends,
        "mlflow": "mlflow" in backends,
    }
    install = " ".join(["bash scripts/setup.sh", *(name for name, is_needed in extras.items() if is_needed)])
    return f"{install} && .venv/bin/python -m pip install trackio" if "trackio" in backends else install


def _node_script(options: LaunchOptions, *, rank: str, words: str) -> str:
    """Return the lines that start torchrun on a node and end with its exit code; `rank` is a variable of the shell.

    SIGTERM goes to the training processes, which save and end by themselves. Torchrun is left alone: when told to stop,
    it kills them after 30 seconds, which may be too short for a step and a checkpoint.
    """
    return _fill("node.sh", nodes=options.nodes, processes=options.processes_per_node, rank=rank, words=words)


class _Template(string.Template):
    """A template for shell scripts, in which $ is the shell's."""

    delimiter = "@@"


def _fill(template: str, **values: object) -> str:
    """Return a file of the templates folder with its @@names replaced."""
    text = (files("rlhf.commands") / "templates" / template).read_text(encoding="utf-8")
    return _Template(text).substitute(values)


def _own_command(path: str, overrides: Sequence[str], options: LaunchOptions) -> list[str]:
    """Return the command line that makes this script again."""
    words = ["rlhf", "launch", f"--{options.launcher}", path, *overrides]
    for name, default in LaunchOptions.__dataclass_fields__.items():
        value = getattr(options, name)
        if name in ("launcher", "sbatch") or value is None or value == default.default:
            continue
        words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *(f"--sbatch={line}" for line in options.sbatch)]

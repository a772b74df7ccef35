"""Kill a run at random moments, start it again each time, and compare it with the run that was left alone.

    python tests/faults/run.py --kills 20                           # PPO in two processes: SIGKILL for one of them
    python tests/faults/run.py --kills 5 --algorithm grpo           # or dpo
    python tests/faults/run.py --kills 20 --processes 1             # no launcher

A small run (a two-layer model, seconds) is made once without interruption and once with kills. The killed process
and the moment are drawn from --seed, which is printed:

    anywhere     a uniform moment of the process's life, its start and end included
    training     a uniform moment of the first seconds after its first new line of metrics
    checkpoint   while a checkpoint is being written: the folder appears, then a moment of up to 30 ms
    rotation     as a checkpoint gets its name and an older one is removed

A run that comes to its end before all kills are spent is compared, and another is begun in its place.

Exit code 0 if the final weights, optimizers, metrics and samples are the same to the bit, and no step is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT)]

import torch  # noqa: E402
import yaml  # noqa: E402
from runs import offline_tree, ppo_tree  # noqa: E402

from rlhf.tracking.checkpoint import MANIFEST, Checkpoints, find_damage  # noqa: E402

MOMENTS = ("anywhere", "training", "checkpoint", "checkpoint", "rotation")
DETERMINISTIC = ("metrics.jsonl", "samples.jsonl")
POLL_S = 0.0005
TRAINING_S = 3.0


@dataclass(frozen=True)
class Kill:
    """One kill, and the state after it."""

    moment: str
    rank: int
    lived_s: float
    lines: int  # of metrics.jsonl
    latest_intact: str  # checkpoint
    left: str  # unfinished work
    others_s: float | None  # until the other ranks and the launcher had ended


def tree_of(algorithm: str, folder: Path, out: Path, steps: int) -> dict[str, object]:
    """The configuration of the run."""
    changes = {
        "run": {"out_dir": str(out)},
        "schedule": {"steps": steps},
        "checkpoint": {"every": 2, "keep": 2},
        "eval": {"every": 5},
    }
    if algorithm == "dpo":
        return offline_tree(folder, "dpo", **changes)
    if algorithm == "grpo":
        return ppo_tree(folder, algorithm={"preset": "grpo"}, sampling={"completions_per_prompt": 4}, **changes)
    adaptive = {"kl": {"controller": {"type": "adaptive", "target": 1.0, "horizon": 100}}}
    return ppo_tree(folder, algorithm=adaptive, **changes)


class Runner:
    """Starts the run in a process group of its own."""

    def __init__(self, config: Path, out: Path, processes: int, sharding: str) -> None:
        self.config, self.out, self.processes, self.sharding = config, out, processes, sharding
        self.log = config.with_suffix(".log")

    def start(self) -> subprocess.Popen[bytes]:
        """The launcher, or the run itself if there is one process."""
        run = ["-m", "rlhf", "train", str(self.config)]
        if self.processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
            run = [*launcher, *run, f"sharding={self.sharding}"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *run],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path_with(HERE.parent, ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ranks(self, process: subprocess.Popen[bytes]) -> list[int]:
        """The process ids of the ranks, in their order; of the ranks that are there yet."""
        if self.processes == 1:
            return [process.pid]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            pids = [int(pid) for pid in children.read_text().split()]
        except OSError:
            return []
        return sorted((pid for pid in pids if rank_of(pid) is not None), key=lambda pid: rank_of(pid) or 0)

    def finish(self) -> None:
        """Run to the end, or report the error."""
        process = self.start()
        if process.wait() != 0:
            raise SystemExit(f"the run failed with {process.returncode}:\n{self.log.read_text()[-3000:]}")


def path_with(*folders: Path) -> str:
    """PYTHONPATH with `folders` in front."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def rank_of(pid: int) -> int | None:
    """The RANK in a process's environment."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), None)


def killed(runner: Runner, draw: random.Random, life_s: float, patience_s: float) -> Kill | None:
    """Start the run, kill it at a moment that is drawn; None if it came to its end first."""
    moment = draw.choice(MOMENTS)
    share, rank = draw.random(), draw.randrange(runner.processes)
    process, began = runner.start(), time.monotonic()
    due, ranks = due_at(moment, share, runner.out, life_s, began), list[int]()
    while process.poll() is None and not (due() and (ranks := runner.ranks(process))):
        time.sleep(POLL_S)
    if process.poll() is not None or not ranks:
        stop(process)
        return None
    os.kill(ranks[min(rank, len(ranks) - 1)], signal.SIGKILL)
    lived, died = time.monotonic() - began, time.monotonic()
    others = None
    if runner.processes > 1:
        while process.poll() is None and time.monotonic() - died < patience_s:
            time.sleep(0.01)
        if process.poll() is None:
            stop(process)
            raise SystemExit(f"{patience_s:g} s after rank {rank} was killed, the others were still there")
        others = time.monotonic() - died
    stop(process)
    checkpoints = Checkpoints(runner.out / "checkpoints", keep=2)
    newest = checkpoints.all()
    return Kill(
        moment=moment,
        rank=rank,
        lived_s=lived,
        lines=len(lines_of(runner.out / "metrics.jsonl")),
        latest_intact=newest[-1].name if newest else "-",
        left=", ".join(sorted(path.name for path in checkpoints.folder.glob(".*"))) or "-",
        others_s=others,
    )


def due_at(moment: str, share: float, out: Path, life_s: float, began: float) -> Callable[[], bool]:
    """Whether the time has come; `share`, in [0, 1), says when within the moment."""
    folder, before = out / "checkpoints", len(lines_of(out / "metrics.jsonl"))
    seen: list[float] = []

    def after(appeared: bool, wait_s: float) -> bool:
        if appeared and not seen:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() >= seen[0] + wait_s

    def names() -> set[str]:
        try:
            return set(os.listdir(folder))
        except OSError:
            return set()

    at_first = names()
    match moment:
        case "anywhere":
            return lambda: time.monotonic() >= began + share * life_s
        case "training":
            return lambda: after(len(lines_of(out / "metrics.jsonl")) != before, share * TRAINING_S)
        case "checkpoint":
            return lambda: after(any(n.startswith(".writing") for n in names() - at_first), share * 0.03)
        case _:
            return lambda: after(any(n.startswith("step") for n in names() - at_first), share * 0.002)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none if it is not there."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def differences(whole: Path, broken: Path) -> list[str]:
    """The differences of the two run folders, to the bit."""
    different = [name for name in DETERMINISTIC if (whole / name).read_bytes() != (broken / name).read_bytes()]
    a, b = (Checkpoints(folder / "checkpoints", keep=2).all() for folder in (whole, broken))
    if [path.name for path in a] != [path.name for path in b]:
        different.append(f"the checkpoints' names: {[p.name for p in a]} and {[p.name for p in b]}")
        return different
    different += [f"{path}: {damage}" for path in b if (damage := find_damage(path)) is not None]
    for one, other in [(a[-1], b[-1]), (whole / "model", broken / "model")]:
        for file in sorted(path for path in one.rglob("*") if path.is_file() and path.name != MANIFEST):
            name = file.relative_to(one)
            if not same(file, other / name):
                different.append(f"{one.name}/{name}")
    return different


def same(a: Path, b: Path) -> bool:
    """Equal bytes; in files of torch.save, equal values (its archive has the folder's name in it)."""
    if a.suffix == ".pt":
        return equal(torch.load(a, weights_only=True), torch.load(b, weights_only=True))
    return b.is_file() and a.read_bytes() == b.read_bytes()


def equal(a: object, b: object) -> bool:
    """Equal to the bit, tensors within."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def say(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a run at random moments; is it still the same run?")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--algorithm", choices=["ppo", "grpo", "dpo"], default="ppo")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, help="of the moments and ranks; drawn and printed if not given")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sharding", default="ddp", help="where there are several processes")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds the other ranks have to end")
    parser.add_argument("--keep", type=Path, help="leave both run folders here")
    parser.add_argument("--json", type=Path, help="write the outcome here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, restart, compare."""
    options = parse(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    say(f"{options.algorithm}, {options.steps} steps, {options.processes} process(es), --seed {seed}")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="rlhf-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return report(options, seed, folder)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


def report(options: argparse.Namespace, seed: int, folder: Path) -> int:
    """The run left alone, the run that is killed, and their differences."""
    runners = {}
    for name in ("whole", "killed"):
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(tree_of(options.algorithm, folder, folder / name, options.steps)))
        runners[name] = Runner(config, folder / name, options.processes, options.sharding)
    began = time.monotonic()
    runners["whole"].finish()
    life_s = time.monotonic() - began
    say(f"uninterrupted: {life_s:.1f} s")
    draw, kills, different, runs = random.Random(seed), list[Kill](), list[str](), 1
    say(f"{'kill':>4} {'moment':<11} {'rank':>4} {'after s':>8} {'lines':>6} {'newest':<12} {'others s':>8}  left")
    while len(kills) < options.kills:
        kill = killed(runners["killed"], draw, life_s, options.patience)
        if kill is None:
            different += compared(options, folder)
            shutil.rmtree(folder / "killed")
            runs += 1
            say("     it came to its end: another run is begun")
            continue
        kills.append(kill)
        others = "-" if kill.others_s is None else f"{kill.others_s:.1f}"
        say(
            f"{len(kills):>4} {kill.moment:<11} {kill.rank:>4} {kill.lived_s:>8.2f} {kill.lines:>6} "
            f"{kill.latest_intact:<12} {others:>8}  {kill.left}"
        )
    runners["killed"].finish()
    different += compared(options, folder)
    say(f"{len(kills)} kills of {runs} run(s); weights, optimizers, metrics, samples, every step once: ")
    say("  the same to the bit" if not different else "  NOT THE SAME: " + "; ".join(different))
    if options.json is not None:
        outcome = {
            "algorithm": options.algorithm,
            "processes": options.processes,
            "steps": options.steps,
            "seed": seed,
            "kills": [vars(kill) for kill in kills],
            "runs": runs,
            "identical": not different,
            "differences": different,
        }
        options.json.write_text(json.dumps(outcome, indent=2) + "\n")
    return 1 if different else 0


def compared(options: argparse.Namespace, folder: Path) -> list[str]:
    """The differences from the run that was left alone."""
    if not (folder / "killed" / "model").is_dir():
        raise SystemExit("the run failed:\n" + (folder / "killed.log").read_text()[-3000:])
    steps = [json.loads(line)["step"] for line in lines_of(folder / "killed" / "metrics.jsonl")]
    missing = [] if steps == list(range(options.steps + 1)) else [f"the steps {steps}"]
    return missing + differences(folder / "whole", folder / "killed")


if __name__ == "__main__":
    sys.exit(main())

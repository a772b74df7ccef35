"""Ours and TRL on identical work, run in turn:   python benchmarks/side_by_side.py --peer-python PEER/bin/python

    --peer-python PY       a Python with trl (and without need of rlhf)
    --ppo-peer-python PY   one with trl 1.12.0, the last release with PPO; without it PPO is left out
    --size tiny|small      shape of the models (benchmarks/peers/work.py)
    --trainers ...         of sft reward dpo dpo_cached grpo rloo ppo
    --rounds N             each round runs ours, then the peer, each in a process of its own
    --whole                all rows of an optimizer step in one pass of ours, as in TRL's; else our default's 16
    --json FILE            where the figures go besides the terminal

Both sides get the same weights, rows, lengths, precision, optimizer and number of threads. A step's time is from the
end of the one before to its own end; the first step is a warm-up. The ratio is that of the medians of a round; given
are its median over the rounds and its range. Our DPO computes the reference's log-probabilities once before training,
and TRL's default in every step: for `dpo` that time is added to our steps, as of one epoch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers.runs import Found, phase, run_side
from peers.work import SHAPES, TRAINERS, Job, Sizes, make_work

GOALS = {  # TRL / ours: tiny, small
    "grpo": (2.5, 2.0),
    "ppo": (2.5, 2.5),
    "dpo": (1.8, 1.8),
    "dpo_cached": (2.4, 2.4),
    "reward": (1.5, 1.5),
    "sft": (1.2, 1.2),
}
COLUMNS = (
    "trainer",
    "TRL ÷ ours [range]",
    "goal",
    "generation alone",
    "ours, s",
    "TRL, s",
    "tokens/s, ours / TRL",
    "peak RSS MB, ours / TRL",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def step_seconds(found: Found, trainer: str, job: Job, *, ours: bool) -> float:
    """The median step."""
    seconds = statistics.median(found["steps"])
    if ours and trainer == "dpo":
        pairs = job.steps * max(job.sizes.rows, job.sizes.ppo_prompts, job.sizes.prompts)  # as make_work writes them
        seconds += found.get("reference", 0.0) * job.sizes.rows / pairs
    return seconds


def summarize(trainer: str, rounds: list[tuple[Found, Found]], job: Job) -> Found:
    """Ratios, phases and memory of one trainer."""
    ours = [step_seconds(a, trainer, job, ours=True) for a, _ in rounds]
    peer = [step_seconds(b, trainer, job, ours=False) for _, b in rounds]
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    sampled = [
        (y / x) for a, b in rounds if (x := phase(a, "sample")) is not None and (y := phase(b, "sample")) is not None
    ]
    memory = [b["peak_rss_mb"] / a["peak_rss_mb"] for a, b in rounds]
    tokens = [statistics.median(a["tokens"]) / seconds for (a, _), seconds in zip(rounds, ours, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "generation_ratio": statistics.median(sampled) if sampled else None,
        "seconds_ours": statistics.median(ours),
        "seconds_peer": statistics.median(peer),
        "phases_ours": _phases([a for a, _ in rounds]),
        "phases_peer": _phases([b for _, b in rounds]),
        "tokens_per_second_ours": statistics.median(tokens),
        "peak_rss_mb": [max(a["peak_rss_mb"] for a, _ in rounds), max(b["peak_rss_mb"] for _, b in rounds)],
        "memory_ratio": statistics.median(memory),
    }


def _phases(sides: list[Found]) -> dict[str, float]:
    """Of every phase seen in all rounds, the median over them."""
    names = sorted(set.intersection(*({name for step in side["phases"] for name in step} for side in sides)))
    values = {name: [seconds for side in sides if (seconds := phase(side, name)) is not None] for name in names}
    return {name: statistics.median(each) for name, each in values.items()}


def row(trainer: str, found: Found, size: str) -> str:
    """A row of the table."""
    goal = GOALS[trainer][size == "small"] if trainer in GOALS and size in ("tiny", "small") else None
    low, high = found["ratio_range"]
    generation, tokens = found["generation_ratio"], found["tokens_per_second_ours"]  # the same tokens on both sides
    return (
        f"| {trainer} | {found['ratio']:.2f} [{low:.2f}, {high:.2f}] | {f'{goal}' if goal else '–'} | "
        f"{f'{generation:.2f}' if generation else '–'} | {found['seconds_ours']:.3f} | {found['seconds_peer']:.3f} | "
        f"{tokens:.0f} / {tokens * found['seconds_ours'] / found['seconds_peer']:.0f} | "
        f"{found['peak_rss_mb'][0]:.0f} / {found['peak_rss_mb'][1]:.0f} |"
    )


def split(trainer: str, found: Found) -> str:
    """Where the seconds of a step go: every phase of ours, and of TRL's what it tells of itself, its sampling."""
    sides = []
    for side in ("ours", "peer"):
        phases = {name: seconds for name, seconds in found[f"phases_{side}"].items() if seconds >= 0.001}
        rest = found[f"seconds_{side}"] - sum(phases.values())
        sides.append(", ".join(f"{name} {seconds:.3f}" for name, seconds in [*phases.items(), ("the rest", rest)]))
    return f"{trainer}: ours {sides[0]}; TRL {sides[1]}"


def versions(python: str) -> dict[str, str]:
    """What the peer runs."""
    names = "('trl', 'transformers', 'torch')"
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    """Make the work, run the rounds, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--ppo-peer-python")
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as name:
        results = _all(options, Path(name))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _all(options: argparse.Namespace, folder: Path) -> Found:
    sizes = Sizes()
    parameters = make_work(folder, options.size, options.steps, sizes)
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "size": options.size,
        "parameters": parameters,
        "dtype": options.dtype,
        "device": options.device,
        "rows_in_a_pass_of_ours": "all" if options.whole else "16",
        "peer": versions(options.peer_python),
    }
    sys.stdout.write(f"{json.dumps(about)}\n\n{HEAD}\n")
    found: Found = {}
    for trainer in options.trainers:
        python = options.ppo_peer_python if trainer == "ppo" else options.peer_python
        if python is None:
            sys.stderr.write("ppo is left out: --ppo-peer-python is not given\n")
            continue
        job = Job(
            trainer, options.steps, str(folder), options.dtype, options.device, options.threads, sizes, options.whole
        )
        rounds = [
            (run_side(sys.executable, "ours.py", job, folder), run_side(python, "trl_side.py", job, folder))
            for _ in range(options.rounds)
        ]
        found[trainer] = summarize(trainer, rounds, job)
        sys.stdout.write(row(trainer, found[trainer], options.size) + "\n")
        sys.stdout.flush()
    sys.stdout.write("\nSeconds of a step by phase:\n\n")
    sys.stdout.writelines(f"- {split(trainer, each)}\n" for trainer, each in found.items())
    return {"about": about, "trainers": found}


if __name__ == "__main__":
    main()

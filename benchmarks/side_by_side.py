"""Compare ours and TRL on identical work, in turn:   python benchmarks/side_by_side.py --peer-python PEER/bin/python

    --peer-python PY       a Python with trl (it does not need rlhf)
    --ppo-peer-python PY   a Python with trl 1.12.0, the last release with PPO; without it PPO is left out
    --size tiny|small      shape of a model with random weights (benchmarks/peers/work.py), or
    --model PATH           a real model: an ordinary folder, a GGUF file, or a folder with one GGUF file. Prompts and
                           pairs are real too (--pairs FILE, --max-tokens N), rendered by the chat template
    --rows N ...           the sizes of a step: --rows, --prompts, --group, --new-tokens, --ppo-prompts, --ppo-epochs,
                           --ppo-minibatches
    --trainers ...         of sft reward dpo dpo_cached grpo rloo ppo
    --rounds N             each round runs ours, then the peer, each in a process of its own
    --peer-settings ...    of defaults memory fastest (benchmarks/peers/trl_side.py says what each sets); each round
                           runs ours once and TRL once with each. Default: defaults memory
    --lora R               adapters of rank R on every linear layer, from the same random numbers: sft reward dpo grpo
    --clock wall|cpu       seconds of the clock, or of the processes' processor time if the machine has other work
    --whole                all rows of an optimizer step in one pass of ours, as in TRL's; otherwise our default of 16
    --json FILE            file for the figures, in addition to the terminal

Both sides get the same weights, rows in the same order, lengths, precision, optimizer and number of threads. A step's
time runs from the end of the previous one to its own end. The first step is a warm-up in which both sides train on the
same rows, online on the same given completions, so its loss and gradient must agree; the output says if they agree.
Later completions are sampled by each side; the output gives their lengths. The ratio of a round is of its
median seconds; reported are the median ratio and the range. Our DPO computes the reference's log-probabilities once
before training, TRL by default in every step: for `dpo` that time is added to our steps, as if for one epoch. GFLOP/s
are the least matrix products that a step needs (benchmarks/floor.py), divided by its seconds.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from floor import DTYPES, floors, mean_completion, measure
from peers.options import add_work_options, describe, make_chosen_work, sizes_of, steps_of
from peers.runs import SideResult, phase, run_side
from peers.work import ADAPTED, PEER_SETTINGS, TRAINERS, Job, Workload

GOALS = {  # TRL / ours
    "tiny": {"grpo": 2.5, "ppo": 2.5, "dpo": 1.8, "dpo_cached": 2.4, "reward": 1.5, "sft": 1.2},
    "small": {"grpo": 2.0, "ppo": 2.5, "dpo": 1.8, "dpo_cached": 2.4, "reward": 1.5, "sft": 1.2},
    "model float32": {"grpo": 2.0, "ppo": 1.5, "dpo_cached": 2.2, "reward": 1.8, "sft": 1.6},
    "model bfloat16": {"grpo": 3.0, "ppo": 3.0, "dpo_cached": 4.0, "reward": 3.0, "sft": 3.5},
}
COLUMNS = (
    "trainer",
    "TRL's settings",
    "TRL ÷ ours [range]",
    "goal",
    "generation alone",
    "ours, s",
    "TRL, s",
    "tokens/s, ours / TRL",
    "GFLOP/s, ours / TRL",
    "peak RSS MB, ours / TRL (share)",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # relative difference that rounding can cause, with some slack
FEW_ROWS, MANY_ROWS = 64, 2048  # rows of the products whose rate is measured


def step_seconds(result: SideResult, trainer: str, job: Job, *, ours: bool) -> float:
    """Return the median seconds of a step."""
    seconds = statistics.median(result["steps"])
    if ours and trainer == "dpo":
        seconds += result.get("reference", 0.0) / job.steps  # make_work writes pairs for this many steps
    return seconds


def step_flops(job: Job, workload: Workload, generated: Sequence[int]) -> float:
    """Return the FLOPs of the matrix products that a step needs at least."""
    new_tokens = mean_completion(generated, job.sizes.completions(job.trainer))
    phases = floors(job.trainer, workload, job.sizes, DTYPES[job.dtype].itemsize, new_tokens)
    return sum(floor.flops for floor in phases.values())


def summarize(job: Job, workload: Workload, rounds: list[tuple[SideResult, SideResult]]) -> SideResult:
    """Summarize one trainer's rounds: ratios, phases, rates and memory."""
    ours, peer = sides = list(zip(*rounds, strict=True))
    times = _times(job, rounds)
    memory = [max(result["peak_rss_mb"] for result in side) for side in sides]
    return {
        **times,
        "phases_ours": _phases(ours),
        "phases_peer": _phases(peer),
        **_rates(job, workload, sides, (times["seconds_ours"], times["seconds_peer"])),
        "peak_rss_mb": memory,
        "memory_share": memory[0] / memory[1],
        "first": [ours[0]["first"], peer[0]["first"]],
        "same_first_step": same_first_step(ours[0], peer[0], tolerance(job)),
        "notes": ours[0].get("notes", []),
    }


def _times(job: Job, rounds: list[tuple[SideResult, SideResult]]) -> SideResult:
    """Summarize the seconds of a step, and the ratios of each round: the peer's seconds to ours."""
    seconds_ours = [step_seconds(ours, job.trainer, job, ours=True) for ours, _ in rounds]
    seconds_peer = [step_seconds(peer, job.trainer, job, ours=False) for _, peer in rounds]
    ratios = [peer / ours for ours, peer in zip(seconds_ours, seconds_peer, strict=True)]
    generation = [
        peer / ours
        for a, b in rounds
        if (ours := phase(a, "sample")) is not None and (peer := phase(b, "sample")) is not None
    ]
    return {
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "generation_ratio": statistics.median(generation) if generation else None,
        "seconds_ours": statistics.median(seconds_ours),
        "seconds_peer": statistics.median(seconds_peer),
    }


def _rates(
    job: Job, workload: Workload, sides: Sequence[Sequence[SideResult]], seconds: tuple[float, float]
) -> SideResult:
    """Summarize the lengths that both sides sampled, and their rates, given the seconds of a step of each."""
    generated = [[count for result in side for count in result["generated"]] for side in sides]
    flops = [step_flops(job, workload, counts) for counts in generated]
    tokens = statistics.median(count for result in sides[0] for count in result["tokens"])
    more = statistics.fmean(generated[1]) - statistics.fmean(generated[0]) if all(generated) else 0.0
    return {
        "completion_tokens": [mean_completion(counts, job.sizes.completions(job.trainer)) for counts in generated],
        "tokens_per_second": [tokens / seconds[0], (tokens + more) / seconds[1]],
        "gflops": [flops[0] / seconds[0] / 1e9, flops[1] / seconds[1] / 1e9],
    }


def tolerance(job: Job) -> float:
    """Return by how much loss and gradient may differ, relatively.

    PPO's advantages are whitened by a variance over n tokens here and over n - 1 in TRL; otherwise the two agree.
    """
    whitened = job.sizes.ppo_prompts * job.sizes.new_tokens
    return TOLERANCE[job.dtype] + (1 / whitened if job.trainer == "ppo" else 0.0)


def same_first_step(ours: SideResult, peer: SideResult, limit: float) -> bool:
    """Return whether loss and gradient of the first optimizer step agree up to rounding.

    The tolerance of a loss near 0, as for advantages whose mean is 0, is relative to 1.
    """
    close = [
        abs(ours["first"][name] - peer["first"][name]) <= limit * max(least, abs(peer["first"][name]))
        for name, least in (("loss", 1.0), ("gradient", 0.0))
    ]
    return all(close)


def _phases(sides: Sequence[SideResult]) -> dict[str, float]:
    """Return the median seconds, over the rounds, of every phase that occurs in all of them."""
    names = sorted(set.intersection(*({name for step in side["phases"] for name in step} for side in sides)))
    values = {name: [seconds for side in sides if (seconds := phase(side, name)) is not None] for name in names}
    return {name: statistics.median(seconds) for name, seconds in values.items()}


def row(trainer: str, setting: str, summary: SideResult, goals: str) -> str:
    """Format a row of the table; `setting` is one of PEER_SETTINGS, `goals` names the entry of GOALS."""
    goal = GOALS.get(goals, {}).get(trainer)
    low, high = summary["ratio_range"]
    generation = summary["generation_ratio"]
    ours, peer = summary["peak_rss_mb"]
    cells = (
        trainer,
        setting,
        f"{summary['ratio']:.2f} [{low:.2f}, {high:.2f}]",
        f"{goal}" if goal else "–",
        f"{generation:.2f}" if generation else "–",
        f"{summary['seconds_ours']:.3f}",
        f"{summary['seconds_peer']:.3f}",
        " / ".join(f"{rate:.0f}" for rate in summary["tokens_per_second"]),
        " / ".join(f"{rate:.0f}" for rate in summary["gflops"]),
        f"{ours:.0f} / {peer:.0f} ({summary['memory_share']:.2f})",
    )
    return f"| {' | '.join(cells)} |"


def split(trainer: str, summary: SideResult) -> str:
    """Format the seconds of a step by phase: all phases of ours, and of TRL's the one it reports, sampling."""
    sides = []
    for side in ("ours", "peer"):
        phases = {name: seconds for name, seconds in summary[f"phases_{side}"].items() if seconds >= 0.001}
        rest = summary[f"seconds_{side}"] - sum(phases.values())
        sides.append(", ".join(f"{name} {seconds:.3f}" for name, seconds in [*phases.items(), ("the rest", rest)]))
    return f"{trainer}: ours {sides[0]}; TRL {sides[1]}"


def check(trainer: str, summary: SideResult) -> str:
    """Format the comparison of both sides' first steps and of the lengths that they sampled afterwards."""
    ours, peer = summary["first"]
    text = (
        f"{trainer}: loss {ours['loss']:.6f} and {peer['loss']:.6f}, gradient {ours['gradient']:.5g} and "
        f"{peer['gradient']:.5g}: {'the same' if summary['same_first_step'] else 'DIFFERENT WORK'}"
    )
    lengths = summary["completion_tokens"]
    return text + (f"; later completions of {lengths[0]:.1f} and {lengths[1]:.1f} tokens" if all(lengths) else "")


@dataclass(frozen=True)
class ProductRates:
    """FLOP/s of the model's MLP product in both precisions, measured when a run began and when it ended."""

    float32: tuple[float, float]
    bfloat16: tuple[float, float]

    @classmethod
    def measure(cls, workload: Workload, device: str) -> tuple[float, float]:
        """Measure the rates now, in float32 and in bfloat16."""
        rates = (
            measure(workload, dtype, device, few=FEW_ROWS, many=MANY_ROWS, seconds=0.5).many
            for dtype in (torch.float32, torch.bfloat16)
        )
        return next(rates), next(rates)

    def text(self, dtype: str) -> str:
        """Format the rates, with a warning if bfloat16 was run on a machine without instructions for it."""
        ranges = {name: " to ".join(f"{rate / 1e9:.0f}" for rate in rates) for name, rates in asdict(self).items()}
        text = (
            f"Products of {MANY_ROWS} rows, before and after: {ranges['float32']} GFLOP/s in float32, "
            f"{ranges['bfloat16']} in bfloat16."
        )
        if dtype == "bfloat16" and max(self.bfloat16) < 1.2 * max(self.float32):
            text += (
                " This machine has no fast bfloat16 products (AMX, AVX512-BF16): its bfloat16 figures say nothing of "
                "machines that have them."
            )
        return text


def versions(python: str) -> dict[str, str]:
    """Return the versions of the packages in the peer's Python."""
    names = "('trl', 'transformers', 'torch')"
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    process = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    installed: dict[str, str] = json.loads(process.stdout)
    return installed


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the work, run the rounds, print the results and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--ppo-peer-python")
    add_work_options(parser)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--steps", type=int, help="6; 3 with --model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peer-settings", nargs="+", choices=PEER_SETTINGS, default=["defaults", "memory"])
    parser.add_argument("--lora", type=int, metavar="R")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.lora is not None and not set(options.trainers) <= set(ADAPTED):
        parser.error(f"--lora compares {' '.join(ADAPTED)}: name some of them with --trainers")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as name:
        results = _run_all(options, Path(name))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _run_all(options: argparse.Namespace, folder: Path) -> SideResult:
    steps, sizes = steps_of(options), sizes_of(options)
    workload = make_chosen_work(options, folder, steps, sizes)
    about = _about(options, steps)
    goals = options.size if options.model is None else f"model {options.dtype}"
    goals = goals if options.lora is None else "adapters"
    rates = [ProductRates.measure(workload, options.device)]
    _write(f"{json.dumps(about)}\n{describe(workload, sizes)}\n\n{HEAD}")
    summaries: dict[str, dict[str, SideResult]] = {}
    for trainer in options.trainers:
        python = options.ppo_peer_python if trainer == "ppo" else options.peer_python
        if python is None:
            sys.stderr.write("ppo is left out: --ppo-peer-python is not given\n")
            continue
        job = Job(trainer, steps, str(folder), options.dtype, options.device, options.threads, sizes, options.whole)
        job = replace(job, lora=options.lora, clock=options.clock)
        rounds = _run_rounds(options, job, python, folder)
        summaries[trainer] = {setting: summarize(job, workload, pairs) for setting, pairs in rounds.items()}
        for setting, summary in summaries[trainer].items():
            _write(row(trainer, setting, summary, goals))
    rates.append(ProductRates.measure(workload, options.device))
    product_rates = ProductRates(*((rates[0][column], rates[1][column]) for column in (0, 1)))
    _write(f"\n{product_rates.text(options.dtype)}")
    _write("\nThe first step, ours and TRL's:\n")
    named = [
        (f"{trainer}, {setting}", summary)
        for trainer, settings in summaries.items()
        for setting, summary in settings.items()
    ]
    _write("\n".join(f"- {check(name, summary)}" for name, summary in named))
    _write("\nSeconds of a step by phase:\n")
    _write("\n".join(f"- {split(name, summary)}" for name, summary in named))
    setting = {"workload": asdict(workload), "sizes": asdict(sizes), "product_rates": asdict(product_rates)}
    return {"about": about | setting, "trainers": summaries}


def _about(options: argparse.Namespace, steps: int) -> SideResult:
    """Describe the machine and the settings of this comparison."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "size": options.size if options.model is None else options.model.name,
        "dtype": options.dtype,
        "device": options.device,
        "steps": steps,
        "rounds": options.rounds,
        "lora": options.lora,
        "clock": options.clock,
        "rows_in_a_pass_of_ours": "all" if options.whole else "16",
        "peer": versions(options.peer_python),
    }


def _run_rounds(
    options: argparse.Namespace, job: Job, python: str, folder: Path
) -> dict[str, list[tuple[SideResult, SideResult]]]:
    """Run ours once and the peer once with each of its settings, in turn; return each setting's rounds."""
    rounds: dict[str, list[tuple[SideResult, SideResult]]] = {setting: [] for setting in options.peer_settings}
    for _ in range(options.rounds):
        ours = run_side(sys.executable, "ours.py", job, folder)
        for setting, pairs in rounds.items():
            pairs.append((ours, run_side(python, "trl_side.py", replace(job, peer=setting), folder)))
    return rounds


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

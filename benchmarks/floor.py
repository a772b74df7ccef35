"""Measure how far each phase is from this machine's floor:   python benchmarks/floor.py [--size tiny | --model PATH]

The floor of a phase is the larger of two times: its matrix products' time, at the best rate measured on this machine
just before and after for products of that many rows, and the time to read its weights, at the measured memory rate.
GFLOP/s are the phase's products divided by its seconds; --model as in side_by_side.py. Attention over the context,
norms, activations, softmax and the optimizer are left out, so the floor cannot be reached, only approached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from peers.options import add_work_options, describe, make_chosen_work, sizes_of, steps_of
from peers.runs import phase, run_side
from peers.work import Job, Sizes, Workload

HEAD = "| trainer | phase | seconds | floor | times the floor | GFLOP/s | rate: few rows / 4096 rows / memory GB/s |"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Rates:
    """The machine's rates: FLOP/s of matrix products with few and with many rows, bytes/s of memory."""

    few: float
    many: float
    memory: float


@dataclass(frozen=True)
class Floor:
    """The least work of one phase of a step: operations, bytes of weights, and whether its products have few rows."""

    flops: float
    weights: float = 0.0
    few_rows: bool = False

    def seconds(self, rates: Rates) -> float:
        """Return the larger of the times for products and for memory."""
        return max(self.flops / (rates.few if self.few_rows else rates.many), self.weights / rates.memory)


def measure(
    workload: Workload, dtype: torch.dtype, device: str, few: int, many: int = 4096, *, seconds: float = 1.0
) -> Rates:
    """Measure the rates of the MLP's product [rows, width] × [width, inner] and of copying 256 MB."""
    weight = torch.randn(workload.inner, workload.width, device=device).to(dtype)

    def product(rows: int) -> float:
        left = torch.randn(rows, workload.width, device=device).to(dtype)
        return 2 * rows * weight.numel() / best(lambda: torch.nn.functional.linear(left, weight), device, seconds)

    block = torch.empty(64 * 2**20, dtype=torch.float32, device=device)
    other = torch.empty_like(block)
    copied = 2 * block.numel() * 4 / best(lambda: other.copy_(block), device, seconds)
    return Rates(product(few), product(many), copied)


def mean(rates: Sequence[Rates]) -> Rates:
    """Average rates that were measured before and after the work that they are compared with."""
    columns = zip(*((rate.few, rate.many, rate.memory) for rate in rates), strict=True)
    return Rates(*(statistics.fmean(column) for column in columns))


def best(work: Callable[[], object], device: str, seconds: float = 1.0) -> float:
    """Return the fewest seconds of one call, measured over about `seconds` of calls."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def floors(
    trainer: str, workload: Workload, sizes: Sizes, itemsize: int, new_tokens: float | None = None
) -> dict[str, Floor]:
    """Count each phase's floor from mean lengths: 2 FLOPs per weight and token forward, 4 backward (Kaplan 2020).

    `new_tokens` is the mean length of a sampled completion; None stands for the longest allowed.
    """
    if trainer in ("sft", "reward", "dpo", "dpo_cached"):
        return _offline_floors(trainer, workload, sizes, itemsize)
    body, head, prompt = workload.body, workload.head, workload.prompt
    whole = itemsize * (body + head)
    rows = sizes.completions(trainer)
    prompts = sizes.ppo_prompts if trainer == "ppo" else sizes.prompts
    new = rows * (sizes.new_tokens if new_tokens is None else new_tokens)
    tokens = prompts * prompt + new  # a group's prompt once
    forward = 2 * (tokens * body + new * head)
    policy = 0.0 if itemsize == 4 else forward  # in float32 the sampler's log-probabilities serve as the old ones
    reference = 0.0 if trainer == "grpo" else forward
    phases = {"sample": Floor(forward, sizes.new_tokens * whole, few_rows=True)}
    if trainer == "ppo":
        passes = sizes.ppo_epochs
        values = 2 * tokens * body
        return phases | {
            "score": Floor(values, whole),
            "annotate": Floor(reference + values + policy, 3 * whole),
            "update": Floor(3 * passes * (forward + values), 3 * passes * sizes.ppo_minibatches * 2 * whole),
        }
    annotate = {"annotate": Floor(reference + policy, whole)} if reference + policy else {}
    return phases | annotate | {"update": Floor(3 * forward, 3 * whole)}


def _offline_floors(trainer: str, workload: Workload, sizes: Sizes, itemsize: int) -> dict[str, Floor]:
    """Count the floors of a trainer that reads demonstrations or pairs."""
    body, head = workload.body, workload.head
    whole = itemsize * (body + head)
    sides = workload.chosen + (0.0 if trainer == "sft" else workload.rejected)
    tokens = sizes.rows * (workload.prompt + sides)  # a pair's prompt once
    heads = 0.0 if trainer == "reward" else sizes.rows * sides * head
    forward = 2 * (tokens * body + heads)
    update = {"update": Floor(3 * forward, 3 * whole)}
    return update | ({"reference": Floor(forward, whole)} if trainer == "dpo" else {})


def mean_completion(generated: Sequence[int], rows: int) -> float | None:
    """Return the mean tokens per completion over the timed steps, or None if nothing was sampled."""
    return statistics.fmean(generated) / rows if generated else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the rates, run the trainers, print the table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work_options(parser)
    parser.add_argument("--trainers", nargs="+", default=["sft", "reward", "dpo_cached", "grpo", "ppo"])
    parser.add_argument("--steps", type=int, default=None, help="6; 3 with --model")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="floor-") as name:
        results = _compare_to_floors(options, Path(name))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _compare_to_floors(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare every trainer's phases with their floors; the rates are measured before and after every trainer."""
    steps, sizes = steps_of(options), sizes_of(options)
    workload = make_chosen_work(options, folder, steps, sizes)
    dtype = DTYPES[options.dtype]

    def rates(few: int) -> Rates:
        return measure(workload, dtype, options.device, few=few)

    sys.stdout.write(f"{describe(workload, sizes)}\n\n{HEAD}\n{'|---' * HEAD.count(' | ')}|---|\n")
    rows: list[dict[str, Any]] = []
    for trainer in options.trainers:
        completions = sizes.completions(trainer)
        before = rates(completions)
        job = Job(trainer, steps, str(folder), options.dtype, options.device, options.threads, sizes)
        result = run_side(sys.executable, "ours.py", job, folder)
        rate = mean([before, rates(completions)])
        new_tokens = mean_completion(result["generated"], completions)
        for name, floor in floors(trainer, workload, sizes, dtype.itemsize, new_tokens).items():
            seconds = phase(result, name)
            if seconds is None:
                continue
            row = DistanceRow(trainer, name, seconds, floor, rate)
            rows.append(row.record())
            sys.stdout.write(f"{row.line()}\n")
            sys.stdout.flush()
        rows.append({"trainer": trainer, "phase": "step", "seconds": statistics.median(result["steps"])})
    about = {
        "size": options.size if options.model is None else options.model.name,
        "threads": options.threads,
        "dtype": options.dtype,
        "device": options.device,
        "workload": asdict(workload),
        "sizes": asdict(sizes),
    }
    return {"about": about, "rows": rows}


@dataclass(frozen=True)
class DistanceRow:
    """The measured time of a phase, its floor, and the rates that the floor is computed from."""

    trainer: str
    phase: str
    seconds: float
    floor: Floor
    rates: Rates

    def line(self) -> str:
        """Format a row of the table."""
        least = self.floor.seconds(self.rates)
        few, many, memory = (rate / 1e9 for rate in (self.rates.few, self.rates.many, self.rates.memory))
        return (
            f"| {self.trainer} | {self.phase} | {self.seconds:.4f} | {least:.4f} | {self.seconds / least:.1f} | "
            f"{self.floor.flops / self.seconds / 1e9:.0f} | {few:.0f} / {many:.0f} / {memory:.1f} |"
        )

    def record(self) -> dict[str, Any]:
        """Return the row as JSON data."""
        return {
            "trainer": self.trainer,
            "phase": self.phase,
            "seconds": self.seconds,
            "floor": self.floor.seconds(self.rates),
            "flops": self.floor.flops,
            "rates": asdict(self.rates),
        }


if __name__ == "__main__":
    main()

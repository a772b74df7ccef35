"""How far each phase is from this machine's floor:   python benchmarks/floor.py [--size tiny] [--threads 2]

The floor of a phase is the larger of two times: its matrix products at the best rate that this machine was just
measured to do products of that many rows at, and the weights that it must read at the measured memory rate. Attention
over the context, norms, activations, softmax and the optimizer are left out: the floor cannot be reached, only
approached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from peers.runs import phase, run_side
from peers.work import COMPLETION, PROMPT, SHAPES, Job, Sizes, make_work

HEAD = "| trainer | phase | seconds | floor | times the floor |"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Rates:
    """What the machine does: FLOP/s of products with few and with many rows, bytes/s of memory."""

    few: float
    many: float
    memory: float


@dataclass(frozen=True)
class Floor:
    """Operations, bytes of weights, and rows of each product, of one phase of a step."""

    flops: float
    weights: float = 0.0
    few_rows: bool = False

    def seconds(self, rates: Rates) -> float:
        """The larger of both times."""
        return max(self.flops / (rates.few if self.few_rows else rates.many), self.weights / rates.memory)


def measure(width: int, dtype: torch.dtype, device: str, few: int, many: int = 4096) -> Rates:
    """Rates of products [rows, width] × [width, 4 width], and of copying 256 MB."""
    weight = torch.randn(width, 4 * width, device=device).to(dtype)

    def product(rows: int) -> float:
        left = torch.randn(rows, width, device=device).to(dtype)
        return 2 * rows * width * 4 * width / best(lambda: left @ weight, device)

    block = torch.empty(64 * 2**20, dtype=torch.float32, device=device)
    other = torch.empty_like(block)
    return Rates(product(few), product(many), 2 * block.numel() * 4 / best(lambda: other.copy_(block), device))


def best(work: Callable[[], object], device: str, seconds: float = 1.0) -> float:
    """The least seconds of one call, over about so many seconds of calls."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def products(shape: str) -> tuple[float, float]:
    """Numbers in the weights that every token is multiplied with: of the layers, and of the LM head."""
    layers, width, _, vocabulary = SHAPES[shape]
    hidden = round(width * 8 / 3 / 64) * 64
    return float(layers * (4 * width * width + 3 * width * hidden)), float(width * vocabulary)


def floors(trainer: str, shape: str, sizes: Sizes, itemsize: int) -> dict[str, Floor]:
    """Of each phase of a step, from mean lengths: 2 FLOPs a weight and token forward, 4 backward (Kaplan 2020)."""
    body, head = products(shape)
    prompt, side = sum(PROMPT) / 2, sum(COMPLETION) / 2
    whole = itemsize * (body + head)
    if trainer in ("sft", "reward", "dpo_cached"):
        sides = 1 if trainer == "sft" else 2
        tokens = sizes.rows * (prompt + sides * side)  # a pair's prompt once
        heads = 0.0 if trainer == "reward" else sizes.rows * sides * side * head
        return {"update": Floor(6 * (tokens * body + heads), 3 * whole)}
    rows = sizes.prompts * sizes.group if trainer != "ppo" else sizes.ppo_prompts
    prompts = sizes.prompts if trainer != "ppo" else sizes.ppo_prompts
    new = rows * sizes.new_tokens
    tokens = prompts * prompt + new  # a group's prompt once
    forward = 2 * (tokens * body + new * head)
    own = 0.0 if itemsize == 4 else forward  # in float32 the sampler's log-probabilities serve as the old ones
    found = {"sample": Floor(forward, sizes.new_tokens * whole, few_rows=True)}
    if trainer == "ppo":
        passes = sizes.ppo_epochs
        values = 2 * tokens * body
        return found | {
            "score": Floor(values, whole),
            "annotate": Floor(forward + values + own, 3 * whole),
            "update": Floor(3 * passes * (forward + values), 3 * passes * sizes.ppo_minibatches * 2 * whole),
        }
    annotate = {"annotate": Floor(own, whole)} if own else {}
    return found | annotate | {"update": Floor(3 * forward, 3 * whole)}


def main() -> None:
    """Measure, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--trainers", nargs="+", default=["sft", "reward", "dpo_cached", "grpo", "ppo"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes, dtype = Sizes(), DTYPES[options.dtype]
    width = SHAPES[options.size][1]
    rates = measure(width, dtype, options.device, few=sizes.prompts * sizes.group)
    few, many, memory = (rate / 1e9 for rate in (rates.few, rates.many, rates.memory))
    sys.stdout.write(f"products: {few:.1f} GFLOP/s with {sizes.prompts * sizes.group} rows, {many:.1f} with 4096; ")
    sys.stdout.write(f"memory: {memory:.1f} GB/s\n\n{HEAD}\n|---|---|---|---|---|\n")
    rows = []
    with tempfile.TemporaryDirectory(prefix="floor-") as name:
        make_work(Path(name), options.size, options.steps, sizes)
        for trainer in options.trainers:
            job = Job(trainer, options.steps, name, options.dtype, options.device, options.threads, sizes)
            found = run_side(sys.executable, "ours.py", job, Path(name))
            for what, floor in floors(trainer, options.size, sizes, dtype.itemsize).items():
                seconds, least = phase(found, what), floor.seconds(rates)
                if seconds is None:
                    continue
                rows.append({"trainer": trainer, "phase": what, "seconds": seconds, "floor": least})
                sys.stdout.write(f"| {trainer} | {what} | {seconds:.4f} | {least:.4f} | {seconds / least:.1f} |\n")
            rows.append({"trainer": trainer, "phase": "step", "seconds": statistics.median(found["steps"])})
    if options.json:
        about = {"size": options.size, "threads": options.threads, "dtype": options.dtype, "device": options.device}
        found_rates = {"few": rates.few, "many": rates.many, "memory": rates.memory}
        options.json.write_text(json.dumps({"about": about, "rates": found_rates, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

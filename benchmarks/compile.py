"""Time a forward and backward pass with layers eager and compiled (policy.compile), in turn in one process.

    python benchmarks/compile.py --model models/smollm2-135m-instruct --json benchmarks/results/compile.json
    python benchmarks/compile.py --shape 0.5b --device cuda --dtypes bfloat16 --rows 64

A pass computes the log-probabilities of the completions of a batch, and the gradients of all weights: rows of 120 to
200 random tokens, half prompt and half completion, other lengths in every round. A round is one pass of each way; the
ratio is that of the two, round by round, and above 1 where compiling pays. What compiling takes is timed with an empty
cache, and the passes that follow must compile nothing. On a CPU, passes are timed in seconds of the process: other
programs then move a ratio less. With --pretend nothing is compiled: the pretend GPU has no
Triton, and the reason is printed.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from recorded_decoding import SHAPES, model_of

from rlhf.models.backbone import body_of, load_causal_lm
from rlhf.models.kernels.llama.compiled import compile_layers, count_graphs
from rlhf.models.kernels.packing import vocabulary_size
from rlhf.models.logprobs import completion_outputs
from rlhf.runtime.memory import keep_memory

ROOT = Path(__file__).resolve().parents[1]
Fields = tuple[torch.Tensor, ...]


def batch(model: Any, rows: int, seed: int) -> Fields:
    """Draw prompts (padded on the left) and completions of 60 to 100 tokens each."""
    generator, vocabulary = torch.Generator().manual_seed(seed), vocabulary_size(model)
    fields = []
    for is_prompt in (True, False):
        mask = torch.arange(100) < torch.randint(60, 101, (rows, 1), generator=generator)
        ids = torch.randint(vocabulary // 4, vocabulary, (rows, 100), generator=generator)
        fields += [ids, mask.flip(1) if is_prompt else mask]
    return tuple(fields)


def seconds_of_pass(model: Any, fields: Fields, dtype: torch.dtype, device: str) -> float:
    """Time a forward and backward pass, in seconds of this process on a CPU; the gradients are those of this pass."""
    model.zero_grad(set_to_none=True)
    wait, clock = (torch.cuda.synchronize, time.perf_counter) if device == "cuda" else (nullcontext, time.process_time)
    wait()
    start = clock()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logprobs = completion_outputs(model, *fields, temperature=1.0).logprobs
    logprobs.sum().backward()
    wait()
    return clock() - start


def gradient_error(model: Any, right: Any) -> float:
    """Compute the RMS error of all gradients, relative to their RMS."""
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), right.parameters(), strict=True)]
    errors, sizes = (
        sum(float(part.double().square().sum()) for part in parts if part is not None)
        for parts in ([None if a is None else a - b for a, b in pairs], [b for _, b in pairs])
    )
    return float((errors / sizes) ** 0.5)


def compare(eager: Any, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Compile a copy of the model, and time passes of both in turn."""
    compiled, start = copy.deepcopy(eager), time.perf_counter()
    reason = compile_layers(body_of(compiled), dtype)
    if reason:
        return {"skipped": reason}
    result: dict[str, Any] = {"compiling_s": time.perf_counter() - start}
    graphs, ratios, seconds = count_graphs(), [], []
    for number in range(options.rounds + 1):  # the first warms up: torch's products, and the casts of weights
        fields = tuple(part.to(options.device) for part in batch(eager, options.rows, number))
        ways = [eager, compiled] if number % 2 else [compiled, eager]
        times = {id(model): seconds_of_pass(model, fields, dtype, options.device) for model in ways}
        seconds.append((times[id(eager)], times[id(compiled)]))
        ratios.append(times[id(eager)] / times[id(compiled)])
    return result | {
        "gradient_error": gradient_error(compiled, eager),
        "compiled_later": count_graphs() - graphs,
        "eager_s": [times[0] for times in seconds[1:]],
        "compiled_s": [times[1] for times in seconds[1:]],
        "ratios": ratios[1:],
        "ratio": statistics.median(ratios[1:]),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare in each dtype."""
    torch.set_num_threads(options.threads)
    keep_memory()
    model = load_causal_lm(options.model) if options.model else model_of(options.shape, options.device).float()
    name = options.model and Path(options.model).name
    results: dict[str, Any] = {"model": name or options.shape, "rows": options.rows, "threads": options.threads}
    results["torch"], results["machine"] = torch.__version__, platform.machine()
    for dtype in options.dtypes:
        results[dtype] = compare(model.to(options.device), getattr(torch, dtype), options)
        sys.stderr.write(f"{dtype}: {json.dumps(results[dtype])}\n")
    return results


def main() -> None:
    """Measure, print the results as JSON and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; otherwise random weights of --shape")
    parser.add_argument("--shape", choices=list(SHAPES), default="toy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine: Any = nullcontext()
    if options.pretend:
        sys.path.insert(0, str(ROOT / "tests" / "gpu"))
        machine, options.device, options.shape = importlib.import_module("pretend").PretendDevice(), "cuda", "toy"
    with machine, tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        results = measure(options)
    sys.stdout.write(json.dumps(results) + "\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

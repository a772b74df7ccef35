"""Measure speed and numbers on a GPU, in under ten minutes:   python benchmarks/gpu.py [--peer-python PY] [--json F]

Random weights shaped like a 0.5B and a 1.5B model, bfloat16 arithmetic over float32 weights.
  rollout   our sampler and transformers' generate, 256 completions at once, 0.5B shape
  update    the share of this card's measured bf16 matmul rate that the update phase of SFT reaches, 1.5B shape
  steps     GRPO and PPO, and TRL's on the same card (--peer-python, --ppo-peer-python), 0.5B shape
  correctness  pytest tests/gpu on this card: every trainer and sampler has the CPU's numbers
  decoding     steps as they are recorded and as they are replayed, beside generate and, if installed, vLLM; GQA shapes,
               lengths as of real rows
Each part runs alone (--only), within a time limit, and its failure is a result: the others go on. A bare image with
torch needs the wheels in `WHEELS` besides; missing ones are printed.
With --pretend the parts that can run on the pretend GPU of tests/gpu do (no times: it shows that the script works).
With --toy everything runs on the CPU at toy size: it shows that the script works, not its speed.
--json writes the results, --md a table of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from floor import floors, measure
from peers.runs import SideResult, phase, run_side
from peers.work import Job, Sizes, make_work, synthetic_workload

WHEELS = (  # packages that a bare image with torch lacks, by import name; all are small
    *(
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_inspection",
        "datasets",
        "dill",
        "multiprocess",
        "xxhash",
    ),
    *(
        "jaxtyping",
        "beartype",
        "transformers",
        "peft",
        "accelerate",
        "safetensors",
        "yaml",
        "rich",
        "psutil",
        "filelock",
    ),
    "pytest",
)
LIMIT_S = 300  # of a part
PRETEND_LIMIT_S = 1800  # on the pretend GPU, which is a CPU that counts
ROOT = Path(__file__).resolve().parents[1]

Runs = Callable[[str, str, Job], SideResult]  # python, script, job


def rollout(job: Job, run: Runs) -> dict[str, float]:
    """Measure the seconds of sampling with each backend, and their ratio."""
    seconds = {}
    for backend in ("hf", "auto"):
        settings = {"sampling": {"backend": backend, "batch_size": job.sizes.prompts * job.sizes.group}}
        seconds[backend] = phase(run(sys.executable, "ours.py", replace(job, overrides=settings)), "sample") or 0.0
    return {**seconds, "ratio": seconds["hf"] / seconds["auto"]}


def update(job: Job, shape: str, run: Runs) -> dict[str, float]:
    """Measure the FLOP/s of the update phase (6 per weight and token) relative to the measured matmul rate."""
    dtype = torch.bfloat16 if job.dtype == "bfloat16" else torch.float32
    workload = synthetic_workload(shape)
    rates = measure(workload, dtype, job.device, few=64)
    result = run(sys.executable, "ours.py", job)
    seconds = phase(result, "update") or 0.0
    reached = floors("sft", workload, job.sizes, dtype.itemsize)["update"].flops / seconds
    return {
        "seconds": seconds,
        "tflops": reached / 1e12,
        "matmul_tflops": rates.many / 1e12,
        "share": reached / rates.many,
    }


def compare_steps(job: Job, peer: str | None, run: Runs) -> dict[str, Any]:
    """Measure a step of ours and, if there is a peer, one of the peer and their ratio."""
    ours = run(sys.executable, "ours.py", job)
    result: dict[str, Any] = {"ours_s": statistics.median(ours["steps"]), "phases": ours["phases"][-1]}
    result["peak_gpu_mb"] = ours.get("peak_gpu_mb")
    if peer is not None:
        theirs = run(peer, "trl_side.py", job)
        result |= {"trl_s": statistics.median(theirs["steps"]), "trl_peak_gpu_mb": theirs.get("peak_gpu_mb")}
        result["ratio"] = result["trl_s"] / result["ours_s"]
    return result


def missing_wheels() -> list[str]:
    """Return the packages that are not installed here."""
    return [name for name in WHEELS if importlib.util.find_spec(name) is None]


def run_alone(command: list[str], limit_s: float) -> dict[str, Any]:
    """Run a part as a process of its own, within the time limit; its last line is its result if that is JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment, cwd=ROOT
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:3])}: {last} {done.stderr[-1000:]}")
    return dict(json.loads(last)) if last.startswith("{") else {"output": last}


def processes(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the parts that are processes of their own, which the pretend GPU can run too."""
    decoding = [sys.executable, str(ROOT / "benchmarks" / "recorded_decoding.py")]
    correctness = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "tests/gpu"]
    if options.pretend:  # at toy size, for any shape
        return {
            "correctness": correctness,
            "decoding": [*decoding, "--pretend"],
        }
    vllm = {"decoding vllm 0.5b": [*decoding, "--backends", "vllm"]} if importlib.util.find_spec("vllm") else {}
    return {
        "correctness": correctness,
        "decoding 0.5b": decoding,
        **vllm,
        "decoding 1.5b": [*decoding, "--shape", "1.5b"],
    }


def attempt(results: dict[str, Any], name: str, part: Callable[[], dict[str, Any]]) -> None:
    """Run a part and keep its result or its error: the parts after it run all the same."""
    try:
        results[name] = part()
    except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        results[name] = {"failed": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"{name}: {json.dumps(results[name])}\n")
    sys.stdout.flush()


def as_markdown(results: dict[str, Any]) -> str:
    """Return the results as a table: a row for each number, with the names that lead to it."""

    def rows(value: Any, names: tuple[str, ...]) -> list[str]:
        if isinstance(value, dict):
            return [row for name, inner in value.items() for row in rows(inner, (*names, str(name)))]
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return [f"| {names[0]} | {' '.join(names[1:])} | {' '.join(text.split()).replace('|', '/')} |"]

    return "\n".join(["| part | what | value |", "|---|---|---|", *rows(results, ())]) + "\n"


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Run the measurements and print each result as soon as it is there."""
    toy = options.toy
    device, dtype = ("cpu", "float32") if toy else ("cuda", "bfloat16")
    small, large = ("toy", "toy") if toy else ("0.5b", "1.5b")
    wide = Sizes(prompts=2, group=2, new_tokens=8) if toy else Sizes(prompts=32, group=8, new_tokens=256)
    usual = Sizes(rows=4, prompts=2, group=2, ppo_prompts=32, new_tokens=8) if toy else Sizes(new_tokens=256)
    steps = 2 if toy else 4
    is_real = not toy and not options.pretend
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if is_real else "cpu"}
    results: dict[str, Any] = {"about": about}
    sys.stdout.write(f"{json.dumps(about)}\n")
    for name, command in ({} if toy else processes(options)).items():
        if options.only in (None, name.split()[0]):
            limit_s = PRETEND_LIMIT_S if options.pretend else LIMIT_S
            attempt(results, name, lambda command=command, limit_s=limit_s: run_alone(command, limit_s))  # type: ignore[misc]
    if options.pretend:
        return results

    def work(shape: str, sizes: Sizes, task: Callable[[str, Runs], dict[str, Any]], name: str) -> None:
        if options.only not in (None, name):
            return

        def part() -> dict[str, Any]:
            with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
                make_work(Path(folder), shape, steps, sizes)
                return task(
                    folder,
                    lambda python, script, job: run_side(python, script, job, Path(folder), timeout_s=LIMIT_S),
                )

        attempt(results, name, part)

    def job(trainer: str, folder: str, sizes: Sizes) -> Job:
        return Job(trainer, steps, folder, dtype, device, options.threads, sizes, whole=True)

    work(small, wide, lambda folder, run: rollout(job("grpo", folder, wide), run), "rollout")
    work(large, usual, lambda folder, run: update(job("sft", folder, usual), large, run), "update")
    for trainer, peer in (("grpo", options.peer_python), ("ppo", options.ppo_peer_python)):
        work(
            small,
            usual,
            lambda folder, run, trainer=trainer, peer=peer: compare_steps(job(trainer, folder, usual), peer, run),  # type: ignore[misc]
            trainer,
        )
    return results


def main() -> None:
    """Run the measurements, print the results and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python")
    parser.add_argument("--ppo-peer-python")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--only", choices=("correctness", "decoding", "rollout", "update", "grpo", "ppo"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--md", type=Path)
    options = parser.parse_args()
    if missing := missing_wheels():
        sys.exit(f"missing here: {' '.join(missing)}\ncarry these wheels, or: pip install {' '.join(missing)}")
    results = run_all(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if options.md:
        options.md.write_text(as_markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()

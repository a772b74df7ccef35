"""Measure the memory of a mixed and streamed data set, and kill and resume a run on it.

    python benchmarks/data_stream.py [--rows 1000000] [--steps 200]

Writes the rows to a temporary folder, as JSONL, gzipped JSONL and Parquet. A process of its own draws as many rows as
there are (1 epoch in all), mixed 3:2:1, and prints its resident memory on the way; two more train SFT on a tiny Llama,
one of them killed (SIGKILL) half way and started again. Writes benchmarks/results/data_stream.json; memory is measured
of the process (VmRSS and VmHWM of /proc/self/status), so it needs Linux.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
from runs import make_model, quiet  # noqa: E402

from rlhf.config.load import train_config  # noqa: E402
from rlhf.data.pairs import demonstration_pipeline  # noqa: E402
from rlhf.data.tokenizer import load_tokenizer  # noqa: E402
from rlhf.factory.data import open_mixture  # noqa: E402
from rlhf.factory.offline import build_offline  # noqa: E402
from rlhf.training.offline import train_offline  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "data_stream.json"
ROWS_PER_STEP = 64
SHARES = {"plain": 3, "gzipped": 2, "table": 1}


def rows(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Make rows that differ, some hundred characters each; their words do not matter."""
    words = ("good", "bad", "red", "blue", "one", "two")
    for number in range(count):
        digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
        chosen = [words[byte % len(words)] for byte in digest]
        yield {"prompt": " ".join(chosen[:8]), "completion": " " + " ".join(chosen[8:]), "id": str(number)}


def write_sources(folder: Path, count: int) -> None:
    """Write `count` rows in all, in three kinds of files."""
    total = sum(SHARES.values())
    with (folder / "plain.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count * SHARES["plain"] // total, 1))
    with gzip.open(folder / "gzipped.jsonl.gz", "wt", encoding="utf-8", compresslevel=1) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(count * SHARES["gzipped"] // total, 2))
    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("prompt", "completion", "id")])
    with pyarrow.parquet.ParquetWriter(folder / "table.parquet", schema) as writer:
        chunk: list[dict[str, str]] = []
        for row in rows(count - sum(count * SHARES[name] // total for name in ("plain", "gzipped")), 3):
            chunk.append(row)
            if len(chunk) == 10_000:
                writer.write_table(pyarrow.Table.from_pylist(chunk, schema))
                chunk = []
        if chunk:
            writer.write_table(pyarrow.Table.from_pylist(chunk, schema))


def settings(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Return the configuration of a run on the sources in `folder`."""
    files = {"plain": "plain.jsonl", "gzipped": "gzipped.jsonl.gz", "table": "table.parquet"}
    sources = {key: {"path": str(folder / file), "weight": SHARES[key]} for key, file in files.items()}
    return {
        "run": {"out_dir": str(folder / name), "device": "cpu"},
        "data": {"sft": {"sources": sources, "stream": True}},
        "policy": {"model": str(folder / "model"), "lr": 1e-2},
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": ROWS_PER_STEP, "micro_batch_size": ROWS_PER_STEP},
        "schedule": {"steps": steps},
        "checkpoint": {"every": max(1, steps // 8)},
    }


def memory_mb() -> dict[str, float]:
    """Read this process's resident memory now and at its peak, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: round(int(lines[key].split()[0]) / 1024, 1) for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def iterate(folder: Path, count: int) -> list[dict[str, float]]:
    """Draw and collate `count` rows; return the memory at ten places."""
    config = train_config(settings(folder, "iterated", 1))
    tokenizer = load_tokenizer(str(folder / "model"))
    pipeline = demonstration_pipeline(config.sft_data, tokenizer, chat_template=config.data.chat_format)
    stream = open_mixture(config.sft_data, pipeline, seed=0, name="sft", rows_per_step=ROWS_PER_STEP)
    steps = count // ROWS_PER_STEP
    places = {max(1, steps * tenth // 10) for tenth in range(1, 11)} | {1}
    measured = []
    for step in range(1, steps + 1):
        batch = stream.batch(step)
        assert len(batch) == ROWS_PER_STEP
        if step in places:
            measured.append({"rows": float(step * ROWS_PER_STEP)} | memory_mb())
            sys.stderr.write(json.dumps(measured[-1]) + "\n")
    return measured


def fit(folder: Path, name: str, steps: int) -> dict[str, float]:
    """Train, from the newest checkpoint if there is one."""
    run = build_offline(train_config(settings(folder, name, steps)), quiet())
    train_offline(run)
    run.session.recorder.close()
    return memory_mb()


def child(*arguments: str) -> subprocess.Popen[str]:
    """Start this script as another process."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> Any:
    """Wait for a process, and read the JSON that it printed last."""
    output, _ = process.communicate()
    assert process.returncode == 0, f"exit {process.returncode}"
    return json.loads(output.splitlines()[-1])


def kill_at(process: subprocess.Popen[str], metrics: Path, lines: int) -> int:
    """Kill a process once `metrics` has so many lines; return the number of lines."""
    while process.poll() is None:
        written = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        if written >= lines:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            return written
        time.sleep(0.05)
    raise RuntimeError("the run ended before it could be killed: give it more --steps")


def digest(folder: Path, steps: int) -> dict[str, str]:
    """Compute the SHA-256 digests of the weights and of the metrics of a run."""
    files = {
        "weights": folder / "checkpoints" / f"step-{steps:06d}" / "model" / "model.safetensors",
        "metrics": folder / "metrics.jsonl",
    }
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def measure(folder: Path, count: int, steps: int) -> dict[str, Any]:
    """Do all of it in `folder`."""
    write_sources(folder, count)
    make_model(folder / "model")
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    iterated = answer(child("--child", "iterate", str(folder), str(count)))
    whole = answer(child("--child", "fit", str(folder), "whole", str(steps)))
    killed_after = kill_at(
        child("--child", "fit", str(folder), "killed", str(steps)), folder / "killed" / "metrics.jsonl", steps // 2
    )
    resumed = answer(child("--child", "fit", str(folder), "killed", str(steps)))
    one, other = (digest(folder / name, steps) for name in ("whole", "killed"))
    return {
        "rows": count,
        "megabytes_of_files": round(size / 2**20, 1),
        "shares": SHARES,
        "rows_per_step": ROWS_PER_STEP,
        "memory_mb_while_drawing": iterated,
        "steps": steps,
        "killed_after_step": killed_after,
        "memory_mb_uninterrupted": whole,
        "memory_mb_resumed": resumed,
        "same_weights": one["weights"] == other["weights"],
        "same_metrics": one["metrics"] == other["metrics"],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "datasets", "pyarrow")},
    }


def main() -> None:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(Path(folder), options.rows, options.steps)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
        return
    work, folder, *rest = options.child
    result = iterate(Path(folder), int(rest[0])) if work == "iterate" else fit(Path(folder), rest[0], int(rest[1]))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

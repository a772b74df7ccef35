"""Measure the memory in which each process loads a model under ZeRO-3: whole and then split, and each its part only.

    python benchmarks/loading_memory.py [--processes 4] [--hidden 1024] [--layers 16] [--vocabulary 32000]

A random Llama with tied embeddings is written in bfloat16 to a temporary folder. For each way of loading, processes are
started that load it in float32 and shard it. Counted in each is the growth of its resident memory to its peak from
just before loading, when all libraries were loaded and DeepSpeed had sharded a model of a few weights; the largest of
the processes counts. Next to it stand the share (all weights in float32, divided by the number of processes) and the
largest weight, of which a process may need a copy of its own.

--ways split leaves out the first way, which needs memory for a whole model in each process.
Writes benchmarks/results/loading_memory.json and prints the table in Markdown. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from rlhf.config.run import RunConfig, ShardingConfig  # noqa: E402
from rlhf.models import weight_files  # noqa: E402
from rlhf.models.backbone import load_causal_lm  # noqa: E402
from rlhf.process import exit_process  # noqa: E402
from rlhf.runtime.distributed import shutdown  # noqa: E402
from rlhf.runtime.engine import make_engine  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "loading_memory.json"
WAYS = ("whole", "split")
MB = 2**20


def resident_mb(key: str) -> float:
    """Return VmRSS or VmHWM (its peak) of this process, in MB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(f"{key}:"))


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Write a random Llama in bfloat16, in files of at most 200 MB with an index."""
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM._from_config(config).save_pretrained(folder, max_shard_size="200MB")


def work(way: str, folder: Path, out: Path) -> None:
    """Load the model in one of the processes; the first writes the figures of all to `out`."""
    torch.set_num_threads(1)
    engine = make_engine(RunConfig(device="cpu"), ShardingConfig(mode="zero3"))
    engine.freeze("warm-up", nn.Linear(8, 8))
    if way == "whole":
        weight_files.read_headers = lambda _: {}  # type: ignore[assignment]
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is from now on
    before, start = resident_mb("VmRSS"), time.perf_counter()
    model = load_causal_lm(str(folder), engine=engine)
    engine.freeze("policy", model)
    seconds = time.perf_counter() - start
    sizes = [int(p.ds_numel) for p in model.parameters()]  # type: ignore[attr-defined]
    figures = engine.ranks.gather((resident_mb("VmHWM") - before, resident_mb("VmRSS") - before, seconds))
    if engine.ranks.is_main:
        share = sum(sizes) * 4 / engine.ranks.world / MB
        row = {
            "way": way,
            "processes": engine.ranks.world,
            "parameters": sum(sizes),
            "share_mb": share,
            "largest_weight_mb": max(sizes) * 4 / MB,
            "peak_mb": max(peak for peak, _, _ in figures),
            "afterwards_mb": max(after for _, after, _ in figures),
            "seconds": max(seconds for _, _, seconds in figures),
        }
        out.write_text(json.dumps(row), encoding="utf-8")
    shutdown()
    exit_process(0)  # at once: giving back the memory of whole models takes a while


def launch(way: str, folder: Path, processes: int) -> dict[str, Any]:
    """Load in processes of their own and return the figures."""
    out = folder / f"{way}.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    arguments = [__file__, "--worker", way, str(folder), str(out)]
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, *torchrun, *arguments], env=environment, check=True)
    row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return row


def main() -> None:
    """Measure both ways, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="whole takes a model in each process")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], Path(options.worker[1]), Path(options.worker[2]))
        return
    with tempfile.TemporaryDirectory(prefix="rlhf-loading-") as name:
        write_model(Path(name), options)
        rows = [launch(way, Path(name), options.processes) for way in options.ways]
    about = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
    about |= {"python": platform.python_version(), "machine": platform.machine()}
    RESULT.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    lines = [
        f"{rows[0]['parameters'] / 1e6:.0f} M parameters, {rows[0]['processes']} processes, MB each",
        "",
        "| loaded | share | largest weight | at its peak | afterwards |",
        "|---|---|---|---|---|",
        *(
            f"| {row['way']} | {row['share_mb']:.0f} | {row['largest_weight_mb']:.0f} | {row['peak_mb']:.0f} | "
            f"{row['afterwards_mb']:.0f} |"
            for row in rows
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Measure the memory of each process under ddp, zero1, zero2 and zero3, and compare with the ZeRO paper's formula.

    python benchmarks/memory_per_rank.py [--processes 2] [--hidden 768] [--layers 12]

A random Llama in float32 with AdamW takes two optimizer steps on one short row per process, so activations hardly
count. Counted in the first process are the bytes of every live tensor, once per storage, when the gradient is complete
and before the step is taken (the most that a step needs); and the growth of the process's memory by then and at its
peak, loading included. On GPUs (one process each; by default on all of them) the peak is the allocator's.

Formula (Rajbhandari et al. 2020, sec. 3, for float32): a parameter is 4 bytes of weight, 4 of gradient, 8 of Adam's
moments; zero1 divides the moments by the number of processes, zero2 also the gradients, zero3 also the weights.

Writes benchmarks/results/memory_per_rank.json and prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from jaxtyping import Int  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from rlhf.algo.masked import Mean  # noqa: E402
from rlhf.batching import Batch  # noqa: E402
from rlhf.config.run import RunConfig, ShardingConfig  # noqa: E402
from rlhf.config.sections import OptimizerConfig  # noqa: E402
from rlhf.runtime.distributed import shutdown  # noqa: E402
from rlhf.runtime.engine import TrainableModel, make_engine  # noqa: E402
from rlhf.training.step import LossBatch, optimizer_step  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "memory_per_rank.json"
MODES = ("ddp", "zero1", "zero2", "zero3")
PARTS = {"weights": 4, "gradients": 4, "moments": 8}  # bytes per parameter
SPLIT: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("moments",),
    "zero2": ("moments", "gradients"),
    "zero3": ("moments", "gradients", "weights"),
}
MB = 2**20


@dataclass(frozen=True, kw_only=True)
class Texts(Batch):
    """Rows of token ids."""

    ids: Int[Tensor, "B T"]


class NextToken:
    """Cross-entropy of the next token, as a rlhf.training.step.Loss."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device

    def denominators(self, batch: Texts) -> dict[str, float]:
        """Return the number of predicted tokens."""
        return {"sft": float(batch.ids[:, 1:].numel())}

    def terms(self, micro: Texts) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the sum over a micro-batch."""
        ids = micro.ids.to(self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        return {"sft": nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")}, {}


class Watched:
    """A TrainableModel whose memory is measured between the backward pass and the step."""

    def __init__(self, inner: TrainableModel) -> None:
        self.inner = inner
        self.seen: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, *, norm: float, lr_factor: float) -> float:
        """Measure the memory, then take the step; see Trained."""
        self.seen = tensor_memory(self.inner) | {"resident_mb": resident_mb("VmRSS")}
        return self.inner.step(norm=norm, lr_factor=lr_factor)


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Map the address of each storage behind the tensors to its bytes."""
    behind = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in behind if storage.nbytes()}


def tensor_memory(trained: TrainableModel) -> dict[str, float]:
    """Count the MB of weights, the optimizer's copy of them, its moments, and the rest (gradients and buffers).

    Every storage is counted once.
    """
    weights = storages(_weight_tensors(trained.module))
    states = _optimizer_tensors(trained)
    rest = storages([*_alive_tensors(), *states])
    moments = {key: size for key, size in storages(states).items() if key not in weights}
    flat = storages(trained._flat()) if hasattr(trained, "_flat") else {}  # the copy that DeepSpeed's optimizer updates
    copies = {key: size for key, size in flat.items() if key not in weights}
    for address in (*weights, *moments, *copies):
        rest.pop(address, None)
    kinds = {"weights": weights, "copy of weights": copies, "moments": moments, "gradients and buffers": rest}
    return {name: sum(sizes.values()) / MB for name, sizes in kinds.items()}


def _weight_tensors(module: nn.Module) -> list[Tensor]:
    """List the weights of a module; under ZeRO-3 also this process's shards of them."""
    parameters = list(module.parameters())
    return [*(p.data for p in parameters), *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))]


def _optimizer_tensors(trained: TrainableModel) -> list[Tensor]:
    """List the tensors of the optimizer's state, also of one that DeepSpeed wraps."""
    outer = trained.optimizer  # type: ignore[attr-defined]
    inner = getattr(outer, "optimizer", outer)
    return [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]


def _alive_tensors() -> list[Tensor]:
    """List the tensors that Python knows, and their gradients."""
    gc.collect()
    alive = [value for value in gc.get_objects() if issubclass(type(value), Tensor) and not value.is_meta]
    return alive + [tensor.grad for tensor in alive if tensor.is_leaf and tensor.grad is not None]


def resident_mb(key: str) -> float:
    """Return VmRSS or VmHWM (its peak) of this process, in MB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(f"{key}:"))


def work(mode: str, hidden: int, layers: int, out: Path) -> None:
    """Train in one of the processes; the first writes its figures to `out`."""
    torch.set_num_threads(1)
    engine = make_engine(RunConfig(), ShardingConfig(mode=mode))  # type: ignore[arg-type]
    before = resident_mb("VmRSS")
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    parameters = sum(p.numel() for p in model.parameters())
    trained = Watched(engine.train("policy", model, OptimizerConfig(lr=1e-4), terms=["sft"]))
    batch = Texts(ids=torch.arange(16).repeat(engine.ranks.world, 1))
    for _ in range(2):  # Adam's moments exist from the first step on
        part = LossBatch(batch, NextToken(model, engine.device))
        optimizer_step([part], [trained], micro_batch_size=1, lr_factor=1.0, ranks=engine.ranks)
    if engine.ranks.is_main:
        seen = trained.seen
        resident = seen.pop("resident_mb") - before
        peak = engine.peak_memory_mb() - (before if engine.device.type == "cpu" else 0.0)
        row = {
            "mode": mode,
            "processes": engine.ranks.world,
            "device": engine.device.type,
            "parameters": parameters,
            "formula_mb": formula_mb(mode, parameters, engine.ranks.world),
            "tensors_mb": sum(seen.values()),
            "parts_mb": seen,
            "resident_mb": resident,
            "peak_mb": peak,
        }
        out.write_text(json.dumps(row), encoding="utf-8")
    shutdown()


def formula_mb(mode: str, parameters: int, processes: int) -> float:
    """Compute the paper's formula for one process, in MB."""
    return sum(parameters * size / (processes if name in SPLIT[mode] else 1) for name, size in PARTS.items()) / MB


def launch(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one mode in processes of its own and return the figures."""
    with tempfile.TemporaryDirectory(prefix="rlhf-memory-") as name:
        out = Path(name, "row.json")
        arguments = [__file__, "--worker", mode, str(out), f"--hidden={options.hidden}", f"--layers={options.layers}"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
        subprocess.run([sys.executable, *torchrun, *arguments], env={"OMP_NUM_THREADS": "1", **os.environ}, check=True)
        row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return row


def main() -> None:
    """Measure all modes, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], options.hidden, options.layers, Path(options.worker[1]))
        return
    rows = [launch(mode, options) for mode in options.modes]
    about = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
    about |= {"python": platform.python_version(), "machine": platform.machine()}
    RESULT.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    names = list(rows[0]["parts_mb"])
    first = rows[0]
    lines = [
        f"{first['parameters'] / 1e6:.0f} M parameters, {first['processes']} process(es), {first['device']}, MB each",
        "",
        f"| mode | formula | tensors | {' | '.join(names)} | memory grew by | at its peak by |",
        "|---|" + "---|" * (len(names) + 4),
        *(
            f"| {row['mode']} | {row['formula_mb']:.0f} | {row['tensors_mb']:.0f} | "
            + " | ".join(f"{row['parts_mb'][name]:.0f}" for name in names)
            + f" | {row['resident_mb']:.0f} | {row['peak_mb']:.0f} |"
            for row in rows
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Compare the arithmetic of `rlhf plan` with the peaks that other projects have published.

    python benchmarks/published_peaks.py

Each row has the settings that its page states, and the plan's formulas for them: weights, gradients and moments in the
dtype that the project keeps them in, activations of layers through the modules, logits all at once or in chunks.
No formula was fitted to the rows. Two choices were made after a look at them: 16-bit logits for the QLoRA rows, and
that with checkpointing a layer is computed again only once the logits are gone. Torchtune's "peak memory
active" counts tensors; the figures of Qwen's README are of the whole GPU, so that the context of CUDA is added.

Writes benchmarks/results/published_peaks.json and prints a table.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf.planning.arithmetic import Arithmetic, Bytes, PassRows, activations, head, layer_activations  # noqa: E402
from rlhf.planning.machine import LIBRARIES  # noqa: E402
from rlhf.planning.shapes import PUBLISHED, Shape  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "published_peaks.json"
GIB = 2**30
TORCHTUNE = "https://github.com/pytorch/torchtune/blob/a9ea6d5bf023ebebca7a8ec7981099b03696c67a/README.md"
QWEN = "https://github.com/QwenLM/Qwen#profiling-of-memory-and-speed"
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes, scales quantized too
GPTQ = 0.5 + 2.5 / 128  # bytes, a 16-bit scale and a 4-bit zero for each group of 128
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # of torchtune's LoRA recipes
CHUNKS = 8  # of torchtune's chunked cross-entropy

BF16 = Arithmetic(wide=2, low=2, device="cuda", written_out=False, chunked=False)


def qwen(hidden: int, layers: int, heads: int, intermediate: int, vocabulary: int) -> Shape:
    """Return the shape of a Qwen (1); its feed-forward halves are half as wide as in its config.json."""
    return Shape(
        family="qwen",
        hidden=hidden,
        layers=layers,
        heads=heads,
        groups=heads,
        head_dim=hidden // heads,
        intermediate=intermediate // 2,
        vocabulary=vocabulary,
        tied=False,
    )


LLAMA_8B, LLAMA_3B = PUBLISHED["meta-llama/Llama-3.1-8B"], PUBLISHED["meta-llama/Llama-3.2-3B"]
QWENS = {
    "Qwen 1.8B": qwen(2048, 24, 16, 11008, 151936),
    "Qwen 7B": qwen(4096, 32, 32, 22016, 151936),
    "Qwen 14B": qwen(5120, 40, 40, 27392, 152064),
}
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
PROFILED = {  # GB of one A100 by length, from Qwen's README
    ("Qwen 1.8B", "LoRA"): (6.7, 7.4, 8.4, 11.0, 16.2, 21.8),
    ("Qwen 7B", "LoRA"): (20.1, 20.4, 21.5, 23.8, 29.7, 36.6),
    ("Qwen 14B", "LoRA"): (34.6, 35.1, 35.3, 37.4, 42.5, 55.2),
    ("Qwen 1.8B", "QLoRA"): (5.8, 6.0, 6.6, 7.8, 10.2, 15.8),
    ("Qwen 7B", "QLoRA"): (11.5, 11.5, 12.3, 13.9, 16.9, 23.5),
}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A published peak, and the settings that its page states."""

    project: str
    name: str
    source: str
    published: float  # bytes
    shape: Shape
    rows: int
    length: int
    weight: float = 2.0
    """Bytes of a weight of a linear layer; embedding and head are in 16 bits."""
    rank: int | None = None
    targets: list[str] | str = "all-linear"
    adapter: float = 2.0
    """Bytes of a number of the adapters, and of their gradients and moments."""
    checkpointed: bool = True
    offloaded: bool = False
    chunked: bool = False
    moments: float = 4.0
    """Bytes of both moments of a parameter on the GPU, if all are trained."""
    fused: bool = False
    """Whether the optimizer steps within the backward pass, so that one gradient is there at a time."""
    logits: float | None = None
    """Bytes of a logit with its log-probability and gradient, all at once; None: as the plan's head all at once."""
    context: bool = False
    why: str = ""
    """Why the plan is off by more than 15 %."""

    @property
    def planned(self) -> Bytes:
        """Return the bytes that the plan's formulas give."""
        shape, rows = self.shape, PassRows(rows=self.rows, prompts=self.rows, prompt=1, completion=self.length - 1)
        total = shape.linear * self.weight + (shape.parameters - shape.linear) * 2
        if self.rank is None:
            total += (shape.embedding if self.fused else shape.parameters) * 2 + shape.parameters * self.moments
        else:
            total += shape.adapters(self.rank, self.targets) * 4 * self.adapter
        total += 0 if self.offloaded else activations(shape, rows, BF16, checkpointed=self.checkpointed)
        computed_again = layer_activations(shape, rows, BF16) if self.checkpointed else 0
        total += max(self.head_size(rows), computed_again)  # a layer computes again after the head's backward pass
        return total + (LIBRARIES["cuda"] if self.context else 0)

    def head_size(self, rows: PassRows) -> Bytes:
        """Return the bytes of logits, log-probabilities and their gradients."""
        logits = head(self.shape, rows, BF16, trained=False)
        size = logits.kept + logits.backward
        if self.logits is not None:
            size = rows.chosen * self.shape.vocabulary * self.logits
        return size / (CHUNKS if self.chunked else 1)


def torchtune() -> list[Peak]:
    """Return the rows of torchtune's README: batch size 2, rows packed to 2,048 tokens (8B) or 4,096 (3B)."""
    large = {"project": "torchtune", "source": TORCHTUNE, "shape": LLAMA_8B, "rows": 2, "length": 2048, "chunked": True}
    small = {"project": "torchtune", "source": TORCHTUNE, "shape": LLAMA_3B, "rows": 2, "length": 4096}
    compiled = (
        "torch.compile recomputes what is between products and keeps fewer activations; the plan knows no compiler"
    )
    lora = {"rank": 8, "targets": TARGETS}
    rows: list[dict[str, Any]] = [
        large | {"name": "Llama 3.1 8B full, 4090", "published": 18.9, "moments": 0.0, "fused": True},
        large | {"name": "Llama 3.1 8B LoRA, 4090", "published": 16.2, **lora},
        large | {"name": "Llama 3.1 8B QLoRA, 4090", "published": 7.4, "weight": NF4, **lora},
        large | {"name": "Llama 3.1 8B LoRA, A6000", "published": 30.3, "checkpointed": False, "why": compiled, **lora},
        small | {"name": "Llama 3.2 3B packed", "published": 60.0, "checkpointed": False},
        small | {"name": "Llama 3.2 3B + compile", "published": 51.0, "checkpointed": False, "why": compiled},
        small
        | {
            "name": "Llama 3.2 3B + chunked loss",
            "published": 42.9,
            "checkpointed": False,
            "chunked": True,
            "why": compiled,
        },
        small | {"name": "Llama 3.2 3B + checkpointing", "published": 24.9, "chunked": True},
        small | {"name": "Llama 3.2 3B + fused step", "published": 23.1, "chunked": True, "fused": True},
        small
        | {
            "name": "Llama 3.2 3B + offloaded activations",
            "published": 21.8,
            "chunked": True,
            "fused": True,
            "offloaded": True,
        },
        small
        | {
            "name": "Llama 3.2 3B + 8-bit AdamW",
            "published": 17.6,
            "chunked": True,
            "fused": True,
            "offloaded": True,
            "moments": 2.0,
            "why": "in bitsandbytes embeddings have 32-bit moments; the README does not say what torchtune does",
        },
        small | {"name": "Llama 3.2 3B LoRA", "published": 8.5, "chunked": True, "offloaded": True, **lora, "rank": 64},
        small
        | {
            "name": "Llama 3.2 3B QLoRA",
            "published": 4.6,
            "chunked": True,
            "offloaded": True,
            "weight": NF4,
            **lora,
            "rank": 64,
        },
    ]
    return [Peak(**{**row, "published": row["published"] * GIB}) for row in rows]


def profiled() -> list[Peak]:
    """Return the rows of Qwen's README: transformers' Trainer and peft, rank 64, checkpointing, one row a pass."""
    peaks = []
    for (model, method), sizes in PROFILED.items():
        for length, size in zip(LENGTHS, sizes, strict=True):
            peaks.append(
                Peak(
                    project="transformers + peft (Qwen's README)",
                    name=f"{model} {method}, {length} tokens",
                    source=QWEN,
                    published=size * 1e9,
                    shape=QWENS[model],
                    rows=1,
                    length=length,
                    weight=2.0 if method == "LoRA" else GPTQ,
                    rank=64,
                    adapter=4.0,
                    logits=None if method == "LoRA" else 6.0,  # its script runs in fp16 without autocast
                    context=True,
                    why="the GPU's figure also has what the allocator keeps beside the tensors, and GPTQ's own copies",
                )
            )
    return peaks


def main() -> None:
    """Print the table and write the JSON file."""
    rows = []
    for peak in (*torchtune(), *profiled()):
        error = peak.planned / peak.published - 1
        rows.append(
            {
                "project": peak.project,
                "name": peak.name,
                "source": peak.source,
                "published_gb": peak.published / 1e9,
                "planned_gb": peak.planned / 1e9,
                "error": error,
                "why": peak.why if abs(error) > 0.15 else "",
            }
        )
        sys.stdout.write(f"{peak.name:44} {peak.published / 1e9:7.2f} {peak.planned / 1e9:7.2f} {error:+6.1%}\n")
    within = sum(abs(row["error"]) <= 0.15 for row in rows)
    sys.stdout.write(f"{within} of {len(rows)} within 15 %\n")
    RESULT.write_text(json.dumps({"within_15_percent": within, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

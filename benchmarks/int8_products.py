"""What 8-bit products would give the sampler on a CPU with VNNI: products and a decode step beside float32 and bfloat16.

    OMP_NUM_THREADS=1 python benchmarks/int8_products.py --model PATH

Weights have 8 bits with a scale for each output. A row of activations x is s (d1 + d2 / 254) with two 8-bit digits and
s = max |x| / 127, so that oneDNN's product of 8-bit integers runs once over twice the rows and only the weights are
rounded. Printed are milliseconds of processor time, the least of several runs in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rlhf.models.kernels.llama.families import Norm
from rlhf.sampling.fast.decoder import FusedDecoder, PackedLinear
from rlhf.sampling.fast.kv_cache import KVCache, prefill

RESULT = Path(__file__).resolve().parent / "results" / "int8_products.json"
SHAPES = {"576 to 1536": (576, 1536), "576 to 49152": (576, 49152), "4096 to 4096": (4096, 4096)}
LOW = {"float32": None, "bfloat16": torch.bfloat16}
PROMPT, COLUMNS = 32, 64


class Int8Product(PackedLinear):
    """Computes x W^T with W in 8 bits a weight and x in two digits of 8 bits."""

    def __init__(self, weights: Sequence[Tensor], *, rows: int) -> None:
        weight = torch.cat(list(weights)).float()
        self.scales = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        codes = (weight / self.scales[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(codes, [2 * rows, weight.shape[1]])
        self.zeros = torch.zeros(len(weight), dtype=torch.long)
        self.bias, self.packed, self.dtype = None, False, torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product in float32."""
        scale = x.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).mul_(1 / 127)
        scaled = x / scale
        high = scaled.round()
        digits = torch.cat([high, scaled.sub_(high).mul_(254).round_()]).add_(128).to(torch.uint8)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(digits, 1.0, 128, self.weight, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], "")
        )
        return product[: len(x)].add_(product[len(x) :], alpha=1 / 254).mul_(scale)


class Int8Decoder(FusedDecoder):
    """The sampler's decoder with such products."""

    def _product(
        self, parts: Sequence[tuple[Tensor, Tensor | None]], *, norm: Norm | None = None, scale: float = 1.0
    ) -> PackedLinear:
        columns = 1.0 if norm is None else norm.weight.detach()
        weights = [weight.float() * columns for weight, _ in parts]
        weights[0] = weights[0] * scale
        return Int8Product(weights, rows=self.rows)


def in_turn(runs: dict[str, Callable[[], object]], repeats: int, rounds: int) -> dict[str, float]:
    """Return the least milliseconds of processor time of each, of `rounds` rounds of `repeats` calls."""
    for run in runs.values():
        run()
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            for _ in range(repeats):
                run()
            least[name] = min(least[name], (time.process_time() - start) / repeats)
    return {name: round(1e3 * seconds, 3) for name, seconds in least.items()}


def products(rows: int, shape: tuple[int, int]) -> dict[str, Callable[[], object]]:
    """Return the product of `rows` rows with a random weight in each arithmetic."""
    weight, x = torch.randn(shape[1], shape[0]), torch.randn(rows, shape[0])
    kinds = {name: PackedLinear([weight], [None], rows=rows, low=low) for name, low in LOW.items()}
    kinds["int8"] = Int8Product([weight], rows=rows)
    error = (kinds["int8"](x) - functional.linear(x, weight)).norm() / functional.linear(x, weight).norm()
    assert error < 0.02, error  # a processor without VNNI may overflow
    return {name: (lambda kind=kind: kind(x)) for name, kind in kinds.items()}  # type: ignore[misc]


def steps(model: torch.nn.Module, rows: int) -> dict[str, Callable[[], object]]:
    """Return a decode step of `rows` rows in each arithmetic; each call decodes the same column anew."""
    ids = torch.randint(3, model.config.vocab_size, (rows, PROMPT))  # type: ignore[union-attr]
    mask = torch.ones_like(ids, dtype=torch.bool)
    _, layers = prefill(model, ids, mask)
    token, position = ids[:, 0].contiguous(), torch.full((rows,), PROMPT)

    def step_of(decoder: FusedDecoder) -> Callable[[], object]:
        slots = KVCache(rows, rows, PROMPT, COLUMNS, device=torch.device("cpu"), windows=False)
        slots.add_prompts(layers, mask)
        slots.add_rows(torch.arange(rows))
        slots.advance()
        return lambda: decoder.step(slots, token, position)

    size = {"rows": rows, "positions": PROMPT + COLUMNS}
    runs = {name: step_of(FusedDecoder(model, **size, low=low)) for name, low in LOW.items()}
    return {**runs, "int8": step_of(Int8Decoder(model, **size, low=None))}


@torch.no_grad()
def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for rows in options.rows:
        line = {name: in_turn(products(rows, shape), 5, 7) for name, shape in SHAPES.items()}
        line["step"] = in_turn(steps(model, rows), 3, 7)
        results[str(rows)] = line
        sys.stdout.write(f"{rows} rows: {json.dumps(line)}\n")
    RESULT.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

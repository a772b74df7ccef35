"""Measure 8-bit products for the sampler on a CPU with VNNI: products and decode steps in three arithmetics.

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.models.kernels.llama.families import Norm
from rlhf.sampling.fast.decoder import FusedDecoder, PackedLinear
from rlhf.sampling.fast.kv_cache import KVCache, prefill
from rlhf.sampling.service import round_to_int8

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
    """Return a decode step of `rows` rows in each arithmetic; each call decodes the same column again."""
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

    return {name: step_of(make()) for name, make in decoders(model, rows).items()}


def decoders(model: torch.nn.Module, rows: int) -> dict[str, Callable[[], FusedDecoder]]:
    """Return a factory of the decoder in each arithmetic; a rollout begins with a copy of its weights."""
    size = {"rows": rows, "positions": PROMPT + COLUMNS}
    makers = {name: partial(FusedDecoder, model, **size, low=low) for name, low in LOW.items()}
    return {**makers, "int8": partial(Int8Decoder, model, **size, low=None)}


ASKED = (
    "Write a short story about a fox.",
    "What is photosynthesis?",
    'Generate a JSON object with exactly these keys: "street" (string), "depth" (integer).',
    "Give three tips for learning a language.",
)
SCALES: dict[str, Callable[[Tensor], Tensor]] = {  # the numbers that share a scale of activations
    "weights and rows": lambda x: x.abs().amax(dim=-1, keepdim=True),
    "weights and whole products": lambda x: x.abs().max(),
}


def divergences(model: torch.nn.Module, tokenizer: Any) -> dict[str, float]:
    """Return the mean KL of a token to the exact model, in nats, if weights, or also activations, have 8 bits."""
    torch.manual_seed(0)
    texts = []
    for asked in ASKED:
        chat: Any = [{"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        start = ids["input_ids"]
        texts.append((model.generate(start, do_sample=True, top_k=0, max_new_tokens=64), start.shape[1]))  # type: ignore[operator]

    def log_probabilities() -> Tensor:
        return torch.cat([model(ids).logits[0, start - 1 : -1].double().log_softmax(dim=-1) for ids, start in texts])

    exact = log_probabilities()
    kls: dict[str, float] = {}

    def measure(name: str) -> None:
        kls[name] = round(float((exact.exp() * (exact - log_probabilities())).sum(dim=-1).mean()), 5)

    for weight in model.parameters():
        if weight.dim() == 2:
            weight.copy_(round_to_int8(weight))
    measure("weights")
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for name, scale_of in SCALES.items():

        def rounded(_: object, inputs: tuple[Tensor], of: Callable[[Tensor], Tensor] = scale_of) -> tuple[Tensor]:
            scale = of(inputs[0]) / 127
            return ((inputs[0] / scale).round() * scale,)

        hooks = [module.register_forward_pre_hook(rounded) for module in linears]
        measure(name)
        for hook in hooks:
            hook.remove()
    return kls


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
        line["copy of the weights"] = in_turn(dict(decoders(model, rows)), 1, 2)
        results[str(rows)] = line
        sys.stdout.write(f"{rows} rows: {json.dumps(line)}\n")
    kls = divergences(model, AutoTokenizer.from_pretrained(options.model))
    sys.stdout.write(f"KL to the exact model, nats a token: {json.dumps(kls)}\n")
    content = {"threads": torch.get_num_threads(), "rows": results, "kl": kls}
    RESULT.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

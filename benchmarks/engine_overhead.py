"""Measure the engine's overhead in one process: our optimizer step and the plain PyTorch loop on identical work.

    python benchmarks/engine_overhead.py [--millions 10] [--rows 8] [--tokens 64] [--rounds 30]

The same random Llama twice, the same batches, float32, AdamW, gradients clipped. A round is a step of each, in
alternating order, so that other load on the machine affects both. It checks that both end with the same weights.
Writes benchmarks/results/engine_overhead.json and prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from jaxtyping import Int  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from rlhf.algo.masked import Mean  # noqa: E402
from rlhf.batching import Batch  # noqa: E402
from rlhf.config.run import RunConfig  # noqa: E402
from rlhf.config.sections import OptimizerConfig  # noqa: E402
from rlhf.runtime.engine import make_engine  # noqa: E402
from rlhf.training.step import LossBatch, optimizer_step  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "engine_overhead.json"
OPTIMIZER = OptimizerConfig(lr=1e-4, max_grad_norm=1.0)
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Texts(Batch):
    """Rows of token ids."""

    ids: Int[Tensor, "B T"]


class NextToken:
    """Mean cross-entropy of the next token, as a rlhf.training.step.Loss."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def denominators(self, batch: Texts) -> dict[str, float]:
        """Return the number of predicted tokens."""
        return {"sft": float(batch.ids[:, 1:].numel())}

    def terms(self, micro: Texts) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the sum over a micro-batch."""
        losses = token_losses(self.model, micro.ids)
        return {"sft": losses.sum()}, {"loss/sft": Mean.of(losses)}


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Compute the cross-entropy of every token but the first."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def random_llama(millions: float) -> LlamaForCausalLM:
    """Build a random Llama of about this many million parameters in eight layers."""
    hidden = 64 * max(2, round((millions * 1e6 / (8 * 16)) ** 0.5 / 64))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).train()


def plain(model: nn.Module) -> Callable[[Tensor], float]:
    """Build a step in the way of a plain PyTorch tutorial."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.adam_eps,
        weight_decay=OPTIMIZER.weight_decay,
    )

    def step(ids: Tensor) -> float:
        loss = token_losses(model, ids).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def ours(model: nn.Module, rows: int) -> Callable[[Tensor], float]:
    """Build the step that every trainer of this project uses."""
    engine = make_engine(RunConfig(device="cpu"))
    trained = engine.train("policy", model, OPTIMIZER, terms=["sft"])
    loss = NextToken(model)

    def step(ids: Tensor) -> float:
        part = LossBatch(Texts(ids=ids), loss)
        return optimizer_step([part], [trained], micro_batch_size=rows, lr_factor=1.0, ranks=engine.ranks)["loss/total"]

    return step


def _measure(steps: dict[str, Callable[[Tensor], float]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the seconds of every step on the same batches, in alternating order; the losses must agree."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    generator = torch.Generator().manual_seed(0)
    for number in range(WARM_UP + options.rounds):
        ids = torch.randint(0, 2000, (options.rows, options.tokens), generator=generator)
        losses = {}
        for name in sorted(steps, reverse=number % 2 == 1):
            began = time.perf_counter()
            losses[name] = steps[name](ids)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
        assert abs(losses["plain"] - losses["ours"]) < 1e-4, losses
    return seconds


def main() -> None:
    """Measure both steps, check that they agree, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=10)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {"plain": random_llama(options.millions), "ours": random_llama(options.millions)}
    steps = {"plain": plain(models["plain"]), "ours": ours(models["ours"], options.rows)}
    seconds = _measure(steps, options)
    pairs = zip(models["plain"].parameters(), models["ours"].parameters(), strict=True)
    gap = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert gap < 1e-4, f"the two loops differ by {gap}: they did different work"
    ratios = [b / a for a, b in zip(seconds["plain"], seconds["ours"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    result = {
        "about": {"python": platform.python_version(), "torch": version("torch"), "threads": 1, **vars(options)},
        "parameters": sum(p.numel() for p in models["ours"].parameters()),
        "largest_weight_difference": gap,
        "seconds": seconds,
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "overhead_of_medians": statistics.median(seconds["ours"]) / statistics.median(seconds["plain"]) - 1,
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [low, high],
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    medians = result["median_s"]
    assert isinstance(medians, dict)
    sys.stdout.write(
        "| parameters | plain PyTorch | ours | overhead (of the medians) | ours/plain by round: median (quartiles) |\n"
        "|---|---|---|---|---|\n"
        f"| {result['parameters'] / 1e6:.1f} M | {medians['plain'] * 1e3:.1f} ms | {medians['ours'] * 1e3:.1f} ms | "
        f"{result['overhead_of_medians']:+.1%} | {result['ratio_median']:.3f} ({low:.3f} to {high:.3f}) |\n"
    )


if __name__ == "__main__":
    main()

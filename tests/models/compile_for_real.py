"""Compile layers by torch, outside pytest, whose checks of shapes torch.compile cannot read; print what came out."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runs import largest_difference, make_model, online, ppo_tree, trained, weights
from tiny_models import EOS, completions_of, tiny

from rlhf.config.sections import LoraConfig
from rlhf.models.backbone import add_lora, body_of
from rlhf.models.kernels.llama.compiled import compile_layers, compiled, count_graphs
from rlhf.models.kernels.llama.forward import _FUNCTIONS
from rlhf.models.logprobs import completion_outputs
from rlhf.training.online import train

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # of the RMS of log-probabilities and of each gradient


def numbers(model: Any, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
    """Log-probabilities of rows of this length, and the gradients of all weights; not of biases."""
    completion = [*(3 + place % 7 for place in range(length)), EOS]
    batch = completions_of([[5, 6, 7 + row] for row in range(4)], [completion] * 4)
    model.zero_grad()
    fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logprobs = completion_outputs(model, *fields, temperature=1.0).logprobs
    logprobs.exp().sum().backward()
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return [logprobs.detach(), *(grad.clone() for name, grad in named if not name.endswith("bias"))]


def compare(family: str, dtype: torch.dtype, *, adapted: bool = False) -> dict[str, Any]:
    """Compile a tiny model and compare it with itself before, at three lengths."""
    model = tiny(family, dtype=torch.float32)
    if adapted:
        model = add_lora(model, LoraConfig(r=3, alpha=5))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.3)
    lengths = (12, 19, 30)
    before = [numbers(model, dtype, length) for length in lengths]
    graphs = count_graphs()
    reason = compile_layers(body_of(model), dtype)
    tried = count_graphs()
    after = [numbers(model, dtype, length) for length in lengths]
    errors = [
        float((a - b).square().mean().sqrt() / b.square().mean().sqrt())
        for ours, right in zip(after, before, strict=True)
        for a, b in zip(ours, right, strict=True)
        if float(b.abs().max()) > 0
    ]
    return {
        "case": [family, str(dtype), adapted],
        "reason": reason,
        "graphs": tried - graphs,
        "graphs_for_other_lengths": count_graphs() - tried,
        "error": max(errors),
        "limit": LIMITS[dtype],
    }


def resume(folder: Path) -> dict[str, Any]:
    """Compile a PPO run, and one that is killed in step 3 and continued: how far their weights are apart."""
    make_model(folder / "a" / "model")
    shutil.copytree(folder / "a", folder / "b")
    trees = [ppo_tree(folder / name, policy={"compile": True}) for name in ("a", "b")]
    whole, broken = trained(trees[0]), online(trees[1])
    draw = broken.sampler.sample

    def sample(*given: Any, **options: Any) -> Any:
        if broken.session.state.step == 3:
            raise KeyboardInterrupt
        return draw(*given, **options)

    broken.sampler.sample = sample  # type: ignore[method-assign]
    with suppress(KeyboardInterrupt):
        train(broken)
    broken.session.recorder.close()
    resumed = trained(trees[1])
    pairs = zip(resumed.models.bodies, whole.models.bodies, strict=True)
    return {
        "compiled": all(_FUNCTIONS.get(body) is compiled() for run in (whole, resumed) for body in run.models.bodies),
        "continued_at": broken.session.state.step,
        "difference": max(largest_difference(weights(ours), weights(right)) for ours, right in pairs),
    }


def main() -> None:
    """Print the comparisons and the resumed run as JSON."""
    cases = [
        compare("llama", torch.float32),
        compare("qwen3", torch.bfloat16),
        compare("llama", torch.float32, adapted=True),
    ]
    sys.stdout.write(json.dumps({"cases": cases, "resumed": resume(Path(sys.argv[1]))}) + "\n")


if __name__ == "__main__":
    main()

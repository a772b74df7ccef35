"""Measure what rounding to bfloat16 takes from a fine-tuned model: its loss on demonstrations, with and without dither.

    rlhf train configs/real/detox_sft.yaml run.out_dir=runs/wide policy.dtype=float32 data.sft.limit=800
    python benchmarks/bf16_dither.py runs/wide models/smollm2-135m-instruct --data data/paradetox/sft.jsonl

The change of a run in float32 is added to its start, as it is and dithered, and the sum is rounded to bfloat16. The
last way rounds the run's own weights, as they are loaded for arithmetic in bfloat16. Arithmetic is in float32, so that
nothing else differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.backbone import load_causal_lm
from rlhf.models.dither import dither
from rlhf.models.folders import model_folder

LOADED = "loaded for bfloat16, then rounded"


def main() -> None:
    """Print the mean loss of the completions' tokens, in nats, for each way to round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("start")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs=2, default=(800, 1056))
    args = parser.parse_args()
    lines = args.data.read_text(encoding="utf-8").splitlines()[slice(*args.rows)]
    rows = [json.loads(line) for line in lines]
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "float32": lambda w, start: w,
        "rounded to bfloat16": lambda w, start: rounded(w),
        "dithered, then rounded": lambda w, start: rounded(dither(start.flatten()).view_as(start) + w - start),
        LOADED: lambda w, start: rounded(w),
    }
    tokenizer = load_tokenizer(model_folder(args.run))
    start, losses = dict(load_causal_lm(args.start).named_parameters()), {}
    for name, way in ways.items():
        model = load_causal_lm(model_folder(args.run), dtype="bfloat16" if name == LOADED else "float32")
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.copy_(way(parameter, start[key]))
        losses[name] = mean_loss(model, tokenizer, rows)
    sys.stdout.write(json.dumps(losses, indent=1) + "\n")


def rounded(weight: Tensor) -> Tensor:
    """Round to the nearest number of bfloat16."""
    return weight.to(torch.bfloat16).float()


@torch.no_grad()
def mean_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]) -> float:
    """Compute the mean loss of all tokens of the completions, the end of turn included."""
    total, count = 0.0, 0
    for row in rows:
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": row["prompt"]}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
        count += len(answer)
    return total / count


if __name__ == "__main__":
    main()

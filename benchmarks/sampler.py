"""Compare the fast sampler with transformers' generate, on random weights, by alternating runs in one process.

    python benchmarks/sampler.py --size tiny --rounds 7
    python benchmarks/sampler.py --size small --rounds 3 --json benchmarks/results/sampler.json

`generate` is transformers' own sampling (do_sample, the whole distribution), `hf` our plain sampler on top of it,
`model` the fast sampler through the model's own modules, `fast` the fast sampler as it is. Every round runs each of
them once; printed is the median over the rounds of generate's time divided by theirs, with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import transformers
from peers.work import SHAPES, llama_config
from transformers import GenerationConfig, LlamaForCausalLM

from rlhf.config.sections import SamplingConfig
from rlhf.sampling.fast.engine import FastSampler
from rlhf.sampling.generate import HFSampler
from rlhf.types import Prompts

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PROMPTS, GROUP, NEW = 8, 8, 64
SHORTEST, LONGEST = 16, 64  # tokens of a prompt


def model_of(size: str) -> LlamaForCausalLM:
    """Build a model with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(size)).eval()


def prompts_of(vocabulary: int) -> Prompts:
    """Draw left-padded prompts of 16 to 64 random tokens."""
    torch.manual_seed(1)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (PROMPTS,))
    lengths[0] = LONGEST
    return Prompts(
        prompt_ids=torch.randint(3, vocabulary, (PROMPTS, LONGEST)),
        prompt_mask=torch.arange(LONGEST) >= LONGEST - lengths[:, None],
        row_ids=torch.arange(PROMPTS),
        references=tuple({} for _ in range(PROMPTS)),
    )


def eos_of(lengths: str, vocabulary: int) -> tuple[int, ...]:
    """Return the EOS tokens: for "fixed" one that cannot be drawn, for "eos" every 40th token.

    With "eos" the lengths of completions vary from 1 to the limit.
    """
    return (vocabulary,) if lengths == "fixed" else tuple(range(0, vocabulary, 40))


def contenders(
    model: LlamaForCausalLM, prompts: Prompts, eos: tuple[int, ...], dtype: str, slots: int
) -> dict[str, Callable[[int], int]]:
    """Build the samplers to time, by name: each takes a seed and returns the number of sampled tokens."""
    config = SamplingConfig(max_new_tokens=NEW, batch_size=slots)
    cpu = torch.device("cpu")
    common = {"eos_ids": eos, "pad_id": 0, "dtype": dtype, "device": cpu}
    repeated = prompts.rows(torch.arange(PROMPTS).repeat_interleave(GROUP))
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=NEW, eos_token_id=list(eos), pad_token_id=0, use_cache=True
    )

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            output = model.generate(
                input_ids=repeated.prompt_ids,
                attention_mask=repeated.prompt_mask.long(),
                generation_config=settings,
            )
        return int(output[:, LONGEST:].numel())

    def ours(sampler: HFSampler | FastSampler) -> Callable[[int], int]:
        def run(seed: int) -> int:
            return int(sampler.sample(prompts, key=seed, group_size=GROUP).completion_mask.sum())

        return run

    return {
        "generate": generate,
        "hf": ours(HFSampler(model, config, **common)),
        "model": ours(FastSampler(model, config, **common, lean=False)),
        "fast": ours(FastSampler(model, config, **common)),
    }


def measure(
    runs: dict[str, Callable[[int], int]], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Time all samplers in turn and compute the ratio of the first one's seconds to each one's."""
    for run in runs.values():
        run(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1, rounds + 1):
        for name, run in runs.items():
            start = clock()
            run(number)
            seconds[name].append(clock() - start)
    first = next(iter(runs))
    results = {}
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(seconds[first], times, strict=True)]
        results[name] = {
            "seconds": statistics.median(times),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    return results


def main() -> None:
    """Measure, print the results and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", choices=["fixed", "eos", "both"], default="both")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--slots", type=int, default=PROMPTS * GROUP, help="rows decoded together")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: one thread on a shared machine")
    parser.add_argument("--without", nargs="*", default=[], help="leave these out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = model_of(options.size)
    vocabulary = model.config.vocab_size
    report = {
        "size": options.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": options.dtype,
        "slots": options.slots,
        "threads": options.threads,
        "clock": options.clock,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "results": {},
    }
    for lengths in ["fixed", "eos"] if options.lengths == "both" else [options.lengths]:
        runs = contenders(model, prompts_of(vocabulary), eos_of(lengths, vocabulary), options.dtype, options.slots)
        kept = {name: run for name, run in runs.items() if name not in options.without}
        results = measure(kept, options.rounds, CLOCKS[options.clock])
        report["results"][lengths] = results
        for name, values in results.items():
            sys.stdout.write(
                f"{options.size} {lengths:5} {name:9} {values['seconds']:8.3f} s   "
                f"x{values['ratio']:.2f} ({values['least']:.2f} to {values['most']:.2f})\n"
            )
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Decode on a GPU by recorded steps and by transformers' generate:   python benchmarks/recorded_decoding.py [--json F]

Random weights in the GQA shapes of Qwen2.5 0.5B and 1.5B, bfloat16. A random model draws all tokens about equally
often: so many of them end a row that lengths vary like real completions'. The first rollout, which records steps,
and the later ones, which replay them, are timed apart, each with the device synchronized. With --pretend
everything runs at toy size on the pretend GPU of tests/gpu, which counts waits and says nothing of time.
--backends vllm times vLLM, if it is installed, on the same weights, prompts and ending tokens; benchmarks/gpu.py
gives it a process of its own, because vLLM takes the memory that it finds free.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlhf.config.sections import SamplingConfig
from rlhf.sampling.fast.engine import FastSampler
from rlhf.sampling.generate import HFSampler
from rlhf.types import Prompts

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("recorded", "generate", "vllm")
GROUP = 8  # completions of a prompt
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "toy": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def model_of(shape: str, device: str) -> Any:
    """Make a Qwen2 of this shape with random weights; its keys have two heads."""
    vocabulary = 97 if shape == "toy" else 151936
    config = Qwen2Config(**SHAPES[shape], num_key_value_heads=2, vocab_size=vocabulary, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cpu" if shape == "toy" else device):
        model = Qwen2ForCausalLM(config)
    return model.eval().to(device)


def ending_tokens(vocabulary: int, longest: int) -> tuple[int, ...]:
    """Choose as many ending tokens as make rows of nearly uniform draws 60 % of the longest on average."""
    count = max(1, round(vocabulary / (0.6 * longest)))
    return tuple(range(vocabulary - count, vocabulary))


def rollouts(model: Any, device: str, backend: str, rows: int, prompt: int, length: int, rounds: int) -> dict[str, Any]:
    """Time rollouts of one sampler; the first one of it also tries it out and records."""
    kind = HFSampler if backend == "generate" else FastSampler
    sampler = kind(
        model,
        SamplingConfig(max_new_tokens=length, batch_size=rows),
        eos_ids=ending_tokens(model.config.vocab_size, length),
        pad_id=0,
        dtype="bfloat16",
        device=torch.device(device),
    )
    ids = prompt_ids(rows, prompt)
    groups = len(ids)
    prompts = Prompts(
        prompt_ids=ids,
        prompt_mask=torch.ones_like(ids, dtype=torch.bool),
        row_ids=torch.arange(groups),
        references=tuple({} for _ in range(groups)),
    )

    def sample(number: int) -> int:
        torch.cuda.synchronize()
        completions = sampler.sample(prompts, key=number, group_size=min(GROUP, rows))
        torch.cuda.synchronize()
        return int(completions.completion_mask.sum())

    measured = timed(sample, rounds)
    return {"way": getattr(sampler, "uses", "generate"), **measured}


def vllm_rollouts(model: Any, rows: int, prompt: int, length: int, rounds: int) -> dict[str, Any]:
    """Time rollouts of vLLM; the first one includes compiling and capturing on demand."""
    vllm = importlib.import_module("vllm")
    vocabulary = model.config.vocab_size
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        model.to("cpu", torch.bfloat16).save_pretrained(folder)  # off the card, whose memory vLLM takes
        torch.cuda.empty_cache()
        engine = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=prompt + length)
        prompts = [{"prompt_token_ids": row} for row in prompt_ids(rows, prompt).tolist()]

        def sample(number: int) -> int:
            params = vllm.SamplingParams(
                n=min(GROUP, rows),
                temperature=1.0,
                max_tokens=length,
                seed=number,
                stop_token_ids=list(ending_tokens(vocabulary, length)),
                detokenize=False,
            )
            requests = engine.generate(prompts, params, use_tqdm=False)
            return sum(len(completion.token_ids) for request in requests for completion in request.outputs)

        return {"way": f"vllm {vllm.__version__}", **timed(sample, rounds)}


def prompt_ids(rows: int, prompt: int) -> torch.Tensor:
    """Draw the prompts: a group of completions is sampled of each."""
    return torch.randint(3, 90, (max(1, rows // GROUP), prompt), generator=torch.Generator().manual_seed(0))


def timed(sample: Callable[[int], int], rounds: int) -> dict[str, Any]:
    """Time rollouts that return how many tokens they sampled: the first, and the median of the others."""
    seconds, tokens = [], 0
    for number in range(rounds):
        start = time.perf_counter()
        tokens = sample(number)
        seconds.append(time.perf_counter() - start)
    later = sorted(seconds[1:] or seconds)
    median = later[len(later) // 2]
    return {"first_s": seconds[0], "later_s": median, "tokens": tokens, "tokens_per_s": tokens / median}


def main() -> None:
    """Time the ways, print the results and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS[:2])
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine: Any = nullcontext()
    shape, rows, prompt, length = options.shape, options.rows, 64, 256
    if options.pretend:
        sys.path.insert(0, str(ROOT / "tests" / "gpu"))
        PretendDevice = importlib.import_module("pretend").PretendDevice
        machine, shape, rows, prompt, length = PretendDevice(), "toy", 16, 6, 12
    results: dict[str, Any] = {"shape": shape, "rows": rows, "prompt": prompt, "length": length}
    with machine as counts:
        model = model_of(shape, "cuda")
        rounds = 2 if options.pretend else 4
        for backend in options.backends:
            if backend == "vllm":
                results[backend] = vllm_rollouts(model, rows, prompt, length, rounds)
            else:
                results[backend] = rollouts(model, "cuda", backend, rows, prompt, length, rounds)
        if counts is not None:
            results["pretend"] = {"waits": sum(counts.waits.values()), "problems": counts.problems}
    if {"generate", "recorded"} <= results.keys():
        results["ratio"] = results["generate"]["later_s"] / results["recorded"]["later_s"]
    sys.stdout.write(json.dumps(results) + "\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

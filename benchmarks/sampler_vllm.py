"""Sample with the sampler in the process and with others, in turn, at 1, 16 and 64 rows.

The others are vLLM, `rlhf serve-policy` (--own-url), and transformers' generate, plain and with continuous batching
(--continuous, which is slow on a CPU).

    OMP_NUM_THREADS=1 vllm serve MODEL --served-model-name policy --port 8001 --dtype float32 --enforce-eager
    OMP_NUM_THREADS=1 rlhf serve-policy MODEL --port 8002
    OMP_NUM_THREADS=1 python benchmarks/sampler_vllm.py --url http://127.0.0.1:8001 --model MODEL
        [--own-url http://127.0.0.1:8002] [--continuous]

Every row has another prompt of 32 random tokens and gets 32 new tokens at temperature 1; nothing stops earlier. Every
round runs each sampler once; printed are tokens per second of all rows together, the median of the rounds, and the
median ratio of the sampler in the process to the fastest of the others that are not ours. Other numbers of rows stay in
the file. A server's time has the HTTP request in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from rlhf.config.sections import SamplingConfig
from rlhf.sampling.fast.engine import FastSampler
from rlhf.types import Prompts

RESULT = Path(__file__).resolve().parent / "results" / "sampler_vllm.json"
PROMPT, NEW = 32, 32
OURS = ("in process", "our server")
Run = Callable[[int], int]


def samplers(model: LlamaForCausalLM, urls: dict[str, str], rows: int, *, with_continuous: bool) -> dict[str, Run]:
    """Return the samplers by name: each takes a seed and returns the number of tokens that it drew."""
    torch.manual_seed(rows)
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (rows, PROMPT))
    mask = torch.ones_like(ids, dtype=torch.bool)
    prompts = Prompts(
        prompt_ids=ids, prompt_mask=mask, row_ids=torch.arange(rows), references=tuple({} for _ in range(rows))
    )
    config = SamplingConfig(max_new_tokens=NEW, batch_size=rows)
    never = (vocabulary,)  # a token that cannot be drawn
    fast = FastSampler(model, config, eos_ids=never, pad_id=0, dtype="float32", device=torch.device("cpu"))
    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW, eos_token_id=never[0], pad_token_id=0)

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        return int(output[:, PROMPT:].numel())

    def in_process(seed: int) -> int:
        return int(fast.sample(prompts, key=seed, group_size=1).completion_mask.sum())

    def continuous(seed: int) -> int:
        torch.manual_seed(seed)
        limits = ContinuousBatchingConfig(num_blocks=2 * rows, max_batch_tokens=2 * rows * (PROMPT + NEW))
        outputs = model.generate_batch(
            ids.tolist(), generation_config=settings, continuous_batching_config=limits, persistent_manager=True
        )
        return sum(len(output.generated_tokens) for output in outputs.values())

    def ask(url: str, seed: int) -> int:
        body = {"model": "policy", "prompt": ids.tolist(), "max_tokens": NEW, "temperature": 1.0, "ignore_eos": True}
        body |= {"seed": seed, "logprobs": 0}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            return sum(len(choice["logprobs"]["tokens"]) for choice in json.load(answer)["choices"])

    servers = {name: partial(ask, url) for name, url in urls.items()}
    batching = {"continuous batching": continuous} if with_continuous else {}
    return {OURS[0]: in_process, **servers, "generate": generate, **batching}


def measure(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Time all samplers in turn; return their tokens per second, and the ratio of ours to the best of the others."""
    for run in runs.values():
        run(0)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1, rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens = run(number)
            rates[name].append(tokens / (time.perf_counter() - start))
    others = [name for name in rates if name not in OURS]
    ratios = [own / max(rates[name][k] for name in others) for k, own in enumerate(rates[OURS[0]])]
    medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 2), "rounds": rounds}


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--url", required=True, help="of vLLM")
    parser.add_argument("--own-url", help="of rlhf serve-policy")
    parser.add_argument("--continuous", action="store_true", help="measure transformers' continuous batching too")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    results = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.is_file() else {}
    for rows in options.rows:
        urls = {"vllm": options.url} | ({OURS[1]: options.own_url} if options.own_url else {})
        runs = samplers(model, urls, rows, with_continuous=options.continuous)
        results[str(rows)] = measure(runs, options.rounds)
        sys.stdout.write(f"{rows} rows: {json.dumps(results[str(rows)])}\n")
        sys.stdout.flush()
    content = {"threads": torch.get_num_threads(), "load": os.getloadavg(), "rows": results}
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

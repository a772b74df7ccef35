"""Train SmolLM2 on completions of a real vLLM: mismatch of log-probabilities, seconds a push, the canary's findings.

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=FOLDER vllm serve MODEL --served-model-name policy --port 8001 --dtype float32 \\
      --enforce-eager --max-model-len 1024 --logprobs-mode processed_logprobs \\
      --worker-extension-cls policy_extension.Extension
    python benchmarks/real_vllm.py --url http://127.0.0.1:8001 --model MODEL

FOLDER has `policy_extension.py` of docs/vllm.md. Three runs, one after another: `nocure` (GRPO without resync_head: the
canary has to stop it), `grpo`, `ppo`. A run whose folder is there already is only read, complete or not. Prompts are a
line each, completions 8 tokens, four a step, the reward a function: the figures do not depend on them.

Written are, for each run, the steps, the largest mean |sampler - trainer| of a step in nats (not less than the mean of
log sampler - log trainer, which estimates KL(sampler || trainer) of a token), the largest difference that the canary
saw, the seconds of pushes (the check by the canary among them), and the error that stopped the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "real_vllm.json"
PROMPTS = 100
CURE = "sampling.server.after_reload=[resync_head]"
GRPO = ("algorithm.preset=grpo", "batch.prompts_per_step=1", "sampling.completions_per_prompt=4")
PPO = ("batch.prompts_per_step=4", "sampling.completions_per_prompt=1", "algorithm.advantage.whiten=false")
RUNS = {"nocure": (3, GRPO), "grpo": (20, (*GRPO, CURE)), "ppo": (20, (*PPO, CURE))}
COMMON = (
    f"reward.source={{type: function, target: '{Path(__file__).resolve()}:score'}}",
    "data.eval_prompts=null",
    "data.system=null",
    "data.chat_template=none",
    "policy.dtype=float32",
    "sampling.backend=server",
    "sampling.server.type=vllm",
    "sampling.old_log_probs=trainer",  # else the sampler's are taken if it is the policy
    "sampling.temperature=1.0",
    "sampling.max_new_tokens=8",
    "algorithm.kl.coef=0",
    "batch.minibatches=1",
    "batch.micro_batch_size=8",
    "schedule.warmup_steps=0",
    "schedule.decay=constant",
    "checkpoint.every=0",
    "logging.samples=0",
)


def score(completions: list[str]) -> list[float]:
    """Score a text by its share of vowels, so that completions differ and every step changes the weights."""
    return [sum(character in "aeiou" for character in text) / max(1, len(text)) for text in completions]


def write_prompts(file: Path) -> None:
    """Write short prompts that ask for JSON."""
    rows = [{"prompt": f"JSON with the key k{number}:"} for number in range(PROMPTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train(folder: Path, steps: int, changes: tuple[str, ...], options: argparse.Namespace) -> str:
    """Run the trainer once and return its output."""
    given = [
        f"data.prompts.path={options.runs / 'prompts.jsonl'}",
        f"policy.model={options.model}",
        f"run.out_dir={folder}",
    ]
    given += [f"sampling.server.urls=[{options.url}]", f"schedule.steps={steps}"]
    command = [sys.executable, "-m", "rlhf", "train", str(ROOT / "configs/real/json_ppo.yaml"), *COMMON, *given]
    done = subprocess.run(
        [*command, *changes], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    (folder.parent / f"{folder.name}.log").write_text(done.stdout, encoding="utf-8")
    return done.stdout


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file; none if it is not there."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def summary(folder: Path, printed: str) -> dict[str, Any]:
    """Return the figures of a run."""
    metrics, timings = rows_of(folder / "metrics.jsonl"), rows_of(folder / "timings.jsonl")
    pushes = [row["seconds"]["push"] for row in timings]
    return {
        "steps": len(metrics),
        "largest_mismatch": max((row["kl/sampler_mismatch"] for row in metrics), default=None),
        "largest_canary": max((row["server/canary"] for row in metrics), default=None),
        "steps_pushed": sum(row["server/pushed_mb"] > 0 for row in metrics),
        "pushed_mb": max((row["server/pushed_mb"] for row in metrics), default=None),
        "push_seconds": {"median": statistics.median(pushes), "least": min(pushes), "most": max(pushes)}
        if pushes
        else None,
        "error": next((line for line in printed.splitlines() if line.startswith("error")), None),
    }


def main() -> None:
    """Run the missing parts, print the figures and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/real_vllm"))
    parser.add_argument("--only", nargs="*", choices=sorted(RUNS), default=list(RUNS))
    parser.add_argument("--vllm", default="0.32.0", help="its version, for the record")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    write_prompts(options.runs / "prompts.jsonl")
    results = {}
    for name in options.only:
        folder, log = options.runs / name, options.runs / f"{name}.log"
        steps, changes = RUNS[name]
        if not folder.is_dir():
            train(folder, steps, changes, options)
        results[name] = summary(folder, log.read_text(encoding="utf-8") if log.is_file() else "")
        sys.stdout.write(f"{name} {json.dumps(results[name])}\n")
    about = {"vllm": options.vllm, "torch": version("torch"), "transformers": version("transformers")}
    about |= {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()}
    options.json.write_text(json.dumps({"about": about, "runs": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

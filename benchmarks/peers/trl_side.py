"""The peer's side of side_by_side.py:   PEER_PYTHON benchmarks/peers/trl_side.py JOB.json   prints one line of JSON.

Runs in an environment with trl and without rlhf. PPO needs trl 1.12.0, the last release that has it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from peers.work import LR, Job, score

COMMON = {
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "eval_strategy": "no",
    "disable_tqdm": True,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "dataloader_drop_last": True,
    "seed": 0,
}


class Marks(TrainerCallback):
    """When each step ended."""

    def __init__(self, device: str) -> None:
        self.device, self.times = device, []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """See TrainerCallback."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


@contextlib.contextmanager
def generation_timed() -> Iterator[list[float]]:
    """The seconds of every call of generate."""
    from transformers.generation.utils import GenerationMixin

    spent: list[float] = []
    plain = GenerationMixin.generate

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = plain(self, *args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
        return found

    GenerationMixin.generate = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        GenerationMixin.generate = plain  # type: ignore[method-assign]


def trainer_of(job: Job, out: str) -> Any:
    """The trainer, its data and models as job says."""
    folder, sizes = Path(job.folder), job.sizes
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    precision = {"bf16": job.dtype == "bfloat16", "fp16": False, "use_cpu": job.device == "cpu"}
    common = {**COMMON, **precision, "output_dir": out}

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)

    def judge() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype=torch.float32)

    def rows(name: str) -> Any:
        return load_dataset("json", data_files=str(folder / f"{name}.jsonl"), split="train")

    offline = {**common, "max_steps": job.steps, "per_device_train_batch_size": sizes.rows, "max_length": 256}
    if job.trainer == "sft":
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(model(), args=SFTConfig(**offline), train_dataset=rows("sft"), processing_class=tokenizer)
    if job.trainer == "reward":
        from trl import RewardConfig, RewardTrainer

        return RewardTrainer(
            judge(), args=RewardConfig(**offline), train_dataset=rows("pairs"), processing_class=tokenizer
        )
    if job.trainer.startswith("dpo"):
        from trl import DPOConfig, DPOTrainer

        args = DPOConfig(**offline, precompute_ref_log_probs=job.trainer == "dpo_cached")
        return DPOTrainer(model(), args=args, train_dataset=rows("pairs"), processing_class=tokenizer)
    if job.trainer in ("grpo", "rloo"):
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

        groups = {
            **common,
            "max_steps": job.steps,
            "per_device_train_batch_size": sizes.prompts * sizes.group,
            "num_generations": sizes.group,
            "max_completion_length": sizes.new_tokens,
            "temperature": 1.0,
        }
        if job.trainer == "grpo":
            return GRPOTrainer(
                model(),
                score,
                args=GRPOConfig(**groups, beta=0.0),
                train_dataset=rows("prompts"),
                processing_class=tokenizer,
            )
        return RLOOTrainer(
            model(),
            score,
            args=RLOOConfig(**groups, beta=0.05),
            train_dataset=rows("prompts"),
            processing_class=tokenizer,
        )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    data = rows("prompts").map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]})
    args = PPOConfig(
        **common,
        per_device_train_batch_size=sizes.ppo_prompts,  # of a rollout
        gradient_accumulation_steps=1,
        num_mini_batches=sizes.ppo_minibatches,
        num_ppo_epochs=sizes.ppo_epochs,
        total_episodes=job.steps * sizes.ppo_prompts,
        response_length=sizes.new_tokens,
        local_rollout_forward_batch_size=64,
        num_sample_generations=0,
        temperature=1.0,
    )
    return PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=model(),
        ref_model=model(),
        reward_model=judge(),
        value_model=judge(),
        train_dataset=data.select_columns(["input_ids"]),
    )


def main() -> None:
    """One job."""
    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory(prefix="trl-bench-") as out, contextlib.redirect_stdout(sys.stderr):
        trainer = trainer_of(job, out)
        marks = Marks(job.device)
        trainer.add_callback(marks)
        began = time.perf_counter()
        with generation_timed() as spent:
            trainer.train()
    steps = [b - a for a, b in itertools.pairwise(marks.times)]
    calls = max(1, len(spent) // max(1, job.steps))
    per_step = [sum(spent[start : start + calls]) for start in range(calls, len(spent), calls)]
    found = {
        "steps": steps,
        "phases": [{"sample": seconds} for seconds in per_step],
        "tokens": [],
        "before": marks.times[0] - began,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if job.device == "cuda":
        found["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 2**20
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

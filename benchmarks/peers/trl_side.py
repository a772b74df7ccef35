"""The peer's side of side_by_side.py:   PEER_PYTHON benchmarks/peers/trl_side.py JOB.json   prints one line of JSON.

Runs in an environment with trl and without rlhf. PPO needs trl 1.12.0, the last release that has it.

Job.peer chooses TRL's settings. The number of rows in an optimizer step is always the job's.

    defaults  its defaults as they are: activations are recomputed (gradient checkpointing), 8 rows in a pass
    memory    with its memory flags: activations are recomputed, 16 rows in a pass, no padding in SFT
    fastest   activations are kept, all rows of an optimizer step in one pass

PPO takes the rows of a minibatch in one pass in all three, because its optimizer would step once per epoch otherwise,
and its loop ignores gradient checkpointing unless the models are told directly, as in "memory". Rows and minibatches
come in the order of the files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from peers.work import LR, MICRO_BATCH, ONLINE, PEER_BATCH, Job, Workload, score, start_adapters

COMMON = {
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "eval_strategy": "no",
    "disable_tqdm": True,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "dataloader_drop_last": True,
    "seed": 0,
}


class Marks(TrainerCallback):
    """When each step ended."""

    def __init__(self, job: Job) -> None:
        self.job, self.times = job, []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """See TrainerCallback."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(self.job.now())


class Generation:
    """Times every call of generate and counts its tokens; the first step's completions give way to written ones."""

    def __init__(self, job: Job, eos_id: int) -> None:
        self.job, self.eos_id = job, eos_id
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        written = Path(job.folder) / "replay.json"
        rows = json.loads(written.read_text(encoding="utf-8")) if job.replay else []
        self.replay: list[list[int]] = rows[: job.sizes.completions(job.trainer)]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch transformers' generate inside."""
        from transformers.generation.utils import GenerationMixin

        plain = GenerationMixin.generate

        def timed(model: Any, *args: Any, **kwargs: Any) -> Any:
            began = self.job.now()
            output = plain(model, *args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.append(self.job.now() - began)
            output = self._replayed(model, output, kwargs) if self.replay else output
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            self.tokens.append(self._count(sequences[:, kwargs["input_ids"].shape[1] :]))
            return output

        GenerationMixin.generate = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            GenerationMixin.generate = plain  # type: ignore[method-assign]

    def _count(self, completions: torch.Tensor) -> int:
        ended = (completions == self.eos_id).cumsum(dim=1)
        return int((ended - (completions == self.eos_id).long() == 0).sum())

    @torch.no_grad()
    def _replayed(self, model: Any, output: Any, inputs: dict[str, Any]) -> Any:
        prompts, mask = inputs["input_ids"], inputs["attention_mask"]
        rows, self.replay = self.replay[: len(prompts)], self.replay[len(prompts) :]
        sequences = torch.cat([prompts, torch.tensor(rows, device=prompts.device)], dim=1)
        if isinstance(output, torch.Tensor):
            return sequences
        # PPO reads the log-probabilities of its samples from the scores of the sampling.
        mask = torch.cat([mask, torch.ones_like(sequences[:, prompts.shape[1] :])], dim=1).long()
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = [
            model(input_ids=ids, attention_mask=live, position_ids=at, use_cache=False).logits[
                :, prompts.shape[1] - 1 : -1
            ]
            for ids, live, at in zip(sequences.split(8), mask.split(8), places.split(8), strict=True)
        ]
        output.sequences, output.scores = sequences, torch.cat(logits).float().unbind(dim=1)
        return output


def watch_first_update(trainer: Any, passes: int) -> dict[str, float]:
    """Watch the loss and gradient norm of the first optimizer step, of so many passes; filled while it trains."""
    first: dict[str, float] = {}
    plain, calls = trainer.accelerator.backward, itertools.count(1)

    def watched(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        plain(loss, *args, **kwargs)
        call = next(calls)
        if call > passes:
            return
        first["loss"] = first.get("loss", 0.0) + float(loss.detach())
        if call == passes:
            norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
            first["gradient"] = float(torch.stack(norms).norm())

    trainer.accelerator.backward = watched
    return first


def passes_of(job: Job) -> int:
    """Count the passes of an optimizer step."""
    if (
        job.peer == "fastest" or job.trainer == "ppo"
    ):  # its PPO would count several passes as one optimizer step an epoch
        return 1
    rows = job.sizes.completions(job.trainer) if job.trainer in ONLINE else job.sizes.rows
    return max(1, rows // (PEER_BATCH if job.peer == "defaults" else MICRO_BATCH))


def checkpointing(job: Job) -> dict[str, bool]:
    """Return the setting of gradient checkpointing; empty if TRL's default stays."""
    return {} if job.peer == "defaults" else {"gradient_checkpointing": job.peer == "memory"}


def adapters(job: Job, task: str = "CAUSAL_LM") -> dict[str, Any]:
    """Return the adapters as TRL takes them; nothing if all weights are trained."""
    if job.lora is None:
        return {}
    from peft import LoraConfig

    settings = LoraConfig(r=job.lora, lora_alpha=2 * job.lora, target_modules="all-linear", task_type=task)
    return {"peft_config": settings}


def trainer_of(job: Job, out: str) -> Any:
    """Build the trainer with its data and models by the settings of `job`."""
    folder, sizes, passes = Path(job.folder), job.sizes, passes_of(job)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    tokenizer.pad_token = Workload.read(folder).peer_pad or tokenizer.pad_token
    common = {
        **COMMON,
        "bf16": job.dtype == "bfloat16",
        "fp16": False,
        "use_cpu": job.device == "cpu",
        "output_dir": out,
        **checkpointing(job),
        "gradient_accumulation_steps": passes,
    }

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)

    def judge() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype=torch.float32)

    def rows(name: str) -> Any:
        return load_dataset("json", data_files=str(folder / f"{name}.jsonl"), split="train")

    offline = {
        **common,
        "max_steps": job.steps,
        "per_device_train_batch_size": sizes.rows // passes,
        "max_length": 1024,
        "train_sampling_strategy": "sequential",
    }
    if job.trainer == "sft":
        from trl import SFTConfig, SFTTrainer

        flags = {"padding_free": True, "max_length": None} if job.peer == "memory" else {}
        args = SFTConfig(**{**offline, **flags})
        return SFTTrainer(model(), args=args, train_dataset=rows("sft"), processing_class=tokenizer, **adapters(job))
    if job.trainer == "reward":
        from trl import RewardConfig, RewardTrainer

        return RewardTrainer(
            judge(),
            args=RewardConfig(**offline),
            train_dataset=rows("pairs"),
            processing_class=tokenizer,
            **adapters(job, "SEQ_CLS"),
        )
    if job.trainer.startswith("dpo"):
        from trl import DPOConfig, DPOTrainer

        args = DPOConfig(**offline, precompute_ref_log_probs=job.trainer == "dpo_cached")
        return DPOTrainer(model(), args=args, train_dataset=rows("pairs"), processing_class=tokenizer, **adapters(job))
    if job.trainer in ("grpo", "rloo"):
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

        groups = {
            **common,
            "max_steps": job.steps,
            "per_device_train_batch_size": sizes.prompts * sizes.group // passes,
            "num_generations": sizes.group,
            "max_completion_length": sizes.new_tokens,
            "temperature": 1.0,
            "shuffle_dataset": False,
        }
        if job.trainer == "grpo":
            args = GRPOConfig(**groups, beta=0.0, loss_type="grpo", scale_rewards="none")
            return GRPOTrainer(
                model(), score, args=args, train_dataset=rows("prompts"), processing_class=tokenizer, **adapters(job)
            )
        return RLOOTrainer(
            model(),
            score,
            args=RLOOConfig(**groups, beta=0.05),
            train_dataset=rows("prompts"),
            processing_class=tokenizer,
        )
    return ppo_trainer(job, common, tokenizer, model, judge, rows("prompts"))


def ppo_trainer(job: Job, common: dict[str, Any], tokenizer: Any, model: Any, judge: Any, prompts: Any) -> Any:
    """Build the PPO trainer, which trl has up to 1.12.0."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    sizes = job.sizes
    data = prompts.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]})
    args = PPOConfig(
        **common,
        per_device_train_batch_size=sizes.ppo_prompts,  # of a rollout
        num_mini_batches=sizes.ppo_minibatches,
        num_ppo_epochs=sizes.ppo_epochs,
        total_episodes=job.steps * sizes.ppo_prompts,
        response_length=sizes.new_tokens,
        stop_token="eos",
        local_rollout_forward_batch_size=16 if job.peer == "memory" else 64,
        num_sample_generations=0,
        temperature=1.0,
    )
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=model(),
        ref_model=model(),
        reward_model=judge(),
        value_model=judge(),
        train_dataset=data.select_columns(["input_ids"]),
    )
    in_order = DataLoader(
        trainer.train_dataset, batch_size=sizes.ppo_prompts, collate_fn=trainer.data_collator, drop_last=True
    )
    trainer.dataloader = trainer.accelerator.prepare(in_order)
    np.random.permutation = np.arange  # the order of its minibatches
    if job.peer == "memory":  # its own loop does not look at gradient_checkpointing
        for part in (trainer.policy_model, trainer.value_model):
            part.gradient_checkpointing_enable({"use_reentrant": False})
    return trainer


def main() -> None:
    """Run one job."""
    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory(prefix="trl-bench-") as out, contextlib.redirect_stdout(sys.stderr):
        trainer = trainer_of(job, out)
        marks = Marks(job)
        start_adapters(trainer.model)
        trainer.add_callback(marks)
        first = watch_first_update(trainer, passes_of(job))
        generation = Generation(job, trainer.processing_class.eos_token_id)
        began = job.now()
        with generation.watched():
            trainer.train()
    calls = max(1, len(generation.seconds) // max(1, job.steps))
    starts = range(calls, len(generation.seconds), calls)
    result = {
        "steps": [b - a for a, b in itertools.pairwise(marks.times)],
        "phases": [{"sample": sum(generation.seconds[start : start + calls])} for start in starts],
        "tokens": [],
        "generated": [sum(generation.tokens[start : start + calls]) for start in starts],
        "first": first,
        "before": marks.times[0] - began,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if job.device == "cuda":
        result["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 2**20
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

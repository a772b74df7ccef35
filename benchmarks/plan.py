"""Compare what `rlhf plan` says of a run with the peak memory of that run: each in a process of its own, on a CPU.

    python benchmarks/plan.py [--only NAME ...] [--out FILE]

A model of random weights and rows of full length are written to a temporary folder, and `rlhf train` or `rlhf reward`
runs in a fresh process. Counted is by how much resident memory (VmHWM of /proc/self/status) rose above what the process
had once all libraries were imported; the phases are those of timings.jsonl. Linux only. The cases in FITTED
were looked at while the formulas were written; those in CASES were not, and only they count.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HEAP = ROOT / "benchmarks" / "heap.c"
RESULT = ROOT / "benchmarks" / "results" / "plan.json"
MB = 2**20
TOKENS = 1024  # of the tokenizer


@dataclass(frozen=True)
class Model:
    """A Llama of random weights."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    groups: int
    vocabulary: int
    dtype: str = "float32"  # of the file
    tied: bool = True


@dataclass(frozen=True)
class Case:
    """A run to plan and to measure."""

    name: str
    algorithm: str
    model: Model
    settings: Mapping[str, Any] = field(default_factory=dict)
    prompt: int = 32
    length: int = 64  # of completions; of rows of SFT and pairs, prompt included
    reward_model: Model | None = None


SMALL = Model(256, 6, 1024, 8, 4, 4096)
MEDIUM = Model(512, 8, 1408, 8, 2, 8192)
WIDE = Model(768, 4, 2048, 12, 12, 16384, dtype="bfloat16")
DEEP = Model(320, 16, 864, 10, 5, 6144, tied=False)
NARROW = Model(384, 10, 1024, 6, 3, 12288, dtype="bfloat16")
BROAD = Model(640, 6, 1728, 10, 2, 20480, tied=False)
BIG_HEAD = Model(256, 4, 704, 4, 4, 32768, dtype="bfloat16")

FITTED = (
    Case("sft medium", "sft", MEDIUM, {"batch.micro_batch_size": 8}, length=128),
    Case("sft medium bf16", "sft", MEDIUM, {"batch.micro_batch_size": 8, "policy.dtype": "bfloat16"}, length=128),
    Case("sft wide lora", "sft", WIDE, {"policy.lora.r": 16, "batch.micro_batch_size": 8}, length=192),
    Case("grpo medium", "grpo", MEDIUM, {"batch.micro_batch_size": 16}),
    Case("ppo medium", "ppo", MEDIUM, {"batch.micro_batch_size": 16}),
    Case("ppo deep", "ppo", DEEP, {"batch.micro_batch_size": 32}),
    Case("dpo medium", "dpo", MEDIUM, {"batch.micro_batch_size": 8}, length=128),
    Case("reward model wide", "reward", WIDE, {"batch.micro_batch_size": 8}, length=128),
    Case("sft medium checkpointed", "sft", MEDIUM, {"policy.gradient_checkpointing": True}, length=256),
)
"""Runs that were looked at while the formulas were written."""

BF16 = {"policy.dtype": "bfloat16"}
LORA = {"policy.lora.r": 8}
CASES = (
    Case("sft narrow", "sft", NARROW, {"batch.micro_batch_size": 16}, length=96),
    Case("sft broad", "sft", BROAD, {"batch.micro_batch_size": 4}, length=256),
    Case("sft big head", "sft", BIG_HEAD, {"batch.micro_batch_size": 8}, length=160),
    Case("sft deep bf16", "sft", DEEP, {"batch.micro_batch_size": 8, **BF16}, length=320),
    Case("sft narrow lora", "sft", NARROW, {"batch.micro_batch_size": 16, **LORA}, length=128),
    Case("sft broad lora bf16", "sft", BROAD, {"batch.micro_batch_size": 8, **LORA, **BF16}, length=192),
    Case("sft deep checkpointed", "sft", DEEP, {"policy.gradient_checkpointing": True}, length=192),
    Case("sft broad sgd", "sft", BROAD, {"policy.optimizer": "sgd", "batch.micro_batch_size": 8}, length=128),
    Case("sft broad 8-bit moments", "sft", BROAD, {"policy.optimizer": "adamw_8bit"}, length=64),
    Case("dpo narrow", "dpo", NARROW, {"batch.micro_batch_size": 8}, length=160),
    Case("dpo broad lora", "dpo", BROAD, {"batch.micro_batch_size": 4, **LORA}, length=192),
    Case("dpo deep bf16", "dpo", DEEP, {"batch.micro_batch_size": 4, **BF16}, length=192),
    Case("orpo wide", "orpo", WIDE, {"batch.micro_batch_size": 4}, length=128),
    Case("simpo narrow lora bf16", "simpo", NARROW, {"batch.micro_batch_size": 8, **LORA, **BF16}, length=128),
    Case("kto narrow", "kto", NARROW, {"batch.micro_batch_size": 8}, length=128),
    Case("reward model narrow", "reward", NARROW, {"batch.micro_batch_size": 8}, length=160),
    Case("reward model broad bf16", "reward", BROAD, {"batch.micro_batch_size": 4, "model.dtype": "bfloat16"}, length=192),
    Case("reward model deep", "reward", DEEP, {"batch.micro_batch_size": 8}, length=96),
    Case("grpo narrow", "grpo", NARROW, {"batch.micro_batch_size": 16}, length=48),
    Case("grpo broad lora", "grpo", BROAD, {"batch.micro_batch_size": 8, **LORA}, prompt=64, length=48),
    Case("grpo wide bf16", "grpo", WIDE, {"batch.micro_batch_size": 16, **BF16}, prompt=24, length=48),
    Case("grpo deep without reference", "grpo", DEEP, {"reference.measure": False, "algorithm.kl.coef": 0.0}, length=40),
    Case("rloo narrow", "rloo", NARROW, {"batch.micro_batch_size": 32}, prompt=16, length=64),
    Case("ppo narrow", "ppo", NARROW, {"batch.micro_batch_size": 16}, length=48),
    Case("ppo broad lora", "ppo", BROAD, {"batch.micro_batch_size": 8, **LORA}, length=40),
    Case("ppo narrow bf16", "ppo", NARROW, {"batch.micro_batch_size": 16, **BF16}, prompt=48, length=40),
    Case("ppo wide shared", "ppo", WIDE, {"critic.shared": True, "batch.micro_batch_size": 16}, length=48),
    Case("ppo medium reward model", "ppo", MEDIUM, {"critic.init": "policy"}, length=40, reward_model=NARROW),
)
"""Runs that were not looked at while the formulas were written."""


def tree(case: Case, folder: Path) -> dict[str, Any]:
    """Return the settings of a case, by dotted key."""
    section = "model" if case.algorithm == "reward" else "policy"
    flat: dict[str, Any] = {
        "run.out_dir": str(folder / "run"),
        "run.device": "cpu",
        "run.cache_dir": str(folder / "cache"),
        f"{section}.model": str(folder / "model"),
        f"{section}.lr": 1e-5,
        "data.chat_template": "none",
        "schedule.steps": 2,
        "checkpoint.every": 0,
        "eval.every": 0,
        "guard.on_alarm": "ignore",
    }
    if case.algorithm == "reward":
        flat |= {"schedule.epochs": None, "data.preferences.path": str(folder / "pairs.jsonl")}
        flat |= {"data.preferences.max_tokens": case.length, "data.preferences.too_long": "truncate"}
        flat |= {"batch.prompts_per_step": 16}
    elif case.algorithm == "sft":
        flat |= {"data.sft.path": str(folder / "texts.jsonl"), "data.sft.max_tokens": case.length}
        flat |= {"data.sft.too_long": "truncate", "data.sft.learn": "all", "algorithm.preset": "sft"}
        flat |= {"batch.prompts_per_step": 16}
    elif case.algorithm in PREFERENCES:
        flat |= {"data.preferences.path": str(folder / "pairs.jsonl"), "data.preferences.max_tokens": case.length}
        flat |= {"data.preferences.too_long": "truncate", "algorithm.preset": case.algorithm}
        flat |= {"batch.prompts_per_step": 16}
    else:
        flat |= {"data.prompts.path": str(folder / "prompts.jsonl"), "data.prompts.first_tokens": case.prompt}
        flat |= {"data.prompts.max_prompt_tokens": case.prompt, "sampling.max_new_tokens": case.length}
        flat |= {"algorithm.preset": case.algorithm, "batch.prompts_per_step": 16, "sampling.completions_per_prompt": 4}
        if case.reward_model is None:
            flat |= {"reward.source.type": "function", "reward.source.target": f"{folder / 'reward.py'}:score"}
        else:
            flat |= {"reward.source.type": "model", "reward.source.path": str(folder / "reward")}
    return flat | dict(case.settings)


def words(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as `key=value`."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None or key == "schedule.epochs"]


PREFERENCES = ("dpo", "orpo", "kto", "simpo", "reward")
REWARD = """import zlib


def score(completions):
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]
"""


def prepare(case: Case, folder: Path) -> None:
    """Write models, tokenizer and rows."""
    import random

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from rlhf.lab.model import train_tokenizer

    draw = random.Random(0)
    vocabulary = ["".join(draw.choice("abcdefghijklmnoprstuw") for _ in range(draw.randint(2, 8))) for _ in range(3000)]

    def text(words: int) -> str:
        return " ".join(draw.choice(vocabulary) for _ in range(words))

    tokenizer = train_tokenizer([text(40) for _ in range(200)], TOKENS)
    tokenizer.model_max_length = 4096
    for name, model, kind in (
        ("model", case.model, LlamaForCausalLM),
        ("reward", case.reward_model, LlamaForSequenceClassification),
    ):
        if model is None:
            continue
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=model.vocabulary,
            hidden_size=model.hidden,
            intermediate_size=model.intermediate,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.groups,
            max_position_embeddings=4096,
            tie_word_embeddings=model.tied,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            num_labels=1,
        )
        kind(config).to(getattr(torch, model.dtype)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    long = 2 * case.length + 2 * case.prompt
    rows = {
        "texts": [{"text": text(long)} for _ in range(96)],
        "prompts": [{"prompt": text(long)} for _ in range(96)],
        "pairs": [
            {"prompt": text(long), "chosen": text(case.length // 8), "rejected": text(case.length // 8)} for _ in range(96)
        ],
    }
    lengths = {"prompt": case.prompt, "completion": case.length}
    if case.algorithm == "sft":
        lengths = {"prompt": 1, "completion": case.length - 1}
    elif case.algorithm in PREFERENCES:  # EOS included
        sides = [len(tokenizer(row[side]).input_ids) + 1 for row in rows["pairs"] for side in ("chosen", "rejected")]
        lengths = {"completion": round(sum(sides) / len(sides))}
        lengths["prompt"] = case.length - lengths["completion"]
    (folder / "lengths.json").write_text(json.dumps(lengths), encoding="utf-8")
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content), encoding="utf-8")


def resident_mb(key: str) -> float:
    """Return VmRSS or VmHWM (its peak) of this process, in MB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(f"{key}:"))


def work(verb: str, arguments: list[str], out: Path) -> None:
    """Run in this process and write the memory that it allocated: at its peak, and at the peak of each phase."""
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from rich.console import Console

    from rlhf.api import training
    from rlhf.config.files import parse_overrides
    from rlhf.config.load import reward_model_config, train_config
    from rlhf.runtime import memory

    heap = ctypes.CDLL(os.environ["LD_PRELOAD"])
    heap.heap_live.restype = heap.heap_peak.restype = ctypes.c_long
    torch.set_num_threads(1)
    config = (reward_model_config if verb == "reward" else train_config)(parse_overrides(arguments))
    before, resident = heap.heap_live(), resident_mb("VmRSS")
    memory._peak_resident_mb = lambda: (heap.heap_peak() - before) / MB  # what timings.jsonl has of each phase
    memory._reset_peak_resident = heap.heap_reset
    built: dict[str, float] = {}

    def watched(build: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            heap.heap_reset()
            made = build(*arguments, **options)
            built.update(load=(heap.heap_peak() - before) / MB, loaded=(heap.heap_live() - before) / MB)
            return made

        return run

    name = "build_reward_model" if verb == "reward" else "build_run"
    setattr(training, name, watched(getattr(training, name)))
    (training.run_reward_model if verb == "reward" else training.run_train)(config, Console(quiet=True))
    rows = [json.loads(line) for line in (Path(config.run.out_dir) / "timings.jsonl").read_text().splitlines()]
    phases = dict(built)
    for row in rows:
        for phase, mb in row["peak_memory_mb_by_phase"].items():
            phases[phase] = max(phases.get(phase, 0.0), mb)
    measured = {
        "allocated_mb": max(phases.values()),
        "resident_mb": resident_mb("VmHWM") - resident,
        "libraries_mb": resident,
        "phases_mb": phases,
        "seconds": [row["seconds"] for row in rows],
    }
    out.write_text(json.dumps(measured), encoding="utf-8")


def measure(case: Case) -> dict[str, Any]:
    """Measure a case in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="rlhf-plan-") as name:
        folder = Path(name)
        prepare(case, folder)
        verb = "reward" if case.algorithm == "reward" else "train"
        arguments = words(tree(case, folder))
        preload = folder / "heap.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(preload), str(HEAP)], check=True)
        environment = {"LD_PRELOAD": str(preload), **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, "--worker", verb, str(folder / "out.json"), *arguments]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        lengths = json.loads((folder / "lengths.json").read_text(encoding="utf-8"))
        row: dict[str, Any] = {"lengths": lengths} | json.loads((folder / "out.json").read_text(encoding="utf-8"))
        return row


def main() -> None:
    """Measure the cases and print them beside the plan."""
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[4:], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for case in (*FITTED, *CASES):
        if options.only and case.name not in options.only:
            continue
        row = {"name": case.name} | measure(case)
        rows.append(row)
        shown = {key: round(value) for key, value in row["phases_mb"].items()}
        sys.stdout.write(f"{case.name:26} {row['allocated_mb']:7.0f} {row['resident_mb']:7.0f} {shown}\n")
        sys.stdout.flush()
        options.out.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()

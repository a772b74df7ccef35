"""Compare the estimate of `rlhf plan` with the peak memory of the run: each in a process of its own, on a CPU.

    python benchmarks/plan.py [--only NAME ...] [--out FILE]

A model of random weights and rows of full length are written to a temporary folder, and two steps are run in a process
of their own, forked from one that has the libraries imported. `allocated` counts bytes of the process that are not yet
freed, at its peak (benchmarks/heap.c, compiled by cc), like torch on a GPU. `resident` is the rise of VmHWM;
it holds freed memory that the allocator keeps besides (run.keep_memory). Linux with glibc only. The cases in FITTED
were looked at while the formulas were written; those in CASES were not, and only they count.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import peft  # noqa: E402, F401  # before the memory is counted
import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification  # noqa: E402

from rlhf.api import training  # noqa: E402
from rlhf.config.files import parse_overrides  # noqa: E402
from rlhf.config.load import reward_model_config, train_config  # noqa: E402
from rlhf.config.sections import RewardModelConfig, RunConfiguration  # noqa: E402
from rlhf.lab.model import train_tokenizer  # noqa: E402
from rlhf.planning.layout import Lengths  # noqa: E402
from rlhf.planning.plan import Machine, make_plan  # noqa: E402
from rlhf.process import silence_libraries  # noqa: E402
from rlhf.runtime import memory  # noqa: E402

HEAP = ROOT / "benchmarks" / "heap.c"
RESULT = ROOT / "benchmarks" / "results" / "plan.json"
MB = 2**20
TOKENS = 1024  # of the tokenizer
EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


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
NARROW = Model(320, 6, 864, 5, 5, 8192, dtype="bfloat16")
BROAD = Model(512, 3, 1376, 8, 2, 12288, tied=False)
BIG_HEAD = Model(256, 3, 704, 4, 4, 24576, dtype="bfloat16")
LONG = Model(256, 12, 688, 8, 4, 4096, tied=False)

BF16 = {"policy.dtype": "bfloat16"}
LORA = {"policy.lora.r": 8}
NF4 = {"policy.weights": "nf4", **LORA}

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
    Case("sft big head nf4", "sft", BIG_HEAD, {"batch.micro_batch_size": 4, **NF4}, length=96),
    Case("dpo narrow nf4", "dpo", NARROW, {"batch.micro_batch_size": 4, **NF4}, length=96),
    Case("grpo big head nf4", "grpo", BIG_HEAD, {"batch.micro_batch_size": 8, **NF4}, length=32),
    Case("grpo narrow", "grpo", NARROW, {"batch.micro_batch_size": 8}, length=48),
    Case("grpo broad lora", "grpo", BROAD, {"batch.micro_batch_size": 8, **LORA}, prompt=64, length=48),
    Case("sft broad 8-bit moments", "sft", BROAD, {"policy.optimizer": "adamw_8bit"}, length=64),
)
"""Runs that were looked at while the formulas were written."""

CASES = (
    Case("sft narrow", "sft", NARROW, {"batch.micro_batch_size": 8}, length=96),
    Case("sft broad", "sft", BROAD, {"batch.micro_batch_size": 4}, length=256),
    Case("sft big head", "sft", BIG_HEAD, {"batch.micro_batch_size": 8}, length=160),
    Case("sft deep bf16", "sft", LONG, {"batch.micro_batch_size": 8, **BF16}, length=288),
    Case("sft narrow lora", "sft", NARROW, {"batch.micro_batch_size": 8, **LORA}, length=128),
    Case("sft broad lora bf16", "sft", BROAD, {"batch.micro_batch_size": 8, **LORA, **BF16}, length=192),
    Case("sft deep checkpointed", "sft", LONG, {"policy.gradient_checkpointing": True}, length=192),
    Case("sft big head checkpointed", "sft", BIG_HEAD, {"policy.gradient_checkpointing": True, **LORA}, length=160),
    Case("sft broad sgd", "sft", BROAD, {"policy.optimizer": "sgd", "batch.micro_batch_size": 8}, length=128),
    Case("dpo narrow", "dpo", NARROW, {"batch.micro_batch_size": 8}, length=160),
    Case("dpo broad lora", "dpo", BROAD, {"batch.micro_batch_size": 4, **LORA}, length=192),
    Case("dpo deep bf16", "dpo", LONG, {"batch.micro_batch_size": 4, **BF16}, length=192),
    Case("dpo wide 8-bit moments", "dpo", MEDIUM, {"policy.optimizer": "adamw_8bit"}, length=32),
    Case("orpo wide", "orpo", BIG_HEAD, {"batch.micro_batch_size": 4}, length=128),
    Case("simpo narrow lora bf16", "simpo", NARROW, {"batch.micro_batch_size": 8, **LORA, **BF16}, length=128),
    Case("kto narrow", "kto", NARROW, {"batch.micro_batch_size": 8}, length=128),
    Case("reward model narrow", "reward", NARROW, {"batch.micro_batch_size": 8}, length=160),
    Case(
        "reward model broad bf16", "reward", BROAD, {"batch.micro_batch_size": 4, "model.dtype": "bfloat16"}, length=192
    ),
    Case("reward model deep", "reward", LONG, {"batch.micro_batch_size": 8}, length=96),
    Case("grpo wide bf16", "grpo", BIG_HEAD, {"batch.micro_batch_size": 8, **BF16}, prompt=24, length=48),
    Case(
        "grpo deep without reference", "grpo", LONG, {"reference.measure": False, "algorithm.kl.coef": 0.0}, length=40
    ),
    Case("rloo narrow", "rloo", NARROW, {"batch.micro_batch_size": 16}, prompt=16, length=64),
    Case("ppo narrow", "ppo", NARROW, {"batch.micro_batch_size": 8}, length=48),
    Case("ppo broad lora", "ppo", BROAD, {"batch.micro_batch_size": 8, **LORA}, length=40),
    Case("ppo narrow bf16", "ppo", NARROW, {"batch.micro_batch_size": 8, **BF16}, prompt=48, length=40),
    Case("ppo wide shared", "ppo", BIG_HEAD, {"critic.shared": True, "batch.micro_batch_size": 8}, length=48),
    Case(
        "grpo big head nf4 without a copy",
        "grpo",
        BIG_HEAD,
        {"batch.micro_batch_size": 8, "sampling.copy_weights": False, **NF4},
        length=16,
    ),
    Case(
        "ppo broad nf4",
        "ppo",
        BROAD,
        {"batch.micro_batch_size": 8, "critic.init": "policy", "critic.lora.r": 8, "critic.weights": "nf4", **NF4},
        length=32,
    ),
    Case("ppo narrow reward model", "ppo", NARROW, {"critic.init": "policy"}, length=40, reward_model=NARROW),
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
        flat |= {"batch.prompts_per_step": 8}
    elif case.algorithm == "sft":
        flat |= {"data.sft.path": str(folder / "texts.jsonl"), "data.sft.max_tokens": case.length}
        flat |= {"data.sft.too_long": "truncate", "data.sft.learn": "all", "algorithm.preset": "sft"}
        flat |= {"batch.prompts_per_step": 8}
    elif case.algorithm in PREFERENCES:
        flat |= {"data.preferences.path": str(folder / "pairs.jsonl"), "data.preferences.max_tokens": case.length}
        flat |= {"data.preferences.too_long": "truncate", "algorithm.preset": case.algorithm}
        flat |= {"batch.prompts_per_step": 8}
    else:
        flat |= {"data.prompts.path": str(folder / "prompts.jsonl"), "data.prompts.first_tokens": case.prompt}
        flat |= {"data.prompts.max_prompt_tokens": case.prompt, "sampling.max_new_tokens": case.length}
        flat |= {"algorithm.preset": case.algorithm, "batch.prompts_per_step": 8, "sampling.completions_per_prompt": 4}
        if case.reward_model is None:
            flat |= {"reward.source.type": "function", "reward.source.target": f"{folder / 'reward.py'}:score"}
        else:
            flat |= {"reward.source.type": "model", "reward.source.path": str(folder / "reward")}
    return flat | dict(case.settings)


def words(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as `key=value`."""
    return [
        f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None or key == "schedule.epochs"
    ]


PREFERENCES = ("dpo", "orpo", "kto", "simpo", "reward")
REWARD = """import zlib


def score(completions):
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]
"""


def prepare(case: Case, folder: Path) -> None:
    """Write models, tokenizer and rows."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choice("abcdefghijklmnoprstuw") for _ in range(draw.randint(2, 8))) for _ in range(3000)]

    def text(words: int) -> str:
        return " ".join(draw.choice(vocabulary) for _ in range(words))

    tokenizer = train_tokenizer([text(40) for _ in range(60)], TOKENS)
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
        "texts": [{"text": text(long)} for _ in range(32)],
        "prompts": [{"prompt": text(long)} for _ in range(32)],
        "pairs": [
            {"prompt": text(long), "chosen": text(case.length // 8), "rejected": text(case.length // 8)}
            for _ in range(32)
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


def work(config: RunConfiguration, once_built: Callable[[], object]) -> dict[str, Any]:
    """Run in this process and return the memory that it allocated: at its peak, and at the peak of each phase."""
    heap = ctypes.CDLL(os.environ["LD_PRELOAD"])
    heap.heap_live.restype = heap.heap_peak.restype = ctypes.c_long
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is from now on
    before, resident = heap.heap_live(), resident_mb("VmRSS")
    memory._peak_resident_mb = lambda: (heap.heap_peak() - before) / MB  # timings.jsonl has it for each phase
    memory._reset_peak_resident = heap.heap_reset
    built: dict[str, float] = {}

    def watched(build: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            heap.heap_reset()
            made = build(*arguments, **options)
            built.update(load=(heap.heap_peak() - before) / MB, loaded=(heap.heap_live() - before) / MB)
            once_built()
            return made

        return run

    is_reward_model = isinstance(config, RewardModelConfig)
    name = "build_reward_model" if is_reward_model else "build_run"
    setattr(training, name, watched(getattr(training, name)))
    run: Callable[..., object] = training.run_reward_model if is_reward_model else training.run_train
    run(config)
    rows = [json.loads(line) for line in (Path(config.run.out_dir) / "timings.jsonl").read_text().splitlines()]
    phases = dict(built)
    for row in rows:
        for phase, mb in row["peak_memory_mb_by_phase"].items():
            phases[phase] = max(phases.get(phase, 0.0), mb)
    return {
        "allocated_mb": max(phases.values()),
        "resident_mb": resident_mb("VmHWM") - resident,
        "libraries_mb": resident,
        "phases_mb": phases,
    }


def in_child(call: Callable[[], object]) -> Any:
    """Run a function in a child of this process, and return its result, by JSON."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                json.dump(call(), out)
                out.flush()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1] != 0:
            raise RuntimeError("the run failed")
        out.seek(0)
        return json.load(out)


def compare(
    config: RunConfiguration, lengths: Lengths, once_built: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Plan a run, and measure it in a process of its own; `once_built` is called there before its first step."""
    plan = make_plan(config, Machine(device="cpu"), lengths)
    planned = {
        "planned_mb": plan.peak / MB,
        "planned_phase": plan.memory.peak_phase,
        "planned_phases_mb": {phase: plan.memory.of(phase) / MB for phase in plan.memory.phases},
    }
    measured: dict[str, Any] = in_child(lambda: work(config, once_built))
    return planned | measured | {"error": planned["planned_mb"] / measured["allocated_mb"] - 1}


def measure(case: Case) -> dict[str, Any]:
    """Plan a case, and measure it."""
    with tempfile.TemporaryDirectory(prefix="rlhf-plan-") as name:
        folder = Path(name)
        in_child(lambda: prepare(case, folder))
        lengths = json.loads((folder / "lengths.json").read_text(encoding="utf-8"))
        make_config = reward_model_config if case.algorithm == "reward" else train_config
        config = make_config(parse_overrides(words(tree(case, folder))))
        return {"name": case.name, "lengths": lengths} | compare(config, Lengths(**lengths))


def preloaded(folder: Path) -> dict[str, str]:
    """Compile the counter, and return the environment of a process that it counts."""
    library = folder / "heap.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(HEAP)], check=True)
    counted = {"LD_PRELOAD": str(library), "MKL_DISABLE_FAST_MM": "1"}  # MKL then keeps no buffers
    return {**os.environ, **counted, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def about() -> dict[str, str]:
    """Return the versions, the day and the CPU with the extensions that products depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    read = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    known = [name for name in EXTENSIONS if name in read.get("flags", "").split()]
    versions = {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()}
    return {"cpu": f"{read.get('model name')} with {', '.join(known)}", "date": str(date.today())} | versions


def run_counted() -> None:
    """Run this program again under the counter, unless it runs there already."""
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="rlhf-heap-") as name:
            done = subprocess.run([sys.executable, *sys.argv], env=preloaded(Path(name)), check=False)
        sys.exit(done.returncode)
    torch.set_num_threads(1)
    silence_libraries()


def main() -> None:
    """Measure the cases, print them beside the plan, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    run_counted()
    rows: dict[str, list[dict[str, Any]]] = {"fitted": [], "validated": []}
    for kind, cases in zip(rows, (FITTED, CASES), strict=True):
        for case in cases:
            if options.only and case.name not in options.only:
                continue
            row = measure(case)
            rows[kind].append(row)
            sys.stdout.write(
                f"{kind:10} {case.name:30} planned {row['planned_mb']:6.0f} allocated {row['allocated_mb']:6.0f} "
                f"{row['error']:+6.1%}  resident {row['resident_mb']:6.0f}\n"
            )
            sys.stdout.flush()
            options.out.write_text(json.dumps({"about": about(), **rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

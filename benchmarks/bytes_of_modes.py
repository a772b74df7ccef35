"""Compare the bytes of a run's weights, adapters and moments with the formula of `rlhf plan`, in each mode.

    python benchmarks/bytes_of_modes.py models/smollm2-135m-instruct

Five trainers times six modes: all weights in float32 or bfloat16, and adapters of rank 16 over `auto`, bfloat16, int8
and nf4. Each run takes one step in a child of its own. Then every storage of its models and optimizers is counted once.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import peft  # noqa: E402, F401
import torch  # noqa: E402
from plan import in_child  # noqa: E402

from rlhf.api.training import run_reward_model, run_train  # noqa: E402
from rlhf.config.load import reward_model_config, train_config  # noqa: E402
from rlhf.planning.plan import Machine, make_plan  # noqa: E402
from rlhf.process import silence_libraries  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "bytes_of_modes.json"
TRAINERS = ("sft", "reward model", "dpo", "grpo", "ppo")
LORA = {"lora": {"r": 16}}
MODES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full bfloat16": {"weights": "bfloat16"},
    "lora auto": LORA,
    "lora bfloat16": {"weights": "bfloat16", **LORA},
    "lora int8": {"weights": "int8", **LORA},
    "lora nf4": {"weights": "nf4", **LORA},
}
KINDS = ("weights", "adapters", "moments")
REWARD = "def score(completions):\n    return [float(len(text) % 7) for text in completions]\n"


class Counted(Exception):
    """Leave a run before its export."""


def write_rows(folder: Path) -> None:
    """Write a few prompts, pairs and texts, and a reward function."""
    rows = {
        "prompts": {"prompt": "Name a color."},
        "pairs": {"prompt": "Name a color.", "chosen": "Blue.", "rejected": "No."},
        "texts": {"prompt": "Name a color.", "completion": "Blue."},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def tree(trainer: str, mode: str, model: str, folder: Path) -> dict[str, Any]:
    """Return the configuration of a run."""
    role = dict(MODES[mode])
    settings: dict[str, Any] = {
        "run": {"out_dir": str(folder / f"{trainer} {mode}"), "device": "cpu", "cache_dir": str(folder / "cache")},
        "batch": {"prompts_per_step": 2, "micro_batch_size": 2},
        "schedule": {"steps": 1},
        "checkpoint": {"every": 0, "resume": "never"},
        "eval": {"every": 0},
        "guard": {"on_alarm": "ignore"},
    }
    pairs = {"preferences": {"path": str(folder / "pairs.jsonl")}}
    if trainer == "reward model":
        return settings | {"model": {"model": model, **role}, "data": pairs}
    settings |= {"policy": {"model": model, **role}, "algorithm": {"preset": trainer}}
    if trainer == "sft":
        return settings | {"data": {"sft": {"path": str(folder / "texts.jsonl")}}}
    if trainer == "dpo":
        return settings | {"data": pairs}
    settings["data"] = {"prompts": {"path": str(folder / "prompts.jsonl")}}
    settings["reward"] = {"source": {"type": "function", "target": f"{folder / 'reward.py'}:score"}}
    settings["sampling"] = {"max_new_tokens": 4, "completions_per_prompt": 4}
    return settings | ({"critic": {"init": "policy", **role}} if trainer == "ppo" else {})


def tensors() -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of all modules in memory, and the moments of all optimizers."""
    for thing in gc.get_objects():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_module, is_optimizer = isinstance(thing, torch.nn.Module), isinstance(thing, torch.optim.Optimizer)
        if is_module:
            yield from thing.parameters(recurse=False)
            yield from thing.buffers(recurse=False)
        elif is_optimizer:
            for state in thing.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))


def counted_bytes() -> int:
    """Sum the bytes of the tensors' storages, each once."""
    gc.collect()
    storages = (each.untyped_storage() for each in tensors() if each.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def compare(trainer: str, mode: str, model: str, folder: Path) -> dict[str, Any]:
    """Take a step, and return the run's memory after it and the formula's."""
    settings = tree(trainer, mode, model, folder)
    is_reward = trainer == "reward model"
    config = (reward_model_config if is_reward else train_config)(settings)
    items = make_plan(config, Machine(device="cpu")).memory.items
    planned = sum(item.bytes for item in items if item.phase == "update" and item.kind in KINDS)
    counts: list[int] = []

    def count(step: int, _: Mapping[str, float]) -> None:
        if step == 1:
            counts.append(counted_bytes())
            raise Counted

    run: Callable[..., bool] = run_reward_model if is_reward else run_train
    with suppress(Counted):
        run(config, on_step=count)
    return {"trainer": trainer, "mode": mode, "bytes": counts[0], "formula": planned, "error": counts[0] / planned - 1}


def main() -> None:
    """Compare each trainer in each mode, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=tuple(MODES))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    silence_libraries()
    rows: list[dict[str, Any]] = []
    about = {"model": Path(options.model).name, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="rlhf-modes-") as name:
        folder, model = Path(name), str(Path(options.model).resolve())
        write_rows(folder)
        for trainer in options.trainers:
            for mode in options.modes:
                row = in_child(partial(compare, trainer, mode, model, folder))
                rows.append(row)
                sys.stdout.write(f"{trainer:13} {mode:14} {row['bytes'] / 1e6:8.1f} MB {row['error']:+7.2%}\n")
                sys.stdout.flush()
                options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measure runs of the table of docs/memory.md on a CPU, beside the estimate of `rlhf plan` for that CPU.

    python benchmarks/table_points.py models/smollm2-135m-instruct [--only "ppo, full" ...]

Each run has the model, trainer, way of training and lengths of its cell: 512 + 512 tokens, 4 rows a micro-batch (2
pairs), activations recomputed. It takes one step of one micro-batch, in float32; online these are 4 completions of a
prompt. The moments of the optimizers, which otherwise appear after the first step, are made before it. Rows are words
of one token each, and no completion ends before its limit. Adapters are exported alone. The memory is counted as in
plan.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import torch  # noqa: E402
from make_memory_doc import ALGORITHMS, TOKENS, WAYS, configuration  # noqa: E402
from plan import REWARD, about, compare, run_counted  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from rlhf.config.files import merge  # noqa: E402
from rlhf.config.load import reward_model_config, train_config  # noqa: E402
from rlhf.config.sections import RunConfiguration  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "table_points.json"
NEVER = "<file_sep>"  # ends completions instead of EOS: a token that the model was not trained to write


def copy_model(model: Path, folder: Path) -> None:
    """Write a folder with the model's files, in which the token that ends a completion is NEVER."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    token = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(NEVER)
    for name, value in (("config", token), ("generation_config", token), ("tokenizer_config", NEVER)):
        file = folder / f"{name}.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        content["eos_token" if name == "tokenizer_config" else "eos_token_id"] = value
        file.unlink()
        file.write_text(json.dumps(content), encoding="utf-8")


def write_rows(model: Path, folder: Path) -> None:
    """Write prompts, pairs and texts of the table's lengths, and a reward function."""
    draw = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = sorted(word[1:] for word in tokenizer.get_vocab() if re.fullmatch("Ġ[A-Za-z]+", word))

    def text(count: int) -> str:
        made = "".join(f" {draw.choice(words)}" for _ in range(count))
        if len(tokenizer(made).input_ids) != count:
            raise RuntimeError("a word is not one token")
        return made

    answer = TOKENS.completion - 1  # and the token that ends it
    rows = {
        "prompts": [{"prompt": text(TOKENS.prompt)} for _ in range(8)],
        "texts": [{"prompt": text(TOKENS.prompt), "completion": text(answer)} for _ in range(16)],
        "pairs": [{"prompt": text(TOKENS.prompt), "chosen": text(answer), "rejected": text(answer)} for _ in range(8)],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def make_moments() -> None:
    """Make the moments of every optimizer in memory, with a step whose gradients are 0."""
    for optimizer in [thing for thing in gc.get_objects() if type(thing).__mro__.count(torch.optim.Optimizer)]:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def run_of(algorithm: str, way: str, folder: Path) -> RunConfiguration:
    """Return the run of a cell with one step of one micro-batch."""
    cell = configuration(algorithm, str(folder / "model"), WAYS[way]).model_dump(mode="json", exclude_unset=True)
    is_online, is_reward_model = algorithm in ("grpo", "ppo"), algorithm == "reward model"
    changes: dict[str, Any] = {
        "run": {"out_dir": str(folder / f"{algorithm} {way}"), "device": "cpu", "cache_dir": str(folder / "cache")},
        "batch": {"prompts_per_step": 1 if is_online else 4 if algorithm == "sft" else 2},
        "schedule": {"steps": 1},
        "checkpoint": {"every": 0, "resume": "never"},
        "eval": {"every": 0},
        "guard": {"on_alarm": "ignore"},
        "model" if is_reward_model else "policy": {} if way == "full" else {"export": "adapter"},
        "data": {"chat_template": "none"},
    }
    if is_online:
        if algorithm == "ppo":  # 4 completions are too few to whiten over
            changes["algorithm"] = {"advantage": {"whiten": False}}
        changes["reward"] = {"source": {"target": f"{folder / 'reward.py'}:score"}}
        changes["data"] |= {"prompts": {"path": str(folder / "prompts.jsonl"), "max_prompt_tokens": TOKENS.prompt}}
    elif algorithm == "sft":
        changes["data"]["sft"] = {"path": str(folder / "texts.jsonl"), "max_tokens": TOKENS.prompt + TOKENS.completion}
    else:
        limit = TOKENS.prompt + TOKENS.completion
        changes["data"]["preferences"] = {"path": str(folder / "pairs.jsonl"), "max_tokens": limit}
    if is_reward_model:
        changes["schedule"]["epochs"] = None
    return (reward_model_config if is_reward_model else train_config)(merge(cell, changes))


def main() -> None:
    """Measure the runs, print them beside the plan, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    run_counted()
    rows = json.loads(options.out.read_text(encoding="utf-8"))["runs"] if options.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="rlhf-table-") as name:
        folder = Path(name)
        copy_model(options.model.resolve(), folder / "model")
        write_rows(folder / "model", folder)
        for way in WAYS:
            for algorithm in ALGORITHMS:
                if options.only and f"{algorithm}, {way}" not in options.only:
                    continue
                run = f"{algorithm}, {way}"
                row = {"name": run} | compare(run_of(algorithm, way, folder), TOKENS, make_moments)
                rows = [*(each for each in rows if each["name"] != run), row]
                content = {"about": about(), "runs": rows}
                options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                sys.stdout.write(
                    f"{run:32} planned {row['planned_mb']:6.0f} allocated {row['allocated_mb']:6.0f} "
                    f"{row['error']:+6.1%}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()

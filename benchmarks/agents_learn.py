"""Do agents learn? PPO and GRPO beside SFT alone, on tasks of one to five turns:   python benchmarks/agents_learn.py

Makes a small Llama from nothing for each task and seed, has it imitate poor play (agent_tasks.py), and trains it from
there on equally many episodes: by PPO, by GRPO, and by more imitation. Each model then plays 512 held-out episodes.
Writes a JSON file after each run and prints the table in Markdown; a run that is in the file is not repeated.
`--tasks guess_7 --seeds 0` makes a part of it. Two tasks need the extras textarena and reasoning-gym.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from agent_tasks import TASKS, Task
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import rlhf
from rlhf.config.data import PromptsConfig
from rlhf.config.files import merge
from rlhf.config.load import load_chat_format
from rlhf.config.sections import SamplingConfig
from rlhf.data.prompts import prompt_pipeline
from rlhf.environments.section import EnvironmentConfig
from rlhf.factory.sampler import Completer
from rlhf.lab.model import untrained_model
from rlhf.models.backbone import context_length
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.run_folder import RunFolder

RESULTS = Path(__file__).parent / "results" / "agents_learn.json"
PAD, END, READ = "<pad>", "<end>", "<read>"  # READ ends a text for the policy to read
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ '<end>' if message['role'] == 'assistant' else '<read>' }}{% endfor %}"
)
RARE = 25  # a phrase in fewer than one of 25 texts is no token
HELD_OUT_EPISODES = 512
CURVE_STEPS = 10  # of training, whose mean return is a point of the curve
T_OF_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t for an interval of 95 %, by the number of seeds
MODELS = ("start", "sft", "ppo", "grpo")
HEAD = "| task | start | more SFT | PPO | GRPO |\n|---|---|---|---|---|"

COMMON: dict[str, Any] = {
    "run": {"device": "cpu"},
    "policy": {"lr": 2e-3},
    "sampling": {"batch_size": 512},
    "algorithm": {"kl": {"coef": 0.01}},
    "batch": {"epochs": 1, "minibatches": 4, "micro_batch_size": 64},
    "schedule": {"steps": 60, "warmup_steps": 6, "decay": "linear"},
    "checkpoint": {"every": 0},
}
ARMS: dict[str, dict[str, Any]] = {
    "ppo": {"batch": {"prompts_per_step": 128}, "critic": {"init": "policy", "lr": 4e-3}},
    "grpo": {"batch": {"prompts_per_step": 16}, "sampling": {"completions_per_prompt": 8}},
}
EPISODES_PER_STEP = 128


def make_model(folder: Path, texts: Sequence[str], seed: int) -> None:
    """Write an untrained Llama of a tenth of a million weights; a token is a digit, a letter or a frequent phrase."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # a token may be a whole phrase
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, whole])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=len(texts) // RARE,
        special_tokens=[PAD, END, READ],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=64**-0.5,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    untrained_model(config, seed).save_pretrained(folder)


def imitate(model: Path, games: list[dict[str, Any]], folder: Path, seed: int, epochs: int) -> Path:
    """Train a model to imitate games; return its folder."""
    result = rlhf.sft(
        str(model),
        games,
        folder=folder,
        quiet=True,
        run={"device": "cpu", "seed": seed},
        policy={"lr": 2e-3},
        batch={"prompts_per_step": 32, "micro_batch_size": 32},
        schedule={"epochs": epochs, "warmup_steps": 0},
        checkpoint={"every": 0},
        **{"data.holdout": None, "data.sft.max_tokens": 512},
    )
    return result.model_folder


def count_actions(games: Sequence[Mapping[str, Any]], model: Path) -> int:
    """Return the tokens of the actions of games, each with its end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    actions = [message["content"] for game in games for message in game["messages"] if message["role"] == "assistant"]
    return sum(len(ids) + 1 for ids in tokenizer(actions)["input_ids"])


def settings_of(task: Task, arm: str, seed: int) -> dict[str, Any]:
    """Return the settings of a run."""
    tree: dict[str, Any] = {}
    for part in (COMMON, ARMS[arm], task.settings):
        tree = merge(tree, part)
    environment = {"target": task.target, "kwargs": dict(task.kwargs), "max_turns": task.turns}
    return merge(tree, {"run": {"seed": seed}, "sampling": {"max_new_tokens": task.tokens}, "environment": environment})


def with_steps(task: Task, steps: int | None) -> Task:
    """Return the task with as many steps of training, if they are given."""
    return task if steps is None else replace(task, settings=merge(task.settings, {"schedule": {"steps": steps}}))


def learn(task: Task, arm: str, start: Path, folder: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    """Train the start by an algorithm; return the model's folder, the sampled tokens and the curve."""
    tree = settings_of(task, arm, seed)
    rows = task.rows(tree["batch"]["prompts_per_step"] * tree["schedule"]["steps"])
    result = rlhf.train(str(start), arm, prompts=rows, folder=folder, quiet=True, **tree)
    lines = [line for line in RunFolder(result.folder).read_metrics() if "env/return" in line]
    returns = [line["env/return"] for line in lines]
    curve = [returns[first : first + CURVE_STEPS] for first in range(0, len(returns), CURVE_STEPS)]
    tokens = sum(line["completion/length"] * EPISODES_PER_STEP for line in lines)
    return result.model_folder, {
        "sampled_tokens": round(tokens),
        "curve": [round(statistics.mean(part), 4) for part in curve],
    }


def success(task: Task, model: Path, seed: int) -> float:
    """Play the held-out episodes; return the share with a return of 1."""
    sampling = SamplingConfig(max_new_tokens=task.tokens, batch_size=HELD_OUT_EPISODES)
    chat = load_chat_format(str(model))
    completer = Completer(str(model), sampling, chat=chat)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        rows = task.rows(HELD_OUT_EPISODES, held_out=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        prompts = prompt_pipeline(
            PromptsConfig.model_validate({"path": str(path)}),
            completer.tokenizer,
            chat_template=chat,
            context=context_length(completer.model),
            max_new_tokens=task.tokens,
        ).load()
    environment = EnvironmentConfig(target=task.target, kwargs=dict(task.kwargs), max_turns=task.turns)
    played = completer.player(environment).sample(prompts.all(), key=derive_seed(seed, "held out"), group_size=1)
    return round(float((played.turn_rewards.sum(dim=1) > 0.99).double().mean()), 4)


def make_start(task: Task, seed: int, folder: Path) -> Path:
    """Make the model that imitates poor play, unless it is there; return its folder."""
    start = folder / "start" / "model"
    if not start.is_dir():
        shutil.rmtree(folder / "start", ignore_errors=True)  # of a run that was cut off
        games = task.games(task.imitated, seed)
        make_model(folder / "base", [message["content"] for game in games for message in game["messages"]], seed)
        imitate(folder / "base", games, folder / "start", seed, task.epochs)
    return start


def run_cell(task: Task, arm: str, seed: int, work: Path) -> dict[str, Any]:
    """Make one model of a task and seed, and let it play."""
    folder = work / f"{task.name}-{seed}"
    start, began, more = make_start(task, seed, folder), time.process_time(), {}
    model = start
    if arm != "start":
        shutil.rmtree(folder / arm, ignore_errors=True)
    if arm == "sft":
        games = task.games(EPISODES_PER_STEP * settings_of(task, "ppo", seed)["schedule"]["steps"], seed + 1000)
        model, more = imitate(start, games, folder / "sft", seed, 1), {"imitated_tokens": count_actions(games, start)}
    elif arm != "start":
        model, more = learn(task, arm, start, folder / arm, seed)
    seconds = round(time.process_time() - began, 1)
    return {"success": success(task, model, seed), "cpu_seconds": seconds, **more}


def interval(values: Sequence[float]) -> str:
    """Write the mean of the seeds in points, with its interval by Student's t."""
    mean = 100 * statistics.mean(values)
    if len(values) not in T_OF_95:
        return f"{mean:.0f}"
    margin = 100 * T_OF_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.0f} [{max(mean - margin, 0):.0f}, {min(mean + margin, 100):.0f}]"


def table(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Write the models' results in each task over its seeds; a dash for a model that some of them lack."""
    lines = [HEAD]
    for name in TASKS:
        seeds = [cells[key] for key in sorted(cells) if key.startswith(f"{name}/") and "ppo" in cells[key]]
        if seeds:
            measured = ([seed[model]["success"] for seed in seeds if model in seed] for model in MODELS)
            shown = (interval(values) if len(values) == len(seeds) else "–" for values in measured)
            lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the missing parts, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, help="steps of PPO and GRPO, instead of the task's")
    parser.add_argument("--work", type=Path, default=Path("runs/agents-learn"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    empty: dict[str, Any] = {"episodes": HELD_OUT_EPISODES, "torch": version("torch"), "cells": {}}
    content = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else empty
    for seed in args.seeds:
        for name in args.tasks:
            cell = content["cells"].setdefault(f"{name}/{seed}", {})
            for arm in args.arms:
                if arm not in cell:
                    cell[arm] = run_cell(with_steps(TASKS[name], args.steps), arm, seed, args.work)
                    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                    print(name, seed, arm, cell[arm], flush=True)  # noqa: T201
    sys.stdout.write(table(content["cells"]) + "\n")


if __name__ == "__main__":
    main()

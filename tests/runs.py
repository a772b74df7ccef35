"""Whole runs small enough for a test: a tiny Llama over eight words, a reward that counts words, seconds a run."""

from __future__ import annotations

import io
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import word_rewards
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trials import tried_once
from word_rewards import count_good as count_good  # these three are names of this module too
from word_rewards import count_words as count_words
from word_rewards import golds as golds

from rlhf.config.files import merge, parse_overrides
from rlhf.config.load import train_config
from rlhf.factory.offline import build_offline
from rlhf.factory.online import build_online
from rlhf.report.terminal import Terminal
from rlhf.training.offline import OfflineRun, train_offline
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun

WORDS = ("<pad>", "<bos>", "<eos>", "<unk>", "good", "bad", "red", "blue", "one", "two")


def quiet() -> Terminal:
    return Terminal(Console(file=io.StringIO(), width=200))


def make_model(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A random two-layer Llama and its tokenizer, saved in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files, random_state = model_files(seed, dtype)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(random_state)
    return folder


@cache
def model_files(seed: int, dtype: torch.dtype) -> tuple[dict[str, bytes], torch.Tensor]:
    """The content of that model's files, and the state of torch's generator after it: a process makes it once."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
    )
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
        fast.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}, torch.get_rng_state()


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompts_file(folder: Path) -> Path:
    return write_rows(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in colored_prompts()])


def colored_prompts() -> list[str]:
    colors, numbers = ("red", "blue"), ("one", "two")
    return [f"{c} {n} {d}".strip() for c in colors for n in numbers for d in ("", *colors, *numbers)]


def written(seed: int, count: int) -> list[tuple[str, str]]:
    """Prompts, each with a completion of 1 to 4 random words."""
    draw, prompts = random.Random(seed), colored_prompts()
    return [
        (prompts[i % len(prompts)], "".join(f" {draw.choice(WORDS[4:])}" for _ in range(draw.randint(1, 4))))
        for i in range(count)
    ]


def pairs_file(folder: Path, *, count: int = 120, seed: int = 0) -> Path:
    """Pairs of random completions of a prompt, the better one by `count_good` chosen; ties are no pairs."""
    both = zip(written(2 * seed, count), written(2 * seed + 1, count), strict=True)
    rows = []
    for (prompt, first), (_, second) in both:
        a, b = golds(first, second)
        if a != b:
            rows.append(
                {"prompt": prompt, "chosen": first if a > b else second, "rejected": second if a > b else first}
            )
    return write_rows(folder / f"pairs-{seed}.jsonl", rows)


def labelled_file(folder: Path, *, count: int = 160, seed: int = 0) -> Path:
    """Single random completions, desirable if `count_good` is above 0; completions of 0 are left out."""
    rows = [
        {"prompt": prompt, "completion": completion, "label": gold > 0}
        for prompt, completion in written(2 * seed, count)
        for gold in golds(completion)
        if gold != 0
    ]
    return write_rows(folder / f"labelled-{seed}.jsonl", rows)


def offline_tree(folder: Path, preset: str, **changes: Any) -> dict[str, Any]:
    """A small run of a preference loss in `folder`; `changes` are sections merged on top."""
    model = folder / "model"
    if not model.is_dir():
        make_model(model)
    tree: dict[str, Any] = {
        "run": {"out_dir": str(folder / "run"), "device": "cpu", "cache_dir": str(folder / "cache")},
        "data": {
            "preferences": {"path": str(pairs_file(folder))},
            "eval_preferences": {"path": str(pairs_file(folder, count=40, seed=1))},
            "eval_prompts": {"path": str(prompts_file(folder))},
        },
        "policy": {"model": str(model), "lr": 1e-2},
        "sampling": {"max_new_tokens": 6},
        "algorithm": {"preset": preset},
        "batch": {"prompts_per_step": 16, "micro_batch_size": 8},
        "schedule": {"steps": 4},
        "checkpoint": {"every": 2},
        "eval": {"every": 2, "source": {"type": "function", "target": f"{word_rewards.__file__}:count_good"}},
    }
    return merge(tree, changes)


def ppo_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """A small PPO run in `folder`; `changes` are sections merged on top."""
    model = folder / "model"
    if not model.is_dir():
        make_model(model)
    prompts = str(prompts_file(folder))
    tree: dict[str, Any] = {
        "run": {"out_dir": str(folder / "run"), "device": "cpu"},
        "data": {"prompts": {"path": prompts}, "eval_prompts": {"path": prompts}},
        "policy": {"model": str(model), "lr": 1e-2},
        "critic": {"lr": 1e-2, "init": "policy"},
        "reward": {"source": {"type": "function", "target": f"{word_rewards.__file__}:count_good"}},
        "sampling": {"max_new_tokens": 6},
        "algorithm": {"preset": "ppo"},
        "batch": {"prompts_per_step": 16, "epochs": 2, "minibatches": 2, "micro_batch_size": 8},
        "schedule": {"steps": 4},
        "checkpoint": {"every": 2},
        "eval": {"every": 2},
    }
    return merge(tree, changes)


def brief_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """The same with one update a step and no evaluation, for tests of other things than learning."""
    brief = {"data": {"eval_prompts": None}, "eval": {"every": 0}, "batch": {"epochs": 1, "minibatches": 1}}
    return ppo_tree(folder, **merge(brief, changes))


def online(tree: dict[str, Any], *overrides: str) -> OnlineRun:
    """The run that the tree and `key=value` overrides describe."""
    with tried_once():
        return build_online(train_config(merge(tree, parse_overrides(overrides))), quiet())


def trained(tree: dict[str, Any], *overrides: str) -> OnlineRun:
    """The same, run to its end."""
    run = online(tree, *overrides)
    train(run)
    run.session.recorder.close()
    return run


def offline(tree: dict[str, Any], *overrides: str) -> OfflineRun:
    """The offline run that the tree and `key=value` overrides describe."""
    with tried_once():
        return build_offline(train_config(merge(tree, parse_overrides(overrides))), quiet())


def trained_offline(tree: dict[str, Any], *overrides: str) -> OfflineRun:
    """The same, run to its end."""
    run = offline(tree, *overrides)
    train_offline(run)
    run.session.recorder.close()
    return run


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def largest_difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)

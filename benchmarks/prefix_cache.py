"""Sampling of episodes with and without `environment.prefix_cache`:   python benchmarks/prefix_cache.py MODEL

Plays 32 games of examples/guess_number.py, five turns at most, with a chat model on one thread of the CPU, in turn with
and without the cache. Writes the seconds of processor time of each round to a JSON file (--out) and prints the ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlhf.config.data import PromptsConfig
from rlhf.config.load import load_chat_format
from rlhf.config.sections import SamplingConfig
from rlhf.data.prompts import prompt_pipeline
from rlhf.environments.section import EnvironmentConfig
from rlhf.factory.sampler import Completer
from rlhf.models.backbone import context_length
from rlhf.types import Prompts

ROOT = Path(__file__).resolve().parents[1]
GAME = ROOT / "examples" / "guess_number.py"
GAMES, TURNS, TOKENS = 32, 5, 8  # tokens of the longest action


def load(model: str) -> tuple[Completer, Prompts]:
    """Load the model, and a prompt for each game."""
    chat = load_chat_format(model)
    completer = Completer(model, SamplingConfig(max_new_tokens=TOKENS, batch_size=GAMES), chat=chat)
    with TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text((json.dumps({"prompt": runpy.run_path(str(GAME))["RULES"]}) + "\n") * GAMES, encoding="utf-8")
        prompts = prompt_pipeline(
            PromptsConfig.model_validate({"path": str(rows)}),
            completer.tokenizer,
            chat_template=chat,
            context=context_length(completer.model),
            max_new_tokens=TOKENS,
        ).load()
    return completer, prompts.all()


def play(completer: Completer, prompts: Prompts, *, prefix_cache: bool) -> dict[str, Any]:
    """Play the games; return the seconds of processor time and the tokens."""
    environment = EnvironmentConfig(target=f"{GAME}:GuessNumber", max_turns=TURNS, prefix_cache=prefix_cache)
    player, began = completer.player(environment), time.process_time()
    games = player.sample(prompts, key=1, group_size=1)
    return {
        "prefix_cache": prefix_cache,
        "cpu_seconds": round(time.process_time() - began, 2),
        "tokens": int(games.completion_mask.sum()),
        "action_tokens": int(games.action_mask.sum()),
    }


def main() -> None:
    """Play the rounds, write the JSON file and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a chat model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "prefix_cache.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    completer, prompts = load(args.model)
    played = [play(completer, prompts, prefix_cache=cache) for _ in range(args.rounds) for cache in (False, True)]
    content = {
        "model": Path(args.model).name,
        "machine": platform.processor() or platform.machine(),
        "torch": version("torch"),
        "games": GAMES,
        "played": played,
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    seconds = [run["cpu_seconds"] for run in played]
    ratios = [without / cached for without, cached in zip(seconds[::2], seconds[1::2], strict=True)]
    sys.stdout.write(f"times as fast with the cache: {', '.join(f'{ratio:.2f}' for ratio in ratios)}\n")


if __name__ == "__main__":
    main()

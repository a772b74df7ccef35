"""Define the options of side_by_side.py and floor.py that describe the work, and read the work from them."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from peers.real import make_real_work
from peers.work import REAL_SIZES, SHAPES, Sizes, Workload, make_work

PAIRS = Path(__file__).resolve().parents[3] / "shared" / "data" / "human_pairs" / "train.jsonl.gz"


def add_work_options(parser: argparse.ArgumentParser) -> None:
    """Add --size, --model and its companions, and one option for each of the sizes of a step."""
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny", help="shape of a model of random weights")
    parser.add_argument("--model", type=Path, help="folder or GGUF file of a real model, instead of --size")
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="real pairs: JSON lines, gzipped or not")
    parser.add_argument("--max-tokens", type=int, default=192, help="longest row of the real pairs")
    for size in fields(Sizes):
        name = f"--{size.name.replace('_', '-')}"
        parser.add_argument(name, type=int, help=f"{getattr(REAL_SIZES, size.name)} with --model, else {size.default}")


def steps_of(options: argparse.Namespace) -> int:
    """Count the steps of a trainer, the warm-up included."""
    return int(options.steps or (6 if options.model is None else 3))


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Return the sizes of a step: the model's defaults, changed by the options."""
    given = {size.name: getattr(options, size.name) for size in fields(Sizes)}
    defaults = Sizes() if options.model is None else REAL_SIZES
    return replace(defaults, **{name: number for name, number in given.items() if number is not None})


def make_chosen_work(options: argparse.Namespace, folder: Path, steps: int, sizes: Sizes) -> Workload:
    """Prepare the models and rows in `folder`, real or random."""
    if options.model is None:
        return make_work(folder, options.size, steps, sizes)
    return make_real_work(folder, options.model, options.pairs, steps, sizes, max_tokens=options.max_tokens)


def describe(workload: Workload, sizes: Sizes) -> str:
    """Describe one step of each trainer in numbers of rows and tokens."""
    side = (workload.chosen + workload.rejected) / 2
    return (
        f"{workload.parameters:,} parameters; tokens: {workload.prompt:.0f} a prompt, {side:.0f} a completion of the "
        f"data, at most {sizes.new_tokens} of a sampled one; a step: {sizes.rows} rows or pairs; "
        f"GRPO, RLOO {sizes.prompts} prompts x {sizes.group}; PPO {sizes.ppo_prompts} prompts, {sizes.ppo_epochs} "
        f"epochs x {sizes.ppo_minibatches} minibatches"
    )

"""GRPO and PPO on doors that nobody opens by chance, plain and rescued by hints:   python benchmarks/zero_reward.py

Makes the world of rlhf.lab.doors, then runs configs/lab/zero_reward.yaml for every seed and arm: without a rescue, with
each kind of importance weight, and with a curriculum, alone and beside the rescue. Writes a JSON file (--out) and
prints the table in Markdown. Seeds may be run apart (--seeds 0 --out a.json); a finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf.config.files import Tree, merge
from rlhf.config.load import read_yaml, train_config
from rlhf.factory.online import build_online
from rlhf.lab.doors import write_doors
from rlhf.tracking.run_folder import RunFolder
from rlhf.training.online import train

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "lab" / "zero_reward.yaml"


def _with_critic(rescue: Tree | None) -> Tree:
    """Return the change that makes the run one of PPO, with this rescue."""
    hints = {"hints": [{"column": "hint", "template": "{prompt} {hint}"}], "replay": {"share": 0.25}}
    return {
        "algorithm": {"preset": "ppo", "kl": {"coef": 0.0}, "rescue": None if rescue is None else hints | rescue},
        "batch": {"epochs": 1, "minibatches": 1},
    }


ARMS: dict[str, Tree] = {
    "plain": {"algorithm": {"rescue": None}},
    "shaped": {},
    "token": {"algorithm": {"rescue": {"weights": {"type": "token"}}}},
    "curriculum": {"algorithm": {"rescue": None, "curriculum": {"type": "variance"}}},
    "shaped_curriculum": {"algorithm": {"curriculum": {"type": "variance"}}},
    "ppo": _with_critic(None),
    "ppo_shaped": _with_critic({"weights": {"type": "shaped", "gamma": 1e-3}}),
    "ppo_sequence": _with_critic({"after": 1, "weights": {"type": "sequence", "cap": 100.0}}),
}


def arm_tree(folder: Path, seed: int, name: str, steps: int) -> Tree:
    """Return the configuration of an arm in a folder that `write_doors` filled."""
    base = read_yaml(CONFIG)
    if name == "token":
        del base["algorithm"]["rescue"]["weights"]  # they are of another type
    tree = merge(base, ARMS[name])
    prompts = {"path": str(folder / "prompts.jsonl")}
    own = {
        "run": {"out_dir": str(folder / f"{name}-{seed}"), "seed": seed},
        "data": {"prompts": prompts, "eval_prompts": prompts},
        "policy": {"model": str(folder / "start")},
        "schedule": {"steps": steps},
    }
    return merge(tree, own)


def run_arm(folder: Path, seed: int, name: str, steps: int) -> list[dict[str, Any]]:
    """Train an arm, unless its run is there, and return its lines of metrics."""
    tree = arm_tree(folder, seed, name, steps)
    run = build_online(train_config(tree))
    train(run)
    run.session.recorder.close()
    return RunFolder(Path(tree["run"]["out_dir"])).read_metrics()


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a run's result: its score on plain prompts by step, and its cost."""
    return {
        "score": {row["step"]: row["eval/score"] for row in rows if "eval/score" in row},
        "completions": rows[-1]["completion/count"],
        "prompts_rescued": sum(row.get("rescue/rescued", 0.0) for row in rows),
        "failed_in_last_step": rows[-1].get("rescue/failed"),
        "successes_without_hint": sum(
            row.get("score/first_draw", row.get("score/mean", 0.0)) > 0 for row in rows if row["step"] > 0
        ),
    }


def main() -> None:
    """Run the missing parts, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs/zero-reward"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "zero_reward.json")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "prompts.jsonl").is_file():
        write_doors(args.folder)
    results = {
        name: {seed: summarize(run_arm(args.folder, seed, name, args.steps)) for seed in args.seeds}
        for name in args.arms
    }
    content = {"torch": version("torch"), "transformers": version("transformers"), "arms": results}
    args.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    lines = [f"| arm | {' | '.join(f'seed {seed}' for seed in args.seeds)} | mean |"]
    lines.append("|---" * (len(args.seeds) + 2) + "|")
    for name, by_seed in results.items():
        ends = [list(result["score"].values())[-1] for result in by_seed.values()]
        lines.append(f"| {name} | {' | '.join(f'{end:.2f}' for end in ends)} | {statistics.mean(ends):.2f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

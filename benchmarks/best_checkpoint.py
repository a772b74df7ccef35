"""Compare the best checkpoint with the last one on the lab's gold, for algorithms without a KL penalty.

    rlhf quickstart                                          makes the lab's start model and reward model
    python benchmarks/best_checkpoint.py --lab runs/quickstart [--arms dr_grpo dapo] [--seeds 0 1 2] [--steps 60]

The policy is trained on the reward model; a judge, the gold, chooses the best checkpoint on the lab's held-out prompts.
Both checkpoints are then scored by the gold on 256 other held-out prompts, not used to choose: the difference is
paired by prompt, over all seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from rlhf.config.files import merge_overrides, parse_overrides
from rlhf.config.load import load_train, train_config
from rlhf.config.sections import TrainConfig
from rlhf.data.paths import resolve_best
from rlhf.evaluation.win_rate import bootstrap_crossed
from rlhf.factory.evaluation import evaluate_model
from rlhf.factory.run import build_run
from rlhf.lab.build import lab_config, resolve_lab_paths
from rlhf.lab.world import prompts

ROOT = Path(__file__).resolve().parents[1]
COUNT = 256
RATES = {
    "dr_grpo": 3e-4,
    "dapo": 2e-4,
    "gspo": 3e-4,
    "cispo": 1e-4,
}  # higher than the lab's: over-optimization is the point


def other_prompts(folder: Path) -> Path:
    """Write held-out prompts that are not among the lab's own, by which the checkpoint is chosen."""
    chosen = {request.text for request in prompts(0, "eval", COUNT)}
    fresh = [request for request in prompts(1, "eval", 2 * COUNT) if request.text not in chosen][:COUNT]
    rows = [{"prompt": request.text, "topic": request.topic, "aspect": request.aspect} for request in fresh]
    path = folder / "other_prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def config_of(lab: Path, arm: str, seed: int, steps: int, out: Path) -> TrainConfig:
    """Build the run of an arm: the lab's PPO, with the arm's preset, on the lab's models."""
    overrides = [
        f"algorithm.preset={arm}",
        "algorithm.policy_loss={}",
        "sampling.completions_per_prompt=8",
        "batch.prompts_per_step=16",
        f"policy.lr={RATES.get(arm, 3e-4)}",
        f"policy.model={lab / 'sft'}",
        f"reward.source.path={lab / 'rm'}",
        f"run.seed={seed}",
        f"run.out_dir={out}",
        f"schedule.steps={steps}",
        f"eval.every={max(1, steps // 12)}",
        "eval.samples=0",
        "logging.samples=0",
        "checkpoint={every: 0, keep: 1, best: {restore: false}}",
        "guard.allow=[no-brake-on-learned-reward]",
    ]
    return resolve_lab_paths(load_train(lab_config("ppo"), overrides))


def gold_of(config: TrainConfig, path: str, prompts_file: Path) -> torch.Tensor:
    """Score the completions of a model for the prompts of a file by the gold, one for each prompt."""
    held_out = parse_overrides([f"data.eval_prompts.path={prompts_file}"])
    changed = train_config(merge_overrides(config.model_dump(mode="json"), held_out))
    return evaluate_model(changed, path, path).rollout.scores.double()


def main() -> None:
    """Train, score both checkpoints, and write the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--arms", nargs="*", default=["dr_grpo", "dapo"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--work", type=Path, default=Path("runs/best-checkpoint"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "best_checkpoint.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    fresh, results = other_prompts(options.work), {}
    for arm in options.arms:
        differences, steps = [], []
        for seed in options.seeds:
            folder = options.work / arm / f"seed-{seed}"
            config = config_of(options.lab, arm, seed, options.steps, folder)
            run = build_run(config)
            run.train()
            run.session.recorder.close()
            best, last = (gold_of(config, path, fresh) for path in (resolve_best(f"{folder}@best"), str(folder)))
            differences.append(best - last)
            steps.append(run.session.state.best.step if run.session.state.best is not None else None)
            print(arm, seed, "best at", steps[-1], f"best {best.mean():.3f} last {last.mean():.3f}", flush=True)  # noqa: T201
        interval = bootstrap_crossed(torch.stack(differences))
        results[arm] = {"best_minus_last": interval.value, "low": interval.low, "high": interval.high, "best_at": steps}
        print(arm, "best - last on the gold:", interval, flush=True)  # noqa: T201
    content = {"steps": options.steps, "seeds": options.seeds, "prompts": COUNT, "arms": results}
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

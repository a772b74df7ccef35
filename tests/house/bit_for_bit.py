"""Shows that a change of names, places or deletions changed no number: the same runs on two commits, bit for bit.

    python tests/house/bit_for_bit.py record before.json --tree PATH_OF_A_CHECKOUT_OF_THE_COMMIT_BEFORE [--model MODEL]
    python tests/house/bit_for_bit.py record after.json [--model MODEL]
    python tests/house/bit_for_bit.py compare before.json after.json [--renamed NAMES.json]

Recorded of each run are the numbers of metrics.jsonl as they are written, and digests of the lines of samples.jsonl and
of each exported tensor. The runs: the quickstart with ten steps of PPO, DPO, GRPO, PPO with LoRA, a reward model, PPO
that is killed and resumed, PPO in two processes, and two steps of GRPO on MODEL, a folder with a chat model. About
nine minutes on one core, and two more for SmolLM2.

NAMES.json has the renamings in between: {"settings": {old: new}, "metrics": {old: new}, "fields": {old: new}}, where
fields belong to samples.jsonl, and settings are on the command lines below, in their old names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

HERE = Path(__file__).resolve().parents[2]
UNTIMED = {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LOST_AFTER = 4  # steps before the resumed run is killed; its checkpoint is of step 3

Names = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Run:
    """A run of the program: a configuration, the settings over its file's, and the way to start it."""

    name: str
    config: str
    settings: tuple[str, ...]
    command: str = "train"
    processes: int = 1
    killed: bool = False


def runs(lab: Path, model: Path | None) -> list[Run]:
    """List the runs after the quickstart; they begin with its results in `lab`, or with `model`."""
    start = f"policy.model={lab / 'sft'}"
    pairs = (
        f"data.preferences.path={lab / 'preferences/train.jsonl'}",
        f"data.eval_preferences.path={lab / 'preferences/eval.jsonl'}",
    )
    online = (start, f"reward.source.path={lab / 'rm'}", "batch.prompts_per_step=32", "eval.every=5")
    checkpoints = ("checkpoint.every=3", "schedule.steps=6")
    chat = (
        f"policy.model={model}",
        "reward.source={type: function, target: 'rlhf.lab.gold:gold_reward'}",
        "algorithm.preset=grpo",
        "sampling={completions_per_prompt: 4, max_new_tokens: 24}",
        "batch={prompts_per_step: 4, epochs: 1, minibatches: 2, micro_batch_size: 8}",
        "policy.lr=2e-5",
        "schedule={steps: 2, warmup_steps: 0}",
        "eval.every=0",
        "data.eval_prompts.limit=4",
    )
    return [
        Run("dpo", "dpo", (start, *pairs, "schedule.steps=8", "eval.every=8")),
        Run("grpo", "ppo", (*online, "algorithm.preset=grpo", "sampling.completions_per_prompt=4", "schedule.steps=5")),
        Run("lora", "ppo", (*online, "policy.lora.r=4", "schedule.steps=5")),
        Run("reward", "reward_model", (f"model.model={lab / 'sft'}", *pairs, "schedule.steps=12"), command="rm"),
        Run("resumed", "ppo", (*online, *checkpoints), killed=True),
        Run("processes", "ppo", (*online, "schedule.steps=4"), processes=2),
        *([Run("chat", "ppo", chat)] if model else []),
    ]


def record(tree: Path, names: Names, model: Path | None) -> dict[str, Any]:
    """Make every run with the program in `tree` and collect its output."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lab = folder / "quickstart"
        program(tree, ["quickstart", "--out", str(lab), *renamed_settings(["schedule.steps=10"], names)])
        recorded = {f"quickstart/{stage}": contents(lab / stage) for stage in ("sft", "rm", "ppo")}
        for run in runs(lab, model):
            out = folder / run.name
            make(tree, run, out, names)
            recorded[run.name] = contents(out)
        return recorded


def make(tree: Path, run: Run, out: Path, names: Names) -> None:
    """Run the program; a run that is to be killed is, after some steps, and then continued by the same command."""
    settings = renamed_settings([f"run.out_dir={out}", *run.settings], names)
    arguments = [run.command, f"configs/lab/{run.config}.yaml", *settings]
    if run.killed:
        kill_after(LOST_AFTER, tree, arguments, out / "metrics.jsonl")
    program(tree, arguments, processes=run.processes)


def program(tree: Path, arguments: Sequence[str], *, processes: int = 1) -> None:
    """Run `rlhf` with these arguments to its end.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        command(arguments, processes), cwd=tree, env=environment(tree), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"rlhf {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def kill_after(steps: int, tree: Path, arguments: Sequence[str], metrics: Path) -> None:
    """Start `rlhf` and kill it as soon as `metrics` has a line of step `steps`."""
    with subprocess.Popen(
        command(arguments, 1), cwd=tree, env=environment(tree), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not has_step(metrics, steps):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)


def has_step(metrics: Path, step: int) -> bool:
    """Tell whether a step's metrics are written."""
    return metrics.is_file() and any(f'"step": {step}}}' in line for line in metrics.read_text().splitlines())


def command(arguments: Sequence[str], processes: int) -> list[str]:
    """Write the command line of one process or of several."""
    if processes == 1:
        return [sys.executable, "-m", "rlhf", *arguments]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *launcher, "-m", "rlhf", *arguments]


def environment(tree: Path) -> dict[str, str]:
    """Make the environment: the program of `tree`, one thread, the same arithmetic on every processor."""
    return {**os.environ, **UNTIMED, "PYTHONPATH": str(tree)}


def contents(out: Path) -> dict[str, Any]:
    """Read the numbers of a run folder, and digest its samples and its exported weights."""
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    samples = out / "samples.jsonl"
    return {
        "metrics": metrics,
        "samples": [json.loads(line) for line in samples.read_text().splitlines()] if samples.is_file() else [],
        "weights": {
            f"{file.relative_to(out)}:{name}": digest
            for file in sorted(out.rglob("*.safetensors"))
            if not any(part.startswith("checkpoint") for part in file.relative_to(out).parts)
            for name, digest in digests(file).items()
        },
    }


def digests(file: Path) -> dict[str, str]:
    """Digest the dtype, shape and bytes of each tensor of a file."""
    with safe_open(file, framework="numpy") as tensors:
        arrays = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return {
        name: hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]
        for name, array in arrays.items()
    }


def renamed_settings(settings: Sequence[str], names: Names) -> list[str]:
    """Write settings in their new names."""
    table = names.get("settings", {})
    pairs = (setting.split("=", 1) for setting in settings)
    return [f"{table.get(key, key)}={value}" for key, value in pairs]


def differences(before: Mapping[str, Any], after: Mapping[str, Any], names: Names) -> list[str]:
    """List where two records differ, the first place of each part of each run."""
    lines = [f"{run}: only in one record" for run in sorted(set(before) ^ set(after))]
    for run in sorted(set(before) & set(after)):
        old, new = before[run], after[run]
        for part, table in (("metrics", names.get("metrics", {})), ("samples", names.get("fields", {}))):
            rows = [renamed(row, table) for row in old[part]]
            if len(rows) != len(new[part]):
                lines.append(f"{run}, {part}: {len(rows)} lines before, {len(new[part])} after")
            pairs = zip(rows, new[part], strict=False)
            lines += [
                f"{run}, {part}, line {i + 1}: {what}" for i, pair in enumerate(pairs) if (what := unlike(*pair))
            ][:1]
        if what := unlike(old["weights"], new["weights"]):
            lines.append(f"{run}, weights: {what}")
    return lines


def renamed(row: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    """Give the keys of a row their new names."""
    return {table.get(key, key): value for key, value in row.items()}


def unlike(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Say which keys differ, the first few; empty if all are equal."""
    keys = [key for key in sorted(set(before) | set(after)) if before.get(key, "-") != after.get(key, "-")]
    return ", ".join(f"{key}: {before.get(key, '-')} -> {after.get(key, '-')}" for key in keys[:3])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--tree", type=Path, default=HERE)
    recording.add_argument("--renamed", type=Path)
    recording.add_argument("--model", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--renamed", type=Path)
    options = parser.parse_args()
    names: Names = json.loads(options.renamed.read_text()) if options.renamed else {}
    if options.command == "record":
        options.file.write_text(
            json.dumps(record(options.tree.resolve(), names, options.model and options.model.resolve()))
        )
        return
    lines = differences(*(json.loads(file.read_text()) for file in (options.before, options.after)), names)
    sys.stdout.write("\n".join(lines or ["the same, bit for bit"]) + "\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()

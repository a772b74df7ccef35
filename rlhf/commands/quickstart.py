"""rlhf quickstart: lab → SFT → preference pairs → reward model → PPO → report, on a laptop, nothing downloaded."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.api.lab import prepare_lab, rm_accuracy, stage_paths
from rlhf.api.training import run_train
from rlhf.config.load import load_train
from rlhf.config.sections import SamplingConfig, TrainConfig
from rlhf.errors import ConfigError
from rlhf.evaluation.evaluate import PolicyEvaluation
from rlhf.evaluation.win_rate import mean_difference, win_rate
from rlhf.factory.evaluation import evaluate_model
from rlhf.factory.sampler import Completer
from rlhf.lab.build import lab_config, resolve_lab_paths
from rlhf.lab.preferences import PairsFile
from rlhf.report.terminal import Terminal
from rlhf.tracking.metrics import format_duration
from rlhf.tracking.progress import printable
from rlhf.tracking.run_folder import RunFolder, write_atomically

EXAMPLES = 3


def run_quickstart(out: str, *, seed: int, overrides: Sequence[str], console: Console) -> None:
    """Run every stage of the quickstart, each in its own run folder under `out`; finished stages are skipped.

    Args:
        overrides: key=value settings for the PPO stage, e.g. algorithm.kl.controller.target=3.

    Raises:
        ConfigError: `out` was made with another seed, or by another version of the lab, or the last stage would not
            be PPO in its folder.
    """
    start_time, folder, terminal = time.perf_counter(), Path(out), Terminal(console)
    stage = [f"run.seed={seed}", *stage_paths(folder)["ppo"], *overrides]
    check_stage(load_train(lab_config("ppo"), stage), folder)
    held_out = prepare_lab(folder, seed=seed, view=terminal, of=4)
    if held_out is None:
        return
    console.rule("4/4  PPO against the reward model")
    ppo = resolve_lab_paths(load_train(lab_config("ppo"), stage))
    if not run_train(ppo, terminal):
        return
    console.rule("Results")
    result = summarize(ppo, folder, held_out, console)
    result["seconds"] = time.perf_counter() - start_time
    write_atomically(folder / "result.json", json.dumps(result, indent=2) + "\n")
    console.print(
        Text(f"{format_duration(time.perf_counter() - start_time)} in all; report: {folder / 'ppo' / 'report.html'}"),
        soft_wrap=True,
    )
    with held_out.path.open(encoding="utf-8") as lines:
        prompt = json.dumps(str(json.loads(next(lines))["prompt"]), ensure_ascii=False)
    console.print(Text(next_steps(folder, prompt)), soft_wrap=True)


def check_stage(config: TrainConfig, folder: Path) -> None:
    """Check that the last stage leaves the figures that are summarized at the end.

    Raises:
        ConfigError: it is another algorithm than PPO, in another folder, or without a KL to the start.
    """
    if config.algorithm.name != "ppo":
        raise ConfigError(
            f"rlhf quickstart ends with PPO, not {config.algorithm.name}: rlhf compare configs/lab/compare_quick.yaml "
            "trains others in the same lab"
        )
    if Path(config.run.out_dir) != (folder / "ppo").expanduser() or not config.reference.measure:
        raise ConfigError(
            "rlhf quickstart reads the last stage in its folder, with a KL to the start: leave run.out_dir and "
            "reference.measure out (--out names the folder)"
        )


def next_steps(folder: Path, prompt: str) -> str:
    """Return the commands that go on from a finished quickstart; `prompt` is one of the lab's, quoted for a shell."""
    steps = [] if shutil.which("rlhf") else [("source .venv/bin/activate", "so that `rlhf` is found")]
    steps += [
        (f"rlhf sample {folder / 'ppo'} --prompt {prompt}", "the trained model writes"),
        (f"rlhf eval {folder / 'ppo'}", "the trained model against its start, on held-out prompts"),
        ("bash scripts/test.sh", "the tests (in a checkout)"),
        ("docs/own_model_and_data.md", "your own model and data"),
    ]
    width = max(len(command) for command, _ in steps)
    return "\n".join(["Next:", *(f"  {command:{width}}  {what}" for command, what in steps)])


def summarize(config: TrainConfig, folder: Path, pairs: PairsFile, console: Console) -> dict[str, object]:
    """Compare PPO with SFT by the gold reward on held-out prompts, print a table, and return the figures.

    Both models sample with the same random numbers.
    """
    before = evaluate_model(config, None, str(folder / "ppo"))
    after = evaluate_model(config, str(folder / "ppo"), str(folder / "ppo"))
    a, b = after.rollout.scores, before.rollout.scores
    gold_std = float(b.double().std(correction=0))
    wins, gain = win_rate(a, b), mean_difference(a, b)
    accuracy = float(RunFolder(folder / "rm").read_report_card()["accuracy"])
    expected = rm_accuracy(folder)
    rows = RunFolder(folder / "ppo").read_metrics()
    last_fifth = [row for row in rows if row["step"] > 0.8 * rows[-1]["step"]]
    kl, explained = (fmean(row[name] for row in last_fifth) for name in ("kl/reference", "critic/explained_variance"))
    table = Table("", "SFT", "PPO", box=None, pad_edge=False)
    table.add_row("mean gold score", f"{float(b.mean()):.2f}", f"{float(a.mean()):.2f}")
    table.add_row("gain, in standard deviations of SFT", "", f"{gain.value / gold_std:+.2f}")
    table.add_row(f"win rate over SFT ({len(a)} held-out prompts)", "", str(wins))
    table.add_row("KL to SFT, nats per sequence", "0", f"{after.metrics['eval/kl']:.2f}")
    table.add_row("KL, mean of the last fifth of training", "", f"{kl:.2f}")
    table.add_row(
        "distinct bigrams", f"{before.metrics['eval/distinct_2']:.3f}", f"{after.metrics['eval/distinct_2']:.3f}"
    )
    table.add_row("mean length, tokens", f"{before.metrics['eval/length']:.1f}", f"{after.metrics['eval/length']:.1f}")
    table.add_row("critic's explained variance, mean of the last fifth", "", f"{explained:.2f}")
    table.add_row("reward model accuracy on the held-out labels", "", f"{accuracy:.3f}")
    table.add_row(
        "  the same in expectation over their noise / best", "", f"{expected:.3f} / {pairs.best_accuracy:.3f}"
    )
    console.print(table)
    _print_examples(folder, before, after, console)
    return {
        "gold_sft": float(b.mean()),
        "gold_ppo": float(a.mean()),
        "gold_std_sft": gold_std,
        "gain_in_std": gain.value / gold_std,
        "win_rate": [wins.value, wins.low, wins.high],
        "kl_last_fifth": kl,
        "kl_held_out": after.metrics["eval/kl"],
        "explained_variance": explained,
        "rm_accuracy": accuracy,
        "rm_expected_accuracy": expected,
        "rm_best_accuracy": pairs.best_accuracy,
        "prompts": len(a),
    }


def _print_examples(folder: Path, before: PolicyEvaluation, after: PolicyEvaluation, console: Console) -> None:
    completer = Completer(str(folder / "ppo"), SamplingConfig())
    for row in torch.linspace(0, len(before.rollout) - 1, EXAMPLES).long().tolist():
        console.print(Text(printable(str(before.rollout.references[row]["prompt"])), style="bold"))
        for name, evaluation in (("SFT", before), ("PPO", after)):
            text = completer.text(evaluation.rollout.completion_ids[row], evaluation.rollout.completion_mask[row])
            console.print(
                Text(f"  {name} {float(evaluation.rollout.scores[row]):+.2f}  {printable(text.strip())}"),
                soft_wrap=True,
            )

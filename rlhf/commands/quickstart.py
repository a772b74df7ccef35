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

from rlhf.commands.train import run_reward_model, run_train
from rlhf.config.load import load_reward_model, load_train
from rlhf.config.sections import SamplingConfig, TrainConfig
from rlhf.errors import ConfigError
from rlhf.evaluation.evaluate import PolicyEvaluation
from rlhf.evaluation.win_rate import mean_difference, win_rate
from rlhf.factory.evaluation import evaluate_model
from rlhf.factory.reward_card import score_gaps
from rlhf.factory.sampler import Completer
from rlhf.lab.build import LabSpec, lab_config, lab_key, resolve_lab_paths
from rlhf.lab.gold import expected_accuracy
from rlhf.lab.preferences import PairsFile, gold_gaps, write_pairs
from rlhf.lab.world import Split
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.metrics import format_duration
from rlhf.tracking.progress import printable
from rlhf.tracking.run_folder import RunFolder, write_atomically

LABEL_TEMPERATURE = 0.8  # of the pairs' Bradley-Terry label noise, in units of gold
PAIRS: dict[Split, int] = {"train": 8000, "eval": 1000}  # prompts, two completions each
EXAMPLES = 3
RECORD = "lab.json"  # the seed and the version of the lab that a folder was made with


def run_quickstart(out: str, *, seed: int, overrides: Sequence[str], console: Console) -> None:
    """Run every stage of the quickstart, each in its own run folder under `out`; finished stages are skipped.

    Args:
        out: the folder of the quickstart.
        seed: the seed of all stages.
        overrides: key=value settings for the PPO stage, e.g. algorithm.kl.controller.target=3.
        console: where progress and results are printed.

    Raises:
        ConfigError: `out` was made with another seed, or by another version of the lab.
    """
    start_time, folder = time.perf_counter(), Path(out)
    held_out = prepare_lab(folder, seed=seed, console=console, of=4)
    if held_out is None:
        return
    console.rule("4/4  PPO against the reward model")
    ppo = resolve_lab_paths(
        load_train(lab_config("ppo"), [f"run.seed={seed}", *_stage_paths(folder)["ppo"], *overrides])
    )
    if not run_train(ppo, console):
        return
    console.rule("What came of it")
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


def prepare_lab(folder: Path, *, seed: int, console: Console, of: int = 3) -> PairsFile | None:
    """Run the stages before any algorithm, into sft/, preferences/ and rm/ of `folder`; finished stages are skipped.

    Args:
        folder: the folder of the stages.
        seed: the seed of all three stages.
        console: where progress is printed.
        of: how many stages the caller has in all, for the headings.

    Returns:
        The held-out pairs; None if a stage was interrupted and saved.

    Raises:
        ConfigError: the folder was made with another seed, or by another version of the lab.
    """
    check_lab_folder(folder, seed=seed, console=console)
    seeded = [f"run.seed={seed}"]
    console.rule(f"1/{of}  SFT: a tiny Llama learns to write reviews")
    sft = resolve_lab_paths(load_train(lab_config("sft"), [*seeded, f"run.out_dir={folder / 'sft'}"]))
    if not run_train(sft, console):
        return None
    console.rule(f"2/{of}  preference pairs: two completions a prompt, ranked with noise")
    held_out = make_pairs(folder, sft.sampling, seed, console)
    console.rule(f"3/{of}  reward model")
    rm = resolve_lab_paths(load_reward_model(lab_config("reward_model"), [*seeded, *_stage_paths(folder)["rm"]]))
    return held_out if run_reward_model(rm, console) else None


def check_lab_folder(folder: Path, *, seed: int, console: Console) -> None:
    """Check that `folder` belongs to this seed and version of the lab; record both in lab.json if it is new.

    A folder without lab.json that already holds a start model is used as it is, with a warning.

    Raises:
        ConfigError: the folder was made with another seed, or by another version of the lab's code.
    """
    path, expected = folder / RECORD, {"seed": seed, "lab": lab_key(LabSpec())}
    if not path.is_file():
        if (folder / "sft").exists():
            warning = f"warning: {folder} has no {RECORD}, so its seed and the version it was made by are not checked"
            console.print(Text(warning, style="yellow"), soft_wrap=True)
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(expected) + "\n")
        return
    recorded = json.loads(path.read_text(encoding="utf-8"))
    differences = [f"seed {recorded['seed']} instead of {seed}"] if recorded["seed"] != seed else []
    if recorded["lab"] != expected["lab"]:
        differences.append(f"another version of the lab, {recorded['lab']} instead of {expected['lab']}")
    if differences:
        raise ConfigError(
            f"{folder} was made with {' and '.join(differences)}: give another folder (--out of rlhf "
            "quickstart, lab.folder of rlhf compare), ask for the seed that it has (--seed, lab.seed), or remove it"
        )


def make_pairs(folder: Path, sampling: SamplingConfig, seed: int, console: Console) -> PairsFile:
    """Sample and label the training and held-out pairs unless that is done; return the held-out ones."""
    info_file = folder / "preferences" / "info.json"
    if not info_file.is_file():
        completer = Completer(str(folder / "sft"), sampling)

        def sample(prompts: Sequence[str], count: int) -> list[list[str]]:
            return completer.complete(prompts, count=count, key=derive_seed(seed, "pairs", len(prompts)))

        files = {
            split: write_pairs(
                info_file.parent / f"{split}.jsonl",
                sample,
                split=split,
                count=count,
                seed=seed,
                temperature=LABEL_TEMPERATURE,
            )
            for split, count in PAIRS.items()
        }
        content = {split: {"pairs": file.pairs, "best_accuracy": file.best_accuracy} for split, file in files.items()}
        write_atomically(info_file, json.dumps(content, indent=2) + "\n")
    info = json.loads(info_file.read_text(encoding="utf-8"))
    train, held_out = (PairsFile(info_file.parent / f"{split}.jsonl", **info[split]) for split in ("train", "eval"))
    console.print(
        f"{train.pairs} pairs to train on, {held_out.pairs} held out; "
        f"best possible accuracy on the held-out labels {held_out.best_accuracy:.3f}"
    )
    return held_out


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


def rm_accuracy(folder: Path) -> float:
    """Compute the reward model's accuracy on the held-out pairs, in expectation over the noise of their labels."""
    config = resolve_lab_paths(load_reward_model(folder / "rm" / "config.yaml", []))
    texts, gaps = score_gaps(config, str(folder / "rm"))
    rows = [{"prompt": str(text.prompt), "chosen": text.chosen, "rejected": text.rejected} for text in texts]
    return expected_accuracy(gaps, gold_gaps(rows), LABEL_TEMPERATURE)


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


def _stage_paths(folder: Path) -> dict[str, list[str]]:
    """Return the overrides by which a stage finds the results of the earlier ones, whatever its file says."""
    pairs = folder / "preferences"
    return {
        "rm": [
            f"run.out_dir={folder / 'rm'}",
            f"model.model={folder / 'sft'}",
            f"data.preferences.path={pairs / 'train.jsonl'}",
            f"data.eval_preferences.path={pairs / 'eval.jsonl'}",
        ],
        "ppo": [
            f"run.out_dir={folder / 'ppo'}",
            f"policy.model={folder / 'sft'}",
            f"reward.source.path={folder / 'rm'}",
        ],
    }

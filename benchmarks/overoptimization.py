"""Measure over-optimization in the lab:   python benchmarks/overoptimization.py [--stage rm|best_of_n|ppo|fit]

Trains reward models on several numbers of pairs, single and as ensembles; scores samples of the start model by each and
by the gold, for best-of-n at every n; trains PPO against each at several KL coefficients; and fits the laws of Gao et
al. (2023). Writes a JSON file and a figure. Stages that are done are skipped; --lab is the folder of
`rlhf compare configs/lab/compare_quick.yaml` (runs/lab) or of rlhf quickstart.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from overoptimization_laws import fit_with_intervals, predicted_gain
from rich.console import Console

from rlhf.api.training import run_reward_model, run_train
from rlhf.config.load import load_reward_model, load_train
from rlhf.config.run import RunConfig
from rlhf.config.sections import SamplingConfig
from rlhf.evaluation.frontier import curve_sizes, expected_best, kl_bound
from rlhf.factory.rewards import build_source
from rlhf.factory.sampler import Completer
from rlhf.lab.build import lab_config, resolve_lab_paths
from rlhf.lab.gold import gold_reward
from rlhf.lab.world import prompts
from rlhf.report.terminal import Terminal
from rlhf.rewards.model import ModelSource
from rlhf.rewards.source import decode
from rlhf.runtime.engine import make_engine
from rlhf.tracking.run_folder import RunFolder

HOWS = ("mean", "minimum", "mean_minus_std")
STAGES = ("rm", "best_of_n", "ppo", "fit")


@dataclass(frozen=True)
class Proxy:
    """A reward model of the lab: on how many pairs, how many members, on one backbone or each on its own."""

    pairs: int
    members: int = 1
    backbone: Literal["shared", "separate"] = "shared"

    @property
    def name(self) -> str:
        """Return the name of its folder: rm-250, rm-250-x4 with heads on one backbone, rm-250-s4 with separate ones."""
        kind = {"shared": "x", "separate": "s"}[self.backbone]
        return f"rm-{self.pairs}" + (f"-{kind}{self.members}" if self.members > 1 else "")


def reward_models(settings: argparse.Namespace) -> list[Proxy]:
    """Return every reward model to train: single ones once, for all kinds of backbones."""
    return [
        Proxy(pairs, members, backbone if members > 1 else "shared")
        for pairs, members in product(settings.pairs, settings.members)
        for backbone in (settings.backbones if members > 1 else settings.backbones[:1])
    ]


def proxies(settings: argparse.Namespace) -> list[tuple[str, ModelSource]]:
    """Return every reward to optimize: each reward model, and each ensemble by each combination."""
    sources = []
    for proxy in reward_models(settings):
        for how in settings.how if proxy.members > 1 else HOWS[:1]:
            label = proxy.name + (f"-{how}" if proxy.members > 1 else "")
            sources.append((label, ModelSource(path=str(settings.folder / proxy.name), how=how)))
    return sources


def train_reward_models(settings: argparse.Namespace, console: Console) -> None:
    """Train the reward models that are missing, with the lab's settings; the pairs are the first so many."""
    for proxy in reward_models(settings):
        folder = settings.folder / proxy.name
        if (folder / "report_card.json").is_file():
            continue
        overrides = [
            f"run.out_dir={folder}",
            f"model.model={settings.lab / 'sft'}",
            f"data.preferences.path={settings.lab / 'preferences' / 'train.jsonl'}",
            f"data.eval_preferences.path={settings.lab / 'preferences' / 'eval.jsonl'}",
            f"data.preferences.limit={proxy.pairs}",
            f"ensemble.size={proxy.members}",
            f"ensemble.backbone={proxy.backbone}",
        ]
        run_reward_model(load_reward_model(lab_config("reward_model"), overrides), Terminal(console))


def sample_and_score(settings: argparse.Namespace, console: Console) -> dict[str, torch.Tensor]:
    """Sample completions of held-out prompts from the start model, and score them by the gold and by every proxy."""
    file = settings.folder / f"samples-{settings.prompts}x{settings.samples}.pt"
    scores: dict[str, torch.Tensor] = torch.load(file) if file.is_file() else {}
    wanted = ["gold", *(label for label, _ in proxies(settings))]
    missing = [(label, source) for label, source in proxies(settings) if label not in scores]
    if scores and not missing:
        return {label: scores[label] for label in wanted}
    completer = Completer(str(settings.lab / "sft"), SamplingConfig(max_new_tokens=48))
    texts = [request.text for request in prompts(settings.seed, "eval", settings.prompts)]
    completions = completer.sample(texts, count=settings.samples, key=settings.seed)
    console.print(f"{len(completions)} completions sampled")
    text = decode(completions, completer.tokenizer)
    gold = gold_reward(text.prompts, text.completions, text.references)
    scores["gold"] = torch.tensor(gold).view(settings.prompts, -1)
    engine = make_engine(RunConfig(device="cpu"))
    for label, source in missing:
        values = build_source(source, completer.tokenizer, engine)(completions).values
        scores[label] = values.view(settings.prompts, -1)
        console.print(f"scored by {label}")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(scores, file)
    return {label: scores[label] for label in wanted}


def best_of_n(scores: dict[str, torch.Tensor], seed: int) -> dict[str, Any]:
    """Compute gold and proxy at every n, and fit the law of best-of-n with intervals over prompts, for every proxy."""
    gold = scores["gold"].double()
    sizes = curve_sizes(gold.shape[1])
    distance = np.sqrt([kl_bound(n) for n in sizes])
    results: dict[str, Any] = {}
    for label, proxy in scores.items():
        curves = {"gold": gold, "proxy": proxy.double()} if label != "gold" else {"gold": gold}
        means = {name: [expected_best(values, proxy, n) for n in sizes] for name, values in curves.items()}
        gains = torch.stack(means["gold"], dim=1) - gold.mean(dim=1, keepdim=True)
        fit = fit_with_intervals(np.broadcast_to(distance, tuple(gains.shape)), gains.numpy(), "best_of_n", seed=seed)
        results[label] = {
            "n": sizes,
            "kl": [kl_bound(n) for n in sizes],
            "curves": {name: [float(m.mean()) for m in column] for name, column in means.items()},
            "fit": asdict(fit),
        }
    return results


def train_policies(settings: argparse.Namespace, console: Console) -> None:
    """Train PPO against every proxy at every KL coefficient and seed; finished runs are skipped."""
    for (label, source), coef, seed in product(proxies(settings), settings.kl, settings.seeds):
        folder = settings.folder / f"ppo-{label}-kl{coef:g}-seed{seed}"
        if (folder / "report.html").is_file():
            continue
        overrides = [
            f"run.out_dir={folder}",
            f"run.seed={seed}",
            f"policy.model={settings.lab / 'sft'}",
            f"reward.source.path={source.path}",
            f"reward.source.how={source.how}",
            f"algorithm.kl.coef={coef:g}",
            f"schedule.steps={settings.steps}",
        ]
        run_train(resolve_lab_paths(load_train(lab_config("overoptimization"), overrides)), Terminal(console))


def ppo_curves(settings: argparse.Namespace) -> dict[str, Any]:
    """Fit the law of reinforcement learning to the evaluations of PPO, with intervals over seeds, if it was run."""
    results: dict[str, Any] = {}
    for (label, _), coef in product(proxies(settings), settings.kl):
        runs = [settings.folder / f"ppo-{label}-kl{coef:g}-seed{seed}" for seed in settings.seeds]
        rows = [[row for row in RunFolder(run).read_metrics() if "eval/score" in row] for run in runs if run.is_dir()]
        length = min((len(run) for run in rows), default=0)
        if length < 4:
            continue
        kl, gold, proxy = (
            np.array([[row[key] for row in run[:length]] for run in rows])
            for key in ("eval/kl", "eval/score", "eval/proxy")
        )
        distances = np.sqrt(kl.clip(min=0.0))
        fit = fit_with_intervals(distances, gold - gold[:, :1], "rl", seed=settings.seed)
        results[f"{label}-kl{coef:g}"] = {
            "seeds": len(rows),
            "kl": kl.tolist(),
            "gold": gold.tolist(),
            "proxy": proxy.tolist(),
            "fit": asdict(fit),
        }
    return results


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw gold, and its law, against sqrt(KL)."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for color, (label, result) in zip(colors, results["best_of_n"].items(), strict=False):
        distance, gold = np.sqrt(result["kl"]), np.array(result["curves"]["gold"])
        fine = np.linspace(0, distance[-1], 100)
        fit = result["fit"]
        axes[0].plot(distance, gold - gold[0], "o", ms=3, color=color, label=label)
        gain = predicted_gain(fine, fit["alpha"]["value"], fit["beta"]["value"], "best_of_n")
        axes[0].plot(fine, gain, lw=1, color=color)
    for number, (label, result) in enumerate(results["ppo"].items()):
        distance, gold = np.sqrt(np.clip(result["kl"], 0, None)), np.array(result["gold"])
        lines = axes[1].plot(distance.T, (gold - gold[:, :1]).T, "o-", ms=3, lw=0.7, color=f"C{number}")
        lines[0].set_label(f"{label}, {len(gold)} seeds")
    for axis, title in zip(axes, ("Best of n", "PPO"), strict=True):
        axis.set(xlabel="square root of the KL to the start, in nats", ylabel="gain in gold score", title=title)
        if axis.has_data():
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def print_fits(results: dict[str, Any], console: Console) -> None:
    """Print α, β and the peak of every fit."""
    for law in ("best_of_n", "ppo"):
        for label, result in results[law].items():
            fit = result["fit"]
            alpha, beta = (
                f"{fit[key]['value']:.3f} [{fit[key]['low']:.3f}, {fit[key]['high']:.3f}]" for key in ("alpha", "beta")
            )
            console.print(f"{law:10} {label:28} α {alpha}   β {beta}   peak at KL {fit['peak_kl']}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--lab", type=Path, default=Path("runs/lab"))
    parser.add_argument("--folder", type=Path, default=Path("runs/overoptimization"))
    parser.add_argument("--pairs", type=int, nargs="*", default=[250, 1000, 8000])
    parser.add_argument("--members", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--backbones", nargs="*", choices=["shared", "separate"], default=["shared"], help="of members")
    parser.add_argument("--how", nargs="*", choices=HOWS, default=list(HOWS), help="members' scores become one")
    parser.add_argument("--kl", type=float, nargs="*", default=[0.0, 0.02, 0.1])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100, help="of PPO")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=256, help="completions of each prompt; the largest n")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="overoptimization", help="folder of the JSON and the figure")
    settings = parser.parse_args(arguments)
    console = Console()
    if "rm" in settings.stage:
        train_reward_models(settings, console)
    if "ppo" in settings.stage:
        train_policies(settings, console)
    scores = sample_and_score(settings, console) if {"best_of_n", "fit"} & set(settings.stage) else {}
    if "fit" not in settings.stage:
        return
    results = {
        "command": " ".join(["python", "benchmarks/overoptimization.py", *(arguments or sys.argv[1:])]),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "prompts": settings.prompts,
        "samples": settings.samples,
        "accuracy": {
            proxy.name: RunFolder(settings.folder / proxy.name).read_report_card() for proxy in reward_models(settings)
        },
        "best_of_n": best_of_n(scores, settings.seed),
        "ppo": ppo_curves(settings),
    }
    results["accuracy"] = {
        name: {key: card.get(key) for key in ("accuracy", "accuracy_low", "accuracy_high", "ensemble")}
        for name, card in results["accuracy"].items()
    }
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / f"{settings.name}.json").write_text(json.dumps(_rounded(results), indent=1) + "\n")
    draw(results, settings.out / f"{settings.name}.png")
    print_fits(results, console)


def _rounded(value: Any) -> Any:
    """Return the value with every number at five digits, for a file that people read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()

"""The lab's start model, pairs and reward model, made if they are missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf.api.training import run_reward_model, run_train
from rlhf.config.load import load_reward_model, load_train
from rlhf.config.sections import SamplingConfig
from rlhf.errors import ConfigError
from rlhf.factory.reward_card import score_gaps
from rlhf.factory.sampler import Completer
from rlhf.lab.build import LabSpec, lab_config, lab_key, resolve_lab_paths
from rlhf.lab.gold import expected_accuracy
from rlhf.lab.preferences import PairsFile, gold_gaps, write_pairs
from rlhf.lab.world import Split
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.run_folder import write_atomically
from rlhf.tracking.view import View

LABEL_TEMPERATURE = 0.8  # of the pairs' Bradley-Terry label noise, in units of gold
PAIRS: dict[Split, int] = {"train": 8000, "eval": 1000}  # prompts, two completions each
RECORD = "lab.json"  # the seed and the version of the lab that a folder was made with


def prepare_lab(
    folder: Path, *, seed: int, view: View | None = None, of: int = 3, reward_model: bool = True
) -> PairsFile | None:
    """Run the stages before any algorithm, into sft/, preferences/ and rm/ of `folder`; finished stages are skipped.

    Args:
        view: shows the stages; None shows nothing.
        of: how many stages the caller has in all, for the headings.

    Returns:
        The held-out pairs; None if a stage was interrupted and saved.

    Raises:
        ConfigError: the folder was made with another seed, or by another version of the lab.
    """
    view = view or View()
    check_lab_folder(folder, seed=seed, view=view)
    seeded = [f"run.seed={seed}"]
    view.heading(f"1/{of}  SFT: a tiny Llama learns to write reviews")
    sft = resolve_lab_paths(load_train(lab_config("sft"), [*seeded, f"run.out_dir={folder / 'sft'}"]))
    if not run_train(sft, view):
        return None
    view.heading(f"2/{of}  preference pairs: two completions a prompt, ranked with noise")
    held_out = make_pairs(folder, sft.sampling, seed, view)
    if not reward_model:
        return held_out
    view.heading(f"3/{of}  reward model")
    rm = resolve_lab_paths(load_reward_model(lab_config("reward_model"), [*seeded, *stage_paths(folder)["rm"]]))
    return held_out if run_reward_model(rm, view) else None


def check_lab_folder(folder: Path, *, seed: int, view: View) -> None:
    """Check that `folder` belongs to this seed and version of the lab; record both in lab.json if it is new.

    A folder without lab.json that already holds a start model is used as it is, with a warning.

    Raises:
        ConfigError: the folder was made with another seed, or by another version of the lab's code.
    """
    path, expected = folder / RECORD, {"seed": seed, "lab": lab_key(LabSpec())}
    if not path.is_file():
        if (folder / "sft").exists():
            view.warning(f"{folder} has no {RECORD}, so its seed and the version it was made by are not checked")
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


def make_pairs(folder: Path, sampling: SamplingConfig, seed: int, view: View) -> PairsFile:
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
    view.note(
        f"{train.pairs} pairs to train on, {held_out.pairs} held out; "
        f"best possible accuracy on the held-out labels {held_out.best_accuracy:.3f}"
    )
    return held_out


def rm_accuracy(folder: Path) -> float:
    """Compute the reward model's accuracy on the held-out pairs, in expectation over the noise of their labels."""
    config = resolve_lab_paths(load_reward_model(folder / "rm" / "config.yaml", []))
    texts, gaps = score_gaps(config, str(folder / "rm"))
    rows = [{"prompt": str(text.prompt), "chosen": text.chosen, "rejected": text.rejected} for text in texts]
    return expected_accuracy(gaps, gold_gaps(rows), LABEL_TEMPERATURE)


def stage_paths(folder: Path) -> dict[str, list[str]]:
    """Return the overrides by which a stage finds the results of the earlier ones, over its file's settings."""
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

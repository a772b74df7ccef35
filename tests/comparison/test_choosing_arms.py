"""Arms that bring their own sizes over a PPO base; the cost of arms that learn from a choice of their samples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import word_rewards
from cases import GROUPS, compare_tree, compared, here, plan_of

from rlhf.comparison.aggregate import read_cells
from rlhf.comparison.costs import COSTS, Sizes, online_flops
from rlhf.comparison.plan import ensure_owner
from rlhf.config.load import unread_warnings
from rlhf.models.backbone import load_causal_lm
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import read_jsonl

NONE: dict[str, Any] = {"ppo": None, "grpo": None, "dpo": None, "best_of_n": None}


@pytest.mark.parametrize(
    "preset, size", [("a2c", 1), ("reinforce", 1), ("remax", 1), ("online_dpo", 2), ("rejection_sampling", 8)]
)
def test_naming_the_preset_is_enough(tmp_path: Path, preset: str, size: int) -> None:
    """The base is PPO's, with two epochs of two minibatches and one completion a prompt."""
    arms = {preset: {"algorithm": {"preset": preset}}, "own": {"algorithm": {"preset": preset}, "sampling": {}}}
    plan = plan_of(compare_tree(tmp_path, arms=arms, budget={"completions": 1280}))
    for arm in arms:
        train = plan.of(arm)[0].config.train
        assert (train.batch.epochs, train.batch.minibatches) == (1, 1)
        assert train.sampling.completions_per_prompt == size
        assert train.schedule.steps == 1280 // (16 * size)
        assert unread_warnings(train) == []
    assert plan.of("ppo")[0].config.train.batch.epochs == 2


def test_what_an_arm_says_itself_goes_before_the_sizes_of_its_preset(tmp_path: Path) -> None:
    arm = {"algorithm": {"preset": "online_dpo"}, **GROUPS}
    train = plan_of(compare_tree(tmp_path, arms={"online_dpo": arm})).of("online_dpo")[0].config.train
    assert (train.sampling.completions_per_prompt, train.batch.prompts_per_step) == (4, 4)
    assert train.batch.minibatches == 1


ARMS = {
    "online_dpo": {"algorithm": {"preset": "online_dpo"}, **GROUPS},
    "rejection_sampling": {"algorithm": {"preset": "rejection_sampling"}, **GROUPS},
}


@dataclass(frozen=True)
class Continued:
    """A comparison that went on after the first of its arms."""

    path: Path
    tree: dict[str, Any]
    first_metrics: bytes  # of the arm that had been done before


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Continued:
    path = tmp_path_factory.mktemp("choosing")
    tree = compare_tree(path, seeds=[0], arms=NONE | ARMS)
    cell = plan_of(tree).of("online_dpo")[0]
    ensure_owner(cell)
    assert here(cell) == "done"
    first_metrics = (cell.folder / "metrics.jsonl").read_bytes()
    assert compared(tree)
    return Continued(path, tree, first_metrics)


def test_costs_count_what_was_sampled_and_what_was_learned_from(continued: Continued) -> None:
    tmp_path, tree = continued.path, continued.tree
    assert [cell.status for cell in read_cells(plan_of(tree))] == ["done"] * 3
    size = sum(p.numel() for p in load_causal_lm(str(tmp_path / "model")).parameters())
    for arm in ARMS:
        run = tmp_path / "compare" / arm / "seed-0"
        rows = list(read_jsonl(run / COSTS))
        metrics = [row for row in RunFolder(run).read_metrics() if row["step"] > 0]
        trained = [row["completion/trained_tokens"] for row in metrics]
        assert [row["completions"] for row in rows] == [16, 32, 48, 64]  # all that was sampled
        assert rows[-1]["generated_tokens"] == sum(round(16 * row["completion/length"]) for row in metrics)
        assert rows[-1]["trained_tokens"] == sum(trained)
        sizes = Sizes(policy=size, reference=size)
        update, rest = 6 * size * trained[0], rows[0]["flops"] - 6 * size * trained[0]
        tokens = rest / (online_flops(sizes, tokens=1, passes=0.0))
        prompts = tokens - 16 * metrics[0]["completion/length"]
        assert update > 0
        assert prompts == pytest.approx(round(prompts), abs=1e-6)
        assert 2 * 16 <= round(prompts) <= 4 * 16  # of 2 to 4 tokens, sampled, scored and annotated with all 16 rows
        assert trained[0] < 0.7 * tokens  # two of four, or one of four, are learned from


def test_a_comparison_of_these_arms_continues_where_it_stopped(continued: Continued) -> None:
    """Finished cells are not run again, and the page is made of both."""
    cell = plan_of(continued.tree).of("online_dpo")[0]
    assert (cell.folder / "metrics.jsonl").read_bytes() == continued.first_metrics
    assert (continued.path / "compare" / "report.html").is_file()


def test_scores_that_gdpo_standardizes_in_training_are_sums_in_best_of_n(tmp_path: Path) -> None:
    """Its first sample of each prompt is one of the start's answers: both are scored on one scale."""
    sources = [{"type": "function", "target": f"{word_rewards.__file__}:count_{what}"} for what in ("good", "words")]
    gdpo = {"type": "ensemble", "how": "gdpo", "weights": [1.0, 1.0], "sources": sources}
    tree = compare_tree(tmp_path, seeds=[0], evaluations=1, reward_source=gdpo)
    centered = {"preset": "grpo", "advantage": {"baseline": "centered"}}
    tree["arms"] = {
        "grpo": {"algorithm": centered, "sampling": {"completions_per_prompt": 4}, "batch": {"prompts_per_step": 4}},
        "best_of_n": {"type": "best_of_n", "n": 2, "samples": 4},
    }
    assert compared(tree)
    judged = json.loads((tmp_path / "compare" / "best_of_n" / "seed-0" / "judged.json").read_text(encoding="utf-8"))
    for row in judged["rows"]:
        words = row["completion"].split()
        share = (words.count("good") - words.count("bad")) / max(len(words), 1)
        assert row["proxy"] == pytest.approx(share + words.count("good"))

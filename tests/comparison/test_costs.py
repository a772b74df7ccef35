"""The costs of an arm count every token that its policy wrote, by an own count of what its sampler returned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import WORDS, brief_tree, colored_prompts, offline_tree, online, quiet, write_rows

from rlhf.comparison.costs import COSTS, CostTracker, count_parameters
from rlhf.config.compare import BudgetConfig
from rlhf.config.files import merge
from rlhf.config.load import train_config
from rlhf.factory.offline import build_offline
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import read_jsonl
from rlhf.training.offline import LabelledLoss, train_offline
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun
from rlhf.types import Completions, Demonstrations, Prompts

EOS = WORDS.index("<eos>")
GAMES = Path(__file__).parents[1] / "environments" / "word_games.py"
GROUPS = {"sampling": {"completions_per_prompt": 4}, "batch": {"prompts_per_step": 4}}
DAPO = {"preset": "grpo", "drop_uniform_groups": True, "refill_rounds": 2}
HINTED = {"preset": "grpo", "rescue": {"hints": [{"column": "hint"}], "solved_above": 0.3}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scored in parts": {"overlap": {"reward_parts": 3}},
    "greedy baselines": {"algorithm": {"preset": "remax"}},
    "refilled groups": {"algorithm": DAPO, "sampling": {"completions_per_prompt": 2, "max_new_tokens": 2}},
    "hinted groups": {"algorithm": HINTED, **GROUPS},
    "chosen completions": {"algorithm": {"preset": "rejection_sampling"}, **GROUPS},
    "episodes": {"reward": None, "environment": {"target": f"{GAMES}:Colors", "max_turns": 3}},
    "failed episodes": {
        "reward": None,
        "environment": {"target": f"{GAMES}:Broken", "max_turns": 3, "kwargs": {"how": "raise"}},
    },
}


def recorded(run: OnlineRun) -> list[int]:
    """Record the length, up to and including EOS, of each completion that the policy writes, or action of episodes."""
    sampler = run.sampler if run.episodes is None else run.episodes.sampler
    sample, lengths = sampler.sample, list[int]()

    def recording(prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        completions = sample(prompts, key=key, group_size=group_size, greedy=greedy)
        width = completions.completion_ids.shape[1]
        lengths.extend(ids.index(EOS) + 1 if EOS in ids else width for ids in completions.completion_ids.tolist())
        return completions

    sampler.sample = recording  # type: ignore[method-assign]
    return lengths


def spent(run: OnlineRun, folder: Path) -> list[dict[str, Any]]:
    """Train, and return the costs after each step."""
    run.session.budget = CostTracker(folder, run, run.config, BudgetConfig(completions=10**6))
    train(run)
    run.session.recorder.close()
    return list(read_jsonl(folder / COSTS))


@pytest.mark.parametrize("case", CASES)
def test_every_token_that_the_policy_wrote_is_counted(tmp_path: Path, case: str) -> None:
    hinted = [{"prompt": prompt, "hint": "good"} for prompt in colored_prompts()]
    prompts = {"path": str(write_rows(tmp_path / "hinted.jsonl", hinted))}
    tree = merge(brief_tree(tmp_path, data={"prompts": prompts}, schedule={"steps": 2}), CASES[case])
    run = online({name: section for name, section in tree.items() if section is not None})
    written = recorded(run)
    rows = spent(run, tmp_path / "run")
    assert rows[-1]["generated_tokens"] == sum(written)
    metrics = RunFolder(tmp_path / "run").read_metrics()
    assert sum(row["completion/generated_tokens"] for row in metrics) == sum(written)
    if run.episodes is None:
        assert rows[-1]["completions"] == len(written)
        trained = 2 * run.config.completions_per_step
        assert (len(written) > trained) == (case in ("greedy baselines", "refilled groups", "hinted groups"))


def test_samples_ahead_are_counted_in_their_step(tmp_path: Path) -> None:
    run = online(brief_tree(tmp_path, overlap={"ahead": True}, schedule={"steps": 3}))
    assert run.ahead is not None
    take, written = run.ahead.take, list[int]()

    def recorded_take(step: int) -> Completions:
        completions = take(step)
        written.append(int(completions.completion_mask.sum()))
        return completions

    run.ahead.take = recorded_take  # type: ignore[method-assign]
    rows = spent(run, tmp_path / "run")
    assert [row["generated_tokens"] for row in rows] == [sum(written[: n + 1]) for n in range(3)]


def test_a_skipped_step_counts_what_was_drawn_before_the_nan(tmp_path: Path) -> None:
    """The greedy completions of the second step have a NaN, so its 16 samples and 16 baselines are for nothing."""
    (tmp_path / "rewards.py").write_text(
        "calls = []\ndef score(prompts, completions, references):\n    calls.append(1)\n"
        "    return [float('nan') if len(calls) == 4 else float(len(c)) for c in completions]\n"
    )
    reward = {"source": {"type": "function", "target": f"{tmp_path / 'rewards.py'}:score"}}
    settings = {"algorithm": {"preset": "remax"}, "reward": reward, "schedule": {"steps": 3}}
    run = online(brief_tree(tmp_path, **settings))
    written = recorded(run)
    rows = spent(run, tmp_path / "run")
    assert [row["completions"] for row in rows] == [32, 64, 96]
    assert [row["generated_tokens"] for row in rows] == [sum(written[:n]) for n in (32, 64, 96)]
    sampled = 2 * count_parameters(run.models.policy) * sum(written[32:64])
    assert rows[1]["flops"] == rows[0]["flops"] + sampled < rows[2]["flops"]


def test_costs_go_on_from_lines_of_an_earlier_version(tmp_path: Path) -> None:
    """The sums so far stay as they were written, and the next step adds its exact tokens."""
    tree = brief_tree(tmp_path, algorithm={"preset": "remax"}, checkpoint={"every": 1})
    spent(online(tree, "schedule.steps=1"), tmp_path / "run")
    (line,) = read_jsonl(tmp_path / "run" / COSTS)
    run = online(tree, "schedule.steps=2")
    written = recorded(run)
    before, after = spent(run, tmp_path / "run")
    assert before == line
    assert after["generated_tokens"] == line["generated_tokens"] + sum(written)


def test_the_passes_of_ktos_baseline_are_costs(tmp_path: Path) -> None:
    """Policy and reference read mismatched completions, as many tokens as the policy trains on."""
    changes = {"data": {"eval_preferences": None, "eval_prompts": None}, "eval": {"every": 0}, "schedule": {"steps": 2}}
    config = train_config(offline_tree(tmp_path, "kto", **changes))
    run = build_offline(config, quiet())
    assert isinstance(run.loss, LabelledLoss)
    models = run.loss.models
    read, tokens = {True: 0, False: 0}, models.policy_tokens  # with gradient and without

    def counted(rows: Demonstrations) -> Any:
        read[torch.is_grad_enabled()] += int(rows.prompt_mask.sum() + rows.completion_mask.sum())
        return tokens(rows)

    models.policy_tokens = counted  # type: ignore[method-assign, assignment]
    run.session.budget = CostTracker(tmp_path / "run", run, config, BudgetConfig(completions=10**6))
    train_offline(run)
    run.session.recorder.close()
    line = list(read_jsonl(tmp_path / "run" / COSTS))[-1]
    assert read[False] == read[True] == line["trained_tokens"] > 0
    assert line["flops"] == count_parameters(models.policy) * (8 * read[True] + 4 * read[False])


def test_demonstrations_mixed_into_an_update_are_costs(tmp_path: Path) -> None:
    """PPO-ptx: the policy reads data.sft forward and backward in every optimizer step, as an SFT arm does."""
    sft = {"path": str(write_rows(tmp_path / "sft.jsonl", [{"prompt": "red one", "completion": " good"}] * 8))}
    tree = brief_tree(tmp_path, data={"sft": sft}, schedule={"steps": 2})
    (plain_folder := tmp_path / "plain").mkdir()
    plain = spent(online(tree, f"run.out_dir={plain_folder}"), plain_folder)
    run = online(tree, "algorithm.ptx_coef=1")
    assert run.ptx is not None
    draw, mixed = run.ptx, list[int]()

    def drawn(step: int, update: int) -> Demonstrations:
        rows = draw(step, update)
        mixed.append(int(rows.prompt_mask.sum() + rows.completion_mask.sum()))
        return rows

    rows = spent(replace(run, ptx=drawn), tmp_path / "run")
    first, size = len(mixed) // 2, count_parameters(run.models.policy)
    assert rows[0]["generated_tokens"] == plain[0]["generated_tokens"]
    assert rows[0]["trained_tokens"] == plain[0]["trained_tokens"] + sum(mixed[:first])
    assert rows[0]["flops"] == plain[0]["flops"] + 6 * size * sum(mixed[:first])

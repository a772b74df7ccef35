"""A judge that only watches: its figures on the training reward, the completions that it reads, and its failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import word_rewards
from runs import ppo_tree, trained
from tiny_models import completions_of

from rlhf.config.files import merge
from rlhf.errors import RewardError
from rlhf.training.watch import WatchingJudge, watch_metrics
from rlhf.types import Completions, Scores


def test_mean_gap_and_correlation_by_hand() -> None:
    proxy, watched = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.0, 1.0])
    metrics = {name: mean.value for name, mean in watch_metrics(proxy, watched).items()}
    assert metrics == pytest.approx({"watch/score": 1.0, "watch/gap": 1.0, "watch/correlation": -0.5})
    assert set(watch_metrics(proxy, torch.ones(3))) == {"watch/score", "watch/gap"}


def test_a_completion_without_a_training_score_is_in_no_comparison() -> None:
    proxy, watched = torch.tensor([1.0, torch.nan, 2.0, 3.0]), torch.tensor([2.0, 5.0, 0.0, 1.0])
    metrics = {name: mean.value for name, mean in watch_metrics(proxy, watched).items()}
    assert metrics == pytest.approx({"watch/score": 2.0, "watch/gap": 1.0, "watch/correlation": -0.5})


BATCH = completions_of([[5]] * 20, [[number % 10 + 3] for number in range(20)])


class Reader:
    """Scores by the completion's token, and remembers its requests."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, completions: Completions) -> Scores:
        assert completions.group_size == 1
        tokens = completions.completion_ids[:, 0]
        self.seen.append(tokens.tolist())
        return Scores(values=tokens.float(), parts={})


def judge(source: object, **settings: int) -> tuple[WatchingJudge, list[str]]:
    warnings: list[str] = []
    options = {"rows": 6, "every": 1, "seed": 3} | settings
    return WatchingJudge(source=source, warn=warnings.append, **options), warnings  # type: ignore[arg-type]


def test_an_episode_whose_environment_failed_is_not_watched() -> None:
    actions = BATCH.completion_mask & (torch.arange(20) % 10 != 3)[:, None]
    reader = Reader()
    watching, _ = judge(reader, rows=20)
    watching(replace(BATCH, episode_actions=actions), Scores(values=torch.zeros(20), parts={}), 4)
    assert sorted(reader.seen[0]) == sorted([token for token in range(3, 13) if token != 6] * 2)


def test_it_compares_the_same_rows_before_shaping() -> None:
    tokens = BATCH.completion_ids[:, 0].float()
    scores = Scores(values=torch.zeros(20), parts={"raw": tokens + 2.0})
    reader = Reader()
    watching, _ = judge(reader)
    metrics = watching(BATCH, scores, 4).values()
    assert len(reader.seen[0]) == 6
    assert metrics["watch/gap"] == pytest.approx(2.0)
    assert metrics["watch/correlation"] == pytest.approx(1.0)
    assert metrics["watch/failed"] == 0.0
    watching(BATCH, scores, 4)
    watching(BATCH, scores, 5)
    assert reader.seen[0] == reader.seen[1] != reader.seen[2]


def test_scores_that_gdpo_standardizes_are_compared_by_their_sum(tmp_path: Path) -> None:
    """The judge is the sum of the same sources: nothing is between the two."""
    sources = [{"type": "function", "target": f"{word_rewards.__file__}:count_{what}"} for what in ("good", "words")]
    tree = ppo_tree(tmp_path, eval={"every": 0}, schedule={"steps": 2})
    del tree["critic"]
    tree["reward"] = {
        "source": {"type": "ensemble", "how": "gdpo", "sources": sources},
        "watch": {"source": {"type": "ensemble", "how": "sum", "sources": sources}},
    }
    tree["algorithm"] = {"preset": "grpo", "advantage": {"baseline": "centered"}}
    trained(merge(tree, {"sampling": {"completions_per_prompt": 4}}))
    text = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    gaps = [line["watch/gap"] for line in lines if "watch/gap" in line]
    assert gaps == pytest.approx([0.0, 0.0], abs=1e-6)


def test_it_looks_at_every_so_many_steps() -> None:
    reader = Reader()
    watching, _ = judge(reader, every=3, rows=100)
    for step in range(1, 7):
        metrics = watching(BATCH, Scores(values=torch.zeros(20), parts={}), step)
        assert ("watch/score" in metrics) == (step in (3, 6))
    assert [len(rows) for rows in reader.seen] == [20, 20]


def test_its_failure_is_a_warning_and_not_the_end_of_the_run() -> None:
    def fails(completions: Completions) -> Scores:
        raise RewardError("nobody answered")

    watching, warnings = judge(fails)
    metrics = watching(BATCH, Scores(values=torch.zeros(20), parts={}), 7).values()
    assert metrics == {"watch/failed": 1.0}
    assert warnings == ["warning: reward.watch could not score step 7: nobody answered"]

"""Scoring while sampling and sampling while updating: the same numbers, or the numbers of one step before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from runs import brief_tree, largest_difference, online, ppo_tree, trained, weights
from tiny_models import ragged

from rlhf.config.load import train_config
from rlhf.errors import ConfigError, RewardError, SamplingError
from rlhf.training.collect import sampling_key
from rlhf.training.online import train
from rlhf.training.overlap import CompletionPrefetcher, sample_and_score_in_parts
from rlhf.training.session import TrainState
from rlhf.types import Completions, Prompts, Scores

PATIENCE_S = 60.0


def files(folder: Path) -> list[bytes]:
    return [(folder / "run" / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")]


def lengths(completions: Completions) -> Scores:
    values = completions.completion_mask.sum(dim=1).float()
    return Scores(values=values, parts={"half": values / 2})


def test_a_part_is_scored_while_the_next_is_sampled() -> None:
    batch, second_begun = ragged(), threading.Event()
    seen: list[int] = []

    def sample(prompts: Prompts) -> Completions:
        if prompts.row_ids[0] > 0:
            second_begun.set()
        return batch.rows(prompts.row_ids)

    def reward(completions: Completions) -> Scores:
        assert second_begun.wait(PATIENCE_S), "it was not sampled meanwhile"
        assert not torch.is_grad_enabled()
        seen.append(len(completions))
        return lengths(completions)

    completions, scores = sample_and_score_in_parts(batch, sample, reward, parts=2)
    assert seen == [2, 2]
    assert torch.equal(completions.completion_ids, batch.completion_ids)
    assert torch.equal(scores.values, lengths(batch).values)
    assert torch.equal(scores.parts["half"], lengths(batch).parts["half"])


def test_an_error_of_the_reward_is_the_step_s() -> None:
    def fail(_: Completions) -> Scores:
        raise RewardError("no scores")

    batch = ragged()
    with pytest.raises(RewardError, match="no scores"):
        sample_and_score_in_parts(batch, lambda prompts: batch.rows(prompts.row_ids), fail, parts=3)


def test_a_run_scored_in_parts_is_the_run(tmp_path: Path) -> None:
    for name in ("plain", "parts"):
        (tmp_path / name).mkdir()
    two = {"schedule": {"steps": 2}}
    plain = trained(ppo_tree(tmp_path / "plain", **two))
    tree = ppo_tree(tmp_path / "parts", policy={"model": str(tmp_path / "plain" / "model")}, **two)
    parts = trained(tree, "overlap.reward_parts=3")
    assert largest_difference(weights(plain.models.policy), weights(parts.models.policy)) == 0.0
    assert files(tmp_path / "plain") == files(tmp_path / "parts")


def test_a_step_is_drawn_by_the_policy_before_the_last_update(tmp_path: Path) -> None:
    run = online(brief_tree(tmp_path, overlap={"ahead": True}))
    assert run.ahead is not None
    first = [run.sampler.sample(run.prompts(step), key=sampling_key(run.config, step), group_size=1) for step in (1, 2)]
    taken: list[Completions] = []
    take = run.ahead.take

    third: list[Completions] = []

    def noted(step: int) -> Completions:
        if step == 2:  # after one update: the samples of step 3 are drawn by the present weights
            key = sampling_key(run.config, 3)
            third.append(run.sampler.sample(run.prompts(3), key=key, group_size=1))
        taken.append(take(step))
        return taken[-1]

    run.ahead.take = noted  # type: ignore[method-assign]
    train(run)
    for step in (0, 1):  # both by the weights at the start
        assert torch.equal(taken[step].completion_ids, first[step].completion_ids)
        assert torch.allclose(taken[step].sampler_logprobs, first[step].sampler_logprobs, atol=1e-6)
    assert torch.equal(taken[2].completion_ids, third[0].completion_ids)
    again = run.sampler.sample(run.prompts(2), key=sampling_key(run.config, 2), group_size=1)
    assert not torch.equal(again.completion_ids, taken[1].completion_ids)  # the weights of the end draw others
    assert len(taken) == 4


@pytest.mark.parametrize("behind", quick([2, 4], [2]))
def test_a_step_is_drawn_by_the_policy_of_so_many_updates_before(tmp_path: Path, behind: int) -> None:
    tree = brief_tree(tmp_path, overlap={"ahead": True, "ahead_steps": behind}, schedule={"steps": 7})
    run = online(tree)
    assert run.ahead is not None
    before: list[dict[str, torch.Tensor]] = []
    taken: list[Completions] = []
    ages: list[int] = []
    take = run.ahead.take

    def noted(step: int) -> Completions:
        before.append(weights(run.models.policy))
        taken.append(take(step))
        assert run.ahead is not None
        ages.append(run.ahead.age(step))
        return taken[-1]

    run.ahead.take = noted  # type: ignore[method-assign]
    train(run)
    assert ages == [min(step, behind) for step in range(7)]
    assert not torch.equal(before[0]["lm_head.weight"], before[6]["lm_head.weight"])
    for step in range(1, 8):
        run.models.policy.load_state_dict(before[step - 1 - ages[step - 1]])
        key = sampling_key(run.config, step)
        again = run.sampler.sample(run.prompts(step), key=key, group_size=1)
        assert torch.equal(again.completion_ids, taken[step - 1].completion_ids)
        assert torch.allclose(again.sampler_logprobs, taken[step - 1].sampler_logprobs, atol=1e-6)


def test_a_slow_sampler_changes_nothing() -> None:
    """Weights that wait for the sampler are kept apart: a draw uses the weights of its beginning."""
    policy, copy, release = [0], [0], threading.Event()
    drawn: dict[int, int] = {}

    def draw(step: int) -> Completions:
        if step > 1:
            assert release.wait(PATIENCE_S)
        drawn[step] = copy[0]
        return ragged()

    def keep() -> Callable[[], None]:
        kept = policy[0]
        return lambda: copy.__setitem__(0, kept)

    ahead = CompletionPrefetcher(draw, lambda: copy.__setitem__(0, policy[0]), last_step=5, behind=3, keep=keep)
    ahead.take(1)  # 2 to 4 wait
    policy[0] = 1
    waiting = threading.Timer(0.2, release.set)
    waiting.start()
    for step in range(2, 6):
        ahead.take(step)
        policy[0] = step
    assert drawn == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1}


def test_nothing_more_is_begun_after_a_draw_that_failed() -> None:
    """Each would wait for a server as long as the first, while the checkpoint waits for them."""
    begun: list[int] = []
    has_failed = threading.Event()

    def draw(step: int) -> Completions:
        begun.append(step)
        if step == 2:
            raise SamplingError("no server answers")
        if step == 3:
            has_failed.wait(PATIENCE_S)
        return ragged()

    ahead = CompletionPrefetcher(draw, lambda: None, last_step=9, behind=3, keep=lambda: lambda: None)
    ahead.take(1)
    with pytest.raises(SamplingError, match="no server"):
        ahead.take(2)
    has_failed.set()
    saved = ahead.saved(TrainState(step=1)).get("drawn", [])
    assert [drawn["step"] for drawn in saved] in ([], [3])
    assert 4 not in begun


@pytest.mark.parametrize("stop", ["error", "signal"])
def test_a_stop_without_samples_of_older_weights_notes_that_the_numbers_change(stop: str) -> None:
    """No checkpoint holds the weights that were to draw them: it draws by its own when the run continues."""
    notes: list[str] = []

    def draw(step: int) -> Completions:
        if step == 3:
            raise SamplingError("no server answers")
        return ragged()

    ahead = CompletionPrefetcher(draw, lambda: None, last_step=9, note=notes.append)
    ahead.take(1)
    ahead.take(2)
    assert "drawn" in ahead.saved(TrainState(step=1))
    assert notes == []
    if stop == "error":
        with pytest.raises(SamplingError, match="no server"):
            ahead.take(3)
    assert ahead.saved(TrainState(step=2)) == {}
    (note,) = notes
    assert "no samples of step 3 by the weights of step 1" in note
    assert "by the weights of step 2" in note
    assert "other numbers than without the stop" in note


def test_a_draw_by_the_newest_weights_that_failed_is_the_same_after_a_stop() -> None:
    notes: list[str] = []

    def draw(step: int) -> Completions:
        raise SamplingError("no server answers")

    ahead = CompletionPrefetcher(draw, lambda: None, last_step=9, note=notes.append)
    with pytest.raises(SamplingError, match="no server"):
        ahead.take(3)
    assert ahead.saved(TrainState(step=2)) == {}
    assert notes == []


def test_a_policy_that_stands_still_is_never_behind(tmp_path: Path) -> None:
    still = {"policy": {"lr": 1e-30}, "critic": {"lr": 1e-30}, "schedule": {"steps": 3}, "eval": {"every": 3}}
    for name in ("plain", "ahead"):
        (tmp_path / name).mkdir()
    trained(ppo_tree(tmp_path / "plain", **still))
    tree = ppo_tree(tmp_path / "ahead", **still)
    tree["policy"]["model"] = str(tmp_path / "plain" / "model")
    trained(tree, "overlap.ahead=true", "overlap.ratio_cap=1000.0")
    plain, ahead = files(tmp_path / "plain")[1], files(tmp_path / "ahead")[1]
    assert plain.count(b"train") == ahead.count(b"train") > 0
    assert [line for line in plain.splitlines() if b"eval" in line] == [
        line for line in ahead.splitlines() if b"eval" in line
    ]


@pytest.mark.parametrize("behind", quick([1, 3], [3]))
def test_a_run_that_its_reward_stopped_goes_on_with_the_same_completions(tmp_path: Path, behind: int) -> None:
    """Samples of the step that had no scores are kept: the weights they were drawn by are gone."""
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    stale = {"overlap": {"ahead": True, "ahead_steps": behind}, "schedule": {"steps": 6}}
    whole = trained(brief_tree(tmp_path / "whole", **stale))
    tree = brief_tree(tmp_path / "stopped", **stale)
    tree["policy"]["model"] = str(tmp_path / "whole" / "model")
    run = online(tree)
    reward, left = run.reward.source, [4]  # type: ignore[attr-defined]

    def dies(completions: Completions) -> Scores:
        left[0] -= 1
        if not left[0]:
            raise RewardError("the server is gone")
        scores: Scores = reward(completions)
        return scores

    run.reward.source = dies  # type: ignore[attr-defined]
    with pytest.raises(RewardError):
        train(run)
    stopped_at = run.session.state.step
    assert stopped_at == 3  # of which there is no checkpoint yet
    run.session.recorder.close()
    resumed = trained(tree)
    assert largest_difference(weights(whole.models.policy), weights(resumed.models.policy)) == 0.0
    assert files(tmp_path / "whole") == files(tmp_path / "stopped")


def test_a_shared_critic_needs_the_trainers_pass(tmp_path: Path) -> None:
    tree = ppo_tree(tmp_path, critic={"shared": True}, sampling={"old_log_probs": "sampler"})
    with pytest.raises(ConfigError, match="old_log_probs=auto"):
        train_config(tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"preset": "remax"}, "batch": {"epochs": 1, "minibatches": 1}}, "incompatible with .* remax"),
        (
            {"algorithm": {"preset": "dapo", "refill_rounds": 2}, "sampling": {"completions_per_prompt": 4}},
            "refill_rounds=0",
        ),
        ({"overlap": {"reward_parts": 2}}, "reward_parts=1"),
        ({"sampling": {"old_log_probs": "sampler"}}, "old_log_probs=auto"),
        ({"overlap": {"ahead": False, "ahead_steps": 2}}, "ahead_steps is read with overlap.ahead=true"),
        ({"overlap": {"ahead_steps": 5}}, "less than or equal to 4"),
    ],
)
def test_what_cannot_be_drawn_ahead_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tree = ppo_tree(tmp_path, **changes)
    tree["overlap"] = {"ahead": True, **tree.get("overlap", {})}
    with pytest.raises(ConfigError, match=message):
        train_config(tree)

"""NaN and Inf: the step is not taken, counted and noted; after enough of them in a row the run stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import brief_tree, count_good, largest_difference, offline, offline_tree, online, ppo_tree, trained, weights

from rlhf.cli import main
from rlhf.config.files import merge
from rlhf.errors import DivergenceError, NonFiniteScores, RewardError
from rlhf.training.offline import train_offline
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun


def poison(run: OnlineRun, steps: set[int], value: float = math.nan, name: str = "policy") -> None:
    """Spoil this term of the loss in these steps."""
    term = getattr(run.objective, f"{name}_term")

    def spoiled(*args: Any) -> Any:
        terms, observed = term(*args)
        if run.session.state.step + 1 in steps:
            terms[name] = terms[name] * value
        return terms, observed

    setattr(run.objective, f"{name}_term", spoiled)


def notes(run: Any) -> list[str]:
    return [row["text"] for row in run.session.recorder.folder.read_notes()]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_step_is_left_out_counted_and_noted(tmp_path: Path, value: float) -> None:
    run = online(ppo_tree(tmp_path, schedule={"steps": 3}, eval={"every": 0}))
    poison(run, {2}, value)
    before: list[Any] = []
    sample = run.sampler.sample

    def spy(*args: Any, **kwargs: Any) -> Any:
        before.append((run.session.state.step, weights(run.models.policy)))
        return sample(*args, **kwargs)

    run.sampler.sample = spy  # type: ignore[method-assign]
    train(run)
    start = next(w for step, w in before if step == 1)
    after = next(w for step, w in before if step == 2)
    assert largest_difference(start, after) == 0.0
    counts = [row["skipped/nonfinite"] for row in run.session.recorder.folder.read_metrics()[1:]]
    assert counts == [0.0, 4.0, 4.0]  # 2 epochs of 2 minibatches
    assert [text for text in notes(run) if "not taken" in text] == [
        "step 2: a NaN or Inf in the loss or a gradient: the step was not taken"
    ]
    assert run.session.state.bad_in_a_row == 0


def test_too_many_in_a_row_stop_the_run_at_the_last_good_checkpoint(tmp_path: Path) -> None:
    unevaluated = {"data": {"eval_prompts": None}, "checkpoint": {"every": 1}}
    whole = trained(ppo_tree(tmp_path, run={"out_dir": str(tmp_path / "whole")}, **unevaluated))
    tree = ppo_tree(tmp_path, schedule={"max_bad_steps": 7}, **unevaluated)
    run = online(tree)
    poison(run, {3, 4})  # 8 optimizer steps
    told = r"7 times in a row .*step 4\. .* The last good checkpoint is .*step-000002: .* continues from there"
    with pytest.raises(DivergenceError, match=told):
        train(run)
    run.session.recorder.close()
    assert [path.name for path in run.session.checkpoints.all()] == ["step-000001", "step-000002"]
    healed = trained(tree)  # the fault is gone: the run equals one without it
    assert largest_difference(weights(whole.models.policy), weights(healed.models.policy)) == 0.0
    a, b = (tmp_path / name / "metrics.jsonl" for name in ("whole", "run"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("warmup, steps", [(0, 2), (1, 2), (1, 1)])
def test_a_bad_value_is_counted_with_the_policy_and_without_it(tmp_path: Path, warmup: int, steps: int) -> None:
    """Each of 2 epochs of 2 minibatches once, whether the critic trains alone in the first step or not."""
    settings = {"critic": {"warmup_steps": warmup}, "schedule": {"steps": steps}, "eval": {"every": 0}}
    run = online(ppo_tree(tmp_path, **settings), "guard.allow=[critic-warmup-covers-the-run]")
    poison(run, {1}, name="value")
    train(run)
    counts = [row["skipped/nonfinite"] for row in run.session.recorder.folder.read_metrics()[1:]]
    assert counts == [4.0] * steps
    assert run.session.state.bad_in_a_row == (4 if steps == 1 else 0)


def test_a_good_step_ends_the_row(tmp_path: Path) -> None:
    run = online(ppo_tree(tmp_path, schedule={"max_bad_steps": 5}, data={"eval_prompts": None}))
    poison(run, {1, 3})  # 4 and 4, a good one between them
    train(run)
    assert run.session.state.skipped == 8


def test_the_row_is_counted_on_over_an_interruption(tmp_path: Path) -> None:
    tree = ppo_tree(tmp_path, schedule={"max_bad_steps": 7}, checkpoint={"every": 0}, data={"eval_prompts": None})
    run = online(tree)
    poison(run, {2, 3, 4})
    steps = run.session.steps()
    run.session.total_steps = 2  # stops after step 2, saved with a row of 4
    train(run)
    steps.close()
    run.session.recorder.close()
    again = online(tree)
    assert again.session.state.bad_in_a_row == 4
    poison(again, {3, 4})
    with pytest.raises(DivergenceError, match="in step 3"):
        train(again)


def test_an_offline_run_stops_too(tmp_path: Path) -> None:
    run = offline(offline_tree(tmp_path, "dpo", schedule={"max_bad_steps": 2}))
    with torch.no_grad():
        for parameter in run.trained.parameters:
            parameter.fill_(math.nan)
    with pytest.raises(DivergenceError, match=r"2 times in a row .*There is no checkpoint yet"):
        train_offline(run)


calls: list[int] = []
BAD: set[int] = set()


def sometimes_nan(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """NaN for the last completion in the calls of BAD, counted from 1."""
    calls.append(1)
    scores = count_good(prompts=prompts, completions=completions, references=references)
    return [*scores[:-1], math.nan] if len(calls) in BAD else scores


def odd_tree(folder: Path, bad: set[int], **changes: Any) -> dict[str, Any]:
    calls.clear()
    BAD.clear()
    BAD.update(bad)
    source = {"source": {"type": "function", "target": f"{__name__}:sometimes_nan"}}
    return brief_tree(folder, **merge({"reward": source}, changes))


def test_a_step_without_scores_is_left_out_and_the_completion_named(tmp_path: Path) -> None:
    run = trained(odd_tree(tmp_path, {2}))
    rows = run.session.recorder.folder.read_metrics()
    assert [row["skipped/unscored"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert "score/mean" not in rows[1]
    assert [row["completion/count"] for row in rows] == [16.0, 32.0, 48.0, 64.0]
    assert any(text.startswith("step 2: ") and "for the completion '" in text for text in notes(run))
    assert len(calls) == 4


def test_scores_that_stay_bad_stop_the_run(tmp_path: Path) -> None:
    run = online(odd_tree(tmp_path, {2, 3, 4}, schedule={"max_bad_steps": 3}))
    with pytest.raises(DivergenceError, match=r"for the completion '.*3 times in a row"):
        train(run)


def test_a_step_without_a_pair_ends_the_row_and_is_saved(tmp_path: Path) -> None:
    """Scores that are all the same give no pair, so no optimizer step can reset the count."""
    source = {"source": {"type": "function", "target": f"{__name__}:tied_or_nan"}}
    tree = odd_tree(
        tmp_path,
        {2, 4, 6},
        reward=source,
        algorithm={"preset": "online_dpo"},
        sampling={"completions_per_prompt": 2},
        schedule={"steps": 7, "max_bad_steps": 3},
        checkpoint={"every": 1, "keep": 9},
    )
    del tree["critic"]
    run = trained(tree)
    assert run.session.state.unscored == 3
    names = [path.name for path in run.session.checkpoints.all()]
    assert names == ["step-000001", "step-000003", "step-000005", "step-000007"]


def tied_or_nan(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    """NaN in the calls of BAD, and 1 for every completion in the others."""
    calls.append(1)
    return [math.nan if len(calls) in BAD else 1.0] * len(completions)


def test_a_source_that_is_bad_from_the_start_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteScores, match="for the completion"):
        train(online(odd_tree(tmp_path, {1})))
    assert len(calls) == 1


def test_an_evaluation_without_scores_is_left_out(tmp_path: Path) -> None:
    evaluated = {"data": {"eval_prompts": {"path": str(tmp_path / "prompts.jsonl")}}, "eval": {"every": 2}}
    tree = odd_tree(tmp_path, {4}, **evaluated)
    run = trained(tree)  # calls: evaluation, step 1, step 2, evaluation
    rows = run.session.recorder.folder.read_metrics()
    assert ["eval/score" in row for row in rows] == [True, False, False, False, True]
    assert any(text.startswith("step 2 is not evaluated: ") for text in notes(run))


def test_the_command_ends_with_2_and_one_plain_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml  # noqa: PLC0415

    tree = odd_tree(tmp_path, {2, 3}, schedule={"max_bad_steps": 2})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", str(tmp_path / "c.yaml")]) == 2
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    assert "2 times in a row" in output.err
    assert issubclass(NonFiniteScores, RewardError)

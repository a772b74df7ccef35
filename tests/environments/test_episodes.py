"""Episodes of several turns: the content of a row, and influences that must not change it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import word_games
import word_rewards
from quick import quick
from torch import Tensor

from rlhf.algo.moments import Moments
from rlhf.batching import concat
from rlhf.data.tokenizer import Encoder
from rlhf.environments import tools
from rlhf.environments.host import Act, Begin, Cut, End
from rlhf.environments.pool import EnvironmentPool
from rlhf.environments.protocol import Fault, ResetResult, StepResult
from rlhf.environments.tools import Call
from rlhf.errors import RewardError
from rlhf.evaluation.evaluate import PolicyEvaluation, evaluate_policy
from rlhf.experience import compute_advantages
from rlhf.references import with_own_prompt
from rlhf.rewards.cost import COST, REWARD
from rlhf.sampling.episodes import EpisodeSampler
from rlhf.sampling.fast import prefix_cache
from rlhf.sampling.sampler import sample_batches
from rlhf.training.annotate import annotate
from rlhf.training.collect import fill_failed, sample_and_score
from rlhf.training.online_run import OnlineRun
from rlhf.training.rollout import episode_metrics, rollout_metrics
from rlhf.types import Completions, Experience, Scores, StopReason

EOS = 2


def tree(folder: Path, target: str = "Colors", **environment: Any) -> dict[str, Any]:
    settings = runs.ppo_tree(folder, schedule={"steps": 3}, eval={"every": 0}, data={"eval_prompts": None})
    del settings["reward"]
    settings["environment"] = {"target": f"{word_games.__file__}:{target}", "max_turns": 3, **environment}
    return settings


def played(run: OnlineRun, *, group_size: int = 2, key: int = 5) -> Completions:
    return run.sampler.sample(run.prompts(1), key=key, group_size=group_size)


def same(first: Completions, second: Completions) -> bool:
    tensors = ("completion_ids", "action_mask", "turns", "turn_rewards", "stops", "finished")
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in tensors)


def test_a_row_is_actions_and_observations(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path))
    rows = played(run)
    ids, mask, actions = rows.completion_ids, rows.completion_mask, rows.action_mask
    assert (actions & ~mask).sum() == 0
    assert (rows.sampler_logprobs[~actions] == 0).all()
    assert (rows.sampler_logprobs[actions] < 0).all()
    assert rows.stops.bool().all()
    assert {int(stop) for stop in rows.stops} <= {StopReason.TERMINATED, StopReason.MAX_TURNS}
    several = 0
    for row in range(len(rows)):
        of_environment = ids[row][mask[row] & ~actions[row]].tolist()
        turns = int(rows.turns[row].max()) + 1
        several += turns > 1
        assert len(of_environment) == 2 * (turns - 1)  # "red one" or "blue one" after every turn but the last
        assert {runs.WORDS[token] for token in of_environment} <= {"red", "blue", "one"}
        for turn in range(turns):
            (places,) = (actions[row] & (rows.turns[row] == turn)).nonzero(as_tuple=True)
            assert places.tolist() == list(range(int(places[0]), int(places[-1]) + 1))
            paid = rows.turn_rewards[row].clone()
            paid[places[-1]] = 0
            assert (paid[places] == 0).all()  # on the last action token of the turn, and nowhere else
    assert several > len(rows) / 2
    assert (rows.turn_rewards[~actions] == 0).all()
    scores = run.reward(rows).values
    assert torch.allclose(scores, rows.turn_rewards.sum(dim=1))
    assert scores.std() > 0


def test_rewards_are_those_of_the_actions(tmp_path: Path) -> None:
    rows, checked = played(runs.online(tree(tmp_path))), 0
    for row in range(len(rows)):
        observed = rows.completion_ids[row][rows.completion_mask[row] & ~rows.action_mask[row]].tolist()[::2]
        for turn in range(1, int(rows.turns[row].max()) + 1):
            here = rows.action_mask[row] & (rows.turns[row] == turn)
            words = [runs.WORDS[token] for token in rows.completion_ids[row][here].tolist()]
            # the color that is paid for alternates, and is told after the turn in which it counted
            wanted = {"red": "blue", "blue": "red"}[runs.WORDS[observed[turn - 1]]]
            assert float(rows.turn_rewards[row][here][-1]) == 0.25 * words.count(wanted) + 0.5 * words.count("good")
            checked += 1
    assert checked > 10


def test_neither_batch_nor_workers_nor_first_turn_change_an_episode(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path))
    whole = played(run)
    prompts = run.prompts(1)
    parts = concat([run.sampler.sample(part, key=5, group_size=2) for part in prompts.split(5)])
    assert same(whole, parts)
    assert isinstance(run.sampler, EpisodeSampler)
    alone = run.sampler.sampler.sample(prompts, key=5, group_size=2)
    first = whole.action_mask & (whole.turns == 0)
    for row in range(len(whole)):
        assert (
            whole.completion_ids[row][first[row]].tolist()
            == alone.completion_ids[row][alone.completion_mask[row]].tolist()
        )
    workers = runs.online(tree(tmp_path, workers=2), f"run.out_dir={tmp_path / 'workers'}")
    assert same(whole, played(workers))
    _close(workers)


def test_a_group_has_one_seed_and_its_members_draw_for_themselves(tmp_path: Path) -> None:
    rows = played(runs.online(tree(tmp_path)), group_size=4)
    observed: dict[int, set[int]] = {}
    for row in range(len(rows)):
        told = rows.completion_ids[row][rows.completion_mask[row] & ~rows.action_mask[row]].tolist()
        if told:
            observed.setdefault(row // 4, set()).add(told[0])
    assert all(len(first) == 1 for first in observed.values())
    assert len({next(iter(first)) for first in observed.values()}) == 2
    assert len({tuple(ids.tolist()) for ids in rows.completion_ids[:4]}) > 1


def test_each_turn_has_draws_of_its_own(tmp_path: Path) -> None:
    """With a context that does not matter (a model of constant logits) turns would be equal if they shared draws."""
    settings = tree(tmp_path)
    run = runs.online(settings)
    for parameter in run.models.policy.parameters():
        parameter.data.zero_()
    rows = played(run)
    first, second = (
        [
            rows.completion_ids[row][rows.action_mask[row] & (rows.turns[row] == turn)].tolist()
            for row in range(len(rows))
        ]
        for turn in (0, 1)
    )
    both = [(a, b) for a, b in zip(first, second, strict=True) if b]
    assert len(both) > 8
    assert sum(a == b for a, b in both) < len(both) / 2


def test_no_gradient_through_what_the_environment_wrote(tmp_path: Path) -> None:
    """The loss reads no log-probability, entropy or value of an environment's token, for any value."""
    run = runs.online(tree(tmp_path), "algorithm.policy_loss.entropy_coef=0.01", "critic.head=normal")
    experience = _experience(run)
    micro = experience.to(run.models.device)
    outputs = run.models.outputs(micro)
    leaves = [tensor.detach().requires_grad_() for tensor in (outputs.logprobs, outputs.entropy, outputs.values)]
    terms, _ = run.objective.loss(
        micro, replace(outputs, logprobs=leaves[0], entropy=leaves[1], values=leaves[2]), run.coefs
    )
    sum(terms.values()).backward()  # type: ignore[union-attr]
    for leaf in leaves:
        assert leaf.grad is not None
        assert (leaf.grad[~experience.action_mask] == 0).all()
        assert (leaf.grad[experience.action_mask] != 0).any()


def test_the_ratio_is_1_in_the_first_minibatch_and_kl_is_0_at_the_start(tmp_path: Path) -> None:
    settings = tree(tmp_path)
    settings["policy"]["dtype"] = "float64"
    settings["schedule"] = {"steps": 1}
    runs.make_model(tmp_path / "model", dtype=torch.float64)
    runs.trained(settings, "sampling.old_log_probs=trainer")
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["policy/first_ratio_deviation"] < 1e-9
    assert abs(line["kl/reference"]) < 1e-9
    assert line["env/turns"] > 1.5
    assert line["env/tokens"] > 1
    assert abs(line["env/return"] - line["score/mean"]) < 1e-6


def _experience(run: OnlineRun) -> Any:
    collected = sample_and_score(run, 1)
    assert collected is not None
    return compute_advantages(annotate(run, collected), run.algorithm, run.coefs)


def _close(run: OnlineRun) -> None:
    assert run.episodes is not None
    run.episodes.pool.stop()
    run.session.recorder.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Completions:
    """The episodes of an environment in which nothing fails."""
    settings = tree(tmp_path_factory.mktemp("whole"), "Broken", kwargs={"how": "", "prompt": "no"})
    run = runs.online(settings)
    rows = played(run, group_size=1)
    _close(run)
    return rows


@pytest.mark.parametrize(
    ("how", "workers"),
    [("raise", 0), ("hang", 0), ("nan", 0), ("four", 0), ("raise", 2), ("hang", 2), ("exit", 2)],
)
def test_a_failing_environment_is_counted_and_nothing_else_is_lost(
    tmp_path: Path, whole: Completions, how: str, workers: int
) -> None:
    """Of the mishaps that the environment's host answers itself, one is enough in another process."""
    limits = {"workers": workers, "step_timeout_s": 3.0 if workers else 0.3}
    run = runs.online(tree(tmp_path, "Broken", kwargs={"how": how}, **limits))
    notes: list[str] = []
    assert run.episodes is not None
    run.episodes.note = notes.append
    rows = played(run, group_size=1)
    failed = torch.tensor([reference["prompt"] == "red one" for reference in rows.references])
    assert int(failed.sum()) == 1
    assert (rows.stops[failed] == StopReason.ERROR).all()
    assert (rows.stops[~failed] != StopReason.ERROR).all()
    assert not rows.action_mask[failed].any()
    others = (~failed).nonzero().flatten()
    width = min(rows.completion_ids.shape[1], whole.completion_ids.shape[1])
    assert torch.equal(rows.action_mask[others][:, :width], whole.action_mask[others][:, :width])
    assert torch.equal(rows.turn_rewards[others][:, :width], whole.turn_rewards[others][:, :width])
    assert "1 of 16 episodes failed" in notes[0]
    cut = [ends_of_turns(rows, row).count(False) for row in others.tolist()]
    assert run.episodes.take_metrics()["env/cut_actions"] == pytest.approx(sum(cut) / 15)
    assert sum(cut) > 0
    scores = run.reward(rows)
    assert scores.values[failed].isnan().all()
    values = fill_failed(rows, scores).values
    assert torch.isclose(values[failed], values[~failed].mean()).all()
    _close(run)


def test_an_episode_whose_environment_failed_moves_no_cost_and_no_deviation(tmp_path: Path) -> None:
    """Also not of an evaluation: each is a figure of the 15 others."""
    cost = {"type": "function", "target": f"{word_rewards.__file__}:count_words"}
    reward = {"cost": {"source": cost}, "shaping": {"normalize": "scale"}}
    run = runs.online({**tree(tmp_path, "Broken", kwargs={"how": "raise"}), "reward": reward})
    collected = sample_and_score(run, 1)
    assert collected is not None
    counted, parts, metrics = collected.completions.counted, collected.scores.parts, collected.metrics.values()
    assert counted.sum() == 15
    assert parts[COST][~counted].isnan().all()
    assert torch.equal(collected.shares.isnan(), ~counted), "a failed episode is no success and no failure"
    assert metrics["cost/mean"] == pytest.approx(float(parts[COST][counted].mean()))
    assert metrics["score/running_std"] == pytest.approx(float(parts[REWARD][counted].std(correction=0)))

    failing = [run.prompts(1)]

    def price(completions: Completions) -> Scores:
        return Scores(values=torch.where(completions.counted, 2.0, 60.0), parts={})

    evaluation = evaluate_policy(
        failing, run.sampler, run.models, run.reward, proxy=None, cost=price, key=5, greedy=False, rows_per_pass=16
    )
    assert not evaluation.rollout.counted.all()
    assert evaluation.metrics["eval/cost"] == 2.0
    _close(run)


def test_a_worker_closes_a_failed_environment_and_seeds_numpy(tmp_path: Path) -> None:
    log = tmp_path / "log"
    target = f"{word_games.__file__}:"
    pool = EnvironmentPool(f"{target}Broken", {"how": "raise", "prompt": "no", "log": str(log)}, workers=1)
    pool.run([Begin(1, 5, {"prompt": "no"}), Begin(2, 5, {"prompt": "yes"})])
    failed, answered = pool.run([Act(1, "red"), Act(2, "red")])
    assert isinstance(failed, Fault)
    assert not isinstance(answered, Fault)
    pool.run([End(1), End(2)])
    pool.stop()
    assert log.read_text().splitlines() == ["closed", "closed"]
    begun = [Begin(episode, 7, {}) for episode in range(6)]
    acts = [Act(episode, "red") for episode in range(6)]
    answers = []
    for _ in range(3):
        pool = EnvironmentPool(f"{target}LateNumpy", {}, workers=1)
        pool.run(begun)
        answers += pool.run(acts)
        pool.stop()
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_does_not_close_is_said_and_loses_nothing(tmp_path: Path, workers: int) -> None:
    run = runs.online(tree(tmp_path, "Broken", kwargs={"how": "close"}, workers=workers))
    notes: list[str] = []
    assert run.episodes is not None
    run.episodes.note = notes.append
    rows = played(run, group_size=1)
    assert (rows.stops != StopReason.ERROR).all()
    assert notes[0].startswith("warning: 1 of 16 environments did not close: RuntimeError: still open")
    _close(run)


def test_ten_thousand_tokens_are_a_context_overflow(tmp_path: Path) -> None:
    rows = played(runs.online(tree(tmp_path, "Broken", kwargs={"how": "long"})), group_size=1)
    long = [row for row in range(len(rows)) if rows.references[row]["prompt"] == "red one"]
    assert [StopReason(int(rows.stops[row])) for row in long] == [StopReason.CONTEXT]
    assert rows.action_mask[long[0]].any()
    assert float(rows.turn_rewards[long[0]].sum()) >= 0.5
    assert rows.completion_mask.sum(dim=1).max() <= 64


def test_many_failures_stop_the_run(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path, "Failing"))
    with pytest.raises(RewardError, match=r"16 of 16 episodes failed .* no more colors"):
        played(run, group_size=1)


@pytest.mark.parametrize("size", [1, 4, 40])
def test_failures_are_judged_over_a_whole_evaluation_in_batches_of_any_size(tmp_path: Path, size: int) -> None:
    """2 of 40 are 5 % and pass, also if both are among the first four; 3 of 40 are more, also one by one."""
    run, notes = runs.online(tree(tmp_path, "Broken", kwargs={"how": "raise"})), list[str]()
    assert run.episodes is not None
    run.episodes.note = notes.append
    rows = run.prompts(1)
    bad = [row for row, reference in enumerate(rows.references) if reference["prompt"] == "red one"]
    good = [row for row in range(len(rows)) if row not in bad]

    def evaluated(failing: int) -> PolicyEvaluation:
        prompts = rows.rows(torch.tensor([*bad[:1] * failing, *(good * 3)[: 40 - failing]]))
        batches = [prompts.rows(torch.arange(start, start + size)) for start in range(0, 40, size)]
        judge, models = run.reward, run.models
        return evaluate_policy(batches, run.sampler, models, judge, proxy=None, key=5, greedy=False, rows_per_pass=40)

    assert evaluated(2).rollout.counted.tolist() == [False] * 2 + [True] * 38
    assert [note.partition(" in the environment")[0] for note in notes] == ["warning: 2 of 40 episodes failed"]
    with pytest.raises(RewardError, match="more than 5% of 40"):
        evaluated(3)
    _close(run)


def test_on_error_stop_and_zero(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"on_error=stop.*no more colors"):
        played(runs.online(tree(tmp_path, "Broken", kwargs={"how": "raise"}, on_error="stop")), group_size=1)
    run = runs.online(
        tree(tmp_path, "Broken", kwargs={"how": "raise"}, on_error="zero"), f"run.out_dir={tmp_path / 'zero'}"
    )
    rows = played(run, group_size=1)
    failed = rows.stops == StopReason.ERROR
    assert failed.sum() == 1
    assert rows.action_mask[failed].any()


def test_token_budget(tmp_path: Path) -> None:
    rows = played(runs.online(tree(tmp_path, max_tokens=14)))
    assert (rows.stops == StopReason.MAX_TOKENS).any()
    assert int(rows.completion_mask.sum(dim=1).max()) <= 14


def test_bootstrap_reads_the_last_observation_and_learns_no_token_of_it(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path, max_turns=2, truncation="bootstrap"), "critic.head=normal")
    experience = _experience(run)
    cut = experience.stops == StopReason.MAX_TURNS
    assert cut.any()
    assert torch.equal(experience.bootstrapped, cut)
    assert experience.final_values is not None
    assert (experience.final_values[cut] != 0).all()
    assert (experience.final_values[~cut] == 0).all()
    rows = cut.nonzero().flatten().tolist()
    for row in rows:
        (places,) = experience.action_mask[row].nonzero(as_tuple=True)
        last = int(places[-1])
        bootstrapped = float(experience.rewards[row, last] + experience.final_values[row])
        assert float(experience.returns[row, last]) == pytest.approx(bootstrapped, abs=1e-5)


def test_an_environment_may_end_an_episode_by_a_limit_of_its_own(tmp_path: Path) -> None:
    """The value after it is the critic's of the last observation; an episode whose task is over too has none."""
    run = runs.online(tree(tmp_path, "Limited", max_turns=5, truncation="bootstrap"), "critic.head=normal")
    experience = _experience(run)
    cut = experience.stops == StopReason.TRUNCATED
    assert torch.equal(~cut, experience.stops == StopReason.TERMINATED)
    assert cut.any()
    assert (experience.turns.amax(dim=1)[cut] == 1).all()
    assert torch.equal(experience.bootstrapped, cut)
    assert experience.final_values is not None
    assert (experience.final_values[~cut] == 0).all()
    over = [row for row in range(len(experience)) if int(experience.turns[row].max()) == 1 and not cut[row]]
    assert over, "the task is over in the turn of the limit"
    for row in cut.nonzero().flatten().tolist():
        ids = experience.completion_ids[row][experience.completion_mask[row]].tolist()
        assert [runs.WORDS[token] for token in ids[-3:-1]] in (["red", "one"], ["blue", "one"])
        assert float(experience.final_values[row]) == pytest.approx(
            value_after(run, experience, row, ids[:-1]), abs=1e-5
        )
        last = int(experience.action_mask[row].nonzero().max())
        bootstrapped = float(experience.rewards[row, last] + experience.final_values[row])
        assert float(experience.returns[row, last]) == pytest.approx(bootstrapped, abs=1e-5)


def value_after(run: OnlineRun, experience: Experience, row: int, ids: list[int]) -> float:
    """Return the critic's value of a row's prompt and these tokens, with another token behind them."""
    one = slice(row, row + 1)
    read = Completions(
        prompt_ids=experience.prompt_ids[one],
        prompt_mask=experience.prompt_mask[one],
        row_ids=experience.row_ids[one],
        references=experience.references[one],
        completion_ids=torch.tensor([[*ids, EOS]]),
        completion_mask=torch.ones(1, len(ids) + 1, dtype=torch.bool),
        sampler_logprobs=torch.zeros(1, len(ids) + 1),
        finished=torch.tensor([True]),
        group_size=1,
    )
    return float(run.models.values(read)[0, -1].detach())


@pytest.mark.parametrize("truncation", ["zero", "drop"])
def test_a_limit_of_the_environments_own_follows_the_setting(tmp_path: Path, truncation: str) -> None:
    experience = _experience(runs.online(tree(tmp_path, "Limited", max_turns=5, truncation=truncation)))
    cut = experience.stops == StopReason.TRUNCATED
    assert cut.any()
    assert experience.final_values is None
    assert torch.equal(experience.loss_mask.any(dim=1), ~cut | (truncation == "zero"))


@pytest.fixture
def calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text of the policy is a call of the tool of Collector."""
    monkeypatch.setattr(tools, "read_calls", lambda text: [Call("collect", {})])


@pytest.mark.usefixtures("calls_alone")
@pytest.mark.parametrize("truncation", ["zero", "bootstrap"])
@pytest.mark.parametrize(
    ("limit", "stop"),
    [
        ({"max_turns": 2}, StopReason.MAX_TURNS),
        ({"max_turns": 9, "max_tokens": 20}, StopReason.MAX_TOKENS),
        ({"max_turns": 99}, StopReason.CONTEXT),
    ],
)
def test_a_limit_asks_tools_for_their_reward(
    tmp_path: Path, limit: dict[str, int], stop: StopReason, truncation: str
) -> None:
    """By the state of the instance, as for an answer; what the critic thinks of a next turn is not added to it."""
    run = runs.online(tree(tmp_path, "Collector", **limit, truncation=truncation), "critic.head=normal")
    rows = played(run)
    assert (rows.stops == stop).all()
    assert torch.equal(run.reward(rows).values, rows.turns.amax(dim=1) + 1 + 0.5)
    for row in range(len(rows)):
        last = int(rows.action_mask[row].nonzero().max())
        assert rows.turn_rewards[row].nonzero().flatten().tolist() == [last], "the last action has it"
    assert not rows.bootstrapped.any()


@pytest.mark.usefixtures("calls_alone")
def test_an_environment_without_tools_is_asked_for_no_other_reward(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path, max_turns=2))
    assert run.episodes is not None
    asked: list[type] = []
    answer = run.episodes.pool.run
    run.episodes.pool.run = lambda requests: asked.extend(map(type, requests)) or answer(requests)  # type: ignore[method-assign,func-returns-value]
    assert (played(run).stops == StopReason.MAX_TURNS).any()
    assert set(asked) == {Begin, Act, End}


@pytest.mark.usefixtures("calls_alone")
@pytest.mark.parametrize("on_error", ["drop", "zero"])
def test_a_reward_that_fails_at_a_limit_is_a_failure_of_the_environment(tmp_path: Path, on_error: str) -> None:
    run = runs.online(tree(tmp_path, "Collector", kwargs={"fails": True}, max_turns=2, on_error=on_error))
    rows = played(run, group_size=1)
    failed = torch.tensor([reference["prompt"].startswith("red one\n") for reference in rows.references])
    assert failed.sum() == 1
    assert torch.equal(rows.stops == StopReason.ERROR, failed)
    assert torch.equal(rows.counted, ~failed | (on_error == "zero"))
    assert (rows.turn_rewards[failed] == 0).all()


def test_tools_in_a_worker_are_asked_at_a_limit_after_they_were_played_again() -> None:
    pool = EnvironmentPool(f"{word_games.__file__}:Collector", {}, workers=1)
    (begun,) = pool.run([Begin(1, 5, {"prompt": "a"})])
    assert isinstance(begun, ResetResult)
    assert begun.has_last_reward
    call = '<tool>{"name": "collect", "arguments": {}}</tool>'
    pool.run([Act(1, call), Act(1, call)])
    pool._workers[0].stop()  # as another environment of the worker that hangs
    (answer,) = pool.run([Cut(1)])
    assert isinstance(answer, StepResult)
    assert answer.reward == 2.5
    assert pool.run([End(1)]) == [None]
    pool.stop()


def test_normalized_rewards_of_turns_keep_their_places(tmp_path: Path) -> None:
    """Divided like the scores: what is left for the last token is the penalty, and no correction of the turns."""
    shaping = {"normalize": "scale", "missing_eos_penalty": 4.0}
    run = runs.online({**tree(tmp_path), "reward": {"shaping": shaping}})
    collected = sample_and_score(run, 1)
    assert collected is not None
    assert collected.score_moments is not None
    std = Moments(**collected.score_moments).std
    experience = compute_advantages(annotate(run, collected), run.algorithm, run.coefs)
    assert abs(std - 1) > 0.1
    pays_only_at_the_end(experience, 1 / std, torch.where(experience.finished, 0.0, 4.0 / std))


def pays_only_at_the_end(experience: Experience, scale: float, price: Tensor) -> None:
    """Check that the rewards of turns are multiplied where they are, and that the last token alone pays the price."""
    expected = experience.turn_rewards * scale
    places = torch.where(experience.action_mask, torch.arange(expected.shape[1]), -1).amax(dim=1)
    expected[torch.arange(len(expected)), places] -= price
    torch.testing.assert_close(experience.rewards, expected.to(experience.rewards), rtol=0, atol=1e-5)
    assert (experience.turn_rewards != 0).sum() > len(expected)
    assert (price != 0).any()


def test_a_cost_is_paid_at_the_end_and_moves_no_reward_of_a_turn(tmp_path: Path) -> None:
    """The reward is weighed by 1 / (1 + 0.5), and the cost by 0.5 / (1 + 0.5)."""
    cost = {"type": "function", "target": f"{word_rewards.__file__}:count_good"}
    settings = {**tree(tmp_path), "reward": {"cost": {"source": cost}}}
    settings["algorithm"] = {"preset": "ppo_lag", "lagrange": {"cost_limit": 1.0, "start": 0.5}}
    run = runs.online(settings)
    collected = sample_and_score(run, 1)
    assert collected is not None
    experience = compute_advantages(annotate(run, collected), run.algorithm, run.coefs)
    pays_only_at_the_end(experience, 1 / 1.5, 0.5 / 1.5 * collected.scores.parts[COST])


def test_drop_leaves_cut_episodes_out_of_the_loss(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path, max_turns=2, truncation="drop"))
    experience = _experience(run)
    limited, terminated = (experience.stops == stop for stop in (StopReason.MAX_TURNS, StopReason.TERMINATED))
    assert limited.any()
    assert not experience.loss_mask[limited].any()
    assert (terminated & ~experience.finished).any(), "the task is over, though an action was cut"
    assert torch.equal(experience.loss_mask[terminated], experience.action_mask[terminated])


def test_mask_truncated_leaves_out_what_a_limit_or_a_cut_last_action_ended(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path, max_turns=2), "algorithm.mask_truncated=true")
    experience = _experience(run)
    ends = [ends_of_turns(experience, row)[-1] for row in range(len(experience))]
    kept = (experience.stops == StopReason.TERMINATED) & torch.tensor(ends)
    assert 0 < kept.sum() < (experience.stops == StopReason.TERMINATED).sum()
    assert torch.equal(experience.loss_mask, experience.action_mask & kept[:, None])


def ends_of_turns(rows: Completions, row: int) -> list[bool]:
    """Return of each action of an episode whether it ended with EOS."""
    count = int(rows.turns[row].max()) + 1
    actions = [rows.completion_ids[row][rows.action_mask[row] & (rows.turns[row] == turn)] for turn in range(count)]
    return [int(action[-1]) == EOS for action in actions]


def test_an_episode_is_finished_if_no_action_was_cut_whatever_ended_it(tmp_path: Path) -> None:
    rows = played(runs.online(tree(tmp_path, max_turns=2)))
    assert rows.finished.tolist() == [all(ends_of_turns(rows, row)) for row in range(len(rows))]
    limited = rows.stops == StopReason.MAX_TURNS
    assert (rows.finished & limited).any()
    assert (~rows.finished & ~limited).any()


@pytest.mark.parametrize("preset", quick(["ppo", "grpo", "gspo", "online_dpo", "trpo"], ["ppo", "grpo", "online_dpo"]))
def test_presets_train_on_episodes(tmp_path: Path, preset: str) -> None:
    settings = tree(tmp_path)
    settings["algorithm"] = {"preset": preset}
    settings["sampling"] = {"max_new_tokens": 6, "completions_per_prompt": 4}
    settings["batch"] = {"prompts_per_step": 8, "micro_batch_size": 8}
    before = runs.online(settings, f"run.out_dir={tmp_path / 'start'}")
    start = runs.weights(before.models.policy)
    before.session.recorder.close()
    after = runs.trained(settings, "schedule.steps=2")
    assert runs.largest_difference(start, runs.weights(after.models.policy)) > 0


def test_a_first_observation_without_room(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path, "Wordy", kwargs={"words": 80}))
    with pytest.raises(RewardError, match="no episode could begin"):
        played(run)
    rows = played(runs.online(tree(tmp_path, "Wordy", kwargs={"words": 3}), f"run.out_dir={tmp_path / 'b'}"))
    assert (rows.prompt_mask.sum(dim=1) >= 5).all()
    assert all(str(reference["prompt"]).endswith("\n\nred red red") for reference in rows.references)


def test_groups_without_an_episode_are_neither_uniform_nor_the_best(tmp_path: Path) -> None:
    """Two of each prompt, and no episode of one of them begins: the groups of the others, by hand."""
    settings = tree(tmp_path, "Wordy", kwargs={"words": 80, "prompt": "red one"})
    settings["algorithm"] = {"preset": "rloo"}
    settings["sampling"] = {"max_new_tokens": 6, "completions_per_prompt": 2}
    run = runs.online(settings)
    collected = sample_and_score(run, 1)
    assert collected is not None
    experience = compute_advantages(annotate(run, collected), run.algorithm, run.coefs)
    counted = experience.counted.view(-1, 2)
    assert 0 < counted[:, 0].sum() < len(counted)
    groups = experience.reported_scores.view(-1, 2)[counted[:, 0]].double()
    metrics = rollout_metrics(experience, collected.scores, run.models, run.algorithm).values()
    assert metrics["score/best_of_group"] == pytest.approx(float(groups.amax(dim=1).mean()))
    assert metrics["group/uniform"] == pytest.approx(float((groups[:, 0] == groups[:, 1]).double().mean()))


def test_episodes_that_could_not_begin_are_counted_and_noted(tmp_path: Path) -> None:
    run = runs.online(tree(tmp_path, "Wordy", kwargs={"words": 80, "prompt": "red one"}))
    notes: list[str] = []
    assert run.episodes is not None
    run.episodes.note = notes.append
    rows = played(run)
    long = torch.tensor([str(reference["prompt"]).count("red") > 80 for reference in rows.references])
    assert int(long.sum()) == 2
    assert torch.equal(rows.stops == StopReason.CONTEXT, long)
    assert torch.equal(~rows.counted, long)
    assert notes == [
        "warning: 2 of 32 episodes could not begin, and are left out: their first observation leaves no room for an "
        "action of sampling.max_new_tokens=6 in the model's context of 64"
    ]
    assert episode_metrics(rows)["env/not_begun"] == 2 / 32
    first, prompts = notes.pop(), run.prompts(1)
    one_by_one = [prompts.rows(torch.tensor([row])) for row in range(len(prompts))]
    again = sample_batches(run.sampler, one_by_one, key=5, group_size=2)
    assert notes == [first], "also if the one that cannot begin is alone in its batch"
    assert torch.equal(again.counted, rows.counted)
    _close(run)


def templated(folder: Path, **kwargs: Any) -> OnlineRun:
    """A run of Wordy with a chat template, whose mark of the user is `blue`."""
    template = folder / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ 'blue ' if message['role'] == 'user' else 'two ' }}"
        "{{ message['content'] }}{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}two {% endif %}"
    )
    return runs.online(runs.merge(tree(folder, "Wordy", kwargs=kwargs), {"data": {"chat_template": str(template)}}))


def test_an_environment_gets_the_prompt_as_it_is_in_the_row(tmp_path: Path) -> None:
    rows = played(templated(tmp_path, words=5, prompt="red one"))
    prompts = [str(reference["prompt"]) for reference in rows.references]
    assert [prompt.count("red red red red red") for prompt in prompts].count(1) == 2
    assert sum("red one\n\nred red red red red<eos>" in prompt for prompt in prompts) == 2


def test_judges_of_an_episode_read_its_first_observation(tmp_path: Path) -> None:
    """Without the template's marks, below the prompt of the row."""
    rows = played(templated(tmp_path, words=2))
    for reference in rows.references:
        own = str(with_own_prompt(reference)["prompt"])
        assert own.endswith("\n\nred red")
        assert "<eos>" not in own


def test_the_prompt_of_an_episode_is_the_text_that_the_model_reads(tmp_path: Path) -> None:
    """With the template's marks, as of a run without an environment."""
    run = templated(tmp_path, words=2)
    rows = played(run)
    assert run.episodes is not None
    tokenizer = run.episodes.encoder.tokenizer
    for row, reference in enumerate(rows.references):
        text = str(reference["prompt"])
        assert text.startswith("blue ")
        assert text.endswith("\n\nred red<eos>two ")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == rows.prompt_ids[row][rows.prompt_mask[row]].tolist()


def test_a_special_token_in_a_first_observation_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that an environment shows does not end the user's turn; this tokenizer has no other form of <eos>."""
    monkeypatch.setattr(Encoder, "without_specials", lambda encoder, text: [])
    run = templated(tmp_path, words=2, word="<eos>")
    rows = played(run)
    assert run.episodes is not None
    eos = run.episodes.encoder.eos_id
    assert ((rows.prompt_ids == eos) & rows.prompt_mask).sum(dim=1).tolist() == [1] * len(rows)  # the template's


def test_a_supervised_run_is_evaluated_by_episodes(tmp_path: Path) -> None:
    settings = runs.offline_tree(tmp_path, "sft")
    del settings["data"]["preferences"], settings["data"]["eval_preferences"], settings["eval"]["source"]
    rows = [{"prompt": "red one", "completion": " good"}] * 16
    settings["data"]["sft"] = {"path": str(runs.write_rows(tmp_path / "sft.jsonl", rows))}
    settings["environment"] = {"target": f"{word_games.__file__}:Colors", "max_turns": 2}
    runs.trained_offline(settings)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [1 <= line["eval/turns"] <= 2 for line in lines if "eval/turns" in line].count(True) >= 2


def test_a_turn_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, known = prefix_cache.prefill, []

    def noted(model: Any, ids: Tensor, mask: Tensor, past: Any) -> Any:
        known.append(past[0][0].shape[2] if past else 0)
        return read(model, ids, mask, past)

    monkeypatch.setattr(prefix_cache, "prefill", noted)
    remembering = played(runs.online(tree(tmp_path / "on", prefix_cache=True)))
    assert known[0] == 0 < min(known[1:])
    known.clear()
    whole = played(runs.online(tree(tmp_path / "off")))
    assert not any(known)
    assert same(remembering, whole)

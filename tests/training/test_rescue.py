"""Prompts whose whole group fails: sampled again with hints, replayed, counted; and the run that does it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import online, ppo_tree, quiet, trained
from tiny_models import completions_of

from rlhf.algo.selection import failed_groups
from rlhf.algorithms.online import Online
from rlhf.algorithms.rescue import Hint, Rescue
from rlhf.config.files import merge
from rlhf.config.load import train_config
from rlhf.data.prompts import PromptSet
from rlhf.data.rows import RowCounts
from rlhf.errors import DataError, UserError
from rlhf.factory.online import build_online
from rlhf.lab import doors
from rlhf.sampling.generate import repeat_rows
from rlhf.training.annotate import annotate
from rlhf.training.collect import collect, sample_and_score, under_prompts
from rlhf.training.online import train
from rlhf.training.online_run import OnlineRun
from rlhf.training.prompt_queue import PromptQueue
from rlhf.training.rollout import Collected, live_tokens
from rlhf.types import Completions, Prompts, Scores

HINT_WIDTH = 3


def prompts(tokens: Sequence[int], width: int = 1) -> Prompts:
    """Prompts of one token, `width` times."""
    return Prompts(
        prompt_ids=torch.tensor(tokens)[:, None].repeat(1, width),
        prompt_mask=torch.ones(len(tokens), width, dtype=torch.bool),
        row_ids=torch.arange(len(tokens)),
        references=tuple({"who": token} for token in tokens),
    )


@dataclass
class Bench:
    """Draws with known scores: scores of a prompt without a hint, and with hint 1 and 2."""

    scores: Mapping[int, Sequence[Sequence[float]]]
    drawn: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(
        self,
        batch: Prompts,
        *names: int | str,
        group_size: int,
        greedy: bool = False,
        asked: Prompts | None = None,
    ) -> tuple[Completions, Scores]:
        who = [int(reference["who"]) for reference in batch.references]
        self.drawn.append((names, who, group_size, None if asked is None else asked.prompt_ids.shape[1]))
        number = int(names[1]) if names else 0
        rows = repeat_rows(batch if asked is None else asked, group_size)
        repeated = [token for token in who for _ in range(group_size)]
        made = completions_of([[token] for token in repeated], [[token] * (2 + number) for token in repeated])
        completions = replace(
            made,
            prompt_ids=rows.prompt_ids,
            prompt_mask=rows.prompt_mask,
            row_ids=rows.row_ids,
            references=rows.references,
            sampler_logprobs=torch.full(made.completion_ids.shape, -float(1 + number)),
            group_size=group_size,
        )
        values = torch.tensor([self.scores[t][number][i] for t in who for i in range(group_size)])
        return completions if asked is None else under_prompts(completions, batch), Scores(values=values, parts={})


def collected(
    bench: Bench, has_hint: Sequence[bool] = (True, True, True), due: torch.Tensor | None = None, **choices: Any
) -> Collected:
    rescue = {"hints": [{"column": "a"}, {"column": "b"}], "hinted_share": 0.5, **choices.pop("rescue", {})}
    algorithm = Online.model_validate({"advantage": {"type": "group"}, "rescue": rescue, **choices})

    def hinted(number: int) -> tuple[Prompts, torch.Tensor]:
        return prompts([3, 4, 5], HINT_WIDTH + number), torch.tensor(has_hint)

    others = prompts([8, 8, 8])
    return collect(prompts([3, 4, 5]), bench, lambda _: others, algorithm, group_size=4, hinted=hinted, due=due)


FAIL, WIN = (0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)


def test_failed_groups_are_sampled_with_one_hint_after_the_other() -> None:
    bench = Bench({3: (FAIL, (0.0, 0.0), (1.0, 0.0)), 4: (WIN,), 5: (FAIL, (1.0, 1.0))})
    result = collected(bench)
    assert bench.drawn == [
        ((), [3, 4, 5], 4, None),
        (("rescue", 1), [3, 5], 2, HINT_WIDTH + 1),
        (("rescue", 2), [3], 2, HINT_WIDTH + 2),
    ]
    assert result.scores.values.tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert result.hinted.tolist() == [False, False, True, True] + [False] * 4 + [False, False, True, True]
    assert (result.failed.tolist(), result.rescued.tolist()) == ([True, False, True], [True, False, True])
    values = result.metrics.values()
    assert values["rescue/failed"] == pytest.approx(2 / 3)
    assert [values[f"rescue/{name}"] for name in ("rescued", "by_hint_1", "by_hint_2", "without_hint")] == [2, 1, 1, 0]
    assert values["score/first_draw"] == pytest.approx(1 / 12)


def test_hinted_completions_are_those_of_the_plain_prompt() -> None:
    bench = Bench({3: (FAIL, (0.0, 0.0), (1.0, 0.0)), 4: (WIN,), 5: (FAIL, (1.0, 1.0))})
    completions = collected(bench).completions
    assert completions.group_size == 4
    assert completions.row_ids.tolist() == list(range(12))
    assert completions.prompt_mask.sum(1).tolist() == [1] * 12
    assert completions.prompt_ids[:, -1].tolist() == [3] * 4 + [4] * 4 + [5] * 4
    assert completions.completion_mask.sum(1).tolist() == [2, 2, 4, 4, 2, 2, 2, 2, 2, 2, 3, 3]
    assert completions.sampler_logprobs[2, 0] == -3.0  # the sampler's, with the hint


def test_everything_sampled_is_counted() -> None:
    bench = Bench({3: (FAIL, (0.0, 0.0), (0.0, 0.0)), 4: (WIN,), 5: (FAIL, (1.0, 1.0))})
    result = collected(bench)
    assert result.extra == 12 + 4 + 2 - 12
    sampled = 12 * (1 + 2) + 4 * (4 + 3) + 2 * (5 + 4)  # completions x tokens of their prompt and of their own
    assert live_tokens(result.completions) + result.metrics["completion/extra_tokens"] == sampled
    assert result.metrics["completion/extra"] == 6.0


def test_a_group_that_no_hint_helps_stays_as_it_was() -> None:
    bench = Bench({3: (FAIL, (0.0, 0.0), (0.0, 0.0)), 4: (WIN,), 5: (FAIL, (1.0, 1.0))})
    result = collected(bench, (True, True, False))
    assert result.hinted.tolist() == [False] * 12
    assert result.scores.values.tolist() == [*FAIL, *WIN, *FAIL]
    assert result.completions.sampler_logprobs[:, 0].tolist() == [-1.0] * 12
    assert result.metrics["rescue/without_hint"] == 1.0
    assert bench.drawn[1][1] == [3]  # the last has no hint


def test_a_rescued_group_is_not_refilled_and_the_others_are() -> None:
    bench = Bench({3: (FAIL, (0.0, 0.0), (0.0, 0.0)), 4: (WIN,), 5: (FAIL, (1.0, 1.0)), 8: (WIN, (0.0, 1.0, 0.0, 0.0))})
    result = collected(bench, drop_uniform_groups=True, refill_rounds=1)
    assert [reference["who"] for reference in result.completions.references][::4] == [8, 4, 5]
    assert result.hinted.tolist() == [False] * 10 + [True, True]
    assert result.failed.tolist() == [True, False, True]


def test_a_prompt_that_replaces_a_hinted_group_had_no_hint() -> None:
    bench = Bench({3: (FAIL, (0.0, 0.0)), 4: (WIN,), 5: (WIN,), 8: (WIN, WIN)})
    due, settings = torch.tensor([1, 0, 0]), {"rescue": {"after": 1}, "drop_uniform_groups": True}
    plain = collected(bench, due=due, **settings)
    assert plain.hinted.tolist() == [False, False, True, True] + [False] * 8
    result = collected(bench, due=due, **settings, refill_rounds=1)
    assert [reference["who"] for reference in result.completions.references][::4] == [8, 4, 5]
    assert not result.hinted.any()
    assert result.metrics["group/refilled"] == pytest.approx(1 / 3)


def queue(limit: int = 2, share: float = 0.5, until: str = "plain", count: int = 6) -> PromptQueue:
    ids = tuple([i] for i in range(count))
    references = tuple({"prompt": str(i)} for i in range(count))
    rows = PromptSet(ids, references, 0, RowCounts("made up", fatal=False))
    rescue = Rescue.model_validate(
        {"hints": [{"column": "hint"}], "replay": {"limit": limit, "share": share, "until": until}}
    )
    return PromptQueue(rows, 4, 7, rescue=rescue)


def dealt(prompt_queue: PromptQueue) -> list[int]:
    return [int(reference["prompt"]) for reference in prompt_queue.prompts().references]


def flags(dealt_prompts: Sequence[int], unsolved: set[int]) -> torch.Tensor:
    return torch.tensor([index in unsolved for index in dealt_prompts])


def test_unsolved_prompts_come_back_until_the_limit_and_no_fresh_one_is_lost() -> None:
    replays = queue(count=40)
    without = torch.zeros(4, dtype=torch.bool)
    first = dealt(replays)
    assert dealt(replays) == first  # asking twice changes nothing
    stubborn, shy, other = first[:3]
    metrics = replays.finish(flags(first, {stubborn, shy, other}), without).values()
    assert (metrics["rescue/waiting"], metrics["rescue/replayed"]) == (3.0, 0.0)
    second = dealt(replays)
    assert second[:2] == [stubborn, shy]
    metrics = replays.finish(flags(second, {stubborn}), without).values()
    assert (metrics["rescue/replayed"], metrics["rescue/replays_solved"], metrics["rescue/waiting"]) == (2.0, 1.0, 2.0)
    third = dealt(replays)
    assert third[:2] == [other, stubborn]
    metrics = replays.finish(flags(third, {stubborn}), without).values()
    assert (metrics["rescue/given_up"], metrics["rescue/waiting"]) == (1.0, 0.0)
    fresh = [*first, *second[2:], *third[2:], *dealt(replays)]
    plain = queue(count=40)
    expected = []
    for _ in range(3):
        expected += dealt(plain)
        plain.skip()
    assert fresh == expected


@pytest.mark.parametrize(("until", "waiting"), [("plain", 1), ("hinted", 0)])
def test_a_hint_ends_the_replays_only_if_that_is_asked_for(until: str, waiting: int) -> None:
    replays = queue(until=until, count=40)
    failed = flags(dealt(replays), {dealt(replays)[0]})
    assert replays.finish(failed, failed).values()["rescue/waiting"] == waiting


def test_a_step_without_scores_replays_the_same_again() -> None:
    replays = queue(count=40)
    failed = flags(dealt(replays), set(dealt(replays)[:2]))
    replays.finish(failed, torch.zeros_like(failed))
    before = dealt(replays)
    replays.skip()
    assert dealt(replays)[:2] == before[:2]
    assert dealt(replays)[2:] != before[2:]


def test_the_queue_goes_on_from_a_checkpoint() -> None:
    replays, resumed = queue(), queue()
    for step in range(5):
        failed = torch.arange(4) % 2 == step % 2
        replays.finish(failed, torch.zeros_like(failed))
    resumed.restore(replays.saved(), step=5)
    assert (dealt(resumed), resumed.state) == (dealt(replays), replays.state)
    resumed.restore(None, step=3)  # the rescue was off before
    assert resumed.state.fresh == 12


def opens(*, prompts: list[str], completions: list[str], references: list[Mapping[str, Any]]) -> list[float]:
    assert not any("hint" in prompt for prompt in prompts), "the reward reads the plain prompt"
    return doors.opens(completions=completions, references=references)


def doors_tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """GRPO on doors that open by a word of probability 1e-4; after its hint the word has 0.8."""
    world = folder / "doors"
    world.mkdir(exist_ok=True)
    doors.write_doors(world)
    path = str(world / "prompts.jsonl")
    tree = ppo_tree(folder, data={"prompts": {"path": path}, "eval_prompts": {"path": path}})
    del tree["critic"]
    return merge(
        tree | {"algorithm": {"preset": "dr_grpo"}},
        {
            "policy": {"model": str(world / "start"), "lr": 0.01},
            "reward": {"source": {"target": f"{__file__}:opens"}},
            "sampling": {"completions_per_prompt": 8, "max_new_tokens": 3},
            "batch": {"prompts_per_step": 4, "epochs": 1, "minibatches": 1},
            "schedule": {"steps": 40},
            "eval": {"every": 0},
            "checkpoint": {"every": 0},
            **changes,
        },
    )


RESCUE: dict[str, Any] = {
    "algorithm": {
        "rescue": {
            "hints": [{"column": "hint", "template": "{prompt} {hint}"}],
            "weights": {"type": "shaped", "gamma": 1e-3},
            "replay": {"share": 0.25},
        }
    }
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def code_logprobs(run: OnlineRun) -> torch.Tensor:
    """The log-probability of each door's code under the plain prompt."""
    first_door, first_code = len(doors.SPECIAL), len(doors.SPECIAL) + len(doors.DOORS)
    count = len(doors.DOORS)
    with torch.no_grad():
        logits = run.models.policy(input_ids=torch.arange(first_door, first_door + count)[:, None]).logits[:, -1]
    return logits.log_softmax(-1)[torch.arange(count), torch.arange(first_code, first_code + count)]


def test_plain_grpo_is_stuck_at_zero_and_a_rescue_makes_codes_likelier(tmp_path: Path) -> None:
    gains = {}
    for name, changes in (("plain", {}), ("rescued", RESCUE)):
        (tmp_path / name).mkdir()
        run = online(merge(doors_tree(tmp_path / name, schedule={"steps": 6}), changes), "policy.lr=0.02")
        before = code_logprobs(run)
        train(run)
        run.session.recorder.close()
        gains[name] = code_logprobs(run) - before
    plain, rescued = lines(tmp_path / "plain"), lines(tmp_path / "rescued")
    assert {row["score/mean"] for row in plain[1:]} == {0.0}
    assert torch.equal(gains["plain"], torch.zeros(len(doors.DOORS)))
    assert float(gains["rescued"].min()) > 1.0  # nats
    assert rescued[1]["rescue/failed"] == 1.0
    assert 0 < rescued[1]["rescue/hinted_tokens"] < 1
    assert {row["score/first_draw"] for row in rescued[1:]} == {0.0}
    assert all(row["kl/sampler_mismatch"] < 1e-5 for row in rescued[1:])
    assert all(row["policy/first_ratio_deviation"] < 5e-5 for row in rescued[1:])


@pytest.mark.slow
def test_on_three_seeds_plain_grpo_opens_nothing_and_the_rescued_one_opens_doors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the script and the configuration that are shipped: benchmarks/zero_reward.py, configs/lab/zero_reward.yaml."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("zero_reward")
    out = tmp_path / "zero_reward.json"
    arguments = ["--arms", "plain", "shaped", "--folder", str(tmp_path / "world"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["zero_reward.py", *arguments])
    script.main()
    arms = json.loads(out.read_text())["arms"]
    for seed in ("0", "1", "2"):
        assert set(arms["plain"][seed]["score"].values()) == {0.0}
        assert arms["shaped"][seed]["score"]["40"] >= 0.5


def test_log_probabilities_are_those_of_the_plain_prompt(tmp_path: Path) -> None:
    run = online(merge(doors_tree(tmp_path), RESCUE))
    collection = sample_and_score(run, 1)
    assert collection is not None
    assert collection.hinted.any()
    rollout = annotate(run, collection)
    live = rollout.completion_mask & rollout.hinted[:, None]
    first = live & (torch.arange(live.shape[1]) == 0)
    opened = first & (rollout.scores > 0)[:, None]
    assert opened.any()
    assert float(rollout.logprobs[opened].max()) < -8.0  # a code, without its hint
    assert float(rollout.sampler_logprobs[opened].min()) > -0.5  # and with it
    others = rollout.completion_mask & ~rollout.hinted[:, None]
    assert torch.allclose(rollout.logprobs[others], rollout.sampler_logprobs[others], atol=1e-4)
    assert torch.equal(collection.rescued, ~failed_groups(rollout.scores, 8, solved_above=0.0) & collection.failed)
    run.session.recorder.close()


def test_a_resumed_run_replays_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    how = {"checkpoint": {"every": 1}, "schedule": {"steps": 4}}
    trained(merge(doors_tree(tmp_path / "a", **how), RESCUE))
    tree = merge(doors_tree(tmp_path / "b", **how), RESCUE)
    broken = online(tree)
    finish = broken.queue.finish if broken.queue is not None else None
    assert finish is not None
    assert broken.queue is not None

    def die(*arguments: Any) -> Any:
        if broken.session.state.step == 2:
            raise KeyboardInterrupt
        return finish(*arguments)

    broken.queue.finish = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    broken.session.recorder.close()
    resumed = trained(tree)
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert any(row.get("rescue/replayed") for row in lines(tmp_path / "a"))
    assert resumed.session.state.completions == lines(tmp_path / "a")[-1]["completion/count"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": {"preset": "reinforce_pp", **RESCUE["algorithm"]}}, "needs a baseline of the prompt"),
        (
            {"algorithm": {"preset": "ppo", "advantage": {"whiten_over": "minibatch"}, **RESCUE["algorithm"]}},
            "algorithm.advantage.whiten_over=step",
        ),
        ({"algorithm": {"curriculum": {"solved_above": 0.5}}}, "set both to the same score"),
        ({"sampling": {"old_log_probs": "sampler"}}, "needs log-probabilities under the prompt without the hint"),
        ({"overlap": {"ahead": True}}, "overlap.ahead is incompatible with algorithm.rescue"),
        ({"data": {"prompts": {"first_tokens": 2}}}, "leave one of the two out"),
        ({"algorithm": {"rescue": {"hints": [{"column": "hint", "template": "{hint}"}]}}}, "must have {prompt}"),
        ({"algorithm": {"rescue": {"hints": []}}}, "algorithm.rescue.hints"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    tree = merge(merge(doors_tree(tmp_path), RESCUE), settings)
    with pytest.raises(UserError, match=message.replace("{", r"\{")):
        train_config(tree)


def test_a_column_that_no_row_has_is_an_error(tmp_path: Path) -> None:
    tree = merge(merge(doors_tree(tmp_path), RESCUE), {"algorithm": {"rescue": {"hints": [{"column": "answer"}]}}})
    with pytest.raises(DataError, match="no usable row has a text in the column 'answer'"):
        build_online(train_config(tree), quiet())


def test_growing_hints_show_more_and_more_words() -> None:
    text = "add  two and\nthree"
    shown = [
        Hint(column="a", share=share, template="{hint}|{prompt}").add_to("{hint}?", text) for share in (0.1, 0.5, 1)
    ]
    assert shown == ["add|{hint}?", "add  two|{hint}?", "add  two and\nthree|{hint}?"]

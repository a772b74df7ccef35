"""Prompts dealt by their success rate, and hints that are due from earlier steps: the queue, and runs that use it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import online, trained
from test_rescue import RESCUE, Bench, collected, doors_tree, prompts
from torch import Tensor

from rlhf.algorithms.curriculum import BandCurriculum, Curriculum, VarianceCurriculum
from rlhf.algorithms.online import Online
from rlhf.algorithms.rescue import Rescue
from rlhf.config.files import merge
from rlhf.config.load import train_config
from rlhf.data.prompts import PromptSet
from rlhf.data.rows import RowCounts
from rlhf.errors import UserError
from rlhf.training.collect import collect
from rlhf.training.online import train
from rlhf.training.prompt_queue import PromptQueue, QueueState

FAIL, WIN = (0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)


def queue(curriculum: Curriculum | None = None, rescue: Rescue | None = None, count: int = 40) -> PromptQueue:
    ids = tuple([i] for i in range(count))
    rows = PromptSet(ids, tuple({"prompt": str(i)} for i in range(count)), 0, RowCounts("made up", fatal=False))
    return PromptQueue(rows, 4, 1, rescue=rescue, curriculum=curriculum)


def dealt(prompt_queue: PromptQueue) -> list[int]:
    return [int(reference["prompt"]) for reference in prompt_queue.prompts().references]


def finish(prompt_queue: PromptQueue, shares: list[float]) -> dict[str, float]:
    known = torch.tensor(shares, dtype=torch.float64)
    return prompt_queue.finish(known == 0, torch.zeros(len(shares), dtype=torch.bool), known).values()


def rate(index: int) -> float:
    """Of 40 prompts the first ten are always solved, the last ten never, and the others half the time."""
    return 1.0 if index < 10 else 0.0 if index >= 30 else 0.5


def test_chances_by_hand() -> None:
    variance = VarianceCurriculum()
    assert [variance.chance(p) for p in (None, 0.0, 0.25, 0.5, 1.0)] == [1.0, 0.1, 0.75, 1.0, 0.1]
    band = BandCurriculum(low=0.25, high=0.75, floor=0.0)
    assert [band.chance(p) for p in (None, 0.2, 0.25, 0.75, 0.8)] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert VarianceCurriculum(memory=0.75).updated(0.4, 1.0) == pytest.approx(0.55)
    assert variance.updated(None, 0.3) == 0.3


def test_every_prompt_is_dealt_once_before_the_curriculum_chooses() -> None:
    prompt_queue, plain = queue(VarianceCurriculum()), queue()
    for _ in range(10):  # an epoch of 40 prompts
        assert dealt(prompt_queue) == dealt(plain)
        finish(prompt_queue, [rate(index) for index in dealt(prompt_queue)])
        finish(plain, [0.0] * 4)
    assert sorted(prompt_queue.state.records) == list(range(40))


def test_prompts_are_dealt_by_their_chance_and_those_passed_over_are_counted() -> None:
    prompt_queue, counts, passed = queue(VarianceCurriculum()), Counter[float](), 0.0
    for step in range(410):
        now = dealt(prompt_queue)
        metrics = finish(prompt_queue, [rate(index) for index in now])
        if step >= 10:
            counts.update(rate(index) for index in now)
            passed += metrics["curriculum/passed_over"]
    assert metrics["curriculum/known"] == 1.0
    assert metrics["curriculum/rate"] == pytest.approx(0.5)
    assert counts[0.5] / 20 == pytest.approx(10 * counts[0.0] / 10, rel=0.25)  # chances 1 and 0.1, 20 and 10 prompts
    assert counts[0.5] / 20 == pytest.approx(10 * counts[1.0] / 10, rel=0.25)
    places = prompt_queue.state.fresh - 40
    assert places == passed + 4 * 400  # nothing is lost uncounted
    assert places / 40 == pytest.approx(counts[0.5] / 20, abs=1.0)  # a prompt with chance 1 comes in each epoch


def test_where_nothing_is_worth_much_a_step_is_full_all_the_same() -> None:
    prompt_queue = queue(BandCurriculum(floor=0.0), count=3)
    finish(prompt_queue, [0.0, 1.0, 0.0, 0.0])
    assert len(dealt(prompt_queue)) == 4
    assert finish(prompt_queue, [0.0] * 4)["curriculum/passed_over"] >= 0.0


def test_a_completion_without_a_score_changes_no_rate() -> None:
    prompt_queue = queue(VarianceCurriculum())
    first = dealt(prompt_queue)
    finish(prompt_queue, [0.5, float("nan"), 0.25, 1.0])
    assert first[1] not in prompt_queue.state.records
    assert prompt_queue.state.records[first[2]].rate == 0.25


def hinted_later(**choices: Any) -> Rescue:
    hints = {"hints": [{"column": "a"}, {"column": "b"}]}
    return Rescue.model_validate({**hints, "after": 2, "replay": {"limit": 0}, **choices})


def test_a_hint_is_due_after_failures_in_a_row_and_none_after_a_success() -> None:
    rescue = hinted_later()
    assert [rescue.due(failures) for failures in range(5)] == [0, 0, 1, 2, 2]
    assert hinted_later(after=0).due(9) == 0
    prompt_queue = queue(rescue=rescue, count=4)  # each step has all four
    seen = []
    for shares in ([0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]):
        seen.append(dict(zip(dealt(prompt_queue), prompt_queue.due().tolist(), strict=True)))
        finish(prompt_queue, [float(shares[index]) for index in dealt(prompt_queue)])
    assert seen == [
        {0: 0, 1: 0, 2: 0, 3: 0},
        {0: 0, 1: 0, 2: 0, 3: 0},
        {0: 1, 1: 1, 2: 0, 3: 0},
        {0: 2, 1: 0, 2: 0, 3: 1},
    ]


def test_who_is_hinted_depends_on_no_draw_of_the_step() -> None:
    """The second is due though it succeeds now, the first is not though it fails; a hinted failure replaces, too."""
    algorithm = Online.model_validate(
        {"advantage": {"type": "gae"}, "value_loss": {}, "rescue": hinted_later(after=1).model_dump()}
    )
    bench = Bench({3: (FAIL,), 4: (WIN, (0.0, 0.0)), 5: (FAIL, (), (1.0, 0.0))})

    def hinted(number: int) -> tuple[Any, Tensor]:
        return prompts([3, 4, 5], 3 + number), torch.tensor([True, True, True])

    result = collect(
        prompts([3, 4, 5]),
        bench,
        lambda _: prompts([8, 8, 8]),
        algorithm,
        group_size=4,
        hinted=hinted,
        due=torch.tensor([0, 1, 2]),
    )
    assert [(names, who) for names, who, _, _ in bench.drawn] == [
        ((), [3, 4, 5]),
        (("rescue", 1), [4]),
        (("rescue", 2), [5]),
    ]
    assert result.hinted.tolist() == [False] * 6 + [True, True] + [False, False, True, True]
    assert result.scores.values.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]
    assert (result.failed.tolist(), result.rescued.tolist()) == ([True, False, True], [False, False, True])
    assert result.shares.tolist() == [0.0, 0.25, 0.0]
    values = result.metrics.values()
    assert [values[f"rescue/{name}"] for name in ("due", "rescued", "without_hint")] == [2, 1, 0]
    assert values["completion/extra"] == 4


def test_a_group_of_one_is_hinted_as_a_whole() -> None:
    assert [hinted_later().hinted_per_group(size) for size in (1, 2, 4)] == [1, 1, 2]


def test_the_share_of_successes_is_that_of_the_plain_draw() -> None:
    result = collected(Bench({3: (FAIL, (1.0, 1.0)), 4: (WIN,), 5: (WIN,)}))
    assert result.shares.tolist() == [0.0, 0.25, 0.25]


PPO: dict[str, Any] = {
    "algorithm": {
        "preset": "ppo",
        "curriculum": {"type": "band", "low": 0.1},
        "rescue": {
            "hints": [{"column": "hint", "template": "{prompt} {hint}"}],
            "after": 1,
            "weights": {"type": "sequence", "cap": 100},
        },
    },
    "sampling": {"completions_per_prompt": 4},
    "batch": {"prompts_per_step": 3},
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_killed_ppo_run_with_hints_and_curriculum_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    how = {"checkpoint": {"every": 1}, "schedule": {"steps": 5}}
    trained(merge(doors_tree(tmp_path / "a", **how), PPO))
    tree = merge(doors_tree(tmp_path / "b", **how), PPO)
    broken = online(tree)
    assert broken.queue is not None
    whole = broken.queue.finish

    def die(*arguments: Any) -> Any:
        if broken.session.state.step == 3:
            raise KeyboardInterrupt
        return whole(*arguments)

    broken.queue.finish = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    broken.session.recorder.close()
    trained(tree)
    rows = lines(tmp_path / "a")
    assert rows == lines(tmp_path / "b")
    assert rows[1]["rescue/due"] == 0.0
    assert rows[-1]["rescue/due"] > 0.0
    assert 0 < rows[-1]["rescue/hinted_tokens"] < 1
    assert rows[-1]["curriculum/known"] == 1.0
    assert sum(row["curriculum/passed_over"] for row in rows[1:]) > 0
    assert all(row["policy/first_ratio_deviation"] < 5e-5 for row in rows[1:])


@pytest.mark.parametrize("how", ["another_file", "same_file"])
def test_what_is_known_of_other_prompts_deals_none(tmp_path: Path, how: str) -> None:
    settings = {"curriculum": {"type": "variance"}, "rescue": RESCUE["algorithm"]["rescue"]}
    tree = merge(doors_tree(tmp_path, schedule={"steps": 3}), {"algorithm": settings})
    before = trained(tree)
    assert before.queue is not None
    assert before.queue.state.records
    assert before.queue.state.waiting
    longer = ("schedule.steps=4", "checkpoint.resume=always")
    same = online(tree, *longer, "algorithm.kl.estimator=k1")
    assert same.queue is not None
    assert same.queue.state == before.queue.state
    same.session.recorder.close()
    path = Path(tree["data"]["prompts"]["path"])
    other = path if how == "same_file" else path.with_name("other.jsonl")
    other.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    run = online(tree, *longer, f"data.prompts.path={other}")
    assert run.queue is not None
    assert run.queue.state == QueueState(fresh=12)  # three steps of four
    run.session.recorder.close()
    notes = [row["text"] for row in run.session.recorder.folder.read_notes()]
    assert any("success rates and replays begin again" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap": {"ahead": True}}, "overlap.ahead is incompatible with algorithm.curriculum"),
        ({"data": {"prompts": {"stream": True}}}, "without sources and stream"),
        ({"algorithm": {"curriculum": {"type": "band", "low": 0.9, "high": 0.1}}}, "low has to be the smaller"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    tree = merge(merge(doors_tree(tmp_path), {"algorithm": {"curriculum": {"type": "variance"}}}), settings)
    with pytest.raises(UserError, match=message):
        train_config(tree)

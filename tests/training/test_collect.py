"""The samples of a step: groups refilled by other prompts, greedy baselines, and everything sampled counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_models import completions_of

from rlhf.algo.advantages import group_centered, uniform_groups
from rlhf.algorithms.online import Online
from rlhf.errors import NonFiniteScores
from rlhf.training.collect import collect, leave_out_unscored
from rlhf.training.rollout import Collected, live_tokens
from rlhf.types import Completions, Prompts, Scores

REFILLED = {"advantage": {"type": "group"}, "drop_uniform_groups": True}
GREEDY = {"advantage": {"type": "greedy"}}


def prompts(tokens: Sequence[int]) -> Prompts:
    """Prompts of one token each, by which they are told apart."""
    return Prompts(
        prompt_ids=torch.tensor(tokens)[:, None],
        prompt_mask=torch.ones(len(tokens), 1, dtype=torch.bool),
        row_ids=torch.arange(len(tokens)),
        references=tuple({"who": token} for token in tokens),
    )


@dataclass
class Bench:
    """Draws whose scores are known for each prompt; it remembers its requests."""

    scores: Mapping[int, Sequence[float]]
    greedy_scores: Mapping[int, float] = field(default_factory=dict)
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(
        self, batch: Prompts, *names: int | str, group_size: int, greedy: bool = False
    ) -> tuple[Completions, Scores]:
        who = batch.prompt_ids[:, 0].tolist()
        self.asked.append((names, who, batch.row_ids.tolist(), group_size, greedy))
        repeated = [token for token in who for _ in range(group_size)]
        length = 2 + len(self.asked)  # each draw wider than the last
        rows = batch.row_ids.repeat_interleave(group_size) * group_size + torch.arange(len(repeated)) % group_size
        completions = completions_of([[token] for token in repeated], [[token] * length for token in repeated])
        values = [self.greedy_scores[token] for token in who] if greedy else [s for t in who for s in self.scores[t]]
        scores = torch.tensor(values)
        made = Completions(
            prompt_ids=completions.prompt_ids,
            prompt_mask=completions.prompt_mask,
            row_ids=rows,
            references=tuple({"who": token} for token in repeated),
            completion_ids=completions.completion_ids,
            completion_mask=completions.completion_mask,
            sampler_logprobs=completions.sampler_logprobs,
            finished=completions.finished,
            group_size=group_size,
        )
        return made, Scores(values=scores, parts={"raw": scores + 100, **({} if names else {"only once": scores})})


def collected(
    bench: Bench, refills: Mapping[int, Sequence[int]] | None = None, size: int = 2, **choices: Any
) -> Collected:
    refill: Callable[[int], Prompts] = lambda number: prompts((refills or {})[number])  # noqa: E731
    return collect(prompts([3, 4, 5]), bench, refill, Online.model_validate(choices), group_size=size)


def who(result: Collected) -> list[int]:
    return [int(reference["who"]) for reference in result.completions.references]


MIXED, ALIKE = (1.0, 2.0), (7.0, 7.0)


def test_without_options_it_is_one_draw() -> None:
    bench = Bench({3: MIXED, 4: ALIKE, 5: MIXED})
    result = collected(bench, advantage={"type": "group"}, drop_uniform_groups=True)
    assert bench.asked == [((), [3, 4, 5], [0, 1, 2], 2, False)]
    assert result.scores.values.tolist() == [1, 2, 7, 7, 1, 2]
    assert result.baselines.tolist() == [0.0] * 6
    assert (result.extra, result.metrics.values()) == (0, {})


def test_a_uniform_group_is_replaced_by_another_prompt_in_its_place() -> None:
    bench = Bench({3: MIXED, 4: ALIKE, 5: MIXED, 8: (4.0, 3.0), 9: MIXED})
    result = collected(bench, {1: [8, 9, 9]}, **REFILLED, refill_rounds=3)
    assert bench.asked[1:] == [(("refill", 1), [8], [1], 2, False)]  # the one prompt that is needed, under its number
    assert who(result) == [3, 3, 8, 8, 5, 5]
    assert result.completions.row_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert result.scores.values.tolist() == [1, 2, 4, 3, 1, 2]
    assert result.scores.parts["raw"].tolist() == [101, 102, 104, 103, 101, 102]
    assert result.scores.parts["only once"].isnan().tolist() == [False, False, True, True, False, False]
    assert result.completions.prompt_ids[:, -1].tolist() == [3, 3, 8, 8, 5, 5]
    assert result.completions.completion_mask.sum(1).tolist() == [3, 3, 4, 4, 3, 3]
    assert result.extra == 2
    assert result.metrics["completion/extra_tokens"] == 2 * (1 + 3)  # the two that were thrown away
    assert result.metrics["completion/extra"] == 2.0
    assert result.metrics["group/refilled"] == pytest.approx(1 / 3)
    assert result.metrics["score/first_draw"] == pytest.approx(20 / 6)


def test_rounds_go_on_for_what_is_still_uniform_and_end_at_the_limit() -> None:
    scores = {3: ALIKE, 4: ALIKE, 5: ALIKE, 8: ALIKE, 9: MIXED, 10: ALIKE, 11: ALIKE, 12: MIXED, 13: MIXED}
    bench = Bench(scores)
    result = collected(bench, {1: [8, 9, 10], 2: [11, 12, 13]}, **REFILLED, refill_rounds=2)
    assert [asked[1:3] for asked in bench.asked] == [
        ([3, 4, 5], [0, 1, 2]),
        ([8, 9, 10], [0, 1, 2]),
        ([11, 12], [0, 2]),
    ]
    assert who(result) == [3, 3, 9, 9, 12, 12]  # the first is still uniform, and stays unchanged
    assert uniform_groups(result.scores.values, 2).tolist() == [True, True, False, False, False, False]
    assert result.extra == 2 * (3 + 3 + 2) - 6
    assert result.metrics["group/refilled"] == pytest.approx(2 / 3)
    assert live_tokens(result.completions) + result.metrics["completion/extra_tokens"] == 6 * (1 + 3) + 6 * (
        1 + 4
    ) + 4 * (1 + 5)


def test_nothing_is_refilled_where_nothing_is_uniform() -> None:
    bench = Bench({3: MIXED, 4: MIXED, 5: MIXED})
    result = collected(bench, **REFILLED, refill_rounds=5)
    assert len(bench.asked) == 1
    assert (result.metrics["group/refilled"], result.metrics["completion/extra"], result.extra) == (0.0, 0.0, 0)


@pytest.mark.parametrize("size", [1, 3])
def test_a_greedy_completion_of_each_prompt_is_the_baseline_of_its_group(size: int) -> None:
    bench = Bench(dict.fromkeys((3, 4, 5), (1.0, 2.0, 3.0)[:size]), {3: 0.5, 4: -0.5, 5: 6.0})
    result = collected(bench, size=size, **GREEDY)
    assert bench.asked[1:] == [(("greedy",), [3, 4, 5], [0, 1, 2], 1, True)]
    assert result.baselines.tolist() == [score for score in (0.5, -0.5, 6.0) for _ in range(size)]
    assert result.scores.values.tolist() == [1.0, 2.0, 3.0][:size] * 3
    assert result.extra == 3
    assert result.metrics.values() == {
        "score/greedy": 2.0,
        "completion/extra": 3.0,
        "completion/extra_tokens": 3 * (1 + 4),
    }


def test_a_group_of_equal_scores_or_of_none_is_refilled() -> None:
    bench = Bench({3: (7.0, math.nan), 4: (math.nan, math.nan), 5: MIXED, 8: (math.nan, math.nan), 9: MIXED})
    result = collected(bench, {1: [8, 9, 9], 2: [9, 9, 9]}, **REFILLED, refill_rounds=2)
    assert [asked[1:3] for asked in bench.asked[1:]] == [([8, 9], [0, 1]), ([9], [0])]
    assert who(result) == [9, 9, 9, 9, 5, 5]
    assert result.metrics["score/first_draw"] == pytest.approx(10 / 3)


def test_a_prompt_without_a_greedy_score_is_left_out() -> None:
    bench = Bench(dict.fromkeys((3, 4, 5), (1.0, 2.0)), {3: 0.5, 4: math.nan, 5: 1.5})
    result = leave_out_unscored(collected(bench, **GREEDY))
    assert who(result) == [3, 3, 5, 5]
    assert result.baselines.tolist() == [0.5, 0.5, 1.5, 1.5]
    assert result.metrics["score/greedy"] == pytest.approx(1.0)


def test_what_no_verifier_applies_to_is_left_out() -> None:
    """By hand: the prompt without a score goes; the completion without one has the mean of its group, 2.5."""
    bench = Bench({3: (1.0, math.nan, 4.0), 4: (math.nan,) * 3, 5: (1.0, 2.0, 3.0)})
    group: dict[str, Any] = {"advantage": {"type": "group"}}
    result = leave_out_unscored(collected(bench, size=3, **group))
    assert who(result) == [3, 3, 3, 5, 5, 5]
    assert result.scores.values.tolist() == [1, 2.5, 4, 1, 2, 3]
    assert result.completions.row_ids.tolist() == [0, 1, 2, 6, 7, 8]
    assert (len(result.baselines), len(result.hinted), result.extra) == (6, 6, 3)
    assert group_centered(result.scores.values, 3).tolist() == [-1.5, 0, 1.5, -1, 0, 1]
    assert result.graded.tolist() == [True, False, True, True, True, True]
    scored = collected(Bench({3: MIXED, 4: MIXED, 5: MIXED}), **group)
    assert leave_out_unscored(scored) is scored
    with pytest.raises(NonFiniteScores, match="no verifier applies to any completion of the step"):
        leave_out_unscored(collected(Bench(dict.fromkeys((3, 4, 5), (math.nan, math.nan))), **group))

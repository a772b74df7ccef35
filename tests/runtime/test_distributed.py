"""Rows are dealt to processes so that none is lost, none counts twice, and all make as many passes."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ragged

from rlhf.errors import ConfigError, NonFiniteScores, UserError
from rlhf.rewards.source import MainRankReward, ShardedReward
from rlhf.runtime.distributed import SINGLE_PROCESS, Distributed
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.training.micro_batches import split_into_micro_batches
from rlhf.types import Completions, Scores

T = TypeVar("T")


class Others(Distributed):
    """A process whose exchange with the others is seen by the test: `messages` are theirs, in turn."""

    def __init__(self, rank: int, world: int, messages: list[list[Any]]) -> None:
        super().__init__(rank, world)
        self.messages = messages
        self.own: list[Any] = []

    def gather(self, value: T) -> list[T]:
        self.own.append(value)
        return self.messages.pop(0) if self.messages else [value]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 9))
def test_every_weight_has_one_owner_and_all_ranks_own_about_as_much(sizes: list[int], world: int) -> None:
    named = {f"weight {i}": size for i, size in enumerate(sizes)}
    owners = [Distributed(rank, world).owners(named) for rank in range(world)]
    assert all(owner == owners[0] for owner in owners)
    assert owners[0].keys() == named.keys()
    loads = [sum(size for name, size in named.items() if owners[0][name] == rank) for rank in range(world)]
    assert max(loads) <= sum(sizes) / world + max(sizes)


def test_large_weights_are_dealt_first() -> None:
    assert Distributed(0, 2).owners({"a": 1, "b": 8, "c": 4, "d": 4}) == {"b": 0, "c": 1, "d": 1, "a": 0}


@given(st.integers(1, 40), st.integers(1, 9))
def test_shares_are_a_partition_of_equal_size(count: int, world: int) -> None:
    shares = [Distributed(rank, world).share(count) for rank in range(world)]
    own = [share.rows[: share.live].tolist() for share in shares]
    assert [row for rows in own for row in rows] == list(range(count))
    assert {len(share.rows) for share in shares} == {-(-count // world)}
    lives = [share.live for share in shares]
    assert max(lives) - min(lives) <= 1
    assert all(0 <= row < count for share in shares for row in share.rows.tolist())


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_every_process_makes_as_many_passes_and_counts_its_rows_once(rows: int, world: int, size: int) -> None:
    batch = ragged().rows(torch.arange(rows))
    passes = [
        split_into_micro_batches(batch, AdaptiveMicroBatch(size), size, Distributed(rank, world))
        for rank in range(world)
    ]
    assert len({len(own_passes) for own_passes in passes}) == 1
    counted = [int(row) for own_passes in passes for one in own_passes if one.counts for row in one.rows.row_ids]
    assert counted == list(range(rows))
    assert all(1 <= len(one.rows) <= size for own_passes in passes for one in own_passes)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
def test_passes_by_tokens_hold_no_more_and_are_as_many_in_every_process(rows: int, world: int, limit: int) -> None:
    batch, by_tokens = ragged().rows(torch.arange(rows)), AdaptiveMicroBatch(limit, tokens=True)
    lengths = batch.live_tokens().tolist()
    own = [len(by_tokens.cut(batch.rows(torch.arange(*Distributed(r, world)._bounds(rows, r))))) for r in range(world)]
    told = [float(count) for count in own]
    passes = [split_into_micro_batches(batch, by_tokens, limit, Others(rank, world, [told])) for rank in range(world)]
    assert {len(own_passes) for own_passes in passes} == {max(own)}
    counted = [[int(row) for row in one.rows.row_ids] for own_passes in passes for one in own_passes if one.counts]
    assert [row for numbers in counted for row in numbers] == list(range(rows))
    assert all(len(numbers) == 1 or sum(lengths[row] for row in numbers) <= limit for numbers in counted)


def test_alone_passes_are_the_batch_in_order() -> None:
    batch = ragged()
    assert [
        one.rows.row_ids.tolist() for one in split_into_micro_batches(batch, AdaptiveMicroBatch(3), 3, SINGLE_PROCESS)
    ] == [[0, 1, 2], [3]]
    assert SINGLE_PROCESS.on_main(lambda: 3) == 3
    assert SINGLE_PROCESS.gather(2) == [2]


def scores(batch: Completions) -> Scores:
    lengths = batch.completion_mask.sum(dim=1).float()
    return Scores(values=lengths, parts={"b": lengths + 1, "a": lengths + 2})


def test_a_dealt_reward_scores_each_completion_where_it_is() -> None:
    batch = ragged().rows(torch.arange(3))  # of two processes, the second has one row and repeats it
    whole = scores(batch)
    told: list[Any] = []
    for rank in range(2):
        process = Others(rank, 2, [])
        ShardedReward(scores, process)(batch)
        told.append(process.own[-1])
    assert [len(values) for values, *_ in told] == [2, 1]
    heard = ShardedReward(scores, Others(0, 2, [[None, None], told]))(batch)
    assert torch.equal(heard.values, whole.values)
    assert {name: part.tolist() for name, part in heard.parts.items()} == {
        name: part.tolist() for name, part in whole.parts.items()
    }


def test_a_score_that_one_process_cannot_give_stops_all() -> None:
    def broken(_: Completions) -> Scores:
        raise NonFiniteScores("the score of row 2 is nan")

    here, there = Others(0, 2, []), Others(1, 2, [])
    with pytest.raises(NonFiniteScores):
        ShardedReward(broken, there)(ragged())
    with pytest.raises(NonFiniteScores, match="row 2"):
        ShardedReward(scores, Others(0, 2, [[None, there.own[0]]]))(ragged())
    with pytest.raises(ZeroDivisionError):
        here.all_succeed(lambda: 1 / 0)
    assert isinstance(here.own[0], UserError), "an error that is nobody's mistake travels as its text"
    assert str(here.own[0]) == "ZeroDivisionError: division by zero"


def test_a_function_is_asked_once_for_the_whole_batch() -> None:
    asked: list[int] = []

    def source(batch: Completions) -> Scores:
        asked.append(len(batch))
        return scores(batch)

    assert torch.equal(MainRankReward(source, SINGLE_PROCESS)(ragged()).values, scores(ragged()).values)
    assert asked == [4]


class Told(Distributed):
    """The main process, or another that received `outcome`."""

    def __init__(self, rank: int, outcome: Any = None) -> None:
        super().__init__(rank, 2)
        self.outcome = outcome

    def from_main(self, value: T) -> T:
        if self.is_main:
            self.outcome = value
            return value
        told: T = self.outcome
        return told


@pytest.mark.parametrize("error", [ConfigError("no such key"), OSError(28, "No space left on device")])
def test_an_error_of_the_main_process_is_raised_in_all(error: UserError | OSError) -> None:
    def fail() -> None:
        raise error

    main = Told(0)
    with pytest.raises(type(error)):
        main.on_main(fail)
    with pytest.raises(type(error), match=str(error.args[-1])):
        Told(1, main.outcome).on_main(lambda: pytest.fail("only the main process does it"))


def test_any_error_of_the_main_process_is_told_to_the_others() -> None:
    def fail() -> None:
        raise RuntimeError("no space left")

    main = Told(0)
    with pytest.raises(RuntimeError, match="no space left"):
        main.on_main(fail)
    with pytest.raises(UserError, match="RuntimeError: no space left"):
        Told(1, main.outcome).on_main(lambda: None)

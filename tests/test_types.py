"""The batches of a step keep their rows together, and refuse shapes that do not belong together."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.batching import Batch, concat, extend, group_by_size
from rlhf.types import Completions, PreferencePairs, Prompts, Rollout, Scores


def prompts(rows: int, width: int = 3, *, start: int = 0) -> Prompts:
    """Row i has id `start + i` everywhere it can; the first prompt column is padding."""
    numbers = torch.arange(start, start + rows)
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[:, 0] = False
    return Prompts(
        prompt_ids=numbers[:, None].expand(rows, width) * mask,
        prompt_mask=mask,
        row_ids=numbers,
        references=tuple({"number": int(n)} for n in numbers),
    )


def completions(rows: int, width: int = 3, tokens: int = 4, *, start: int = 0, group_size: int = 1) -> Completions:
    """As `prompts`, with the row's id on every token."""
    ids = torch.arange(start, start + rows)[:, None].expand(rows, tokens)
    return extend(
        Completions,
        prompts(rows, width, start=start),
        completion_ids=ids,
        completion_mask=torch.ones(rows, tokens, dtype=torch.bool),
        sampler_logprobs=-ids.double(),
        finished=torch.arange(start, start + rows) % 2 == 0,
        group_size=group_size,
    )


def consistent(batch: Completions, numbers: list[int]) -> None:
    """Every per-row field speaks of these rows, in this order."""
    assert len(batch) == len(numbers)
    assert batch.row_ids.tolist() == numbers
    assert [entry["number"] for entry in batch.references] == numbers
    assert batch.prompt_ids[:, -1].tolist() == numbers
    assert batch.completion_ids[:, 0].tolist() == numbers
    assert (-batch.sampler_logprobs[:, 0]).tolist() == numbers
    assert batch.finished.tolist() == [n % 2 == 0 for n in numbers]


def test_rows_by_index_and_by_slice():
    batch = completions(6, group_size=2)
    consistent(batch.rows(torch.tensor([4, 0, 4])), [4, 0, 4])
    consistent(batch.rows(slice(1, 4)), [1, 2, 3])
    consistent(batch.rows(slice(5, 99)), [5])
    assert type(batch.rows(slice(0, 1))) is Completions
    assert batch.rows(slice(0, 1)).group_size == 2
    consistent(batch, [0, 1, 2, 3, 4, 5])


def test_rows_are_not_named_by_a_mask():
    with pytest.raises(AssertionError, match="by integers"):
        completions(2).rows(torch.tensor([True, False]))


@given(st.integers(1, 7), st.integers(1, 8), st.booleans(), st.randoms(use_true_random=False))
def test_split_deals_out_every_row_once_in_order(rows, size, shuffled, random):
    order = random.sample(range(rows), rows) if shuffled else list(range(rows))
    parts = list(completions(rows).split(size, torch.tensor(order) if shuffled else None))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1]) <= size
    dealt = [n for part in parts for n in part.row_ids.tolist()]
    assert dealt == order
    for part in parts:
        consistent(part, part.row_ids.tolist())
    together = concat(parts)
    consistent(together, order)


def test_concat_pads_prompts_left_and_completions_right():
    narrow, wide = completions(1, width=2, tokens=2, start=1), completions(1, width=4, tokens=3, start=2, group_size=1)
    for batch in (concat([narrow, wide]), concat([wide, narrow]).rows(torch.tensor([1, 0]))):
        consistent(batch, [1, 2])
        assert batch.prompt_ids.tolist() == [[0, 0, 0, 1], [0, 2, 2, 2]]
        assert batch.prompt_mask.tolist() == [[False, False, False, True], [False, True, True, True]]
        assert batch.completion_ids.tolist() == [[1, 1, 0], [2, 2, 2]]
        assert batch.completion_mask.tolist() == [[True, True, False], [True, True, True]]
        assert batch.sampler_logprobs.tolist() == [[-1.0, -1.0, 0.0], [-2.0, -2.0, -2.0]]
        assert batch.completion_mask.dtype == torch.bool
        assert batch.completion_ids.dtype == torch.long
        assert type(batch) is Completions


def test_concat_of_pairs_pads_each_side_by_its_own_width():
    def pair(chosen: int, rejected: int) -> PreferencePairs:
        return PreferencePairs(
            prompt_ids=torch.ones(1, chosen, dtype=torch.long),
            prompt_mask=torch.ones(1, chosen, dtype=torch.bool),
            chosen_ids=torch.full((1, chosen), 2),
            chosen_mask=torch.ones(1, chosen, dtype=torch.bool),
            rejected_ids=torch.full((1, rejected), 3),
            rejected_mask=torch.ones(1, rejected, dtype=torch.bool),
            chosen_learned=torch.ones(1, chosen, dtype=torch.bool),
            rejected_learned=torch.ones(1, rejected, dtype=torch.bool),
            margins=torch.zeros(1),
        )

    joined = concat([pair(1, 3), pair(2, 1)])
    assert joined.prompt_ids.tolist() == [[0, 1], [1, 1]]
    assert joined.chosen_ids.tolist() == [[2, 0], [2, 2]]
    assert joined.rejected_ids.tolist() == [[3, 3, 3], [3, 0, 0]]
    assert joined.rejected_mask.tolist() == [[True, True, True], [True, False, False]]
    assert joined.margins.shape == (2,)


def test_concat_refuses_batches_of_different_groups():
    with pytest.raises(AssertionError, match="group_size differs"):
        concat([completions(2, group_size=1), completions(2, group_size=2)])


def test_extend_keeps_what_was_there():
    batch = completions(2, tokens=4)
    numbers = torch.zeros(2, 4, dtype=torch.float64)
    annotations = {"logprobs": numbers, "ref_logprobs": numbers + 1, "values": numbers + 2}
    annotations["hinted"] = torch.zeros(2, dtype=torch.bool)
    stage = extend(Rollout, batch, scores=torch.ones(2), baselines=torch.zeros(2), **annotations)
    assert type(stage) is Rollout
    for field in fields(Completions):
        assert getattr(stage, field.name) is getattr(batch, field.name)
    assert stage.ref_logprobs.sum() == 8
    with pytest.raises(TypeError, match="values"):
        extend(Rollout, batch, scores=torch.ones(2), baselines=torch.zeros(2), logprobs=numbers, ref_logprobs=numbers)


def test_to_moves_every_tensor_and_nothing_else():
    batch = completions(2)
    moved = batch.to("meta")
    for field in fields(batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(before, Tensor):
            assert after.device.type == "meta"
            assert before.device.type == "cpu"
        else:
            assert after is before
    assert type(moved) is Completions
    assert len(moved) == 2


def test_a_batch_is_frozen_and_knows_its_rows():
    batch = prompts(3)
    assert len(batch) == 3
    with pytest.raises(FrozenInstanceError):
        batch.row_ids = torch.zeros(3, dtype=torch.long)
    with pytest.raises(TypeError, match="no per-row field"):
        len(Batch())


@pytest.mark.parametrize(
    "change",
    [
        {"completion_mask": torch.ones(2, 5, dtype=torch.bool)},  # another T
        {"completion_mask": torch.ones(3, 4, dtype=torch.bool)},  # another B
        {"completion_mask": torch.ones(2, 4)},  # not Bool: 1.0 is not a mask
        {"completion_mask": torch.ones(2, 4, dtype=torch.long)},
        {"completion_ids": torch.ones(2, 4)},  # not integers
        {"sampler_logprobs": torch.ones(2, 4, dtype=torch.long)},
        {"finished": torch.ones(2, 1, dtype=torch.bool)},  # another rank
        {"prompt_mask": torch.ones(2, 9, dtype=torch.bool)},  # another P
        {"references": [{}, {}]},  # not a tuple
        {"group_size": 1.5},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_does_not_fit_is_refused_where_it_is_made(change):
    with pytest.raises(BeartypeCallHintViolation):
        replace(completions(2), **change)


def test_scores_are_one_number_a_completion():
    with pytest.raises(BeartypeCallHintViolation):
        Scores(values=torch.zeros(2, 3), parts={})
    assert Scores(values=torch.zeros(2), parts={"length": torch.zeros(2)}).values.shape == (2,)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([3, 3, 3], 6, [[0, 1], [2]]),
        ([3, 9, 1, 1], 4, [[0], [1], [2, 3]]),  # one that is too large stands alone
        ([5], 1, [[0]]),
        ([2, 2, 2], 100, [[0, 1, 2]]),
        ([], 3, []),
    ],
)
def test_portions_hold_as_much_as_the_limit_allows(sizes, limit, expected):
    assert [rows.tolist() for rows in group_by_size(torch.tensor(sizes, dtype=torch.long), limit)] == expected


def test_live_tokens_are_those_of_prompt_and_completions():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    ids = mask.long()
    pairs = PreferencePairs(
        prompt_ids=ids, prompt_mask=mask, chosen_ids=ids, chosen_mask=mask, rejected_ids=ids, rejected_mask=mask,
        chosen_learned=mask, rejected_learned=mask, margins=torch.zeros(2),
    )  # fmt: skip
    assert pairs.live_tokens().tolist() == [6, 3]

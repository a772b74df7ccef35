"""One forward pass for both sides; a score that no padding, order or batch can move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rm_cases import RAGGED, made_model
from tiny_models import tokenizer
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from reward_model.model import drop_padding_columns, pair_scores, score_pairs, score_rows
from rlhf.models.scalar_head import ScalarHeadModel, load_scalar_head
from rlhf.types import PreferencePairs


@pytest.fixture(params=["llama", "gpt2", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ScalarHeadModel:
    return made_model(tmp_path, request.param).eval()


@pytest.fixture
def pairs() -> PreferencePairs:
    return RAGGED.collate(range(len(RAGGED)))


def alone(model: ScalarHeadModel, ids: list[int]) -> Tensor:
    """The score of one unpadded sequence, by hand: head · (hidden state of its last token)."""
    hidden = model.classifier.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return hidden @ model.head.weight[0]


def expected(model: ScalarHeadModel) -> tuple[Tensor, Tensor]:
    chosen = [alone(model, [*p, *c]) for p, c in zip(RAGGED.prompts, RAGGED.chosen, strict=True)]
    rejected = [alone(model, [*p, *r]) for p, r in zip(RAGGED.prompts, RAGGED.rejected, strict=True)]
    return torch.stack(chosen), torch.stack(rejected)


def padded(pairs: PreferencePairs, *, prompt: tuple[int, int], completion: tuple[int, int]) -> PreferencePairs:
    """More padding, of another token: (left, right) of the prompt and of both completions."""
    changed = {}
    for name in ("prompt", "chosen", "rejected"):
        amount = prompt if name == "prompt" else completion
        ids, mask = getattr(pairs, f"{name}_ids"), getattr(pairs, f"{name}_mask")
        changed[f"{name}_ids"] = torch.nn.functional.pad(torch.where(mask, ids, 13), amount, value=17)
        changed[f"{name}_mask"] = torch.nn.functional.pad(mask, amount)
        if name != "prompt":
            changed[f"{name}_learned"] = torch.nn.functional.pad(getattr(pairs, f"{name}_learned"), amount)
    return replace(pairs, **changed)


def left_aligned(pairs: PreferencePairs) -> PreferencePairs:
    """The same completions with their padding on the left."""
    changed = {}
    for name in ("chosen", "rejected"):
        mask = getattr(pairs, f"{name}_mask")
        order = mask.long().argsort(dim=1, stable=True)
        changed[f"{name}_ids"] = getattr(pairs, f"{name}_ids").gather(1, order)
        changed[f"{name}_mask"] = mask.gather(1, order)
        changed[f"{name}_learned"] = getattr(pairs, f"{name}_learned").gather(1, order)
    return replace(pairs, **changed)


def test_scores_equal_unpadded_single_rows(model: ScalarHeadModel, pairs: PreferencePairs) -> None:
    torch.testing.assert_close(pair_scores(model, pairs), expected(model), rtol=0, atol=1e-10)


@pytest.mark.parametrize("prompt, completion", [((3, 0), (0, 5)), ((0, 4), (2, 2)), ((1, 1), (6, 0))])
def test_neither_the_side_nor_the_amount_of_padding_matters(
    model: ScalarHeadModel, pairs: PreferencePairs, prompt: tuple[int, int], completion: tuple[int, int]
) -> None:
    moved = padded(pairs, prompt=prompt, completion=completion)
    torch.testing.assert_close(pair_scores(model, moved), expected(model), rtol=0, atol=1e-10)
    torch.testing.assert_close(pair_scores(model, left_aligned(moved)), expected(model), rtol=0, atol=1e-10)


def test_both_sides_take_one_forward_pass(model: ScalarHeadModel, pairs: PreferencePairs) -> None:
    pair_scores(model, pairs)  # the first time, a pass or two are made to see whether rows can do without padding
    passes = []
    embedding = model.classifier.get_input_embeddings()
    assert embedding is not None
    handle = embedding.register_forward_pre_hook(lambda module, args: passes.append(args[0].shape))
    pair_scores(model, pairs)
    handle.remove()
    assert len(passes) == 1


def test_many_rows_come_back_in_their_order(model: ScalarHeadModel, pairs: PreferencePairs) -> None:
    chosen = (pairs.prompt_ids, pairs.prompt_mask, pairs.chosen_ids, pairs.chosen_mask)
    for size in (1, 2, 3, 64):
        scores = score_rows(model, *chosen, micro_batch_size=size, dtype="float64")
        torch.testing.assert_close(scores, expected(model)[0], rtol=0, atol=1e-10)


def test_rows_of_like_length_share_a_pass_without_dead_columns(model: ScalarHeadModel, pairs: PreferencePairs) -> None:
    model.packing = "off"
    shapes = []
    handle = model.classifier.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rows = (pairs.prompt_ids, pairs.prompt_mask, pairs.chosen_ids, pairs.chosen_mask)
    score_rows(model, *rows, micro_batch_size=1, dtype="float64")
    handle.remove()
    assert shapes == [(1, 10), (1, 8), (1, 8), (1, 2)]  # the lengths, longest first: no padding at all


def test_the_mode_is_put_back(model: ScalarHeadModel) -> None:
    for training in (True, False):
        model.train(training)
        score_pairs(model, RAGGED, [0, 1], micro_batch_size=2, dtype="float64")
        assert model.training is training


def test_pairs_may_be_picked(model: ScalarHeadModel) -> None:
    chosen, rejected = score_pairs(model, RAGGED, [3, 1], micro_batch_size=2, dtype="float64")
    torch.testing.assert_close((chosen, rejected), tuple(side[[3, 1]] for side in expected(model)), rtol=0, atol=1e-10)
    assert not chosen.requires_grad


def test_dead_columns_are_those_where_no_row_is_live() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[False, True, False, False], [False, False, False, True]])
    kept, live = drop_padding_columns(ids, mask)
    assert kept.tolist() == [[2, 4], [6, 8]]
    assert live.tolist() == [[True, False], [False, True]]


def test_the_saved_folder_gives_transformers_the_raw_score(model: ScalarHeadModel, tmp_path: Path) -> None:
    model.calibrate(0.7, 3.0)
    model.save(tokenizer(), tmp_path / "rm")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").double().eval()
    ours = load_scalar_head(str(tmp_path / "rm"), tokenizer(), new_head=None, dtype="float64").eval()
    for prompt, chosen in zip(RAGGED.prompts, RAGGED.chosen, strict=True):
        ids = torch.tensor([[*prompt, *chosen]])
        raw = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.item()
        live = torch.ones(1, len(prompt), dtype=torch.bool), torch.ones(1, len(chosen), dtype=torch.bool)
        rows = (torch.tensor([prompt]), live[0], torch.tensor([chosen]), live[1])
        score = score_rows(ours, *rows, micro_batch_size=1, dtype="float64")
        assert score.item() == pytest.approx((raw - 0.7) / 3.0, abs=1e-10)

"""Values stand one position before their token; scores at the last live one; folders round-trip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import COMPLETIONS, EOS, PROMPTS, completions_of, padded, ragged, saved, tiny, tokenizer
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlhf.errors import ModelError
from rlhf.models.backbone import load_causal_lm
from rlhf.models.logprobs import Sequences
from rlhf.models.scalar_head import (
    ScalarHeadModel,
    completion_values,
    last_live_value,
    load_scalar_head,
    sequence_scores,
)
from rlhf.types import Completions


@pytest.fixture(params=["llama", "gpt2", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ScalarHeadModel:
    path = saved(tiny(request.param), tmp_path)
    return load_scalar_head(path, tokenizer(), new_head="normal", dtype="float64").eval()


def fields(batch: Completions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask


def alone(model: ScalarHeadModel, ids: list[int]) -> Tensor:
    """The score at every position of one unpadded sequence, by hand."""
    hidden = model.classifier.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return hidden @ model.head.weight[0]


def test_values_and_scores_equal_unpadded_passes(model: ScalarHeadModel) -> None:
    values, scores = completion_values(model, *fields(ragged())), sequence_scores(model, *fields(ragged()))
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        by_hand = alone(model, [*prompt, *completion])
        expected = by_hand[len(prompt) - 1 : -1]
        torch.testing.assert_close(values[i, : len(completion)], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(scores[i], by_hand[-1], rtol=0, atol=1e-10)
        assert values[i, len(completion) :].abs().sum() == 0


def test_a_value_does_not_see_the_token_it_precedes(model: ScalarHeadModel) -> None:
    prompt, completion, t = [5, 7, 9], [3, 14, 6, 8], 1
    changed = [*completion[:t], 11, *completion[t + 1 :]]
    values = completion_values(model, *fields(completions_of([prompt, prompt], [completion, changed])))
    torch.testing.assert_close(values[0, : t + 1], values[1, : t + 1], rtol=0, atol=1e-12)
    assert (values[0, t + 1 :] - values[1, t + 1 :]).abs().min() > 1e-3


def test_what_the_masks_hide_has_no_influence(model: ScalarHeadModel) -> None:
    one, two = fields(ragged(fill=0)), fields(ragged(fill=17))
    torch.testing.assert_close(completion_values(model, *one), completion_values(model, *two), rtol=0, atol=1e-12)
    torch.testing.assert_close(sequence_scores(model, *one), sequence_scores(model, *two), rtol=0, atol=1e-12)


def test_a_score_is_the_same_whichever_side_is_padded(model: ScalarHeadModel) -> None:
    rows = [[*p, *c] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    nothing = torch.zeros(len(rows), 0, dtype=torch.long), torch.zeros(len(rows), 0, dtype=torch.bool)
    left = sequence_scores(model, *padded(rows, left=True), *nothing)
    right = sequence_scores(model, *nothing, *padded(rows, left=False))
    torch.testing.assert_close(left, right, rtol=0, atol=1e-10)
    torch.testing.assert_close(left, sequence_scores(model, *fields(ragged())), rtol=0, atol=1e-10)


def test_transformers_own_classification_agrees(model: ScalarHeadModel) -> None:
    """A token that is not the pad token ends these rows, so that its last-non-pad rule is the last live token."""
    batch = completions_of([[5, 7], [8]], [[3, EOS], [4, 9, 6, EOS]])
    joined = Sequences.join(*fields(batch))
    theirs = model.classifier(
        input_ids=joined.input_ids, attention_mask=joined.attention_mask, position_ids=joined.position_ids
    ).logits[:, 0]
    torch.testing.assert_close(sequence_scores(model, *fields(batch)), theirs, rtol=0, atol=1e-10)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_last_live(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    values = torch.arange(mask.numel()).reshape(mask.shape).double()
    expected = [max((j for j, live in enumerate(row) if live), default=0) for row in rows]
    assert last_live_value(values, mask).tolist() == [values[i, j].item() for i, j in enumerate(expected)]


def test_calibration_shifts_scales_and_is_saved_with_the_weights(model: ScalarHeadModel, tmp_path: Path) -> None:
    raw = sequence_scores(model, *fields(ragged()))
    assert model.calibration == (0.0, 1.0)
    model.calibrate(1.5, 0.25)
    torch.testing.assert_close(sequence_scores(model, *fields(ragged())), (raw - 1.5) / 0.25)
    model.save(tokenizer(), tmp_path / "rm")
    again = load_scalar_head(str(tmp_path / "rm"), tokenizer(), new_head=None, dtype="float64").eval()
    assert again.calibration == (1.5, 0.25)
    torch.testing.assert_close(sequence_scores(again, *fields(ragged())), (raw - 1.5) / 0.25)
    elsewhere = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert elsewhere.config.num_labels == 1
    assert torch.equal(elsewhere.score.weight, again.head.weight)


def test_a_new_head_is_zero_or_normal_and_belongs_to_its_seed(tmp_path: Path) -> None:
    path = saved(tiny(hidden_size=256, intermediate_size=8, num_hidden_layers=1), tmp_path)
    zero = load_scalar_head(path, tokenizer(), new_head="zero")
    assert zero.head.weight.abs().max() == 0
    weights = {seed: load_scalar_head(path, tokenizer(), new_head="normal", seed=seed).head.weight for seed in (0, 1)}
    again = load_scalar_head(path, tokenizer(), new_head="normal", seed=0).head.weight
    assert torch.equal(weights[0], again)
    assert not torch.equal(weights[0], weights[1])
    expected = (256 + 1) ** -0.5
    assert weights[0].std().item() == pytest.approx(expected, rel=0.15)  # 256 draws: 3.4 standard errors
    assert abs(weights[0].mean().item()) < 4 * expected / 16


def test_an_orthogonal_head_has_length_one_and_another_direction_for_every_seed(tmp_path: Path) -> None:
    path = saved(tiny(), tmp_path)
    heads = [load_scalar_head(path, tokenizer(), new_head="orthogonal", seed=seed).head.weight for seed in (0, 1, 0)]
    assert [head.norm().item() for head in heads] == pytest.approx([1.0, 1.0, 1.0], rel=1e-6)
    assert torch.equal(heads[0], heads[2])
    assert abs(torch.cosine_similarity(heads[0], heads[1]).item()) < 0.9


def test_the_backbone_is_the_policys(tmp_path: Path) -> None:
    policy = tiny()
    model = load_scalar_head(saved(policy, tmp_path), tokenizer(), new_head="zero", dtype="float64")
    theirs = dict(policy.base_model.named_parameters())
    ours = dict(model.classifier.base_model.named_parameters())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_causal_lm_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a reward model"):
        load_scalar_head(saved(tiny(), tmp_path), tokenizer(), new_head=None)


def test_a_reward_model_is_no_policy(tmp_path: Path, model: ScalarHeadModel) -> None:
    model.save(tokenizer(), tmp_path / "rm")
    with pytest.raises(ModelError, match="rm is a reward model: it writes nothing"):
        load_causal_lm(str(tmp_path / "rm"))


def test_two_labels_are_no_score(tmp_path: Path) -> None:
    config = tiny().config
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="one label"):
        load_scalar_head(str(tmp_path), tokenizer(), new_head=None)


def test_a_missing_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        load_scalar_head(str(tmp_path / "nowhere"), tokenizer(), new_head="zero")

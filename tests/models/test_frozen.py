"""Frozen models in bfloat16: matrices are rounded once, or widened for each product, and no result changes by a bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import ragged, saved, tiny, tokenizer
from torch import Tensor, nn

from rlhf.models.backbone import CausalLM, autocast, body_of, freeze
from rlhf.models.kernels.cast import cast_weight, weights_cast_once
from rlhf.models.kernels.llama.forward import supports_fused
from rlhf.models.kernels.packing import packing_unsupported_reason
from rlhf.models.logprobs import completion_outputs
from rlhf.models.policy_models import keep_in_bfloat16
from rlhf.models.scalar_head import load_scalar_head, sequence_scores
from rlhf.models.stored import round_matrices, store_exact_matrices

CPU = torch.device("cpu")
BATCH = ragged()
FIELDS = BATCH.prompt_ids, BATCH.prompt_mask, BATCH.completion_ids, BATCH.completion_mask


def logprobs(model: CausalLM, packing: str, dtype: str = "bfloat16") -> Tensor:
    with autocast(dtype, CPU), torch.no_grad(), weights_cast_once():
        return completion_outputs(
            model,
            *FIELDS,
            temperature=1.0,
            packing=packing,  # type: ignore[arg-type]
            float32_head=dtype == "bfloat16",
        ).logprobs


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma3_text"])
def test_log_probabilities_are_the_same_bits(family: str) -> None:
    model = freeze(tiny(family, dtype=torch.float32))
    assert packing_unsupported_reason(body_of(model)) == ""
    assert supports_fused(body_of(model))
    before = [logprobs(model, packing) for packing in ("auto", "off")]
    saved_bytes = round_matrices(body_of(model))
    after = [logprobs(model, packing) for packing in ("auto", "off")]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert supports_fused(body_of(model))
    linear = [part for part in body_of(model).modules() if type(part) is nn.Linear]
    assert {part.weight.dtype for part in linear} == {torch.bfloat16}
    assert saved_bytes == 2 * sum(part.weight.numel() for part in linear)
    others = [p for p in model.parameters() if all(p is not part.weight for part in linear)]
    assert {p.dtype for p in others} == {torch.float32}  # embeddings, norms, biases and the head


def test_scores_are_the_same_bits(tmp_path: Path) -> None:
    model = freeze(load_scalar_head(saved(tiny(dtype=torch.float32), tmp_path), tokenizer(), new_head="normal"))
    results = []
    for _ in range(2):
        with autocast("bfloat16", CPU), torch.no_grad():
            results.append(sequence_scores(model, *FIELDS))
        round_matrices(model.classifier.base_model)
    assert torch.equal(*results)


def test_a_tied_matrix_stays_as_it_is() -> None:
    """A matrix that is the embedding too is read without a product."""
    model = freeze(tiny(dtype=torch.float32))
    body = body_of(model)
    body.layers[0].self_attn.q_proj.weight = body.layers[0].self_attn.o_proj.weight  # tied to each other: rounded once
    extra = nn.Linear(16, 23, bias=False)
    extra.weight = body.embed_tokens.weight
    body.extra = extra
    before = copy.deepcopy(body.embed_tokens.weight)
    round_matrices(body)
    assert torch.equal(body.embed_tokens.weight, before)
    assert body.embed_tokens.weight.dtype == torch.float32
    assert extra.weight is body.embed_tokens.weight
    assert body.layers[0].self_attn.q_proj.weight is body.layers[0].self_attn.o_proj.weight


def test_nothing_is_rounded_on_a_cpu_in_float32_or_where_it_is_trained() -> None:
    model = freeze(tiny(dtype=torch.float32))
    assert keep_in_bfloat16(model, dtype="bfloat16", device=CPU) == 0
    assert keep_in_bfloat16(model, dtype="float32", device=torch.device("cuda")) == 0
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with pytest.raises(AssertionError, match="trained"):
        round_matrices(body_of(tiny(dtype=torch.float32)))


def published(family: str = "llama", dtype: torch.dtype = torch.float32) -> CausalLM:
    """Make a frozen model whose numbers are all bfloat16's, as if it had been published in that."""
    return freeze(tiny(family, dtype=torch.float32).bfloat16().to(dtype))


def matrices(model: CausalLM) -> list[Tensor]:
    return [part.weight for part in body_of(model).modules() if type(part) is nn.Linear]


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "olmo2", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_matrices_are_stored_in_half_the_memory_on_a_cpu(family: str, dtype: str) -> None:
    model = published(family)
    before, bytes_before = [logprobs(model, packing, dtype) for packing in ("auto", "off")], bytes_of(model)
    saved_bytes = keep_in_bfloat16(model, dtype=dtype, device=CPU)
    assert {weight.dtype for weight in matrices(model)} == {torch.bfloat16}
    assert saved_bytes == bytes_before - bytes_of(model)
    stored = [weight for weight in model.parameters() if weight.dtype == torch.bfloat16]
    assert saved_bytes == 2 * sum(weight.numel() for weight in stored)
    own_embedding = type(model.get_input_embeddings()) is not nn.Embedding  # Gemma's scales the rows that it looks up
    assert (model.get_input_embeddings().weight.dtype == torch.float32) == own_embedding
    assert body_of(model).norm.weight.dtype == torch.float32
    assert supports_fused(body_of(model))
    after = [logprobs(model, packing, dtype) for packing in ("auto", "off")]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def bytes_of(model: nn.Module) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def test_no_widened_copy_is_kept() -> None:
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    with weights_cast_once():
        assert cast_weight(weight, torch.float32) is not cast_weight(weight, torch.float32)


def test_a_matrix_that_is_not_exact_keeps_its_float32() -> None:
    model = published()
    first = matrices(model)[0]
    with torch.no_grad():
        first[0, 0] = 1 + 2**-12
    before = logprobs(model, "auto", "float32")
    keep_in_bfloat16(model, dtype="float32", device=CPU)
    assert matrices(model)[0].dtype == torch.float32
    assert {weight.dtype for weight in matrices(model)[1:]} == {torch.bfloat16}
    assert torch.equal(logprobs(model, "auto", "float32"), before)


def test_scores_of_exact_matrices_are_the_same_bits(tmp_path: Path) -> None:
    model = freeze(load_scalar_head(saved(published(), tmp_path), tokenizer(), new_head="normal"))
    with torch.no_grad():
        before = sequence_scores(model, *FIELDS)
        assert keep_in_bfloat16(model, dtype="float32", device=CPU) > 0
        assert torch.equal(sequence_scores(model, *FIELDS), before)
        model.packing = "off"  # padded rows go through the modules
        assert torch.allclose(sequence_scores(model, *FIELDS), before, rtol=1e-4, atol=1e-5)


def test_a_model_in_float64_stays_as_it_is() -> None:
    model = published(dtype=torch.float64)
    assert keep_in_bfloat16(model, dtype="float64", device=CPU) == 0
    assert {weight.dtype for weight in model.parameters()} == {torch.float64}


def test_what_is_trained_or_held_elsewhere_is_not_stored_in_16_bits() -> None:
    model = published()
    body = body_of(model)
    extra = nn.Linear(16, 23, bias=False)
    extra.weight = body.embed_tokens.weight
    body.extra = extra
    body.kept = nn.ParameterList([body.layers[0].self_attn.q_proj.weight])  # read without a product, for all we know
    store_exact_matrices(body)
    assert body.embed_tokens.weight.dtype == torch.bfloat16
    assert extra.weight is body.embed_tokens.weight
    assert body.layers[0].self_attn.q_proj.weight is body.kept[0]
    assert body.kept[0].dtype == torch.float32
    with pytest.raises(AssertionError, match="trained"):
        store_exact_matrices(body_of(tiny(dtype=torch.float32)))


def test_a_copy_computes_with_its_own_weights() -> None:
    model = published()
    keep_in_bfloat16(model, dtype="float32", device=CPU)
    before, other = logprobs(model, "off", "float32"), copy.deepcopy(model)
    with torch.no_grad():
        for weight in matrices(model):
            weight.zero_()
    assert torch.equal(logprobs(other, "off", "float32"), before)

"""Attention over rows of any length, in use on a GPU in bfloat16: one kernel, its trial, and its numbers."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from pretend import PretendDevice
from quick import quick
from tiny_models import EOS, PROMPTS, completions_of, ragged, tiny
from torch import Tensor

from rlhf.models.backbone import CausalLM, autocast, body_of
from rlhf.models.kernels import packing
from rlhf.models.kernels.attention import VarlenLayout, shared_runs
from rlhf.models.kernels.packing import varlen_unsupported_reason
from rlhf.models.logprobs import VARLEN, completion_outputs
from rlhf.models.policy_models import Models

SHARED = completions_of(
    [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]], [[3, 14, EOS], [15, 9, 2, 6, 5, EOS], [7], [10, 10, 7, EOS]]
)
BATCHES = {"alone": ragged(), "shared": SHARED}


def on_device(family: str = "llama", **config: int) -> CausalLM:
    return copy.deepcopy(tiny(family, dtype=torch.float32, **config)).to("cuda")


def outputs(model: CausalLM, batch: str, device: str, dtype: str = "bfloat16") -> list[Tensor]:
    """Log-probabilities, and a gradient."""
    rows = BATCHES[batch].to(torch.device(device))
    model.zero_grad()
    with autocast(dtype, torch.device(device)):
        logprobs = completion_outputs(
            model, rows.prompt_ids, rows.prompt_mask, rows.completion_ids, rows.completion_mask, temperature=1.0
        ).logprobs
    logprobs.sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert isinstance(gradient, Tensor)
    return [logprobs.detach().float().cpu(), gradient.cpu()]


# A family that is written out and one through its modules; either is shown one of the batches by default.
PAIRS = list(product(BATCHES, ["llama", "gpt2"]))


@pytest.mark.parametrize(("batch", "family"), quick(PAIRS, [("shared", "llama"), ("alone", "gpt2")]))
def test_the_numbers_are_the_cpus(family: str, batch: str, pretend: PretendDevice) -> None:
    plain = tiny(family, dtype=torch.float32)
    exact, known = outputs(plain, batch, "cpu", "float32"), outputs(plain, batch, "cpu")
    model = on_device(family)
    outputs(model, batch, "cuda")  # tries the ways out
    assert varlen_unsupported_reason(body_of(model), torch.bfloat16) == ""
    pretend.clear()
    for ours, theirs, right in zip(outputs(model, batch, "cuda"), known, exact, strict=True):
        error, of_cpu = (float((x - right).norm() / right.norm()) for x in (ours, theirs))
        assert error < 2 * of_cpu
        assert of_cpu < 0.25  # these weights are large
    assert pretend.attention == {"varlen": 2}  # layers; no rectangle, no mask
    assert sum(pretend.blocking.values()) == 0
    assert pretend.problems == []


def test_a_head_that_the_kernel_does_not_take_stays_in_rectangles(pretend: PretendDevice) -> None:
    model = on_device(head_dim=4)
    assert "head dimension" in varlen_unsupported_reason(body_of(model), torch.bfloat16)
    pretend.clear()
    outputs(model, "alone", "cuda")
    assert "varlen" not in pretend.attention


def test_a_wrong_layout_is_noticed_before_a_model_is_trusted(
    pretend: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another_prompt(prompts: list[int], completions: list[int], prompt_of: list[int]) -> VarlenLayout:
        return shared_runs(prompts, completions, [(prompt + 1) % len(prompts) for prompt in prompt_of])

    monkeypatch.setattr(packing, "shared_runs", of_another_prompt)
    assert "other numbers" in varlen_unsupported_reason(body_of(on_device()), torch.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_says_whether_it_is_on(dtype: str, pretend: PretendDevice) -> None:
    models = Models(policy=on_device(), temperature=1.0, dtype=dtype, device=torch.device("cuda"))
    assert models.fast_ways().ways.get(VARLEN) == (True if dtype == "bfloat16" else None)

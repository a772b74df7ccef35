"""The agreement of a model of the zoo with transformers, and the fast ways that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tiny_models import completions_of, prompts_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config.sections import SamplingConfig
from rlhf.data.tokenizer import pad_id
from rlhf.models.backbone import CausalLM, body_of, eos_ids
from rlhf.models.kernels.llama.forward import supports_fused
from rlhf.models.kernels.packing import packing_unsupported_reason
from rlhf.models.logprobs import chunking_unsupported_reason, completion_outputs
from rlhf.sampling.fast.engine import FastSampler
from rlhf.sampling.sampler import Sampler, fast_unsupported_reason, make_sampler

# Rows of ids that are text in every family: some shorter than the windows of the table, some longer.
PROMPTS = [[90, 91, 92, 93, 94, 95, 96, 97, 98, 99], [60, 61], [60, 61], [70, 71, 72, 73, 74]]
COMPLETIONS = [[80, 81, 82, 83, 84], [85, 86, 87], [88], [89, 75, 76, 77, 78, 79, 65, 66]]


def plain_model(folder: Path) -> PreTrainedModel:
    """Load a folder plainly, in float32; everything in it is used and nothing is missing."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@cache
def published_model(folder: Path) -> PreTrainedModel:
    """Load a folder that no test writes into, once a process; do not change the model."""
    return plain_model(folder)


@cache
def published_logprobs(folder: Path) -> Tensor:
    """Compute the log-probabilities of `COMPLETIONS` under such a model."""
    return expected_logprobs(published_model(folder))


def plain_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Compute the log-probability of each completion token from all logits of one row, without padding or packing."""
    ids = torch.tensor([[*prompt, *completion]])
    logprobs = model(input_ids=ids).logits[0].log_softmax(dim=-1)
    return logprobs[torch.arange(len(prompt) - 1, ids.shape[1] - 1), ids[0, len(prompt) :]]


@torch.no_grad()
def our_logprobs(model: PreTrainedModel, fill: int) -> Tensor:
    """Compute the log-probabilities of `COMPLETIONS` like training."""
    batch = completions_of(PROMPTS, COMPLETIONS, fill=fill)
    fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
    return completion_outputs(model, *fields, temperature=1.0).logprobs[batch.completion_mask]


def expected_logprobs(model: PreTrainedModel) -> Tensor:
    return torch.cat([plain_logprobs(model, p, c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)])


def sampler_of(model: CausalLM, tokenizer: PreTrainedTokenizerBase, *, length: int) -> Sampler:
    """Make the sampler of a run."""
    return make_sampler(
        model,
        SamplingConfig(max_new_tokens=length),
        eos_ids=eos_ids(model, tokenizer),
        pad_id=pad_id(tokenizer),
        dtype="float32",
        device=torch.device("cpu"),
    )


def check_greedy(
    model: PreTrainedModel, plain: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, length: int = 20
) -> None:
    """The most likely completions, and their log-probabilities, are as from transformers' generate, row by row."""
    fill, ends = pad_id(tokenizer), eos_ids(model, tokenizer)
    sampler = sampler_of(model, tokenizer, length=length)
    drawn = sampler.sample(prompts_of(PROMPTS, fill=fill), key=0, group_size=1, greedy=True)
    settings = {"temperature": None, "top_p": None, "top_k": None, "repetition_penalty": None, "max_length": None}
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        expected = plain.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=length,
            pad_token_id=fill,
            eos_token_id=list(ends),
            **settings,
        )[0, len(prompt) :].tolist()
        mask = drawn.completion_mask[row]
        assert drawn.completion_ids[row][mask].tolist() == expected
        assert torch.allclose(drawn.sampler_logprobs[row][mask], plain_logprobs(plain, prompt, expected), atol=1e-4)


def ways_of(model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Tell which fast ways the program takes with this model."""
    model.train()
    packed = not packing_unsupported_reason(body_of(model))
    sampler = sampler_of(model, tokenizer, length=4)
    sampler.sample(prompts_of(PROMPTS), key=0, group_size=2)
    uses = sampler.uses if isinstance(sampler, FastSampler) else "generate"
    return {
        "chunked": not chunking_unsupported_reason(model),
        "packed": packed,
        "written_out": packed and supports_fused(body_of(model)),
        "fast_sampler": uses != "generate",
        "lean_decoder": uses == "lean",
    }


def reasons_of(model: CausalLM) -> dict[str, str]:
    """Give the program's own words for a fast way that it does not take."""
    return {
        "chunked": chunking_unsupported_reason(model),
        "packed": packing_unsupported_reason(body_of(model)),
        "fast_sampler": fast_unsupported_reason(model) or "",
    }

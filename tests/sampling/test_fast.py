"""The fast sampler draws the plain one's tokens, with any slots, groups and ways of decoding."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from tiny_models import BOS, EOS, FAMILIES, PAD, prompts_of, sampler_of, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rlhf.config.sections import SamplingConfig
from rlhf.config.weights import LoraConfig
from rlhf.errors import ConfigError
from rlhf.models.backbone import add_lora, load_causal_lm
from rlhf.models.logprobs import completion_outputs
from rlhf.runtime.seeding import derive_seed
from rlhf.sampling.fast import prefix_cache
from rlhf.sampling.fast.decoder import ATTENTION_NAME, FusedDecoder, ModelDecoder, can_pack, inverse_cdf, sample_token
from rlhf.sampling.fast.engine import FastSampler, unique_prompts
from rlhf.sampling.fast.kv_cache import cache_dtype
from rlhf.sampling.generate import HFSampler, draw
from rlhf.sampling.sampler import fast_unsupported_reason, make_sampler
from rlhf.types import Completions, Prompts

KEY = derive_seed(0, "sample", 1)
ROWS = [[BOS, 5, 7], [BOS, 4], [BOS, 6, 8, 9, 3, 12], [8], [BOS, 11, 11, 3], [BOS, 17], [20, 21, 22]]
CPU = torch.device("cpu")
NEOX = {k: FAMILIES["phi"][k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
MORE: dict[str, dict[str, Any]] = {
    "gpt_neox": {**NEOX, "max_position_embeddings": 64, "initializer_range": 0.3},
    "phi3": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 4},
}


def config(**more: object) -> SamplingConfig:
    return SamplingConfig(**{"max_new_tokens": 10, "temperature": 0.9, **more})  # type: ignore[arg-type]


def model_of(family: str = "llama", **more: object) -> PreTrainedModel:
    settings = {**MORE.get(family, {}), "initializer_range": 0.2, **more}
    if family not in FAMILIES:
        FAMILIES[family] = MORE[family]
    return tiny(family, dtype=torch.float32, **settings)


class Checked(FastSampler):
    """Sees to it that generate does not take over unnoticed."""

    def sample(self, prompts: Prompts, **how: Any) -> Completions:
        completions = super().sample(prompts, **how)
        assert self.uses == self._candidates()[0]
        return completions


def fast_of(
    model: PreTrainedModel,
    sampling: SamplingConfig,
    *,
    eos_ids: tuple[int, ...] = (EOS,),
    pad_id: int = PAD,
    lean: bool = True,
    dtype: str = "float32",
    device: torch.device = CPU,
    static: bool | None = None,
) -> FastSampler:
    return Checked(
        model, sampling, eos_ids=eos_ids, pad_id=pad_id, dtype=dtype, device=device, lean=lean, static=static
    )


def same(completions: Completions, expected: Completions, *, within: float = 1e-5) -> None:
    assert torch.equal(completions.completion_ids, expected.completion_ids)
    assert torch.equal(completions.completion_mask, expected.completion_mask)
    assert torch.equal(completions.finished, expected.finished)
    assert torch.equal(completions.row_ids, expected.row_ids)
    assert torch.equal(completions.prompt_ids, expected.prompt_ids)
    assert completions.references == expected.references
    assert completions.group_size == expected.group_size
    torch.testing.assert_close(completions.sampler_logprobs, expected.sampler_logprobs, rtol=0, atol=within)


@cache
def plain_completions(family: str, group: int) -> Completions:
    """The plain sampler's draws of a family: the same for every way of decoding."""
    return sampler_of(model_of(family), config()).sample(prompts_of(ROWS), key=KEY, group_size=group)


LEAN = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3_text")
BY_MODULES = ("llama", "qwen2", "mistral", "phi3", "gpt2", "gpt_neox", "gemma", "phi")
ALONE = ("llama", "mistral")  # in a single slot by default, without a window and with one; the others when slow:
# a family's arithmetic is seen in the other cases, and the filling of one slot again and again is the same for all.
CASES = [
    pytest.param(family, uses, slots, group, marks=[pytest.mark.slow] if slots == 1 and family not in ALONE else [])
    for slots, group in ((3, 4), (100, 3), (1, 1))
    for uses, families in (("lean", LEAN), ("model", BY_MODULES))
    for family in families
]


@pytest.mark.parametrize("family,uses,slots,group", CASES)
def test_the_completions_are_the_plain_samplers(family: str, uses: str, slots: int, group: int) -> None:
    """Fewer slots than rows, than a group, and more slots than rows; mistral's window is of 4 tokens, phi3's of 5."""
    model, prompts, expected = model_of(family), prompts_of(ROWS), plain_completions(family, group)
    sampler = fast_of(model, config(batch_size=slots), lean=uses == "lean")
    same(sampler.sample(prompts, key=KEY, group_size=group), expected)
    assert sampler.uses == uses
    assert group == 1 or len(set(expected.completion_mask.sum(dim=1).tolist())) >= 3


@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("slots", [2, 5, 100])
def test_any_length(length: int, slots: int) -> None:
    """Of 1 nothing is decoded after the prompts; of 40 the ring of each slot goes round while others wait."""
    model, prompts = model_of(), prompts_of(ROWS)
    sampling = config(max_new_tokens=length, batch_size=slots)
    expected = sampler_of(model, config(max_new_tokens=length)).sample(prompts, key=KEY, group_size=4)
    same(fast_of(model, sampling).sample(prompts, key=KEY, group_size=4), expected)


@pytest.mark.parametrize("slots", [2, 100])
def test_rows_that_finish_at_once(slots: int) -> None:
    """Two tokens in three end a row: most leave with their first, some groups whole."""
    ends = tuple(range(0, 23, 3)) + tuple(range(1, 23, 3))
    model, prompts = model_of(), prompts_of(ROWS)
    expected = sampler_of(model, config(), eos_ids=ends).sample(prompts, key=KEY, group_size=3)
    completions = fast_of(model, config(batch_size=slots), eos_ids=ends).sample(prompts, key=KEY, group_size=3)
    same(completions, expected)
    lengths = completions.completion_mask.sum(dim=1)
    assert (lengths == 1).view(-1, 3).all(dim=1).any()
    assert lengths.max() > 2


def test_all_finish_at_once() -> None:
    completions = fast_of(model_of(), config(batch_size=4), eos_ids=tuple(range(23)), pad_id=19).sample(
        prompts_of(ROWS), key=KEY, group_size=2
    )
    assert completions.completion_ids.shape == (14, 1)
    assert completions.finished.all()


def test_padding_to_the_left_changes_nothing() -> None:
    model, prompts = model_of(), prompts_of(ROWS)
    wide = replace(
        prompts,
        prompt_ids=torch.nn.functional.pad(prompts.prompt_ids, (5, 0), value=7),
        prompt_mask=torch.nn.functional.pad(prompts.prompt_mask, (5, 0)),
    )
    for lean in (True, False):
        narrow = fast_of(model, config(), lean=lean).sample(prompts, key=KEY, group_size=2)
        completions = fast_of(model, config(), lean=lean).sample(wide, key=KEY, group_size=2)
        assert torch.equal(completions.completion_ids, narrow.completion_ids)
        assert torch.equal(completions.sampler_logprobs, narrow.sampler_logprobs)


@pytest.mark.parametrize("slots", [4, 100])
def test_no_row_leaks_into_another(slots: int) -> None:
    """One prompt is another: only its own rows are others."""
    model, changed = model_of(), [list(row) for row in ROWS]
    changed[2] = [BOS, 13, 8, 9, 3, 18]
    sampler = fast_of(model, config(batch_size=slots))
    one = sampler.sample(prompts_of(ROWS), key=KEY, group_size=3)
    other = sampler.sample(prompts_of(changed), key=KEY, group_size=3)
    own = torch.arange(len(one)) // 3 == 2
    width = min(one.completion_ids.shape[1], other.completion_ids.shape[1])
    assert torch.equal(one.completion_ids[~own, :width], other.completion_ids[~own, :width])
    assert torch.allclose(one.sampler_logprobs[~own, :width], other.sampler_logprobs[~own, :width], atol=1e-5)
    assert not torch.equal(one.completion_ids[own, :width], other.completion_ids[own, :width])


def test_a_completion_is_the_same_in_any_order_and_company() -> None:
    prompts = prompts_of(ROWS)
    sampler = fast_of(model_of(), config(batch_size=3))
    together = sampler.sample(prompts, key=KEY, group_size=1)
    order = torch.tensor([4, 0, 6, 2])
    others = sampler.sample(prompts.rows(order), key=KEY, group_size=1)
    width = others.completion_ids.shape[1]
    assert torch.equal(others.completion_ids, together.completion_ids[order][:, :width])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_temperature(temperature: float) -> None:
    model, prompts = model_of(), prompts_of(ROWS)
    expected = sampler_of(model, config(temperature=temperature)).sample(prompts, key=KEY, group_size=2)
    same(fast_of(model, config(temperature=temperature)).sample(prompts, key=KEY, group_size=2), expected)


def test_greedy() -> None:
    model, prompts = model_of(), prompts_of(ROWS)
    expected = sampler_of(model, config()).sample(prompts, key=1, group_size=1, greedy=True)
    same(fast_of(model, config(batch_size=3)).sample(prompts, key=2, group_size=1, greedy=True), expected)


@pytest.mark.parametrize("family,lean", [("llama", True), ("llama", False), ("phi3", True), ("olmo2", True)])
def test_an_adapter_is_sampled_from(family: str, lean: bool) -> None:
    model: Any = add_lora(model_of(family), LoraConfig(r=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    expected = sampler_of(model, config()).sample(prompts_of(ROWS), key=KEY, group_size=2)
    sampler = fast_of(model, config(), lean=lean)
    same(sampler.sample(prompts_of(ROWS), key=KEY, group_size=2), expected)
    assert sampler.uses == ("lean" if lean else "model")


@pytest.mark.parametrize("family,lean", [("llama", True), ("llama", False), ("gpt2", False), ("qwen3", True)])
def test_the_ratio_to_the_trainer_is_one(family: str, lean: bool) -> None:
    """The comparison of the first minibatch: the trainer's log-probs with the sampler's at the draw."""
    model = model_of(family)
    completions = fast_of(model, config(batch_size=5), lean=lean).sample(prompts_of(ROWS), key=KEY, group_size=3)
    with torch.no_grad():
        trainer = completion_outputs(
            model,
            completions.prompt_ids,
            completions.prompt_mask,
            completions.completion_ids,
            completions.completion_mask,
            temperature=0.9,
        ).logprobs
    assert (trainer - completions.sampler_logprobs).exp().sub(1.0).abs().max() < 1e-5


@pytest.mark.parametrize("length,uses", [(39, FusedDecoder), (40, ModelDecoder)])
def test_rotations_that_change_with_the_length(length: int, uses: type[Any]) -> None:
    """Longrope has others from 49 tokens on: 7 of the longest prompt, the completion and two to spare are 48 or 49."""
    rotations = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    factors = {"short_factor": [1.0, 2.0, 3.0], "long_factor": [1.0, 8.0, 32.0]}
    model = model_of("phi3", original_max_position_embeddings=48, rope_parameters={**rotations, **factors})
    prompts, sampling = prompts_of([*ROWS, [BOS, 3, 4, 5, 6, 7, 8]]), config(max_new_tokens=length)
    sampler = fast_of(model, sampling)
    assert type(sampler._decoder(prompts, "lean")) is uses
    expected = sampler_of(model, sampling).sample(prompts, key=KEY, group_size=2)
    same(sampler.sample(prompts, key=KEY, group_size=2), expected)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 4.0, 8.0, 32.0],
}


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, rows: Completions, temperature: float) -> Tensor:
    """The log-probability of each token after those before it, read alone and without a cache.

    The rotations depend on how many tokens are read: all that read up to 24 share a pass, and all that read more.
    """
    logprobs = torch.zeros(rows.completion_ids.shape)
    for i, (prompt, drawn) in enumerate(zip(rows.prompt_ids, rows.completion_ids, strict=True)):
        ids = torch.cat([prompt[rows.prompt_mask[i]], drawn[rows.completion_mask[i]]])
        start = int(rows.prompt_mask[i].sum())
        short, long = (model(ids[None, :length], use_cache=False).logits[0] for length in (24, len(ids) - 1))
        logits = torch.cat([short, long[24:]])[start - 1 : len(ids) - 1]
        scores = (logits / temperature).log_softmax(-1)
        logprobs[i, : len(ids) - start] = scores.gather(1, ids[start:, None]).squeeze(1)
    return logprobs


@pytest.mark.parametrize("family", ["phi3", "llama"])  # generate recomputes the cache of the one and not of the other
@pytest.mark.parametrize("fast", [True, False])
def test_log_probs_are_the_plain_models_where_a_row_outgrows_its_rotations(family: str, fast: bool) -> None:
    """Longrope rotates all of a sequence otherwise once it is longer than 24 tokens; alone or beside other rows."""
    more = {"original_max_position_embeddings": 24} if family == "phi3" else {}
    model = model_of(family, rope_parameters=LONGROPE, **more)
    told: list[str] = []
    kind: Any = FastSampler if fast else HFSampler
    common = {"warn": told.append} if fast else {}
    sampling = config(max_new_tokens=14, batch_size=5)
    sampler = kind(model, sampling, eos_ids=(EOS,), pad_id=PAD, dtype="float32", device=CPU, **common)
    crossing = [BOS, *range(4, 20)]  # 17 tokens; the others have 3 and 28
    prompts = prompts_of([[BOS, 5, 7], crossing, crossing, [BOS, *range(3, 22), *range(8, 0, -1)]])
    for rows in (prompts, prompts.rows(slice(0, 1)), prompts.rows(slice(1, 3)), prompts.rows(slice(3, 4))):
        sampled = sampler.sample(rows, key=KEY, group_size=3)
        lengths = sampled.prompt_mask.sum(dim=1) + sampled.completion_mask.sum(dim=1)
        assert len(rows) != 2 or int(lengths.max()) > 26
        torch.testing.assert_close(sampled.sampler_logprobs, plain_logprobs(model, sampled, 0.9), rtol=0, atol=2e-5)
        assert torch.equal(sampled.prompt_ids, rows.prompt_ids.repeat_interleave(3, dim=0))
    reason = "rows may go beyond 24 tokens, where the model's rotations change (longrope)"
    assert told == ([f"sampling with transformers' generate, which is slower: {reason}"] if fast else [])
    assert not fast or sampler.uses == "lean"


def test_the_live_weights_are_sampled_from() -> None:
    """The copies that it decodes with are made again for each rollout."""
    model, prompts = model_of(), prompts_of(ROWS)
    sampler = fast_of(model, config())
    sampler.sample(prompts, key=KEY, group_size=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1).add_(0.01)
    expected = sampler_of(model, config()).sample(prompts, key=KEY, group_size=2)
    same(sampler.sample(prompts, key=KEY, group_size=2), expected)


@pytest.mark.parametrize("lean", [True, False])
def test_bf16_arithmetic_is_near_the_trainers(lean: bool) -> None:
    model = model_of()
    sampler = fast_of(model, config(), lean=lean, dtype="bfloat16")
    completions = sampler.sample(prompts_of(ROWS), key=KEY, group_size=4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trainer = completion_outputs(
            model,
            completions.prompt_ids,
            completions.prompt_mask,
            completions.completion_ids,
            completions.completion_mask,
            temperature=0.9,
        ).logprobs
    far = (completions.sampler_logprobs - trainer)[completions.completion_mask].abs()
    assert far.mean() < 0.01
    assert sampler.uses == ("lean" if lean else "model")


@pytest.mark.parametrize("adapted", [False, True])
def test_an_update_that_bf16_products_lose_is_not_in_the_sampler(adapted: bool) -> None:
    """Rounded after a norm is folded in, a part of it would be: the sampler would drift from the policy."""
    model: Any = model_of()
    if adapted:
        model = add_lora(model, LoraConfig(r=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "lora" in name:
                parameter.add_(torch.rand_like(parameter))
            elif parameter.dim() == 2:
                parameter.copy_(parameter.bfloat16())
    drawn = []
    for change in (0.0, 2**-10):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "proj" in name and "lora" not in name:
                    parameter.mul_(1 + change)
                    assert torch.equal(parameter.bfloat16().float(), parameter) == (change == 0.0)
        sampler = fast_of(model, config(), dtype="bfloat16")
        drawn.append(sampler.sample(prompts_of(ROWS), key=KEY, group_size=4))
        assert sampler.uses == "lean"
    assert torch.equal(drawn[0].sampler_logprobs, drawn[1].sampler_logprobs)


class CacheCasts(TorchDispatchMode):
    """Counts casts of tensors with rows, heads, columns and numbers: keys and values of many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copied = func.overloadpacket.__name__ == "_to_copy" and args[0].ndim >= 3 and args[0].shape[-2] > 1
        self.count += copied and args[0].dtype != (kwargs or {}).get("dtype")
        return func(*args, **(kwargs or {}))


def test_bf16_arithmetic_does_not_cast_the_cache_at_every_step() -> None:
    casts = []
    for length in (4, 24):
        sampler = fast_of(model_of(), config(max_new_tokens=length), dtype="bfloat16", eos_ids=())
        sampler.sample(prompts_of(ROWS), key=KEY, group_size=4)
        with CacheCasts() as counted:
            sampler.sample(prompts_of(ROWS), key=KEY, group_size=4)
        casts.append(counted.count)
    assert casts[0] == casts[1]  # the prefill's


@pytest.mark.parametrize("native", [True, False])
def test_weights_in_bfloat16_are_packed_where_the_cpu_has_its_products(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    assert can_pack(torch.zeros(8, 8, dtype=torch.bfloat16)) == native
    assert can_pack(torch.zeros(8, 8))


class Widened(TorchDispatchMode):
    """Counts the numbers that are cast to float32 in one operation, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and output.dtype == torch.float32:
            self.most = max(self.most, output.numel())
        return output


def test_an_lm_head_in_16_bits_is_not_widened_before_its_norm_is_folded_in() -> None:
    model = tiny("llama", dtype=torch.bfloat16, vocab=3000)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.float()
    with Widened() as widened:
        decoder = FusedDecoder(model, rows=2, positions=8, low=None)
    assert widened.most < 3000 * 16
    weight = model.lm_head.weight.detach().float() * model.model.norm.weight.detach()
    x = torch.eye(16)
    assert torch.equal(decoder.head(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("native", [True, False])
def test_the_cache_is_bfloat16_where_the_cpu_has_its_products(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    cpu = torch.device("cpu")
    assert cache_dtype(torch.bfloat16, cpu) == (torch.bfloat16 if native else torch.float32)
    assert cache_dtype(torch.bfloat16, torch.device("meta")) == torch.bfloat16
    assert cache_dtype(torch.float64, cpu) == torch.float64


def test_sampling_leaves_the_model_as_it_was() -> None:
    model = model_of().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for lean in (True, False):
        fast_of(model, config(max_new_tokens=2), lean=lean).sample(prompts_of(ROWS), key=KEY, group_size=1)
    assert model.training
    assert model.config._attn_implementation != ATTENTION_NAME
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_step_made_to_be_recorded_is_the_same_step(family: str) -> None:
    model, prompts = model_of(family), prompts_of(ROWS)
    expected = sampler_of(model, config()).sample(prompts, key=KEY, group_size=4)
    for slots in (5, 100):
        same(fast_of(model, config(batch_size=slots), static=True).sample(prompts, key=KEY, group_size=4), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_step_is_the_same_step(dtype: str) -> None:
    device, prompts = torch.device("cuda"), prompts_of(ROWS)
    model: Any = model_of().to(device)
    for slots in (5, 100):
        eager = fast_of(model, config(batch_size=slots), device=device, dtype=dtype, static=False)
        replayed = fast_of(model, config(batch_size=slots), device=device, dtype=dtype)
        completions = replayed.sample(prompts, key=KEY, group_size=4)
        if dtype == "float32":
            same(completions, eager.sample(prompts, key=KEY, group_size=4))
        assert torch.isfinite(completions.sampler_logprobs).all()


class _Counted:
    """How many prompts are read, and how many rows and steps decoded."""

    def __init__(self, sampler: FastSampler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts = self.rows = self.steps = 0
        self.sampler = sampler
        read, step = prefix_cache.prefill, sampler._decoder

        def counted_read(model: Any, ids: Tensor, mask: Tensor, past: Any) -> Any:
            self.prompts += len(ids)
            return read(model, ids, mask, past)

        def counted_step(prompts: Prompts, uses: str | None) -> Any:
            decoder = step(prompts, uses)
            own = decoder.step

            def counted(slots: Any, tokens: Tensor, positions: Tensor) -> Tensor:
                self.rows += len(tokens)
                self.steps += 1
                return own(slots, tokens, positions)

            decoder.step = counted  # type: ignore[method-assign]
            return decoder

        monkeypatch.setattr(prefix_cache, "prefill", counted_read)
        monkeypatch.setattr(sampler, "_decoder", counted_step)


@pytest.mark.parametrize("slots", quick([3, 8, 100], [8, 100]))
def test_each_prompt_is_read_once_and_finished_rows_are_not_decoded(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = fast_of(model_of(), config(max_new_tokens=40, batch_size=slots))
    prompts = prompts_of(ROWS)
    sampler.sample(prompts_of(ROWS[:2]), key=KEY, group_size=1)  # its trial is over
    counted = _Counted(sampler, monkeypatch)
    completions = sampler.sample(prompts, key=KEY, group_size=8)
    lengths = completions.completion_mask.sum(dim=1)
    needed = int((lengths - 1).sum())
    assert counted.prompts == len(ROWS)
    assert needed <= counted.rows <= 1.3 * needed + 8
    assert counted.rows < 0.75 * len(completions) * int(lengths.max())
    if slots < len(completions):  # the slots are kept full while rows wait
        assert counted.steps < 2 * needed / slots + 40


def test_the_reader_of_equal_neighbours() -> None:
    first, number = unique_prompts(prompts_of([[5, 6], [5, 6], [6], [5, 6], [6], [6]]))
    assert first.tolist() == [0, 2, 3, 4]
    assert number.tolist() == [0, 0, 1, 2, 3, 3]


def test_invert_draws_what_draw_draws() -> None:
    torch.manual_seed(0)
    for vocabulary in (4, 64, 100, 1000):
        scores = torch.randn(300, vocabulary, dtype=torch.float64) * 2
        uniform = torch.rand(300, dtype=torch.float64)
        assert torch.equal(inverse_cdf(scores.softmax(-1), uniform), draw(scores.log_softmax(-1), uniform))


def test_invert_never_takes_an_impossible_token() -> None:
    probabilities = torch.zeros(4, 200, dtype=torch.float64)
    probabilities[:, 70], probabilities[:, 150] = 0.25, 0.75
    uniform = torch.tensor([0.0, 0.2499, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(probabilities, uniform).tolist() == [70, 70, 150, 150]


def test_pick_gives_the_log_probability_at_the_temperature() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    token, logprob = sample_token(scores, None, 0.5)
    assert token.tolist() == [1]
    assert logprob.item() == pytest.approx((scores / 0.5).log_softmax(-1)[0, 1].item(), abs=1e-6)


def test_what_it_cannot_take_is_said() -> None:
    told: list[str] = []
    model = model_of(attn_logit_softcapping=None)
    assert fast_unsupported_reason(model) is None
    model.config.attn_logit_softcapping = 30.0
    common: dict[str, Any] = {"eos_ids": (EOS,), "pad_id": PAD, "dtype": "float32", "device": CPU}
    made = make_sampler(model, config(), **common, warn=told.append)
    assert isinstance(made, HFSampler)
    assert told == [
        "sampling with transformers' generate, which is slower: LlamaForCausalLM sets attn_logit_softcapping"
    ]
    with pytest.raises(ConfigError, match=re.escape("sampling.backend=fast cannot sample from this model: Llama")):
        make_sampler(model, config(backend="fast"), **common)
    assert isinstance(make_sampler(model_of(), config(backend="hf"), **common, warn=told.append), HFSampler)
    assert isinstance(make_sampler(model_of(), config(), **common, warn=told.append), FastSampler)
    assert len(told) == 1


def test_a_model_that_says_something_else_is_left_to_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of which ours knows nothing, as a family to come may have it: found out before the first draw."""
    model = model_of()
    for layer in model.model.layers:
        forward = layer.self_attn.forward

        def odd(*args: Any, own: Any = forward, **kwargs: Any) -> Any:
            hidden, rest = own(*args, **kwargs)
            return hidden * (1.0 if hidden.shape[1] > 1 else 1.5), rest

        monkeypatch.setattr(layer.self_attn, "forward", odd)
    told: list[str] = []
    sampler = FastSampler(
        model, config(), eos_ids=(EOS,), pad_id=PAD, dtype="float32", device=CPU, warn=told.append, lean=False
    )
    completions = sampler.sample(prompts_of(ROWS), key=KEY, group_size=2)
    same(completions, sampler_of(model, config()).sample(prompts_of(ROWS), key=KEY, group_size=2))
    sampler.sample(prompts_of(ROWS), key=KEY, group_size=2)
    assert sampler.uses == "generate"
    assert len(told) == 1
    assert told[0].startswith("sampling with transformers' generate, which is slower: its logits come out")


def test_stories_are_the_plain_samplers(shared: Path) -> None:
    model = load_causal_lm(str(shared / "models" / "stories260K" / "hf"))
    prompts = prompts_of([[1, 403, 407, 261], [1, 403], [1, 410, 429, 376, 298, 315], [1]])
    sampling = config(max_new_tokens=48, temperature=1.0)
    expected = sampler_of(model, sampling, eos_ids=(1,)).sample(prompts, key=KEY, group_size=4)
    for slots in (100, 6):
        sampler = fast_of(model, sampling.model_copy(update={"batch_size": slots}), eos_ids=(1,))
        # Each of the two is up to 1e-5 from float64's, for logits of up to 20.
        same(sampler.sample(prompts, key=KEY, group_size=4), expected, within=2e-5)
        assert sampler.uses == "lean"

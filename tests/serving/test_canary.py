"""The canary: ten mistakes of a push, planted in a server that answers 200 OK to everything; ten found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from quick import quick
from servers import CPU, listening
from tiny_models import BOS, PAD, saved, tiny
from torch import Tensor, nn

from rlhf.config.sections import SamplingConfig
from rlhf.config.weights import LoraConfig
from rlhf.errors import SamplingError
from rlhf.models.backbone import CausalLM, add_lora, context_length, load_causal_lm
from rlhf.models.policy_models import Models
from rlhf.sampling import canary
from rlhf.sampling.pool import ServerPool
from rlhf.sampling.push import PushedPolicy, pushed_tensors, tensor_digest
from rlhf.sampling.service import PolicyService, round_to_int8

PROMPTS = [[BOS, 5, 7, 9, 11], [BOS, 4, 6], [BOS, 8, 3, 12, 6], [BOS, 10, 3]]
KINDS = ("rlhf", "vllm")
Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Sound(PolicyService):
    """A server without a mistake, which knows the method of vLLM's worker extension."""

    pushes = 0

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        self.pushes += 1
        super().apply(tensors if self.pushes == 1 else self.edit(dict(tensors)))

    def edit(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that arrive in a push after the first."""
        return tensors

    def answer(self, method: str, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if route == "/v1/load_lora_adapter":
            self.load(str(body["lora_path"]))
            return {}
        return super().answer(method, route, body)


def edited(edit: Edit) -> type[Sound]:
    return type("Edited", (Sound,), {"edit": lambda self, tensors: edit(tensors)})


def without(part: str) -> type[Sound]:
    return edited(lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name})


def changed(part: str, change: Callable[[Tensor], Tensor]) -> type[Sound]:
    return edited(lambda tensors: {name: change(t) if part in name else t for name, t in tensors.items()})


class OldHead(Sound):
    """Keeps a private copy of tied embeddings as output head, as vLLM 0.32 does on a CPU."""

    def edit(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head: Any = self.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        return tensors


class StaleCache(Sound):
    """Completes prompts that were asked before from the weights of that time."""

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        super().apply(tensors)
        if self.pushes == 1:
            self.before = PolicyService(copy.deepcopy(self.model), dtype=self.dtype, device=self.device)

    def sample(self, prompts: list[list[int]], **options: Any) -> Any:
        stale = self.pushes > 1 and len(prompts[0]) <= max(map(len, PROMPTS))
        return self.before.sample(prompts, **options) if stale else super().sample(prompts, **options)


class OtherTemplate(Sound):
    """Puts a token of its own before every prompt."""

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        rows = body["prompt"]
        rows = [[BOS, *row] for row in rows] if isinstance(rows[0], list) else [BOS, *rows]
        return super().complete({**body, "prompt": rows} if self.pushes > 1 else body)


class ShortVocabulary(Sound):
    """Leaves out the last tokens, as after a head that was cut to the size of a tokenizer."""

    cut = 3

    def _score(self, ids: list[int]) -> list[float]:
        values = super()._score(ids)
        if self.pushes == 1:
            return values
        size = self.model.get_input_embeddings().weight.shape[0] - self.cut
        return [float("-inf") if token >= size else value for token, value in zip(ids[1:], values, strict=True)]


def scaled_adapter(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 2 * tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}


MISTAKES: dict[str, tuple[type[Sound], str, bool]] = {  # the server, the text of the error, whether LoRA trains
    "old head": (OldHead, "old lm_head", False),
    "one layer old": (without("layers.1."), "old layer 1", False),
    "transposed": (
        changed("layers.0.self_attn.q_proj", lambda t: t.T.contiguous()),
        "transposed model.layers.0",
        False,
    ),
    "wrong scale": (changed("layers.0.mlp.up_proj", lambda t: t / 2), "wrong scale of model.layers.0.mlp", False),
    "stale cache": (StaleCache, "a stale cache", False),
    "other template": (OtherTemplate, "another template or added tokens", False),
    "truncated vocabulary": (ShortVocabulary, "a truncated vocabulary", False),
    "old adapter": (edited(lambda tensors: {}), "old ", True),
    "norms old": (without("norm"), "old norms", False),
    "wrong dtype": (edited(lambda tensors: {n: t.bfloat16() for n, t in tensors.items()}), "bfloat16", False),
    "wrong scale of the adapter": (edited(scaled_adapter), "wrong scale of the adapter (2 times)", True),
}


def model_folder(folder: Path) -> str:
    return saved(tiny(dtype=torch.float32, tie_word_embeddings=True), folder / "model")


def pool_of(kind: str, url: str, folder: Path, *, dtype: str = "float32", **server: Any) -> ServerPool:
    section = SamplingConfig(server={"type": kind, "urls": [url], **server}).server  # type: ignore[arg-type]
    assert section is not None
    return ServerPool(section, folder / "weights", dtype=dtype, pad_id=PAD)


def policy_of(model: str, *, lora: bool, dtype: str = "float32") -> PushedPolicy:
    policy: CausalLM = load_causal_lm(model)
    if lora:
        policy = add_lora(policy, LoraConfig(r=2))
        perturb(policy, 7)
    return PushedPolicy(Models(policy=policy, temperature=1.0, dtype=dtype, device=CPU))


@torch.no_grad()
def perturb(policy: CausalLM, seed: int) -> None:
    """Stand in for an update."""
    draw = torch.Generator().manual_seed(seed)
    for tensor in pushed_tensors(policy).values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=draw)


def push(pool: ServerPool, policy: PushedPolicy) -> float:
    with pool.sampling_from(policy, PROMPTS):
        return pool.take_metrics()["server/canary"]


CASES = [(mistake, kind) for mistake in MISTAKES for kind in KINDS]
OF_BOTH = ("old head", "stale cache", "old adapter")  # the canary is the same, its requests differ


@pytest.mark.parametrize(
    ("mistake", "kind"), quick(CASES, [case for case in CASES if case[1] == "rlhf" or case[0] in OF_BOTH])
)
def test_a_planted_mistake_is_found_and_named(tmp_path: Path, mistake: str, kind: str) -> None:
    server, cause, lora = MISTAKES[mistake]
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=lora)
    with listening(server(load_causal_lm(model), dtype="float32", device=CPU)) as url:
        pool = pool_of(kind, url, tmp_path)
        assert push(pool, policy) < 1e-4, "the first push is right"
        perturb(policy.model, 1)
        before = {name: tensor.clone() for name, tensor in pushed_tensors(policy.model).items()}
        with pytest.raises(SamplingError, match="does not have the trainer's") as caught:
            push(pool, policy)
    assert cause in str(caught.value)
    after = pushed_tensors(policy.model)
    assert all(torch.equal(before[name], after[name]) for name in before), "the search leaves the policy as it was"


@pytest.mark.parametrize(("kind", "lora"), quick(product(KINDS, [False, True]), [("rlhf", False), ("vllm", True)]))
def test_a_sound_server_passes_after_every_push(tmp_path: Path, kind: str, lora: bool) -> None:
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=lora)
    with listening(Sound(load_causal_lm(model), dtype="float32", device=CPU)) as url:
        pool = pool_of(kind, url, tmp_path)
        for seed in range(4):
            assert push(pool, policy) < 1e-4
            perturb(policy.model, seed)


def test_the_old_head_is_the_first_cause_that_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass for each tensor before it takes minutes on a published model."""
    counting = mock.Mock(wraps=canary._logprobs)
    monkeypatch.setattr(canary, "_logprobs", counting)
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=False)
    with listening(OldHead(load_causal_lm(model), dtype="float32", device=CPU)) as url:
        pool = pool_of("vllm", url, tmp_path)
        push(pool, policy)
        perturb(policy.model, 1)
        with pytest.raises(SamplingError, match="old lm_head"):
            push(pool, policy)
    assert counting.call_count == 2, "as it is, and with the old head"


def test_the_search_for_a_cause_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "SEARCH_S", -1.0)
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=False)
    halved = changed("layers.0.mlp.up_proj", lambda tensor: tensor / 2)
    with listening(halved(load_causal_lm(model), dtype="float32", device=CPU)) as url:
        pool = pool_of("vllm", url, tmp_path)
        push(pool, policy)
        perturb(policy.model, 1)
        with pytest.raises(SamplingError, match="no single mistake that was tried explains it"):
            push(pool, policy)


LARGE = 40.0  # times a norm: logits whose rounding in bfloat16 is above the bound


@pytest.mark.parametrize("kind", quick(KINDS, ["rlhf"]))
def test_rounding_in_bfloat16_is_no_mistake(tmp_path: Path, kind: str) -> None:
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=False, dtype="bfloat16")
    pushed_tensors(policy.model)["model.norm.weight"].mul_(LARGE)
    with listening(Sound(load_causal_lm(model), dtype="bfloat16", device=CPU)) as url:
        pool = pool_of(kind, url, tmp_path, dtype="bfloat16")
        assert push(pool, policy) > 0.1
        with pytest.raises(SamplingError, match=r"canary\.bound is 0\.1"):  # a bound of one's own is kept
            push(pool_of(kind, url, tmp_path / "own", dtype="bfloat16", canary={"bound": 0.1}), policy)
    with listening(without("model.norm")(load_causal_lm(model), dtype="bfloat16", device=CPU)) as url:
        pool = pool_of(kind, url, tmp_path / "old", dtype="bfloat16")
        push(pool, policy)
        pushed_tensors(policy.model)["model.norm.weight"].mul_(0.5)
        with pytest.raises(SamplingError, match="does not have the trainer's"):
            push(pool, policy)


def test_other_bits_are_no_rounding(tmp_path: Path) -> None:
    """A difference that rounding could explain is a mistake if a digest differs."""
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=False, dtype="bfloat16")
    pushed_tensors(policy.model)["model.norm.weight"].mul_(LARGE)
    with listening(without("layers.0.mlp.down")(load_causal_lm(model), dtype="bfloat16", device=CPU)) as url:
        pool = pool_of("rlhf", url, tmp_path, dtype="bfloat16")
        push(pool, policy)
        pushed_tensors(policy.model)["model.layers.0.mlp.down_proj.weight"].mul_(1 + 1e-3)
        with pytest.raises(SamplingError, match=r"down_proj\.weight: other bits on the server"):
            push(pool, policy)


def test_the_first_bit_that_differs_is_named_by_our_server(tmp_path: Path) -> None:
    """A mistake too small for the bound is none for the bound, but digests see every bit once a token differs."""
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=False)
    with listening(without("layers.0.mlp.down")(load_causal_lm(model), dtype="float32", device=CPU)) as url:
        pool = pool_of("rlhf", url, tmp_path, canary={"bound": 1e-4})
        push(pool, policy)
        perturb(policy.model, 1)
        with pytest.raises(SamplingError, match=r"model\.layers\.0\.mlp\.down_proj\.weight: other bits on the server"):
            push(pool, policy)


def test_only_what_changed_is_pushed(tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=False)
    service = Sound(load_causal_lm(model), dtype="float32", device=CPU)
    with listening(service) as url:
        pool = pool_of("rlhf", url, tmp_path)
        push(pool, policy)
        version = pool.version
        push(pool, policy)
        assert pool.version == version, "nothing has changed"
        norm = pushed_tensors(policy.model)["model.norm.weight"]
        norm.mul_(1.5)
        push(pool, policy)
        assert service.version == pool.version != version
        (newest,) = (tmp_path / "weights").glob("weights-000002*")
        assert (tmp_path / "weights" / "VERSION").read_text().strip() == newest.name
        assert (newest / "model.safetensors").stat().st_size < 1000
        assert service.digests() == {n: tensor_digest(t) for n, t in pushed_tensors(policy.model).items()}


def test_a_digest_sees_any_element_and_any_order() -> None:
    values = torch.arange(1_100_000, dtype=torch.float32).view(1000, 1100)
    digest = tensor_digest(values)
    other = values.clone()
    other[999, 1099] += 1
    swapped = values.clone()
    swapped[0, 0], swapped[0, 1] = values[0, 1], values[0, 0]
    assert len({digest, tensor_digest(other), tensor_digest(swapped), tensor_digest(values.T)}) == 4
    assert tensor_digest(values.clone()) == digest
    assert tensor_digest(torch.zeros(2)) != tensor_digest(torch.zeros(2, dtype=torch.float16))


def test_int8_by_hand_and_the_canary_sees_it(tmp_path: Path) -> None:
    weight = torch.tensor([[127.0, 0.4, -63.6], [0.0, 0.0, 0.0]])
    assert torch.equal(round_to_int8(weight), torch.tensor([[127.0, 0.0, -64.0], [0.0, 0.0, 0.0]]))
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=False)
    with listening(Sound(load_causal_lm(model), dtype="float32", device=CPU, weights="int8")) as url:
        with pytest.raises(SamplingError, match="weights int8"):
            push(pool_of("rlhf", url, tmp_path), policy)
        assert 1e-3 < push(pool_of("rlhf", url, tmp_path, canary={"bound": 0.5}), policy) < 0.5


def test_in_bfloat16_the_server_rounds_what_the_trainer_computes_with(tmp_path: Path) -> None:
    """An update below bfloat16's precision is in neither: rounded from float32, it would be in the server's weights."""
    folder = model_folder(tmp_path)
    model = load_causal_lm(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().float() * (1 + 2**-10))
    expected = {
        name: round_to_int8(weight.bfloat16().float()) if weight.dim() == 2 else weight.clone()
        for name, weight in pushed_tensors(model).items()
    }
    served = PolicyService(model, dtype="bfloat16", device=CPU, weights="int8").model
    for name, weight in pushed_tensors(served).items():
        assert torch.equal(weight, expected[name]), name


def test_an_adapter_in_8_bits_is_not_compared_by_the_weights_below_it(tmp_path: Path) -> None:
    """Those are never pushed, so no digest of the trainer's is there for them."""
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=True)
    service = Sound(load_causal_lm(model), dtype="float32", device=CPU, weights="int8")
    with listening(service) as url:
        push(pool_of("rlhf", url, tmp_path, canary={"bound": 5.0}), policy)
    assert service.digests() == {name: tensor_digest(tensor) for name, tensor in policy.tensors().items()}


def adapted(model: str, settings: LoraConfig) -> PushedPolicy:
    """A policy of another LoRA run on this model."""
    torch.manual_seed(3)
    policy = add_lora(load_causal_lm(model), settings)
    perturb(policy, 7)
    return PushedPolicy(Models(policy=policy, temperature=1.0, dtype="float32", device=CPU))


@pytest.mark.parametrize(
    "changed",
    [
        {"alpha": 32.0},
        {"rslora": True},
        {"dora": True},
        {"r": 3},
        {"target_modules": "attention"},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_adapter_of_a_later_run_replaces_the_one_before(tmp_path: Path, changed: dict[str, Any]) -> None:
    """With its own settings, in both orders: the server has the bits of one that never saw another adapter."""
    model = saved(tiny(dtype=torch.float32), tmp_path / "model")
    both = [LoraConfig(**{"r": 2, "alpha": 8.0, **settings}) for settings in ({}, changed)]
    answers: dict[str, list[Any]] = {}
    for order in (both, both[::-1], both[:1], both[1:]):
        service = Sound(load_causal_lm(model), dtype="float32", device=CPU)
        with listening(service) as url:
            for number, settings in enumerate(order):
                policy = adapted(model, settings)
                assert push(pool_of("rlhf", url, tmp_path / str(number)), policy) < 1e-4
        assert service.digests() == {name: tensor_digest(tensor) for name, tensor in policy.tensors().items()}
        answers.setdefault(str(order[-1]), []).append(service._score([*PROMPTS[0], *range(3, 12)]))
    first, second = answers.values()
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0]


def test_pushes_of_one_adapter_keep_the_samplers(tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=True)
    service = Sound(load_causal_lm(model), dtype="float32", device=CPU)
    with listening(service) as url:
        pool = pool_of("rlhf", url, tmp_path)
        push(pool, policy)
        made = service._sampler.cache_info().misses
        perturb(policy.model, 1)
        push(pool, policy)
    assert service._sampler.cache_info().misses == made > 0


def test_an_adapter_is_refused_after_a_run_that_trained_all_weights(tmp_path: Path) -> None:
    """Its base is gone from the server; no false cause is named, and the advice is to start the server again."""
    model = model_folder(tmp_path)
    with listening(Sound(load_causal_lm(model), dtype="float32", device=CPU)) as url:
        push(pool_of("rlhf", url, tmp_path / "whole"), policy_of(model, lora=False))
        with pytest.raises(SamplingError, match=r"another run has pushed all weights.*start the server again"):
            push(pool_of("rlhf", url, tmp_path / "lora"), policy_of(model, lora=True))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_fill_the_context_leave_the_canary_room(tmp_path: Path, kind: str) -> None:
    model = model_folder(tmp_path)
    policy = policy_of(model, lora=False)
    context = context_length(policy.model)
    assert context is not None
    with listening(Sound(load_causal_lm(model), dtype="float32", device=CPU)) as url:
        pool = pool_of(kind, url, tmp_path)
        with pool.sampling_from(policy, [[BOS] + [5] * (context - 2)]):
            assert pool.take_metrics()["server/canary"] < 1e-4

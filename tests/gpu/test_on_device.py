"""Every trainer and every way of sampling on a GPU (a pretend one if there is none): the numbers of the CPU."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import device_runs
import pytest
import runs
import torch
from device_runs import OFFLINE, ONLINE, differences, gpu_or_pretend, offline_tree, online_tree, run
from pretend import PretendDevice
from quick import quick
from tiny_models import prompts_of, tiny

from rlhf.algo.support import SamplingLimits
from rlhf.config.files import merge
from rlhf.config.sections import SamplingConfig
from rlhf.data.tokenizer import as_completions
from rlhf.models.backbone import body_of
from rlhf.models.kernels.llama.forward import supports_fused
from rlhf.models.kernels.packing import packing_unsupported_reason
from rlhf.models.policy_models import Models
from rlhf.sampling.canary import CanaryReading, is_rounding
from rlhf.sampling.fast.engine import FastSampler
from rlhf.sampling.service import PolicyService
from rlhf.types import Completions

Machine = PretendDevice | None
ROWS = [[1, 5, 7, 9, 11], [1, 4], [1, 6, 8, 3, 12], [8], [1, 9, 9], [5, 6, 7, 8]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the model that all runs of a test start from."""
    runs.make_model(tmp_path / "model")
    return tmp_path


PRETENDED = ("ppo, shared critic, reward in parts", "ppo, lora", "ppo, transformers, padded", "grpo")
FEW = {"batch": {"prompts_per_step": 4}}  # if there are four completions of each


# The pretend GPU is shown one run of each kind of pass; `-m slow` has the others, and a GPU has all (docs/gpu.md).
@pytest.mark.parametrize("name", quick(ONLINE, PRETENDED))
def test_an_online_run_has_the_cpus_metrics(name: str, folder: Path) -> None:
    tree = online_tree(folder, name)
    check_both(merge(tree, FEW) if name in ("grpo", "online_dpo") else tree, folder)


@pytest.mark.parametrize("name", quick(OFFLINE, ["dpo", "kto"]))
def test_an_offline_run_has_the_cpus_metrics(name: str, folder: Path) -> None:
    check_both(offline_tree(folder, name), folder)


def check_both(tree: device_runs.Tree, folder: Path) -> None:
    expected = run(tree, folder, "cpu")
    with gpu_or_pretend():
        actual = run(tree, folder, "cuda")
    assert differences(expected, actual) == []


def test_a_reward_model_has_the_cpus_metrics(folder: Path) -> None:
    expected = device_runs.reward_model(folder, "cpu")[0]
    with gpu_or_pretend():
        actual = device_runs.reward_model(folder, "cuda")[0]
    assert differences(expected, actual) == []


def test_a_resumed_run_is_the_run(folder: Path, gpu: Machine) -> None:
    changes = {"checkpoint": {"every": 1}, "policy": {"ema_decay": 0.5}, "data": {"eval_prompts": None}}
    tree = merge(online_tree(folder, "ppo"), changes)
    whole = run(tree, folder, "cuda")
    shutil.rmtree(folder / "run-cuda" / "checkpoints" / "step-000002")  # as after a kill in step 2
    resumed = run(tree, folder, "cuda")
    assert differences(whole, resumed, tolerance=1e-6) == []


def test_the_fast_ways_are_on(folder: Path, gpu: Machine) -> None:
    tree = device_runs.on("cuda", online_tree(folder, "grpo"), folder)
    built = runs.online(tree)
    ways = built.models.fast_ways().ways
    assert all(ways.values()), ways
    prompts = built.prompts(1)
    built.sampler.sample(prompts, key=0, group_size=4)
    assert isinstance(built.sampler, FastSampler)
    assert built.sampler.uses == "recorded"


def test_arithmetic_is_bfloat16_on_a_gpu_unless_the_file_says_otherwise(folder: Path, gpu: Machine) -> None:
    tree = device_runs.on("cuda", online_tree(folder, "grpo"), folder)
    assert runs.online(tree).config.policy.dtype == "float32"
    del tree["policy"]["dtype"]
    tree["run"]["out_dir"] = str(folder / "other")
    built = runs.online(tree)
    assert (built.config.policy.dtype, built.models.dtype) == ("bfloat16", "bfloat16")


def sampler_of(model: Any, batch_size: int, device: str = "cuda") -> FastSampler:
    """A sampler of at most twelve tokens, in float32."""
    sampling = SamplingConfig(max_new_tokens=12, batch_size=batch_size)
    return FastSampler(model, sampling, eos_ids=(2,), pad_id=0, dtype="float32", device=torch.device(device))


def sampled(model: Any, device: str, batch_size: int, *, greedy: bool = False) -> list[Completions]:
    """Two rollouts of 24 rows by the same sampler, the second with the recording of the first."""
    sampler = sampler_of(model, batch_size, device)
    drawn = [sampler.sample(prompts_of(ROWS), key=key, group_size=4, greedy=greedy) for key in (7, 8)]
    assert sampler.uses == ("lean" if device == "cpu" else "recorded")
    return drawn


SAMPLED = [("llama", 100), ("llama", 5), ("qwen2", 24), ("qwen3", 9), ("mistral", 5), ("phi3", 24), ("gemma3_text", 9)]
ALIKE = [("llama", 100), ("llama", 5), ("qwen3", 9)]  # a Mistral has their slots, a Gemma 3 their norms


@pytest.mark.parametrize(("family", "batch_size"), quick(SAMPLED, [case for case in SAMPLED if case not in ALIKE]))
def test_recorded_steps_sample_the_cpus_tokens(family: str, batch_size: int) -> None:
    model = tiny(family, dtype=torch.float32)
    expected = sampled(model, "cpu", batch_size)
    with gpu_or_pretend():
        actual = sampled(copy.deepcopy(model).to("cuda"), "cuda", batch_size)
    for ours, theirs in zip(expected, actual, strict=True):
        assert torch.equal(ours.completion_ids, theirs.completion_ids)
        assert torch.allclose(ours.sampler_logprobs, theirs.sampler_logprobs, atol=2e-5)


def test_recorded_steps_read_the_weights_of_their_rollout(gpu: Machine) -> None:
    model = tiny("llama", dtype=torch.float32).to("cuda")
    sampler = sampler_of(model, 24)
    before = sampler.sample(prompts_of(ROWS), key=7, group_size=4, greedy=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    after = sampler.sample(prompts_of(ROWS), key=7, group_size=4, greedy=True)
    fresh = sampled(model, "cuda", 24, greedy=True)[0]
    assert not torch.equal(before.completion_ids, after.completion_ids)
    assert torch.equal(after.completion_ids, fresh.completion_ids)
    if gpu is not None:
        assert len(sampler.kept.steps[sampler].graphs) == gpu.captures - 2 or gpu.captures > 0


def test_trials_compute_without_tf32(gpu: Machine) -> None:
    """TF32 rounds products to 10 bits, for some shapes only: on an H100 it switched SmolLM2's fast ways off."""
    matmul = torch.backends.cuda.matmul
    seen: set[str] = set()
    model = tiny().to("cuda")
    body = body_of(model)
    for module in body.modules():
        module.register_forward_hook(lambda *_: seen.add(matmul.fp32_precision))
    sampler = sampler_of(model, 24)
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        assert packing_unsupported_reason(body) == ""
        assert supports_fused(body)
        assert sampler._choose_decoder(prompts_of(ROWS)) == "recorded"
        assert seen == {"ieee"}
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_rollouts_of_other_numbers_of_rows_share_one_cache(gpu: Machine) -> None:
    """Each turn of an environment has fewer live rows than the one before: a cache for each number would fill a GPU."""
    model = tiny(dtype=torch.float32).to("cuda")
    sampler = sampler_of(model, 24)
    for count in (4, 6, 3):
        rows = prompts_of(ROWS[:count])
        drawn, alone = (one.sample(rows, key=7, group_size=3) for one in (sampler, sampler_of(model, 24)))
        assert torch.equal(drawn.completion_ids, alone.completion_ids)
    assert sampler.kept.steps[sampler].slots.size == 18


def test_samplers_of_other_settings_share_one_copy_of_the_weights(gpu: Machine) -> None:
    """A server has a sampler for the rollout and one for the canary, which asks for few tokens after every push."""
    model = tiny(dtype=torch.float32).to("cuda")
    service = PolicyService(model, dtype="float32", device=torch.device("cuda"))
    prompts = [row[:] for row in ROWS[:3]]
    drawn = []
    for length in (8, 24, 8):
        settings = (1.0, length, 64, SamplingLimits(), (), 0)
        options: dict[str, Any] = {"rows": [0, 1, 2], "width": 0, "size": 2, "key": 7, "greedy": False, "frozen": False}
        drawn.append(service.sample(prompts, settings=settings, **options))
        assert isinstance(sampler := service._sampler(*settings), FastSampler)
        assert sampler.uses == "recorded"
    assert torch.equal(drawn[0].completion_ids, drawn[2].completion_ids)
    assert torch.equal(drawn[0].completion_ids, drawn[1].completion_ids[:, :8])
    copies = {id(steps.decoder) for steps in service._kept.steps.values()}
    assert copies == {id(service._kept.decoder)}


def test_steps_are_recorded_on_one_stream_of_the_sampler(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace (32 MiB on an H100) for each stream; and two samplers may record at the same time."""
    captured: list[object] = []
    capture = torch.cuda.graph

    def spied(*args: object, **kwargs: object) -> object:
        captured.append(kwargs.get("stream"))
        return capture(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "graph", spied)
    model = tiny(dtype=torch.float32).to("cuda")
    streams = []
    for prompts in (prompts_of(ROWS), prompts_of([[1, 5, 7, 9, 11] * 3] * 2)):  # recorded steps, and a shared prompt
        sampler = sampler_of(model, 5)
        for key in (1, 2):
            sampler.sample(prompts, key=key, group_size=4)
        streams.append(set(captured))
        captured.clear()
    assert [len(of_sampler) for of_sampler in streams] == [1, 1]
    assert None not in streams[0] | streams[1]
    assert not streams[0] & streams[1]


def test_the_canary_takes_tf32_for_rounding(gpu: Machine) -> None:
    """A run in float32 computes in TF32 by default, which moves a log-probability beyond the canary's 1e-3 nats."""
    matmul = torch.backends.cuda.matmul
    model = tiny(dtype=torch.float32).to("cuda")
    models = Models(policy=model, temperature=1.0, dtype="float32", device=torch.device("cuda"))
    rows = as_completions([[1, 5, 7]], [[4, 6]], pad_id=0)
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    reading = CanaryReading(
        drawn=rows,
        served_drawn=zeros,
        forced=rows,
        served_forced=zeros,
        drawn_difference=0.0,
        forced_difference=0.0,
    )
    models.policy_tokens(rows.to("cuda"))  # its trials are over
    seen: list[str] = []
    body_of(model).get_input_embeddings().register_forward_hook(lambda *_: seen.append(matmul.fp32_precision))
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        assert is_rounding(models, reading)
        assert seen == ["ieee", "tf32"] * 2
    finally:
        matmul.fp32_precision = before

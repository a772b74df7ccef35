"""The device of a setting, and the refusals for an Apple GPU; none is needed here."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from runs import make_model, write_rows
from transformers import AutoModelForSequenceClassification

from rlhf.config.run import RunConfig, ShardingConfig
from rlhf.config.sections import RewardModelConfig
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ConfigError
from rlhf.factory.evaluation import evaluate_suite, load_model_for_suite
from rlhf.factory.rewards import build_source
from rlhf.rewards.model import ModelSource
from rlhf.runtime import device as device_module
from rlhf.runtime import engine as engine_module
from rlhf.runtime.device import (
    choose_device,
    choose_precision,
    empty_cache,
    exact_products,
    is_out_of_memory,
    usable_dtype,
)
from rlhf.runtime.engine import Engine, local_device, make_engine
from rlhf.runtime.memory import AdaptiveMicroBatch, make_memory_profiler
from rlhf.suites.xstest import XstestSuite

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make torch say that these devices are there, and no other."""

    def has(*devices: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in devices)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in devices)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return has


@pytest.mark.parametrize(
    ("there", "name", "chosen"),
    [
        ((), "auto", "cpu"),
        (("mps",), "auto", "cpu"),
        (("cuda", "mps"), "auto", "cuda"),
        (("cuda",), "cpu", "cpu"),
        (("mps",), "mps", "mps"),
        (("cuda",), "cuda", "cuda"),
    ],
)
def test_the_device_that_is_meant(machine: Machine, there: tuple[str, ...], name: str, chosen: str) -> None:
    machine(*there)
    assert choose_device(name, key="run.device") == torch.device(chosen)


@pytest.mark.parametrize(("name", "message"), [("cuda", "torch sees no GPU"), ("mps", "torch sees no Apple GPU")])
def test_a_device_that_is_not_there_is_told(machine: Machine, name: str, message: str) -> None:
    machine()
    with pytest.raises(ConfigError, match=rf"run\.device is {name} but {message}; set run\.device=cpu or auto"):
        make_engine(RunConfig(device=name))


def test_a_name_that_is_no_device_is_told() -> None:
    with pytest.raises(ConfigError, match="--device is tpu, which is no device: set --device=cpu, cuda or auto"):
        choose_device("tpu", key="--device")


GAINS = device_module.cpu_gains_by_bfloat16  # the suite's fixtures replace it


@pytest.fixture(params=[True, False])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether bfloat16 products are faster on the CPU."""
    monkeypatch.setattr(device_module, "cpu_gains_by_bfloat16", lambda: request.param)
    return bool(request.param)


def test_what_transformers_logs_while_it_imports_deepspeed_is_not_shown() -> None:
    make_engine(RunConfig(device="cpu"))
    logger = logging.getLogger("DeepSpeed")
    levels = (logging.WARNING, logging.ERROR)
    shown = [bool(logger.filter(logging.LogRecord("DeepSpeed", level, "", 1, "", None, None))) for level in levels]
    assert shown == [False, True]


def test_a_cpu_without_bfloat16_products_computes_in_float32_and_says_so(machine: Machine, native: bool) -> None:
    machine()
    tree = {"data": {"preferences": {"path": "p"}}, "model": {"model": "m", "dtype": "bfloat16"}}
    config, notes = choose_precision(RewardModelConfig.model_validate(tree))
    assert config.model.dtype == ("bfloat16" if native else "float32")
    assert [note.split(",")[0] for note in notes] == ([] if native else ["arithmetic: model.dtype=float32"])


def test_a_reward_model_and_a_suite_say_so_too(native: bool, tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model"))
    warnings: list[str] = []
    tokenizer, scorer = load_tokenizer(folder), str(tmp_path / "scorer")
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(scorer)
    tokenizer.save_pretrained(scorer)
    config = ModelSource(path=scorer, dtype="bfloat16")
    build_source(config, tokenizer, Engine(torch.device("cpu")), warnings.append)
    notes = [text.split(",")[0] for text in warnings if text.startswith("arithmetic")]
    assert notes == ([] if native else ["arithmetic: reward.source.dtype=float32"])

    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "red one", "label": "safe"}])
    settings = XstestSuite.model_validate(
        {"dtype": "bfloat16", "dataset": {"path": str(rows)}, "sampling": {"max_new_tokens": 2}}
    )
    subject = load_model_for_suite(settings, folder)
    assert subject.dtype == ("bfloat16" if native else "float32")
    result = evaluate_suite(settings, subject, "")
    assert [text.split(",")[0] for text in result.notes if text.startswith("arithmetic")] == (
        [] if native else ["arithmetic: dtype=float32"]
    )


@pytest.mark.parametrize(("major", "dtype"), [(7, "float32"), (8, "bfloat16")])
def test_a_gpu_that_emulates_bfloat16_computes_in_float32(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, major: int, dtype: str
) -> None:
    """On a V100 or T4 torch answers that bfloat16 is supported, and emulates it."""
    machine("cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    tree = {"data": {"preferences": {"path": "p"}}, "model": {"model": "m"}}
    config, notes = choose_precision(RewardModelConfig.model_validate(tree))
    assert config.model.dtype == dtype
    products = "full float32" if major < 8 else "TF32 (run.tf32)"
    assert notes == [f"arithmetic: model.dtype={dtype}, products in float32 by {products}"]


def test_trials_in_two_threads_give_tf32_back() -> None:
    """The setting holds for the process: a trial that ends between another's ends left TF32 off for good."""
    matmul, device = torch.backends.cuda.matmul, torch.device("cuda")
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    begun = threading.Event()

    def other() -> None:
        begun.set()
        with exact_products(device):
            time.sleep(0.05)

    thread = threading.Thread(target=other)
    try:
        with exact_products(device):
            thread.start()
            begun.wait()
            time.sleep(0.02)
            assert matmul.fp32_precision == "ieee"
        thread.join()
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("cpu", "gains"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "avx512_fp16": True, "amx_bf16": True}, True),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "avx512_fp16": True, "amx_bf16": False}, False),  # hidden AMX
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "avx512_fp16": False, "amx_bf16": False}, True),  # Cooper Lake
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "avx512_fp16": True, "amx_bf16": False}, True),
        ({"architecture": "aarch64"}, True),
    ],
)
@pytest.mark.parametrize("has_products", [True, False])
def test_which_cpus_gain_by_bfloat16(
    cpu: dict[str, object], gains: bool, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "cpu_has_bfloat16_products", lambda: has_products)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    assert GAINS() is (gains and has_products)


def test_other_dtypes_and_devices_are_what_they_were(native: bool) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [usable_dtype(dtype, cpu) for dtype in ("float32", "float64")] == ["float32", "float64"]
    assert usable_dtype("bfloat16", gpu) == "bfloat16"


def test_an_apple_gpu_runs_one_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("mps")
    assert make_engine(RunConfig(device="mps")).device == torch.device("mps")
    with pytest.raises(ConfigError, match=r"run\.device is mps, which runs one process"):
        make_engine(RunConfig(device="mps"), ShardingConfig(mode="zero2"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"run\.device is mps, which runs one process"):
        make_engine(RunConfig(device="mps"))


def test_an_apple_gpu_has_no_float64() -> None:
    tree = {"data": {"preferences": {"path": "p"}}, "model": {"model": "m", "dtype": "float64"}}
    assert RewardModelConfig.model_validate(tree).model.dtype == "float64"
    with pytest.raises(ValidationError, match=r"model\.dtype is float64, which an Apple GPU does not have"):
        RewardModelConfig.model_validate({**tree, "run": {"device": "mps"}})


def test_its_memory_is_what_its_driver_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [3 * 2**20]
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: given[0])
    profiler = make_memory_profiler(torch.device("mps"))
    with profiler.phase("update"):
        given[0] = 7 * 2**20
    assert profiler.take() == {"update": 7.0}
    assert profiler.peak_mb() == 7.0


def test_its_cache_is_emptied_where_there_is_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(device_module.torch.mps, "empty_cache", lambda: emptied.append("mps"))
    machine()
    empty_cache()
    assert emptied == []
    machine("mps")
    empty_cache()
    assert emptied == ["mps"]


OUT_OF_MEMORY_TEXTS = (
    "MPS backend out of memory (MPS allocated: 17.00 GB, ...)",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)


def test_other_ways_to_be_out_of_memory_halve_the_micro_batch_too(machine: Machine) -> None:
    machine()
    notes: list[str] = []
    micro_batch = AdaptiveMicroBatch(16, what="a pass", note=notes.append)

    texts = iter(OUT_OF_MEMORY_TEXTS)

    def work(size: int) -> int:
        if size > 2:
            raise RuntimeError(next(texts))
        return size

    assert micro_batch.run(work) == 2
    assert len(notes) == 1
    assert list(texts) == []

    def wrong(size: int) -> int:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        micro_batch.run(wrong)
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("out of luck"))


def test_a_process_takes_the_gpu_of_its_local_rank_or_the_only_one_it_sees() -> None:
    assert [local_device(rank, 4) for rank in (0, 3)] == [torch.device("cuda", 0), torch.device("cuda", 3)]
    assert local_device(3, 1) == torch.device("cuda", 0)  # Slurm's --gpus-per-task=1
    with pytest.raises(ConfigError, match="local rank 4 has no GPU: this process sees 4"):
        local_device(4, 4)


@pytest.mark.parametrize(("local_rank", "visible", "index"), [("3", 8, 3), ("3", 1, 0)])
def test_deepspeed_is_told_the_gpu_that_the_process_takes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, local_rank: str, visible: int, index: int
) -> None:
    """DeepSpeed takes LOCAL_RANK for the number of the GPU."""
    machine("cuda")
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert engine_module._device(RunConfig()) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]
    assert os.environ["LOCAL_RANK"] == str(index)

"""The device that a setting names, its default arithmetic, and the few places where devices differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from rlhf.config.run import Dtype
from rlhf.config.sections import OfflineConfig, OnlineConfig, RewardModelConfig, TrainConfig
from rlhf.errors import ConfigError

T = TypeVar("T")
C = TypeVar("C", OnlineConfig, OfflineConfig, RewardModelConfig)

DEVICE_ERRORS = (  # in RuntimeErrors that torch raises without a class of their own
    "MPS backend out of memory",
    "CUDA error",
    "on the same device",
    "device type for generator",
    "operation not permitted when stream is capturing",
)
OUT_OF_MEMORY = (  # in RuntimeErrors of allocators beside torch: Metal, CUDA's driver, cuBLAS
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def choose_device(name: str, *, key: str) -> torch.device:
    """Choose the device for the setting `key`: auto is a CUDA GPU if there is one, otherwise the CPU.

    auto never chooses an Apple GPU (mps): nothing of this project was ever run on one, and a CPU is known to be right.

    Raises:
        ConfigError: a device is named that torch does not know or see.
    """
    match name:
        case "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        case "cuda" if not torch.cuda.is_available():
            raise ConfigError(f"{key} is cuda but torch sees no GPU; set {key}=cpu or auto")
        case "mps" if not torch.backends.mps.is_available():
            raise ConfigError(f"{key} is mps but torch sees no Apple GPU; set {key}=cpu or auto")
        case _:
            try:
                return torch.device(name)
            except RuntimeError as error:
                raise ConfigError(f"{key} is {name}, which is no device: set {key}=cpu, cuda or auto") from error


def empty_cache() -> None:
    """Return cached memory of the GPU, if there is one, to the system."""
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    torch.cuda.empty_cache()


def is_device_error(error: BaseException) -> bool:
    """Return whether an error is about the device and not about the computation: it says nothing about a model.

    That is: out of memory, an error of CUDA or another accelerator, tensors on different devices. A trial of whether
    a model supports something must let it pass.
    """
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in DEVICE_ERRORS)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch or a library below it ran out of memory; the latter is told by the error's text alone."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


class SideStream:
    """A stream of its own for work in another thread: on the default stream it would only queue behind the rest.

    The work waits for earlier launches, and the thread that takes its result up waits for the work. On a CPU
    there are no streams, and nothing changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return `work` as it is to be called in the other thread; its results must be on the host."""
        stream = self._stream
        if stream is None:
            return work
        before = torch.cuda.current_stream(stream.device).record_event()

        def run() -> T:
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                result = work()
            stream.synchronize()  # the caller goes on with the memory that was read here
            return result

        return run


def choose_precision(config: C) -> tuple[C, list[str]]:
    """Choose the dtype of a run's arithmetic by its device, and return the configuration with it and a line about it.

    A GPU that has bfloat16 uses it unless the file sets the dtype: weights, their optimizer state, the residual stream,
    softmaxes and losses stay in float32. A CPU whose products are slower with it computes in float32 despite the
    file.

    Raises:
        ConfigError: run.device names a device that torch does not see.
    """
    section = _section(config)
    trained = getattr(config, section)
    device = choose_device(config.run.device, key="run.device")
    dtype = usable_dtype(trained.dtype, device)
    if device.type == "cuda" and "dtype" not in trained.model_fields_set and _gpu_has_bfloat16():
        dtype = "bfloat16"
    if dtype == trained.dtype:
        return config, _precision_notes(config, device)
    config = config.model_copy(update={section: trained.model_copy(update={"dtype": dtype})})
    return config, _precision_notes(config, device, asked=trained.dtype)


def _gpu_has_bfloat16() -> bool:
    """Return whether the GPU computes in bfloat16 itself; GPUs before Ampere emulate it, and are slower with it."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def cpu_has_bfloat16_products() -> bool:
    """Return whether this CPU computes bfloat16 matrix products by oneDNN; others emulate them, many times slower."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_gains_by_bfloat16() -> bool:
    """Return whether bfloat16 products are faster than float32's on this CPU.

    Intel's processors with AVX512-FP16 have AMX for them. A virtual machine that hides AMX leaves AVX512-BF16, at six
    tenths of the rate of float32.
    """
    has = torch.cpu.get_capabilities()
    hides_amx = str(has.get("cpu_name")).startswith("Intel") and has.get("avx512_fp16") and not has.get("amx_bf16")
    return cpu_has_bfloat16_products() and not hides_amx


_TRIAL = threading.RLock()  # the setting is of the whole process: two threads must not restore each other's


def set_products(device: torch.device, *, tf32: bool) -> None:
    """Set how products of float32 are computed on a GPU: in TF32 or in full."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Compute products of float32 on a GPU without TF32 within this context."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    with _TRIAL:
        before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


def usable_dtype(dtype: Dtype, device: torch.device) -> Dtype:
    """Return `dtype`, or float32 for bfloat16 on a CPU whose products are slower with it."""
    is_slower = dtype == "bfloat16" and device.type == "cpu" and not cpu_gains_by_bfloat16()
    return "float32" if is_slower else dtype


def fallback_note(key: str) -> str:
    """Describe that `usable_dtype` replaced the value of the setting `key`."""
    return f"arithmetic: {key}=float32, since bfloat16 products are slower than float32's on this CPU"


def _precision_notes(
    config: TrainConfig | RewardModelConfig, device: torch.device, asked: Dtype | None = None
) -> list[str]:
    """Describe the arithmetic on a GPU, or the dtype that a CPU does not have, in one line."""
    section = _section(config)
    dtype = getattr(config, section).dtype
    if device.type == "cpu" and asked is not None:
        return [fallback_note(f"{section}.dtype")]
    if device.type != "cuda":
        return []
    has_tensor_cores = _gpu_has_bfloat16()  # for bfloat16 and TF32: both came with Ampere
    products = "TF32 (run.tf32)" if config.run.tf32 and has_tensor_cores else "full float32"
    slow = "; bfloat16 is several times as fast on a GPU" if dtype != "bfloat16" and has_tensor_cores else ""
    return [f"arithmetic: {section}.dtype={dtype}, products in float32 by {products}{slow}"]


def _section(config: TrainConfig | RewardModelConfig) -> str:
    return "model" if isinstance(config, RewardModelConfig) else "policy"

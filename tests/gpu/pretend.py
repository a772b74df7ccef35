"""A pretend GPU for a build of torch without one: `cuda:0` tensors that compute on the CPU and keep a GPU's rules.

    with PretendDevice() as gpu:
        ...                      # run.device=cuda works here
    assert gpu.problems == []

Inside, torch.cuda says that there is one device. A tensor on it is a `DeviceTensor`, whose numbers are an ordinary CPU
tensor, so that every result can be compared with the CPU's. Refusals and hidden work of a real device
are kept apart:

- operations over both devices, draws from a CPU generator, waits while a graph is captured: a problem, and an error
- the host waits for the device (item, bool, nonzero, a mask as an index, a copy to the host): counted by place
- copies to the device from memory that is not pinned, for which the host waits too: counted by place
- copies that do not wait: the numbers arrive when the host has waited for them, and NaN stands there until then
- streams: a tensor that one writes and another reads without waiting for it is a problem
- kernels (operations that are no views), and the casts of weights among them: counted

Memory, allocators, the numbers of real kernels and NCCL are beyond it. On a machine with a GPU the real one is used.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pretend_autocast import register_autocast
from pretend_cuda import torch_cuda
from pretend_functions import Functions
from pretend_streams import (
    SEQUENCES,
    Clock,
    Memory,
    Recording,
    Stream,
    current,
    machines,
    merge,
    tensors_in,
)
from pretend_tensor import DEVICE, DeviceTensor, is_device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (str(ROOT / "rlhf") + "/", str(ROOT / "reward_model") + "/")

HOST_READS = frozenset(  # operations whose result has a size or a value that the host must know
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal"}
    | {"is_nonzero", "bincount"}
)
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
TAKES_HOST_SCALARS = frozenset(
    {"where", "masked_fill", "masked_fill_", "fill_", "copy_", "index_fill", "index_fill_", "lerp", "lerp_", "_to_copy"}
    | {"_foreach_mul_", "scalar_tensor", *INDEXING}
)
NO_KERNEL = frozenset(
    {"detach", "alias", "_unsafe_view", "lift", "lift_fresh", "set_", "is_same_size", "resize_"}
    | {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
)


class PretendDevice:
    """The machine: its counts, its streams, and the context in which it is there."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.waits: Counter[tuple[str, str]] = Counter()  # the device has nothing to do meanwhile
        self.paced: Counter[tuple[str, str]] = Counter()  # for an event with later work behind it
        self.blocking: Counter[tuple[str, str]] = Counter()  # copies to the device from pageable memory
        self.copies: Counter[tuple[str, str]] = Counter()  # copies that nobody waits for
        self.kernels: Counter[str] = Counter()
        self.weight_casts: Counter[int] = Counter()  # by weight
        self.captures = self.replays = self.nodes = 0
        self.attention: Counter[str] = Counter()  # calls, by the kernel that CUDA would take
        self.local = threading.local()
        self._streams = 0
        self._host: Clock = {}
        self._recording: Recording | None = None
        self._arriving: list[tuple[int, int, Tensor, Tensor]] = []  # stream, tick, where to, what
        self._leaving: list[tuple[int, int, Tensor, Tensor]] = []  # stream, tick, pinned source, its numbers then
        self._pinned: dict[int, Tensor] = {}
        self._views: dict[Any, bool] = {}
        self._writes: dict[Any, tuple[int, ...]] = {}

    # -- launching ------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an aten operation like the device."""
        given = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
        mine = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
        target = kwargs.get("device")
        if target is not None and target.type == "meta" and not getattr(self.local, "asked_for_meta", False):
            target, kwargs = DEVICE, {**kwargs, "device": DEVICE}  # C++ means the device of some DeviceTensor
        if not mine and not is_device(target):
            return func(*args, **kwargs)
        name: str = func.overloadpacket.__name__
        others = [tensor for tensor in given if not isinstance(tensor, DeviceTensor)]
        self._check_generator(name, kwargs)
        if name in ("_to_copy", "copy_"):
            moved = self._move(func, name, args, kwargs, mine, others)
            if moved is not NotImplemented:
                return moved
        elif others and mine:
            self._check_devices(name, args, others, func)
        self._check_host_reads(name, args)
        if is_device(target):
            kwargs = {**kwargs, "device": torch.device("cpu")}
            kwargs.pop("pin_memory", None)
        for tensor in mine:
            if getattr(tensor, "_is_param", False):
                tensor.memory.is_weight = True
        if name == "_to_copy" and mine[0].memory.is_weight and mine[0].dim() > 1:
            self.weight_casts[id(mine[0].memory)] += 1
        is_view = self._is_view(func)
        return self.launch(
            name,
            _STAND_INS.get(func, func),
            args,
            kwargs,
            mine,
            is_kernel=not is_view and name not in NO_KERNEL,
            writes=self._written(func),
        )

    def launch(
        self,
        name: str,
        work: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mine: list[DeviceTensor],
        *,
        is_kernel: bool = True,
        writes: tuple[int, ...] = (),
    ) -> Any:
        """Run `work` on the numbers of the tensors, in the current stream; return its results on the device."""
        host_args, host_kwargs = _on_host(args), {key: _on_host(value) for key, value in kwargs.items()}
        written = [args[index] for index in writes if index < len(args)]
        written += [kwargs["out"]] if "out" in kwargs else []
        changed = [tensor for tensor in tensors_in(written) if isinstance(tensor, DeviceTensor)]
        if is_kernel:
            self.kernels[name] += 1
            self._order(name, mine, changed)
        recording = self._recording
        if recording is not None and recording.thread != threading.get_ident() and recording.mode == "global":
            self._refuse(f"another thread launches {name} while a graph is captured in mode global")
        if is_kernel and recording is not None and recording.thread == threading.get_ident():
            out = recording.add(work, host_args, host_kwargs, [tensor.host for tensor in changed])
        else:
            out = work(*host_args, **host_kwargs)
        return self._wrap(out, mine)

    def _wrap(self, out: Any, mine: list[DeviceTensor]) -> Any:
        if isinstance(out, Tensor):
            if isinstance(out, DeviceTensor):
                return out
            address = out.untyped_storage().data_ptr()
            for tensor in mine:
                if tensor.host is out:
                    return tensor
            for tensor in mine:
                if address and tensor.host.untyped_storage().data_ptr() == address:
                    return DeviceTensor(out, tensor.memory)
            return DeviceTensor(out, Memory(written=self._now()))
        if isinstance(out, SEQUENCES):
            return type(out)([self._wrap(part, mine) for part in out])
        return out

    def _order(self, name: str, mine: list[DeviceTensor], changed: list[DeviceTensor]) -> None:
        """Check that the current stream knows of the writes that it reads, and of earlier uses of its outputs."""
        stream = self.stream()
        stream.tick += 1
        merge(stream.known, self._host)
        now = stream.number, stream.tick
        for tensor in mine:
            self._check_order(stream, tensor.memory.written, name)
            tensor.memory.read[stream.number] = stream.tick
        for tensor in changed:
            for other in tensor.memory.read.items():
                self._check_order(stream, other, name)
            tensor.memory.written, tensor.memory.read = now, {}

    def _check_order(self, stream: Stream, used: tuple[int, int], name: str) -> None:
        number, tick = used
        if number != stream.number and stream.known.get(number, 0) < tick:
            self.problems.append(
                f"{name}: stream {stream.number} does not wait for what stream {number} did at {place()}"
            )

    def _now(self) -> tuple[int, int]:
        stream = self.stream()
        return stream.number, stream.tick

    def _is_view(self, func: Any) -> bool:
        if func not in self._views:
            returns = func._schema.returns
            self._views[func] = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        return self._views[func]

    def _written(self, func: Any) -> tuple[int, ...]:
        if func not in self._writes:
            arguments = func._schema.arguments
            self._writes[func] = tuple(
                i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
            )
        return self._writes[func]

    # -- rules ----------------------------------------------------------------------------------------------------

    def _refuse(self, text: str) -> None:
        self.problems.append(f"{text} at {place()}")
        raise RuntimeError(self.problems[-1])

    def _check_generator(self, name: str, kwargs: dict[str, Any]) -> None:
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            self._refuse(f"Expected a 'cuda' device type for generator but found 'cpu': {name}")

    def _check_devices(self, name: str, args: tuple[Any, ...], others: list[Tensor], func: Any) -> None:
        is_pointwise = torch.Tag.pointwise in func.tags or name in TAKES_HOST_SCALARS
        for tensor in others:
            if tensor.dim() == 0 and is_pointwise:
                continue
            if name in INDEXING and not tensor.is_floating_point():
                self._copied_from_host(f"{name} by indices on the host")
                continue
            self._refuse(f"Expected all tensors to be on the same device, cuda:0 and cpu: {name}")

    def _check_host_reads(self, name: str, args: tuple[Any, ...]) -> None:
        if name in HOST_READS:
            self.host_waits(name, self.stream().clock())
        elif name in INDEXING:
            indices = [index for index in args[1] if isinstance(index, Tensor)]
            if any(index.dtype == torch.bool for index in indices):
                self.host_waits("a mask as an index", self.stream().clock())

    def host_waits(self, what: str, clock: Clock) -> None:
        """Count a wait of the host for everything that `clock` names, and let it arrive."""
        recording = self._recording
        if recording is not None and recording.thread == threading.get_ident():
            self._refuse(f"operation not permitted when stream is capturing: {what}")
        is_drained = all(clock.get(self.stream().number, 0) >= self.stream().tick for _ in (0,))
        (self.waits if is_drained else self.paced)[what, place()] += 1
        merge(self._host, clock)
        arrived = [entry for entry in self._arriving if entry[1] <= self._host.get(entry[0], 0)]
        for entry in arrived:
            entry[2].copy_(entry[3])
        self._arriving = [entry for entry in self._arriving if not any(entry is other for other in arrived)]
        left = [entry for entry in self._leaving if entry[1] <= self._host.get(entry[0], 0)]
        for _, _, source, numbers in left:
            if not torch.equal(source, numbers):
                self.problems.append(f"pinned memory was changed before its copy was over, seen at {place()}")
        self._leaving = [entry for entry in self._leaving if not any(entry is other for other in left)]

    # -- copies ---------------------------------------------------------------------------------------------------

    def _move(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], mine: list[Any], others: list[Tensor]
    ) -> Any:
        """Copy between the host and the device; NotImplemented if both ends are on the device."""
        if name == "copy_":
            target, source = args[0], args[1]
            if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
                return NotImplemented
            non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            if isinstance(target, DeviceTensor):
                if source.dim() or not target.dim():
                    self._to_device(source, non_blocking)
                self.launch("copy_", func, args, {}, [target], writes=(0,))
            else:
                self._to_host(source, target, non_blocking and self.is_pinned(target))
            return target
        goes, comes = is_device(kwargs.get("device")), bool(mine)
        if kwargs.get("device") is None or goes == comes:
            return NotImplemented
        non_blocking = bool(kwargs.get("non_blocking"))
        rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
        if goes:
            self._to_device(args[0], non_blocking)
            return self.launch("_to_copy", func, args, rest, [])
        made = torch.empty_like(mine[0].host, dtype=rest.get("dtype") or mine[0].dtype)
        self._to_host(mine[0], made, non_blocking)
        return made

    def _to_device(self, source: Tensor, non_blocking: bool) -> None:
        if not source.numel():
            return
        if non_blocking and self.is_pinned(source):
            self.copies["to the device", place()] += 1
            stream = self.stream()
            self._leaving.append((stream.number, stream.tick + 1, source.detach(), source.detach().clone()))
        else:
            self._copied_from_host("to the device, pageable")

    def _copied_from_host(self, what: str) -> None:
        recording = self._recording
        if recording is not None and recording.thread == threading.get_ident():
            self._refuse(f"operation not permitted when stream is capturing: {what}")
        self.blocking[what, place()] += 1

    def _to_host(self, source: DeviceTensor, target: Tensor, non_blocking: bool) -> None:
        self._order("copy to the host", [source], [])
        numbers = source.host.detach().to(target.dtype).clone()
        stream = self.stream()
        if not non_blocking:
            self.host_waits("copy to the host", stream.clock())
            target.copy_(numbers)
            return
        self.copies["to the host", place()] += 1
        garbage = torch.full_like(numbers, float("nan") if numbers.is_floating_point() else 0)
        target.copy_(numbers.logical_not() if numbers.dtype == torch.bool else garbage)
        self._arriving.append((stream.number, stream.tick, target, numbers))

    def pin(self, tensor: Tensor) -> Tensor:
        """Note that a tensor's memory is pinned."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a host tensor's memory is pinned."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    # -- streams and graphs ---------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        """Return this thread's current stream."""
        stream: Stream | None = getattr(self.local, "stream", None)
        return self.default if stream is None else stream

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._streams += 1
        return self._streams

    def begin_capture(self, recording: Recording) -> None:
        """Start to record this thread's launches."""
        if self._recording is not None:
            self._refuse("two captures at once")
        self.host_waits("capture of a graph", self.stream().clock())
        self.captures += 1
        self._recording = recording

    def end_capture(self) -> Recording:
        """Stop recording."""
        assert self._recording is not None
        recording, self._recording = self._recording, None
        self.nodes = len(recording.nodes)
        return recording

    def launch_graph(self, recording: Recording) -> None:
        """Replay a recorded graph in the current stream."""
        self.replays += 1
        self.stream().tick += 1
        recording.replay()

    # -- the context ----------------------------------------------------------------------------------------------

    def __enter__(self) -> PretendDevice:
        assert not machines, "one pretend device at a time"
        machines.append(self)
        self.default = Stream(number=0)
        self._exit = contextlib.ExitStack()
        register_autocast(DeviceTensor)
        for name, value in torch_cuda(self).items():
            self._exit.enter_context(mock.patch.object(torch.cuda, name, value))
        swapped = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # keeps tied weights tied in Module.to
        self._exit.callback(torch.__future__.set_swap_module_params_on_conversion, swapped)
        begin = threading.Thread.run

        def run_in_modes(thread: threading.Thread) -> None:  # a thread has its own modes
            with Functions(), _Operations():
                begin(thread)

        self._exit.enter_context(mock.patch.object(threading.Thread, "run", run_in_modes))
        walk = torch.autograd._engine_run_backward

        def walk_in_mode(*args: Any, **kwargs: Any) -> Any:  # torch leaves a function mode while it handles backward()
            with Functions():
                return walk(*args, **kwargs)

        self._exit.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", walk_in_mode))
        self._exit.enter_context(Functions())
        self._exit.enter_context(_Operations())
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        machines.clear()

    def clear(self) -> None:
        """Forget the counts so far."""
        for counter in (self.waits, self.paced, self.blocking, self.copies, self.kernels, self.attention):
            counter.clear()
        self.weight_casts.clear()
        self.captures = self.replays = 0


_STAND_INS: dict[Any, Callable[..., Any]] = {  # operations without a CPU kernel
    torch.ops.aten.mm.dtype: lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype),
}


def place() -> str:
    """Name the innermost line of the project that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCES):
            return f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _on_host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    if isinstance(value, SEQUENCES):
        return type(value)([_on_host(part) for part in value])
    return value


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to see to that took longer than the operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DeviceTensor not in types and (not kwargs or kwargs.get("device") is None):
            return func(*args, **(kwargs or {}))  # on the CPU
        return current().run(func, args, kwargs or {})

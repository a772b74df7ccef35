"""A pretend GPU for a build of torch without one: `cuda:0` tensors that compute on the CPU and keep a GPU's rules.

    with PretendDevice() as gpu:
        ...                      # run.device=cuda works here
    assert gpu.problems == []

Inside, torch.cuda says that there is one device. A tensor on it is a `DeviceTensor`, whose numbers are an ordinary CPU
tensor, so that every result can be compared with the CPU's. What a real device would refuse or do behind the program's
back is kept apart:

- operations over both devices, draws from a CPU generator, waits while a graph is captured: a problem, and an error
- the host waits for the device (item, bool, nonzero, a mask as an index, a copy to the host): counted by place
- copies to the device from memory that is not pinned, for which the host waits too: counted by place
- copies that do not wait: the numbers arrive when the host has waited for them, and NaN stands there until then
- streams: what one writes and another reads without waiting for it is a problem
- kernels (operations that are no views), and the casts of weights among them: counted

Memory, allocators, the numbers of real kernels and NCCL are beyond it. On a machine with a GPU the real one is used.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pretend_autocast import register_autocast
from pretend_streams import (
    Clock,
    Event,
    Graph,
    Memory,
    Recording,
    Stream,
    capture,
    current,
    in_stream,
    machines,
    merge,
    tensors_in,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (str(ROOT / "rlhf") + "/", str(ROOT / "reward_model") + "/")
DEVICE = torch.device("cuda:0")

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


class DeviceTensor(torch.Tensor):
    """A tensor on the pretend device; `host` has its numbers.

    C++ takes it for a meta tensor, so that autograd asks no CUDA driver for a stream, but with CUDA's dispatch keys,
    so that CUDA's autocast sees it; Python is told `cuda:0`.
    """

    host: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, host: Tensor, memory: Memory | None = None) -> DeviceTensor:
        with torch._C.DisableTorchFunction():
            meta = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device="meta")
            made: DeviceTensor = torch.Tensor._make_subclass(cls, meta, False, device_for_backend_keys=DEVICE)
        return made

    def __init__(self, host: Tensor, memory: Memory | None = None) -> None:
        self.host, self.memory = host, memory or Memory()

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current().run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        current().host_waits("pickle", current().stream().clock())
        return self.host.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made: Tensor = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.host.data_ptr()


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
        """Run an aten operation as the device would."""
        given = tensors_in(args) + (tensors_in(kwargs) if kwargs else [])
        mine = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
        target = kwargs.get("device")
        if target is not None and target.type == "meta" and not getattr(self.local, "asked_for_meta", False):
            target, kwargs = DEVICE, {**kwargs, "device": DEVICE}  # C++ means the device of some DeviceTensor
        if not mine and not _is_device(target):
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
        if _is_device(target):
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
        if isinstance(out, list | tuple):
            return type(out)([self._wrap(part, mine) for part in out])
        return out

    def _order(self, name: str, mine: list[DeviceTensor], changed: list[DeviceTensor]) -> None:
        """Check that the current stream knows of the writes that it reads, and of the uses of what it writes."""
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
        """Copy between the host and the device; NotImplemented where both ends are on the device."""
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
        goes, comes = _is_device(kwargs.get("device")), bool(mine)
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
        for name, value in _torch_cuda(self).items():
            self._exit.enter_context(mock.patch.object(torch.cuda, name, value))
        swapped = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # keeps tied weights tied in Module.to
        self._exit.callback(torch.__future__.set_swap_module_params_on_conversion, swapped)
        begin = threading.Thread.run

        def run_in_modes(thread: threading.Thread) -> None:  # a thread has its own modes
            with _Functions(), _Operations():
                begin(thread)

        self._exit.enter_context(mock.patch.object(threading.Thread, "run", run_in_modes))
        walk = torch.autograd._engine_run_backward

        def walk_in_mode(*args: Any, **kwargs: Any) -> Any:  # torch leaves a function mode while it handles backward()
            with _Functions():
                return walk(*args, **kwargs)

        self._exit.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", walk_in_mode))
        self._exit.enter_context(_Functions())
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


_STAND_INS: dict[Any, Callable[..., Any]] = {  # what no CPU kernel does
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


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _on_host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    if isinstance(value, list | tuple):
        return type(value)([_on_host(part) for part in value])
    return value


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current().run(func, args, kwargs or {})


def _names_device(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


def _names_meta(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "meta") or (isinstance(value, str) and value == "meta")


@contextlib.contextmanager
def _asked_for_meta(local: threading.local) -> Iterator[None]:
    """Take `meta` at its word: the program itself asked for it, as transformers does while it loads a model."""
    local.asked_for_meta = True
    try:
        yield
    finally:
        local.asked_for_meta = False


class _Functions(TorchFunctionMode):
    """What C++ would answer before it dispatches: tensors made of Python numbers, pinned memory, fused kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        special = _SPECIAL.get(name)
        if special is not None:
            result = special(func, args, kwargs)
            if result is not NotImplemented:
                return result
        args = tuple(DEVICE if _names_device(value) else value for value in args)
        kwargs = {key: DEVICE if _names_device(value) else value for key, value in kwargs.items()}
        if any(_names_meta(value) for value in (*args, *kwargs.values())):
            with _asked_for_meta(current().local):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _scaled_dot_product_attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], DeviceTensor):
        return NotImplemented
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (options.pop(name) for name in names[:3])
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = (x if x.dtype == torch.float64 else x.to(low) for x in (query, key, value))
    mask = options.pop("attn_mask", None)
    for tensor in (key, value, *([] if mask is None else [mask])):
        if not isinstance(tensor, DeviceTensor):
            current()._refuse("Expected all tensors to be on the same device, cuda:0 and cpu: attention")
    current().attention[_attention_kernel(query, mask, bool(options.get("enable_gqa")))] += 1
    return _Attention.apply(query, key, value, mask, options)  # type: ignore[no-untyped-call]


def _attention_kernel(query: Tensor, mask: Tensor | None, groups: bool) -> str:
    """Name the kernel that CUDA would take: flash needs 16 bits and no mask, mem-efficient a key for every head."""
    if query.dtype in (torch.bfloat16, torch.float16) and mask is None:
        return "flash"
    return "math" if groups or query.dtype == torch.float64 else "memory-efficient"


class _Attention(torch.autograd.Function):
    """Attention as one kernel, and another for its gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.options = options
        given: list[Any] = [query, key, value] if mask is None else [query, key, value, mask]
        attend = _host_attention(options)
        out: Tensor = current().launch("attention", attend, (query, key, value, mask), {}, given)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask = ctx.saved_tensors
        attend = _host_attention(ctx.options)

        def back(gradient: Tensor, *inputs: Tensor) -> Any:
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
                return list(torch.autograd.grad(attend(*leaves, *inputs[3:]), leaves, gradient))

        args = (gradients[0], query, key, value, *([] if mask is None else [mask]))
        given: list[Any] = [tensor for tensor in args if isinstance(tensor, DeviceTensor)]
        gradient_list = current().launch("attention backward", back, args, {}, given)
        return *gradient_list, None, None


def _host_attention(options: dict[str, Any]) -> Callable[..., Tensor]:
    plain = torch._C._nn.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch._C.DisableTorchFunction():
            out: Tensor = plain(query, key, value, attn_mask=mask, **options)
        return out

    return attend


def _rms_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], DeviceTensor) or torch.is_grad_enabled():
        return NotImplemented
    given: list[Any] = [tensor for tensor in args if isinstance(tensor, DeviceTensor)]
    return current().launch("rms_norm", torch.rms_norm, args, kwargs, given)


def _new_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], DeviceTensor):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        made = torch.tensor(args[1], dtype=kwargs.get("dtype") or args[0].dtype)
    return made.to(DEVICE)


def _tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not _names_device(kwargs.get("device")):
        return NotImplemented
    del kwargs["device"]
    made = func(*args, **kwargs)
    return made if isinstance(made, DeviceTensor) else made.to(DEVICE)


def _to(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Leave out a device that the tensor is on already, which C++ would not see."""
    if not isinstance(args[0], DeviceTensor):
        return NotImplemented
    rest = list(args[1:])
    if rest and _names_device(rest[0]):
        rest = rest[1:]
    elif _names_device(kwargs.get("device")):
        del kwargs["device"]
    else:
        return NotImplemented
    if not [x for x in rest if x is not None] and not kwargs.get("copy") and kwargs.get("dtype") is None:
        return args[0]
    kwargs.pop("non_blocking", None)
    if not rest or rest[0] is None:
        rest = [kwargs.pop("dtype")] if kwargs.get("dtype") is not None else [args[0].dtype]
    return func(args[0], rest[0], copy=bool(kwargs.get("copy")))


def _cuda(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] if isinstance(args[0], DeviceTensor) else args[0].to(DEVICE, **kwargs)


def _tolist(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0].cpu().tolist() if isinstance(args[0], DeviceTensor) else NotImplemented


def _pin_memory(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] if current().is_pinned(args[0]) else current().pin(args[0].clone())


def _is_pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return not isinstance(args[0], DeviceTensor) and current().is_pinned(args[0])


def _make(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not kwargs.get("pin_memory"):
        return NotImplemented
    return current().pin(func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"}))


_SPECIAL: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "scaled_dot_product_attention": _scaled_dot_product_attention,
    "rms_norm": _rms_norm,
    "new_tensor": _new_tensor,
    **dict.fromkeys(("tensor", "as_tensor", "asarray"), _tensor),
    "to": _to,
    "cuda": _cuda,
    "tolist": _tolist,
    "pin_memory": _pin_memory,
    "is_pinned": _is_pinned,
    **dict.fromkeys(("empty", "zeros", "full", "empty_like"), _make),
}


class _Properties:
    name, major, minor, total_memory, multi_processor_count, gcnArchName = "pretend", 9, 0, 139 << 30, 132, ""


def _torch_cuda(machine: PretendDevice) -> dict[str, Any]:
    """Return what torch.cuda's functions are inside the context."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: machine.host_waits("synchronize()", machine.stream().clock()),
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (139 << 30, 139 << 30),
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: "pretend",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: _Properties(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "is_current_stream_capturing": lambda: machine._recording is not None,
        "graph_pool_handle": lambda: (0, 0),
        "CUDAGraph": Graph,
        "graph": capture,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: machine.stream(),
        "default_stream": lambda device=None: machine.default,
        "stream": in_stream,
    }

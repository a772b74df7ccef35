"""Mistakes that only a GPU would show, planted one at a time: the pretend one notices each."""

from __future__ import annotations

import copy
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation
from pretend import PretendDevice
from tiny_models import completions_of, prompts_of, tiny
from torch import Tensor

from rlhf import batching
from rlhf.config.sections import OptimizerConfig, SamplingConfig
from rlhf.models.kernels import packing
from rlhf.models.logprobs import completion_outputs
from rlhf.runtime import device as device_module
from rlhf.runtime import optimizers
from rlhf.runtime.device import SideStream
from rlhf.runtime.optimizers import make_optimizer, optimizer_state
from rlhf.sampling.fast import decoder, recorded
from rlhf.sampling.fast.engine import FastSampler

ROWS = [[1, 5, 7], [1, 4], [8]]
BATCH = completions_of([[1, 5, 7], [1, 4], [8]], [[4, 5], [6, 2], [7, 8, 9]])

Scene = Callable[[str], list[Tensor]]


def sampling(device: str) -> list[Tensor]:
    """Two rollouts, with other weights in the second."""
    model = copy.deepcopy(tiny("llama", dtype=torch.float32)).to(device)
    sampler = FastSampler(
        model,
        SamplingConfig(max_new_tokens=14, batch_size=3),
        eos_ids=(2,),
        pad_id=0,
        dtype="float32",
        device=torch.device(device),
    )
    drawn = [sampler.sample(prompts_of(ROWS), key=7, group_size=2)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.2)
    drawn.append(sampler.sample(prompts_of(ROWS), key=7, group_size=2))
    assert device == "cpu" or sampler.uses == "recorded"
    return [tensor for rows in drawn for tensor in (rows.completion_ids, rows.sampler_logprobs)]


def training(device: str) -> list[Tensor]:
    """Log-probabilities and a gradient."""
    model = copy.deepcopy(tiny("llama", dtype=torch.float32)).to(device)
    batch = BATCH.to(device)
    fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
    logprobs = completion_outputs(model, *fields, temperature=1.0).logprobs
    logprobs.sum().backward()
    return [logprobs.detach().cpu(), model.lm_head.weight.grad.cpu()]


def resuming(device: str) -> list[Tensor]:
    """A step of Adam from a saved state."""
    weight = torch.nn.Parameter(torch.ones(4, device=device))
    config = OptimizerConfig(lr=0.1)
    optimizer = make_optimizer([weight], config)
    weight.grad = torch.arange(4.0).to(device)
    optimizer.step()
    again = make_optimizer([weight], config)
    state = optimizer_state(optimizer, {"w": weight}, "adamw")
    optimizers.load_optimizer_state(again, {"w": weight}, state, "adamw")
    again.step()
    return [weight.detach().cpu()]


def resuming_sharded(device: str) -> list[Tensor]:
    """A step of Adam over many weights in one flat tensor, from a count of steps: a run continued under ZeRO."""
    flat = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = make_optimizer([flat], OptimizerConfig(lr=0.1))
    optimizer.state[flat] |= optimizers.adam_state(flat.detach(), 3)
    flat.grad = torch.arange(4.0).to(device)
    optimizer.step()
    return [flat.detach().cpu()]


def overlapping(device: str) -> list[Tensor]:
    """Work on a stream beside the default one."""
    numbers = torch.arange(5.0).to(device) * 2
    return [SideStream(torch.device(device)).beside(lambda: (numbers + 1).cpu())()]


SCENES: dict[str, Scene] = {
    "sampling": sampling,
    "training": training,
    "resuming": resuming,
    "resuming, sharded": resuming_sharded,
    "overlapping": overlapping,
}

Sampler, Slots, Rollout = recorded.RecordedSampler, recorded.RowSlots, recorded.RecordedGeneration
MISTAKES: dict[str, tuple[str, Any, str, str, str]] = {
    "a column is a Python number": ("sampling", Slots, "attend", "self.column[:rows]\n", "int(self.column[0])\n"),
    "tokens are rebound": ("sampling", Sampler, "_step", "token.copy_(drawn_token)", "self.token = drawn_token"),
    "the column stays": ("sampling", Sampler, "_step", "self.slots.advance()", "pass"),
    "the column is rebound": (
        "sampling",
        Slots,
        "advance",
        "self.column[: self.live].add_(1).clamp_(max=self.columns - 1)",
        "self.column = (self.column + 1).clamp(max=self.columns - 1)",
    ),
    "the bias is rebound": (
        "sampling",
        Slots,
        "begin_step",
        "self.bias[: self.live].scatter_(1,",
        "self.bias = self.bias[: self.live].scatter(1,",
    ),
    "positions on the host in a draw": (
        "sampling",
        Sampler,
        "_step",
        ".gather(1, drawn[:, None])",
        ".gather(1, drawn[:, None].cpu())",
    ),
    "the ends of rows on the host": (
        "sampling",
        Sampler,
        "__init__",
        "to_device([torch.tensor(ends, dtype=torch.long)], device)[0]",
        "torch.tensor(ends)",
    ),
    "a draw from a CPU generator": (
        "sampling",
        Sampler,
        "_step",
        "token.copy_(drawn_token)",
        "token.copy_(drawn_token); torch.rand(2, device=token.device, generator=torch.Generator())",
    ),
    "weights of the rollout before": (
        "sampling",
        decoder.FusedDecoder,
        "refresh",
        "_copy_weights(self._convert(layer), mine)",
        "pass",
    ),
    "results read before they arrive": (
        "sampling",
        Rollout,
        "generate",
        "torch.cuda.current_stream().synchronize()",
        "pass",
    ),
    "a look before it arrives": ("sampling", Rollout, "_finished", "look.arrived.synchronize()", "pass"),
    "a pinned buffer used again": (
        "training",
        batching,
        "to_device",
        "moved = buffer.to(device, non_blocking=True)",
        "moved = buffer.to(device, non_blocking=True); buffer.fill_(7)",
    ),
    "a layout on the host": ("training", packing, "_to", 'device.type == "cpu"', "True"),
    "one tensor of a layout on the host": (
        "training",
        packing,
        "_to",
        "layout: PackedBatch = move(rows)",
        "layout: PackedBatch = replace(move(rows), predictor_index=rows.predictor_index)",
    ),
    "Adam's step on the host": (
        "resuming",
        optimizers,
        "load_optimizer_state",
        'parameter.device if kind == "adamw" else "cpu"',
        '"cpu"',
    ),
    "Adam's step on the host, sharded": (
        "resuming, sharded",
        optimizers,
        "adam_state",
        "device=flat.device",
        'device="cpu"',
    ),
    "a stream that does not wait": ("overlapping", SideStream, "beside", "stream.wait_event(before)", "pass"),
}


@contextmanager
def planted(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """Replace a piece of a function's source within this context."""
    plain = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(plain))
    assert source.count(old) == 1, f"{name}: {old!r} is there {source.count(old)} times"
    module = inspect.getmodule(plain)
    assert module is not None
    space: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(old, new), "planted", "exec")
    exec(code, module.__dict__, space)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, space[name])
        yield


def verdict(scene: Scene, expected: list[Tensor], machine: PretendDevice) -> str:
    """Run a scene on the device; report its problems, or nothing."""
    try:
        actual = scene("cuda")
    except (RuntimeError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    torch.cuda.synchronize()
    if machine.problems:
        return machine.problems[0]
    same = [a.shape == b.shape and torch.allclose(a, b, atol=1e-4) for a, b in zip(actual, expected, strict=True)]
    return "" if all(same) else "other numbers than the CPU's"


@cache
def on_the_cpu(scene: str) -> list[Tensor]:
    """Make a scene's numbers, without a mistake and, since that takes longer, before the pretend device is there."""
    return SCENES[scene]("cpu")


@pytest.mark.parametrize("name", SCENES)
def test_nothing_is_wrong_with_a_scene_as_it_is(name: str) -> None:
    expected = on_the_cpu(name)
    with PretendDevice() as machine:
        assert verdict(SCENES[name], expected, machine) == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(mistake: str) -> None:
    scene, owner, name, old, new = MISTAKES[mistake]
    expected = on_the_cpu(scene)
    with PretendDevice() as machine, planted(owner, name, old, new):
        assert verdict(SCENES[scene], expected, machine)


def test_another_thread_may_launch_only_beside_a_thread_local_capture(pretend: PretendDevice) -> None:
    numbers = torch.ones(3, device="cuda")
    for mode, is_allowed in (("thread_local", True), ("global", False)):
        pretend.problems.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            doubled = numbers * 2
            _in_thread(lambda: numbers + 1)
        assert (pretend.problems == []) == is_allowed
        graph.replay()
        assert doubled.tolist() == [2.0, 2.0, 2.0]


def test_annotations_take_both_kinds_of_graphs_wherever_they_are_read() -> None:
    """A process with a real GPU reads them in the first run on it, one without in the first pretend run."""

    torchs = Mock(spec=torch.cuda.CUDAGraph)
    read_outside = _checked()
    with PretendDevice():
        pretend, read_inside = torch.cuda.CUDAGraph(), _checked()
    for checked in (read_outside, read_inside):
        assert checked(torchs) is torchs
        assert checked(pretend) is pretend
        with pytest.raises(BeartypeCallHintParamViolation):
            checked("no graph")


def _checked() -> Callable[[Any], Any]:
    @beartype
    def handed_on(graph: torch.cuda.CUDAGraph) -> torch.cuda.CUDAGraph:
        return graph

    return handed_on


def _in_thread(work: Callable[[], object]) -> None:
    def run() -> None:
        with suppress(RuntimeError):  # it is in `problems`
            work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_probes_let_device_errors_pass(pretend: PretendDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(packing, "build_probe", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        packing.packing_unsupported_reason(tiny("llama").model)
    assert device_module.is_device_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert device_module.is_device_error(RuntimeError("Expected all tensors to be on the same device, but actual two"))
    assert not device_module.is_device_error(RuntimeError("shape '[2]' is invalid for input of size 3"))

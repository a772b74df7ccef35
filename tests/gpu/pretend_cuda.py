"""The functions of torch.cuda while the pretend device is there."""

from __future__ import annotations

from typing import Any

import torch
from pretend_streams import Event, Graph, Stream, capture, in_stream


class _Properties:
    name, major, minor, total_memory, multi_processor_count, gcnArchName = "pretend", 9, 0, 139 << 30, 132, ""


def torch_cuda(machine: Any) -> dict[str, Any]:
    """Return the functions of torch.cuda inside the context."""
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

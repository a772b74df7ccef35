"""rlhf serve-policy: our sampler in a process of its own, behind vLLM's routes, for sampling.backend=server."""

from __future__ import annotations

import ipaddress
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text

from rlhf.config.run import Dtype
from rlhf.errors import ConfigError
from rlhf.models.backbone import load_causal_lm, move_to
from rlhf.models.folders import model_folder
from rlhf.runtime.device import choose_device, set_products, usable_dtype
from rlhf.sampling.service import PolicyService, Weights, make_policy_server
from rlhf.serving.listening import ListenOptions


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(ListenOptions):
    """Address, authentication and arithmetic of the server."""

    port: int = 8001
    dtype: Dtype = "float32"
    weights: Weights = "exact"
    device: str = "auto"
    threads: int | None = None
    tf32: bool = True


def serve_policy(path: str, options: PolicyOptions, environment: Mapping[str, str], console: Console) -> None:
    """Serve the policy in `path` (a run or a model folder), and the weights pushed to it, until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: an option is invalid, or the address cannot be used.
        ModelError: `path` holds no causal language model.
    """
    token = options.read_token(environment)
    if options.threads is not None:
        if options.threads < 1:
            raise ConfigError("--threads must be at least 1")
        torch.set_num_threads(options.threads)
    device = choose_device(options.device, key="--device")
    set_products(device, tf32=options.tf32)
    dtype = usable_dtype(options.dtype, device)
    model = move_to(load_causal_lm(model_folder(path), dtype=dtype), device)
    service = PolicyService(model, dtype=dtype, device=device, weights=options.weights)
    try:
        server = make_policy_server(service.answer, options.host, options.port, token=token)
    except OSError as error:
        raise ConfigError(f"cannot listen on {options.host} port {options.port}: {error}") from error
    host, port = server.server_address[:2]
    address = f"http://{host!s}:{port}"
    console.print(
        Text(f"sampling from {path} in {dtype} at {address} (sampling.server.urls=[{address}]); Ctrl-C stops"),
        soft_wrap=True,
    )
    if token is None and not ipaddress.ip_address(str(host)).is_loopback:
        console.print(Text("warning: anybody who reaches this address may use it: set --token-env", style="yellow"))
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    console.print("stopped")

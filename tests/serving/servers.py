"""Sampling servers in threads of the tests, and their planted faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from rlhf.models.backbone import load_causal_lm
from rlhf.sampling.service import PolicyService, make_policy_server

CPU = torch.device("cpu")


def service_of(model: Path, kind: type[PolicyService] = PolicyService, **options: Any) -> PolicyService:
    return kind(load_causal_lm(str(model)), dtype="float32", device=CPU, **options)


def listening(service: Any, port: int = 0, token: str | None = None) -> AbstractContextManager[str]:
    """The address of a server that answers for `service` inside the body."""
    return serving(make_policy_server(service.answer, "127.0.0.1", port, token=token))


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """The address of a server that answers inside the body; its requests end with it, so that none outlives Python."""
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def served(*urls: str, **server: Any) -> dict[str, Any]:
    """The section `sampling` of a run that samples on these servers."""
    return {"backend": "server", "server": {"urls": list(urls), **server}}

"""rlhf serve-reward: a trained reward model behind an HTTP address. Only this needs the extra `serve`."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import uvicorn
from rich.console import Console
from rich.text import Text

from reward_model.server import TextScorer, make_app
from rlhf.config.load import load_chat_format
from rlhf.config.run import RunConfig
from rlhf.data.paths import resolve_best
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ConfigError, ModelError
from rlhf.factory.exported import rounded_models
from rlhf.models.folders import member_folders, scoring_folder
from rlhf.models.scalar_head import EnsembleHeadModel, load_reward_heads
from rlhf.runtime.engine import make_engine
from rlhf.serving.listening import ListenOptions

GRACE_S = 30  # requests in progress may take this long to finish when the server is stopped


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(ListenOptions):
    """Address, authentication and limits of the server."""

    port: int = 8000
    max_request_bytes: int = 16 * 2**20
    max_batch: int = 64


def serve_reward(path: str, options: ServiceOptions, environment: Mapping[str, str], console: Console) -> None:
    """Serve the reward model in `path` (a run of rlhf reward or a model folder) over HTTP until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: an option is invalid, or the address cannot be used.
        ModelError: `path` holds no reward model.
    """
    token = options.read_token(environment)
    for name in ("max_request_bytes", "max_batch"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    for text in rounded_models(path):
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)
    if members := member_folders(path):
        raise ModelError(f"{path} is an ensemble of separate reward models: serve one of them, {members[0]}")
    folder = scoring_folder(path)
    tokenizer = load_tokenizer(folder)
    model = load_reward_heads(folder, tokenizer).to(make_engine(RunConfig()).device)
    if isinstance(model, EnsembleHeadModel):
        console.print("an ensemble on one backbone: the served score is the mean of its members")
    chat = load_chat_format(resolve_best(path))
    scorer = TextScorer(model, tokenizer, max_batch=options.max_batch, chat=chat)
    app = make_app(scorer, name=path, max_request_bytes=options.max_request_bytes, token=token)
    with _listen(options) as listener:
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        console.print(Text(f"serving {path} at {address}/score (health: {address}/health); Ctrl-C stops"))
        if token is None and not _is_loopback(host):
            console.print(Text("warning: anybody who reaches this address may use it: set --token-env", style="yellow"))
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S)
        )
        _ignore_signals()
        server.run(sockets=[listener])
    console.print("stopped")


def _listen(options: ServiceOptions) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {options.host} port {options.port}: {error}") from error


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.split("%")[0]).is_loopback


def _ignore_signals() -> None:
    """Replace the handlers of SIGINT and SIGTERM by ones that do nothing.

    uvicorn stops at the first signal and then raises it again for the previous handler; by then the work is done.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

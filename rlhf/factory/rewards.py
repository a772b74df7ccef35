"""Build reward sources from their configuration, and the server of a trained reward model."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import uvicorn
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from reward_model.server import make_app
from reward_model.source import RewardModelSource
from reward_model.text_scorer import TextScorer
from rlhf.config.reward import ChatSource, EnsembleSource, FunctionSource, ModelSource, RemoteSource, RewardSourceConfig
from rlhf.config.sections import RunConfig
from rlhf.data.tokenizer import load_tokenizer, vocabulary_digest
from rlhf.errors import ConfigError
from rlhf.factory.context import model_folder
from rlhf.models.scalar_head import load_scalar_head
from rlhf.rewards.ensemble import EnsembleReward, MainRankReward, ShardedReward
from rlhf.rewards.function import FunctionReward
from rlhf.rewards.judge import ChatModel, ChatReward
from rlhf.rewards.remote import RemoteReward
from rlhf.rewards.source import RewardSource
from rlhf.runtime.engine import Engine, make_engine


def build_source(
    config: RewardSourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    warn: Callable[[str], None] = lambda _: None,
) -> RewardSource:
    """Build the reward source that `config` describes.

    Args:
        config: the source.
        tokenizer: the policy's tokenizer, in whose ids the completions are.
        engine: places reward models on devices, and has the process group over which scoring is spread.
        warn: receives a message if a reward model has another vocabulary than the policy.

    Raises:
        RewardError: a function cannot be imported, or an address is invalid.
        ConfigError: a template lacks its fields, or a key or token is not in the environment.
        ModelError: a reward model cannot be loaded.
    """
    match config:
        case FunctionSource():
            function = FunctionReward(config.target, config.kwargs, tokenizer, timeout_s=config.timeout_s)
            return MainRankReward(function, engine.ranks)
        case ModelSource():
            source = RewardModelSource.load(
                model_folder(config.path), tokenizer, device=engine.device, micro_batch_size=config.micro_batch_size
            )
            source.model = engine.freeze("reward", source.model)
            if source.note:
                warn(source.note)
            return ShardedReward(source, engine.ranks)
        case RemoteSource():
            return MainRankReward(_build_remote(config, tokenizer), engine.ranks)
        case ChatSource():
            chat = ChatModel(config, os.environ, section="source")
            return MainRankReward(ChatReward(config, tokenizer, chat, section="source"), engine.ranks)
        case EnsembleSource():
            members = [build_source(member, tokenizer, engine, warn) for member in config.sources]
            return EnsembleReward(members, how=config.how, std_coef=config.std_coef)


def _build_remote(config: RemoteSource, tokenizer: PreTrainedTokenizerBase) -> RemoteReward:
    name = config.token_env
    if name is not None and not os.environ.get(name):
        raise ConfigError(f"reward.source.token_env: the environment variable {name} is not set: put the token in it")
    return RemoteReward(
        config.url,
        tokenizer,
        timeout_s=config.timeout_s,
        retries=config.retries,
        secret=os.environ[name] if name is not None else None,
        vocabulary=vocabulary_digest(tokenizer) if config.send_tokens else None,
    )


GRACE_S = 30  # requests in progress may take this long to finish when the server is stopped


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Address, authentication and limits of the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    token_env: str | None = None
    max_request_bytes: int = 16 * 2**20
    max_batch: int = 64


def serve_reward(path: str, options: ServiceOptions, environment: Mapping[str, str], console: Console) -> None:
    """Serve the reward model in `path` (a run of rlhf rm or a model folder) over HTTP until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: an option is invalid, or the address cannot be used.
        ModelError: `path` holds no reward model.
    """
    if not 0 <= options.port < 2**16:
        raise ConfigError("--port must be between 0 and 65535")
    token = _read_token(options.token_env, environment)
    for name in ("max_request_bytes", "max_batch"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    folder = model_folder(path)
    tokenizer = load_tokenizer(folder)
    model = load_scalar_head(folder, tokenizer, new_head=None).to(make_engine(RunConfig()).device)
    scorer = TextScorer(model, tokenizer, max_batch=options.max_batch)
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


def _read_token(name: str | None, environment: Mapping[str, str]) -> str | None:
    if name is None:
        return None
    token = environment.get(name, "")
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"--token-env: put a token (printable ASCII) into the environment variable {name}")
    return token


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

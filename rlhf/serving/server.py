"""The family of sampling servers: settings, and the trainer's requests to a server of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field, model_validator

from rlhf.errors import ConfigError
from rlhf.section import Choice, Positive, Section
from rlhf.serving.http import JsonHttp
from rlhf.serving.routes import Answer, Ask


@dataclass(frozen=True, kw_only=True)
class Push:
    """Weights to load."""

    path: str  # the folder, as the server sees it
    version: str
    base: str | None  # the version that the folder's tensors change; None: the folder has all tensors
    is_adapter: bool
    send: Callable[[], None] | None = None  # sends the weights past the folder, while the server is paused


@runtime_checkable
class Link(Protocol):
    """A way from the trainer's GPU to one server, for weights that go past the folder."""

    def connect(self, tensors: Mapping[str, Any], version: str | None) -> None:
        """Make ready to send the tensors to a server that has this version."""

    def send(self, version: str) -> None:
        """Send them as this version."""

    def close(self) -> None:
        """Release all that is held."""


class CanaryConfig(Section):
    """The check after every push: the trainer computes some tokens of the server again."""

    prompts: Annotated[int, Field(ge=0)] = 4
    """Prompts that are completed and recomputed after every push; 0: no check."""
    tokens: Annotated[int, Field(ge=1)] = 8
    """Tokens of each of these completions."""
    bound: Positive | None = None
    """Largest difference of a token's log-probability, in nats; beyond it the run stops. null: 1e-3, in bfloat16
    0.1, or twice the change by the trainer's own rounding on the same tokens."""

    def bound_for(self, dtype: str) -> float:
        """Return the bound for weights and arithmetic of this dtype."""
        return self.bound if self.bound is not None else (0.1 if dtype == "bfloat16" else 1e-3)


class LaunchConfig(Section):
    """Servers that the run starts on this machine, and stops when it ends."""

    count: Annotated[int, Field(ge=1)] = 1
    """Servers to start."""
    port: Annotated[int, Field(ge=1, lt=2**16)] = 8001
    """Port of the first server on 127.0.0.1; the others have the ports after it."""
    program: str | None = None
    """The program to start; null: vllm (type=vllm), or this Python (type=rlhf)."""
    arguments: list[str] = []
    """Further arguments of the program, such as [--gpu-memory-utilization, '0.4']."""
    environment: dict[str, str] = {}
    """Further environment variables, such as {CUDA_VISIBLE_DEVICES: '1'}."""
    start_s: Positive = 600.0
    """Seconds to wait for the first answer of a server that was started."""

    @property
    def urls(self) -> list[str]:
        """Return the addresses of the servers."""
        return [f"http://127.0.0.1:{self.port + number}" for number in range(self.count)]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The model and the arithmetic of a server to start."""

    model: str  # the policy's: a folder with weights, or a hub id
    port: int
    dtype: str
    device: str  # as run.device
    threads: int  # of the trainer's arithmetic on a CPU
    tf32: bool = True  # as run.tf32
    lora_rank: int | None = None  # of the adapter that is trained; None: whole weights are


class Server(Choice):
    """Servers that sample the completions, with weights that the trainer pushes as files.

    A server of another kind is a subclass in a file that `plugins` lists.
    """

    takes_changes: ClassVar[bool] = False
    """Whether a push may hold only the tensors that have changed."""
    returns_support: ClassVar[bool] = False
    """Whether answers say which tokens could be drawn, if sampling leaves some out."""

    type: str
    urls: list[str] = []
    """Addresses, such as http://127.0.0.1:8001. The prompts of a step are dealt to all of them. Leave it out with
    launch."""
    launch: LaunchConfig | None = None
    """Start the servers with the run, and stop them with it; null: they are started by somebody else."""
    weights_dir: str | None = None
    """Folder for pushed weights, which every server can read; each run has a folder of its own in it. null: the folder
    `weights` in the run's folder."""
    weights_dir_on_server: str | None = None
    """The same folder as the servers see it; null: the same path."""
    timeout_s: Positive = 600.0
    """Seconds that a request may go without data. A server that exceeds them counts as dead, and another one answers
    the request."""
    wait_s: Positive = 300.0
    """Seconds to wait while no server answers; then the run is saved and stops."""
    token_env: str | None = None
    """Environment variable with the token for Authorization: Bearer; null: no token is sent."""
    canary: CanaryConfig = CanaryConfig()
    """The check after every push."""

    @model_validator(mode="after")
    def _find_urls(self) -> Server:
        """Fill in the addresses of servers that are started: in place, since every section is frozen."""
        if self.launch is None:
            if not self.urls:
                raise ValueError(
                    "sampling.server has no address: set urls=[http://127.0.0.1:8001], or launch={} to start a server"
                )
            return self
        if self.urls and self.urls != self.launch.urls:
            raise ValueError(
                f"sampling.server.launch starts servers at {', '.join(self.launch.urls)}: leave sampling.server.urls "
                "out"
            )
        self.__dict__["urls"] = self.launch.urls
        return self

    def command(self, launch: Launch) -> list[str]:
        """Return the command that starts a server, without launch.arguments.

        Raises:
            ConfigError: a server of this kind cannot be started.
        """
        del launch
        raise ConfigError(f"sampling.server.launch: a server of type {self.type} cannot be started; set urls")

    def launch_environment(self, launch: Launch) -> Mapping[str, str]:
        """Return environment variables that the command needs."""
        del launch
        return {}

    def location(self, folder: Path, root: Path) -> str:
        """Return a folder below `root` as the servers see it."""
        if self.weights_dir_on_server is None:
            return str(folder)
        return f"{self.weights_dir_on_server.rstrip('/')}/{folder.relative_to(root).as_posix()}"

    def check_trainer(self, device: str, *, trains_adapter: bool) -> None:
        """Check that this process, which trains on a device of this type, can push.

        Raises:
            ConfigError: it cannot.
        """
        del device, trains_adapter

    def link(self, http: JsonHttp) -> Link | None:
        """Return the sender of weights to a server; None: it loads them from a folder."""
        del http
        return None

    def generate(self, http: JsonHttp, ask: Ask) -> Answer:
        """Complete prompts."""
        raise NotImplementedError

    def score(self, http: JsonHttp, ids: list[int], *, adapted: bool) -> list[float]:
        """Return the log-probability of each token after the first, at temperature 1; of the adapted model if asked."""
        raise NotImplementedError

    def version(self, http: JsonHttp) -> str | None:
        """Return the version of the server's weights; None if the server does not report it.

        Raises:
            ServerDown: the server does not answer.
        """
        raise NotImplementedError

    def push(self, http: JsonHttp, push: Push) -> None:
        """Make the server load weights, and forget all results of earlier weights."""
        raise NotImplementedError

    def digests(self, http: JsonHttp) -> Mapping[str, str] | None:
        """Return the digest of each tensor that the server holds; None if it does not report them."""
        del http
        return None

    def describe_arithmetic(self, http: JsonHttp) -> str | None:
        """Return the precision of the server's arithmetic; None if it does not report it."""
        del http
        return None

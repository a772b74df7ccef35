"""vLLM's own transfer of weights: the trainer's GPU sends them to vLLM's GPUs by NCCL, and no file is written.

Written from the sources of vLLM 0.32, and never run on a GPU. The only module that imports vLLM.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Thread
from typing import Any, TypeVar

from rlhf.address import parse_address
from rlhf.errors import ConfigError, SamplingError
from rlhf.serving.http import JsonHttp, ServerDown, ServerRefused

T = TypeVar("T")
SHORT_S = 60.0


def trainer_side() -> tuple[Any, Any, Any]:
    """Return vLLM's parts for a trainer: the factory of engines, the source of tensors, and the group's settings.

    Raises:
        ConfigError: vLLM is not installed here, is older than 0.32, or does not load.
    """
    try:
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            "sampling.server.transfer=nccl needs vLLM 0.32 or later in the trainer's environment too, and it cannot be "
            f"imported there ({error}): pip install vllm, or set sampling.server.transfer=folder"
        ) from error
    return WeightTransferTrainerFactory, ModuleSource, NCCLTrainerInitInfo


class NcclLink:
    """Send weights through one NCCL group: the GPU of the trainer and the GPUs of one vLLM server.

    vLLM's engine for trainers calls this object as its client, which asks the server to take part, and reads the
    tensors from it as from a module.
    """

    def __init__(self, http: JsonHttp) -> None:
        """Take the server; nothing is sent."""
        self.http = http
        self._tensors: Mapping[str, Any] = {}
        self._engine: Any = None
        self._version: str | None = None  # that this group sent last
        self._refused: Future[Any] = Future()

    def connect(self, tensors: Mapping[str, Any], version: str | None) -> None:
        """Open a group, unless the server has the weights that this one sent last, and so is in it.

        Args:
            tensors: the tensors to send.
            version: the one that the server reports.

        Raises:
            SamplingError: no group came about; the server keeps its weights.
        """
        self._tensors = tensors
        if self._engine is not None and version == self._version:
            return
        self.close()
        self._engine = self._watched(
            self._open,
            "cannot be sent weights by NCCL",
            "Start vLLM 0.32 or later again on GPUs that the trainer does not use, with VLLM_SERVER_DEV_MODE=1 and "
            """--weight-transfer-config '{"backend": "nccl"}', or set sampling.server.transfer=folder""",
        )

    def send(self, version: str) -> None:
        """Send the tensors that `connect` was given.

        Raises:
            SamplingError: the server may have a part of them; it stays paused.
        """
        self._version = version
        self._watched(
            self._engine.send_weights,
            f"did not get all weights of version {version} by NCCL",
            "It may hold a mixture of old and new weights, so it stays paused, and nothing is sampled from it: start "
            "it again; if this repeats, set sampling.server.transfer=folder",
        )

    def close(self) -> None:
        """Leave the group, also in the middle of a transfer."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _open(self) -> Any:
        """Open a group with the server's workers, and return vLLM's engine that sends to them."""
        factory, source, group = trainer_side()
        workers = int(self.http.get("/get_world_size", timeout_s=SHORT_S)["world_size"])
        self.http.tell("/shutdown_weight_transfer_engine", timeout_s=SHORT_S)  # an earlier run's group
        host, port = _meeting_point(self.http)
        info = group(rank=0, master_address=host, master_port=port, world_size=workers + 1)
        return factory.trainer_init(info, client=self, source=source(self))

    def _watched(self, work: Callable[[], T], failure: str, cure: str) -> T:
        """Run a call that waits in NCCL for the server, if need be for ever, until a request to it has failed."""
        import torch

        device = next(iter(self._tensors.values())).device
        result: Future[T] = Future()
        self._refused = Future()

        def run() -> None:
            try:
                torch.cuda.set_device(device)  # each thread has a GPU of its own, at first number 0
                torch.cuda.synchronize(device)  # vLLM reads the tensors on streams of its own
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)

        Thread(target=run, daemon=True).start()
        done = wait([self._refused, result], return_when=FIRST_COMPLETED).done
        for error in filter(None, (future.exception() for future in done)):
            self.close()
            reason = str(error) or type(error).__name__
            raise SamplingError(
                f"the sampling server {self.http.url} {failure}: {reason}; its log says why. {cure}"
            ) from error
        return result.result()

    def _tell(self, route: str, body: Mapping[str, Any] | None = None) -> None:
        try:
            self.http.tell(route, body)
        except (ServerDown, ServerRefused) as error:
            self._refused.set_exception(error)
            raise

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """List the tensors, as vLLM asks a module for them."""
        return iter(self._tensors.items())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Ask the server's workers into the group."""
        self._tell("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Ask the server to get ready."""
        self._tell("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Ask the server to receive tensors of these names, dtypes and shapes."""
        self._tell("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the server that it has all tensors; it gets their version when it samples again."""
        del weight_version
        self._tell("/finish_weight_update")


def _meeting_point(http: JsonHttp) -> tuple[str, int]:
    """Return this machine's address as a server reaches it, and a free port."""
    parts = parse_address(http.url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((parts.hostname, parts.port or 80))  # a datagram socket sends nothing by that
        host = str(route.getsockname()[0])
    with socket.socket() as trial:
        trial.bind((host, 0))
        return host, int(trial.getsockname()[1])

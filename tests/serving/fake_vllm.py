"""A stand-in for the program `vllm`: `fake_vllm.py serve MODEL --port N ...` answers vLLM's routes by our service.

Environment: FAKE_VLLM_PIDS, a file that gets a line with the process id of each start; FAKE_VLLM_DIES, a file with the
number of completions after which the process kills itself, once.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf.models.backbone import load_causal_lm
from rlhf.sampling.service import PolicyService, make_policy_server


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--served-model-name", choices=["policy"], required=True)
    parser.add_argument("--host", choices=["127.0.0.1"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--logprobs-mode", choices=["processed_logprobs"], required=True)
    parser.add_argument("--enforce-eager", action="store_true", required=True)
    return parser.parse_args()


class Service(PolicyService):
    """Dies in the middle of a completion if it is told to."""

    dies = Path(os.environ.get("FAKE_VLLM_DIES", "none"))
    counting = threading.Lock()

    def answer(self, method: str, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if route == "/v1/completions":
            assert body["model"] == "policy"
            assert "rlhf" not in body
            with self.counting:
                if self.dies.is_file():
                    left = int(self.dies.read_text()) - 1
                    self.dies.write_text(str(left))
                    if left == 0:
                        self.dies.unlink()
                        os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(method, route, body)


def main() -> None:
    options = parsed()
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    torch.set_num_threads(1)
    service = Service(load_causal_lm(options.model), dtype=options.dtype, device=torch.device("cpu"))
    server = make_policy_server(service.answer, options.host, options.port)
    with Path(os.environ["FAKE_VLLM_PIDS"]).open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    server.serve_forever()


if __name__ == "__main__":
    main()

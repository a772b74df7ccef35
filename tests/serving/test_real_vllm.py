"""A real vLLM, started by the run: the same log-probabilities as the trainer's, pushes, and the canary's old head.

Set RLHF_VLLM to the program, such as /opt/vllm/bin/vllm, of an environment with a build of vLLM for CPUs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_model, online, ppo_tree, trained
from test_launched_servers import free_port
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.errors import SamplingError
from rlhf.serving.vllm import VllmServer
from rlhf.training.online import train

PROGRAM = os.environ.get("RLHF_VLLM", "")
EXTENSION = """
class Extension:
    def resync_head(self):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(self.model_runner.get_model().lm_head, remove_weight=False)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="RLHF_VLLM is not set: no vLLM to start"),
]


def tied_model(folder: Path) -> Path:
    """A tiny Llama with tied embeddings, and heads of a size that vLLM computes on a CPU."""
    make_model(folder)
    config = LlamaConfig.from_pretrained(
        folder,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tree_of(
    folder: Path, after_reload: list[str], policy: dict[str, Any] | None = None, **server_changes: Any
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "policy_extension.py").write_text(EXTENSION)
    server = {
        "type": "vllm",
        "after_reload": after_reload,
        "launch": {
            "program": PROGRAM,
            "port": free_port(),
            "arguments": ["--enforce-eager", "--worker-extension-cls", "policy_extension.Extension"],
            "environment": {"PYTHONPATH": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1"},
        },
        **server_changes,
    }
    return ppo_tree(
        folder,
        algorithm={"preset": "grpo"},
        batch={"prompts_per_step": 4},
        policy={"model": str(tied_model(folder / "model")), "lr": 1e-2, **(policy or {})},
        sampling={"backend": "server", "server": server, "completions_per_prompt": 2, "old_log_probs": "trainer"},
        schedule={"steps": 3},
    )


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]  # 0: the evaluation before the first
    return lines[1:]


def is_the_trainers(step: dict[str, Any]) -> bool:
    return bool(0 < step["kl/sampler_mismatch"] < 1e-4 and step["server/canary"] < 1e-4)


def test_log_probabilities_are_the_trainers_after_every_push(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, ["resync_head"]))
    for step in steps_of(tmp_path):
        assert is_the_trainers(step)
        assert step["server/pushed_mb"] > 0


def test_an_adapter_alone_is_pushed_and_sampled_from(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, [], policy={"lora": {"r": 8}}))
    whole = (tmp_path / "model" / "model.safetensors").stat().st_size / 1e6
    for step in steps_of(tmp_path):
        assert is_the_trainers(step)
        assert 0 < step["server/pushed_mb"] < whole / 2
    assert step["kl/reference"] > 1  # the base alone would not have the trainer's log-probabilities


def test_bfloat16_differs_by_its_rounding_alone(tmp_path: Path) -> None:
    trained(tree_of(tmp_path, ["resync_head"], policy={"dtype": "bfloat16"}))
    for step in steps_of(tmp_path):
        assert 0 < step["kl/sampler_mismatch"] < 0.05
        assert step["server/canary"] < 0.1


def processes_of(port: int) -> list[int]:
    """vLLM's server at a port and the processes that it has started."""
    told = str(port).encode()
    lines = {int(path.parent.name): path.read_bytes().split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")}
    server = [pid for pid, words in lines.items() if b"serve" in words and told in words]
    children = [int(child) for pid in server for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*server, *children]


def test_a_vllm_killed_in_mid_rollout_is_started_again_and_gets_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of(tmp_path, ["resync_head"])
    complete, asked, killed = VllmServer._complete, count(), []

    def completed(self: VllmServer, *args: Any) -> Any:
        if next(asked) == 20:  # of 8 a step, after the evaluation
            killed.extend(processes_of(tree["sampling"]["server"]["launch"]["port"]))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return complete(self, *args)

    monkeypatch.setattr(VllmServer, "_complete", completed)
    trained(tree)
    assert killed
    assert all(is_the_trainers(step) for step in steps_of(tmp_path))


def test_weights_go_by_vllms_own_transfer(tmp_path: Path) -> None:
    """All of it but NCCL, for which real_transfer.py has a stand-in."""
    model, here = tied_model(tmp_path / "model"), Path(__file__).parent
    (tmp_path / "policy_extension.py").write_text(EXTENSION)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{here.parents[1]}:{tmp_path}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [str(Path(PROGRAM).parent / "python"), str(here / "real_transfer.py"), str(model)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert [version for _, _, version in answer["pushes"]] == ["first.1", "first.2", "second.1"]
    for before, after, _ in answer["pushes"]:
        assert before > 0.05
        assert after < 1e-4
    assert "did not get all weights of version second.2 by NCCL: HTTP 500" in answer["error"]
    assert "/resume" not in answer["asked_in_vain"]


def test_the_canary_stops_the_run_at_an_old_head(tmp_path: Path) -> None:
    run = online(tree_of(tmp_path, []))
    with pytest.raises(SamplingError, match="old lm_head"):
        train(run)
    run.session.recorder.close()

"""Servers that the run starts itself: there when it samples, started again when they die, gone when it ends."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import largest_difference, make_model, online, ppo_tree, trained, weights

from rlhf.config.load import train_config
from rlhf.config.weights import LoraConfig
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ConfigError, SamplingError
from rlhf.factory.sampler import build_servers
from rlhf.models.backbone import add_lora, load_causal_lm, save_model
from rlhf.sampling.launched import LaunchedServer
from rlhf.serving.own import OwnServer
from rlhf.serving.server import Launch
from rlhf.serving.vllm import VllmServer
from rlhf.training.online import train

ROOT = Path(__file__).parents[2]
GRPO = {"algorithm": {"preset": "grpo"}, "batch": {"prompts_per_step": 4}}
PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def fake_vllm(folder: Path) -> Path:
    """A program on its own, like `vllm`."""
    program = folder / "vllm"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {Path(__file__).parent}/fake_vllm.py "$@"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def tree_of(folder: Path, model: Path, launch: dict[str, Any], kind: str = "vllm") -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    server = {"type": kind, "launch": {"port": free_port(), **launch}}
    sampling = {"backend": "server", "server": server, "completions_per_prompt": 2}
    return ppo_tree(folder, policy={"model": str(model)}, sampling=sampling, **GRPO)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1] if Path("/proc").is_dir() else True
    except (ProcessLookupError, FileNotFoundError):  # gone, or gone between the two questions
        return False


def ends(pid: int) -> bool:
    until = time.monotonic() + PATIENCE_S
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_alive(pid)


LISTENS = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(os.getpid()).encode())
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def pid_at(port: int) -> int:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            return int(urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=PATIENCE_S).read())
        except OSError:
            time.sleep(0.05)
    raise AssertionError("it does not answer")


def test_a_process_is_started_again_and_ends_with_the_run(tmp_path: Path) -> None:
    port = free_port()
    server = LaunchedServer([sys.executable, "-c", LISTENS, str(port)], {}, port=port, log=tmp_path / "log")
    server.ensure()
    first = pid_at(port)
    server.ensure()
    assert pid_at(port) == first
    server.has_answered = True
    os.kill(first, signal.SIGKILL)
    assert ends(first)
    until = time.monotonic() + PATIENCE_S
    while server._process is not None and server._process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    server.ensure()
    second = pid_at(port)
    assert second != first
    server.stop()
    assert ends(second)
    with pytest.raises(SamplingError, match="the run has ended"):
        server.ensure()


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    script = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
    server = LaunchedServer([sys.executable, "-c", script], {}, port=free_port(), log=tmp_path / "log")
    server.ensure()
    assert server._process is not None
    server._process.wait(PATIENCE_S)
    with pytest.raises(SamplingError, match=r"exit code 3 before it answered.*\n.*no such model"):
        server.ensure()
    server.stop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with pytest.raises(SamplingError, match=rf"port {port} is taken"):
            LaunchedServer(["true"], {}, port=port, log=tmp_path / "log").ensure()


def test_a_run_whose_server_cannot_start_says_so(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    tree = tree_of(tmp_path / "run", model, {"program": "false"})
    tree["data"]["eval_prompts"] = None
    run = online(tree)
    with pytest.raises(SamplingError, match="exit code 1 before it answered"):
        train(run)
    run.session.recorder.close()


def test_a_run_as_the_policy_is_started_by_the_folder_of_its_weights(tmp_path: Path) -> None:
    """An engine that is not ours reads no run folder."""
    run, settings = tmp_path / "earlier", {"sampling": {"server": {"type": "vllm", "launch": {}}, "backend": "server"}}
    make_model(run / "model")
    (run / "config.yaml").write_text("run: {}")
    config = train_config(ppo_tree(tmp_path, policy={"model": str(run)}, critic={"init": "policy"}, **settings))
    pool = build_servers(config, load_tokenizer(str(run / "model")), tmp_path / "run")
    assert pool is not None
    process = pool.remotes[0].process
    assert process is not None
    assert process.command[:3] == ["vllm", "serve", str(run / "model")]


def test_a_server_gets_the_base_of_an_adapter_that_is_continued_and_its_rank(tmp_path: Path) -> None:
    """The adapter itself is pushed onto it."""
    base, start = make_model(tmp_path / "model"), tmp_path / "start"
    save_model(add_lora(load_causal_lm(str(base)), LoraConfig(r=3)), load_tokenizer(str(base)), start)
    for lora, model, rank in (({"start": "continue"}, base, "8"), ({}, start, "32")):
        settings = {"sampling": {"server": {"type": "vllm", "launch": {}}, "backend": "server"}}
        policy = {"model": str(start), "lora": {"r": 20, **lora}}
        config = train_config(ppo_tree(tmp_path, policy=policy, critic={"init": "policy"}, **settings))
        pool = build_servers(config, load_tokenizer(str(base)), tmp_path / "run")
        assert pool is not None
        process = pool.remotes[0].process
        assert process is not None
        assert process.command[2] == str(model)
        assert process.command[-2:] == ["--max-lora-rank", rank]


def test_the_commands() -> None:
    asked = Launch(model="m", port=9000, dtype="bfloat16", device="cuda", threads=3, lora_rank=10)
    vllm = VllmServer(launch={"program": "/x/vllm"})
    assert vllm.urls == ["http://127.0.0.1:8001"]
    assert " ".join(vllm.command(asked)) == (
        "/x/vllm serve m --served-model-name policy --host 127.0.0.1 --port 9000 --dtype bfloat16 "
        "--logprobs-mode processed_logprobs --enable-lora --max-lora-rank 16"
    )
    assert vllm.launch_environment(asked) == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    own = OwnServer(launch={"count": 2, "port": 9000}, token_env="SECRET")
    assert own.urls == ["http://127.0.0.1:9000", "http://127.0.0.1:9001"]
    assert " ".join(own.command(asked)[1:]) == (
        "-m rlhf serve-policy m --port 9000 --dtype bfloat16 --device cuda --threads 3 --token-env SECRET"
    )
    exact = Launch(model="m", port=9000, dtype="float32", device="cuda", threads=3, tf32=False)
    assert own.command(exact)[-3:] == ["--no-tf32", "--token-env", "SECRET"]


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({}, "has no address"),
        ({"launch": {}, "urls": ["http://127.0.0.1:9"]}, "leave sampling.server.urls out"),
        ({"launch": {"port": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_is_refused(tmp_path: Path, server: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        train_config(ppo_tree(tmp_path, sampling={"backend": "server", "server": server}))


@pytest.mark.slow
def test_a_local_vllm_is_started_survives_a_kill_and_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pids, dies = make_model(tmp_path / "model"), tmp_path / "pids", tmp_path / "dies"
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(pids))
    monkeypatch.setenv("FAKE_VLLM_DIES", str(dies))
    launch = {"program": str(fake_vllm(tmp_path)), "arguments": ["--enforce-eager"]}
    calm = trained(tree_of(tmp_path / "calm", model, launch))
    dies.write_text("15")
    hard = trained(tree_of(tmp_path / "hard", model, launch))
    assert not dies.exists()
    started = [int(line) for line in pids.read_text().splitlines()]
    assert len(started) == 3
    assert all(map(ends, started))
    assert largest_difference(weights(calm.models.policy), weights(hard.models.policy)) == 0.0


START = "import sys; sys.path[:0] = sys.argv[2:]; from rlhf.cli import main; sys.exit(main(['train', sys.argv[1]]))"


def start_trainer(config: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START, str(config), str(ROOT / "tests")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_killed_trainer_takes_its_server_with_it_and_continues_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of the trainer in mid-run, with a server that it has started; then with one that goes on."""
    model, pids = make_model(tmp_path / "model"), tmp_path / "pids"
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(pids))
    launch = {"program": str(fake_vllm(tmp_path)), "arguments": ["--enforce-eager"]}
    steps = {"schedule": {"steps": 12}, "checkpoint": {"every": 1}}
    folders: dict[str, Path] = {}
    for name in ("calm", "hard"):
        tree = {**tree_of(tmp_path / name, model, launch), **steps}
        folders[name] = tmp_path / name / "config.yaml"
        folders[name].write_text(yaml.safe_dump(tree))
    assert start_trainer(folders["calm"]).wait() == 0
    trainer, metrics = start_trainer(folders["hard"]), tmp_path / "hard" / "run" / "metrics.jsonl"
    until = time.monotonic() + 10 * PATIENCE_S
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 4) and time.monotonic() < until:
        time.sleep(0.02)
    trainer.send_signal(signal.SIGKILL)
    assert trainer.wait() == -signal.SIGKILL
    assert all(ends(int(line)) for line in pids.read_text().splitlines())
    assert start_trainer(folders["hard"]).wait() == 0
    calm, hard = (weights(load_causal_lm(str(tmp_path / name / "run" / "model"))) for name in ("calm", "hard"))
    assert largest_difference(calm, hard) == 0.0
    assert len(pids.read_text().splitlines()) == 3

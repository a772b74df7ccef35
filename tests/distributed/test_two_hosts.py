"""A run over two hosts is the run of one process; the hosts are two network namespaces of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sharded import JOB, LIMIT, at, case, distance, environment, launch, needs, samples

SCRIPT = Path(__file__).with_name("two_hosts.sh")


def skip_without_namespaces() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two hosts are two network namespaces, which need root and iproute2")
    checked = subprocess.run(["bash", str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        pytest.skip(f"no network namespaces here: {checked.stderr.strip()}")


@pytest.mark.slow
@pytest.mark.parametrize("mode, per_host", [("ddp", 1), ("zero3", 1), ("zero2", 2)])
def test_two_hosts_are_one_run(tmp_path: Path, mode: str, per_host: int) -> None:
    needs(mode)
    skip_without_namespaces()
    trees = {name: case(name, tmp_path / name) for name in ("ppo", "sft")}
    launch([at(tree, tmp_path / "one" / n) for n, tree in trees.items()], tmp_path / "one", processes=1)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([at(tree, tmp_path / "two" / n, sharding=mode) for n, tree in trees.items()]))
    done = subprocess.run(
        ["bash", str(SCRIPT), str(per_host), str(JOB), str(plan)],
        env=environment() | {"PYTHON": sys.executable, "LOG": str(tmp_path / "host")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    output = "".join((tmp_path / f"host.{number}").read_text()[-3000:] for number in (0, 1))
    assert done.returncode == 0, output
    received = re.search(r"first host: (\d+)", done.stdout)
    assert received is not None, done.stdout
    assert int(received[1]) > 100_000  # it did go over the wire
    for name in trees:
        assert distance(tmp_path / "one" / name, tmp_path / "two" / name) < LIMIT, name
        assert samples(tmp_path / "one" / name) == samples(tmp_path / "two" / name), name


@pytest.mark.slow
def test_the_namespaces_are_gone_afterwards() -> None:
    skip_without_namespaces()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    subprocess.run(["bash", str(SCRIPT), "--check"], check=True)
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout == left

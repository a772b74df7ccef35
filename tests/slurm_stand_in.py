"""Stand-ins for SLURM's commands: a job script runs on this machine as if on two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# Starts the command once for each node, with the variables of SLURM that the script reads.
SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node "$@" &
    echo $! >>"$STANDIN/tasks"
done
code=0
for task in $(cat "$STANDIN/tasks"); do wait "$task" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/bin/bash
case "$1" in
    show) echo 127.0.0.1; echo 127.0.0.1 ;;
    *) echo "$*" >>"$STANDIN/asked" ;;
esac
"""
# SLURM signals the processes that it started itself, and not their children.
SCANCEL = """#!/bin/bash
[ "$1" = --signal=TERM ] && kill -TERM $(cat "$STANDIN/tasks")
"""
COMMANDS = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}


class SlurmStandIn:
    """A cluster of two nodes in a folder, and one job script for it."""

    def __init__(
        self, script: str, folder: Path, *, port: int, environment: Mapping[str, str], commands: Mapping[str, str] = {}
    ) -> None:
        """Write the stand-ins; the script gets `port` as its rendezvous, and `commands` replaces further programs."""
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name, text in {**COMMANDS, **commands}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.script = folder / "job.sh"
        self.script.write_text(script)
        self.job_id = str(port - 10000)  # the script derives the port from it
        self._environment = {
            **environment,
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "STANDIN": str(folder),
            "SLURM_JOB_ID": self.job_id,
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_CPUS_PER_TASK": "1",
        }

    def submit(self) -> subprocess.Popen[bytes]:
        """Start the job; its output goes to the log."""
        (self.folder / "tasks").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(["bash", self.script], env=self._environment, stdout=log, stderr=log)

    def read(self, name: str) -> str:
        """Return the text of a file in the folder: log, asked (of scontrol), tasks; empty if there is none."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.is_file() else ""

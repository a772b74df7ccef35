"""The work of each process of a distributed test:  torchrun … job.py PLAN.json  — whole runs, one after another.

PLAN.json is a list of trees of settings; the results are in their run folders.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from runs import quiet
from trials import tried_once

from rlhf.config.files import merge
from rlhf.config.load import train_config, validate
from rlhf.config.sections import RewardModelConfig
from rlhf.factory.reward_card import finish_reward_model
from rlhf.factory.reward_model import build_reward_model
from rlhf.factory.run import build_run
from rlhf.models import weight_files
from rlhf.models.weight_files import read_headers
from rlhf.process import exit_process
from rlhf.runtime import device
from rlhf.runtime.distributed import shutdown
from rlhf.runtime.engine import Engine
from rlhf.training.offline import train_offline
from rlhf.training.session import Session

WHOLE = Engine.whole


def run_one(tree: dict[str, Any]) -> Session:
    """One run to its end, or to the end of `stop_after` steps, like an interrupted one: saved, not exported.

    `begin_as`: the folder of a finished run, which this one continues as if it had been killed in the last step.
    `load_whole`: under ZeRO-3 every process loads the models whole, as if they were in no safetensors files.
    `gather_wide`: weights are gathered in float32 for a rollout in bfloat16 too.
    """
    tree = dict(tree)
    stop_after = tree.pop("stop_after", None)
    if "begin_as" in tree:
        _begin_as(Path(tree.pop("begin_as")), Path(tree["run"]["out_dir"]))
    weight_files.read_headers = (lambda _: {}) if tree.pop("load_whole", False) else read_headers
    Engine.whole = (lambda self, module, *_: WHOLE(self, module)) if tree.pop("gather_wide", False) else WHOLE
    with tried_once():
        return _run(tree, stop_after)


def _begin_as(finished: Path, out: Path) -> None:
    """Copy a run's folder without its newest checkpoint, and let the other processes wait for that."""
    if os.environ.get("RANK", "0") == "0":
        shutil.copytree(finished, out)
        shutil.rmtree(max((out / "checkpoints").glob("step-*")))
    if dist.is_initialized():
        dist.barrier()


def _run(tree: dict[str, Any], stop_after: int | None) -> Session:
    if "model" in tree:
        built = build_reward_model(validate(RewardModelConfig, merge({}, tree)), quiet())
        _stop(built.run.session, stop_after)
        train_offline(built.run)
        if stop_after is None:
            finish_reward_model(built)
        session = built.run.session
    else:
        run = build_run(train_config(merge({}, tree)), quiet())
        _stop(run.session, stop_after)
        if stop_after is None:
            run.train()
        else:
            run.loop()
        session = run.session
    session.recorder.close()
    return session


def _stop(session: Session, after: int | None) -> None:
    if after is not None:
        session.total_steps = after


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage in every run, and would look at all that was imported each time
    device.cpu_gains_by_bfloat16 = lambda: True  # bfloat16 is bfloat16 on every CPU, as in conftest.py
    for each in json.loads(Path(sys.argv[1]).read_text()):
        run_one(each)
    shutdown()
    exit_process(0)

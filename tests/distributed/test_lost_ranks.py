"""An error of gloo or NCCL is a lost rank, also within a step or a checkpoint; any other error stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhf.errors import CheckpointError, RankLost
from rlhf.runtime.distributed import detect_lost_ranks
from rlhf.tracking.checkpoint import replace_folder

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection reset by peer [127.0.0.1]:31"


@pytest.mark.parametrize("error", [RuntimeError(GLOO), dist.DistBackendError("NCCL error: unhandled system error")])
def test_a_lost_rank_is_told_wherever_it_is_missed(error: RuntimeError) -> None:
    told = "the same command continues from the newest checkpoint"
    with pytest.raises(RankLost, match=told), detect_lost_ranks(by_message=True):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), torch.OutOfMemoryError("CUDA"), ValueError("x")])
def test_other_errors_of_a_step_stay(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)) as raised, detect_lost_ranks(by_message=True):
        raise error
    assert raised.value is error


@pytest.mark.parametrize(("message", "kind"), [(GLOO, RankLost), ("unexpected pos 64 vs 8", CheckpointError)])
def test_a_rank_that_is_lost_in_a_checkpoint_is_no_full_disk(tmp_path: Path, message: str, kind: type) -> None:
    def write(folder: Path) -> None:
        raise RuntimeError(message)

    with pytest.raises(kind), detect_lost_ranks(by_message=True):
        replace_folder(tmp_path / "model", write)

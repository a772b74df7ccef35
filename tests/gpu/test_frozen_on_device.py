"""Frozen models kept in bfloat16, on a GPU: the same bits, and no weight is cast for a product."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import device_runs
import pytest
import runs
import torch
from device_runs import offline_tree
from pretend import PretendDevice
from tiny_models import ragged, tiny

from rlhf.config.files import merge
from rlhf.models.backbone import freeze
from rlhf.models.policy_models import Models, keep_in_bfloat16

CUDA = torch.device("cuda")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_reference_has_the_same_bits_and_no_casts(family: str, pretend: PretendDevice) -> None:
    policy = copy.deepcopy(tiny(family, dtype=torch.float32)).to("cuda")
    models = Models(policy=policy, temperature=1.0, dtype="bfloat16", device=CUDA)
    models.reference = freeze(copy.deepcopy(policy))
    batch = ragged().to(CUDA)
    results = []
    for step in range(2):
        pretend.clear()
        with torch.no_grad():
            results.append(models.reference_logprobs(batch).cpu())
        if step == 0:
            assert sum(pretend.weight_casts.values()) > 1
            saved = keep_in_bfloat16(models.reference, dtype="bfloat16", device=CUDA)
    assert torch.equal(*results)
    if family == "gpt2":  # its layers are not written out
        assert saved == 0
        return
    assert saved > 0
    assert sum(pretend.weight_casts.values()) == 1  # the head's, for its chunks of logits
    assert pretend.problems == []


def test_a_run_keeps_its_reference_so(tmp_path: Path, pretend: PretendDevice) -> None:
    runs.make_model(tmp_path / "model")
    tree = merge(offline_tree(tmp_path, "kto"), {"policy": {"dtype": "bfloat16"}})
    loss: Any = runs.offline(device_runs.on("cuda", tree, tmp_path)).loss
    assert {p.dtype for p in loss.models.reference.parameters()} == {torch.float32, torch.bfloat16}
    assert {p.dtype for p in loss.models.policy.parameters()} == {torch.float32}

"""A 4- or 8-bit base is quantized on the device of its run: a GPU takes seconds for work of minutes on a CPU."""

from __future__ import annotations

from pathlib import Path

import peft  # noqa: F401  # not later: on the pretend device bitsandbytes would look for CUDA's functions
import pytest
import runs
import torch
from device_runs import on, online_tree
from pretend import PretendDevice
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification

from rlhf.config.files import merge
from rlhf.models.kernels.quantized import KINDS, QuantizedLinear
from rlhf.training.online_run import OnlineRun


def start(tmp_path: Path, device: str, kind: str) -> OnlineRun:
    """A run of PPO on one base, whose critic has a base of its own: a reward model, which is loaded whole."""
    tree = online_tree(tmp_path, "ppo, lora")
    scorer = tmp_path / "scorer"
    if not scorer.is_dir():
        runs.make_model(scorer)
        LlamaForSequenceClassification.from_pretrained(scorer, num_labels=1).save_pretrained(scorer)
    role = {"lora": {"r": 2}, "weights": kind}
    tree = merge(tree, {"policy": role, "critic": {**role, "init": str(scorer)}})
    return runs.online(on(device, tree, tmp_path))


def codes(model: nn.Module) -> dict[str, Tensor]:
    """The codes of every quantized layer."""
    layers = {name: part for name, part in model.named_modules() if isinstance(part, QuantizedLinear)}
    return {name: part.get_buffer("codes") for name, part in layers.items()}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_run_quantizes_on_its_device(
    kind: str, device: str, tmp_path: Path, gpu: PretendDevice | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "nf4" and gpu is not None:
        pytest.skip("bitsandbytes looks for CUDA's own functions")
    places: list[str] = []
    quantize = KINDS[kind]._quantize

    def noted(layer: QuantizedLinear, weight: Tensor) -> None:
        places.append(weight.device.type)
        quantize(layer, weight)

    monkeypatch.setattr(KINDS[kind], "_quantize", noted)
    models = start(tmp_path, device, kind).models
    assert places == [device] * (2 * 2 * 7)  # two bases of two layers
    assert {tensor.device.type for tensor in codes(models.policy).values()} == {device}


def test_its_codes_are_those_of_a_cpu(tmp_path: Path, gpu: PretendDevice | None) -> None:
    ours, theirs = (start(tmp_path, device, "int8").models for device in ("cuda", "cpu"))
    assert ours.critic is not None
    assert theirs.critic is not None
    for one, other in ((ours.policy, theirs.policy), (ours.critic, theirs.critic)):
        expected = codes(other)
        assert len(expected) == 14
        assert all(torch.equal(codes(one)[name].cpu(), tensor) for name, tensor in expected.items())

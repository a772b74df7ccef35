"""Weights that bfloat16 products round: the start stays, and small steps count on average."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import make_model, pairs_file, write_rows
from safetensors.torch import load_file
from torch import Tensor, nn

from rlhf.cli import main
from rlhf.models.backbone import load_causal_lm
from rlhf.models.dither import EVEN, count_distances, dither, dither_matrices, is_uneven, spread
from rlhf.runtime.engine import Engine

CPU = Engine(torch.device("cpu"))


def rounded(numbers: Tensor) -> Tensor:
    return numbers.to(torch.bfloat16).float()


def exact(count: int) -> Tensor:
    """Normal numbers of bfloat16."""
    return rounded(torch.randn(count, generator=torch.Generator().manual_seed(0)))


def hashed(index: int) -> int:
    """The offset of an index, by integers of Python."""
    x = index ^ (index >> 16)
    x = x * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    high = x >> 16
    return max(high - 2**16 if high >= 2**15 else high, -(2**15 - 1))


def test_offsets_are_the_hash_of_the_index_in_units_of_float32s_spacing() -> None:
    ones = dither(torch.ones(70_000))
    for index in (0, 1, 2, 3, 1000, 65_537, 69_999):
        spacing = 2.0**-23 if hashed(index) >= 0 else 2.0**-24  # above and below 1
        assert float(ones[index]) == 1.0 + hashed(index) * spacing
    assert [hashed(index) for index in range(3)] == [0, 26_761, -12_013]


def test_the_start_rounds_to_itself_and_a_second_call_changes_nothing() -> None:
    start = torch.cat([exact(100_000), torch.tensor([1.0, -1.0, 2.0**-100, 2.0**100])])
    spread = dither(start)
    assert float((spread != start).float().mean()) > 0.999
    assert torch.equal(rounded(spread), start)
    assert torch.equal(dither(spread), spread)


def test_zeros_other_numbers_and_no_numbers_stay() -> None:
    numbers = torch.tensor([0.0, -0.0, 1.0 + 2.0**-12, -1 / 3, float("inf"), float("-inf"), 1e-40])
    assert torch.equal(dither(numbers, first=5), numbers)
    assert dither(torch.tensor([float("nan")])).isnan().all()


def test_a_shard_has_the_offsets_of_the_whole() -> None:
    start = exact(1000)
    assert torch.equal(dither(start)[400:], dither(start[400:], first=400))


def test_the_mean_of_rounded_steps_is_the_step() -> None:
    """All steps of a twentieth of the spacing are lost by rounding, and on average none after dither."""
    start = exact(400_000)
    step = start.abs() * 2.0**-9 * 0.1
    assert torch.equal(rounded(start + step), start)
    moved = rounded(dither(start) + step) - start
    share = float(moved.sum() / step.sum())
    assert abs(share - 1.0) < 5 * (1 / 0.05 / 400_000) ** 0.5 * 2  # a chance near 1/20 each, of a move near 20 steps


def test_numbers_near_the_grid_round_to_their_mean() -> None:
    """A tenth of the spacing above a number: rounding takes it away, and on average nothing after `spread`."""
    start = exact(400_000)
    trained = start + start.abs() * 2.0**-9 * 0.1
    assert torch.equal(rounded(trained), start)
    share = float((rounded(spread(trained)) - start).sum() / (trained - start).sum())
    assert abs(share - 1.0) < 5 * (1 / 0.05 / 400_000) ** 0.5 * 2
    assert torch.equal(spread(start), start)
    assert torch.equal(spread(trained)[400:], spread(trained[400:], first=400))


def test_the_largest_numbers_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    assert torch.equal(spread(torch.tensor([largest, -largest, float("inf")])).abs()[:2], torch.full((2,), largest))


def test_distances_to_the_grid_are_counted_in_eighths_of_the_spacing() -> None:
    spacing = 2.0**-7
    places = torch.tensor([0.0, 0.06, 0.07, 0.2, 0.3, 0.4, 0.44, 0.5, 0.7, 0.95, 0.0])
    numbers = 1.0 + spacing * places
    numbers[-1] = 0.0
    assert count_distances(numbers) == [3, 1, 3, 1, 2]
    assert count_distances(-numbers) == [3, 1, 3, 1, 2]
    assert count_distances(exact(100)) == [0] * 5


def test_even_numbers_float16_and_few_numbers_are_not_uneven() -> None:
    even = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    half = even.to(torch.float16).float()
    for numbers in (even, half, dither(exact(100_000)), (even * 3)[:200]):
        assert not is_uneven([count_distances(numbers)])
    shares = torch.tensor(count_distances(half)) / len(half)
    assert torch.allclose(shares, torch.tensor(EVEN), atol=0.01)
    assert not is_uneven([])


@pytest.mark.parametrize("step", [0.01, 0.1, 0.25, 0.4])
def test_numbers_that_all_moved_a_little_from_the_grid_are_uneven_until_they_are_spread(step: float) -> None:
    moved = exact(100_000) * (1 + 2.0**-8 * step)
    assert is_uneven([count_distances(moved), count_distances(exact(100_000))])
    assert not is_uneven([count_distances(spread(moved))])
    assert not is_uneven([count_distances(moved[:4])])  # too few to tell


class Parts(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 1.0)
        self.frozen.requires_grad_(False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [False, True])
def test_trained_matrices_get_offsets(tied: bool) -> None:
    module = Parts(tied=tied)
    dither_matrices(module, CPU)
    changed = {name for name, p in module.named_parameters() if not bool((p == 1.0).all())}
    assert changed == {"embedding.weight", "inner.weight"} | (set() if tied else {"head.weight"})


def test_a_transposed_weight_gets_the_offsets_of_its_rows() -> None:
    plain, transposed = nn.Linear(6, 4), nn.Linear(6, 4)
    nn.init.constant_(plain.weight, 1.0)
    transposed.weight = nn.Parameter(torch.ones(6, 4).T)
    for module in (plain, transposed):
        dither_matrices(module, CPU)
    assert not transposed.weight.is_contiguous()
    assert torch.equal(transposed.weight, plain.weight)
    assert not bool((plain.weight == 1.0).all())


def test_weights_in_bfloat16_stay() -> None:
    module = Parts(tied=False).to(torch.bfloat16)
    dither_matrices(module, CPU)
    assert all(bool((p == 1.0).all()) for p in module.parameters())


ROWS = [{"prompt": f"{color} one", "completion": " good"} for color in ("red", "blue")] * 4


def tree(folder: Path, name: str, **policy: Any) -> dict[str, Any]:
    return {
        "run": {"out_dir": str(folder / name), "device": "cpu"},
        "data": {"sft": {"path": str(write_rows(folder / "sft.jsonl", ROWS))}},
        "policy": {"model": str(folder / "model"), "lr": 1e-5, **policy},
        "algorithm": {"preset": "sft"},
        "batch": {"prompts_per_step": 8},
        "schedule": {"steps": 20, "decay": "constant", "warmup_steps": 0},
        "checkpoint": {"every": 5},
        "logging": {"every": 1},
    }


def trained(folder: Path, settings: dict[str, Any], *overrides: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert main(["train", str(file), *overrides]) == 0
    return Path(settings["run"]["out_dir"])


def fall(folder: Path) -> tuple[float, float]:
    """The first loss, and by how much it fell."""
    losses = [json.loads(line)["loss/sft"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return losses[0], losses[0] - losses[-1]


def test_twenty_small_steps_in_bfloat16_learn_as_much_as_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model", dtype=torch.bfloat16)
    _, wide = fall(trained(tmp_path, tree(tmp_path, "float32")))
    first, low = fall(trained(tmp_path, tree(tmp_path, "bfloat16", dtype="bfloat16")))
    with monkeypatch.context() as patch:
        patch.setattr("rlhf.factory.context.dither_matrices", lambda *_: None)
        first_without, without = fall(trained(tmp_path, tree(tmp_path, "nearest", dtype="bfloat16")))
    assert abs(first - first_without) < 1e-3 * first
    assert low == pytest.approx(wide, rel=0.2)
    assert without < 0.6 * wide


def test_a_resumed_dpo_run_has_the_reference_that_it_began_with(tmp_path: Path) -> None:
    """Its reference is the dithered policy before the first step; on resume it is read from the start's files."""
    make_model(tmp_path / "model", dtype=torch.bfloat16)
    for name, stages in (("whole", (4,)), ("resumed", (2, 4))):
        settings = tree(tmp_path, name, dtype="bfloat16")
        del settings["data"]["sft"]
        settings["data"]["preferences"] = {"path": str(pairs_file(tmp_path))}
        settings["algorithm"] = {"preset": "dpo"}
        for steps in stages:
            folder = trained(tmp_path, settings | {"schedule": settings["schedule"] | {"steps": steps}})
        assert folder.name == name
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_in_float32_goes_on_in_bfloat16_with_its_training(tmp_path: Path) -> None:
    """As one that begins on a laptop and continues on a GPU; and a stop after that changes no bit."""
    make_model(tmp_path / "model", dtype=torch.bfloat16)
    whole = trained(tmp_path, tree(tmp_path, "whole"))
    losses = {}
    for name, stages in (("moved", (20,)), ("stopped", (15, 20))):
        settings = tree(tmp_path, name)
        trained(tmp_path, settings | {"schedule": settings["schedule"] | {"steps": 10}})
        settings["policy"]["dtype"] = "bfloat16"
        for steps in stages:
            folder = trained(tmp_path, settings | {"schedule": settings["schedule"] | {"steps": steps}})
        losses[name] = [json.loads(line)["loss/sft"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wide = [json.loads(line)["loss/sft"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    fall = wide[0] - wide[10]
    assert losses["moved"][10] == pytest.approx(wide[10], abs=0.25 * fall)
    assert losses["moved"][19] == pytest.approx(wide[19], abs=0.25 * fall)
    assert losses["stopped"] == losses["moved"]


def test_a_resumed_run_keeps_its_offsets(tmp_path: Path) -> None:
    make_model(tmp_path / "model", dtype=torch.bfloat16)
    whole = trained(tmp_path, tree(tmp_path, "whole", dtype="bfloat16"))
    settings = tree(tmp_path, "resumed", dtype="bfloat16")
    trained(tmp_path, settings | {"schedule": settings["schedule"] | {"steps": 10}})
    resumed = trained(tmp_path, settings)
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_trained_in_float32_keeps_its_training_in_bfloat16_arithmetic(tmp_path: Path) -> None:
    """What twenty small steps learned is in the rounded weights, of policy, reference and every later load alike."""
    make_model(tmp_path / "model", dtype=torch.bfloat16)
    model = trained(tmp_path, tree(tmp_path, "float32")) / "model"
    start, wide, narrow = (
        {name: p.detach() for name, p in load_causal_lm(str(folder), dtype=dtype).named_parameters()}
        for folder, dtype in ((tmp_path / "model", "float32"), (model, "float32"), (model, "bfloat16"))
    )
    kept = {"nearest": 0.0, "loaded for bfloat16": 0.0, "all": 0.0}
    for name, before in start.items():
        if before.dim() > 1:
            step = wide[name] - before
            kept["all"] += float(step.square().sum())
            kept["nearest"] += float(((rounded(wide[name]) - before) * step).sum())
            kept["loaded for bfloat16"] += float(((rounded(narrow[name]) - before) * step).sum())
        else:
            assert torch.equal(narrow[name], wide[name])
    assert kept["nearest"] < 0.6 * kept["all"]
    assert kept["loaded for bfloat16"] == pytest.approx(kept["all"], rel=0.1)
    exact_again = load_causal_lm(str(model), dtype="bfloat16", is_checkpoint=True)
    assert all(torch.equal(weight, wide[name]) for name, weight in exact_again.named_parameters())


def test_a_run_from_a_float32_start_begins_at_its_reference_and_resumes_to_the_bit(tmp_path: Path) -> None:
    make_model(tmp_path / "published", dtype=torch.bfloat16)
    settings = tree(tmp_path, "first")
    settings["policy"]["model"] = str(tmp_path / "published")
    first = trained(tmp_path, settings)
    for name, stages in (("whole", (4,)), ("resumed", (2, 4))):
        settings = tree(tmp_path, name, dtype="bfloat16", model=str(first))
        del settings["data"]["sft"]
        settings["data"]["preferences"] = {"path": str(pairs_file(tmp_path))}
        settings["algorithm"] = {"preset": "dpo"}
        for steps in stages:
            folder = trained(tmp_path, settings | {"schedule": settings["schedule"] | {"steps": steps}})
    losses = [json.loads(line)["loss/preference"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    whole, resumed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("verb", ["train", "rm"])
def test_a_run_that_began_without_dither_continues_as_it_began(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint lies near the grid, and is loaded as it is."""
    make_model(tmp_path / "model", dtype=torch.bfloat16)

    def stage(name: str, steps: int) -> Path:
        settings = tree(tmp_path, name, dtype="bfloat16")
        if verb == "rm":
            settings["data"] = {"preferences": {"path": str(pairs_file(tmp_path))}}
            settings["model"] = settings.pop("policy")
            del settings["algorithm"]
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(settings | {"schedule": settings["schedule"] | {"steps": steps}}))
        assert main([verb, str(file)]) == 0
        return tmp_path / name

    with monkeypatch.context() as earlier:
        earlier.setattr("rlhf.factory.context.dither_matrices", lambda *_, **__: None)
        whole = load_file(stage("whole", 4) / "model" / "model.safetensors")
        stage("resumed", 2)
    resumed = load_file(stage("resumed", 4) / "model" / "model.safetensors")
    assert all(torch.equal(whole[name], weight) for name, weight in resumed.items())

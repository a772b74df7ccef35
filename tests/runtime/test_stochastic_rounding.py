"""Steps of weights in bfloat16: unbiased, not lost, and the same after a restart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig
from rlhf.runtime.engine import LocalModel
from rlhf.runtime.stochastic_rounding import round_to_bfloat16


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_every_number_goes_to_a_neighbour_with_the_mean_of_the_number() -> None:
    """Of 2^16 equally likely integers exactly k round up a number that is k / 2^16 of the way."""
    for sign in (1.0, -1.0):
        low, high = sign * 1.0, sign * (1.0 + 2.0**-7)  # neighbours in bfloat16
        number = torch.tensor(low + 0.25 * (high - low))
        drawn = round_to_bfloat16(number.expand(200_000).contiguous(), seeded(0)).float()
        assert set(drawn.unique().tolist()) == {low, high}
        share = float((drawn == high).float().mean())
        assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 200_000) ** 0.5


def test_what_bfloat16_has_stays_and_so_does_what_is_no_number() -> None:
    numbers = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), float("-inf")])
    assert torch.equal(round_to_bfloat16(numbers, seeded(1)).float(), numbers)
    assert round_to_bfloat16(torch.tensor([float("nan")]), seeded(1)).isnan().all()


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype, count: int = 4096) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(count, dtype=dtype))
        self.norm = nn.Parameter(torch.ones(3))


def local(dtype: torch.dtype, **settings: object) -> LocalModel:
    return LocalModel("m", Weights(dtype), OptimizerConfig(lr=1e-6, **settings), terms=("t",))  # type: ignore[arg-type]


def push(model: LocalModel, steps: int) -> Tensor:
    """Take steps of 1e-6 downwards: Adam's, for a gradient of any size."""
    for _ in range(steps):
        for parameter in model.parameters:
            parameter.grad = torch.ones_like(parameter)
        model.step(norm=0.5, lr_factor=1.0)
    return model.parameters[0].detach().float()


def test_steps_of_1e_6_are_lost_in_naive_bfloat16_and_kept_in_ours() -> None:
    naive = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([naive], lr=1e-6, weight_decay=0.0)
    for _ in range(100):
        naive.grad = torch.ones_like(naive)
        optimizer.step()
    assert torch.equal(naive.float(), torch.ones(4096))
    exact, ours = push(local(torch.float32), 100), push(local(torch.bfloat16), 100)
    moved = float(1.0 - ours.mean())
    spacing = 2.0**-8  # below 1
    deviation = spacing * (1e-4 / spacing / 4096) ** 0.5  # of the mean of 4096 weights, each down with the right chance
    assert abs(moved - float(1.0 - exact.mean())) < 5 * deviation
    assert moved > 5e-5


def test_norms_in_float32_step_as_they_always_do() -> None:
    ours, plain = local(torch.bfloat16), local(torch.float32)
    push(ours, 3), push(plain, 3)
    assert torch.equal(ours.parameters[1], plain.parameters[1])


def test_a_resumed_model_takes_the_same_steps() -> None:
    for optimizer in ("adamw", "sgd"):
        whole = local(torch.bfloat16, optimizer=optimizer)
        push(whole, 5)
        first = local(torch.bfloat16, optimizer=optimizer)
        push(first, 3)
        second = local(torch.bfloat16, optimizer=optimizer)
        second.module.load_state_dict(first.module.state_dict())
        second.load_state(first.state())
        push(second, 2)
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters, second.parameters, strict=True)), optimizer

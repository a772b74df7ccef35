"""Trained weights in bfloat16: each step is computed in float32, one weight after the other, and rounded at random.

bfloat16 has 8 bits of precision, so that rounding to the nearest drops every step below 1/512 of a weight, most
steps of fine-tuning. A number is rounded up with the probability of its distance to the lower neighbour, so that
the mean of the result is the number (Gupta et al. 2015): small steps count on average. There is no copy of the weights
in float32; the float32 numbers of one weight exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf.config.sections import OptimizerConfig
from rlhf.runtime.optimizers import State, load_optimizer_state, optimizer_state
from rlhf.runtime.seeding import derive_seed

LOW_BITS = 16  # of a float32 that bfloat16 does not have

Make = Callable[[list[nn.Parameter], OptimizerConfig], torch.optim.Optimizer]


def round_to_bfloat16(numbers: Float[Tensor, "*shape"], generator: torch.Generator) -> Tensor:
    """Take float32 numbers to one of their two neighbours in bfloat16, at random with the mean of the number.

    P(up) = (x - down) / (up - down): a random integer below 2^16 is added to the bits and the low 16 are cut off. NaN
    and infinities stay.
    """
    noise = torch.randint(
        0, 1 << LOW_BITS, numbers.shape, generator=generator, dtype=torch.int32, device=numbers.device
    )
    rounded = noise.add_(numbers.view(torch.int32)).bitwise_and_(-(1 << LOW_BITS)).view(torch.float32)
    return torch.where(numbers.isfinite(), rounded, numbers).to(torch.bfloat16)


class StochasticRounding:
    """An optimizer of torch's that also steps weights in bfloat16; its state is as for weights in float32."""

    def __init__(self, named: Mapping[str, nn.Parameter], config: OptimizerConfig, make: Make, *, key: str) -> None:
        """Create the optimizer.

        Args:
            named: the trained weights by name; weights in other dtypes are stepped as usual.
            config: its settings.
            make: makes the optimizer of the weights in float32.
            key: names the model; it and the step decide the random numbers, so that a resumed run has the same.
        """
        self.named, self.kind, self.key = dict(named), config.optimizer, key
        self.wide = {name: _stand_in(p) if p.dtype == torch.bfloat16 else p for name, p in named.items()}
        self.inner = make(list(self.wide.values()), config)
        self.steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, whose learning rate is set for each step."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Take a step of every weight that has a gradient."""
        self.steps += 1
        plain = [p for p in self.wide.values() if p.grad is not None]
        gradients = [p.grad for p in plain]
        if plain:
            self.inner.step()
        for parameter in plain:
            parameter.grad = None  # or the next calls would step it again
        for name, parameter in self.named.items():
            if self.wide[name] is not parameter and parameter.grad is not None:
                self._step_one(name, parameter)
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient

    def _step_one(self, name: str, parameter: nn.Parameter) -> None:
        wide, empty = self.wide[name], self.wide[name].data
        assert parameter.grad is not None
        wide.data, wide.grad = parameter.data.float(), parameter.grad.float()
        self.inner.step()
        generator = torch.Generator(parameter.device)
        generator.manual_seed(derive_seed(0, "stochastic rounding", self.key, name, self.steps))
        parameter.copy_(round_to_bfloat16(wide.data, generator))
        wide.data, wide.grad = empty, None

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        for parameter in self.named.values():
            parameter.grad = None

    def saved_state(self) -> State:
        """Return the state for a checkpoint, by parameter name."""
        return {**optimizer_state(self.inner, self.wide, self.kind), "step": self.steps}

    def load_saved_state(self, state: State) -> None:
        """Restore what `saved_state` returned.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        load_optimizer_state(self.inner, self.wide, state, self.kind)
        self.steps = int(state["step"])


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Make a float32 parameter of the same shape that takes no memory until its numbers are there."""
    return nn.Parameter(torch.zeros(1, device=parameter.device).expand(parameter.shape))

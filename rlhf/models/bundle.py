"""The models of a run (policy, reference, critic), and what each of them computes for a batch of completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn

from rlhf.algo.objective import Outputs
from rlhf.config.sections import LogProbs, Packing
from rlhf.models.backbone import CausalLM, autocast, weight_dtype
from rlhf.models.beside import BesideReference, Comparison
from rlhf.models.fast_ways import FastWays, of_bodies, of_policy
from rlhf.models.logprobs import TokenOutputs, completion_outputs
from rlhf.models.scalar_head import ScalarHeadModel, completion_values
from rlhf.runtime.engine import Engine
from rlhf.types import Completions, Demonstrations


class SharedHead(nn.Module):
    """A value head on the policy's own hidden states, initialized to zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        """Compute the value of each hidden state."""
        values: Tensor = self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
        return values


@dataclass
class Models:
    """Policy, reference and critic. The reference is a model, the policy with its adapter off, or absent."""

    policy: CausalLM
    temperature: float
    dtype: str
    device: torch.device
    reference: CausalLM | None = None
    adapter_off_is_reference: bool = False
    critic: ScalarHeadModel | None = None
    shared_head: SharedHead | None = None
    entropy_gradient: bool = False
    log_probs: LogProbs = "auto"
    packing: Packing = "auto"
    float32_head: bool = True  # compute logits in float32 in a bfloat16 run too
    engine: Engine = field(default_factory=lambda: Engine(torch.device("cpu")))

    @property
    def has_critic(self) -> bool:
        """Return whether there is a critic: a model, or a head on the policy."""
        return self.critic is not None or self.shared_head is not None

    def fast_ways(self) -> FastWays:
        """Find out by trial which fast paths over completions the models support; call it while weights are whole.

        Raises:
            ModelError: a fast path that was requested by name is not available.
        """
        fast_ways = of_policy(self.policy, log_probs=self.log_probs, packing=self.packing)
        if self.critic is not None:
            critic = of_bodies([self.critic.classifier.base_model], packing=self.packing)
            for way, is_on in critic.ways.items():
                fast_ways.ways[way] = fast_ways.ways[way] and is_on
            fast_ways.reasons += critic.reasons
        return fast_ways.under_zero(self.engine.sharding.stage)

    def outputs(self, batch: Completions) -> Outputs:
        """Compute log-probabilities, entropy and values of the trained models, with gradients."""
        tokens = self._tokens(self.policy, batch, with_hidden=self.shared_head is not None)
        return Outputs(logprobs=tokens.logprobs, entropy=tokens.entropy, values=self._values(batch, tokens.hidden))

    def values(self, batch: Completions) -> Float[Tensor, "B T"]:
        """Compute the critic's values alone; zeros without a critic.

        Raises:
            RuntimeError: the critic is a head on the policy, without a backbone of its own.
        """
        if self.shared_head is not None:
            raise RuntimeError("a shared critic has no pass of its own")
        return self._values(batch, None)

    def policy_tokens(self, batch: Completions | Demonstrations, *, temperature: float | None = None) -> TokenOutputs:
        """Compute log-probabilities and entropy under the policy, at `temperature` (None: the run's)."""
        return self._tokens(self.policy, batch, temperature=temperature)

    def reference_logprobs(self, batch: Completions | Demonstrations) -> Float[Tensor, "B T"]:
        """Compute log pi_ref of the completion tokens.

        Raises:
            RuntimeError: the run has no reference.
        """
        if self.reference is not None:
            return self._tokens(self.reference, batch).logprobs
        if not self.adapter_off_is_reference:
            raise RuntimeError("this run has no reference model")
        assert isinstance(self.policy, PeftModel)
        with self.policy.disable_adapter():
            return self._tokens(self.policy, batch).logprobs

    @torch.no_grad()
    def beside_reference(self, batch: Completions) -> BesideReference:
        """Compute log-probabilities under policy and reference, and their KL over the whole vocabulary; one pass each.

        Raises:
            RuntimeError: the run has no reference.
        """
        reference: CausalLM | None = self.reference
        as_reference: Callable[[], AbstractContextManager[object]] = nullcontext
        if reference is None:
            if not self.adapter_off_is_reference:
                raise RuntimeError("this run has no reference model")
            assert isinstance(self.policy, PeftModel)
            reference, as_reference = self.policy, self.policy.disable_adapter
        compare = Comparison(
            policy=self.policy,
            reference=reference,
            temperature=self.temperature,
            as_reference=as_reference,
            whole=self.engine.whole_weights,
            log_probs=self.log_probs,
            packing=self.packing,
            float32_head=self.float32_head and self.dtype == "bfloat16",
        )
        with self.autocast():
            return compare(batch)

    @property
    def has_reference(self) -> bool:
        """Return whether there is a reference to measure a KL to."""
        return self.reference is not None or self.adapter_off_is_reference

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of the run's dtype."""
        return autocast(self.dtype, self.device)

    def _values(self, batch: Completions, hidden: Float[Tensor, "B T D"] | None) -> Float[Tensor, "B T"]:
        if self.shared_head is not None:
            assert hidden is not None
            with self.autocast():
                return torch.where(batch.completion_mask, self.shared_head(hidden), 0.0)
        if self.critic is None:
            return torch.zeros(batch.completion_ids.shape, dtype=weight_dtype(self.dtype), device=self.device)
        with self.autocast():
            return completion_values(
                self.critic, batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
            )

    def _tokens(
        self,
        model: CausalLM,
        batch: Completions | Demonstrations,
        *,
        with_hidden: bool = False,
        temperature: float | None = None,
    ) -> TokenOutputs:
        with self.autocast():
            return completion_outputs(
                model,
                batch.prompt_ids,
                batch.prompt_mask,
                batch.completion_ids,
                batch.completion_mask,
                temperature=self.temperature if temperature is None else temperature,
                entropy_gradient=self.entropy_gradient,
                with_hidden=with_hidden,
                log_probs=self.log_probs,
                packing=self.packing,
                float32_head=self.float32_head and self.dtype == "bfloat16",
            )


class Ema:
    """An exponential moving average of a module's trainable weights; each process averages the part it holds."""

    def __init__(self, module: nn.Module, decay: float, engine: Engine | None = None) -> None:
        """Start from the module's current weights; `engine` is the one that `module` was handed to before."""
        self.decay = decay
        self.module = module
        self.engine = engine or Engine(torch.device("cpu"))
        self._live = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shadow = self._parts()

    def update(self) -> None:
        """Update the average: shadow <- decay * shadow + (1 - decay) * live."""
        for name, parameter in self._live.items():
            self.shadow[name].lerp_(self.engine.part(parameter), 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the module the averaged weights within this context, and its own ones back afterwards."""
        live = self._parts()
        self._copy(self.shadow)
        try:
            yield
        finally:
            self._copy(live)

    def load(self, shadow: Mapping[str, Tensor]) -> None:
        """Restore a saved average, given as whole weights (see `saved`)."""
        for name, value in shadow.items():
            self.shadow[name].copy_(self.engine.part_of(self._live[name], value))

    def saved(self) -> dict[str, Tensor]:
        """Return the average as whole weights in the main process; every process must call it."""
        with self.applied():
            whole = self.engine.full_state(self.module)
        if whole is None:
            return self.shadow
        return {name: value for name, value in whole.items() if name in self.shadow}

    def _parts(self) -> dict[str, Tensor]:
        return {name: self.engine.part(p).clone() for name, p in self._live.items()}

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor]) -> None:
        self.engine.forget_gathered(self.module)
        for name, parameter in self._live.items():
            self.engine.part(parameter).copy_(source[name])

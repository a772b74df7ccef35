"""Which fast paths a run takes over completions, told to the user in one line, and why the others are off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from rlhf.config.sections import LogProbs, Packing
from rlhf.models.backbone import CausalLM, body_of
from rlhf.models.head import why_naive
from rlhf.models.lean import is_lean
from rlhf.models.logprobs import in_chunks
from rlhf.models.rows import why_padded

WRITTEN_OUT = "written-out layers"


@dataclass
class FastWays:
    """The fast paths by name, whether each is on, and the reasons for those that are off."""

    ways: dict[str, bool] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Describe the fast paths for the user: one line, then the reasons."""
        on, off = ([name for name, is_on in self.ways.items() if is_on == wanted] for wanted in (True, False))
        line = f"fast ways on: {', '.join(on) or 'none'}" + (f"; off: {', '.join(off)}" if off else "")
        return [line, *dict.fromkeys(self.reasons)]

    def under_zero(self, stage: int) -> FastWays:
        """Switch off written-out layers under ZeRO-2 and 3, which gather weights or reduce gradients by module."""
        if stage >= 2 and self.ways.get(WRITTEN_OUT):
            self.ways[WRITTEN_OUT] = False
            self.reasons.append(f"layers are not written out: ZeRO-{stage} watches their modules")
        return self


def of_policy(model: CausalLM, *, log_probs: LogProbs, packing: Packing) -> FastWays:
    """Find out by trial which fast paths a policy supports; call it while its weights are whole.

    Raises:
        ModelError: chunked log-probabilities were requested by name and are not available.
    """
    chunked = in_chunks(model, log_probs)
    passes = of_bodies([body_of(model)], packing=packing if chunked else "off")
    packed = passes.ways["no padding"]
    reasons = list(passes.reasons)
    if not chunked and log_probs != "naive":
        reasons.insert(0, f"log-probabilities are taken from all logits at once (naive): {why_naive(model)}")
    return FastWays({"log-probabilities in chunks": chunked, **passes.ways, "shared prompts": packed}, reasons)


def of_bodies(bodies: Sequence[nn.Module], *, packing: Packing) -> FastWays:
    """Find out by trial which fast paths all of `bodies` (transformers without their heads) support."""
    padded = [why_padded(body) for body in bodies] if packing == "auto" else []
    packed = packing == "auto" and not any(padded)
    written_out = [is_lean(body) for body in bodies] if packed else [False]
    reasons = [f"rows go through the model padded: {reason}" for reason in padded if reason]
    return FastWays({"no padding": packed, WRITTEN_OUT: all(written_out)}, reasons)

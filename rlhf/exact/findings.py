"""The findings of a check, and the comparisons that all checks make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlhf.errors import UserError

FindingKind = Literal["loss", "advantage", "pair loss"]
ROUNDING = 1e-8


@dataclass(frozen=True)
class Finding:
    """One property that was checked, and what was observed."""

    what: str
    passed: bool
    message: str = ""


@dataclass(frozen=True)
class CheckResult:
    """The findings of a check; `print` it to read them."""

    kind: FindingKind
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Return whether every property has been confirmed."""
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        """Format one line for each finding."""
        lines = [f"{'ok  ' if finding.passed else 'FAIL'} {_line(finding)}" for finding in self.findings]
        verdict = "right" if self.passed else "wrong"
        return "\n".join([*lines, f"this {self.kind} is {verdict}"])


def _line(finding: Finding) -> str:
    return f"{finding.what}: {finding.message}" if finding.message else finding.what


def try_shape(call: Callable[[], Tensor], of: str = "token") -> tuple[Finding, Tensor | None]:
    """Call a loss or an advantage; return the finding, and its values if they are numbers of the right shape."""
    what = f"one finite number per {of}"
    try:
        result = call()
    except UserError as error:
        return Finding(what, False, str(error)), None
    if not result.isfinite().all():
        return Finding(what, False, f"NaN or infinity at a live {of}"), None
    return Finding(what, True), result


def compare_gradients(what: str, ours: Tensor, exact: Tensor, *, least: float) -> Finding:
    """Compare an expected gradient with the exact one; a cosine below `least` is a failure."""
    if ours.norm() < ROUNDING:
        return Finding(what, False, "it is zero: nothing would be learned")
    cosine = float((ours * exact).sum() / (ours.norm() * exact.norm()))
    scale = float(ours.norm() / exact.norm())
    if cosine < -least:
        return Finding(what, False, "it is its negative: the sign is wrong, and training would lower the score")
    if cosine < least:
        return Finding(what, False, f"it points elsewhere: the cosine of the two is {cosine:.3f}")
    if cosine < 1 - ROUNDING:
        return Finding(what, True, f"with a bias: the cosine of the two is {cosine:.3f}")
    if abs(scale - 1) > ROUNDING:
        return Finding(what, True, f"times {scale:.3g}, which scales policy.lr (Adam evens it out)")
    return Finding(what, True)


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same, apart from rounding."""
    return bool(torch.allclose(a, b, rtol=ROUNDING, atol=ROUNDING, equal_nan=False))

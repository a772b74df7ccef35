"""The floating-point operations of a step and, from a rate that was measured on this machine, its seconds."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.planning.arithmetic import Bytes, PassRows, forward_operations, pass_operations
from rlhf.planning.layout import Layout, Role

FORWARD_AND_BACKWARD = 3.0  # passes: the gradients of inputs and of weights take one each
FROZEN_BELOW = 2.0  # with adapters alone trained, the gradients of inputs


def operations(layout: Layout) -> dict[str, Bytes]:
    """Return the operations of a step of the run by phase, over all processes."""
    policy, step = layout.roles[0], layout.step
    counts: dict[str, Bytes] = {}
    if layout.rollout is not None:
        counts["rollout"] = _decoding(policy, step)
    if layout.annotate is not None and layout.rollout is not None:
        readers = [role for role in layout.roles if role.name in ("reference", "critic", "reward model")]
        counts["annotate"] = sum(pass_operations(role.shape, step, reads_logits=role.has_head) for role in readers)
    counts["update"] = sum(layout.updates * _share(layout) * _training(role, step) for role in layout.trained)
    counts["update"] += sum(
        layout.updates * _share(layout) * pass_operations(role.shape, step, reads_logits=True)
        for role in layout.roles
        if role.name == "teacher"
    )
    return counts


def _share(layout: Layout) -> Bytes:
    """Return the share of a step's rows in one optimizer step."""
    return 1.0 / max(1, layout.minibatches)


def _training(role: Role, rows: PassRows) -> Bytes:
    passes = FORWARD_AND_BACKWARD if role.is_full else FROZEN_BELOW
    return (passes + role.checkpointed) * pass_operations(role.shape, rows, reads_logits=role.has_head)


def _decoding(policy: Role, rows: PassRows) -> Bytes:
    """Return the operations of reading each prompt once and of drawing all tokens of all completions."""
    prompts = PassRows(rows=rows.prompts, prompts=rows.prompts, prompt=rows.prompt, completion=0, read=1)
    tokens = rows.rows * rows.completion
    pairs = tokens * (rows.prompt + rows.completion / 2)
    return pass_operations(policy.shape, prompts) + forward_operations(policy.shape, tokens, pairs, tokens)


def seconds(operations_by_phase: Mapping[str, Bytes], rates: Mapping[str, Bytes]) -> dict[str, Bytes] | None:
    """Return the seconds of each phase, operations / rate; None if the rate of a phase was not measured."""
    if any(phase not in rates for phase in operations_by_phase):
        return None
    return {phase: count / rates[phase] for phase, count in operations_by_phase.items()}

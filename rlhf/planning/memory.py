"""The bytes of each role and kind in each phase of a run, on one process, and the peak.

A phase is the moment in which it needs most. What the processes share is divided among them: moments from ZeRO-1 on,
gradients from ZeRO-2 on, weights under ZeRO-3 (Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlhf.planning.arithmetic import (
    CACHE_COLUMNS,
    MOMENTS,
    SIZES,
    Bytes,
    Head,
    Rows,
    activations,
    forward_working,
    head,
    key_value_cache,
    layer_activations,
    layer_working,
)
from rlhf.planning.layout import Layout, Role

PHASES = ("load", "rollout", "annotate", "update", "export")
KINDS = (
    "weights",
    "adapters",
    "gradients",
    "master copies",
    "moments",
    "moving average",
    "16-bit copies",
    "sampler's copy",
    "KV cache",
    "activations",
    "logits",
)
RUN = "run"  # the role of what belongs to no model


@dataclass(frozen=True)
class Item:
    """Bytes of one kind that a role holds in a phase."""

    phase: str
    role: str
    kind: str
    bytes: Bytes


@dataclass(frozen=True)
class Memory:
    """The items of all phases."""

    items: tuple[Item, ...]

    def of(self, phase: str) -> Bytes:
        """Return the bytes of a phase."""
        return sum(item.bytes for item in self.items if item.phase == phase)

    @property
    def phases(self) -> list[str]:
        """Return the phases of the run in their order."""
        return [phase for phase in PHASES if any(item.phase == phase for item in self.items)]

    @property
    def peak_phase(self) -> str:
        """Return the phase that needs most."""
        return max(self.phases, key=self.of)

    @property
    def peak(self) -> Bytes:
        """Return the bytes of the peak."""
        return self.of(self.peak_phase)


Parts = dict[tuple[str, str], Bytes]  # bytes by role and kind


def memory_of(layout: Layout) -> Memory:
    """Compute the memory of a run on one of its processes."""
    planner = _Memory(layout)
    phases = {
        "load": planner.load(),
        "rollout": planner.rollout(),
        "annotate": planner.annotate(),
        "update": planner.update(),
        "export": planner.export(),
    }
    return Memory(
        tuple(
            Item(phase, role, kind, size)
            for phase, parts in phases.items()
            for (role, kind), size in parts.items()
            if size > 0
        )
    )


def least_memory(layout: Layout) -> Bytes:
    """Return the bytes without which a run cannot take a step: weights, gradients and moments, and nothing else."""
    planner = _Memory(layout)
    parts = planner.resting("update")
    for role in layout.trained:
        parts[role.name, "gradients"] = planner.gradients(role)
    return max(sum(parts.values()), sum(planner.load().values()))


@dataclass(frozen=True)
class _Memory:
    layout: Layout

    @property
    def stage(self) -> int:
        return self.layout.sharding.stage

    def part(self, size: Bytes, stage: int) -> Bytes:
        """Return a process's part of what is split from this ZeRO stage on."""
        return size / self.layout.processes if self.stage >= stage else size

    def weights(self, role: Role) -> Parts:
        kept_weights = {(role.name, "weights"): self.part(role.weights, 3)}
        if self.layout.sharding.offloads and self.stage == 3:
            kept_weights[role.name, "weights"] = 0.0
        kept_weights[role.name, "adapters"] = self.part(role.adapters * role.size, 3)
        return kept_weights

    def gradients(self, role: Role) -> Bytes:
        return self.part(role.trained * role.size, 2)

    def moments(self, role: Role) -> Bytes:
        scale = max(role.size, SIZES["float32"]) / SIZES["float32"] if role.optimizer == "adamw" else 1.0
        size = self.part(role.trained * MOMENTS[role.optimizer] * scale, 1)
        return 0.0 if self.layout.sharding.offloads else size

    def resting(self, phase: str) -> Parts:
        """Return what stays in a phase: weights, moments, averages, and on a GPU what the sampler keeps."""
        parts: Parts = {}
        offload = self.layout.offload
        for role in self.layout.roles:
            stays = role.trained or role.name == "teacher"
            if stays or not offload.frozen_models or phase not in ("rollout", "update"):
                parts |= self.weights(role)
            if role.trained and (phase == "update" or not offload.optimizer):
                parts[role.name, "moments"] = self.moments(role)
            if self.stage in (1, 2) and role.trained and not self.layout.sharding.offloads:
                parts[role.name, "master copies"] = self.part(role.trained * SIZES["float32"], 1)
            if role.averaged:
                parts[role.name, "moving average"] = self.part(role.trained * role.size, 3)
        if self.layout.ahead:
            parts[self.layout.roles[0].name, "sampler's copy"] = self.layout.ahead * self.layout.roles[0].weights
        if self.keeps_sampler or phase == "rollout":
            parts = _added(parts, self.sampler())
        return parts

    @property
    def keeps_sampler(self) -> bool:
        """Return whether the sampler keeps its copy and its cache, as its recorded steps on a GPU do."""
        is_recorded = self.layout.device == "cuda" and self.layout.copies_policy
        return is_recorded and not self.layout.offload.sampler

    def sampler(self) -> Parts:
        """Return the sampler's copy of the weights and its cache."""
        rows, role = self.layout.rollout, self.layout.roles[0]
        if rows is None:
            return {}
        parts: Parts = {}
        if self.layout.copies_policy:
            parts[role.name, "sampler's copy"] = (role.shape.linear + role.shape.embedding) * role.how.low
        elif self.stage == 3:
            parts[role.name, "sampler's copy"] = role.shape.parameters * role.how.low
        remembered = rows.rows * rows.prompt if self.layout.remembers_prompts else 0
        if self.layout.device == "cuda" and self.layout.copies_policy:
            tokens = rows.rows * _columns(_columns(rows.prompt) + rows.completion) + remembered
        else:
            tokens = rows.rows * max(rows.completion - 1, 1) + rows.prompts * rows.prompt + remembered
        parts[role.name, "KV cache"] = key_value_cache(role.shape, tokens, role.how.low)
        return parts

    def load(self) -> Parts:
        """Return the moment of loading in which most is there: the models so far, and one as it is read."""
        so_far: Parts = {}
        most: Parts = {}
        for role in self.layout.roles:
            weights = self.weights(role)
            reading = weights | {(role.name, "weights"): self.part(role.loaded, 3)}
            most = _larger(most, _added(so_far, reading))
            so_far = _added(so_far, weights)
        return most

    def rollout(self) -> Parts:
        rows, role = self.layout.rollout, self.layout.roles[0]
        if rows is None:
            return {}
        parts = self.resting("rollout")
        prompts = Rows(rows=rows.prompts, prompts=rows.prompts, prompt=rows.prompt, completion=0, read=1)
        prefill = forward_working(role.shape, prompts, replace(role.how, written_out=False))
        prefill += key_value_cache(role.shape, prompts.tokens, role.how.low)
        logits = 4 * rows.rows * role.shape.vocabulary * SIZES["float32"]
        decoding = dict(parts)
        decoding[role.name, "logits"] = logits + self.widened(role)
        decoding[role.name, "activations"] = max(prefill - logits, 0.0)
        return _larger(decoding, self.copying(role, parts))

    def copying(self, role: Role, resting: Parts) -> Parts:
        """Return the moment in which the sampler copies the LM head, with the norm before it folded in, in float32."""
        parts = dict(resting)
        if not self.layout.copies_policy:
            return parts
        head_size = role.shape.embedding * SIZES["float32"]
        if self.keeps_sampler:  # the new copy goes over the former one
            head_size += role.shape.embedding * role.how.low
        else:  # the cache is made afterwards
            parts.pop((role.name, "KV cache"), None)
        parts[role.name, "logits"] = head_size
        return parts

    def annotate(self) -> Parts:
        """Return the largest pass without gradient: of the policy, the reference, the critic, or the reward model."""
        most: Parts = {}
        for role in self.layout.roles:
            rows = self.layout.score if role.name == "reward model" else self.layout.annotate
            if rows is not None and (role.name != "reward model" or not role.trained):
                parts = self.resting("annotate")
                parts[role.name, "16-bit copies"] = self.casts(role)
                for moment in self.moments_without_gradient(role, rows):
                    most = _larger(most, _added(parts, moment))
        return most

    def moments_without_gradient(self, role: Role, rows: Rows) -> Iterable[Parts]:
        """Yield the moments of a pass without gradient: a layer's, and the head's once the layers' numbers are gone."""
        states, logits = (role.name, "activations"), (role.name, "logits")
        yield {states: forward_working(role.shape, rows, role.how)}
        if role.has_head:
            passing = head(role.shape, rows, replace(role.how, keeps_probabilities=False), trained=False)
            yield {states: passing.kept, logits: passing.forward + self.widened(role)}

    def widened(self, role: Role) -> Bytes:
        """Return the float32 copy that a CPU makes of an LM head in 16 bits for every pass."""
        is_frozen_narrow = role.weights < role.shape.parameters * role.how.wide and not role.trained
        is_kept_narrow = role.kept not in ("auto", "float32") and not role.how.is_half
        if self.layout.device != "cpu" or not (is_frozen_narrow or is_kept_narrow):
            return 0.0
        return role.shape.embedding * role.how.wide

    def casts(self, role: Role) -> Bytes:
        """Return the 16-bit copies of weights that are kept in more bits; of quantized ones a layer at a time."""
        if role.kept in ("int8", "nf4"):
            return role.shape.linear / role.shape.layers * role.how.low
        is_wide = role.weights >= role.shape.linear * SIZES["float32"]
        if not role.how.is_half or not is_wide or self.stage == 3:
            return 0.0
        on_gpu = role.shape.embedding if self.layout.device == "cuda" and role.has_head else 0
        return (role.shape.linear + on_gpu) * role.how.low

    def update(self) -> Parts:
        """Return the moment of an update that needs most: the backward pass of the policy or of the critic."""
        rows = self.layout.update
        most: Parts = {}
        so_far = self.resting("update")
        for role in self.layout.trained:
            so_far[role.name, "16-bit copies"] = self.casts(role)
            before = dict(so_far)
            so_far[role.name, "gradients"] = self.gradients(role)
            for moment in self.moments_of_pass(role, rows):
                is_first = moment.at_start and self.layout.passes == 1 and self.stage == 0
                most = _larger(most, _added(before if is_first else so_far, moment.parts))
        return most

    def moments_of_pass(self, role: Role, rows: Rows) -> Iterable[_Moment]:
        """Yield the moments of a forward and backward pass: the last logits, the head's gradient, the last layer's."""
        kept = activations(role.shape, rows, role.how, checkpointed=role.checkpointed)
        working = layer_working(role.shape, rows, role.how, trained=role.is_full)
        computed_again = layer_activations(role.shape, rows, role.how) if role.checkpointed else 0.0
        states = (role.name, "activations")
        logits = (role.name, "logits")
        if not role.has_head:
            yield _Moment({states: kept + computed_again + working}, at_start=True)
            return
        passing: Head = head(role.shape, rows, role.how, trained=role.is_full)
        passed = passing.kept + self.widened(role)
        yield _Moment({states: kept, logits: passed + passing.forward}, at_start=True)
        yield _Moment({states: kept, logits: passed + passing.backward}, at_start=True)
        yield _Moment({states: kept + computed_again + working}, at_start=True)
        one = kept / role.shape.layers + computed_again
        embedding = role.shape.embedding * role.how.wide if role.is_full else 0.0
        yield _Moment({states: one + max(working, embedding)}, at_start=False)

    def export(self) -> Parts:
        """Return what writing the trained model needs: a copy in the dtype of its files; merged first if adapted.

        Adapters alone (`policy.export=adapter`) are small and need no copy of the base.
        """
        role = self.layout.roles[0]
        parts = self.resting("export")
        if role.adapters and not self.layout.merges:
            return parts
        merged = role.shape.parameters * SIZES["float32"] if role.adapters else 0.0
        stored = SIZES.get(role.shape.stored, SIZES["float32"])
        copy = role.shape.parameters * stored if stored < role.how.wide else 0.0
        if self.layout.device == "cpu":
            parts[role.name, "activations"] = merged + copy
        return parts


@dataclass(frozen=True)
class _Moment:
    parts: Parts
    at_start: bool  # of the backward pass: no gradient of this micro-batch is there yet


def _added(*many: Parts) -> Parts:
    total: Parts = {}
    for parts in many:
        for key, size in parts.items():
            total[key] = total.get(key, 0.0) + size
    return total


def _larger(first: Parts, second: Parts) -> Parts:
    return second if sum(second.values()) > sum(first.values()) else first


def _columns(tokens: int) -> int:
    """Return the columns of a cache for recorded steps: a multiple, so that a longer prompt needs no new one."""
    return -(-tokens // CACHE_COLUMNS) * CACHE_COLUMNS

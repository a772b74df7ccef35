"""The bytes of each role and kind in each phase of a run, on one process, and the peak.

A phase is the moment in which it needs most. The parts that the processes share are divided: moments from ZeRO-1 on,
gradients from ZeRO-2 on, weights under ZeRO-3 (Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlhf.config.weights import QUANTIZED
from rlhf.planning.arithmetic import (
    CACHE_COLUMNS,
    MOMENTS,
    RECORDED_WORKSPACES,
    SIZES,
    WIDENED_MOMENTS,
    WORKSPACE,
    WORKSPACES,
    Bytes,
    Head,
    PassRows,
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
    "workspaces",
)


@dataclass(frozen=True)
class Allocation:
    """Bytes of one kind that a role holds in a phase."""

    phase: str
    role: str
    kind: str
    bytes: Bytes


@dataclass(frozen=True)
class Memory:
    """The items of all phases."""

    items: tuple[Allocation, ...]

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
    for phase in ("rollout", "annotate", "update", "export") if layout.device == "cuda" else ():
        if phases[phase]:
            phases[phase] = _added(phases[phase], planner.workspaces())
    return Memory(
        tuple(
            Allocation(phase, role, kind, size)
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
        """Return a process's part of bytes that are split from this ZeRO stage on."""
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
        """Return the items that stay in a phase: weights, moments, averages, and on a GPU the sampler's."""
        parts: Parts = {}
        offload = self.layout.offload
        for role in self.layout.roles:
            stays = role.trained or role.name == "teacher"
            if stays or not offload.frozen_models or phase not in ("rollout", "update"):
                parts = _added(parts, self.weights(role))  # several may have one name
            if role.trained and (phase == "update" or not offload.optimizer):
                parts[role.name, "moments"] = self.moments(role)
            if self.stage in (1, 2) and role.trained and not self.layout.sharding.offloads:
                parts[role.name, "master copies"] = self.part(role.trained * SIZES["float32"], 1)
            if role.averaged:
                parts[role.name, "moving average"] = self.part(role.trained * role.size, 3)
        if self.layout.ahead:
            parts[self.layout.roles[0].name, "sampler's copy"] = self.layout.ahead * self.layout.roles[0].weights
        if self.keeps_sampler:
            parts = _added(parts, self.recorded_sampler())
        return parts

    def records(self, rows: PassRows | None) -> bool:
        """Return whether steps over these rows are recorded: each row then has a copy of its prompt."""
        may_copy = rows is not None and (rows.rows == rows.prompts or rows.prompt <= rows.completion)
        return may_copy and self.layout.device == "cuda" and self.layout.copies_policy

    @property
    def recorded(self) -> list[PassRows]:
        """Return the rows of rollouts and of evaluations, if their steps are recorded."""
        return [
            rows for rows in (self.layout.rollout, self.layout.evaluation) if rows is not None and self.records(rows)
        ]

    @property
    def keeps_sampler(self) -> bool:
        """Return whether the sampler keeps its copy and its cache, like its recorded steps on a GPU."""
        return bool(self.recorded) and not self.layout.offload.sampler

    def workspaces(self) -> Parts:
        """Return the bytes that cuBLAS keeps on a GPU."""
        count = WORKSPACES + (RECORDED_WORKSPACES if self.recorded else 0)
        return {(self.layout.roles[0].name, "workspaces"): count * WORKSPACE}

    def copy_of_weights(self) -> Parts:
        """Return the sampler's copy of the weights."""
        role = self.layout.roles[0]
        size = 0.0
        if self.layout.copies_policy:
            size = (role.shape.linear + role.shape.embedding) * role.how.low
        elif self.stage == 3:
            size = role.shape.parameters * role.how.low
        return {(role.name, "sampler's copy"): size}

    def recorded_sampler(self) -> Parts:
        """Return the copy and the cache of recorded steps, which has room for the rows of rollouts and evaluations."""
        role, most = self.layout.roles[0], self.recorded
        rows, prompt, completion = (
            max(getattr(each, name) for each in most) for name in ("rows", "prompt", "completion")
        )
        tokens = rows * _columns(_columns(prompt) + completion)
        cache = {(role.name, "KV cache"): key_value_cache(role.shape, tokens, role.how.low)}
        return self.copy_of_weights() | cache

    def shared_sampler(self, rows: PassRows) -> Parts:
        """Return the copy and the cache of steps that are not recorded: the rows of a prompt share it.

        Keys and values have the dtype of the residual stream, unless fused kernels read them in 16 bits.
        """
        role = self.layout.roles[0]
        tokens = rows.rows * max(rows.completion - 1, 1) + rows.prompts * rows.prompt
        is_fused = self.layout.device == "cuda" and self.layout.copies_policy
        size = key_value_cache(role.shape, tokens, role.how.low if is_fused else role.how.wide)
        return self.copy_of_weights() | {(role.name, "KV cache"): size}

    def sampler(self, rows: PassRows) -> Parts:
        """Return the items of a rollout's sampler beside those that it keeps, and the prompts that it remembers."""
        role = self.layout.roles[0]
        parts: Parts = {}
        if not self.records(rows):
            parts = self.shared_sampler(rows)
        elif not self.keeps_sampler:
            parts = self.recorded_sampler()
        if self.layout.remembers_prompts:
            remembered = key_value_cache(role.shape, rows.rows * rows.prompt, role.how.wide)
            parts = _added(parts, {(role.name, "KV cache"): remembered})
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
        parts = _added(self.resting("rollout"), self.sampler(rows))
        prompts = PassRows(rows=rows.prompts, prompts=rows.prompts, prompt=rows.prompt, completion=0, read=1)
        read = key_value_cache(role.shape, prompts.tokens, role.how.wide)  # by the modules, until they are in the cache
        working = forward_working(
            role.shape, prompts, replace(role.how, written_out=False), adapted=role.adapters > 0 and role.kept != "auto"
        )
        logits = 4 * rows.rows * role.shape.vocabulary * SIZES["float32"]
        reading = parts | {(role.name, "activations"): read + working}
        if not self.keeps_sampler:  # the cache is made afterwards
            reading.pop((role.name, "KV cache"))
        decoding = parts | {(role.name, "logits"): logits + self.widened(role)}
        admitting = decoding | {(role.name, "activations"): read}
        return max(reading, decoding, admitting, self.copying(role, parts), key=lambda moment: sum(moment.values()))

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
        read = [role for role in self.layout.roles if role.name != "reward model" and role.kept not in QUANTIZED]
        copies = {(role.name, "16-bit copies"): self.casts(role) for role in read}  # all are kept through the passes
        for role in self.layout.roles:
            rows = self.layout.score if role.name == "reward model" else self.layout.annotate
            if rows is not None and (role.name != "reward model" or not role.trained):
                parts = self.resting("annotate")
                parts |= copies if role.name != "reward model" else {}
                parts[role.name, "16-bit copies"] = self.casts(role)
                for moment in self.moments_without_gradient(role, rows):
                    most = _larger(most, _added(parts, moment))
        return most

    def moments_without_gradient(self, role: Role, rows: PassRows) -> Iterable[Parts]:
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
        if role.kept in QUANTIZED:
            return role.shape.linear / role.shape.layers * role.how.low
        if not role.how.is_half or self.stage == 3:
            return 0.0
        is_wide = role.weights >= role.shape.linear * SIZES["float32"]
        on_gpu = self.layout.device == "cuda" and role.has_head and (is_wide or role.kept == "auto")
        return ((role.shape.linear if is_wide else 0) + (role.shape.embedding if on_gpu else 0)) * role.how.low

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

    def moments_of_pass(self, role: Role, rows: PassRows) -> Iterable[_Moment]:
        """Yield the moments of a forward and backward pass: the last logits, the head's gradient, the last layer's."""
        kept = activations(role.shape, rows, role.how, checkpointed=role.checkpointed)
        working = layer_working(role.shape, rows, role.how, trained=role.is_full)
        computed_again = layer_activations(role.shape, rows, role.how) if role.checkpointed else 0.0
        states = (role.name, "activations")
        logits = (role.name, "logits")
        if self.layout.device == "cpu" and role.optimizer == "adamw_8bit" and role.is_full:
            matrix = max(role.shape.embedding, role.shape.hidden * role.shape.intermediate)
            yield _Moment({(role.name, "moments"): WIDENED_MOMENTS * matrix * SIZES["float32"]}, at_start=False)
        if role.has_head:
            passing: Head = head(role.shape, rows, role.how, trained=role.is_full)
            passed = passing.kept + self.widened(role)
            yield _Moment({states: kept, logits: passed + passing.forward}, at_start=True)
            yield _Moment({states: kept, logits: passed + passing.backward}, at_start=True)
        yield _Moment({states: kept + computed_again + working}, at_start=True)
        one = kept / role.shape.layers + computed_again
        embedding = role.shape.embedding * role.how.wide if role.is_full else 0.0
        yield _Moment({states: one + max(working, embedding)}, at_start=False)

    def export(self) -> Parts:
        """Return the items of writing the trained model: a copy in the dtype of its files; merged first if adapted.

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

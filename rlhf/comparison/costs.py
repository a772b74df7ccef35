"""The costs of an arm after every step (completions, tokens, estimated FLOPs, seconds), and the check of its budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from torch import nn

from rlhf.config.compare import BudgetConfig, BudgetUnit
from rlhf.config.sections import OfflineConfig, TrainConfig
from rlhf.data.tokenizer import base_of_adapter, locate_model
from rlhf.models.folders import member_folders, model_folder
from rlhf.models.policy_models import Models
from rlhf.models.weight_files import local_folder
from rlhf.rewards.process import ProcessReward
from rlhf.rewards.source import Source, sources_in
from rlhf.tracking.metrics import format_duration
from rlhf.tracking.run_folder import write_atomically
from rlhf.tracking.trackers import encode_line, read_jsonl
from rlhf.training.losses import DemonstrationLoss
from rlhf.training.offline import LabelledLoss, OfflineRun
from rlhf.training.online_run import OnlineRun
from rlhf.training.step import Loss

COSTS = "costs.jsonl"
FORWARD, BACKWARD = 2, 4  # FLOPs per parameter and token (Kaplan et al. 2020, section 2.1)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a run so far."""

    completions: int = 0  # sampled (online), or read from the data, two a pair (offline)
    generated_tokens: int = 0
    trained_tokens: int = 0  # prompt and completion tokens, once for each pass with gradient
    flops: float = 0.0  # estimated
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Return the number of tokens, generated plus trained."""
        return self.generated_tokens + self.trained_tokens

    def plus(self, other: Costs) -> Costs:
        """Return the sum of these costs and `other`."""
        return Costs(**{key: value + getattr(other, key) for key, value in asdict(self).items()})

    def amount(self, unit: BudgetUnit) -> float:
        """Return the cost in a budget's unit."""
        amount: float = getattr(self, unit)
        return float(amount)

    def record(self) -> dict[str, int | float]:
        """Return the costs as a dictionary: the four units of a budget, and the two kinds of tokens."""
        return {**asdict(self), "tokens": self.tokens}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Costs:
        """Build the costs from the dictionary that `record` returned."""
        return cls(**{key: record[key] for key in cls.__dataclass_fields__})


@dataclass(frozen=True)
class CostInfo:
    """A row of the table of costs: a field of `Costs`, and its words where it is shown."""

    name: str
    unit: str  # on axes and in sentences; empty if it is no unit of a budget
    column: str  # of the page's table; empty if that has none
    format: Callable[[float], int | str] = round


COSTS_TABLE = (
    CostInfo("completions", "completions", "completions"),
    CostInfo("generated_tokens", "", "tokens generated"),
    CostInfo("trained_tokens", "", "tokens trained"),
    CostInfo("tokens", "tokens, generated and trained", ""),
    CostInfo("flops", "estimated FLOPs", "FLOPs, estimated", "{:.2e}".format),
    CostInfo("seconds", "seconds of training", "seconds", format_duration),
)
UNITS: dict[BudgetUnit, str] = {cast(BudgetUnit, cost.name): cost.unit for cost in COSTS_TABLE if cost.unit}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The parameter counts of the models that a run uses; 0 for a missing model."""

    policy: int
    reference: int = 0
    critic: int = 0
    reward: int = 0
    teacher: int = 0


def online_flops(sizes: Sizes, *, tokens: int, passes: float) -> float:
    """Estimate the FLOPs of an online step.

    A step samples, scores, annotates by policy, reference and critic, then does `passes` updates of policy and critic:

        tokens * (2 N_policy + 2 N_reward + 2 (N_policy + N_reference + N_critic)
                  + passes * (6 (N_policy + N_critic) + 2 N_teacher))

    Args:
        sizes: N, embeddings included; attention over the context is left out.
        tokens: the number of prompt and completion tokens of the step.
        passes: passes with gradient over the step's completions; a fraction if only some of them are trained on.
    """
    forward = 2 * sizes.policy + sizes.reward + sizes.reference + sizes.critic
    update = passes * ((FORWARD + BACKWARD) * (sizes.policy + sizes.critic) + FORWARD * sizes.teacher)
    return float(tokens * (FORWARD * forward + update))


def search_flops(sizes: Sizes, *, tokens: int, forward_passes: float) -> float:
    """Estimate the FLOPs of searching a step (TRPO, NPG): tokens * forward_passes * 2 N_policy."""
    return float(tokens * forward_passes * FORWARD * sizes.policy)


def critic_flops(sizes: Sizes, *, tokens: int) -> float:
    """Estimate the FLOPs of the passes in which the critic trains alone: tokens * 6 N_critic."""
    return float(tokens * (FORWARD + BACKWARD) * sizes.critic)


def offline_flops(sizes: Sizes, *, tokens: int, has_baseline: bool = False) -> float:
    """Estimate the FLOPs of an offline step.

    The policy runs forward and backward, reference and teacher forward (even if a cache has spared that pass); for a
    baseline (KTO's z0) policy and reference read as many tokens of mismatched completions:

        tokens * (6 N_policy + 2 N_reference + 2 N_teacher [+ 2 N_policy + 2 N_reference])
    """
    baseline = FORWARD * (sizes.policy + sizes.reference) if has_baseline else 0
    update = (FORWARD + BACKWARD) * sizes.policy + FORWARD * (sizes.reference + sizes.teacher)
    return float(tokens * (update + baseline))


def sampling_flops(sizes: Sizes, *, tokens: int) -> float:
    """Estimate the FLOPs of sampling and scoring: tokens * (2 N_policy + 2 N_reward)."""
    return float(tokens * FORWARD * (sizes.policy + sizes.reward))


class CostTracker:
    """The running sum of a run's costs, one line a step in costs.jsonl; implements rlhf.training.session.Budget."""

    def __init__(self, folder: Path, run: OnlineRun | OfflineRun, config: TrainConfig, budget: BudgetConfig) -> None:
        """Resume from costs.jsonl in the run's `folder`, dropping lines after the checkpoint it continues from."""
        self.path = folder / COSTS
        self.run, self.config, self.budget = run, config, budget
        self.sizes = _sizes(run, config)
        step = run.session.state.step
        ranks = run.session.ranks

        def drop_later_lines() -> list[dict[str, Any]]:
            kept = [row for row in read_jsonl(self.path) if row["step"] <= step]
            write_atomically(self.path, "".join(encode_line(row).decode() for row in kept))
            return kept

        rows = ranks.on_main(drop_later_lines)
        self.total = Costs.of(rows[-1]) if rows else Costs()

    @property
    def spent(self) -> bool:
        """Return whether the cost in the budget's unit has reached its limit."""
        return self.total.amount(self.budget.unit) >= self.budget.limit

    def spend(self, step: int, metrics: Mapping[str, float], *, tokens: int, seconds: float) -> None:
        """Add the costs of a step, and append the sum to costs.jsonl."""
        self.total = self.total.plus(self._step_costs(metrics, tokens, seconds))
        if self.run.session.ranks.is_main:
            with self.path.open("ab") as file:
                file.write(encode_line({"step": step, **self.total.record()}))
        self._show_length(step)

    def _show_length(self, step: int) -> None:
        """Update the number of steps on the progress display, if only the budget determines it."""
        spent = self.total.amount(self.budget.unit)
        if self.budget.unit != "completions" and spent > 0:
            self.run.session.recorder.progress.total_steps = math.ceil(step * max(1.0, self.budget.limit / spent))

    def _step_costs(self, metrics: Mapping[str, float], tokens: int, seconds: float) -> Costs:
        if isinstance(self.run, OfflineRun):
            has_baseline = isinstance(self.run.loss, LabelledLoss)
            flops = offline_flops(self.sizes, tokens=tokens, has_baseline=has_baseline)
            rows = self.config.completions_per_step
            return Costs(completions=rows, trained_tokens=tokens, flops=flops, seconds=seconds)
        rows = round(metrics["completion/count"]) - self.total.completions
        generated = round(metrics["completion/generated_tokens"])
        if not tokens:  # the step was skipped, because a score was not finite
            flops = sampling_flops(self.sizes, tokens=generated)  # and not of the prompts, whose tokens are not known
            return Costs(completions=rows, generated_tokens=generated, flops=flops, seconds=seconds)
        extra = round(metrics.get("completion/extra_tokens", 0.0))  # sampled and scored, not learned from
        trained = round(metrics["completion/trained_tokens"])  # only the chosen ones, if completions are chosen
        by_critic = round(metrics.get("critic/extra_tokens", 0.0))
        mixed = round(metrics.get("policy/ptx_tokens", 0.0))  # demonstrations beside the completions
        return Costs(
            completions=rows,
            generated_tokens=generated,
            trained_tokens=trained + by_critic + mixed,
            flops=online_flops(self.sizes, tokens=tokens, passes=trained / tokens)
            + search_flops(self.sizes, tokens=trained, forward_passes=metrics.get("trust_region/forward_passes", 0.0))
            + critic_flops(self.sizes, tokens=by_critic)
            + offline_flops(Sizes(policy=self.sizes.policy), tokens=mixed)
            + sampling_flops(self.sizes, tokens=extra),
            seconds=seconds,
        )


def count_parameters(module: nn.Module | None) -> int:
    """Count the parameters of a module; 0 for None."""
    if module is None:
        return 0
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())  # of a shard, numel() is the part's


def count_source_parameters(source: Source | None) -> int:
    """Count the parameters of a reward source; 0 for a function or a server, whose cost is not known."""
    if source is None:
        return 0
    return sum(_model_parameters(path) for _, inner in sources_in(source) for path in inner.model_paths().values())


def _process_parameters(process: ProcessReward | None) -> int:
    return 0 if process is None else sum(map(_model_parameters, process.model_paths().values()))


def _model_parameters(path: str) -> int:
    members = member_folders(path)
    if members:
        return sum(_model_parameters(str(member)) for member in members)
    location = locate_model(model_folder(path))
    folder = local_folder(location)
    if folder is None or location.gguf is not None:
        return 0
    own = sum(_stored_parameters(file) for file in sorted(folder.glob("*.safetensors")))
    return own + (_model_parameters(base_of_adapter(folder)) if location.is_adapter else 0)


def _stored_parameters(file: Path) -> int:
    with safe_open(file, framework="pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118  # not a mapping
    return sum(math.prod(shape) for shape in shapes)


def _sizes(run: OnlineRun | OfflineRun, config: TrainConfig) -> Sizes:
    if isinstance(run, OfflineRun):
        policy = count_parameters(run.trained.module)
        uses_reference = isinstance(config, OfflineConfig) and config.uses_reference
        return Sizes(policy=policy, reference=policy if uses_reference else 0, teacher=_teacher_parameters(run.loss))
    policy = count_parameters(run.models.policy)
    return Sizes(
        policy=policy,
        reference=_reference_parameters(run.models, policy),
        critic=count_parameters(run.models.critic),
        reward=count_source_parameters(run.config.reward.source)
        + (0 if run.config.reward.cost is None else count_source_parameters(run.config.reward.cost.source))
        + _process_parameters(run.config.reward.process),
        teacher=0 if run.models.teacher is None else run.models.teacher.parameters,
    )


def _reference_parameters(models: Models, policy: int) -> int:
    """Count the parameters of the reference, which may be a teacher of another size."""
    if models.reference_is_teacher:
        return count_parameters(models.reference)
    return policy if models.has_reference else 0


def _teacher_parameters(loss: Loss) -> int:
    teacher = loss.models.teacher if isinstance(loss, DemonstrationLoss) else None
    return 0 if teacher is None else teacher.parameters

"""The sections that say how any run goes: identity, length, checkpoints, logging, guard, processes.

Sharding has presets for DeepSpeed's own JSON, any key of which can be overridden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf.config.data import Count, Size
from rlhf.section import Folder, Positive, Section

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["float32", "bfloat16", "float64"]
Action = Literal["ignore", "warn", "stop", "lower_lr", "raise_kl"]
ALGORITHM = "{algorithm}"  # in run.out_dir and run.name: the name of the algorithm that trains
UNKNOWN_LENGTH = 1_000_000  # schedule.steps of a comparison's arm that only its budget ends
Mode = Literal["none", "ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]

# Keys of DeepSpeed's JSON that a setting of ours controls -> the setting to use instead.
RESERVED_KEYS = {
    "optimizer": "policy.optimizer, policy.lr and the other optimizer settings",
    "scheduler": "schedule",
    "gradient_clipping": "policy.max_grad_norm and critic.max_grad_norm",
    "train_batch_size": "batch.prompts_per_step",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.micro_batch_size; gradients are accumulated over passes",
    "managed_gradient_accumulation": "no setting: the optimizer step marks a complete step",
    "fp16": "policy.dtype=bfloat16",
    "bf16": "policy.dtype=bfloat16, which keeps the weights in float32",
    "torch_autocast": "policy.dtype=bfloat16",
    "zero_optimization.stage": "sharding.mode",
}


class RunConfig(Section):
    """Name, seed, folder and device of the run."""

    name: str = "{algorithm}"
    """The run's name in the report and the progress display; {algorithm} as in out_dir."""
    seed: int = 0
    """The only seed; every random generator is derived from it."""
    out_dir: Folder = "runs/{algorithm}"
    """The run folder; receives configuration, metrics, samples, checkpoints and report. {algorithm} stands for the
    algorithm that trains: the preset (ppo, grpo, sft, dpo, ...), or reward_model."""
    device: Device = "auto"
    """auto: a CUDA GPU if there is one, otherwise the CPU. mps: an Apple GPU (untested)."""
    keep_memory: bool = True
    """On a CPU under Linux: keep freed memory for the next tensors instead of returning it to the system at every step
    (glibc's mallopt). Faster; the peak may be higher."""
    tf32: bool = True
    """On a GPU: compute products of float32 matrices in TF32, several times as fast, with 10 bits of mantissa. false:
    full float32, as on a CPU."""
    cache_dir: str | None = None
    """Folder of the cache of reference log-probabilities between runs; null: $XDG_CACHE_HOME/rlhf, or ~/.cache/rlhf."""

    def named_after(self, algorithm: str) -> RunConfig:
        """Return the section with the algorithm's name in place of {algorithm}."""
        names = {key: getattr(self, key).replace(ALGORITHM, algorithm) for key in ("name", "out_dir")}
        changed = {key: value for key, value in names.items() if value != getattr(self, key)}
        return self.model_copy(update=changed) if changed else self

    def check_dtype(self, section: str, dtype: Dtype) -> None:
        """Check that the device has the `section`'s dtype."""
        if self.device == "mps" and dtype == "float64":
            raise ValueError(
                f"{section}.dtype is float64, which an Apple GPU does not have: set {section}.dtype=float32, "
                "or run.device=cpu"
            )


class ScheduleConfig(Section):
    """Length of the run and learning-rate schedule."""

    steps: Count | None = None
    """Steps of the run; set this or epochs."""
    epochs: Positive | None = None
    """Length in passes over the data, instead of steps; it is rounded to whole steps, and a note tells if rows are then
    left unread or repeated."""
    warmup_steps: Size = 0
    """Number of first steps over which the learning rate rises linearly."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or decaying so that the step after the last would have rate zero."""
    max_bad_steps: Count = 10
    """Stop the run after this many consecutive optimizer steps skipped for a NaN or Inf in loss, gradient or scores."""

    @model_validator(mode="after")
    def _check_length(self) -> ScheduleConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give schedule.steps or schedule.epochs, one of the two (the other null)")
        return self


class BestConfig(Section):
    """Keep the checkpoint with the best evaluation; a new best must be significantly better on the same rows."""

    by: Literal["auto", "score", "loss", "accuracy"] = "auto"
    """The measure. score: the judge's score on held-out prompts; loss, accuracy: on held-out rows or pairs (offline
    runs and reward models); auto: the score if held-out prompts are scored, otherwise the loss; KTO has no loss of
    held-out pairs, and auto is the accuracy there."""
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """A new best requires that the confidence interval of its mean paired difference to the old one is above 0."""
    patience: Count | None = None
    """End the run after this many evaluations in a row without a new best; null: run to the end."""
    restore: bool = True
    """Export the best checkpoint as the run's model; false: export the last one, and keep the best in best/."""


class CheckpointConfig(Section):
    """The times of checkpoints, and the continuation from them."""

    every: Size = 50
    """Steps between checkpoints; 0: only at the end and on interruption."""
    keep: Count = 2
    """Number of checkpoints to keep; the oldest are deleted first."""
    resume: Literal["auto", "never", "always"] = "auto"
    """Action if the folder holds a run. auto: continue it from its newest intact checkpoint if it is the same
    run; refuse if a setting differs that may not change (docs/run_folder.md). never: begin at step 0; the run in the
    folder is moved to <folder>.old-1. always: continue from its weights, optimizer moments and step count with the new
    settings; KL coefficient, best checkpoint and completions sampled ahead begin again."""
    best: BestConfig | None = None
    """Also keep the best checkpoint, named RUN@best in commands; `{}` uses the defaults. null: off."""


class CostConfig(Section):
    """The price of the machine."""

    per_hour: Annotated[float, Field(gt=0)] | None = None
    """Price of the machine in USD per hour; the run then logs cost/usd, its price so far. null: not logged."""


class LoggingConfig(Section):
    """Metrics, samples and trackers."""

    every: Count = 1
    """Steps between lines of metrics.jsonl."""
    samples: Size = 4
    """Completions of each logged step to keep in samples.jsonl."""
    backends: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Trackers to use in addition to metrics.jsonl, through accelerate."""


class GuardConfig(Section):
    """Checks before the run and alarms during it."""

    allow: list[str] = []
    """Names of `rlhf lint` rules (docs/troubleshooting.md) that this run breaks on purpose; they are not reported."""
    on_alarm: Action = "warn"
    """Action on an alarm (docs/troubleshooting.md). warn: report it and continue; stop: save a checkpoint and end the
    run; lower_lr: multiply the learning rates by lr_factor; raise_kl: multiply the KL penalty's coefficient by
    kl_factor (online); ignore: do not check."""
    alarms: dict[str, Action] = {}
    """Actions for single alarms, by name: {repetition: stop, length-grows: ignore}."""
    lr_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """With lower_lr: each alarm multiplies the learning rates by this, from the next step on."""
    kl_factor: Annotated[float, Field(gt=1)] = 2.0
    """With raise_kl: each alarm multiplies kl.coef by this, from the next step on."""

    def action(self, alarm: str) -> Action:
        """Return the action of the alarm of this name."""
        return self.alarms.get(alarm, self.on_alarm)


class ShardingConfig(Section):
    """Distribution of weights, gradients and optimizer state over processes; `sharding=zero3` sets the mode."""

    mode: Mode = "none"
    """none, ddp: every process has a full copy, and the processes share the rows of a step; zero1: optimizer state is
    sharded; zero2: gradients too; zero3: weights too, including frozen models; _offload: optimizer state, and with
    zero3 the weights, stay in CPU memory. Does not change results."""
    deepspeed: dict[str, Any] = {}
    """Keys of DeepSpeed's JSON that override the mode's preset, e.g.
    sharding.deepspeed.zero_optimization.overlap_comm=false."""
    cpu_adam: bool = False
    """With _offload: use DeepSpeed's fused CPU Adam instead of torch's; it is compiled at first use (about 90 s; needs
    g++ and ninja)."""
    rollout: Literal["gather", "layered"] = "gather"
    """Policy weights during sampling under zero3. gather: each process holds all weights during the rollout (in
    bfloat16 if the run computes in bfloat16); layered: all processes gather one layer at a time for every token, which
    needs the memory of one layer and is much slower. Does not change completions in float32."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that a process waits for the others before it gives up."""

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_consistency(self) -> ShardingConfig:
        for key in _dotted_keys(self.deepspeed):
            for ours, instead in RESERVED_KEYS.items():
                if key == ours or key.startswith(f"{ours}."):
                    raise ValueError(f"deepspeed.{key} is ours to set: use {instead}")
        if self.deepspeed and not self.uses_deepspeed:
            raise ValueError(f"deepspeed keys are set, but the mode {self.mode} does not use DeepSpeed")
        if self.rollout == "layered" and self.stage != 3:
            raise ValueError(
                f"rollout=layered gathers the layers that zero3 splits; the mode {self.mode} has them whole: leave "
                "rollout out, or set mode=zero3"
            )
        if self.cpu_adam and not self.offloads:
            raise ValueError(f"cpu_adam is for optimizers in CPU memory, which the mode {self.mode} has not")
        return self

    @property
    def uses_deepspeed(self) -> bool:
        """Return whether the mode is one of DeepSpeed's."""
        return self.mode.startswith("zero")

    @property
    def stage(self) -> int:
        """Return DeepSpeed's ZeRO stage, 0 if nothing is sharded."""
        return int(self.mode[4]) if self.uses_deepspeed else 0

    @property
    def offloads(self) -> bool:
        """Return whether optimizer state stays in CPU memory."""
        return self.mode.endswith("_offload")


def deepspeed_json(config: ShardingConfig, *, processes: int, max_grad_norm: float | None) -> dict[str, Any]:
    """Build DeepSpeed's configuration for one model: the mode's preset, overridden by the user's keys.

    DeepSpeed's own batch sizes are set to 1: this trainer distributes the rows, divides the sums and decides when a
    step is complete.

    Args:
        max_grad_norm: global norm to which gradients are clipped; None for a frozen model.
    """
    zero: dict[str, Any] = {
        "stage": config.stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
    }
    if config.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        }
    if config.offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        if config.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    preset: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": processes,
        "gradient_clipping": 0.0 if max_grad_norm is None else max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
    return _merge(preset, config.deepspeed)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _dotted_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _dotted_keys(value, f"{prefix}{key}.")

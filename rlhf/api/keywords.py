"""The types of the keyword arguments that are settings, by which an editor completes keys.

Made by scripts/make_keywords.py from the configuration, whose pages in docs/configuration describe the keys. Each
class has the keys of a section, or the settings of a call; all of them are optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class RunKeys(TypedDict, total=False):
    name: str
    seed: int
    out_dir: str
    device: Literal["auto", "cpu", "cuda", "mps"]
    keep_memory: bool
    tf32: bool
    cache_dir: str | None


class PolicyKeys(TypedDict, total=False):
    weights: Literal["auto", "float32", "bfloat16", "int8", "nf4"]
    lora: Any
    gradient_checkpointing: bool
    lr: float
    betas: Any
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    optimizer: Literal["adamw", "adamw_8bit", "sgd"]
    model: str
    tokenizer: str | None
    dtype: Literal["float32", "bfloat16", "float64"]
    ema_decay: float | None
    log_probs: Literal["auto", "naive", "chunked"]
    head_dtype: Literal["float32", "model"]
    packing: Literal["auto", "off"]
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"]
    export: Literal["merged", "adapter", "both"]
    trust_remote_code: bool


class ReferenceKeys(TypedDict, total=False):
    weights: Literal["auto", "float32", "bfloat16", "int8", "nf4"]
    model: str | None
    measure: bool


class CriticKeys(TypedDict, total=False):
    weights: Literal["auto", "float32", "bfloat16", "int8", "nf4"]
    lora: Any
    gradient_checkpointing: bool
    lr: float
    betas: Any
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    optimizer: Literal["adamw", "adamw_8bit", "sgd"]
    init: str
    head: Literal["zero", "normal", "orthogonal"]
    shared: bool
    warmup_steps: int
    epochs: int | None


class SamplingKeys(TypedDict, total=False):
    backend: Literal["auto", "fast", "hf", "server"]
    server: Any
    correction: Any
    completions_per_prompt: int
    max_new_tokens: int
    temperature: float
    copy_weights: bool
    top_k: int
    top_p: float
    min_p: float
    batch_size: int
    old_log_probs: Literal["auto", "sampler", "trainer"]


class OverlapKeys(TypedDict, total=False):
    reward_parts: int
    ahead: bool
    ahead_steps: int
    ratio_cap: float
    trace_cap: float | None


class OffloadKeys(TypedDict, total=False):
    frozen_models: bool
    optimizer: bool
    sampler: bool


class BatchKeys(TypedDict, total=False):
    prompts_per_step: int
    epochs: int
    minibatches: int
    shuffle: bool
    micro_batch_size: int
    micro_batch_tokens: int | None


class ShardingKeys(TypedDict, total=False):
    mode: Literal["none", "ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
    deepspeed: Any
    cpu_adam: bool
    rollout: Literal["gather", "layered"]
    timeout_s: float


class ScheduleKeys(TypedDict, total=False):
    steps: int | None
    epochs: float | None
    warmup_steps: int
    decay: Literal["constant", "linear", "cosine"]
    max_bad_steps: int


class CheckpointKeys(TypedDict, total=False):
    every: int
    keep: int
    resume: Literal["auto", "never", "always"]
    best: Any


class LoggingKeys(TypedDict, total=False):
    every: int
    samples: int
    backends: Any


class CostKeys(TypedDict, total=False):
    per_hour: float | None


class EvalKeys(TypedDict, total=False):
    every: int
    prompts: int | None
    source: Any
    judge: Any
    greedy: bool
    samples: int


class GuardKeys(TypedDict, total=False):
    allow: Any
    on_alarm: Literal["ignore", "warn", "stop", "lower_lr", "raise_kl"]
    alarms: Any
    lr_factor: float
    kl_factor: float


class OfflineKeys(TypedDict, total=False):
    preset: str | None
    loss: Any


class PreferencesKeys(TypedDict, total=False):
    path: str
    split: str
    limit: int | None
    columns: Any
    bad_rows: Literal["skip", "error"]
    sources: Any
    at_end: Literal["restart", "stop"]
    stream: bool
    shuffle_buffer: int
    part: Any
    max_tokens: int
    too_long: Literal["skip", "truncate", "error"]


class RewardModelDataKeys(TypedDict, total=False):
    prompts: Any
    eval_prompts: Any
    sft: Any
    eval_sft: Any
    preferences: PreferencesKeys
    eval_preferences: Any
    chat_template: str
    chat_template_kwargs: Any
    system: str | None
    holdout: float | None


class RewardModelLossKeys(TypedDict, total=False):
    use_margin: bool
    centering: float


class EnsembleKeys(TypedDict, total=False):
    size: int
    backbone: Literal["shared", "separate"]
    vary: Any
    member: int | None


class CalibrationKeys(TypedDict, total=False):
    data: Literal["chosen", "both", "none"]
    limit: int


class SharedKeywords(TypedDict, total=False):
    run: RunKeys
    batch: BatchKeys
    sharding: ShardingKeys
    schedule: ScheduleKeys
    checkpoint: CheckpointKeys
    logging: LoggingKeys
    cost: CostKeys
    eval: EvalKeys
    guard: GuardKeys
    plugins: Any
    lr: float
    learning_rate: float
    steps: int | None
    epochs: float | None
    seed: int


class TrainKeywords(SharedKeywords, total=False):
    data: Mapping[str, Any]
    policy: PolicyKeys
    reference: ReferenceKeys
    teacher: Any
    critic: CriticKeys
    sampling: SamplingKeys
    overlap: OverlapKeys
    offload: OffloadKeys
    temperature: float
    max_new_tokens: int


class SftKeywords(SharedKeywords, total=False):
    policy: PolicyKeys
    reference: ReferenceKeys
    teacher: Any
    critic: CriticKeys
    reward: Any
    environment: Any
    sampling: SamplingKeys
    algorithm: OfflineKeys
    overlap: OverlapKeys
    offload: OffloadKeys
    temperature: float
    max_new_tokens: int


class RewardModelKeywords(SharedKeywords, total=False):
    data: RewardModelDataKeys
    loss: RewardModelLossKeys
    process: Any
    ensemble: EnsembleKeys
    calibration: CalibrationKeys


class CompareKeywords(SharedKeywords, total=False):
    data: Mapping[str, Any]
    policy: PolicyKeys
    reference: ReferenceKeys
    teacher: Any
    critic: CriticKeys
    environment: Any
    sampling: SamplingKeys
    algorithm: Mapping[str, Any]
    overlap: OverlapKeys
    offload: OffloadKeys
    temperature: float
    max_new_tokens: int

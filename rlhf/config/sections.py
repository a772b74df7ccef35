"""The sections of a training run and of a reward-model run, and the checks across them.

Every field's docstring is its help text and its entry in docs/configuration.md. Sizes are global, over all processes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf.config.algorithm import (
    AdaptiveKl,
    Algorithm,
    Best,
    BestAndWorst,
    Gae,
    Greedy,
    Group,
    KtoLoss,
    NonNegative,
    Offline,
    Online,
    OnlinePairLoss,
    PenaltyLoss,
    PolicyGradientLoss,
    Positive,
    ReferencedLoss,
    SftLoss,
)
from rlhf.config.base import Section
from rlhf.config.data import Count, DataConfig, Size
from rlhf.config.reward import ChatPairsConfig, ModelSource, RewardConfig, RewardSourceConfig
from rlhf.config.sharding import ShardingConfig

Dtype = Literal["float32", "bfloat16", "float64"]
LogProbs = Literal["auto", "naive", "chunked"]
Packing = Literal["auto", "off"]
HeadDtype = Literal["float32", "model"]
OldLogProbs = Literal["auto", "sampler", "trainer"]


class RunConfig(Section):
    """Identity of the run."""

    name: str = "run"
    """The run's name in the report and the progress display."""
    seed: int = 0
    """The only seed; every random generator is derived from it."""
    out_dir: str = "runs/run"
    """The run folder; receives configuration, metrics, samples, checkpoints and report."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one, otherwise the CPU."""
    keep_memory: bool = True
    """On a CPU under Linux: keep freed memory for the next tensors instead of returning it to the system at every step
    (glibc's mallopt). Faster; the peak may be higher."""
    cache_dir: str | None = None
    """Where reference log-probabilities are cached between runs; null: $XDG_CACHE_HOME/rlhf, or ~/.cache/rlhf."""


class LoraConfig(Section):
    """Low-rank adapters through peft; the reference is the same weights with the adapter disabled."""

    r: Count = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """Scale: the adapter is multiplied by alpha / r."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """The modules that get an adapter."""


class OptimizerConfig(Section):
    """The optimizer of one trained model: learning rate, moments, gradient clipping."""

    lr: NonNegative = 1e-6
    """Peak learning rate; 0 trains nothing, for a trial run."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon, outside the square root as in PyTorch."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients with a larger global norm are scaled down to this one."""
    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """adamw_8bit stores Adam's moments in 8 bits (bitsandbytes), a quarter of their memory; not with DeepSpeed, which
    shards them instead. sgd is plain and stateless, for equivalence tests."""


class PolicyConfig(OptimizerConfig):
    """The model being trained."""

    model: str
    """Folder or hub id of a causal language model."""
    tokenizer: str | None = None
    """Folder or hub id; null: the model's own."""
    dtype: Dtype = "float32"
    """bfloat16: bf16 arithmetic over float32 weights; otherwise weights and arithmetic are in this dtype.
    Log-probabilities are computed in float32 or better."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes more time."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate and export an exponential moving average of the weights, with this decay per step; null: off."""
    log_probs: LogProbs = "auto"
    """chunked: logits of a few completion tokens at a time, never of the whole batch; naive: all at once; auto:
    chunked if the model allows it. The results are the same up to rounding."""
    head_dtype: HeadDtype = "float32"
    """float32: logits are float32 even in a bfloat16 run (on a CPU the head's whole matrix product, on a GPU its
    accumulation and result); model: bfloat16, as the model's own head gives them, with log-probabilities about 0.02
    nats off."""
    packing: Packing = "auto"
    """auto, if the model allows it: rows are packed without padding, completions of one prompt share it, and the layers
    of known model families run in our own implementation; off: a padded rectangle through the model's own modules.
    Applies to reference, critic and reward model too. The results are the same up to rounding."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the exported weights. auto: each weight in the dtype that it had in the model loaded (GGUF file:
    bfloat16); a run warns if rounding to it loses most of what training changed. Checkpoints inside a run are exact."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. Off unless set explicitly."""


class ReferenceConfig(Section):
    """The frozen policy that the KL penalty or a preference loss compares with."""

    model: str | None = None
    """Folder or hub id; null: the policy as it was at step 0 (with LoRA: the adapter disabled)."""
    measure: bool = True
    """Measure the KL to the reference even if the algorithm has no KL penalty (online). false: no reference is loaded,
    and a step saves its forward pass over the completions."""


class CriticConfig(OptimizerConfig):
    """The value function: a backbone with a scalar head."""

    lr: NonNegative = 5e-6
    """Peak learning rate; 0 trains nothing, for a trial run."""
    init: str = "auto"
    """policy: the policy's backbone with a new head of zeros; reward: the reward model of reward.source, head included;
    a folder: that reward model; auto: reward if reward.source is a model, otherwise policy."""
    shared: bool = False
    """Put the value head on the policy's own backbone, which halves the memory but couples the gradients."""
    warmup_steps: Size = 0
    """Number of first steps that train the critic only."""


class SamplingConfig(Section):
    """How completions are sampled: from the full distribution, so that importance ratios and KL are exact."""

    backend: Literal["auto", "fast", "hf"] = "auto"
    """fast: our own decoding on the live weights; hf: transformers' generate; auto: fast if it supports the model."""
    completions_per_prompt: Count = 1
    """Completions sampled per prompt: the group size."""
    max_new_tokens: Count = 128
    """Longest completion in tokens, EOS included."""
    temperature: Positive = 1.0
    """Divides the logits, here and wherever an online run computes log-probabilities of its completions. Losses on
    data sets (sft, the DPO family, the ptx term) always use 1."""
    batch_size: Count = 256
    """Rows decoded together per process; affects memory only."""
    old_log_probs: OldLogProbs = "auto"
    """Source of the old log-probabilities in the update's importance ratios. trainer: one more forward pass; sampler:
    those recorded while sampling; auto: the sampler's, except in bfloat16, with a shared critic, or at a step where
    they differ from the trainer's on the rows that are compared."""


class OverlapConfig(Section):
    """Work done concurrently. Off by default; for runs in one process."""

    reward_parts: Count = 1
    """Sample a step's prompts in this many parts and score each part in a thread while the next is sampled. For rewards
    that spend their time waiting, such as servers; the results are the same up to rounding. 1: off."""
    ahead: bool = False
    """Sample a step's completions during the previous step's update, from the policy as it was before that update: one
    step off-policy, corrected by importance weights (ratio_cap). Takes the memory of one more policy."""
    ratio_cap: Positive = 2.0
    """With ahead: each token's advantage is multiplied by pi_old / pi_sampler, truncated at this value (truncated
    importance sampling, Espeholt et al. 2018)."""


class BatchConfig(Section):
    """Batch sizes. All are global except those of micro-batches, which affect memory only."""

    prompts_per_step: Count = 64
    """Per step and over all processes: prompts (online); examples, pairs or, for KTO, completions (offline)."""
    epochs: Count = 1
    """Passes over a step's completions (online)."""
    minibatches: Count = 1
    """Optimizer steps per epoch (online)."""
    micro_batch_size: Count = 16
    """Rows (for preference losses, pairs) per forward and backward pass per process; never changes a result."""
    micro_batch_tokens: Count | None = None
    """Limit a pass by live tokens instead of rows: as many rows as fit, at least one. For rows of very different
    lengths; never changes a result. null: micro_batch_size decides."""


class ScheduleConfig(Section):
    """Length of the run and learning-rate schedule."""

    steps: Count | None = None
    """Steps of the run; set this or epochs."""
    epochs: Positive | None = None
    """Length in passes over the data, instead of steps."""
    warmup_steps: Size = 0
    """Number of first steps over which the learning rate rises linearly."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling towards zero, which the step after the last would reach."""
    max_bad_steps: Count = 10
    """Stop the run after this many consecutive optimizer steps skipped for a NaN or Inf in loss, gradient or scores."""

    @model_validator(mode="after")
    def _check_length(self) -> ScheduleConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give schedule.steps or schedule.epochs, one of the two (the other null)")
        return self


class CheckpointConfig(Section):
    """When checkpoints are saved and what a restart does."""

    every: Size = 50
    """Steps between checkpoints; 0: only at the end and on interruption."""
    keep: Count = 2
    """How many checkpoints are kept; the oldest are deleted first."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest complete checkpoint; never: refuse a folder that has one."""


class LoggingConfig(Section):
    """What is logged."""

    every: Count = 1
    """Steps between lines of metrics.jsonl."""
    samples: Size = 4
    """Completions of each logged step to keep in samples.jsonl."""
    backends: list[Literal["tensorboard", "wandb"]] = []
    """Trackers to use in addition to metrics.jsonl, through accelerate."""


class EvalConfig(Section):
    """Evaluation on held-out data during the run."""

    every: Size = 50
    """Steps between evaluations; 0: only before the first and after the last step."""
    source: RewardSourceConfig | None = None
    """The source that scores held-out completions; null: the reward that the run trains on."""
    judge: ChatPairsConfig | None = None
    """A language model that also says which of two completions is better; for rlhf eval only."""
    greedy: bool = False
    """Also score greedy completions."""
    samples: Size = 64
    """Held-out completions to keep in samples.jsonl at each evaluation."""


class TrainConfig(Section):
    """One training run: SFT, or any online or offline algorithm."""

    run: RunConfig = RunConfig()
    """Identity of the run."""
    data: DataConfig = DataConfig()
    """The data sets."""
    policy: PolicyConfig
    """The model being trained."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen policy to compare with."""
    critic: CriticConfig = CriticConfig()
    """The value function (GAE only)."""
    reward: RewardConfig | None = None
    """Where scores come from (online)."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are sampled (online runs and evaluation)."""
    algorithm: Algorithm
    """Advantage, policy loss, value loss and KL of an online algorithm, or an offline loss."""
    overlap: OverlapConfig = OverlapConfig()
    """Work done concurrently (online)."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes."""
    sharding: ShardingConfig = ShardingConfig()
    """How the run is spread over processes."""
    schedule: ScheduleConfig = ScheduleConfig(steps=100)
    """Length and learning-rate schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    logging: LoggingConfig = LoggingConfig()
    """What is logged."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during the run."""

    @model_validator(mode="after")
    def _check_consistency(self) -> TrainConfig:
        _check_optimizer(self.sharding, self.policy, self.policy.dtype, "policy")
        if isinstance(self.algorithm, Online):
            self._check_online(self.algorithm)
        else:
            self._check_offline(self.algorithm)
        return self

    def _check_offline(self, algorithm: Offline) -> None:
        if isinstance(algorithm.loss, SftLoss):
            if self.data.sft is None:
                raise ValueError("data.sft is missing: SFT needs texts to imitate; set data.sft.path")
            return
        name = algorithm.preset or algorithm.loss.type
        if self.data.preferences is None:
            what = "pairs or labelled completions" if isinstance(algorithm.loss, KtoLoss) else "pairs"
            raise ValueError(f"data.preferences is missing: {name} needs {what}; set data.preferences.path")
        if isinstance(algorithm.loss, KtoLoss) and self.batch.prompts_per_step < 2:
            raise ValueError("KTO's z0 pairs a prompt with another's completion: batch.prompts_per_step must be >= 2")

    def _check_online(self, algorithm: Online) -> None:
        if self.data.prompts is None:
            raise ValueError("data.prompts is missing: an online algorithm needs prompts; set data.prompts.path")
        if self.reward is None:
            raise ValueError(
                "reward is missing: set reward.source, e.g. reward.source.type=model reward.source.path=runs/rm"
            )
        if isinstance(algorithm.advantage, Group) and self.sampling.completions_per_prompt < 2:
            raise ValueError("a group baseline needs sampling.completions_per_prompt >= 2")
        if not self.reference.measure and trains_against_reference(algorithm):
            raise ValueError(
                "reference.measure is false, but the loss or the reward has a KL to the reference: "
                "set algorithm.kl.coef=0, or reference.measure=true"
            )
        self._check_selection(algorithm)
        self._check_overlap(algorithm)
        if algorithm.ptx_coef > 0 and self.data.sft is None:
            raise ValueError("algorithm.ptx_coef > 0 needs data.sft")
        if isinstance(algorithm.advantage, Gae):
            self._check_critic(self.reward.source)
        if isinstance(algorithm.policy_loss, PenaltyLoss) and self.batch.epochs * self.batch.minibatches < 2:
            raise ValueError(
                "the penalty is steered by KL(old || new), which is 0 at a step's first update: "
                "set batch.epochs or batch.minibatches to 2 or more"
            )
        plain = isinstance(algorithm.policy_loss, PolicyGradientLoss) and not isinstance(algorithm.advantage, Best)
        if plain and self.batch.epochs * self.batch.minibatches > 1:
            raise ValueError(
                "the policy_gradient loss has no importance ratio, so a second optimizer step on the same completions "
                "would be wrong: set batch.epochs=1 batch.minibatches=1, or algorithm.policy_loss.type=clip"
            )
        rows = self.batch.prompts_per_step * self.sampling.completions_per_prompt
        if rows < self.batch.minibatches:
            raise ValueError(f"batch.minibatches is {self.batch.minibatches} but a step has only {rows} completions")
        if isinstance(algorithm.advantage, Gae) and algorithm.advantage.whiten and rows < 8:
            raise ValueError(f"whitening over {rows} completions is noise: use 8 or more, or advantage.whiten=false")
        if self.reward.shaping.overlong_buffer >= self.sampling.max_new_tokens:
            raise ValueError("reward.shaping.overlong_buffer must be shorter than sampling.max_new_tokens")

    def _check_critic(self, source: RewardSourceConfig) -> None:
        """Check the critic section of an algorithm with a critic; without one the section is unread, a warning."""
        _check_optimizer(self.sharding, self.critic, self.policy.dtype, "critic")
        if self.critic.shared and self.critic.init not in ("policy", "auto"):
            raise ValueError("critic.shared puts the head on the policy: critic.init must then be policy or auto")
        if self.critic.shared and self.critic.warmup_steps:
            raise ValueError("critic.warmup_steps trains the critic alone: not possible where critic.shared is true")
        if self.critic.shared and self.sampling.old_log_probs == "sampler":
            raise ValueError(
                "critic.shared reads its values in the pass that sampling.old_log_probs=sampler leaves out: "
                "set sampling.old_log_probs=auto"
            )
        if self.critic.init == "reward" and not isinstance(source, ModelSource):
            raise ValueError("critic.init is reward, but reward.source is not a model: use critic.init=policy")

    def _check_overlap(self, algorithm: Online) -> None:
        """Check that sampling ahead covers all sampling of a step and that importance weights can correct for it."""
        if self.overlap.ahead and isinstance(algorithm.advantage, Best | BestAndWorst | Greedy):
            raise ValueError(
                "overlap.ahead corrects by weights of advantages: not with rejection_sampling, online_dpo or remax"
            )
        if self.overlap.ahead and algorithm.refill_rounds:
            raise ValueError("overlap.ahead cannot refill groups: set algorithm.refill_rounds=0")
        if self.overlap.ahead and self.overlap.reward_parts > 1:
            raise ValueError("overlap.ahead draws a step as a whole: set overlap.reward_parts=1")
        if self.overlap.ahead and self.sampling.old_log_probs == "sampler":
            raise ValueError("overlap.ahead needs the trainer's own log-probabilities: set sampling.old_log_probs=auto")

    def _check_selection(self, algorithm: Online) -> None:
        """Check that there are completions to choose from, and enough chosen ones to split into minibatches."""
        advantage, size = algorithm.advantage, self.sampling.completions_per_prompt
        if not isinstance(advantage, Best | BestAndWorst):
            return
        if isinstance(advantage, BestAndWorst) and size < 2:
            raise ValueError("a pair of a prompt's completions needs sampling.completions_per_prompt >= 2")
        if isinstance(advantage, Best) and advantage.keep >= size and advantage.min_score is None:
            raise ValueError(
                f"advantage.keep is {advantage.keep} of {size} completions, so nothing is chosen: "
                "set sampling.completions_per_prompt higher, or advantage.min_score"
            )
        selected = self.batch.prompts_per_step * (min(advantage.keep, size) if isinstance(advantage, Best) else 1)
        if selected < self.batch.minibatches:
            what = "completions are kept" if isinstance(advantage, Best) else "pairs are made"
            raise ValueError(f"batch.minibatches is {self.batch.minibatches}, but at most {selected} {what} in a step")


class RewardModelLoss(Section):
    """The Bradley-Terry loss, with the optional margin and centering of reward_model.losses."""

    use_margin: bool = False
    """Subtract the data's margin column from the score difference (Touvron et al. 2023, eq. 2)."""
    centering: NonNegative = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores near zero (Eisenstein et al. 2023); 0.01 is usual."""


class CalibrationConfig(Section):
    """The shift and scale stored in the model, which give scores mean 0 and std 1 on reference completions."""

    data: Literal["chosen", "both", "none"] = "both"
    """Which completions of the training pairs to calibrate on; none: leave scores as they are."""
    limit: Count = 1024
    """How many completions to calibrate on."""


class RewardModelConfig(Section):
    """One reward-model training run."""

    run: RunConfig = RunConfig()
    """Identity of the run."""
    data: DataConfig
    """data.preferences, data.eval_preferences and the chat template."""
    model: PolicyConfig
    """The backbone to start from, usually the SFT model, and its optimizer."""
    loss: RewardModelLoss = RewardModelLoss()
    """The Bradley-Terry loss."""
    calibration: CalibrationConfig = CalibrationConfig()
    """Shift and scale of the scores."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes; prompts_per_step counts pairs."""
    sharding: ShardingConfig = ShardingConfig()
    """How the run is spread over processes."""
    schedule: ScheduleConfig = ScheduleConfig(epochs=1.0)
    """Length and learning-rate schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    logging: LoggingConfig = LoggingConfig()
    """What is logged."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during the run."""

    @model_validator(mode="after")
    def _check_data_and_model(self) -> RewardModelConfig:
        if self.data.preferences is None:
            raise ValueError("data.preferences is missing: a reward model needs pairs; set data.preferences.path")
        _check_optimizer(self.sharding, self.model, self.model.dtype, "model")
        if self.model.lora is not None:
            raise ValueError("model.lora: a reward model is trained in full; leave it null")
        return self


def _check_optimizer(sharding: ShardingConfig, section: OptimizerConfig, dtype: Dtype, name: str) -> None:
    if sharding.uses_deepspeed and dtype == "float64":
        raise ValueError(f"{name}.dtype is float64, but DeepSpeed steps in float32: set sharding=ddp, or float32")
    if section.optimizer == "adamw_8bit" and sharding.uses_deepspeed:
        raise ValueError(
            f"{name}.optimizer is adamw_8bit, which DeepSpeed cannot split: set sharding=ddp or none, or adamw"
        )
    if section.optimizer == "adamw_8bit" and dtype == "float64":
        raise ValueError(f"{name}.optimizer is adamw_8bit, which has no float64: set {name}.dtype=float32, or adamw")


def online_algorithm(config: TrainConfig) -> Online:
    """Return the algorithm of a run that is known to be online."""
    assert isinstance(config.algorithm, Online)
    return config.algorithm


def offline_algorithm(config: TrainConfig) -> Offline:
    """Return the algorithm of a run that is known to be offline."""
    assert isinstance(config.algorithm, Offline)
    return config.algorithm


def has_offline_evaluation(config: TrainConfig) -> bool:
    """Return whether an offline run samples held-out completions and has a source that scores them."""
    return config.data.eval_prompts is not None and config.eval.source is not None


def trains_against_reference(algorithm: Online) -> bool:
    """Return whether a gradient or a reward of an online run depends on the reference."""
    kl = algorithm.kl
    penalty = kl.placement != "none" and (kl.coef > 0 or isinstance(kl.controller, AdaptiveKl))
    return penalty or isinstance(algorithm.policy_loss, OnlinePairLoss)


def uses_reference(config: TrainConfig) -> bool:
    """Return whether a run uses a reference, in the loss or in the KL that evaluation reports.

    SFT's evaluation reports the KL only if reference.model is set: the model that SFT starts from is rarely the one
    that it should stay close to.
    """
    if isinstance(config.algorithm, Online) or isinstance(config.algorithm.loss, ReferencedLoss):
        return True
    named = config.reference.model is not None or not isinstance(config.algorithm.loss, SftLoss)
    return named and has_offline_evaluation(config)

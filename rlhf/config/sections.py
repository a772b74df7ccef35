"""What a run is: frozen, closed sections; every field's docstring is its help text. Sizes are global."""

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
from rlhf.config.judge import ChatPairsConfig
from rlhf.config.reward import ModelSource, RewardConfig, RewardSourceConfig
from rlhf.config.sharding import ShardingConfig

Dtype = Literal["float32", "bfloat16", "float64"]
LogProbs = Literal["auto", "naive", "chunked"]
Packing = Literal["auto", "off"]
HeadDtype = Literal["float32", "model"]
OldLogProbs = Literal["auto", "sampler", "trainer"]


class RunConfig(Section):
    """Identity of the run."""

    name: str = "run"
    """Shown in the report and the progress display."""
    seed: int = 0
    """The one seed; every generator is derived from it."""
    out_dir: str = "runs/run"
    """The run folder: configuration, metrics, samples, checkpoints, report."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    keep_memory: bool = True
    """On a CPU under Linux: keep freed memory for the next tensors instead of returning it at every step (glibc's
    mallopt). Faster; the peak may be higher."""
    cache_dir: str | None = None
    """Where reference log-probabilities are kept between runs; null: $XDG_CACHE_HOME/rlhf, or ~/.cache/rlhf."""


class LoraConfig(Section):
    """Low-rank adapters through peft; the reference is the same weights with the adapter off."""

    r: Count = 16
    """Rank."""
    alpha: Positive = 32.0
    """Scale: the adapter is multiplied by alpha / r."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Which modules get an adapter."""


class OptimizerConfig(Section):
    """AdamW and its limits, for one trained model."""

    lr: NonNegative = 1e-6
    """Peak learning rate; 0 trains nothing, to try a run out."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon, outside the square root as in PyTorch."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """adamw_8bit keeps Adam's moments in 8 bits (bitsandbytes): a quarter of their memory; not with DeepSpeed, which
    splits them instead. sgd is plain and stateless: for equivalence tests."""


class PolicyConfig(OptimizerConfig):
    """The model being trained."""

    model: str
    """Folder or hub id of a causal LM."""
    tokenizer: str | None = None
    """Folder or hub id; null: the model's own."""
    dtype: Dtype = "float32"
    """bfloat16: arithmetic in bf16 over float32 weights; else both. Log-probabilities are in float32 at least."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate and export an exponential moving average of the weights, with this decay per step; null: off."""
    log_probs: LogProbs = "auto"
    """chunked: logits of a few completion tokens at a time, never of the whole batch; naive: all at once; auto:
    chunked where the model allows it. The numbers are the same to rounding."""
    head_dtype: HeadDtype = "float32"
    """float32: in a run in bfloat16 the logits are float32 all the same (on a CPU the head's whole product, on a GPU
    its sum and result); model: bfloat16, as the model's own head gives them: log-probabilities are .02 nats off."""
    packing: Packing = "auto"
    """auto: rows go through the model without padding, those of one prompt share it, and layers of known families are
    written out, where the model allows that; off: as a padded rectangle, through the model's own modules. Also of
    reference, critic and reward model. The numbers are the same to rounding."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the exported weights. auto: each in the dtype it had in the checkpoint (from a GGUF file: bfloat16); a run
    says so where rounding to it takes away most of what training changed. Checkpoints inside a run are exact."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. Off unless asked for by name."""


class ReferenceConfig(Section):
    """The frozen policy that the KL, or a preference loss, is against."""

    model: str | None = None
    """null: the policy as it was at step 0 (with LoRA: the adapter switched off)."""
    measure: bool = True
    """Measure the KL to it where the algorithm has no KL penalty (online). false: none is loaded, and a step saves its
    pass over the completions."""


class CriticConfig(OptimizerConfig):
    """The value function: a backbone with a scalar head."""

    lr: NonNegative = 5e-6
    """Peak learning rate; 0 trains nothing, to try a run out."""
    init: str = "auto"
    """policy: its backbone with a new head (zero); reward: the reward model of reward.source, head included;
    a folder: that reward model; auto: reward where reward.source is a model, else policy."""
    shared: bool = False
    """Put the value head on the policy's own backbone: half the memory, coupled gradients."""
    warmup_steps: Size = 0
    """First train only the critic for so many steps."""


class SamplingConfig(Section):
    """How completions are drawn: from the full distribution, so that ratios and KL mean what they say."""

    backend: Literal["auto", "fast", "hf"] = "auto"
    """fast: our own decoding over the live weights; hf: transformers' generate; auto: fast where it knows the model."""
    completions_per_prompt: Count = 1
    """The group size."""
    max_new_tokens: Count = 128
    """Longest completion, EOS included."""
    temperature: Positive = 1.0
    """Divides the logits here and wherever an online run computes log-probabilities of its completions. Losses over
    data (sft, the DPO family, the ptx term) are at 1 whatever this is."""
    batch_size: Count = 256
    """Rows decoded together per process; memory only."""
    old_log_probs: OldLogProbs = "auto"
    """Whose log-probabilities of the completions the update's ratios are against. trainer: those of one more forward
    pass; sampler: those it drew by; auto: the sampler's, except in bfloat16, with a shared critic, or at a step where
    they differ from the trainer's on the rows that are compared."""


class OverlapConfig(Section):
    """What is done at the same time. Off by default, for one process."""

    reward_parts: Count = 1
    """A step's prompts are sampled in so many parts, and each is scored in a thread while the next is sampled. The same
    numbers to rounding; for rewards that wait, as servers do. 1: off."""
    ahead: bool = False
    """A step's completions are drawn while the step before it updates, by the policy as it was before that update: one
    step off-policy, corrected for by ratio_cap. Takes the memory of one more policy."""
    ratio_cap: Positive = 2.0
    """Where ahead: each token's advantage is multiplied by pi_old / pi_sampler, at most this (truncated importance
    sampling, Espeholt et al. 2018)."""


class BatchConfig(Section):
    """The sizes. All global but those of micro-batches, which are about memory only."""

    prompts_per_step: Count = 64
    """Prompts (online), examples, pairs or, for KTO, completions (offline) per step, over all processes."""
    epochs: Count = 1
    """Passes over a step's experience (online)."""
    minibatches: Count = 1
    """Optimizer steps per epoch (online)."""
    micro_batch_size: Count = 16
    """Rows (for preference losses, pairs) per forward and backward pass per process; never changes a result."""
    micro_batch_tokens: Count | None = None
    """Live tokens per pass instead of rows: as many rows as have no more of them together, at least one. For rows of
    very different lengths; never changes a result. null: micro_batch_size decides."""


class ScheduleConfig(Section):
    """How long, and the learning rate on the way."""

    steps: Count | None = None
    """Steps of the run; give this or epochs."""
    epochs: Positive | None = None
    """Passes over the data instead of steps."""
    warmup_steps: Size = 0
    """The learning rate rises linearly over the first so many steps."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall towards zero, which the step after the last would have."""
    max_bad_steps: Count = 10
    """So many optimizer steps in a row that a NaN or Inf in loss, gradient or scores prevents, and the run stops."""

    @model_validator(mode="after")
    def _one_length(self) -> ScheduleConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give schedule.steps or schedule.epochs, one of the two (the other null)")
        return self


class CheckpointConfig(Section):
    """When state is saved and what a restart does."""

    every: Size = 50
    """Steps between checkpoints; 0: only at the end and on interruption."""
    keep: Count = 2
    """How many are kept; the oldest go first."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest whole checkpoint; never: refuse a folder that has one."""


class LoggingConfig(Section):
    """What is written down."""

    every: Count = 1
    """Steps between lines of metrics.jsonl."""
    samples: Size = 4
    """Completions of each logged step kept in samples.jsonl."""
    backends: list[Literal["tensorboard", "wandb"]] = []
    """Trackers besides metrics.jsonl, through accelerate."""


class EvalConfig(Section):
    """Evaluation on held-out data during the run."""

    every: Size = 50
    """Steps between evaluations; 0: only before the first and after the last step."""
    source: RewardSourceConfig | None = None
    """The judge; null: the reward that is trained on."""
    judge: ChatPairsConfig | None = None
    """A language model that says which of two completions is better, besides the scores; for rlhf eval only."""
    greedy: bool = False
    """Score greedy completions too."""
    samples: Size = 64
    """Held-out completions kept in samples.jsonl at each evaluation."""


class TrainConfig(Section):
    """One training run: SFT, or any online or offline algorithm."""

    run: RunConfig = RunConfig()
    """Identity."""
    data: DataConfig = DataConfig()
    """Data sets."""
    policy: PolicyConfig
    """The model being trained."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen policy."""
    critic: CriticConfig = CriticConfig()
    """The value function (GAE only)."""
    reward: RewardConfig | None = None
    """Where scores come from (online)."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are drawn (online, and evaluation)."""
    algorithm: Algorithm
    """The four axes of an online algorithm, or an offline loss."""
    overlap: OverlapConfig = OverlapConfig()
    """What is done at the same time (online)."""
    batch: BatchConfig = BatchConfig()
    """Sizes."""
    sharding: ShardingConfig = ShardingConfig()
    """How the run is spread over processes."""
    schedule: ScheduleConfig = ScheduleConfig(steps=100)
    """Length and learning rate."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    logging: LoggingConfig = LoggingConfig()
    """What is written down."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during the run."""

    @model_validator(mode="after")
    def _coherent(self) -> TrainConfig:
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
        if not self.reference.measure and reference_is_learned_from(algorithm):
            raise ValueError(
                "reference.measure is false, but the loss or the reward has a KL to the reference: "
                "set algorithm.kl.coef=0, or reference.measure=true"
            )
        self._check_choice(algorithm)
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
        """Check the critic of an algorithm that has one; another's critic section is unread, which is a warning."""
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
        """That what is drawn ahead is all that is drawn, and that a weight can correct for it."""
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

    def _check_choice(self, algorithm: Online) -> None:
        """That there is something to choose from, and enough of it to cut into minibatches."""
        how, size = algorithm.advantage, self.sampling.completions_per_prompt
        if not isinstance(how, Best | BestAndWorst):
            return
        if isinstance(how, BestAndWorst) and size < 2:
            raise ValueError("a pair of a prompt's completions needs sampling.completions_per_prompt >= 2")
        if isinstance(how, Best) and how.keep >= size and how.min_score is None:
            raise ValueError(
                f"advantage.keep is {how.keep} of {size} completions, so nothing is chosen: "
                "set sampling.completions_per_prompt higher, or advantage.min_score"
            )
        learned = self.batch.prompts_per_step * (min(how.keep, size) if isinstance(how, Best) else 1)
        if learned < self.batch.minibatches:
            what = "completions are kept" if isinstance(how, Best) else "pairs are made"
            raise ValueError(f"batch.minibatches is {self.batch.minibatches}, but at most {learned} {what} in a step")


class RewardModelLoss(Section):
    """Bradley-Terry, with the optional margin and centering of reward_model.losses."""

    use_margin: bool = False
    """Subtract the data's margin column from the score difference (Touvron et al. 2023, eq. 2)."""
    centering: NonNegative = 0.0
    """Weight of (r_chosen + r_rejected)^2, which holds scores near zero (Eisenstein et al. 2023); 0.01 is usual."""


class CalibrationConfig(Section):
    """The shift and scale stored in the model so that scores have mean 0 and std 1 on reference completions."""

    data: Literal["chosen", "both", "none"] = "both"
    """Which completions of the training pairs are the reference; none: leave scores as they are."""
    limit: Count = 1024
    """How many completions."""


class RewardModelConfig(Section):
    """One reward-model training run."""

    run: RunConfig = RunConfig()
    """Identity."""
    data: DataConfig
    """data.preferences, data.eval_preferences and the chat template."""
    model: PolicyConfig
    """The backbone to start from, usually the SFT model, and its optimizer."""
    loss: RewardModelLoss = RewardModelLoss()
    """Bradley-Terry."""
    calibration: CalibrationConfig = CalibrationConfig()
    """Mean and scale of scores."""
    batch: BatchConfig = BatchConfig()
    """Sizes; prompts_per_step counts pairs."""
    sharding: ShardingConfig = ShardingConfig()
    """How the run is spread over processes."""
    schedule: ScheduleConfig = ScheduleConfig(epochs=1.0)
    """Length and learning rate."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    logging: LoggingConfig = LoggingConfig()
    """What is written down."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during the run."""

    @model_validator(mode="after")
    def _has_pairs(self) -> RewardModelConfig:
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


def online(config: TrainConfig) -> Online:
    """The algorithm of a run that is known to be online."""
    assert isinstance(config.algorithm, Online)
    return config.algorithm


def offline(config: TrainConfig) -> Offline:
    """The algorithm of a run that is known to be offline."""
    assert isinstance(config.algorithm, Offline)
    return config.algorithm


def judged(config: TrainConfig) -> bool:
    """Whether an offline run samples held-out completions and has a judge for them."""
    return config.data.eval_prompts is not None and config.eval.source is not None


def reference_is_learned_from(algorithm: Online) -> bool:
    """Whether a gradient or a reward of an online run depends on the reference."""
    kl = algorithm.kl
    penalty = kl.placement != "none" and (kl.coef > 0 or isinstance(kl.controller, AdaptiveKl))
    return penalty or isinstance(algorithm.policy_loss, OnlinePairLoss)


def reads_reference(config: TrainConfig) -> bool:
    """Whether a reference has a part in this run: in the loss, or in the KL that evaluation reports.

    SFT's evaluation reports it where reference.model names one: what SFT starts from is rarely what it is to stay near.
    """
    if isinstance(config.algorithm, Online) or isinstance(config.algorithm.loss, ReferencedLoss):
        return True
    named = config.reference.model is not None or not isinstance(config.algorithm.loss, SftLoss)
    return named and judged(config)

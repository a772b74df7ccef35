"""The sections of a training run and of a reward-model run, and the checks across them.

Every field's docstring is its help text and its entry in docs/configuration. Sizes are global, over all processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field, field_validator, model_validator

from rlhf.algorithms.advantage import StepSizes
from rlhf.algorithms.correction import Correction
from rlhf.algorithms.offline import Offline
from rlhf.algorithms.online import Online
from rlhf.config.algorithm import Algorithm
from rlhf.config.data import (
    PROMPTS_NEEDED,
    Count,
    DataConfig,
    OnlineDataConfig,
    PreferencesConfig,
    RewardModelDataConfig,
    SftConfig,
    Size,
)
from rlhf.config.offload import OffloadConfig
from rlhf.config.reward import (
    CalibrationConfig,
    ChatPairsConfig,
    EnsembleConfig,
    RewardConfig,
    RewardModelLoss,
    StepLabelsConfig,
)
from rlhf.config.run import (
    CheckpointConfig,
    CostConfig,
    Dtype,
    GuardConfig,
    LoggingConfig,
    RunConfig,
    ScheduleConfig,
    ShardingConfig,
)
from rlhf.config.weights import Export, TrainedWeightsConfig, WeightsConfig
from rlhf.environments.section import EnvironmentConfig
from rlhf.model_files import count_parameters
from rlhf.rewards.source import Source
from rlhf.section import Facts, Needed, NonNegative, OneOf, Positive, Rule, Section
from rlhf.serving.server import Server
from rlhf.teachers.teacher import Teacher

LogProbs = Literal["auto", "naive", "chunked"]
Packing = Literal["auto", "off"]
HeadDtype = Literal["float32", "model"]
OldLogProbs = Literal["auto", "sampler", "trainer"]
Decay = Annotated[float, Field(ge=0, lt=1)]
HeadInit = Literal["zero", "normal", "orthogonal"]


class OptimizerConfig(Section):
    """The optimizer of one trained model: learning rate, moments, gradient clipping."""

    lr: NonNegative = 1e-6
    """Peak learning rate; 0 trains nothing (for trial runs)."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
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

    def check_optimizer(self, section: str, dtype: Dtype, sharding: ShardingConfig) -> None:
        """Check that the optimizer can train weights of this dtype, sharded like this; errors name the `section`."""
        if sharding.uses_deepspeed and dtype == "float64":
            raise ValueError(
                f"{section}.dtype is float64, but DeepSpeed steps in float32: set sharding=ddp, or float32"
            )
        if self.optimizer != "adamw_8bit":
            return
        if sharding.uses_deepspeed:
            raise ValueError(
                f"{section}.optimizer is adamw_8bit, which DeepSpeed cannot split: set sharding=ddp or none, or adamw"
            )
        if dtype == "float64":
            raise ValueError(
                f"{section}.optimizer is adamw_8bit, which has no float64: set {section}.dtype=float32, or adamw"
            )


class PolicyConfig(OptimizerConfig, TrainedWeightsConfig):
    """The model being trained."""

    lr: NonNegative = 1e-6
    """Peak learning rate; 0 trains nothing (for trial runs). If it is not set, an online run of a model with 50 to 300
    million parameters uses 2e-5, or 2e-4 with adapters: at 1e-6 such a model hardly changes."""
    model: str
    """Folder or hub id of a causal language model."""
    tokenizer: str | None = None
    """Folder or hub id; null: the model's tokenizer."""
    dtype: Dtype = "float32"
    """bfloat16: bf16 arithmetic over float32 weights, which are dithered once so that rounding hides no small step;
    otherwise weights and arithmetic are in this dtype. Log-probabilities are computed in float32 or better. On a CUDA
    GPU the default is bfloat16. A CPU whose bfloat16 products are slower (most without AMX) computes in float32
    instead, and the run reports it."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate and export an exponential moving average of the weights, with this decay per step; null: off."""
    log_probs: LogProbs = "auto"
    """chunked: logits of a few completion tokens at a time, never of the whole batch; naive: all at once; auto:
    chunked if the model allows it. The results are the same up to rounding."""
    head_dtype: HeadDtype = "float32"
    """float32: logits are float32 even in a bfloat16 run (on a CPU the head's whole matrix product, on a GPU its
    accumulation and result); model: bfloat16 logits, with errors of about 0.02 nats in the log-probabilities."""
    packing: Packing = "auto"
    """auto: if the model supports it, rows are packed without padding, completions of one prompt share its tokens, and
    known model families use fused layers; off: padded batches through the model's own modules. Also applies to
    reference, critic and reward model. Results are equal up to rounding."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the exported weights. auto: the dtype that each weight had in the model loaded, or float32 if rounding
    to that dtype would lose more than 5 % of the change that training made, and the run says so (a start
    from a GGUF file or an adapter cannot be compared: float32; over a base in int8 or nf4 the dtype stays). Any other
    value is obeyed, and the run reports the loss; after a run in float32 whose weights are still near the start's,
    bfloat16 rounds up or down by chance, which keeps the training on average. Adapters are exported in float32.
    Checkpoints are exact."""
    export: Export = "merged"
    """The export of a run with adapters. merged: the whole model, adapters added to its weights; adapter: the adapter
    alone, which peft loads onto its base; both: the model, and the adapter in the folder adapter beside it."""
    trust_remote_code: bool = False
    """Run Python code that a hub model ships."""

    def check_export(self, section: str) -> None:
        """Check that there is an adapter if one is to be exported; errors name the `section`."""
        if self.export != "merged" and self.lora is None:
            raise ValueError(
                f"{section}.export is {self.export}, but the run trains no adapter: set {section}.lora.r=16, or "
                f"{section}.export=merged"
            )


class ReferenceConfig(WeightsConfig):
    """The frozen policy that the KL penalty or a preference loss compares with."""

    model: str | None = None
    """Folder or hub id; null: the policy as it was at step 0 (with LoRA: the adapter disabled)."""
    measure: bool = True
    """Measure the KL to the reference even if the algorithm has no KL penalty (online). false: no reference is loaded,
    and each step saves one forward pass over the completions."""

    def check_measured(self, algorithm: Online) -> None:
        """Check that the reference is there for an algorithm that trains against it."""
        if not self.measure and algorithm.trains_against_reference:
            raise ValueError(
                "reference.measure is false, but the loss or the reward has a KL to the reference: "
                "set algorithm.kl.coef=0, or reference.measure=true"
            )


SMALL_MODELS = (5e7, 3e8)  # parameters: the sizes at which SMALL_MODEL_LR is known to learn from own samples
SMALL_MODEL_LR, ADAPTER_TO_WHOLE_LR = 2e-5, 10.0
CRITIC_TO_POLICY_LR = 5.0  # a critic's learning rate, if none is set, over the policy's


class CriticConfig(OptimizerConfig, TrainedWeightsConfig):
    """The value function: a backbone with a scalar head."""

    lr: NonNegative = 5e-6
    """Peak learning rate; 0 trains nothing (for trial runs). If it is not set, it is five times policy.lr: a new
    head starts at zero, and has to learn the returns long before the policy's training ends."""
    init: str = "auto"
    """policy: the policy's backbone with a new head; reward: the reward model of reward.source, head included;
    a folder: that reward model; auto: reward if reward.source is a model, otherwise policy."""
    head: HeadInit = "zero"
    """Initialization of a new head (if init provides none). zero: all values are 0; normal: N(0, 1 / (d + 1)) for d
    inputs; orthogonal: a random vector of length 1."""
    shared: bool = False
    """Put the value head on the policy's backbone: half the memory, but coupled gradients."""
    warmup_steps: Size = 0
    """Number of initial steps that train only the critic."""
    epochs: Count | None = None
    """Passes of the critic over a step's completions: after batch.epochs, in which policy and critic train together,
    the critic goes on alone (a critic tolerates more passes over the same samples than a policy; Cobbe et al. 2020,
    PPG). null: batch.epochs."""

    def check_start(self, source: Source, old_log_probs: OldLogProbs) -> None:
        """Check that the critic can start from a reward of this source, and the settings of a shared backbone."""
        if self.shared:
            self._check_shared(old_log_probs)
        if self.init == "reward" and source.critic_start is None:
            raise ValueError("critic.init is reward, but reward.source is not a model: use critic.init=policy")

    def check_epochs(self, together: int) -> None:
        """Check that the critic trains in every epoch that it shares with the policy."""
        if self.epochs is not None and self.epochs < together:
            raise ValueError(
                f"critic.epochs is {self.epochs}, but the critic trains in each of the {together} epochs of "
                "batch.epochs: set critic.epochs to as many or more, or remove it"
            )

    def has_new_head(self, source: Source) -> bool:
        """Return whether the critic gets a new head, as far as the configuration tells."""
        return self.shared or self.init == "policy" or (self.init == "auto" and source.critic_start is None)

    def _check_shared(self, old_log_probs: OldLogProbs) -> None:
        if self.lora is not None or self.weights != "auto" or self.gradient_checkpointing:
            raise ValueError(
                "critic.lora, critic.weights and critic.gradient_checkpointing are for a critic with a backbone of its "
                "own, but critic.shared puts its head on the policy: set policy.lora, policy.weights and "
                "policy.gradient_checkpointing"
            )
        if self.init not in ("policy", "auto"):
            raise ValueError("critic.shared puts the head on the policy: critic.init must then be policy or auto")
        if self.head != "zero":
            raise ValueError(f"critic.head is {self.head}, but a shared head starts at zero: set critic.head=zero")
        if self.warmup_steps:
            raise ValueError("critic.warmup_steps trains the critic alone: not possible if critic.shared is true")
        if self.epochs is not None:
            raise ValueError("critic.epochs trains the critic alone: not possible if critic.shared is true")
        if old_log_probs == "sampler":
            raise ValueError(
                "critic.shared reads its values in the pass that sampling.old_log_probs=sampler leaves out: "
                "set sampling.old_log_probs=auto"
            )


def _uncorrected_server(sampling: SamplingConfig, facts: Facts) -> str | None:
    """Return the correction of a run whose servers round otherwise than the trainer, if it has none."""
    run = facts.run
    if not isinstance(run, OnlineConfig) or not run.algorithm.reads_weights or sampling.backend != "server":
        return None
    is_decided = sampling.correction is not None or run.overlap.ahead  # `none` by name is a decision too
    return "null" if run.policy.dtype == "bfloat16" and not is_decided else None


class SamplingConfig(Section):
    """Sampling of completions. Importance ratios and KL are exact also if top_k, top_p or min_p leave tokens out."""

    lint_rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="server-uncorrected",
            level="warning",
            key="correction",
            violation=_uncorrected_server,
            reason="In bfloat16 a server's probabilities differ from the trainer's, and nothing corrects for it.",
            source="TRL's GRPO corrects samples of vLLM by default (sequence_mask, cap 3)",
            fix="sampling.correction=sequence_mask",
        ),
    )

    backend: Literal["auto", "fast", "hf", "server"] = "auto"
    """fast: our own decoding on the live weights; hf: transformers' generate; auto: fast if it supports the model;
    server: other processes or machines, which `server` names (online training; evaluation of a finished run samples in
    its own process)."""
    server: Annotated[Server, OneOf("rlhf")] | None = None
    """The sampling servers; needed with backend=server, and unread otherwise."""
    correction: Annotated[Correction, OneOf()] | None = None
    """Importance weights for completions from another distribution than the policy's: of a server with other
    arithmetic, or of an older policy. null: none, and with overlap.ahead token_truncate with overlap.ratio_cap. A name
    alone is the correction with its usual cap."""
    completions_per_prompt: Count = 1
    """Completions sampled per prompt (the group size)."""
    max_new_tokens: Count = 128
    """Longest completion in tokens, EOS included."""
    temperature: Positive = 1.0
    """Divides the logits in sampling and in all log-probabilities of sampled completions. Losses on data sets (SFT, the
    DPO family, the ptx term) always use temperature 1."""
    copy_weights: bool = True
    """Decode from a copy of the weights in the dtype of the arithmetic (backend auto and fast). false: from the weights
    as they are kept; those in fewer bits are widened a layer at a time. It needs no memory for the copy and is slower.
    Completions are equal up to rounding."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many of the likeliest tokens; 0: from all. Completions keep the tokens that top_k, top_p and
    min_p leave, and all log-probabilities are among those tokens (docs/vllm.md)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; 1: from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from the tokens with at least this share of the largest probability; 0: from all."""
    batch_size: Count = 256
    """Rows decoded together per process; affects memory only."""
    old_log_probs: OldLogProbs = "auto"
    """Source of the old log-probabilities in the update's importance ratios. trainer: one more forward pass; sampler:
    recorded while sampling; auto: the sampler's, except in bfloat16, with a shared critic, or if they differ from the
    trainer's on the compared rows. In bfloat16, if a step is a single update on all its completions without a KL in
    the rewards, auto uses the update's own forward pass (ratio 1)."""

    @field_validator("correction", mode="before")
    @classmethod
    def _expand_name(cls, value: object) -> object:
        """Return the section for a name alone: correction=token_truncate."""
        return {"type": value} if isinstance(value, str) else value

    @property
    def leaves_out(self) -> str | None:
        """Return the first setting that leaves tokens out, as key=value; None: all tokens may be drawn."""
        settings = (("top_k", self.top_k, 0), ("top_p", self.top_p, 1.0), ("min_p", self.min_p, 0.0))
        return next((f"sampling.{name}={value:g}" for name, value, off in settings if value != off), None)

    @property
    def corrects(self) -> bool:
        """Return whether importance weights are asked for, which need the trainer's own log-probabilities."""
        return self.correction is not None and not self.correction.is_off

    def check_server(self, *, splits_weights: bool) -> None:
        """Check that servers are named if they are to sample, and that the main rank has the weights to push."""
        if self.backend != "server":
            return
        if self.server is None:
            raise ValueError(
                "sampling.backend is server, but no server is named: set sampling.server.urls=[http://127.0.0.1:8001] "
                "(rlhf serve-policy), sampling.server.launch={} to start one, or sampling.backend=auto"
            )
        if self.leaves_out is not None and not self.server.returns_support:
            raise ValueError(
                f"{self.leaves_out} leaves tokens out, and sampling.server.type={self.server.type} does not return "
                "which: log-probabilities would be wrong by the probability left out. Lower sampling.temperature "
                "instead, or use sampling.server.type=rlhf"
            )
        if splits_weights:
            raise ValueError(
                "sampling.backend=server pushes whole weights, but zero3 splits them: set sharding=zero2, or "
                "sampling.backend=auto"
            )

    def check_correction(self, *, rescues: bool) -> None:
        """Check that the importance weights can be computed."""
        if not self.corrects:
            return
        if self.old_log_probs == "sampler":
            raise ValueError(
                "sampling.correction needs the trainer's own log-probabilities: set sampling.old_log_probs=auto"
            )
        if rescues:
            raise ValueError(
                "sampling.correction would weight hinted completions twice: leave algorithm.rescue out, whose weights "
                "are algorithm.rescue.weights, or set sampling.correction=null"
            )


class OverlapConfig(Section):
    """Concurrent sampling, scoring and training. Off by default; for runs in one process."""

    reward_parts: Count = 1
    """Sample a step's prompts in this many parts and score each part in a thread while the next is sampled. For rewards
    that wait, such as servers; results are equal up to rounding. 1: off."""
    ahead: bool = False
    """Sample each step's completions during the previous update, from the policy before that update: one step
    off-policy, corrected by importance weights (ratio_cap). Needs memory for one more copy of the policy."""
    ahead_steps: Annotated[int, Field(ge=1, le=4)] = 1
    """With ahead: how many steps before its own update a step is sampled, and so the age of its policy in updates.
    More than 1 evens out steps that take longer to sample than others; each may need one more copy of the policy."""
    ratio_cap: Positive = 2.0
    """With ahead: each token's advantage is multiplied by pi_old / pi_sampler, truncated at this value (truncated
    importance sampling, Espeholt et al. 2018)."""
    trace_cap: Positive | None = None
    """With ahead and a critic: correct advantages and the critic's targets by V-trace, with ratio_cap as rho-bar and
    this as c-bar (Espeholt et al. 2018: 1 for both); null: off."""

    def check_ahead(self, algorithm: Online, old_log_probs: OldLogProbs) -> None:
        """Check that sampling ahead covers all sampling of a step and that importance weights can correct for it."""
        if self.trace_cap is not None:
            self._check_trace(algorithm)
        if not self.ahead:
            if self.ahead_steps > 1:
                raise ValueError(
                    "overlap.ahead_steps is read with overlap.ahead=true alone: set that, or leave it at 1"
                )
            return
        if algorithm.advantage.chooses_rows or algorithm.advantage.needs_greedy:
            raise ValueError(
                "overlap.ahead is incompatible with rejection_sampling, online_dpo and remax: set overlap.ahead=false"
            )
        if algorithm.refill_rounds:
            raise ValueError("overlap.ahead cannot refill groups: set algorithm.refill_rounds=0")
        if algorithm.rescue is not None:
            raise ValueError("overlap.ahead is incompatible with algorithm.rescue: remove one of the two")
        if algorithm.curriculum is not None:
            raise ValueError("overlap.ahead is incompatible with algorithm.curriculum: remove one of the two")
        if self.reward_parts > 1:
            raise ValueError("overlap.ahead samples each step as a whole: set overlap.reward_parts=1")
        if old_log_probs == "sampler":
            raise ValueError("overlap.ahead needs the trainer's own log-probabilities: set sampling.old_log_probs=auto")

    @property
    def copies(self) -> int:
        """Return how many copies of the policy's weights sampling ahead may need.

        One step ahead there is one copy, for sampling. Further ahead each waiting draw has a copy, and two more exist.
        """
        return (1 if self.ahead_steps == 1 else self.ahead_steps + 2) if self.ahead else 0

    def _check_trace(self, algorithm: Online) -> None:
        if not self.ahead:
            raise ValueError("overlap.trace_cap corrects completions sampled ahead: set overlap.ahead=true, or null")
        if not algorithm.advantage.corrects_stale:
            raise ValueError(
                "overlap.trace_cap is V-trace, which corrects a critic's targets: it needs advantage.type=gae, and "
                f"that is {algorithm.advantage.type}. Set overlap.trace_cap=null"
            )
        if self.trace_cap is not None and self.trace_cap > self.ratio_cap:
            raise ValueError("overlap.trace_cap must not be above overlap.ratio_cap, as in V-trace")


class BatchConfig(Section):
    """Batch sizes. All are global, except the micro-batch sizes, which affect memory only."""

    prompts_per_step: Count = 64
    """Per step and over all processes: prompts (online); examples, pairs or, for KTO, completions (offline)."""
    epochs: Count = 1
    """Passes over a step's completions (online)."""
    minibatches: Count = 1
    """Optimizer steps per epoch (online)."""
    shuffle: bool = True
    """Shuffle a step's completions into minibatches, again in every epoch (online). false: keep the order of sampling
    in every epoch."""
    micro_batch_size: Count = 16
    """Rows (for preference losses, pairs) per forward and backward pass and process; does not change results."""
    micro_batch_tokens: Count | None = None
    """Limit each pass by tokens (without padding) instead of rows; at least one row. Useful if row lengths vary a lot;
    does not change results. null: micro_batch_size applies."""


class EvalConfig(Section):
    """Evaluation on held-out data during the run."""

    every: Size = 50
    """Steps between evaluations; 0: only before the first and after the last step."""
    prompts: Count | None = None
    """Evaluate on the first so many held-out prompts; null: all. rlhf eval and rlhf compare judge a finished run on
    all of them."""
    source: Annotated[Source, OneOf()] | None = None
    """The judge of held-out completions; null: the reward that the run trains on."""
    judge: ChatPairsConfig | None = None
    """A language model that compares two completions; used only by rlhf eval."""
    greedy: bool = False
    """Also score greedy completions."""
    samples: Size = 64
    """Held-out completions to keep in samples.jsonl at each evaluation."""


@runtime_checkable
class Validation(Protocol):
    """The part of pydantic's ValidationInfo that is read here."""

    @property
    def context(self) -> Any:
        """Return what the caller of the validation gave: None, or "trains" and "parameters"."""


def is_trained(info: Validation) -> bool:
    """Return whether a run with these settings trains a model. A comparison also judges models without training."""
    return info.context is None or bool(info.context["trains"])


class TrainSections(Section):
    """The sections of a training run; `OnlineConfig` and `OfflineConfig` say which of them a run needs."""

    run: RunConfig = RunConfig()
    """Name, seed, folder and device of the run."""
    data: DataConfig = DataConfig()
    """The data sets."""
    policy: Annotated[PolicyConfig, Needed("set policy.model")]
    """The model being trained."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen policy to compare with."""
    teacher: Annotated[Teacher, OneOf("model")] | None = None
    """The source of the distributions that the policy is distilled from (presets distill, opd, minillm and
    distill_sft); null: no teacher."""
    critic: CriticConfig = CriticConfig()
    """The value function (GAE only)."""
    reward: RewardConfig | None = None
    """The source of scores and their shaping (online)."""
    environment: EnvironmentConfig | None = None
    """An environment that answers the policy over several turns, and gives the rewards (docs/agents.md); null: none."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of completions (online runs and evaluation)."""
    algorithm: Algorithm
    """Advantage, policy loss, value loss and KL of an online algorithm, or an offline loss."""
    overlap: OverlapConfig = OverlapConfig()
    """Concurrent sampling, scoring and training (online)."""
    offload: OffloadConfig = OffloadConfig()
    """Models, moments and copies that leave the GPU while a part of a step does not read them (online)."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes."""
    sharding: ShardingConfig = ShardingConfig()
    """Distribution over processes."""
    schedule: ScheduleConfig = ScheduleConfig(steps=100)
    """Length and learning-rate schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    logging: LoggingConfig = LoggingConfig()
    """Metrics, samples and trackers."""
    cost: CostConfig = CostConfig()
    """The price of the machine."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during the run."""
    guard: GuardConfig = GuardConfig()
    """Checks before the run and alarms during it."""
    plugins: list[str] = []
    """Your own files and modules that define losses, advantages, rewards, suites or alarms, as in [my_losses.py]."""

    @model_validator(mode="after")
    def _name_run(self) -> TrainSections:
        """Fill in the algorithm's name: the section is replaced in place, since every section is frozen."""
        self.__dict__["run"] = self.run.named_after(self.algorithm.name)
        return self

    @property
    def reference_model(self) -> str | None:
        """Return the model of the reference: reference.model, or the teacher that takes its place; None: the start."""
        if self.teacher is not None and self.algorithm.replaces_reference:
            return self.teacher.as_reference
        return self.reference.model

    @property
    def trusts_reference(self) -> bool:
        """Return whether the reference may run Python code that its model ships."""
        is_teacher = self.teacher is not None and self.algorithm.replaces_reference
        return self.policy.trust_remote_code or (is_teacher and bool(getattr(self.teacher, "trust_remote_code", False)))

    @model_validator(mode="before")
    @classmethod
    def _reward_of_environment(cls, tree: Any) -> Any:
        """Let the environment give the scores, if it is set and no source of scores is set."""
        if not isinstance(tree, Mapping) or tree.get("environment") is None:
            return tree
        reward = tree.get("reward")
        if reward is None or (isinstance(reward, Mapping) and reward.get("source") is None):
            return {**tree, "reward": {**(reward or {}), "source": {"type": "environment"}}}
        return tree

    @model_validator(mode="after")
    def _check_environment(self) -> TrainSections:
        sources = [("eval.source", self.eval.source), ("reward.source", self.reward.source if self.reward else None)]
        for key, source in sources:
            if source is not None and source.reads_episodes and self.environment is None:
                raise ValueError(f"{key}.type is {source.type}, but there is no environment: set environment.target")
        budget = self.environment.max_tokens if self.environment is not None else None
        if budget is not None and budget < self.sampling.max_new_tokens:
            raise ValueError(
                f"environment.max_tokens is {budget}, less than one action (sampling.max_new_tokens="
                f"{self.sampling.max_new_tokens}): raise it, or leave it null"
            )
        return self

    @property
    def longest_completion(self) -> int:
        """Return the most tokens that the policy draws for a row, over all turns of an episode."""
        turns = 1 if self.environment is None else self.environment.max_turns
        return turns * self.sampling.max_new_tokens

    @model_validator(mode="after")
    def _check_policy(self) -> TrainSections:
        self.policy.check_optimizer("policy", self.policy.dtype, self.sharding)
        self.policy.check_export("policy")
        self.run.check_dtype("policy", self.policy.dtype)
        self.reference.check_kept("reference", self.policy.dtype, self.sharding)
        if self.policy.lora is not None and self.reference_model is None and self.reference.weights != "auto":
            raise ValueError(
                f"reference.weights is {self.reference.weights}, but the reference is the policy without its adapter: "
                "set policy.weights instead"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher(self, info: Validation) -> TrainSections:
        algorithm, teacher = self.algorithm, self.teacher
        if not is_trained(info):
            return self
        if teacher is None:
            if algorithm.reads_teacher:
                raise ValueError(f"teacher is missing: {algorithm.name} learns from one; set teacher.model")
            return self
        if not algorithm.reads_teacher:
            raise ValueError(
                f"teacher is set, but {algorithm.name} reads none: choose algorithm.preset=distill, opd, minillm or "
                "distill_sft, or set algorithm.kl.to=teacher"
            )
        if algorithm.replaces_reference:
            if teacher.as_reference is None:
                raise ValueError(
                    "kl.to=teacher reads the log-probability of every sampled token, which "
                    f"teacher.type={teacher.type} does not give: set teacher.type=model, or algorithm.preset=distill"
                )
            if self.reference.model is not None:
                raise ValueError("kl.to=teacher puts the teacher in place of the reference: leave reference.model out")
        if algorithm.compares_with_teacher and self.sharding.stage == 3:
            raise ValueError(
                f"a comparison with a teacher needs whole LM heads, which sharding={self.sharding.mode} splits: set "
                "sharding=zero2, or algorithm.preset=opd"
            )
        return self


class OnlineConfig(TrainSections):
    """A run that samples from the policy it trains, and scores these samples."""

    data: Annotated[OnlineDataConfig, PROMPTS_NEEDED]
    """The data sets."""
    reward: Annotated[
        RewardConfig, Needed("set reward.source, e.g. reward.source.type=model reward.source.path=runs/reward_model")
    ]
    """The source of scores and their shaping (online)."""
    algorithm: Annotated[Online, Needed("set algorithm.preset, e.g. algorithm.preset=grpo")]
    """Advantage, policy loss, value loss and KL."""

    @property
    def completions_per_step(self) -> int:
        """Return how many completions a step samples."""
        return self.batch.prompts_per_step * self.sampling.completions_per_prompt

    @property
    def remembers_prompts(self) -> bool:
        """Return whether the sampler keeps the keys and values of a prompt for the next turn of its episode."""
        samples_fast = self.sampling.backend in ("auto", "fast")
        return self.environment is not None and self.environment.remembers_prompts and samples_fast

    @property
    def update_gives_old_log_probs(self) -> bool:
        """Return whether a step's old log-probabilities come from its update's own pass.

        That takes an update of one optimizer step, nothing before it that reads them, and completions of the policy
        that is trained. In float32 the sampler's serve as well, for all algorithms.
        """
        is_asked = self.policy.dtype == "bfloat16" and self.sampling.old_log_probs == "auto"
        is_one_step = self.batch.epochs == self.batch.minibatches == 1
        is_read_before = (
            self.overlap.ahead
            or self.sampling.corrects
            or self.critic.shared
            or self.algorithm.reads_old_log_probs_before_update
        )
        return is_asked and is_one_step and not is_read_before

    @model_validator(mode="after")
    def _scale_rates(self, info: Validation) -> OnlineConfig:
        """Fill in learning rates that are not set; a section is replaced in place, since every section is frozen."""
        if is_trained(info) and "lr" not in self.policy.model_fields_set and not self.algorithm.policy_loss.searches:
            parameters = (info.context or {}).get("parameters") or count_parameters(self.policy.model)
            if parameters is not None and SMALL_MODELS[0] <= parameters < SMALL_MODELS[1]:
                lr = SMALL_MODEL_LR * (1.0 if self.policy.lora is None else ADAPTER_TO_WHOLE_LR)
                self.__dict__["policy"] = self.policy.model_copy(update={"lr": lr})
                self.policy.model_fields_set.discard("lr")  # the user did not set it
        is_read = self.algorithm.advantage.needs_critic and not self.critic.shared
        if is_read and "lr" not in self.critic.model_fields_set:
            lr = float(f"{CRITIC_TO_POLICY_LR * self.policy.lr:.12g}")  # 5e-6 for 1e-6, and not 4.9999999999999996e-06
            self.__dict__["critic"] = self.critic.model_copy(update={"lr": lr})
        return self

    @model_validator(mode="after")
    def _check_sections(self, info: Validation) -> OnlineConfig:
        if is_trained(info):
            self._check_training()
        self._check_episodes()
        return self

    @property
    def has_chosen_rate(self) -> bool:
        """Return whether the model's size chose the learning rate."""
        return "lr" not in self.policy.model_fields_set and self.policy.lr != PolicyConfig.model_fields["lr"].default

    def _check_training(self) -> None:
        """Check the settings that only training reads."""
        old_log_probs = self.sampling.old_log_probs
        self.policy.check_trained("policy", self.policy.dtype, self.sharding, is_online=True)
        if self.algorithm.policy_loss.searches and self.policy.rounds_trained:
            raise ValueError(
                "policy.weights is bfloat16, in which a step that is searched cannot be set exactly: set "
                "policy.weights=auto, or train adapters (policy.lora.r=16)"
            )
        self.reference.check_measured(self.algorithm)
        self.overlap.check_ahead(self.algorithm, old_log_probs)
        self.offload.check_run(self.sharding, ahead=self.overlap.ahead, reward_parts=self.overlap.reward_parts)
        self.sampling.check_server(splits_weights=self.sharding.stage == 3)
        if self.sampling.correction is not None and self.overlap.trace_cap is not None:
            raise ValueError(
                "sampling.correction and overlap.trace_cap both weight stale completions: leave one of them null"
            )
        self.sampling.check_correction(rescues=self.algorithm.rescue is not None)
        self._check_support()
        self.data.check_ptx(self.algorithm.ptx_coef)
        if self.algorithm.rescue is not None:
            prompts = self.data.prompts
            self.algorithm.rescue.check_run(old_log_probs, prompts.first_tokens, is_plain=prompts.is_plain)
        if self.algorithm.curriculum is not None:
            self.algorithm.curriculum.check_run(is_plain=self.data.prompts.is_plain)
        if self.algorithm.advantage.needs_critic:  # without a critic the section is unread, which is a warning
            self.critic.check_optimizer("critic", self.policy.dtype, self.sharding)
            self.critic.check_trained("critic", self.policy.dtype, self.sharding, is_online=True)
            self.critic.check_start(self.reward.source, old_log_probs)
            self.critic.check_epochs(self.batch.epochs)
        self.algorithm.check_sizes(self._step_sizes)
        self.algorithm.policy_loss.check_run(
            sharding=self.sharding.mode,
            splits_weights=self.sharding.uses_deepspeed,
            shares_backbone=self.critic.shared and self.algorithm.value_loss is not None,
        )
        if self.teacher is not None and not self.teacher.answers_anything:
            raise ValueError(
                f"teacher.type={self.teacher.type} has answers for given completions only: use "
                "algorithm.preset=distill_sft, or teacher.type=model or server"
            )
        self.reward.shaping.check_length(self.sampling.max_new_tokens)
        self.reward.check_process(self.algorithm)
        self.reward.check_gdpo(self.algorithm, reward_parts=self.overlap.reward_parts)
        self.reward.check_cost(self.algorithm)

    def _check_support(self) -> None:
        """Check that nothing reads whole distributions if top_k, top_p or min_p leave tokens out of sampling."""
        setting = self.sampling.leaves_out
        if setting is None:
            return
        loss = self.algorithm.policy_loss
        for other, is_on in (
            ("environment", self.environment is not None),
            ("algorithm.rescue", self.algorithm.rescue is not None),
            (f"algorithm.preset={self.algorithm.name}", loss.pair_loss is not None or loss.searches),
            ("the teacher of the loss", self.algorithm.compares_with_teacher),
            (f"sharding={self.sharding.mode}", self.sharding.stage == 3),
        ):
            if is_on:
                raise ValueError(
                    f"{setting} cannot be combined with {other}, which reads log-probabilities among all tokens: "
                    "remove it, and lower sampling.temperature instead"
                )

    def _check_episodes(self) -> None:
        """Check the settings that episodes exclude, and leave cut ones out of the loss if that is asked for."""
        turn_lambda = getattr(self.algorithm.advantage, "turn_lambda", None)
        if self.environment is None:
            if turn_lambda is not None:
                raise ValueError("algorithm.advantage.turn_lambda is for the turns of an environment: leave it null")
            return
        self.environment.check_run(self._unsupported_with_episodes())
        if self.environment.truncation == "drop":
            self.__dict__["algorithm"] = self.algorithm.leaving_out_cut()

    def _unsupported_with_episodes(self) -> dict[str, str]:
        """Return the settings that are on and that no episode can be combined with, with what to set instead."""
        algorithm, shaping = self.algorithm, self.reward.shaping
        drops = self.environment is not None and self.environment.truncation == "drop"
        bootstraps = self.environment is not None and self.environment.truncation == "bootstrap"
        has_turns = self.environment is not None and self.environment.max_turns > 1
        pays_turns = has_turns and not (algorithm.advantage.is_group or algorithm.advantage.chooses_rows)
        settings = {
            "reward.source": (
                not self.reward.source.reads_episodes,
                "the environment gives the rewards; leave reward.source out, or call it in step",
            ),
            "algorithm.advantage.type=greedy": (
                algorithm.advantage.needs_greedy,
                "the greedy episode would meet another instance of the task; use rloo, grpo or ppo",
            ),
            "reward.process": (self.reward.process is not None, "give the reward of each turn in step"),
            "algorithm.rescue": (algorithm.rescue is not None, "give the hint as the first observation"),
            "overlap.ahead": (self.overlap.ahead, "set overlap.ahead=false"),
            "overlap.reward_parts": (self.overlap.reward_parts > 1, "set overlap.reward_parts=1"),
            "reward.shaping.overlong_buffer": (
                shaping.overlong_buffer > 0,
                "a length is an action's, not an episode's; give the penalty in step",
            ),
            "reward.shaping.clip": (
                pays_turns and shaping.clip is not None,
                "the last turn alone would pay for the clipped part of the return; clip the rewards in step, and set "
                "reward.shaping.clip=null",
            ),
            "reward.shaping.normalize=standardize": (
                pays_turns and shaping.normalize == "standardize",
                "the last turn alone would pay for the mean; set reward.shaping.normalize=scale",
            ),
            "environment.truncation=drop with a loss of pairs": (
                drops and algorithm.policy_loss.pair_loss is not None,
                "it leaves out single episodes, and a pair has two; set environment.truncation=zero",
            ),
            "environment.truncation=bootstrap without a critic": (
                bootstraps and not algorithm.advantage.needs_critic,
                "set environment.truncation=zero, or a preset with a critic (ppo)",
            ),
        }
        return {name: cure for name, (is_on, cure) in settings.items() if is_on}

    @property
    def _step_sizes(self) -> StepSizes:
        return StepSizes(
            prompts=self.batch.prompts_per_step,
            group_size=self.sampling.completions_per_prompt,
            epochs=self.batch.epochs,
            minibatches=self.batch.minibatches,
        )


class OfflineConfig(TrainSections):
    """A run that learns from a fixed data set: SFT, or a preference loss."""

    algorithm: Offline
    """The loss."""

    @property
    def completions_per_step(self) -> int:
        """Return how many completions a step reads: 2 for each pair, 1 for each row of SFT or KTO."""
        return self.batch.prompts_per_step * self.algorithm.loss.completions_per_row

    @property
    def sft_data(self) -> SftConfig:
        """Return the data set of SFT.

        Raises:
            ValueError: it is missing.
        """
        if self.data.sft is None:
            raise ValueError("data.sft is missing: SFT needs texts to imitate; set data.sft.path")
        return self.data.sft

    @property
    def preference_data(self) -> PreferencesConfig:
        """Return the data set of a preference loss.

        Raises:
            ValueError: it is missing.
        """
        if self.data.preferences is None:
            what = "pairs or labelled completions" if self.algorithm.loss.data == "labelled" else "pairs"
            raise ValueError(
                f"data.preferences is missing: {self.algorithm.name} needs {what}; set data.preferences.path"
            )
        return self.data.preferences

    @property
    def held_out_source(self) -> Source | None:
        """Return the source that scores sampled held-out completions; None if the run samples none."""
        if self.data.eval_prompts is None:
            return None
        of_environment = self.reward.source if self.environment is not None and self.reward is not None else None
        return self.eval.source or of_environment

    @property
    def uses_reference(self) -> bool:
        """Return whether the run uses a reference, in the loss or in the KL that evaluation reports.

        SFT's evaluation reports the KL only if reference.model is set: the model that SFT starts from is rarely the one
        that it should stay close to.
        """
        if self.algorithm.loss.needs_reference:
            return True
        is_named = self.reference.model is not None or self.algorithm.loss.data != "demonstrations"
        return is_named and self.held_out_source is not None

    @model_validator(mode="after")
    def _check_data_and_sizes(self, info: Validation) -> OfflineConfig:
        if not is_trained(info):
            return self
        is_sft = self.algorithm.loss.data == "demonstrations"
        _ = self.sft_data if is_sft else self.preference_data  # raise if missing
        self.policy.check_trained("policy", self.policy.dtype, self.sharding, is_online=False)
        self.algorithm.check_sizes(self.batch.prompts_per_step)
        return self


TrainConfig = OnlineConfig | OfflineConfig
"""One training run: SFT, or any online or offline algorithm."""


class RewardModelConfig(Section):
    """One reward-model training run."""

    run: RunConfig = RunConfig()
    """Name, seed, folder and device of the run."""
    data: RewardModelDataConfig
    """data.preferences, data.eval_preferences and the chat template."""
    model: PolicyConfig
    """The backbone to start from, usually the SFT model, and its optimizer."""
    loss: RewardModelLoss = RewardModelLoss()
    """The Bradley-Terry loss."""
    process: StepLabelsConfig | None = None
    """Train a process reward model, which grades steps (reward.process reads it); null: one that scores completions."""
    ensemble: EnsembleConfig = EnsembleConfig()
    """Several reward models from one run; a number is its size."""
    calibration: CalibrationConfig = CalibrationConfig()
    """Shift and scale of the scores."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes; prompts_per_step counts pairs."""
    sharding: ShardingConfig = ShardingConfig()
    """Distribution over processes."""
    schedule: ScheduleConfig = ScheduleConfig(epochs=1.0)
    """Length and learning-rate schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    logging: LoggingConfig = LoggingConfig()
    """Metrics, samples and trackers."""
    cost: CostConfig = CostConfig()
    """The price of the machine."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during the run."""
    guard: GuardConfig = GuardConfig()
    """Checks before the run and alarms during it."""
    plugins: list[str] = []
    """Your own files and modules that define losses, advantages, rewards, suites or alarms, as in [my_losses.py]."""

    @field_validator("ensemble", mode="before")
    @classmethod
    def _expand_size(cls, value: object) -> object:
        """Return the section for a size alone: ensemble=4."""
        return {"size": value} if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _name_run(self) -> RewardModelConfig:
        self.__dict__["run"] = self.run.named_after("reward_model")
        return self

    @model_validator(mode="after")
    def _check_model(self) -> RewardModelConfig:
        self.model.check_optimizer("model", self.model.dtype, self.sharding)
        self.run.check_dtype("model", self.model.dtype)
        self.model.check_export("model")
        self.model.check_trained("model", self.model.dtype, self.sharding, is_online=False)
        return self

    @model_validator(mode="after")
    def _check_process(self) -> RewardModelConfig:
        """Check the settings that are for pairs alone."""
        if self.process is None:
            return self
        refused = {
            "ensemble": (self.ensemble.size > 1, "1"),
            "loss": (self.loss != RewardModelLoss(), "null"),
            "model.lora": (self.model.lora is not None, "null"),
            "model.weights": (self.model.weights != "auto", "auto"),
            "checkpoint.best": (self.checkpoint.best is not None, "null"),
            "sharding": (self.sharding.uses_deepspeed, "ddp"),
            "data.preferences.sources and stream": (not self.data.preferences.is_plain, "one path"),
        }
        for name, (is_set, instead) in refused.items():
            if is_set:
                raise ValueError(
                    f"{name} is for reward models of pairs, and process trains one of steps: set {instead}"
                )
        return self


RunConfiguration = TrainConfig | RewardModelConfig
"""One training run, or one of a reward model."""

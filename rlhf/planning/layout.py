"""The parts of a configuration that need memory: the models that it holds, by role, and the rows of its passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf.config.data import DatasetConfig, PromptsConfig, SftConfig
from rlhf.config.offload import OffloadConfig
from rlhf.config.run import ShardingConfig
from rlhf.config.sections import (
    BatchConfig,
    OfflineConfig,
    OnlineConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardModelConfig,
    RunConfiguration,
)
from rlhf.errors import ModelError
from rlhf.model_files import path_of_base, resolved
from rlhf.planning.arithmetic import SIZES, Arithmetic, Bytes, PassRows
from rlhf.planning.shapes import Shape, continued_adapter, read_shape
from rlhf.rewards.source import sources_in

NO_GRAD_PASSES = 4  # micro-batches in a pass without gradient on a CPU; rlhf.training.online_run
SCORED_ROWS = 64  # default of reward.source.micro_batch_size


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The tokens that the plan assumes; None: the limits of the configuration."""

    prompt: int | None = None
    completion: int | None = None


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model of a run."""

    name: str
    shape: Shape
    how: Arithmetic
    base: str
    """The model and the way its weights are kept: roles with the same base that share it hold it once."""
    weights: Bytes
    """Bytes of its weights, without adapters; 0 if another role holds them."""
    loaded: Bytes
    """Bytes of its weights while they are loaded."""
    kept: str = "auto"
    adapters: int = 0
    trained: int = 0
    """Trained parameters; 0 for a frozen model."""
    size: Bytes = 4.0
    """Bytes of a trained parameter."""
    optimizer: str = "adamw"
    has_head: bool = True
    averaged: bool = False
    checkpointed: bool = False

    @property
    def is_full(self) -> bool:
        """Return whether all of its weights are trained."""
        return self.trained > 0 and self.adapters == 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The roles of a run, and the rows of its passes on one process."""

    roles: tuple[Role, ...]
    device: str
    processes: int
    sharding: ShardingConfig
    update: PassRows
    """A micro-batch with gradient."""
    passes: int
    """Micro-batches of an optimizer step."""
    updates: int
    """Optimizer steps of a step of the run."""
    minibatches: int = 1
    """Optimizer steps of a pass over a step's rows."""
    step: PassRows
    """All rows of a step, over all processes."""
    annotate: PassRows | None = None
    """A pass without gradient."""
    score: PassRows | None = None
    """A pass of the reward model."""
    rollout: PassRows | None = None
    """The rows decoded together."""
    evaluation: PassRows | None = None
    """The rows of an evaluation decoded together."""
    copies_policy: bool = False
    """Whether the sampler has a copy of the policy's weights."""
    remembers_prompts: bool = False
    """Whether the sampler keeps the keys and values of prompts from one turn of an episode to the next."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """The parts that leave the GPU between their uses; none on a CPU."""
    merges: bool = True
    """Whether the exported model has trained adapters merged into its weights."""
    halves_annotate: bool = False
    """Whether a pass of annotate that runs out of memory is halved."""
    ahead: int = 0
    steps: int | None = None
    notes: tuple[str, ...] = ()

    def role(self, name: str) -> Role | None:
        """Return the role of this name; None if the run has none."""
        return next((role for role in self.roles if role.name == name), None)

    @property
    def trained(self) -> list[Role]:
        """Return the trained roles, the policy first."""
        return [role for role in self.roles if role.trained]


def make_layout(
    config: RunConfiguration, *, device: str, processes: int, lengths: Lengths, may_make: bool = False
) -> Layout:
    """Lay a run out for a device, cpu or cuda, and a number of processes.

    Raises:
        ModelError: the shape of a model is not known before it is loaded.
    """
    plan = _Planner(config, device, processes, lengths, may_make)
    match config:
        case OnlineConfig():
            return plan.online(config)
        case OfflineConfig():
            return plan.offline(config)
        case RewardModelConfig():
            return plan.reward_model(config)


def trained_section(config: RunConfiguration) -> PolicyConfig:
    """Return the section of the model that the run trains."""
    return config.model if isinstance(config, RewardModelConfig) else config.policy


def planned_dtype(section: PolicyConfig, device: str) -> str:
    """Return the dtype of the arithmetic: on a GPU bfloat16 unless the file sets another."""
    return "bfloat16" if device == "cuda" and "dtype" not in section.model_fields_set else section.dtype


@dataclass(frozen=True)
class _Planner:
    config: RunConfiguration
    device: str
    processes: int
    lengths: Lengths
    may_make: bool
    notes: list[str] = field(default_factory=list)

    def shape(self, path: str, like: str | None = None) -> Shape:
        """Return the shape of a model; for one that an earlier run is to train, the shape of the model `like`."""
        shape = read_shape(path, may_make=self.may_make)
        if shape is None and like is not None:
            shape = read_shape(like, may_make=self.may_make)
            self.notes.append(f"{path} is not there: taken to be as large as {like}")
        if shape is None:
            raise ModelError(
                f"the shape of {path!r} is not known before it is loaded: if an earlier run is to write it, start that "
                "run first. Otherwise name a folder with a config.json of a family that docs/models.md lists, or "
                "download the model first"
            )
        return shape

    @property
    def policy(self) -> str:
        """Return the model that the run trains."""
        return trained_section(self.config).model

    def arithmetic(self, shape: Shape, *, dtype: str, entropy: bool = False) -> Arithmetic:
        section = trained_section(self.config)
        stage = self.config.sharding.stage
        wide = 8 if dtype == "float64" else 4
        return Arithmetic(
            wide=wide,
            low=2 if dtype == "bfloat16" else wide,
            device=self.device,
            written_out=shape.is_written_out and section.packing == "auto" and stage < 2,
            chunked=section.log_probs != "naive",
            keeps_probabilities=not entropy,
        )

    def trained(
        self, name: str, path: str, section: Any, *, dtype: str, optimizer: OptimizerConfig, entropy: bool, head: bool
    ) -> Role:
        """Return a role that is trained, whole or by adapters."""
        shape = self.shape(path, None if name == "policy" else self.policy)
        numbers = shape.parameters if head else shape.backbone
        lora, kept, continued = section.lora, section.weights, continued_adapter(path, section.lora, head=head)
        base = path_of_base(path) if continued else resolved(path)
        wide = SIZES["float64"] if dtype == "float64" else SIZES["float32"]
        if lora is None:
            size = wide if kept == "auto" else SIZES[kept]
            weights, adapters, trained = numbers * size, 0, numbers
        else:
            r, targets = continued.get("r", lora.r), continued.get("target_modules", lora.target_modules)
            size, adapters = wide, shape.adapters(r, adapter_targets(targets))
            adapters += 0 if head else shape.hidden
            weights, trained = self.frozen_bytes(shape, kept, head=head, dtype=dtype, over=True), adapters
        is_narrow = kept not in ("auto", "float32") and (self.device == "cuda" or lora is not None)  # as it is read
        return Role(
            name=name,
            shape=shape,
            how=self.arithmetic(shape, dtype=dtype, entropy=entropy),
            base=f"{base} {'float32' if lora is not None and kept == 'auto' else kept}",
            weights=weights,
            loaded=weights if is_narrow else max(weights, numbers * wide),
            kept=kept,
            adapters=adapters,
            trained=trained,
            size=size,
            optimizer=optimizer.optimizer,
            has_head=head,
            averaged=getattr(section, "ema_decay", None) is not None,
            checkpointed=section.gradient_checkpointing,
        )

    def frozen(self, name: str, path: str, *, kept: str, dtype: str, head: bool) -> Role:
        """Return a role that is only read."""
        shape = self.shape(path, self.policy)
        numbers = shape.parameters if head else shape.backbone
        wide = SIZES["float64"] if dtype == "float64" else SIZES["float32"]
        weights = self.frozen_bytes(shape, kept, head=head, dtype=dtype)
        return Role(
            name=name,
            shape=shape,
            how=self.arithmetic(shape, dtype=dtype),
            base=f"{path_of_base(path)} {kept}",
            weights=weights,
            loaded=weights if self.device == "cuda" and kept != "auto" else numbers * wide,
            kept=kept,
            has_head=head,
        )

    def frozen_bytes(self, shape: Shape, kept: str, *, head: bool, dtype: str, over: bool = False) -> Bytes:
        """Return the bytes of frozen weights; `over`: those below adapters."""
        wide = SIZES["float64"] if dtype == "float64" else SIZES["float32"]
        numbers = shape.parameters if head else shape.backbone
        outside = numbers - shape.linear - shape.vectors  # embedding and head
        if kept in ("int8", "nf4"):
            return shape.linear * SIZES[kept] + outside * SIZES["bfloat16"] + shape.vectors * wide
        if kept != "auto":
            return numbers * SIZES[kept]
        section = trained_section(self.config)
        fits = shape.is_written_out and section.packing == "auto" and self.config.sharding.stage < 3 and not over
        if fits and self.device == "cpu" and shape.stored == "bfloat16" and dtype != "float64":
            return (shape.linear + outside) * SIZES["bfloat16"] + shape.vectors * wide
        if fits and self.device == "cuda" and dtype == "bfloat16":
            return shape.linear * SIZES["bfloat16"] + (outside + shape.vectors) * wide
        return numbers * wide

    def dtype(self, section: PolicyConfig) -> str:
        """Return the planned dtype of a section's arithmetic; note that some CPUs compute in another."""
        dtype = planned_dtype(section, self.device)
        if self.device == "cpu" and dtype == "bfloat16":
            self.notes.append(
                "planned in bfloat16, and a CPU whose products are slower with it computes in float32: dtype=float32 "
                "plans that"
            )
        return dtype

    def micro(self, rows: PassRows, batch: BatchConfig, *, per_row: int = 1) -> PassRows:
        """Return the rows of a micro-batch; a row of a batch may be a pair."""
        size = batch.micro_batch_size * per_row
        if batch.micro_batch_tokens is not None:
            size = max(per_row, batch.micro_batch_tokens // max(rows.length, 1))
        share = max(1, -(-rows.rows // self.processes))
        return rows.of(min(size, share))

    def online(self, config: OnlineConfig) -> Layout:
        algorithm, policy, sampling = config.algorithm, config.policy, config.sampling
        dtype = self.dtype(policy)
        entropy = algorithm.policy_loss.needs_entropy
        prompts, group = config.batch.prompts_per_step, sampling.completions_per_prompt
        completion = self.lengths.completion or self.longest_row(config)
        prompt = self.longest_prompt(config.data.prompts, completion)
        step = PassRows(rows=prompts * group, prompts=prompts, prompt=prompt, completion=completion)
        is_pairs = algorithm.policy_loss.pair_loss is not None
        minibatch = step.of(max(1, -(-step.rows // config.batch.minibatches)))
        update = self.micro(minibatch, config.batch, per_row=2 if is_pairs else 1)
        share = -(-minibatch.rows // self.processes)
        role = self.trained("policy", policy.model, policy, dtype=dtype, optimizer=policy, entropy=entropy, head=True)
        roles = [replace(role, optimizer="sgd") if algorithm.policy_loss.searches else role]
        if algorithm.policy_loss.searches:
            self.notes.append("the vectors of the search for a step are not planned: the peak of an update is higher")
        if algorithm.value_loss is not None and not config.critic.shared:
            start = config.critic.init
            path = config.reward.source.critic_start if start in ("auto", "reward") else start
            path = policy.model if path is None or start == "policy" else path
            critic = self.trained(
                "critic", path, config.critic, dtype=dtype, optimizer=config.critic, entropy=False, head=False
            )
            roles.append(critic)
        if config.reference.measure and not (policy.lora is not None and config.reference_model is None):
            path, kept = config.reference_model or policy.model, config.reference.weights
            roles.append(self.frozen("reference", path, kept=kept, dtype=dtype, head=True))
        roles += self.teachers(config, dtype)
        score = None
        for path, source in self.reward_models(config):
            roles.append(
                self.frozen("reward model", path, kept=getattr(source, "weights", "auto"), dtype=dtype, head=False)
            )
            scored = min(int(getattr(source, "micro_batch_size", SCORED_ROWS)), -(-step.rows // self.processes))
            score = replace(step.of(scored), read=1)
        roles += self.judges(config, dtype)
        samples_here = sampling.backend in ("auto", "fast")
        share_of_step = step.of(max(1, -(-step.rows // self.processes)))
        annotate = share_of_step
        halves = self.device != "cpu" and self.processes == 1 and not config.sharding.uses_deepspeed
        if not halves:
            annotate = share_of_step.of(min(share_of_step.rows, NO_GRAD_PASSES * update.rows))
        return self.layout(
            roles,
            update=update,
            passes=-(-share // update.rows),
            updates=config.batch.epochs * config.batch.minibatches,
            minibatches=config.batch.minibatches,
            step=step,
            annotate=annotate,
            score=score,
            rollout=share_of_step.of(min(sampling.batch_size, share_of_step.rows)),
            evaluation=self.evaluation(config),
            copies_policy=samples_here and sampling.copy_weights and roles[0].shape.is_written_out,
            remembers_prompts=config.remembers_prompts,
            offload=config.offload if self.device == "cuda" else OffloadConfig(),
            halves_annotate=halves,
            ahead=config.overlap.copies,
            steps=config.schedule.steps,
        )

    def evaluation(self, config: OnlineConfig | OfflineConfig) -> PassRows | None:
        """Return the rows that an evaluation decodes together: prompts of which none has a group."""
        data, sampling = config.data.eval_prompts, config.sampling
        if data is None:
            return None
        rows = min(most for most in (sampling.batch_size, data.limit, config.eval.prompts) if most is not None)
        prompt = self.longest_prompt(data, sampling.max_new_tokens)
        return PassRows(rows=rows, prompts=rows, prompt=prompt, completion=sampling.max_new_tokens)

    def longest_prompt(self, data: PromptsConfig, completion: int) -> int:
        """Return the most tokens of a prompt that leaves room for a completion in the policy's context."""
        if self.lengths.prompt is not None:
            return self.lengths.prompt
        most, context = data.first_tokens or data.max_prompt_tokens, self.shape(self.policy).context
        return most if context is None else max(1, min(most, context - completion))

    def longest_row(self, config: OnlineConfig) -> int:
        """Return the largest number of tokens after a prompt; an episode counts the tokens of all turns."""
        budget = config.environment.max_tokens if config.environment is not None else None
        if config.environment is not None and config.environment.max_turns > 1 and budget is None:
            self.notes.append(
                "the tokens that the environment writes are not known, and not counted: environment.max_tokens limits "
                "an episode, and --completion-tokens is its length after the prompt"
            )
        return budget or config.longest_completion

    def teachers(self, config: OnlineConfig | OfflineConfig, dtype: str) -> list[Role]:
        """Return the teacher of a loss that compares with one, if it is a model in this process."""
        if config.teacher is None or not config.algorithm.compares_with_teacher:
            return []
        own = getattr(config.teacher, "dtype", None) or dtype
        paths = config.teacher.model_paths().values()
        return [self.frozen("teacher", path, kept="auto", dtype=own, head=True) for path in paths]

    def reward_models(self, config: OnlineConfig) -> Iterator[tuple[str, Any]]:
        """Yield the reward models that a run holds; an ensemble of separate backbones one by one."""
        for _, source in sources_in(config.reward, "reward"):
            for path in source.model_paths().values():
                yield from ((member, source) for member in _members(path))

    def judges(self, config: OnlineConfig | OfflineConfig, dtype: str) -> list[Role]:
        """Return the models of eval.source, and of reward.process."""
        judged = sources_in(config.eval, "eval") if config.data.eval_prompts is not None else ()
        paths = [path for _, source in judged for path in source.model_paths().values()]
        if isinstance(config, OnlineConfig) and (process := getattr(config.reward.process, "path", None)) is not None:
            paths.append(process)
        members = [member for path in paths for member in _members(path)]
        return [self.frozen("reward model", member, kept="auto", dtype=dtype, head=False) for member in members]

    def offline(self, config: OfflineConfig) -> Layout:
        loss, policy = config.algorithm.loss, config.policy
        dtype = self.dtype(policy)
        per_row = loss.completions_per_row
        data: DatasetConfig = config.sft_data if loss.data == "demonstrations" else config.preference_data
        step = self.rows_of_data(data, config.batch, per_row)
        update = self.micro(step, config.batch, per_row=per_row)
        roles = [self.trained("policy", policy.model, policy, dtype=dtype, optimizer=policy, entropy=False, head=True)]
        is_read_later = loss.needs_reference and (loss.data == "labelled" or not config.preference_data.is_plain)
        if policy.lora is None and (is_read_later or (config.held_out_source is not None and config.uses_reference)):
            path, kept = config.reference.model or policy.model, config.reference.weights
            roles.append(self.frozen("reference", path, kept=kept, dtype=dtype, head=True))
        roles += [*self.teachers(config, dtype), *self.judges(config, dtype)]
        annotate = None
        if loss.needs_reference:
            annotate = step.of(min(step.rows, NO_GRAD_PASSES * config.batch.micro_batch_size))
        share = -(-step.rows // self.processes)
        return self.layout(
            roles,
            update=update,
            passes=-(-share // update.rows),
            updates=1,
            step=step,
            annotate=annotate,
            evaluation=self.evaluation(config),
            copies_policy=config.sampling.copy_weights and roles[0].shape.is_written_out,
            steps=config.schedule.steps,
        )

    def reward_model(self, config: RewardModelConfig) -> Layout:
        section = config.model
        dtype = self.dtype(section)
        step = replace(self.rows_of_data(config.data.preferences, config.batch, 2), read=1)
        update = self.micro(step, config.batch, per_row=2)
        role = self.trained("policy", section.model, section, dtype=dtype, optimizer=section, entropy=False, head=False)
        share = -(-step.rows // self.processes)
        return self.layout(
            [replace(role, name="reward model")],
            update=update,
            passes=-(-share // update.rows),
            updates=1,
            step=step,
            steps=config.schedule.steps,
        )

    def rows_of_data(self, data: Any, batch: BatchConfig, per_row: int) -> PassRows:
        """Return the rows of a step of fixed data, at the limit of their length: half of it prompt, except for SFT."""
        most = min(int(data.max_tokens), self.shape(self.policy).context or int(data.max_tokens))
        rest = most - 1 if isinstance(data, SftConfig) else most // 2
        completion = self.lengths.completion or max(1, min(rest, most - (self.lengths.prompt or 1)))
        prompt = self.lengths.prompt or max(1, most - completion)
        rows = batch.prompts_per_step * per_row
        return PassRows(rows=rows, prompts=batch.prompts_per_step, prompt=prompt, completion=completion)

    def layout(self, roles: list[Role], **fields: Any) -> Layout:
        """Return the layout, in which each base that roles share is held by the first of them."""
        bases: set[str] = set()
        kept = []
        for role in roles:
            is_split = self.config.sharding.stage == 3  # each model by itself
            stands_on_one = not role.is_full and (role.kept != "auto" or (role.adapters > 0 and not is_split))
            shares = stands_on_one and role.base in bases
            kept.append(replace(role, weights=0.0, loaded=0.0) if shares else role)
            if stands_on_one:
                bases.add(role.base)
        return Layout(
            roles=tuple(kept),
            device=self.device,
            processes=self.processes,
            sharding=self.config.sharding,
            merges=trained_section(self.config).export != "adapter",
            notes=tuple(dict.fromkeys(self.notes)),
            **fields,
        )


def adapter_targets(targets: list[str] | str) -> list[str] | str:
    """Return the names of the modules that get an adapter; all-linear stays."""
    groups = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
    return groups.get(targets, targets) if isinstance(targets, str) else targets


def _members(path: str) -> list[str]:
    folder = Path(path).expanduser() / "members"
    members = sorted(str(member) for member in folder.iterdir() if member.is_dir()) if folder.is_dir() else []
    return members or [path]

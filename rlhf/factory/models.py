"""Build the policy, reference, critic and tokenizer of a run, from its configuration or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config.algorithm import KtoLoss, ReferencedLoss, TokenLoss
from rlhf.config.reward import ModelSource
from rlhf.config.sections import OfflineConfig, OnlineConfig, PolicyConfig, TrainConfig
from rlhf.data.pairs import LabelledSet, PairSet
from rlhf.data.reference_cache import (
    AnnotatedLabelledSet,
    AnnotatedPairSet,
    CompletionRows,
    ReferenceCache,
    cache_folder,
    cache_key,
    completion_labels,
    completion_rows,
    rows_fingerprint,
)
from rlhf.data.tokenizer import load_tokenizer, shares_vocabulary
from rlhf.errors import ConfigError
from rlhf.factory.context import CRITIC, MODEL, RunContext, export_policy, member_folders, model_folder
from rlhf.models.backbone import (
    CausalLM,
    check_vocabulary,
    enable_gradient_checkpointing,
    freeze,
    load_adapter,
    load_causal_lm,
    load_policy,
)
from rlhf.models.ensemble_head import load_reward_heads, single_head
from rlhf.models.export import ExportDtype
from rlhf.models.frozen import keep_in_bfloat16
from rlhf.models.origin import Origin, read_origin, weights_fingerprint
from rlhf.models.policy_models import Ema, Models, SharedValueHead
from rlhf.models.scalar_head import ScalarHeadModel, load_scalar_head
from rlhf.runtime.engine import Engine
from rlhf.runtime.seeding import derive_seed, seeded_initialization
from rlhf.training.losses import completion_logprobs
from rlhf.training.online_run import NO_GRAD_BATCH_MULTIPLIER


def build_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the policy."""
    path = config.tokenizer or model_folder(config.model)
    return load_tokenizer(path, trust_remote_code=config.trust_remote_code)


def build_policy(config: PolicyConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> CausalLM:
    """Load the model to train: from the checkpoint to resume from if there is one, else the configured model.

    The run's seed initializes any new weights.
    """
    with seeded_initialization(context.seed):
        return context.engine.place(_load_or_resume(config, tokenizer, context.resume, context.engine))


def _load_or_resume(
    config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, resume: Path | None, engine: Engine
) -> CausalLM:
    start = model_folder(config.model)
    if resume is None:
        return load_policy(config, start, tokenizer, engine)
    if config.lora is None:
        return load_policy(config, str(resume / MODEL), tokenizer, engine)
    base = load_causal_lm(start, dtype=config.dtype, trust_remote_code=config.trust_remote_code, engine=engine)
    check_vocabulary(base, tokenizer, start)
    model = load_adapter(base, resume / MODEL)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    model.train()
    return model


def build_online_models(config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> Models:
    """Build all the models of an online run: policy, reference, and critic if the algorithm has one."""
    algorithm, engine = config.algorithm, context.engine
    loss = algorithm.policy_loss
    policy = build_policy(config.policy, context, tokenizer)
    reference = None
    if config.reference.measure and not adapter_off_is_reference(config):
        with seeded_initialization(context.seed):
            reference = build_reference(config, tokenizer, context.engine)
    models = Models(
        policy=policy,
        temperature=config.sampling.temperature,
        dtype=config.policy.dtype,
        device=engine.device,
        log_probs=config.policy.log_probs,
        packing=config.policy.packing,
        float32_head=config.policy.head_dtype == "float32",
        reference=engine.freeze("reference", reference) if reference is not None else None,
        adapter_off_is_reference=config.reference.measure and adapter_off_is_reference(config),
        entropy_gradient=isinstance(loss, TokenLoss) and loss.entropy_coef > 0,
        engine=engine,
    )
    keep_reference_in_bfloat16(models)
    if algorithm.value_loss is not None:
        if config.critic.shared:
            models.shared_head = engine.place(
                SharedValueHead(policy.config.hidden_size, next(policy.parameters()).dtype)
            )
        else:
            with seeded_initialization(context.seed):
                models.critic = engine.place(_load_critic(config, context, tokenizer))
    return models


def adapter_off_is_reference(config: TrainConfig) -> bool:
    """Return whether the policy with its adapter disabled serves as the reference."""
    return config.reference.model is None and config.policy.lora is not None


def build_reference(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, engine: Engine) -> PreTrainedModel:
    """Load the frozen reference, a model of its own."""
    path = model_folder(config.reference.model or config.policy.model)
    trust = config.policy.trust_remote_code
    model = load_causal_lm(path, dtype=config.policy.dtype, trust_remote_code=trust, engine=engine)
    check_vocabulary(model, tokenizer, path)
    return freeze(model)


def keep_reference_in_bfloat16(models: Models) -> None:
    """Convert a separate reference's matrices to bfloat16 where that changes no result (see rlhf.models.frozen)."""
    if models.reference is not None and not models.engine.splits_weights:
        keep_in_bfloat16(models.reference, dtype=models.dtype, device=models.device)


def _load_critic(config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> ScalarHeadModel:
    path, is_new = _critic_start(config, context, tokenizer)
    settings: dict[str, Any] = {
        "dtype": config.policy.dtype,
        "trust_remote_code": config.policy.trust_remote_code,
        "engine": context.engine,
    }
    seed, head = derive_seed(context.seed, "critic"), config.critic.head
    critic = (
        load_scalar_head(path, tokenizer, new_head=head, seed=seed, **settings)
        if is_new
        else single_head(load_reward_heads(path, tokenizer, **settings))
    )
    critic.packing = config.policy.packing
    return critic.train()


def _critic_start(config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Choose the folder that the critic starts from, and whether it needs a new value head.

    Raises:
        ConfigError: critic.init names a reward model whose vocabulary differs from the policy's.
    """
    if context.resume is not None:
        return str(context.resume / CRITIC), False
    init, source = config.critic.init, config.reward.source
    policy = model_folder(config.policy.model)
    if init == "policy" or (init == "auto" and not isinstance(source, ModelSource)):
        return policy, True
    path = source.path if init in ("reward", "auto") and isinstance(source, ModelSource) else init
    members = member_folders(path)
    folder = model_folder(str(members[0]) if members else path)  # of separate backbones the first, for one critic
    trust = config.policy.trust_remote_code
    if shares_vocabulary(tokenizer, load_tokenizer(folder, trust_remote_code=trust)):
        return folder, False
    if init == "auto":
        context.notes.append(f"critic.init=auto: the policy's backbone, for {path} has another vocabulary")
        return policy, True
    raise ConfigError(
        f"critic.init={init}: the token ids of {path} mean other texts than the policy's, so that it cannot be the "
        "critic: set critic.init=policy"
    )


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes token ids to text without special tokens."""

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


def read_export_origin(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> Origin:
    """Read what an export copies from the folder of the configured model."""
    start = model_folder(config.model)
    return read_origin(start, config.tokenizer or start, tokenizer, trust_remote_code=config.trust_remote_code)


def export(
    policy: CausalLM,
    ema: Ema | None,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    engine: Engine,
    *,
    origin: Origin,
    dtype: ExportDtype,
    warn: Callable[[str], None],
) -> None:
    """Export the trained policy, or its moving average if there is one, as an ordinary model folder."""
    with nullcontext() if ema is None else ema.applied():
        export_policy(policy, tokenizer, folder, engine, origin, dtype, warn)


def attach_reference(
    config: OfflineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase, models: Models
) -> None:
    """Load the reference into `models` if this run needs one as a separate model.

    It needs none if the reference is the policy with its adapter disabled, nor if the reference is only read before
    the first step, when it equals the policy.
    """
    if not config.uses_reference:
        return
    if adapter_off_is_reference(config):
        models.adapter_off_is_reference = True
    elif needs_reference_during_training(config) or context.resume is not None or config.reference.model is not None:
        with seeded_initialization(context.seed):
            reference = build_reference(config, tokenizer, context.engine)
        models.reference = context.engine.freeze("reference", reference)


def needs_reference_during_training(config: OfflineConfig) -> bool:
    """Return whether the reference is read during training.

    It is for KTO's z0, for the KL of held-out completions, and for pairs that are mixed or streamed, which are
    annotated as they come.
    """
    loss = config.algorithm.loss
    is_read_each_step = isinstance(loss, ReferencedLoss) and not config.preference_data.is_plain
    is_evaluated = config.held_out_source is not None and config.uses_reference
    return isinstance(loss, KtoLoss) or is_read_each_step or is_evaluated


def no_grad_batch_size(config: OfflineConfig) -> int:
    """Return the rows of a forward pass without gradient; they affect memory only, no result."""
    return config.batch.micro_batch_size * NO_GRAD_BATCH_MULTIPLIER


class ReferenceAnnotator:
    """Annotates data sets with the reference's log-probability of each completion, from a cache where possible."""

    def __init__(self, config: OfflineConfig, context: RunContext, models: Models) -> None:
        self.config, self.context, self.models = config, context, models
        self.cache = ReferenceCache(cache_folder(config.run.cache_dir, os.environ))
        self._weights: str | None = None

    def pairs(self, pairs: PairSet) -> AnnotatedPairSet:
        """Annotate pairs: both completions of each."""
        chosen, rejected = self._logprobs(completion_rows(pairs)).chunk(2)
        return AnnotatedPairSet(pairs, chosen, rejected)

    def labelled(self, data: PairSet | LabelledSet) -> AnnotatedLabelledSet:
        """Annotate single labelled completions; pairs are split into two rows."""
        rows = completion_rows(data)
        return AnnotatedLabelledSet(rows, completion_labels(data), self._logprobs(rows))

    def batch(self, pairs: PairSet) -> AnnotatedPairSet:
        """Annotate the pairs of one step, without the cache."""
        rows = completion_rows(pairs)
        needed = isinstance(self.config.algorithm.loss, ReferencedLoss)
        values = self._forward(rows) if needed else torch.zeros(len(rows), dtype=torch.float64)
        return AnnotatedPairSet(pairs, *values.chunk(2))

    def labelled_batch(self, rows: LabelledSet) -> AnnotatedLabelledSet:
        """Annotate the labelled completions of one step, without the cache."""
        completions = completion_rows(rows)
        return AnnotatedLabelledSet(completions, completion_labels(rows), self._forward(completions))

    def _logprobs(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        if not isinstance(self.config.algorithm.loss, ReferencedLoss):
            return torch.zeros(len(rows), dtype=torch.float64)
        key = cache_key(
            weights=self._fingerprint(),
            rows=rows_fingerprint(rows.prompts, rows.completions, rows.learned),
            dtype=self.models.dtype,
            temperature=self.models.temperature,
        )
        ranks = self.context.engine.ranks
        values = ranks.on_main(lambda: self.cache.read(key, count=len(rows)))
        if values is None:
            values = computed = self._compute(rows)
            ranks.on_main(lambda: self.cache.write(key, computed))
        else:
            self.context.notes.append(f"reference log-probs of {len(rows):,} completions: from {self.cache.path(key)}")
        self.context.notes += self.cache.notes
        self.cache.notes.clear()
        return values

    def _compute(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        text = f"reference log-probs of {len(rows):,} completions: computed once, kept in {self.cache.folder}"
        if self.context.console is not None:
            self.context.console.print(Text(text), soft_wrap=True)  # at once: a large data set takes time
        return self._forward(rows)

    def _forward(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        models = self.models
        assert models.has_reference or self.context.resume is None, "the policy is its own reference at step 0 only"
        logprobs = (
            models.reference_logprobs if models.has_reference else lambda batch: models.policy_tokens(batch).logprobs
        )
        return completion_logprobs(
            rows,
            logprobs,
            rows_per_pass=no_grad_batch_size(self.config),
            device=models.device,
            ranks=models.engine.ranks,
        )

    def _fingerprint(self) -> str:
        if self._weights is None:
            model, engine = self.models.reference or self.models.policy, self.context.engine
            state = engine.full_state(model)
            self._weights = engine.ranks.on_main(lambda: weights_fingerprint(model, state))
        return self._weights

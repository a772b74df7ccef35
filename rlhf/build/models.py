"""Policy, reference, critic and tokenizer of a run, from its configuration or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.build.context import CRITIC, MODEL, Context, model_folder
from rlhf.build.saving import export_policy
from rlhf.config.algorithm import Online, TokenLoss
from rlhf.config.reward import ModelSource
from rlhf.config.sections import PolicyConfig, TrainConfig
from rlhf.data.chat import load_tokenizer, shares_vocabulary
from rlhf.errors import ConfigError
from rlhf.models.backbone import (
    CausalLM,
    check_vocabulary,
    enable_checkpointing,
    freeze,
    load_adapter,
    load_causal_lm,
    load_policy,
)
from rlhf.models.bundle import Ema, Models, SharedHead
from rlhf.models.export import ExportDtype
from rlhf.models.origin import Origin, read_origin
from rlhf.models.scalar_head import ScalarHeadModel, load_scalar_head
from rlhf.runtime.engine import Engine
from rlhf.runtime.seeding import derive, new_weights


def build_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the policy."""
    path = config.tokenizer or model_folder(config.model)
    return load_tokenizer(path, trust_remote_code=config.trust_remote_code)


def build_policy(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, resume: Path | None, seed: int) -> CausalLM:
    """Load the model to train: from the checkpoint `resume` if there is one, else the configured model.

    `seed` initializes any new weights.
    """
    with new_weights(seed):
        return _load_or_resume(config, tokenizer, resume)


def _load_or_resume(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, resume: Path | None) -> CausalLM:
    start = model_folder(config.model)
    if resume is None:
        return load_policy(config, start, tokenizer)
    if config.lora is None:
        return load_policy(config, str(resume / MODEL), tokenizer)
    base = load_causal_lm(start, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    check_vocabulary(base, tokenizer, start)
    model = load_adapter(base, resume / MODEL)
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    model.train()
    return model


def build_online_models(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase) -> Models:
    """Build all the models of an online run: policy, reference, and critic if the algorithm has one."""
    algorithm = config.algorithm
    assert isinstance(algorithm, Online)
    engine, loss = context.engine, algorithm.policy_loss
    policy = engine.place(build_policy(config.policy, tokenizer, context.resume, context.seed))
    with new_weights(context.seed):
        reference = build_reference(config, tokenizer) if config.reference.measure else None
    models = Models(
        policy=policy,
        temperature=config.sampling.temperature,
        dtype=config.policy.dtype,
        device=engine.device,
        log_probs=config.policy.log_probs,
        packing=config.policy.packing,
        float32_head=config.policy.head_dtype == "float32",
        reference=engine.freeze("reference", reference) if reference is not None else None,
        adapter_off_is_reference=reference is None and config.reference.measure,
        entropy_gradient=isinstance(loss, TokenLoss) and loss.entropy_coef > 0,
        engine=engine,
    )
    if algorithm.value_loss is not None:
        if config.critic.shared:
            models.shared_head = engine.place(SharedHead(policy.config.hidden_size, next(policy.parameters()).dtype))
        else:
            with new_weights(context.seed):
                models.critic = engine.place(_load_critic(config, context, tokenizer))
    return models


def build_reference(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | None:
    """Load the frozen reference; return None if the policy with its adapter disabled serves as the reference."""
    if config.reference.model is None and config.policy.lora is not None:
        return None
    path = model_folder(config.reference.model or config.policy.model)
    model = load_causal_lm(path, dtype=config.policy.dtype, trust_remote_code=config.policy.trust_remote_code)
    check_vocabulary(model, tokenizer, path)
    return freeze(model)


def _load_critic(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase) -> ScalarHeadModel:
    path, is_new = _critic_start(config, context, tokenizer)
    critic = load_scalar_head(
        path,
        tokenizer,
        new_head="zero" if is_new else None,
        dtype=config.policy.dtype,
        seed=derive(context.seed, "critic"),
        trust_remote_code=config.policy.trust_remote_code,
    )
    critic.packing = config.policy.packing
    return critic.train()


def _critic_start(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Choose the folder that the critic starts from, and whether it needs a new value head.

    Raises:
        ConfigError: critic.init names a reward model whose vocabulary differs from the policy's.
    """
    if context.resume is not None:
        return str(context.resume / CRITIC), False
    init, source = config.critic.init, config.reward.source if config.reward else None
    policy = model_folder(config.policy.model)
    if init == "policy" or (init == "auto" and not isinstance(source, ModelSource)):
        return policy, True
    path = source.path if init in ("reward", "auto") and isinstance(source, ModelSource) else init
    folder = model_folder(path)
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


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes token ids to text without special tokens."""

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


def build_origin(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> Origin:
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
    tell: Callable[[str], None],
) -> None:
    """Export the trained policy, or its moving average if there is one, as an ordinary model folder."""
    with nullcontext() if ema is None else ema.applied():
        export_policy(policy, tokenizer, folder, engine, origin, dtype, tell)

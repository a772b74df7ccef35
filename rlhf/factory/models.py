"""Build the policy, reference, critic and tokenizer of a run, from its configuration or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.config.data import ChatFormat
from rlhf.config.sections import OnlineConfig, PolicyConfig, TrainConfig
from rlhf.config.weights import LoraConfig
from rlhf.data.templates import choose_template, turn_end_id
from rlhf.data.tokenizer import adapts_classifier, base_of_adapter, load_tokenizer, locate_model, shares_vocabulary
from rlhf.errors import ConfigError
from rlhf.factory.context import RunContext
from rlhf.factory.exported import export_policy
from rlhf.factory.teacher import build_teacher
from rlhf.models.backbone import (
    CausalLM,
    add_lora,
    check_vocabulary,
    enable_gradient_checkpointing,
    freeze,
    load_adapter,
    load_causal_lm,
    load_policy,
    prepare_policy,
    weight_dtype,
)
from rlhf.models.bases import bases_of
from rlhf.models.export import Origin, read_origin
from rlhf.models.folders import ADAPTER_FOLDER, CRITIC, MODEL, member_folders, model_folder
from rlhf.models.lora import overruled_settings
from rlhf.models.policy_models import Ema, Models, SharedValueHead, keep_in_bfloat16
from rlhf.models.scalar_adapters import kept_adapter, load_adapted, load_adapter_weights
from rlhf.models.scalar_head import ScalarHeadModel, load_reward_heads, load_scalar_head, single_head
from rlhf.models.stored import store_weights
from rlhf.models.text_config import text_config
from rlhf.rewards.channels import writes_channels
from rlhf.runtime.engine import Engine
from rlhf.runtime.seeding import derive_seed, seeded_initialization


def build_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the policy."""
    path = config.tokenizer or model_folder(config.model)
    return load_tokenizer(path, trust_remote_code=config.trust_remote_code)


def build_policy(config: PolicyConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> CausalLM:
    """Load the model to train: from the checkpoint to resume from if there is one, else the configured model.

    The run's seed initializes any new weights.
    """
    if context.resume is not None:  # before anything slow is loaded
        context.identify_model("policy.model", config.model)
    with seeded_initialization(context.seed):
        model = context.engine.place(_load_or_resume(config, tokenizer, context))
    if context.resume is None:  # a hub id is on this machine now
        context.identify_model("policy.model", config.model)
    return model


def _load_or_resume(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, context: RunContext) -> CausalLM:
    start, resume, engine = model_folder(config.model), context.resume, context.engine
    if config.lora is None:
        path = start if resume is None else str(resume / MODEL)
        return load_policy(config, path, tokenizer, engine, is_checkpoint=context.goes_on_in_dtype)
    adapter = continued_adapter(config)
    if adapter is None:
        note_not_continued(context, "policy", start, config.lora)
    base_path = start if adapter is None else base_of_adapter(adapter)
    check_base("policy", config, base_path)
    base = bases_of(engine).load(
        base_path, config.weights, dtype=config.dtype, trust_remote_code=config.trust_remote_code
    )
    check_vocabulary(base, tokenizer, base_path)
    if adapter is not None:
        note_overruled(context, "policy", config.model, overruled_settings(base, config.lora, adapter))
    folder = adapter if resume is None else resume / MODEL
    model = add_lora(base, config.lora) if folder is None else load_adapter(base, folder)
    return prepare_policy(model, config, tokenizer, base_path)


def note_overruled(context: RunContext, section: str, path: str, settings: list[str]) -> None:
    """Note the settings that differ from the adapter at `path`, which is trained further; none if there are none."""
    if settings:
        context.note(
            f"warning: {section}.lora.start=continue trains the adapter {path} as it is: {'; '.join(settings)}"
        )


def note_not_continued(context: RunContext, section: str, path: str, lora: LoraConfig) -> None:
    """Note that there is no adapter to train further; the adapter of a causal LM is none of a scalar head."""
    if lora.start != "continue" or kept_adapter(path, lora) is not None:
        return
    beside = Path(path).with_name(ADAPTER_FOLDER)
    if locate_model(path).is_adapter:
        why = "the adapter of a causal LM, so that it is merged into its base and a new adapter is trained"
    else:
        why = "no adapter, so that a new one is trained over it"
        why += f"; {beside} is the adapter of that run" if beside.is_dir() else ""
    context.note(f"warning: {section}.lora.start=continue has no effect: {path} is {why}")


def check_base(section: str, config: PolicyConfig, base: str) -> None:
    """Check that an adapter that is to be exported stands on a whole model; errors name the `section`.

    Raises:
        ConfigError: its base is an adapter merged into another model, which is in no folder that peft could load.
    """
    location = locate_model(base)
    if config.lora is None or config.export == "merged" or not location.is_adapter:
        return
    continues = config.lora.start == "merge" and adapts_classifier(Path(location.name)) == (section == "model")
    advice = f", or {section}.lora.start=continue to train {base} further" if continues else ""
    raise ConfigError(
        f"{section}.export is {config.export}, but {base}, the base of the adapter of this run, is an adapter itself, "
        f"and peft loads one adapter onto a whole model: set {section}.export=merged{advice}"
    )


def continued_adapter(config: PolicyConfig) -> Path | None:
    """Return the folder of the adapter that the policy starts from and trains further; None if there is none."""
    if config.lora is None or config.lora.start != "continue":
        return None
    location = locate_model(model_folder(config.model))
    return Path(location.name) if location.is_adapter else None


def policy_alone(policy: CausalLM, config: PolicyConfig, engine: Engine, *, temperature: float) -> Models:
    """Return the models of a run that has only a policy so far, with the settings of the policy's section."""
    return Models(
        policy=policy,
        temperature=temperature,
        dtype=config.dtype,
        device=engine.device,
        log_probs=config.log_probs,
        packing=config.packing,
        float32_head=config.head_dtype == "float32",
        engine=engine,
    )


def build_online_models(config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> Models:
    """Build all the models of an online run: policy, reference, and critic if the algorithm has one."""
    algorithm, engine = config.algorithm, context.engine
    policy = build_policy(config.policy, context, tokenizer)
    reference = None
    if config.reference.measure and not adapter_off_is_reference(config):
        with seeded_initialization(context.seed):
            reference = build_reference(config, tokenizer, context.engine)
    if config.reference.model is not None:
        context.identify_model("reference.model", config.reference.model)
    teacher = build_teacher(config, context, tokenizer, policy, reference)
    models = replace(
        policy_alone(policy, config.policy, engine, temperature=config.sampling.temperature),
        reference=engine.freeze("reference", reference) if reference is not None else None,
        adapter_off_is_reference=config.reference.measure and adapter_off_is_reference(config),
        update_gives_old_logprobs=config.update_gives_old_log_probs,
        entropy_gradient=algorithm.policy_loss.needs_entropy,
        teacher=teacher,
        reference_is_teacher=algorithm.replaces_reference,
    )
    keep_reference_in_bfloat16(models)
    if algorithm.value_loss is not None:
        if config.critic.shared:
            models.shared_head = engine.place(
                SharedValueHead(text_config(policy).hidden_size, weight_dtype(config.policy.dtype))
            )
        else:
            with seeded_initialization(context.seed):
                models.critic = engine.place(_load_critic(config, context, tokenizer))
    return models


def adapter_off_is_reference(config: TrainConfig) -> bool:
    """Return whether the policy with its adapter disabled serves as the reference."""
    return (
        config.reference_model is None and config.policy.lora is not None and continued_adapter(config.policy) is None
    )


def build_reference(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, engine: Engine) -> CausalLM:
    """Load the frozen reference, a model of its own."""
    path = model_folder(config.reference_model or config.policy.model)
    trust, weights = config.trusts_reference, reference_weights(config)
    model: CausalLM
    if weights == "auto":
        model = load_causal_lm(path, dtype=config.policy.dtype, trust_remote_code=trust, engine=engine)
    else:
        location = locate_model(path)
        base = base_of_adapter(Path(location.name)) if location.is_adapter else path
        shared = bases_of(engine).load(base, weights, dtype=config.policy.dtype, trust_remote_code=trust)
        model = load_adapter(shared, Path(location.name), trainable=False) if location.is_adapter else shared
    check_vocabulary(model, tokenizer, path)
    return freeze(model)


def reference_weights(config: TrainConfig) -> str:
    """Return how a reference of its own keeps its weights; if it is the adapter that the policy continues, as that."""
    if config.reference.weights != "auto" or config.reference_model is not None:
        return config.reference.weights
    if continued_adapter(config.policy) is None:
        return "auto"
    return "float32" if config.policy.weights == "auto" else config.policy.weights


def keep_reference_in_bfloat16(models: Models) -> None:
    """Convert a separate reference's matrices to bfloat16 if that changes no result; see `keep_in_bfloat16`.

    A reference that shares its base with another model, or whose `weights` are configured, stays unchanged.
    """
    is_ours = models.reference is not None and not bases_of(models.engine).holds(models.reference)
    if models.reference is not None and is_ours and not models.engine.splits_weights:
        keep_in_bfloat16(models.reference, dtype=models.dtype, device=models.device)


def _load_critic(config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> ScalarHeadModel:
    """Load the critic as `config.critic` describes it; from the checkpoint to resume from, if there is one."""
    lora, resume = config.critic.lora, context.resume
    saved = None if resume is None or not (resume / CRITIC).is_dir() else resume / CRITIC
    if lora is None and saved is not None:
        start, is_new = str(saved), False
    else:
        start, is_new = _critic_start(config, context, tokenizer)
    settings: dict[str, Any] = {
        "dtype": config.policy.dtype,
        "trust_remote_code": config.policy.trust_remote_code,
        "engine": context.engine,
    }
    seed, head = derive_seed(context.seed, "critic"), config.critic.head
    if lora is not None:
        weights = config.critic.weights
        note_not_continued(context, "critic", start, lora)
        critic = load_adapted(
            start,
            tokenizer,
            lora,
            weights=weights,
            new_head=head if is_new else None,
            seed=seed,
            note_overruled=partial(note_overruled, context, "critic", start),
            **settings,
        )
        if saved is not None:
            load_adapter_weights(critic, saved)
    elif is_new:
        critic = load_scalar_head(start, tokenizer, new_head=head, seed=seed, **settings)
    else:
        is_checkpoint = saved is not None and context.goes_on_in_dtype
        critic = single_head(load_reward_heads(start, tokenizer, is_checkpoint=is_checkpoint, **settings))
    if lora is None and config.critic.weights != "auto":
        store_weights(critic.classifier, config.critic.weights)
    if config.critic.gradient_checkpointing:
        enable_gradient_checkpointing(critic.classifier)
    critic.packing = config.policy.packing
    return critic.train()


def _critic_start(config: OnlineConfig, context: RunContext, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Choose the folder that the critic starts from, and whether it needs a new value head.

    Raises:
        ConfigError: critic.init names a reward model whose vocabulary differs from the policy's.
    """
    init, start = config.critic.init, config.reward.source.critic_start
    policy = model_folder(config.policy.model)
    if init == "policy" or (init == "auto" and start is None):
        return policy, True
    path = start if init in ("reward", "auto") and start is not None else init
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
    """Return a function that decodes token ids to text without special tokens; channels keep them, to be told apart."""
    skip = not writes_channels(tokenizer)

    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


def read_export_origin(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> Origin:
    """Read the files that an export copies from the folder of the configured model, and the run's chat template."""
    start = model_folder(config.model)
    origin = read_origin(start, config.tokenizer or start, tokenizer, trust_remote_code=config.trust_remote_code)
    template = choose_template(tokenizer, chat)
    return replace(
        origin,
        chat_template=None if template.choice == "auto" else template.source,
        turn_end=turn_end_id(tokenizer, template),
    )


def export(
    policy: CausalLM,
    ema: Ema | None,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    engine: Engine,
    *,
    origin: Origin,
    config: PolicyConfig,
) -> None:
    """Export the trained policy, or its moving average if there is one, by the settings `config`."""
    with nullcontext() if ema is None else ema.applied():
        export_policy(policy, tokenizer, folder, engine, origin, config.export_dtype, config.export)

"""Build the teacher of a run, and check that it has the policy's vocabulary, EOS and chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.algo.divergence import TeacherTokens
from rlhf.config.data import ChatFormat
from rlhf.config.sections import OfflineConfig, TrainConfig
from rlhf.data.datasets import sequential_batches
from rlhf.data.pairs import demonstration_pipeline
from rlhf.data.templates import choose_template
from rlhf.data.tokenizer import load_tokenizer, stop_token_ids, vocabulary_digest
from rlhf.errors import ConfigError
from rlhf.factory.context import RunContext
from rlhf.models.backbone import CausalLM, check_vocabulary, context_length, eos_ids, freeze, load_causal_lm
from rlhf.models.folders import model_folder
from rlhf.models.policy_models import keep_in_bfloat16
from rlhf.models.teacher import LocalTeacher
from rlhf.runtime.device import choose_device, fallback_note, usable_dtype
from rlhf.runtime.engine import Engine
from rlhf.teachers.listed import live_rows
from rlhf.teachers.model import ModelTeacher
from rlhf.teachers.stored import write_answers
from rlhf.teachers.teacher import Targets, Teacher, TeacherContext, TeacherSource
from rlhf.tracking.fingerprint import content_digest

TOKENS_AT_A_TIME = 256
PROBE = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]


def build_teacher(
    config: TrainConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    policy: CausalLM,
    reference: CausalLM | None = None,
) -> TeacherSource | None:
    """Build the teacher of a loss that compares with one, and record its weights; None for any other run.

    A teacher in place of the reference is checked here, and was loaded as the reference.

    Raises:
        UserError: it cannot be loaded or reached, or does not fit the policy.
    """
    if config.teacher is None:
        return None
    for field, path in config.teacher.model_paths().items():
        context.identify_model(f"teacher.{field}", path)
    for field, file in config.teacher.files().items():
        digest = content_digest(file) if file.is_file() else None  # the teacher itself reports a missing folder
        context.identify(f"teacher.{field}", digest)
    needs = teacher_context(config, tokenizer, policy, context.engine, warn=context.notes.append)
    if config.algorithm.compares_with_teacher:
        return config.teacher.build(needs)
    stand_in = config.reference_model
    assert stand_in is not None, "the configuration refuses a teacher that cannot stand in for the reference"
    section = config.teacher if isinstance(config.teacher, ModelTeacher) else ModelTeacher(model=stand_in)
    own = check_tokenizers(section, needs)
    if reference is not None:
        _check_stops(stop_token_ids(own, needs.chat, eos_ids(reference, own)), needs, section.model)
    return None


def teacher_context(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    policy: CausalLM,
    engine: Engine,
    *,
    warn: Callable[[str], None],
) -> TeacherContext:
    """Return the objects from which the teacher of a run is built."""
    chat = config.data.chat_format
    loss = config.algorithm.loss if isinstance(config, OfflineConfig) else config.algorithm.policy_loss
    return TeacherContext(
        tokenizer=tokenizer,
        device=engine.device,
        dtype=config.policy.dtype,
        temperature=config.sampling.temperature if config.algorithm.samples else 1.0,
        stop_ids=stop_token_ids(tokenizer, chat, eos_ids(policy, tokenizer)),
        top_k=getattr(loss, "top_k", None),
        chat=chat,
        load_model=partial(load_teacher, engine=engine, warn=warn),
    )


def load_teacher(
    config: ModelTeacher, context: TeacherContext, *, engine: Engine, warn: Callable[[str], None]
) -> LocalTeacher:
    """Load the teacher that a section of type model names.

    Raises:
        ModelError: it cannot be loaded.
        ConfigError: its vocabulary, EOS or chat template is not the policy's.
    """
    own = check_tokenizers(config, context)
    wanted = config.dtype or context.dtype
    dtype = usable_dtype(wanted, context.device)
    if dtype != wanted:
        warn(fallback_note("teacher.dtype"))
    path = model_folder(config.model)
    model = freeze(load_causal_lm(path, dtype=dtype, trust_remote_code=config.trust_remote_code))
    check_vocabulary(model, own, path)
    _check_stops(stop_token_ids(own, context.chat, eos_ids(model, own)), context, config.model)
    placed = engine.place(model)
    keep_in_bfloat16(placed, dtype=dtype, device=context.device)
    return LocalTeacher(model=placed, dtype=dtype, device=context.device, temperature=context.temperature)


def check_tokenizers(config: ModelTeacher, context: TeacherContext) -> PreTrainedTokenizerBase:
    """Check that a teacher's tokenizer writes and reads like the policy's, and return it.

    Raises:
        ConfigError: the first token id that differs, in the vocabulary or in a rendered conversation.
    """
    own = load_tokenizer(config.tokenizer or model_folder(config.model), trust_remote_code=config.trust_remote_code)
    difference = first_difference(context.tokenizer, own)
    if difference is not None:
        token, ours, theirs = difference
        raise ConfigError(
            f"the teacher {config.model} has another vocabulary than the policy: id {token} is {ours!r} for the policy "
            f"and {theirs!r} for the teacher. Distillation needs one vocabulary: take a teacher of the same family"
        )
    if context.tokenizer.eos_token_id != own.eos_token_id:
        raise ConfigError(
            f"the teacher {config.model} ends its answers with id {own.eos_token_id} and the policy with id "
            f"{context.tokenizer.eos_token_id}: set policy.tokenizer={config.tokenizer or config.model}"
        )
    _check_templates(own, context, config.model)
    return own


def first_difference(
    policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> tuple[int, str | None, str | None] | None:
    """Return the first id that means another token, with both tokens; None if the vocabularies are the same."""
    ours, theirs = ({token: text for text, token in tokenizer.get_vocab().items()} for tokenizer in (policy, teacher))
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            return token, ours.get(token), theirs.get(token)
    return None


def _check_stops(stops: tuple[int, ...], context: TeacherContext, name: str) -> None:
    for token in sorted(set(stops) ^ set(context.stop_ids)):
        who, other = ("teacher", "policy") if token in stops else ("policy", "teacher")
        text = context.tokenizer.decode([token])
        raise ConfigError(
            f"the teacher {name} and the policy end their answers with different ids: {token} ({text!r}) ends one "
            f"of the {who} and not one of the {other}. Make the two models' "
            "eos_token_id in generation_config.json the same"
        )


def _check_templates(own: PreTrainedTokenizerBase, context: TeacherContext, name: str) -> None:
    """Compare a conversation as the policy's data are rendered with the teacher's own template."""
    chat: ChatFormat = context.chat
    ours, theirs = choose_template(context.tokenizer, chat), choose_template(own, ChatFormat("auto"))
    if ours.source == theirs.source or theirs.source is None:
        return
    if ours.source is None:
        raise ConfigError(
            f"the teacher {name} reads conversations in its chat template, and this run has none: set "
            f"policy.tokenizer={name} and data.chat_template=auto, or take a teacher without one"
        )
    written = [
        tokenizer.apply_chat_template(PROBE, chat_template=template.source, tokenize=True, return_dict=False)
        for tokenizer, template in ((context.tokenizer, ours), (own, theirs))
    ]
    pairs = zip([*written[0], None], [*written[1], None], strict=False)
    differing = next(((place, a, b) for place, (a, b) in enumerate(pairs) if a != b), None)
    if differing is not None:
        place, policy_id, teacher_id = differing
        raise ConfigError(
            f"the teacher {name} has another chat template than this run: token {place} of a conversation is id "
            f"{policy_id} for the policy and id {teacher_id} for the teacher. Set policy.tokenizer={name}, or "
            "data.chat_template to the teacher's"
        )


@dataclass(frozen=True)
class StoredSummary:
    """The figures of the file that `store_answers` has written."""

    rows: int
    tokens: int
    listed: float  # the mean over tokens that are learned of the probability of the listed tokens


def store_answers(config: OfflineConfig, out: Path, *, top_k: int, warn: Callable[[str], None]) -> StoredSummary:
    """Ask the teacher of an offline run about its demonstrations, held-out ones too, and write the answers to a file.

    Raises:
        UserError: the configuration has no teacher that can be asked, its data are mixed or streamed, `top_k` or `out`
            cannot be, or the data or the teacher cannot be read.
    """
    teacher = _asked(config)
    if top_k < 1:
        raise ConfigError(f"--top-k is {top_k}: a file without tokens would teach nothing; keep 1 or more")
    if out.is_dir():
        raise ConfigError(f"--out is the folder {out}: name a file, as in {out / 'teacher.safetensors'}")
    engine = Engine(choose_device(config.run.device, key="run.device"))
    tokenizer = load_tokenizer(
        config.policy.tokenizer or model_folder(config.policy.model), trust_remote_code=config.policy.trust_remote_code
    )
    policy = load_causal_lm(model_folder(config.policy.model), trust_remote_code=config.policy.trust_remote_code)
    source = teacher.build(teacher_context(config, tokenizer, policy, engine, warn=warn))
    embeddings = policy.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    rows: list[tuple[list[int], list[int]]] = []
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    learned: list[Tensor] = []
    for data in (config.sft_data, config.data.eval_sft):
        if data is None:
            continue
        limit = context_length(policy)
        loaded = demonstration_pipeline(data, tokenizer, chat_template=config.data.chat_format, context=limit).load()
        for batch in sequential_batches(loaded, config.batch.micro_batch_size):
            here = batch.to(engine.device)
            rows += live_rows(here)
            learned.append(batch.loss_mask[batch.completion_mask])
            for listed in _top_of(source(here), int(here.completion_mask.sum()), top_k, width=len(embeddings)):
                assert listed.ids is not None
                ids.append(listed.ids.to(torch.int32).cpu())
                logprobs.append(listed.logprobs.float().cpu())
    stored = torch.cat(logprobs)
    write_answers(
        out, rows, torch.cat(ids), stored, teacher=teacher.describe(), vocabulary=vocabulary_digest(tokenizer)
    )
    return StoredSummary(len(rows), len(stored), float(stored[torch.cat(learned)].exp().sum(dim=1).mean()))


def _asked(config: OfflineConfig) -> Teacher:
    if config.teacher is None or not config.teacher.answers_anything:
        raise ConfigError("rlhf teach asks a teacher: set teacher.model, or teacher.type=server")
    if not config.sft_data.is_plain:
        raise ConfigError("rlhf teach reads one data set from its beginning to its end: set data.sft.path alone")
    return config.teacher


def _top_of(targets: Targets, count: int, top_k: int, *, width: int) -> Iterator[TeacherTokens]:
    """Yield the teacher's likeliest tokens, a chunk of tokens at a time; `width` is the number of the policy's ids."""
    for start in range(0, count, TOKENS_AT_A_TIME):
        part = targets.part(slice(start, min(start + TOKENS_AT_A_TIME, count))).within(width)
        if top_k > part.logprobs.shape[1]:
            raise ConfigError(f"--top-k is {top_k}, but the teacher gives {part.logprobs.shape[1]} tokens")
        top = part.top(top_k)
        yield top if top.ids is not None else _all_of(top)


def _all_of(whole: TeacherTokens) -> TeacherTokens:
    """Return a whole distribution as a list of all its tokens."""
    values, ids = whole.logprobs.sort(dim=-1, descending=True)
    return TeacherTokens(logprobs=values, ids=ids)

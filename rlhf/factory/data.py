"""Build the batches of a run from its data sections: one data set in memory, or several sources, streamed or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf.algorithms.rescue import Hint
from rlhf.config.data import ChatFormat, PromptsConfig, SftConfig, TrainableDataConfig
from rlhf.config.sections import TrainConfig
from rlhf.data.datasets import BatchStream, Entry, HasPrompt, RowPipeline, RowSet
from rlhf.data.formats import PromptText
from rlhf.data.mixture import (
    MemorySource,
    MixedStream,
    QuotaSchedule,
    RowSource,
    StreamedSource,
    integer_weights,
    source_seed,
)
from rlhf.data.pairs import DemonstrationSet, demonstration_pipeline
from rlhf.data.prompts import SOURCE, PromptSet, PromptStream, prompt_pipeline
from rlhf.data.rows import RowCounts
from rlhf.errors import DataError
from rlhf.factory.context import RunContext
from rlhf.models.backbone import CausalLM, context_length
from rlhf.runtime.seeding import derive_seed
from rlhf.training.feed import PTX
from rlhf.types import Demonstrations

T = TypeVar("T", bound=HasPrompt)
S = TypeVar("S", bound=RowSet[Any])
Collect = Callable[[Sequence[Entry[T]], Sequence[str]], S]
DATA = {PTX: "sft"}  # the data set of a section, if it is called otherwise
PromptBatches = PromptStream | MixedStream[PromptText, PromptSet]


def build_prompts(
    config: PromptsConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: ChatFormat,
    rows_per_step: int,
    model_context: int | None,
    max_new_tokens: int,
    hints: Sequence[Hint] = (),
) -> PromptBatches:
    """Build the stream of prompts; each prompt of a mixture has its source's name in its reference, `prompt_source`.

    `hints` come from algorithm.rescue, which needs one data set that is read whole.
    """
    pipeline = prompt_pipeline(
        config, tokenizer, chat_template=chat, context=model_context, max_new_tokens=max_new_tokens, hints=hints
    )
    if config.is_plain:
        rows = pipeline.load()
        context.rows_read("prompts", rows.skips)
        return PromptStream(rows, rows_per_step, derive_seed(context.seed, "prompts"))

    def collect(entries: Sequence[Entry[PromptText]], names: Sequence[str]) -> PromptSet:
        rows = pipeline.collect(entries, RowCounts("a batch"))
        named = zip(rows.references, names, strict=True)
        return replace(rows, references=tuple({**reference, SOURCE: name} for reference, name in named))

    return mix(config, context, pipeline, section="prompts", rows_per_step=rows_per_step, collect=collect)


def load_prompts_of_run(
    data: PromptsConfig, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, model: CausalLM
) -> PromptSet:
    """Load prompts as a run encodes them: in its chat format, with room for its longest completion in the model."""
    return prompt_pipeline(
        data,
        tokenizer,
        chat_template=config.data.chat_format,
        context=context_length(model),
        max_new_tokens=config.sampling.max_new_tokens,
    ).load()


def build_demonstrations(
    config: SftConfig,
    context: RunContext,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: ChatFormat,
    rows_per_step: int,
    model_context: int | None = None,
    purpose: str = "sft",
) -> BatchStream[Demonstrations] | MixedStream[Any, DemonstrationSet]:
    """Build the stream of demonstrations; `purpose` names the random order."""
    pipeline = demonstration_pipeline(config, tokenizer, chat_template=chat, context=model_context)
    if config.is_plain:
        rows = pipeline.load()
        context.rows_read("sft", rows.skips)
        return BatchStream(rows, rows_per_step, derive_seed(context.seed, purpose))
    return mix(config, context, pipeline, section=purpose, rows_per_step=rows_per_step)


def mix(
    config: TrainableDataConfig,
    context: RunContext,
    pipeline: RowPipeline[T, S],
    *,
    section: str,
    rows_per_step: int,
    collect: Collect[T, S] | None = None,
) -> MixedStream[T, S]:
    """Open the mixed or streamed rows of a section of a run, where the checkpoint left them.

    Raises:
        DataError: as `open_mixture`, or a source that ends the run has too few rows for the first step.
    """
    stream = open_mixture(
        config,
        pipeline,
        seed=derive_seed(context.seed, section),
        name=section,
        rows_per_step=rows_per_step,
        collect=collect,
        note=context.notes.append,
    )
    context.identify(f"data.{DATA.get(section, section)}", stream.digest())
    context.notes += stream.restore(context.saved_positions(section))
    context.streams[section] = stream
    if ended := stream.ended(1):
        raise DataError(
            f"data.{section}: {', '.join(ended)} has fewer rows than the first step needs of it, and at_end is stop"
        )
    return stream


def open_mixture(
    config: TrainableDataConfig,
    pipeline: RowPipeline[T, S],
    *,
    seed: int,
    name: str,
    rows_per_step: int,
    collect: Collect[T, S] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> MixedStream[T, S]:
    """Open the sources of a section, and read those that are not streamed.

    Args:
        seed: of the order of the rows.
        name: the name of the only source, if the section has a path.
        collect: makes a data set of a batch's rows, given the name of the source of each; None: the pipeline's.
        note: receives the summary of each source that is read at once.

    Raises:
        DataError: a source is missing, cannot be read or streamed, or has no usable row.
    """
    sources = _open_sources(config, pipeline, seed=seed, name=name, note=note)
    weights = [source.weight for source in config.sources.values()] or [1.0]
    return MixedStream(
        sources,
        QuotaSchedule(integer_weights(weights)),
        rows_per_step,
        collect or (lambda entries, _: pipeline.collect(entries, RowCounts("a batch"))),
        stops=config.at_end == "stop",
    )


def _open_sources(
    config: TrainableDataConfig, pipeline: RowPipeline[T, S], *, seed: int, name: str, note: Callable[[str], None]
) -> dict[str, RowSource[T]]:
    sources: dict[str, RowSource[T]] = {}
    for key, part in config.by_source(name).items():
        own_seed = source_seed(seed, key)
        if config.stream:
            block_size = config.shuffle_buffer
            sources[key] = StreamedSource(part, pipeline, name=key, seed=own_seed, block_size=block_size)
            continue
        entries, skips = pipeline.load_entries(part)
        note(f"{key}: {skips.summary()}")
        sources[key] = MemorySource(entries, skips, own_seed)
    return sources

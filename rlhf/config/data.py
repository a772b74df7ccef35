"""The data sections: which rows to read, from where, how long they may be, and what to do with bad ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf.config.base import Needed, Section

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(gt=0)]
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
Size = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Learn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class ChatFormat:
    """How conversations are turned into text: the three chat keys of the data section."""

    template: str = "auto"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None


class DatasetConfig(Section):
    """A data set: a JSON, JSONL, CSV or Parquet file (also .gz), a folder of them, or a hub id."""

    path: str
    """File, folder or hub id."""
    split: str = "train"
    """Which split of a folder or hub data set; a single file has only its own rows."""
    limit: Count | None = None
    """Use only this many usable rows, from the start."""
    columns: dict[str, str] = {}
    """Our column name -> the file's, where they differ: {prompt: question, completion: answer}."""
    bad_rows: Literal["skip", "error"] = "skip"
    """Malformed rows. skip: count, show and skip them; error: stop."""


class SourceConfig(Section):
    """One of several sources of a data section; what is null is as the section says."""

    path: str
    """File, folder or hub id."""
    weight: Weight = 1.0
    """Rows are drawn from the sources in proportion to their weights, exactly: see docs/data.md."""
    split: str | None = None
    """Which split of a folder or hub data set."""
    limit: Count | None = None
    """Use only this many usable rows, from the start."""
    columns: dict[str, str] | None = None
    """Our column name -> the file's, where they differ."""
    bad_rows: Literal["skip", "error"] | None = None
    """Malformed rows: skip or error."""


class TrainableDataConfig(DatasetConfig):
    """A data set to train on: a path, or several sources with weights; read into memory, or streamed."""

    path: str = ""
    """File, folder or hub id; or else set sources."""
    sources: dict[SourceName, SourceConfig] = {}
    """Name -> path and weight: several data sets, mixed. In place of path. null leaves one out."""
    at_end: Literal["restart", "stop"] = "restart"
    """When a source has no more rows. restart: it begins again, in a new order; stop: the run ends before the step that
    would need more."""
    stream: bool = False
    """Read and tokenize rows as they are needed, not all at the start, so that memory does not grow with the data:
    JSONL (also .gz), Parquet, folders of save_to_disk and the hub."""
    shuffle_buffer: Count = 4096
    """With stream: rows are shuffled within consecutive blocks of so many rows of a source."""

    @property
    def is_plain(self) -> bool:
        """Return whether this is one data set read into memory, as an evaluation needs it."""
        return not self.sources and not self.stream

    def by_source(self, name: str) -> dict[str, DatasetConfig]:
        """Return the section of each source alone, by name; a section with a path is one source, called `name`."""
        alone: dict[str, Any] = {"sources": {}}
        if not self.sources:
            return {name: self.model_copy(update=alone)}
        return {
            key: self.model_copy(update=alone | {k: v for k, v in source if k != "weight" and v is not None})
            for key, source in self.sources.items()
        }

    @field_validator("sources", mode="before")
    @classmethod
    def _drop_null_sources(cls, sources: Any) -> Any:
        """Remove sources that are null: so a command line takes one out of a file."""
        if not isinstance(sources, Mapping):
            return sources
        return {name: source for name, source in sources.items() if source is not None}

    @model_validator(mode="after")
    def _check_sources(self) -> TrainableDataConfig:
        if bool(self.path) == bool(self.sources):
            problem = "has both path and sources: set one of them" if self.path else "set path (or sources)"
            raise ValueError(problem)
        if not self.stream and "shuffle_buffer" in self.model_fields_set and self.shuffle_buffer != 4096:
            raise ValueError("shuffle_buffer is of streamed data: set stream=true, or leave it out")
        return self


class PromptsConfig(TrainableDataConfig):
    """Prompts to sample completions for."""

    max_prompt_tokens: Count = 1024
    """Longest prompt, in tokens; less if the model's context leaves less room beside sampling.max_new_tokens."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """A longer prompt is counted and skipped, cut at its start, or an error."""
    first_tokens: Count | None = None
    """Use only this many first tokens of each text as the prompt (for plain-text data sets)."""
    part: tuple[Share, Share] | None = None
    """Use only rows whose prompt has its place in this part of [0, 1), by a hash of its text: [0, 0.5] and [0.5, 1]
    have no prompt in common. limit counts the rows of the part."""

    @model_validator(mode="after")
    def _check_part(self) -> PromptsConfig:
        if self.part is not None and self.part[0] >= self.part[1]:
            raise ValueError(f"part is {list(self.part)}: its first number has to be the smaller, as in [0, 0.5]")
        return self


class SftConfig(TrainableDataConfig):
    """Texts, prompt-completion rows, Alpaca rows or conversations to imitate."""

    learn: Learn = "assistant"
    """Which tokens to train on. In rows of messages: every assistant turn, the last one, or all tokens, the user's
    included. In other rows: the completion, or with `all` the whole row."""
    max_tokens: Count = 2048
    """Longest prompt + completion, in tokens."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """A longer row is counted and skipped, cut at its end (it then gets no EOS), or an error."""


class PreferencesConfig(TrainableDataConfig):
    """Preference pairs in any of the formats of docs/data.md."""

    max_tokens: Count = 2048
    """Longest prompt + completion, in tokens, of either side."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """A longer pair is counted and skipped, its prompt cut at the start, or an error."""


class DataConfig(Section):
    """The data sets of a run. An algorithm reads some of them; setting one that it does not read gives a warning."""

    prompts: PromptsConfig | None = None
    """Prompts that an online algorithm samples completions for."""
    eval_prompts: PromptsConfig | None = None
    """Held-out prompts for evaluation."""
    sft: SftConfig | None = None
    """Texts that SFT imitates and PPO-ptx mixes in."""
    eval_sft: SftConfig | None = None
    """Held-out rows for the SFT loss."""
    preferences: PreferencesConfig | None = None
    """Preference pairs for the reward model and the offline losses."""
    eval_preferences: PreferencesConfig | None = None
    """Held-out preference pairs."""
    chat_template: str = "auto"
    """auto: the tokenizer's own template, if it has one, for conversations and for prompts, instructions and pairs
    given as text; none: text is used as it is, and conversations are an error; or a path to a Jinja file."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables passed to the template, such as {enable_thinking: false}."""
    system: str | None = None
    """System prompt for conversations that have none."""

    @model_validator(mode="after")
    def _check_held_out(self) -> DataConfig:
        for name in ("eval_prompts", "eval_sft", "eval_preferences"):
            section = getattr(self, name)
            if section is not None and not section.is_plain:
                raise ValueError(
                    f"data.{name}: held-out data are read whole and from one place: set path, not sources or stream"
                )
        return self

    @property
    def chat_format(self) -> ChatFormat:
        """Return the three chat keys as one `ChatFormat`."""
        return ChatFormat(self.chat_template, self.chat_template_kwargs, self.system)


PROMPTS_NEEDED = Needed("an online algorithm needs prompts; set data.prompts.path")


class OnlineDataConfig(DataConfig):
    """The data sets of an online run."""

    prompts: Annotated[PromptsConfig, PROMPTS_NEEDED]
    """Prompts that an online algorithm samples completions for."""

    def check_ptx(self, ptx_coef: float) -> None:
        """Check that there are texts for a next-token loss with this weight."""
        if ptx_coef > 0 and self.sft is None:
            raise ValueError("algorithm.ptx_coef > 0 needs data.sft")


class RewardModelDataConfig(DataConfig):
    """The data sets of a reward-model run."""

    preferences: Annotated[PreferencesConfig, Needed("a reward model needs pairs; set data.preferences.path")]
    """Preference pairs for the reward model and the offline losses."""

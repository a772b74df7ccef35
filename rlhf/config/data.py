"""The data sections: which rows to read, from where, how long they may be, and the treatment of bad ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rlhf.section import Fraction, Needed, Positive, Section

Count = Annotated[int, Field(ge=1)]
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
Size = Annotated[int, Field(ge=0)]
Learn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class ChatFormat:
    """The form of conversations as text: the three chat keys of the data section."""

    template: str = "auto"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None


class DatasetConfig(Section):
    """A data set: a JSON, JSONL, CSV or Parquet file (also .gz), a folder of them, or a hub id."""

    path: str
    """File, folder or hub id."""
    split: str = "train"
    """The split of a folder or hub data set; ignored for a single file."""
    limit: Count | None = None
    """Use only the first N usable rows."""
    columns: dict[str, str] = {}
    """Column names that differ from ours, as ours: theirs, e.g. {prompt: question, completion: answer}."""
    bad_rows: Literal["skip", "error"] = "skip"
    """Malformed rows. skip: skip, count and report them; error: stop."""


class SourceConfig(Section):
    """One of several sources of a data section; a null setting takes the section's value."""

    path: str
    """File, folder or hub id."""
    weight: Positive = 1.0
    """Rows are drawn exactly in proportion to the weights of the sources (docs/data.md)."""
    split: str | None = None
    """The split of a folder or hub data set."""
    limit: Count | None = None
    """Use only the first N usable rows."""
    columns: dict[str, str] | None = None
    """Column names that differ from ours, as ours: theirs."""
    bad_rows: Literal["skip", "error"] | None = None
    """Malformed rows: skip or error."""


class TrainableDataConfig(DatasetConfig):
    """A data set to train on: one path or several weighted sources, in memory or streamed."""

    path: str = ""
    """File, folder or hub id. Set path or sources."""
    sources: dict[SourceName, SourceConfig] = {}
    """Several data sets to mix, as name: {path, weight}. null removes one."""
    at_end: Literal["restart", "stop"] = "restart"
    """Action at the end of a source. restart: start again in a new order; stop: end the run before a step that lacks
    rows."""
    stream: bool = False
    """Read and tokenize rows during the run instead of at the start, so that memory does not grow with the data. For
    JSONL (also .gz), Parquet, save_to_disk folders and the hub."""
    shuffle_buffer: Count = 4096
    """With stream: rows are shuffled within consecutive blocks of this many rows."""
    part: tuple[Fraction, Fraction] | None = None
    """Use only rows whose prompt's hash, mapped to [0, 1), is in this interval: [0, 0.5] and [0.5, 1] share no prompt.
    limit counts rows of the part."""

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
            raise ValueError("shuffle_buffer needs streamed data: set stream=true, or remove it")
        if self.is_plain and self.at_end == "stop":
            raise ValueError(
                "at_end=stop needs sources or streamed data: set stream=true, or schedule.epochs=1 instead"
            )
        if self.part is not None and self.part[0] >= self.part[1]:
            raise ValueError(f"part is {list(self.part)}: its first number has to be the smaller, as in [0, 0.5]")
        return self


class PromptsConfig(TrainableDataConfig):
    """Prompts to sample completions for."""

    max_prompt_tokens: Count = 1024
    """Maximum prompt tokens; at most the model's context minus sampling.max_new_tokens."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """Prompts above max_prompt_tokens. skip: skip and count; truncate: cut at the start; error: stop."""
    first_tokens: Count | None = None
    """Use the first N tokens of each text as the prompt (for plain-text data sets)."""


class SftConfig(TrainableDataConfig):
    """Texts, prompt-completion rows, Alpaca rows or conversations to imitate."""

    learn: Learn = "assistant"
    """Tokens to train on. Conversations: all assistant turns, the last one, or all tokens. Other rows: the completion;
    with `all`, the whole row."""
    max_tokens: Count = 2048
    """Maximum tokens of prompt and completion."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """Longer rows. skip: skip and count; truncate: cut at the end (without EOS); error: stop."""


class PreferencesConfig(TrainableDataConfig):
    """Preference pairs, in any format of docs/data.md."""

    max_tokens: Count = 2048
    """Maximum tokens of prompt and completion, for the longer side."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """Longer pairs. skip: skip and count; truncate: cut the prompt at its start; error: stop."""


class DataConfig(Section):
    """The data sets of a run. A data set that the algorithm does not read gives a warning."""

    prompts: PromptsConfig | None = None
    """Prompts that an online algorithm samples completions for."""
    eval_prompts: PromptsConfig | None = None
    """Held-out prompts for evaluation."""
    sft: SftConfig | None = None
    """Demonstrations for SFT and for PPO-ptx."""
    eval_sft: SftConfig | None = None
    """Held-out rows for the SFT loss."""
    preferences: PreferencesConfig | None = None
    """Preference pairs for the reward model and the offline losses."""
    eval_preferences: PreferencesConfig | None = None
    """Held-out preference pairs."""
    chat_template: str = "auto"
    """auto: the tokenizer's template, if it has one, for conversations and for text prompts, instructions and pairs;
    none: text unchanged, and conversations are an error; or the path of a Jinja file."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the template, e.g. {enable_thinking: false}."""
    system: str | None = None
    """System prompt for conversations without one."""
    holdout: Annotated[float, Field(gt=0, lt=1)] | None = None
    """If no held-out rows are set, keep this share of the training rows for evaluation and do not train on them. All
    rows of a prompt are on one side, chosen by its hash. Not for mixed or streamed data. null: keep none."""

    held_out_of: ClassVar[tuple[str, ...]] = ("sft", "preferences")  # the data sets that the run trains on

    @model_validator(mode="after")
    def _hold_out(self) -> DataConfig:
        """Fill in the held-out sections that are not set with a part of the training rows.

        They do not count as set. So settings that are written without them, with the part that is left for training,
        are read back as the same settings.
        """
        for name in self.held_out_of if self.holdout is not None else ():
            rows, left = getattr(self, name), (self.holdout, 1.0)
            if rows is None or getattr(self, f"eval_{name}") is not None or not rows.is_plain:
                continue
            if rows.part not in (None, left):
                continue
            most = min(rows.limit or HELD_OUT[name], HELD_OUT[name])
            self.__dict__[name] = rows.model_copy(update={"part": left})
            self.__dict__[f"eval_{name}"] = rows.model_copy(update={"part": (0.0, self.holdout), "limit": most})
        return self

    @model_validator(mode="after")
    def _check_held_out(self) -> DataConfig:
        for name in ("eval_prompts", "eval_sft", "eval_preferences"):
            section = getattr(self, name)
            if section is not None and not section.is_plain:
                raise ValueError(
                    f"data.{name}: held-out data are read whole from one path: set path, not sources or stream"
                )
        return self

    @property
    def chat_format(self) -> ChatFormat:
        """Return the three chat keys as one `ChatFormat`."""
        return ChatFormat(self.chat_template, self.chat_template_kwargs, self.system)


HELD_OUT = {"prompts": 256, "sft": 1024, "preferences": 1024}  # at most so many rows are held out by data.holdout
PROMPTS_NEEDED = Needed("an online algorithm needs prompts; set data.prompts.path")


class OnlineDataConfig(DataConfig):
    """The data sets of an online run."""

    prompts: Annotated[PromptsConfig, PROMPTS_NEEDED]
    """Prompts that an online algorithm samples completions for."""

    held_out_of: ClassVar[tuple[str, ...]] = ("prompts",)

    def check_ptx(self, ptx_coef: float) -> None:
        """Check that there are texts for a next-token loss with this weight."""
        if ptx_coef > 0 and self.sft is None:
            raise ValueError("algorithm.ptx_coef > 0 needs data.sft")


class RewardModelDataConfig(DataConfig):
    """The data sets of a reward-model run."""

    preferences: Annotated[PreferencesConfig, Needed("a reward model needs pairs; set data.preferences.path")]
    """Preference pairs for the reward model and the offline losses."""

    held_out_of: ClassVar[tuple[str, ...]] = ("preferences",)

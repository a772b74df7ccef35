"""The data sections: which rows to read, from where, how long they may be, and what to do with bad ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf.config.base import Needed, Section

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
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


class PromptsConfig(DatasetConfig):
    """Prompts to sample completions for."""

    max_prompt_tokens: Count = 1024
    """Longest prompt, in tokens; less if the model's context leaves less room beside sampling.max_new_tokens."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """A longer prompt is counted and skipped, cut at its start, or an error."""
    first_tokens: Count | None = None
    """Use only this many first tokens of each text as the prompt (for plain-text data sets)."""


class SftConfig(DatasetConfig):
    """Texts, prompt-completion rows, Alpaca rows or conversations to imitate."""

    learn: Learn = "assistant"
    """Which tokens to train on. In rows of messages: every assistant turn, the last one, or all tokens, the user's
    included. In other rows: the completion, or with `all` the whole row."""
    max_tokens: Count = 2048
    """Longest prompt + completion, in tokens."""
    too_long: Literal["skip", "truncate", "error"] = "skip"
    """A longer row is counted and skipped, cut at its end (it then gets no EOS), or an error."""


class PreferencesConfig(DatasetConfig):
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

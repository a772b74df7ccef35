"""The family of the suites: their common settings, the objects that they are given, and the search by name.

A suite is a section that rejects unknown keys, like a run's sections, and that computes its own figures. Nothing here
imports torch, so that a mistake in the settings is reported at once.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.config.data import ChatFormat, Count, DatasetConfig, PreferencesConfig
from rlhf.config.files import Tree, merge
from rlhf.config.run import Device, Dtype
from rlhf.errors import ConfigError, did_you_mean
from rlhf.rewards.source import Source, sources_in
from rlhf.section import Named, Positive, Section

if TYPE_CHECKING:
    from rlhf.config.sections import TrainConfig
    from rlhf.rewards.source import RewardSource
    from rlhf.suites.questions import SuiteResult
    from rlhf.suites.subject import Subject


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
    """Divides the logits before a token is sampled."""
    batch_size: Count = 256
    """Rows decoded together; affects memory only."""


@dataclass(frozen=True, kw_only=True)
class SuiteContext:
    """The objects that a suite may ask for besides the model that it evaluates."""

    load: Callable[[str], Subject]
    """Loads another model from a folder or by its hub id; it shares the tokenizer and the chat template."""
    build_source: Callable[[Source], RewardSource]
    """Builds the scorer of completions, given in the token ids of the evaluated model."""
    task: str = ""
    """The text after the colon in the name of a suite with tasks."""


class Suite(Named, Section):
    """A suite: its settings, and the figures that it computes of a model.

    A subclass with a `name` is found by `rlhf eval --suite NAME` and by `suites:` of a comparison. For a run, the
    run's own settings are the defaults.
    """

    data: ClassVar[str]
    """A description of --data, in words."""
    data_key: ClassVar[str] = "dataset.path"
    """The setting that --data sets."""
    limit_key: ClassVar[str] = "dataset.limit"
    """The setting that --limit sets."""
    has_own_length: ClassVar[bool] = False
    """Whether the suite sets the length of answers, also for a run that samples other lengths: figures compare then."""
    example_task: ClassVar[str] = ""
    """A task of a suite with tasks, whose name is NAME:TASK; empty for the other suites."""

    seed: int = 0
    """The seed of the sampling and of the bootstrap."""
    device: Device = "auto"
    """As run.device."""
    dtype: Dtype = "float32"
    """The precision, as policy.dtype."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model."""
    chat_template: str = "auto"
    """auto: questions go through the tokenizer's own template if it has one; none; or a path to a Jinja file."""
    chat_template_kwargs: dict[str, Any] = {}
    """As data.chat_template_kwargs."""
    system: str | None = None
    """As data.system."""
    rows_per_pass: Count = 32
    """Rows of a forward pass; affects memory only."""
    sampling: SuiteSamplingConfig = SuiteSamplingConfig()
    """How completions are sampled."""

    @classmethod
    def settings_of(cls, config: TrainConfig) -> dict[str, Any]:
        """Return the settings that a run determines: seed, device, sampling, how its prompts become tokens, the
        model that it started from, the source that judges it, and the beta of its loss.
        """
        from rlhf.config.sections import OfflineConfig

        loss = config.algorithm.loss if isinstance(config, OfflineConfig) else None
        source = config.eval.source or (config.reward.source if config.reward else None)
        sampled = ("temperature", "batch_size", *(() if cls.has_own_length else ("max_new_tokens",)))
        settings = {
            "seed": config.run.seed,
            "device": config.run.device,
            "dtype": config.policy.dtype,
            "trust_remote_code": config.policy.trust_remote_code,
            "chat_template": config.data.chat_template,
            "chat_template_kwargs": config.data.chat_template_kwargs,
            "system": config.data.system,
            "sampling": {key: getattr(config.sampling, key) for key in sampled},
            "reference": config.reference.model or config.policy.model,
            "source": None if source is None else source.model_dump(mode="json"),
            "beta": getattr(loss, "beta", None) if loss is not None and loss.needs_reference else None,
        }
        return {key: value for key, value in settings.items() if key in cls.model_fields and value is not None}

    @classmethod
    def complete(cls, config: TrainConfig, given: Tree) -> Tree:
        """Complete the given settings from the run's; a source that is given with its type replaces the run's."""
        settings = cls.settings_of(config)
        if "type" in (given.get("source") or {}):
            settings.pop("source", None)
        return merge(settings, given)

    @abstractmethod
    def run(self, subject: Subject, context: SuiteContext) -> SuiteResult:
        """Compute the figures of a model.

        Raises:
            UserError: the data or a setting does not fit the model.
        """

    @classmethod
    def check_installed(cls) -> None:
        """Check that the packages of the suite are installed.

        Raises:
            ConfigError: one is missing.
        """

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Return the names of the common settings that change no figure of this suite."""
        return ()

    def models(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the path of every model that the suite loads besides the evaluated one."""
        yield from ()

    def data_sets(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the path of every data set that the suite reads."""
        for name in type(self).model_fields:
            dataset = getattr(self, name)
            if isinstance(dataset, DatasetConfig):
                yield f"{name}.path", dataset.path

    @property
    def chat_format(self) -> ChatFormat:
        """Return the three chat keys as one value."""
        return ChatFormat(self.chat_template, self.chat_template_kwargs, self.system)

    @property
    def sampling_key(self) -> int:
        """Return the seed of the sampler."""
        from rlhf.runtime.seeding import derive_seed

        return derive_seed(self.seed, self.name)


class AnswerSuite(Suite):
    """The settings of suites that sample one answer to each question."""

    greedy: bool = True
    """The most likely token each time; false, or best_of above 1: sampled at sampling.temperature."""

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Return the seed if the answers are the most likely ones."""
        return ("seed",) if self.greedy else ()


def is_result(path: Path) -> bool:
    """Return whether a file is the result of a suite."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"suite", "model", "figures"} <= content.keys()


def suite_names() -> list[str]:
    """Return the names of the suites; of one with tasks, NAME:TASK."""
    suites: dict[str, type[Suite]] = Suite.choices()
    return [f"{name}:TASK" if suite.example_task else name for name, suite in suites.items()]


def find_suite(name: str) -> tuple[type[Suite], str]:
    """Return the suite of that name, and the task of NAME:TASK (empty for a suite without tasks).

    Raises:
        ConfigError: there is no such suite.
    """
    suites: dict[str, type[Suite]] = Suite.choices()
    key, colon, task = name.partition(":")
    suite = suites.get(key)
    if suite is None or (colon and not suite.example_task):
        names = suite_names()
        hint = did_you_mean(name, [*suites, *names], cutoff=0.4)
        raise ConfigError(f"--suite: {name!r} is not one of {', '.join(names)}{hint}")
    if suite.example_task and not task:
        raise ConfigError(f"--suite {key} needs a task, as in --suite {key}:{suite.example_task}")
    return suite, task


def models_named(*, reference: str | None = None, source: Source | None = None) -> Iterator[tuple[str, str]]:
    """Yield the keys and paths of the models that a suite's `reference` and `source` name."""
    if reference is not None:
        yield "reference", reference
    for place, inner in sources_in(source, "source") if source is not None else ():
        yield from ((f"{place}.{field}", path) for field, path in inner.model_paths().items())


FIELDS = ("question", "first", "second")
_FIELD = re.compile("{(" + "|".join(FIELDS) + ")}")


def fill(template: str, **fields: str) -> str:
    """Fill in the fields of a template; braces in a field's text, or around another word, stay as they are."""
    return _FIELD.sub(lambda match: fields.get(match[1], match[0]), template)


def require_question(template: str) -> None:
    """Check that a template has {question}.

    Raises:
        ValueError: it has none.
    """
    if "{question}" not in template:
        raise ValueError("template: write {question} where the question is to stand")

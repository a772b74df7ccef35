"""A reward source of programs that check: graders of answers, JSON, instructions, code, and your own."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Gt
from pydantic import model_validator

import rlhf.verifiers as rlhf_verifiers
from rlhf.errors import ConfigError, RewardError, did_you_mean
from rlhf.plugins import as_settings, plugins_in
from rlhf.rewards.ensemble import combine, normalize_then_sum
from rlhf.rewards.source import BatchDecoder, Source, SourceContext, checked_scores, decode, quoted
from rlhf.section import Fraction, OneOf
from rlhf.verifiers.grader import Grader, settings_of
from rlhf.verifiers.pool import GraderPool, Outcome

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.types import Completions, Scores

assert rlhf_verifiers  # to import the package is to define the graders

VerifierMode: TypeAlias = Literal["sum", "mean", "weighted_mean", "minimum", "gdpo"]
WINDOW = 50  # the last gradings over which failures are counted, or a whole step's if these are more
FEWEST_FAILURES = 5
GRADING = "verifier/"  # the beginning of the parts that tell the outcomes of gradings
DEFAULT = ""  # the key of the grader of rows that name none


class VerifierSource(Source):
    """A program that checks each completion against its row, in a process of its own."""

    is_learned: ClassVar[bool] = False

    type: Literal["verifier"] = "verifier"
    grader: Annotated[Grader, OneOf()]
    """The grader and its settings. `name: json, keys: shape` beside type is short for `grader: {type: json, keys:
    shape}`; `name: my.py:grade` names a function, `name: reasoning_gym:TASK` a task."""
    graders: dict[str, Annotated[Grader, OneOf()]] = {}
    """Other graders by the names that rows give in their column `column`."""
    column: str = "verifier"
    """The column by which a row picks its grader: a name of `graders`, or a verifier that needs no settings. A row
    without it has `grader`."""
    weights: dict[str, float] = {}
    """Factors of the named rewards. Without one a name has the weight that the row's grader gives it, else 1; a name of
    weight 0 is only logged. weighted_mean refuses a factor below 0."""
    how: VerifierMode = "sum"
    """Combination of the named rewards that apply to a completion, as in an ensemble; gdpo standardizes each within its
    group before the sum (Liu et al. 2026), with advantage.type=group and baseline=centered."""
    timeout_s: Annotated[float, Gt(0)] = 5.0
    """Maximum seconds per completion; then its process is killed."""
    workers: Annotated[int, Ge(1)] = 2
    """Processes that grade."""
    on_timeout: float = 0.0
    """Score of a completion whose grading takes too long or fails."""
    max_failures: Fraction = 0.2
    """The run saves and stops if a larger share of the last gradings takes too long or fails."""
    memory_mb: Annotated[int, Ge(0)] = 4096
    """Address space of a grading process, in MiB; 0: no limit."""

    @property
    def standardizes_in_groups(self) -> bool:
        """Return whether the named rewards are standardized within groups before their sum."""
        return self.how == "gdpo"

    def check(self) -> None:
        """Check that the packages and files of the graders are there.

        Raises:
            UserError: one is missing; the message says what to do.
        """
        if sys.platform == "win32":
            raise ConfigError("reward.source.type=verifier kills processes as Windows cannot: use Linux or macOS")
        for grader in (self.grader, *self.graders.values()):
            grader.check()

    def code_files(self) -> Mapping[str, Path]:
        """Return the files of graders of the user, by their field."""
        files = {f"grader.{field}": file for field, file in self.grader.code_files().items()}
        for name, grader in self.graders.items():
            files |= {f"graders.{name}.{field}": file for field, file in grader.code_files().items()}
        return files

    def describe(self) -> str:
        """Return the verifiers' names."""
        return f"verifier {', '.join([self.grader.describe(), *self.graders])}"

    @property
    def best_score(self) -> float | None:
        """Return 1 if the verifiers' own weights are used."""
        return None if self.weights or self.how == "gdpo" else 1.0

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """Return the right answer as the row's grader knows it."""
        return self.grader_of(row)[1].reference(row)

    def grader_of(self, row: Mapping[str, Any]) -> tuple[str, Grader]:
        """Return the key of the row's grader, and the grader. A row may name one of `graders`, or one of ours.

        A data set must not run code of its own: the file of a function has to be in `graders`.

        Raises:
            RewardError: the row names another.
        """
        name = row.get(self.column)
        if isinstance(name, str) and name in self.graders:
            return name, self.graders[name]
        if name is None or name == self.grader.type:
            return DEFAULT, self.grader
        grader = settingless(name)
        if grader is None:
            near = did_you_mean(str(name), [*self.graders, *Grader.choices()])
            raise RewardError(
                f"a row's column {self.column!r} names the verifier {name!r}, which is not among "
                f"reward.source.graders{near}: add it there with its settings"
            )
        return str(name), grader

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check that the graders that the rows name are there, and what each needs."""
        checked = set()
        for row in rows:
            name, grader = self.grader_of(row)
            if name not in checked:
                grader.check()
            checked.add(name)
            grader.check_row(row)

    def for_check(self) -> VerifierSource:
        """Return the source with failures counted, and none that stops."""
        return self.model_copy(update={"max_failures": 1.0})

    def build(self, context: SourceContext) -> VerifierReward:
        """Return the source that grades.

        Raises:
            UserError: a package or a file of a grader is missing.
        """
        self.check()
        may_abstain = context.may_abstain or context.leaves_out
        return VerifierReward(self, context.tokenizer, may_abstain=may_abstain, warn=context.warn)

    @model_validator(mode="after")
    def _check_signs(self) -> VerifierSource:
        """Check that weighted_mean has no factor below 0, so that it divides by no sum of 0."""
        negative = [name for name, weight in self.weights.items() if weight < 0]
        if self.how == "weighted_mean" and negative:
            raise ValueError(
                f"how is weighted_mean, which divides by the weights: set weights.{negative[0]} to 0 or more"
            )
        return self

    @model_validator(mode="after")
    def _check_weights(self) -> VerifierSource:
        """Check the names of weights, if the names that the graders give are known before they grade."""
        if not all(grader.default_weights for grader in (self.grader, *self.graders.values())):
            return self
        choices = Grader.choices()  # a row may name any of them
        names = [*self.graders, *choices, *(name for kind in choices.values() for name in kind.default_weights)]
        unknown = [name for name in self.weights if name not in names]
        if unknown:
            near = did_you_mean(unknown[0], self.grader.default_weights)
            raise ValueError(f"weights: {self.grader.describe()} gives no reward {unknown[0]!r}{near}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, given: Any) -> Any:
        """Put the short form `name: json, keys: shape` into `grader`."""
        if not isinstance(given, Mapping) or "name" not in given:
            if isinstance(given, Mapping) and "grader" not in given:
                raise ValueError(f"name the verifier, as in name: math; choose from {', '.join(Grader.choices())}")
            return given
        if "grader" in given:
            raise ValueError("name and grader both say what grades: give one of them")
        outer = {key: value for key, value in given.items() if key in cls.model_fields}
        inner = {key: value for key, value in given.items() if key not in cls.model_fields and key != "name"}
        if not isinstance(given["name"], str):
            raise ValueError(f"name is a text, not {given['name']!r}")
        return {**outer, "grader": {**settings_of(given["name"]), **inner}}


def settingless(name: object) -> Grader | None:
    """Return the verifier of ours with this name; None if there is none, or it needs settings."""
    kind = Grader.choices().get(name) if isinstance(name, str) else None
    if kind is None or any(field.is_required() for field in kind.model_fields.values()):
        return None
    return kind.model_validate({"type": name})


class VerifierReward:
    """Grades completions in child processes; the parts are the named rewards and the outcomes of the gradings.

    A grade without a name has the verifier's name. `verifier/timeout`, `verifier/error` and `verifier/none` are 1
    for the completions whose grading took too long, failed, or did not apply; `verifier/seconds` is its time.
    """

    def __init__(
        self,
        source: VerifierSource,
        tokenizer: BatchDecoder,
        *,
        may_abstain: bool = False,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare the processes, which start at the first call; `warn` gets the first failure if none stops the run."""
        self.source = source
        self.tokenizer = tokenizer
        self.may_abstain = may_abstain
        self.warn = warn
        self.graders: dict[str, Grader] = {DEFAULT: source.grader, **source.graders}
        sections = list(self.graders.values())
        self.pool = GraderPool(
            {key: as_settings(grader) for key, grader in self.graders.items()},
            timeout_s=source.timeout_s,
            workers=source.workers,
            memory_mb=source.memory_mb,
            plugins=[name for grader in sections for name in plugins_in(grader)],
        )
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # whether each of the last gradings failed
        self._has_warned = False

    def __call__(self, completions: Completions) -> Scores:
        """Grade the completions.

        Raises:
            RewardError: too many gradings failed, a grader cannot start, a row names no grader, or a weight no reward.
            NonFiniteScores: no grade applies to a completion, and no other source scores it.
        """
        texts = decode(completions, self.tokenizer).as_in_rows()
        keys = [self._key(row) for row in texts.references]
        outcomes = self.grade(texts.completions, texts.references, keys)
        self._check_failures(outcomes, texts.completions)
        table = self._named(keys, outcomes)
        self._check_weights(table)
        values = self._combine(table, keys, outcomes, group_size=completions.group_size)
        parts = {
            name: [row if outcome.state == "graded" else math.nan for row, outcome in zip(rows, outcomes, strict=True)]
            for name, rows in table.items()
        }
        if self.source.standardizes_in_groups:
            parts["weighted_sum"] = self._combine(table, keys, outcomes, group_size=1)
        for state in ("timeout", "error", "none"):
            parts[f"verifier/{state}"] = [float(outcome.state == state) for outcome in outcomes]
        parts["verifier/seconds"] = [outcome.seconds for outcome in outcomes]
        scores = checked_scores([0.0] * len(outcomes), parts, texts, who="the verifier", may_abstain=True)
        checked = checked_scores(values, {}, texts, who=self._who(), may_abstain=self.may_abstain)
        from rlhf.types import Scores

        return Scores(values=checked.values, parts=scores.parts)

    def grade(
        self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]], keys: Sequence[str]
    ) -> list[Outcome]:
        """Grade texts by their rows with the graders of these keys."""
        besides = {key: as_settings(self.graders[key]) for key in keys if key not in self.pool.settings}
        return self.pool.grade(list(zip(keys, completions, rows, strict=True)), besides)

    def total(self, key: str, outcome: Outcome) -> float | None:
        """Return the score of a completion by itself, as in an evaluation; None if no grade applies."""
        table = self._named([key], [outcome])
        (value,) = self._combine(table, [key], [outcome], group_size=1)
        return None if math.isnan(value) else value

    def _key(self, row: Mapping[str, Any]) -> str:
        """Return the key of the row's grader."""
        key, grader = self.source.grader_of(row)
        if key not in self.graders:
            grader.check()
            self.graders[key] = grader
        return key

    def _named(self, keys: Sequence[str], outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
        """Return the named rewards of the completions, by name; NaN if one does not apply.

        A grading that failed has `on_timeout` in every name of its grader.
        """
        rows = [self._grade_of(key, outcome) for key, outcome in zip(keys, outcomes, strict=True)]
        of_key: dict[str, dict[str, None]] = {}
        for key, row in zip(keys, rows, strict=True):
            of_key.setdefault(key, {}).update(dict.fromkeys(row or {}))
        names = list(dict.fromkeys(name for key in of_key for name in of_key[key] or [self._name(key)]))
        failed = {key: dict.fromkeys(of_key[key] or [self._name(key)], self.source.on_timeout) for key in of_key}
        filled = [
            failed[key] if outcome.state in ("timeout", "error") else row or {}
            for key, row, outcome in zip(keys, rows, outcomes, strict=True)
        ]
        return {name: [row.get(name, math.nan) for row in filled] for name in names}

    def _grade_of(self, key: str, outcome: Outcome) -> Mapping[str, float] | None:
        if outcome.grade is None or isinstance(outcome.grade, Mapping):
            return outcome.grade
        return {self._name(key): outcome.grade}

    def _name(self, key: str) -> str:
        return key or self.source.grader.type

    def _weight(self, key: str, name: str) -> float:
        """Return the factor of a named reward of the grader of this key."""
        return self.source.weights.get(name, self.graders[key].default_weights.get(name, 1.0))

    def _combine(
        self, table: Mapping[str, Sequence[float]], keys: Sequence[str], outcomes: Sequence[Outcome], *, group_size: int
    ) -> list[float]:
        """Combine the named rewards into a score each; NaN if none applies.

        A name of two graders counts as two rewards, each with its grader's weight: no completion has both, and the
        completions of a group have the same grader.
        """
        import torch

        failed = torch.tensor([outcome.state in ("timeout", "error") for outcome in outcomes])
        pairs = [(key, name) for key in dict.fromkeys(keys) for name in table]
        rows = [_of_key(table[name], keys, key) for key, name in pairs]
        stacked = torch.tensor(rows, dtype=torch.float64)
        weights = torch.tensor([self._weight(key, name) for key, name in pairs], dtype=torch.float64)
        live = weights != 0
        stacked, weights = stacked[live], weights[live]
        if not len(weights):
            raise RewardError("every named reward has weight 0: set one in reward.source.weights")
        how = self.source.how
        if how == "gdpo" and group_size > 1:
            return _floats(normalize_then_sum(stacked, weights, group_size))
        values = combine(stacked, weights, how=how)
        return _floats(torch.where(failed, self.source.on_timeout, values))

    def _check_weights(self, given: Mapping[str, Sequence[float]]) -> None:
        """Check that no weight has a name that no grade has, if a reward of nearly that name goes without one."""
        weights = self.source.weights
        unweighted = [name for name in given if name not in weights]
        for name in weights.keys() - given.keys():
            if hint := did_you_mean(name, unweighted, cutoff=0.75):
                raise RewardError(f"reward.source.weights: the verifier gives no reward {name!r}{hint}")

    def _check_failures(self, outcomes: Sequence[Outcome], completions: Sequence[str]) -> None:
        failed = [outcome.state in ("timeout", "error") for outcome in outcomes]
        self._recent.extend(failed)
        window = failed if len(failed) > WINDOW else self._recent
        count = sum(window)
        first = failed.index(True) if True in failed else 0
        example = f"{outcomes[first].message}, for the completion {quoted(completions[first])}" if outcomes else ""
        if True in failed and not self._has_warned:
            self._has_warned = True
            counted = "a grading failed, is counted, and scores like a wrong answer: "
            self.warn(example if self.source.max_failures == 1 else counted + example)
        if count < FEWEST_FAILURES or count <= self.source.max_failures * len(window):
            return
        raise RewardError(
            f"the verifier failed for {count} of the last {len(window)} completions, more than "
            f"reward.source.max_failures={self.source.max_failures:g}: {example}. "
            "A failed grading scores like a wrong answer: repair the grader, or raise timeout_s"
        )

    def _who(self) -> str:
        return f"the {self.source.describe()}"


def _of_key(values: Sequence[float], keys: Sequence[str], key: str) -> list[float]:
    """Return the values of the completions with this key, and NaN for the others."""
    return [value if own == key else math.nan for value, own in zip(values, keys, strict=True)]


def _floats(values: Tensor) -> list[float]:
    return [float(value) for value in values]

"""Check a reward before training: any source of a configuration, a verifier by its name, or a function."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from rlhf.api.inputs import Inputs, Reward
from rlhf.config.data import Count, DatasetConfig
from rlhf.config.files import merge, parse_overrides
from rlhf.config.load import load_any, validate
from rlhf.config.run import RunConfig
from rlhf.config.sections import OnlineConfig, RewardModelConfig
from rlhf.data.conversation import Prompt
from rlhf.data.files import given_rows, load_rows
from rlhf.data.formats import PROMPTS
from rlhf.data.paths import resolve_best
from rlhf.data.rows import DataRow, RowCounts
from rlhf.data.tokenizer import as_completions, byte_tokenizer, load_tokenizer
from rlhf.errors import ConfigError
from rlhf.evaluation.reward_check import CheckRow, Graded, RewardCheck, Score, check_reward
from rlhf.factory.rewards import build_source
from rlhf.models.folders import member_folders, model_folder
from rlhf.plugins import load_plugins
from rlhf.references import CONVERSATION, MESSAGES
from rlhf.rewards.function import ARGUMENTS
from rlhf.rewards.source import RewardSource, Source
from rlhf.rewards.verifier import GRADING
from rlhf.runtime.engine import make_engine
from rlhf.section import OneOf, Section
from rlhf.tracking.progress import announced_share
from rlhf.types import Completions
from rlhf.user_code import load_function
from rlhf.verifiers.grader import settings_of

ANSWER_COLUMNS = ("reference", "solution", "completion", "response", "output", "answer", "chosen")
YAML = (".yaml", ".yml")


class CheckSettings(Section):
    """The settings of a check beside the reward."""

    source: Annotated[Source, OneOf()]
    """The reward."""
    limit: Count = 200
    """Rows."""


def reward_check(
    reward: Reward,
    dataset: str | Path | Iterable[Mapping[str, Any]],
    *,
    answer: str | None = None,
    limit: int = 200,
    best: float | None = None,
    tokenizer: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    plugins: Sequence[str] = (),
) -> RewardCheck:
    """Score right and worthless answers, to find errors that a policy would exploit; print the table of results.

    Args:
        reward: as in rlhf.train: a function, a path, a section, a list; or the name of a verifier, such as
            "math" or "my_file.py:grade".
        dataset: a path or a hub id, or the rows: prompts, with the columns that the reward reads.
        answer: the column with a right answer, as a model should write it; None: as the verifier gives it, or the
            first of reference, solution, completion, response, output, answer and chosen.
        limit: rows to check.
        best: the best score, which every right answer must earn; None: as the reward knows it.
        tokenizer: of the policy, if a reward model scores; None: the reward model's.
        columns: names of columns that differ from ours, as {ours: theirs}.
        plugins: files or modules that define the reward's class.

    Raises:
        UserError: the reward or the data set is not there, or no row has a right answer.
    """
    load_plugins({"plugins": list(plugins)})
    tree = source_tree(reward) if isinstance(reward, str) else Inputs(Path()).reward(reward)
    settings = validate(CheckSettings, {"source": tree, "limit": limit})
    name = None if tokenizer is None else str(tokenizer)
    return check_source(settings, dataset, answer=answer, best=best, columns=columns, tokenizer=name)


def reward_check_from_command_line(
    target: str, dataset: str, overrides: Sequence[str], *, answer: str | None, limit: int, best: float | None
) -> RewardCheck:
    """Check a reward that is named on the command line: a configuration, a verifier, a function or a model.

    Overrides of a configuration are settings of the run; overrides of anything else are settings of the source.

    Raises:
        UserError: as `reward_check`.
    """
    if Path(target).suffix in YAML or _is_policy_run(target):
        config = load_any(_config_file(target), overrides)
        if not isinstance(config, OnlineConfig):
            raise ConfigError(
                f"{target} has no reward: name an online run, its configuration, a verifier or a reward model"
            )
        settings = CheckSettings(source=config.reward.source, limit=limit)
        name = config.policy.tokenizer or config.policy.model
        return check_source(settings, dataset, answer=answer, best=best, tokenizer=name)
    tree = parse_overrides(overrides)
    load_plugins(tree)
    plain = {key: value for key, value in tree.items() if key not in ("plugins", "columns")}
    settings = validate(CheckSettings, {"source": merge(source_tree(target), plain), "limit": limit})
    return check_source(settings, dataset, answer=answer, best=best, columns=tree.get("columns"))


def source_tree(name: str) -> dict[str, Any]:
    """Return the source that a name stands for: a verifier, a function, a reward model or a URL.

    A function of prompts and completions is a reward function; one of a completion and its row is a verifier.
    """
    tree = dict(Inputs(Path()).reward(name))
    if tree["type"] == "model":  # neither a URL nor a function: perhaps a verifier of ours
        try:
            settings_of(name)
        except ValueError as error:
            if "/" not in name and not Path(resolve_best(name)).expanduser().exists():
                raise ConfigError(f"no path and {error}") from error
            return tree
        return {"type": "verifier", "name": name}
    if tree["type"] == "function":
        head = name.partition(":")[0]
        if head.endswith(".py") or "." in head:
            names = set(inspect.signature(load_function(name)).parameters)
            return tree if names & set(ARGUMENTS) else {"type": "verifier", "name": name}
        return {"type": "verifier", "name": name}
    return tree


def check_source(
    settings: CheckSettings,
    dataset: str | Path | Iterable[Mapping[str, Any]],
    *,
    answer: str | None,
    best: float | None,
    columns: Mapping[str, str] | None = None,
    tokenizer: str | None = None,
) -> RewardCheck:
    """Check a source on the rows of a data set.

    Raises:
        UserError: as `reward_check`.
    """
    if settings.source.reads_episodes:
        raise ConfigError(
            "the environment rewards episodes, and reward-check has texts alone: play some with rlhf chat --episodes"
        )
    source = settings.source.for_check()
    source.check()
    rows, skips = _rows(dataset, settings.limit, columns or {}, lambda values: _right_answer(source, values, answer))
    models = list(source.model_paths().values())
    tokens: Any = _load_tokenizer(tokenizer or models[0]) if models else byte_tokenizer()
    errors: list[str] = []
    built = build_source(source, tokens, make_engine(RunConfig()), errors.append, leaves_out=True)
    errors.clear()  # other warnings
    result = check_reward(
        source.describe(),
        rows,
        _scorer(built, tokens, errors),
        best=source.best_score if best is None else best,
        is_learned=source.is_learned,
        progress=announced_share(_to_stderr, source.describe()),
    )
    return replace(result, notes=(*result.notes, skips.summary())) if skips.skipped else result


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _is_policy_run(target: str) -> bool:
    """Return whether a folder holds a policy's run. A reward model's run does not count: it is a reward itself."""
    file = Path(target) / "config.yaml"
    return file.is_file() and not isinstance(load_any(file), RewardModelConfig)


def _config_file(target: str) -> Path:
    path = Path(target)
    return path / "config.yaml" if path.is_dir() else path


def _rows(
    dataset: str | Path | Iterable[Mapping[str, Any]],
    limit: int,
    columns: Mapping[str, str],
    answer_of: Callable[[Mapping[str, Any]], str | None],
) -> tuple[list[CheckRow], RowCounts]:
    """Read the prompts as a run does, with the columns of their rows and their right answers; count the other rows."""
    if isinstance(dataset, str | Path):
        skips = RowCounts(str(dataset))
        rows = load_rows(DatasetConfig(path=str(dataset), columns=dict(columns)), skips)
    else:
        skips = RowCounts("the rows")
        rows = [DataRow(dict(values), "the rows", number) for number, values in enumerate(given_rows(dataset), start=1)]
    made = []
    for row, parsed in PROMPTS.read(rows, skips, turns=True):
        prompt, values = _as_reference(row.values, parsed.prompt)
        try:
            made.append(CheckRow(prompt, values, answer_of(values)))
        except Exception as error:  # a verifier reads any columns
            detail = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            skips.add(row, "no right answer can be made", detail)
        if len(made) == limit:
            break
    skips.used = len(made)
    skips.require_rows()
    return made, skips


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run, an ensemble or a model."""
    member = next(iter(member_folders(path)), path)
    return load_tokenizer(model_folder(str(member)))


def _as_reference(values: Mapping[str, Any], prompt: Prompt) -> tuple[str, Mapping[str, Any]]:
    """Return the prompt's text and what a reward may read of its row, as `rlhf.data.prompts` gives them."""
    if isinstance(prompt, str):
        return prompt, {**values, "prompt": prompt}
    text = values["prompt"] if isinstance(values.get("prompt"), str) else str(prompt[-1]["content"])
    flag = {} if isinstance(values.get("prompt"), str) else {CONVERSATION: True}
    return str(text), {**values, "prompt": str(text), MESSAGES: list(prompt), **flag}


def _right_answer(source: Source, values: Mapping[str, Any], answer: str | None) -> str | None:
    """Return the right answer to a row: the named column, the source's answer for the row, or a usual column.

    Raises:
        ValueError: the named column is no text.
    """
    if answer is not None:
        value = values.get(answer)
        if value is not None and not isinstance(value, str | int | float):
            raise ValueError(f"the column {answer!r} has a {type(value).__name__}: an answer is a text")
        return None if value is None else str(value)
    made = source.reference(values)
    if made is not None:
        return made
    usual = (values.get(name) for name in ANSWER_COLUMNS)
    return next((value for value in usual if isinstance(value, str) and value), None)


def _scorer(source: RewardSource, tokenizer: Any, errors: list[str]) -> Score:
    """Return a scorer of texts by a source; the first to fail takes the first of `errors`."""

    def score(rows: Sequence[CheckRow], texts: Sequence[str]) -> Graded:
        graded = source(_completions(rows, texts, tokenizer))
        scores = [None if math.isnan(value) else value for value in graded.values.tolist()]
        failures = (graded.parts.get(f"{GRADING}{state}") for state in ("timeout", "error"))
        failed = sum(int(part.sum()) for part in failures if part is not None)
        return Graded(scores, failed, errors.pop(0) if failed and errors else "")

    return score


def _completions(rows: Sequence[CheckRow], texts: Sequence[str], tokenizer: Any) -> Completions:
    """Encode prompts and completions as a sampler would return them, each ended by EOS."""
    end = tokenizer.eos_token_id
    prompts = [_encode(row.prompt, tokenizer) or [end] for row in rows]
    ids = [[*_encode(text, tokenizer), end] for text in texts]
    return as_completions(prompts, ids, pad_id=end, references=[row.values for row in rows], finished=True)


def _encode(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids

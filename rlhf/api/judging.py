"""evaluate and sample: models that are trained already, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.api.runs import RunResult
from rlhf.commands.checks import SampleOptions, check_sampling, suite_settings
from rlhf.config.load import load_chat_format, load_run
from rlhf.config.sections import RewardModelConfig
from rlhf.data.paths import resolve_best
from rlhf.factory.evaluation import START, PolicyComparison, compare_models
from rlhf.factory.reward_model import compute_report_card
from rlhf.factory.sampler import NO_TEMPLATE, Completer
from rlhf.factory.suites import evaluate_suite, load_model_for_suite
from rlhf.runtime.seeding import derive_seed
from rlhf.suites.figures import SuiteResult


def sample(
    model: str | Path | RunResult,
    prompts: str | Sequence[str],
    *,
    count: int = 1,
    seed: int = 0,
    greedy: bool = False,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    raw: bool = False,
) -> list[list[str]]:
    """Complete prompts, with the sampler that training uses; return `count` texts for each.

    Args:
        model: a run, a model folder or a hub id.
        prompts: one prompt or several: user messages where the model has a chat template.
        count: completions of each prompt.
        seed: another seed gives other completions.
        greedy: take the most likely token each time.
        max_new_tokens: the longest completion; None: as in the run.
        temperature: divides the logits; None: as in the run.
        raw: give the prompt as it is, without the chat template.

    Raises:
        UserError: an option is wrong, or the model cannot be loaded.
    """
    path = _path(model)
    options = SampleOptions(count=count, seed=seed, greedy=greedy, raw=raw)
    sampling = check_sampling(path, options, max_new_tokens=max_new_tokens, temperature=temperature)
    completer = Completer(path, sampling, chat=NO_TEMPLATE if raw else load_chat_format(path))
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    samples = completer.sample(texts, count=count, key=derive_seed(seed, "sample"), greedy=greedy)
    rows = zip(samples.completion_ids, samples.completion_mask, strict=True)
    completions = [completer.text(ids, mask) for ids, mask in rows]
    return [completions[start : start + count] for start in range(0, len(completions), count)]


def evaluate(
    model: str | Path | RunResult,
    suite: str | None = None,
    *,
    against: str | Path | RunResult = START,
    data: str | Path | None = None,
    limit: int | None = None,
    settings: Sequence[str] = (),
) -> PolicyComparison | SuiteResult | dict[str, Any]:
    """Evaluate a run, as `rlhf eval` does.

    Args:
        model: a run; with a suite, also a model folder or a hub id.
        suite: a suite, such as "ifeval" or "xstest"; None compares the run with another model on its held-out prompts.
        against: the other model: a run or a model folder; the default is the model that the run started from.
        data: the data of the suite.
        limit: the number of rows of the suite to use.
        settings: `key=value` settings over those of the run.

    Returns:
        The comparison of the two models; or the figures of the suite; or, of a reward model's run, its report card.

    Raises:
        UserError: there is nothing to evaluate on, or a model cannot be loaded.
    """
    path, other = _path(model), _path(against)
    if suite is not None:
        source = None if data is None else str(data)
        checked, task = suite_settings(suite, path, data=source, limit=limit, against=other, overrides=settings)
        return evaluate_suite(checked, load_model_for_suite(checked, path), task)
    config = load_run(path, settings)
    if isinstance(config, RewardModelConfig):
        return compute_report_card(config, path)
    return compare_models(config, path, other)


def _path(model: str | Path | RunResult) -> str:
    return resolve_best(str(model.folder if isinstance(model, RunResult) else model))

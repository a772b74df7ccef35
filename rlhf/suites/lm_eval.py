"""Tasks of lm-eval, run by its own evaluator on our log-probabilities and our sampler. Needs the extra lm-eval.

No other module may import this one at its top: rlhf.suites.harness does so once the suite runs.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetsError
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from rlhf.data.pairs import CompletionRows
from rlhf.errors import ConfigError, DataError
from rlhf.evaluation.win_rate import Z95
from rlhf.runtime.seeding import derive_seed
from rlhf.suites.harness import HarnessSuite
from rlhf.suites.questions import Estimate, SuiteResult
from rlhf.suites.subject import Subject, cut_at_stop

MAX_NEW_TOKENS = 256  # for tasks that set none, as in lm-eval's own models
KNOWN_GENERATION = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature"}
_LOAD_ERRORS = (OSError, EOFError, ValueError, RuntimeError, DatasetsError)


@dataclass(frozen=True)
class _GenerationSettings:
    """How completions are sampled; requests with equal settings are sampled together."""

    max_new_tokens: int
    temperature: float | None  # None: greedy


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A Subject as a model of lm-eval.

    Prompts too long for its context lose their start, and `shortened` counts them; so do continuations that do not fit
    into the context themselves, and `cut_continuations` counts these. An answer has at most half of the context;
    `limited_answers` counts those that the task would let be longer.
    """

    def __init__(self, subject: Subject, *, seed: int) -> None:
        """Wrap `subject`; `seed` is of the sampling."""
        super().__init__()
        self.subject = subject
        self.seed = seed
        self.shortened = 0
        self.cut_continuations = 0
        self.limited_answers = 0

    @property
    def eot_token_id(self) -> int:
        """Return the EOS id."""
        return self.subject.encoder.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token that precedes a text without context: the BOS, or the EOS if there is no BOS."""
        prefix = self.subject.encoder.prefix
        return prefix[-1] if prefix else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Return a name for caches, which we do not keep."""
        return self.subject.path

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize a text, with the tokenizer's leading special tokens unless they are already there or not wanted."""
        del kwargs
        encoder = self.subject.encoder
        ids = encoder.text(string)
        return ids if add_special_tokens is False or encoder.head(ids) else [*encoder.prefix, *ids]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template, if `chat_template` is set."""
        return self.subject.encoder.template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text."""
        text = self.subject.encoder.tokenizer.apply_chat_template(
            chat_history,
            chat_template=self.subject.encoder.template.source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.subject.encoder.template.kwargs,
        )
        assert isinstance(text, str)
        return text

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Compute the log-likelihoods of the requests, in the form of lm_eval.api.model.LM, without a progress bar."""
        logprobs: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return logprobs

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Compute the log-likelihood of each continuation, and whether it is the greedy one."""
        del kwargs
        continuations = tuple(self._fit_continuation(continuation) for _, _, continuation in requests)
        prompts = tuple(
            self._truncate_left(context, len(continuation))
            for (_, context, _), continuation in zip(requests, continuations, strict=True)
        )
        rows = CompletionRows(prompts, continuations, self.subject.encoder.pad_id)
        outputs = self.subject.score(rows)
        return list(zip(outputs.logprobs.tolist(), outputs.greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Compute the log-likelihoods of whole texts in windows as long as the context, each token scored once."""
        del disable_tqdm
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(
                token_list=ids,
                prefix_token=self.prefix_token_id,
                max_seq_len=(self.subject.context or len(ids) + 1) - 1,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate completions; of requests with equal settings, request i uses the random numbers of row i."""
        del disable_tqdm
        groups: dict[_GenerationSettings, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(self._generation_settings(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for settings, indices in groups.items():
            for i, text in zip(
                indices, self._sample_texts(settings, [requests[i].args[0] for i in indices]), strict=True
            ):
                texts[i] = cut_at_stop(text, _stop_texts(requests[i].args[1]))
        return texts

    def _sample_texts(self, settings: _GenerationSettings, contexts: Sequence[str]) -> list[str]:
        """Sample one completion of each context, greedily if the settings have no temperature."""
        sampling = self.subject.sampling.model_copy(
            update={"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature or 1.0}
        )
        subject = self.subject.with_sampling(sampling)
        ids = [self._truncate_left(self.tok_encode(text), settings.max_new_tokens) for text in contexts]
        key = derive_seed(self.seed, "lm-eval")
        return subject.texts(subject.sample(ids, contexts, key=key, greedy=settings.temperature is None))

    def _generation_settings(self, arguments: Mapping[str, Any]) -> _GenerationSettings:
        """Parse the generation arguments of a request, and count it if the context is too short for its answer.

        Raises:
            ConfigError: the request samples with arguments that we do not support.
        """
        temperature = _temperature(arguments)
        if temperature is not None:
            _check_sampling(arguments)
        wanted = int(arguments.get("max_gen_toks") or arguments.get("max_new_tokens") or MAX_NEW_TOKENS)
        most = wanted if self.subject.context is None else max(1, self.subject.context // 2)
        self.limited_answers += wanted > most
        return _GenerationSettings(min(wanted, most), temperature)

    def _fit_continuation(self, ids: list[int]) -> list[int]:
        """Drop the start of a continuation that leaves no token of the context to its prompt, and count it."""
        limit = len(ids) if self.subject.context is None else max(1, self.subject.context - 1)
        self.cut_continuations += len(ids) > limit
        return ids[-limit:] if limit else ids

    def _truncate_left(self, ids: list[int], room: int) -> list[int]:
        """Drop the start of a prompt that does not fit into the context with `room` more tokens, and count it."""
        limit = len(ids) if self.subject.context is None else max(1, self.subject.context - room)
        self.shortened += len(ids) > limit
        return ids[-limit:]


def run_task(settings: HarnessSuite, subject: Subject, task: str) -> SuiteResult:
    """Run a task, group or tag of lm-eval.

    Raises:
        ConfigError: there is no such task, or it samples in a way that we do not support.
        DataError: its data cannot be loaded.
    """
    if settings.apply_chat_template and subject.encoder.template.source is None:
        raise ConfigError("apply_chat_template: this tokenizer has no chat template; set chat_template to a file")
    model = HarnessModel(subject, seed=settings.seed)
    with _silence_lm_eval():
        manager, tasks = _find_tasks(_folder(settings.include), task)
        output = simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            bootstrap_iters=1000,
            log_samples=False,
            apply_chat_template=settings.apply_chat_template,
            task_manager=manager,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
        )
    return _to_suite_result(output, task, tuple(_notes(model)))


def _notes(model: HarnessModel) -> Iterator[str]:
    """Yield notes for the reader of the result about texts that did not fit into the model's context."""
    if model.shortened:
        yield f"{model.shortened:,} prompts were too long for the model and lost their start"
    if model.cut_continuations:
        yield f"{model.cut_continuations:,} continuations were too long for the model: only their ends were scored"
    if model.limited_answers:
        yield (
            f"{model.limited_answers:,} answers were limited to half of the model's context, which is fewer tokens "
            "than the task allows"
        )


def _folder(include: str | None) -> str | None:
    """Check and expand the path of the user's folder of task files.

    Raises:
        DataError: there is no such folder.
    """
    if include is not None and not Path(include).expanduser().is_dir():
        raise DataError(f"include: no folder {include!r} of task files")
    return None if include is None else str(Path(include).expanduser())


def _find_tasks(folder: str | None, task: str) -> tuple[Any, list[Any]]:
    """Find a task by name; return a manager that knows it, and the task or the members of its group or tag.

    The user's own folder is searched alone at first, because listing lm-eval's thousands of files takes long.

    Raises:
        ConfigError: there is no such task.
        DataError: it cannot be loaded.
    """
    if folder is not None:
        user_manager = TaskManager(include_path=folder, include_defaults=False)
        if task in user_manager.all_tasks:
            return user_manager, _load(user_manager, task)
    manager = TaskManager(include_path=folder)
    if task not in manager.all_tasks:
        similar = difflib.get_close_matches(task, manager.all_tasks, n=3)
        hint = f"; did you mean {', '.join(similar)}?" if similar else ""
        raise ConfigError(f"lm-eval has no task {task!r}{hint} (tasks of your own: --data FOLDER)")
    return manager, _load(manager, task)


def _load(manager: Any, task: str) -> list[Any]:
    """Load a task, or the members of a group or tag.

    Raises:
        DataError: it cannot be loaded.
    """
    try:
        loaded = manager.load([task])
    except (*_LOAD_ERRORS, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"lm-eval's task {task!r} could not be loaded: {reason}") from error
    return [loaded["groups"][task]] if task in loaded["groups"] else list(loaded["tasks"].values())


def _to_suite_result(output: Mapping[str, Any], task: str, notes: tuple[str, ...]) -> SuiteResult:
    results: Mapping[str, Mapping[str, Any]] = output["results"]
    counts: Mapping[str, Mapping[str, int]] = output["n-samples"]
    sizes = {name: int(count["effective"]) for name, count in counts.items()}
    groups = {name: tuple(_figures(values, sizes.get(name, 0))) for name, values in results.items()}
    total = sum(sizes.values())
    figures = groups.pop(task, ()) if task in groups else ()
    if not figures and len(groups) == 1:
        figures, groups = next(iter(groups.values())), {}
    return SuiteResult(figures=figures, n=total, skipped={}, notes=notes, groups=groups)


def _figures(values: Mapping[str, Any], n: int) -> Iterator[Estimate]:
    """Yield the metrics of a task, with normal intervals from their standard errors.

    The key `acc,none` is the figure acc; the name of another filter stays, in parentheses.
    """
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = metric if filter_name == "none" else f"{metric} ({filter_name})"
        size = int(values.get("sample_len") or n)
        yield _estimate(name, float(value), values.get(f"{metric}_stderr,{filter_name}"), size)


def _estimate(name: str, value: float, error: object, n: int) -> Estimate:
    """Build the estimate of a metric, with a normal interval if its standard error is known."""
    meaning = "as lm-eval defines it"
    if not isinstance(error, int | float):
        return Estimate(name, value, low=None, high=None, n=n, interval="none", meaning=meaning)
    half = Z95 * error
    return Estimate(name, value, low=value - half, high=value + half, n=n, interval="normal", meaning=meaning)


def _temperature(arguments: Mapping[str, Any]) -> float | None:
    """Return the temperature a request samples at; None if it is greedy, as at temperature 0."""
    given = arguments.get("temperature")
    temperature = 1.0 if given is None else float(given)
    return temperature if arguments.get("do_sample") and temperature > 0 else None


def _check_sampling(arguments: Mapping[str, Any]) -> None:
    """Check that a request samples with arguments that we support.

    Raises:
        ConfigError: it has others.
    """
    unknown = {name for name, value in arguments.items() if name not in KNOWN_GENERATION and value is not None}
    if unknown:
        raise ConfigError(
            f"this task samples with {', '.join(sorted(unknown))}; we sample from the whole distribution at a "
            "temperature, so the figures would differ from the task's"
        )


def _stop_texts(arguments: Mapping[str, Any]) -> list[str]:
    """Return the stop texts of a request: a completion ends before the first of them."""
    until = arguments.get("until") or []
    return [until] if isinstance(until, str) else list(until)


@contextmanager
def _silence_lm_eval() -> Iterator[None]:
    """Log only errors of lm-eval: it logs every setting, and those that matter are in the result."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

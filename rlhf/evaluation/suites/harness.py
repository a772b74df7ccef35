"""Tasks of lm-eval through its own evaluator, over our log-probabilities and our sampler. Needs the extra lm-eval.

Nothing else may import this module at its top: rlhf.commands.suites does so once it knows the extra is installed.
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

from rlhf.data.annotated import CompletionRows
from rlhf.errors import ConfigError, DataError
from rlhf.evaluation.suites.cutting import cut
from rlhf.evaluation.suites.estimates import Z95
from rlhf.evaluation.suites.figures import Figure, SuiteResult
from rlhf.evaluation.suites.settings import HarnessSettings
from rlhf.evaluation.suites.subject import Subject
from rlhf.runtime.seeding import derive

MAX_NEW_TOKENS = 256  # where a task does not say, as in lm-eval's own models
KNOWN_GENERATION = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature"}
_UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, DatasetsError)


@dataclass(frozen=True)
class _Way:
    """How completions are drawn: requests of one way are drawn together."""

    max_new_tokens: int
    temperature: float | None  # None: greedy


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A Subject as lm-eval's model. Prompts too long for its context lose their start, which `notes` counts."""

    def __init__(self, subject: Subject, *, seed: int) -> None:
        super().__init__()
        self.subject = subject
        self.seed = seed
        self.shortened = 0

    @property
    def eot_token_id(self) -> int:
        """The EOS."""
        return self.subject.encoder.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: the BOS, or where there is none the EOS."""
        prefix = self.subject.encoder.prefix
        return prefix[-1] if prefix else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """A name for caches, which we do not keep."""
        return self.subject.path

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, with the special tokens the tokenizer puts first unless they are there or unwanted."""
        del kwargs
        encoder = self.subject.encoder
        ids = list(encoder.tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"])
        return ids if add_special_tokens is False or encoder.head(ids) else [*encoder.prefix, *ids]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template, where it is wanted."""
        return self.subject.encoder.template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
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
        """See lm_eval.api.model.LM; without its bars."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        del kwargs
        prompts = tuple(self._shortened(context, len(wanted)) for _, context, wanted in requests)
        rows = CompletionRows(prompts, tuple(wanted for _, _, wanted in requests), self.subject.encoder.pad_id)
        said = self.subject.says(rows)
        return list(zip(said.logprobs.tolist(), said.greedy.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """See lm_eval.api.model.LM: windows as long as the context, each token read once."""
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
        """See lm_eval.api.model.LM; request i of a way has random numbers of its own."""
        del disable_tqdm
        ways: dict[_Way, list[int]] = {}
        for i, request in enumerate(requests):
            ways.setdefault(self._way(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for way, its in ways.items():
            for i, text in zip(its, self._written(way, [requests[i].args[0] for i in its]), strict=True):
                texts[i] = cut(text, _stops(requests[i].args[1]))
        return texts

    def _written(self, way: _Way, contexts: Sequence[str]) -> list[str]:
        sampling = self.subject.sampling.model_copy(
            update={"max_new_tokens": way.max_new_tokens, "temperature": way.temperature or 1.0}
        )
        writer = self.subject.writing(sampling)
        ids = [self._shortened(self.tok_encode(text), way.max_new_tokens) for text in contexts]
        key = derive(self.seed, "lm-eval")
        return writer.texts(writer.sample(ids, contexts, key=key, greedy=way.temperature is None))

    def _way(self, wanted: Mapping[str, Any]) -> _Way:
        unknown = {name for name, value in wanted.items() if name not in KNOWN_GENERATION and value is not None}
        if wanted.get("do_sample") and unknown:
            raise ConfigError(
                f"this task samples with {', '.join(sorted(unknown))}; we sample from the whole distribution at a "
                "temperature, so that its figures would not be those of the task"
            )
        tokens = int(wanted.get("max_gen_toks") or wanted.get("max_new_tokens") or MAX_NEW_TOKENS)
        if self.subject.context is not None:
            tokens = min(tokens, max(1, self.subject.context // 2))
        temperature = float(wanted.get("temperature") or 1.0)
        return _Way(tokens, temperature if wanted.get("do_sample") else None)

    def _shortened(self, ids: list[int], room: int) -> list[int]:
        """The prompt, without its start where with `room` more tokens it is too long."""
        most = len(ids) if self.subject.context is None else max(1, self.subject.context - room)
        self.shortened += len(ids) > most
        return ids[-most:]


def run_harness(settings: HarnessSettings, subject: Subject, task: str) -> SuiteResult:
    """Measure a task, group or tag of lm-eval.

    Raises:
        ConfigError: there is no such task, or it samples as we do not.
        DataError: its data cannot be had.
    """
    if settings.apply_chat_template and subject.encoder.template.source is None:
        raise ConfigError("apply_chat_template: this tokenizer has no chat template; set chat_template to a file")
    model = HarnessModel(subject, seed=settings.seed)
    with _quiet():
        manager, tasks = _tasks(_folder(settings.include), task)
        found = simple_evaluate(
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
    note = f"{model.shortened:,} prompts were too long for the model and lost their start" if model.shortened else ""
    return _result(found, task, (note,) if note else ())


def _folder(include: str | None) -> str | None:
    if include is not None and not Path(include).expanduser().is_dir():
        raise DataError(f"include: no folder {include!r} of task files")
    return None if include is None else str(Path(include).expanduser())


def _tasks(folder: str | None, task: str) -> tuple[Any, list[Any]]:
    """A manager that knows the task, and the task, or what its group or tag stands for.

    The user's own folder is looked into alone at first: reading the names of lm-eval's thousands of files takes long.
    """
    if folder is not None:
        own = TaskManager(include_path=folder, include_defaults=False)
        if task in own.all_tasks:
            return own, _load(own, task)
    manager = TaskManager(include_path=folder)
    if task not in manager.all_tasks:
        near = difflib.get_close_matches(task, manager.all_tasks, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"lm-eval has no task {task!r}{hint} (tasks of your own: --data FOLDER)")
    return manager, _load(manager, task)


def _load(manager: Any, task: str) -> list[Any]:
    try:
        loaded = manager.load([task])
    except (*_UNREADABLE, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"lm-eval's task {task!r} could not be loaded: {reason}") from error
    return [loaded["groups"][task]] if task in loaded["groups"] else list(loaded["tasks"].values())


def _result(found: Mapping[str, Any], task: str, notes: tuple[str, ...]) -> SuiteResult:
    results: Mapping[str, Mapping[str, Any]] = found["results"]
    counts: Mapping[str, Mapping[str, int]] = found["n-samples"]
    sizes = {name: int(count["effective"]) for name, count in counts.items()}
    groups = {name: tuple(_figures(values, sizes.get(name, 0))) for name, values in results.items()}
    total = sum(sizes.values())
    figures = groups.pop(task, ()) if task in groups else ()
    if not figures and len(groups) == 1:
        figures, groups = next(iter(groups.values())), {}
    return SuiteResult(figures=figures, n=total, skipped={}, notes=notes, groups=groups)


def _figures(values: Mapping[str, Any], n: int) -> Iterator[Figure]:
    """The metrics of one task: `acc,none` is acc; a filter's name stays. Its standard error makes the interval."""
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric} ({kind})"
        half = Z95 * error if isinstance(error, int | float) else None
        size = int(values.get("sample_len") or n)
        yield Figure(
            name,
            float(value),
            low=None if half is None else value - half,
            high=None if half is None else value + half,
            n=size,
            interval="none" if half is None else "normal",
            meaning="as lm-eval defines it",
        )


def _stops(wanted: Mapping[str, Any]) -> list[str]:
    """The texts a completion ends before."""
    until = wanted.get("until") or []
    return [until] if isinstance(until, str) else list(until)


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval tells of every setting; what matters of it is in the result."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

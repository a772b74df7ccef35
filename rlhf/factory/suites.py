"""The evaluation suites by name: their settings, and how each is run on a model."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf.config.load import dump
from rlhf.errors import ConfigError, install_hint
from rlhf.factory.context import model_folder
from rlhf.factory.rewards import build_source
from rlhf.models.origin import weights_fingerprint
from rlhf.runtime.engine import Engine
from rlhf.suites.figures import SuiteResult
from rlhf.suites.gsm8k import run_gsm8k
from rlhf.suites.hh import run_hh
from rlhf.suites.ifeval import run_ifeval
from rlhf.suites.lab import run_lab
from rlhf.suites.persona import run_persona
from rlhf.suites.settings import (
    Gsm8kSettings,
    HarnessSettings,
    HhSettings,
    IfevalSettings,
    LabSettings,
    PersonaSettings,
    SuiteSettings,
    XstestSettings,
)
from rlhf.suites.subject import Subject, load_subject
from rlhf.suites.xstest import run_xstest
from rlhf.tracking.run_folder import versions, write_atomically
from rlhf.tracking.trackers import to_json

LM_EVAL = "lm-eval"


@dataclass(frozen=True)
class Suite:
    """A suite: its settings, what its --data is, and the function that runs it."""

    settings: type[SuiteSettings]
    data: str
    run: Callable[[Any, Subject, str], SuiteResult]
    data_key: str = "dataset.path"
    limit_key: str = "dataset.limit"
    default_data: str | None = None


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
        matches = difflib.get_close_matches(name, [*SUITES, f"{LM_EVAL}:TASK"], n=1, cutoff=0.4)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        known = ", ".join(key for key in SUITES if key != LM_EVAL)
        raise ConfigError(f"--suite: {name!r} is not one of {known}, {LM_EVAL}:TASK{hint}")
    return SUITES[suite], task


def write_result(
    path: Path, name: str, target: str, result: SuiteResult, settings: SuiteSettings, subject: Subject
) -> None:
    """Write the result of a suite on a model as JSON, with the settings and package versions used."""
    content = {
        "suite": name,
        "model": {"path": target, "weights": weights_fingerprint(subject.model)},
        **result.as_json(),
        "config": dump(settings),
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(to_json(content), indent=2, ensure_ascii=False) + "\n")


def load_model_for_suite(settings: SuiteSettings, path: str, *, like: Subject | None = None) -> Subject:
    """Load the model at `path` for a suite; with `like`, it shares that model's tokenizer and chat template."""
    return load_subject(
        model_folder(path),
        path=path,
        sampling=settings.sampling,
        chat_template=settings.chat_format,
        dtype=settings.dtype,
        device=_device(settings),
        rows_per_pass=settings.rows_per_pass,
        trust_remote_code=settings.trust_remote_code,
        encoder=None if like is None else like.encoder,
    )


def _load_reference(settings: HhSettings | LabSettings, subject: Subject) -> Subject | None:
    return None if settings.reference is None else load_model_for_suite(settings, settings.reference, like=subject)


def _device(settings: SuiteSettings) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ConfigError("device: cuda, but there is no GPU here; set device=cpu or device=auto")
    return torch.device("cuda" if has_gpu and settings.device != "cpu" else "cpu")


def _hh(settings: HhSettings, subject: Subject, _: str) -> SuiteResult:
    config = settings.source
    source = None if config is None else build_source(config, subject.encoder.tokenizer, Engine(subject.device))
    return run_hh(settings, subject, reference=_load_reference(settings, subject), source=source)


def _persona(settings: PersonaSettings, subject: Subject, _: str) -> SuiteResult:
    return run_persona(settings, subject)


def _gsm8k(settings: Gsm8kSettings, subject: Subject, _: str) -> SuiteResult:
    return run_gsm8k(settings, subject)


def _ifeval(settings: IfevalSettings, subject: Subject, _: str) -> SuiteResult:
    config = settings.source if settings.best_of > 1 else None
    source = None if config is None else build_source(config, subject.encoder.tokenizer, Engine(subject.device))
    return run_ifeval(settings, subject, source=source)


def _xstest(settings: XstestSettings, subject: Subject, _: str) -> SuiteResult:
    return run_xstest(settings, subject)


def _lab(settings: LabSettings, subject: Subject, _: str) -> SuiteResult:
    return run_lab(settings, subject, reference=_load_reference(settings, subject))


def _harness(settings: HarnessSettings, subject: Subject, task: str) -> SuiteResult:
    result: SuiteResult = importlib.import_module("rlhf.suites.lm_eval").run_harness(settings, subject, task)
    return result


SUITES: dict[str, Suite] = {
    "hh": Suite(HhSettings, "preference pairs, as of Anthropic's HH: chosen and rejected transcripts", _hh),
    "persona": Suite(
        PersonaSettings,
        "yes/no items with question, answer_matching_behavior and answer_not_matching_behavior",
        _persona,
    ),
    "gsm8k": Suite(Gsm8kSettings, "problems with question and an answer that ends in #### and a number", _gsm8k),
    "ifeval": Suite(IfevalSettings, "prompts with instruction_id_list and kwargs, as IFEval's", _ifeval),
    "xstest": Suite(XstestSettings, "prompts with a label, safe or unsafe, as XSTest's", _xstest),
    "lab": Suite(LabSettings, "prompts of the lab", _lab, default_data="lab:eval_prompts.jsonl"),
    LM_EVAL: Suite(HarnessSettings, "a folder of task files", _harness, data_key="include", limit_key="limit"),
}

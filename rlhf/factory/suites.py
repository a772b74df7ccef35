"""How each evaluation suite is run on a model; rlhf.suites.settings has the suites by name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf.config.load import dump
from rlhf.factory.context import model_folder
from rlhf.factory.rewards import build_source
from rlhf.models.origin import weights_fingerprint
from rlhf.runtime.device import choose_device, fallback_note
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


def write_result(
    path: Path, name: str, target: str, result: SuiteResult, settings: SuiteSettings, subject: Subject
) -> None:
    """Write the result of a suite on a model as JSON, with the settings and package versions used."""
    content = {
        "suite": name,
        "model": {"path": target, "weights": weights_fingerprint(subject.model)},
        **result.as_json(),
        "config": {**dump(settings), "dtype": subject.dtype},  # the one used, which the CPU may have chosen
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
        device=choose_device(settings.device, key="device"),
        rows_per_pass=settings.rows_per_pass,
        trust_remote_code=settings.trust_remote_code,
        encoder=None if like is None else like.encoder,
    )


def _load_reference(settings: HhSettings | LabSettings, subject: Subject) -> Subject | None:
    return None if settings.reference is None else load_model_for_suite(settings, settings.reference, like=subject)


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


_RUNNERS: dict[type[SuiteSettings], Callable[[Any, Subject, str], SuiteResult]] = {
    HhSettings: _hh,
    PersonaSettings: _persona,
    Gsm8kSettings: _gsm8k,
    IfevalSettings: _ifeval,
    XstestSettings: _xstest,
    LabSettings: _lab,
    HarnessSettings: _harness,
}


def evaluate_suite(settings: SuiteSettings, subject: Subject, task: str) -> SuiteResult:
    """Run the suite that has these settings on a model; `task` is the one of lm-eval, else empty."""
    result = _RUNNERS[type(settings)](settings, subject, task)
    if subject.dtype == settings.dtype:
        return result
    return replace(result, notes=(*result.notes, fallback_note("dtype")))

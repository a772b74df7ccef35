"""Use any Python function as a reward, by its import path."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, TypeVar

from rlhf.errors import RewardError, UserError
from rlhf.rewards.source import BatchDecoder, Texts, checked_scores, decode, quoted
from rlhf.types import Completions, Scores

T = TypeVar("T")

REPEAT_INTERVAL_S = 1.0  # seconds after which code that swallows the interruption is interrupted again

OVERDUE_S = 1e-3  # a timer of 0 s would never fire


class TimeLimitExceeded(BaseException):
    """The time limit is exceeded. A BaseException, so that `except Exception` in the user code does not catch it."""


def run_with_timeout(seconds: float | None, call: Callable[[], T]) -> T:
    """Return what `call` returns, within a time limit in seconds; None: no limit.

    In the main thread a signal interrupts the call, even while it sleeps, waits for a socket or matches a regular
    expression; a loop inside a compiled extension has to finish first. In any other thread the call is abandoned and
    goes on in the background. A timer that is already set is set again afterwards; if it was due meanwhile, it fires
    right after the call.

    Raises:
        TimeLimitExceeded: the call took longer.
    """
    if seconds is None:
        return call()
    if threading.current_thread() is not threading.main_thread():
        return _run_in_thread(seconds, call)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise TimeLimitExceeded

    previous_handler = signal.signal(signal.SIGALRM, interrupt)
    started = time.monotonic()
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_INTERVAL_S)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous_handler)
        _restore_timer(*previous_timer, since=started)


def _restore_timer(remaining: float, interval: float, *, since: float) -> None:
    """Set the real-time timer again that had `remaining` seconds left (0: none was set) at the time `since`."""
    if remaining > 0:
        left = remaining - (time.monotonic() - since)
        signal.setitimer(signal.ITIMER_REAL, max(left, OVERDUE_S), interval)


class _CaughtError:
    """Context manager that catches any exception and keeps it for another thread to raise."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


def _run_in_thread(seconds: float, call: Callable[[], T]) -> T:
    results: list[T] = []
    caught = _CaughtError()

    def work() -> None:
        with caught:
            results.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if caught.error is not None:
        raise caught.error
    if not results:
        raise TimeLimitExceeded
    return results[0]


class FunctionReward:
    """Calls fn(prompts=[str], completions=[str], references=[dict], **kwargs), which returns one number per completion.

    The function returns a list (or array) of numbers, or a pair of that and a dict of named parts, each such a list.
    """

    def __init__(
        self, target: str, kwargs: Mapping[str, Any], tokenizer: BatchDecoder, *, timeout_s: float | None = None
    ) -> None:
        """Import `target` (module:function or path/to/file.py:function); `timeout_s` limits a call (None: no limit).

        Raises:
            RewardError: the target cannot be imported, is not callable, or does not accept these arguments.
        """
        self.target = target
        self.kwargs = dict(kwargs)
        self.tokenizer = tokenizer
        self.timeout_s = timeout_s
        self._function = load_function(target)
        _check_arguments(self._function, target, self.kwargs)

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions by calling the function.

        Raises:
            RewardError: the function fails, times out, or does not return one finite number per completion.
        """
        texts = decode(completions, self.tokenizer)
        with _UserCode(f"the reward function {self.target!r}", f" ({_call_info(texts)})"):
            result = self._call(texts)
        values, parts = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(parts, Mapping):  # a tuple of two scores
            values, parts = result, {}
        return checked_scores(values, parts, texts, who=f"the reward function {self.target!r}")

    def _call(self, texts: Texts) -> Any:
        arguments = {"prompts": texts.prompts, "completions": texts.completions, "references": texts.references}
        try:
            return run_with_timeout(self.timeout_s, lambda: self._function(**arguments, **self.kwargs))
        except TimeLimitExceeded as error:
            raise RewardError(
                f"the reward function {self.target!r} gave no answer in {self.timeout_s:g} s ({_call_info(texts)}): "
                "look for what it waits for, or raise reward.source.timeout_s"
            ) from error


def load_function(target: str) -> Callable[..., Any]:
    """Import the function that `target` names: module:function, or path/to/file.py:function (a file on its own).

    Raises:
        RewardError: there is no such module, file or function, or its import fails.
    """
    location, colon, name = target.rpartition(":")
    if not (colon and location and name):
        raise RewardError(f"reward target {target!r}: write module:function or path/to/file.py:function")
    module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location)
    function = getattr(module, name, None)
    if function is None:
        raise RewardError(f"reward target {target!r}: {location} has no {name!r}{_suggest_function(name, module)}")
    if not callable(function):
        raise RewardError(f"reward target {target!r}: {name!r} is a {type(function).__name__}, not a function")
    checked: Callable[..., Any] = function
    return checked


def _load_module(name: str) -> ModuleType:
    with _UserCode(f"importing the reward module {name!r}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only if the requested module is the missing one: what that module itself fails to import is another error.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise RewardError(
                f"no module {name!r}: install it or put its folder on PYTHONPATH, "
                "or name a file: path/to/file.py:function"
            ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        candidates = [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        matches = difflib.get_close_matches(str(path), candidates, n=1)
        raise RewardError(f"no reward file {str(path)!r}{_did_you_mean(matches)}")
    name = f"reward file {path.resolve()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module there
    with _UserCode(f"importing the reward file {str(path)!r}"):
        spec.loader.exec_module(module)
    return module


def _suggest_function(name: str, module: ModuleType) -> str:
    return _did_you_mean(
        difflib.get_close_matches(name, [n for n in vars(module) if callable(getattr(module, n))], n=1)
    )


def _did_you_mean(matches: list[str]) -> str:
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _check_arguments(function: Callable[..., Any], target: str, kwargs: Mapping[str, Any]) -> None:
    """Check the arguments against the function's signature, so that a misspelled one fails before any training."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have none
        return
    reserved = sorted({"prompts", "completions", "references"} & set(kwargs))
    if reserved:
        raise RewardError(f"reward.source.kwargs: {reserved[0]!r} is given to {target!r} already; choose another name")
    try:
        signature.bind(prompts=[], completions=[], references=[], **kwargs)
    except TypeError as error:
        raise RewardError(
            f"the reward function {target!r} is called with prompts, completions, references"
            f"{''.join(f', {name}' for name in kwargs)}, but has the arguments {signature}: {error}"
        ) from error


def _call_info(texts: Texts) -> str:
    first = f"; the first: {quoted(texts.completions[0])}" if texts.completions else ""
    return f"called with {len(texts.completions)} completions{first}"


class _UserCode:
    """Context manager around user code: any exception becomes a RewardError that says where it was raised."""

    def __init__(self, what: str, context: str = "") -> None:
        self.what = what
        self.context = context

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return
        last = traceback.format_exception_only(error)[-1].strip()
        frame = traceback.extract_tb(trace)[-1]
        raise RewardError(f"{self.what} failed: {last} at {frame.filename}:{frame.lineno}{self.context}") from error

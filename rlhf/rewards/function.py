"""Use any Python function as a reward, by its import path."""

from __future__ import annotations

import inspect
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Gt

from rlhf.errors import RewardError, did_you_mean
from rlhf.references import CONVERSATION, MESSAGES
from rlhf.rewards.source import BatchDecoder, Source, SourceContext, Texts, checked_scores, decode, quoted
from rlhf.user_code import UserCode, files_of, load_function

if TYPE_CHECKING:
    from rlhf.types import Completions, Scores

T = TypeVar("T")

REPEAT_INTERVAL_S = 1.0  # seconds after which code that swallows the interruption is interrupted again

OVERDUE_S = 1e-3  # a timer of 0 s would never fire


class TimeLimitExceeded(BaseException):
    """The time limit is exceeded. A BaseException, so that `except Exception` in the user code does not catch it."""


def run_with_timeout(seconds: float | None, call: Callable[[], T]) -> T:
    """Return the result of `call`, within a time limit in seconds; None: no limit.

    In the main thread a signal interrupts the call, even while it sleeps, waits for a socket or matches a regular
    expression; a loop inside a compiled extension has to finish first. In any other thread, and on Windows, which has
    no timer signal, the call is abandoned and goes on in the background. A timer that is already set is set again
    afterwards; if it was due meanwhile, it fires right after the call.

    Raises:
        TimeLimitExceeded: the call took longer.
    """
    if seconds is None:
        return call()
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
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


class FunctionSource(Source):
    """A Python function, given by its import path."""

    is_learned: ClassVar[bool] = False

    type: Literal["function"] = "function"
    target: str
    """module:function, or path/to/file.py:function; called with prompts, completions and references (lists)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to the function unchanged."""
    timeout_s: Annotated[float, Gt(0)] | None = None
    """Maximum seconds per call; after that the run saves and stops. null: no limit."""

    def check(self) -> None:
        """Import the function and check its arguments.

        Raises:
            RewardError: it cannot be imported, is not callable, or does not accept these arguments.
        """
        check_function(self.target, self.kwargs)

    def code_files(self) -> Mapping[str, Path]:
        """Return the file of the function, if the target names one."""
        return files_of(self.target)

    def describe(self) -> str:
        """Return the import path."""
        return self.target

    def build(self, context: SourceContext) -> FunctionReward:
        """Return the source that calls the function.

        Raises:
            RewardError: it cannot be imported, is not callable, or does not accept these arguments.
        """
        return FunctionReward(
            self.target, self.kwargs, context.tokenizer, timeout_s=self.timeout_s, may_abstain=context.may_abstain
        )


ARGUMENTS = ("prompts", "completions", "references")
FORMS = (
    "Write score(prompts, completions, references), of which any may be left out, or TRL's form "
    "score(completions, COLUMN, **kwargs), with columns of the rows as arguments"
)


class FunctionReward:
    """Calls a function on texts, in either of two forms, told apart by the names of its arguments.

    1. fn(prompts, completions, references, **kwargs): lists of texts, and of the rows' columns as dictionaries. The
       arguments that the function does not have are left out.
    2. TRL's, fn(completions, solution, **kwargs): without `references`, and with arguments of other names or
       `**kwargs`. The columns of the rows are keyword arguments, each a list. If a row is a conversation, its prompt is
       a list of messages and its completion is [{"role": "assistant", "content": text}]; otherwise both are texts.

    The function returns a list (or array) of numbers, or a pair of that and a dict of named parts, each such a list.
    None means that the completion is not scored by this function: it is accepted in an ensemble, in which another
    source has to score the completion, and is an error otherwise.
    """

    def __init__(
        self,
        target: str,
        kwargs: Mapping[str, Any],
        tokenizer: BatchDecoder,
        *,
        timeout_s: float | None = None,
        may_abstain: bool = False,
    ) -> None:
        """Import `target` (module:function or path/to/file.py:function); `timeout_s` limits a call (None: no limit).

        With `may_abstain` the function may return None or NaN for completions that it does not apply to.

        Raises:
            RewardError: the target cannot be imported, is not callable, or does not accept these arguments.
        """
        self.target = target
        self.kwargs = dict(kwargs)
        self.tokenizer = tokenizer
        self.timeout_s = timeout_s
        self.may_abstain = may_abstain
        self._function = load_function(target)
        self._names = _accepted(self._function)
        self._columns = _column_names(self._function, self.kwargs)
        _check_arguments(self._function, target, self.kwargs, (*self._names, *(self._columns or ())))

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions by calling the function.

        Raises:
            RewardError: the function fails, times out, or does not return one finite number per completion.
        """
        texts = decode(completions, self.tokenizer).as_in_rows()
        code = UserCode(f"the reward function {self.target!r}", f" ({_call_info(texts)})")
        with code:
            try:
                result = self._call(texts)
            except KeyError:  # most often of a column
                code.context += f". {_columns_info(texts)}"
                raise
        values, parts = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(parts, Mapping):  # a tuple of two scores
            values, parts = result, {}
        return checked_scores(
            values, parts, texts, who=f"the reward function {self.target!r}", may_abstain=self.may_abstain
        )

    def _call(self, texts: Texts) -> Any:
        if self._columns is None:
            arguments = {name: getattr(texts, name) for name in self._names}
        else:
            arguments = self._by_column(texts, self._columns)
        try:
            return run_with_timeout(self.timeout_s, lambda: self._function(**arguments, **self.kwargs))
        except TimeLimitExceeded as error:
            raise RewardError(
                f"the reward function {self.target!r} gave no answer in {self.timeout_s:g} s ({_call_info(texts)}): "
                "look for what it waits for, or raise reward.source.timeout_s"
            ) from error

    def _by_column(self, texts: Texts, columns: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of TRL's form.

        Raises:
            RewardError: the function requires a column that the rows do not have.
        """
        rows = texts.references
        known = {name for row in rows for name in row}
        known -= {*ARGUMENTS, *self.kwargs, "prompt", MESSAGES, CONVERSATION}
        missing = [name for name in columns if name not in known]
        if missing:
            columns_known = ", ".join(sorted(known)) or "only prompt"
            raise RewardError(
                f"the reward function {self.target!r} has an argument {missing[0]!r}, and the rows of data.prompts "
                f"have no such column{did_you_mean(missing[0], known)}. Their columns: {columns_known}. An argument "
                "with a fixed value goes into reward.source.kwargs"
            )
        accepted = inspect.signature(self._function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        given = {name: [row.get(name) for row in rows] for name in sorted(known) if takes_all or name in accepted}
        pairs = [_as_messages(*pair) for pair in zip(rows, texts.prompts, texts.completions, strict=True)]
        both = {"prompts": [prompt for prompt, _ in pairs], "completions": [completion for _, completion in pairs]}
        return {name: both[name] for name in both if takes_all or name in accepted} | given


def check_function(target: str, kwargs: Mapping[str, Any]) -> None:
    """Import a reward function and check its arguments.

    Raises:
        RewardError: the target cannot be imported, is not callable, or does not accept these arguments.
    """
    function = load_function(target)
    names = (*_accepted(function), *(_column_names(function, kwargs) or ()))
    _check_arguments(function, target, kwargs, names)


def _as_messages(row: Mapping[str, Any], prompt: str, completion: str) -> tuple[Any, Any]:
    """Return prompt and completion as messages if the row is a conversation, otherwise as they are."""
    if not row.get(CONVERSATION):
        return prompt, completion
    messages = row.get(MESSAGES) or [{"role": "user", "content": prompt}]  # a prompt that was cut has no messages
    return list(messages), [{"role": "assistant", "content": completion}]


def _column_names(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the columns that a function in TRL's form requires; None for a function in our form."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-ins have none
        return None
    if "references" in parameters or "completions" not in parameters:
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    others = {n: p for n, p in parameters.items() if p.kind in kinds and n not in (*ARGUMENTS, *kwargs)}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    required = tuple(name for name, parameter in others.items() if parameter.default is parameter.empty)
    return required if takes_all or required else None


def _accepted(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names in ARGUMENTS that the function accepts; all of them if it accepts none, or cannot say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-ins have none
        return ARGUMENTS
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ARGUMENTS
    by_name = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return tuple(name for name in ARGUMENTS if name in by_name) or ARGUMENTS


def _check_arguments(
    function: Callable[..., Any], target: str, kwargs: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Check the arguments against the function's signature, so that a misspelled one fails before any training."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have none
        return
    reserved = sorted(set(ARGUMENTS) & set(kwargs))
    if reserved:
        raise RewardError(f"reward.source.kwargs: {reserved[0]!r} is given to {target!r} already; choose another name")
    try:
        signature.bind(**dict.fromkeys(names, ()), **kwargs)
    except TypeError as error:
        raise RewardError(
            f"the reward function {target!r} is called with {', '.join([*names, *kwargs])}, but has the "
            f"arguments {signature}: {error}. {FORMS}"
        ) from error


def _call_info(texts: Texts) -> str:
    first = f"; the first: {quoted(texts.completions[0])}" if texts.completions else ""
    return f"called with {len(texts.completions)} completions{first}"


def _columns_info(texts: Texts) -> str:
    known = sorted({name for row in texts.references for name in row} - {MESSAGES, CONVERSATION})
    return f"The rows have the columns {', '.join(known)}" if known else "The rows have no columns"

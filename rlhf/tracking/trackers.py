"""Writers of metrics: append-only JSONL files that can be rewound to a checkpoint, and experiment trackers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf.errors import CheckpointError, UserError, how_to_continue, install_hint

# Backend -> accelerate's class for it.
TRACKERS = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandBTracker",
    "mlflow": "MLflowTracker",
    "trackio": "TrackioTracker",
}


def to_json(value: object) -> Any:
    """Convert `value` to JSON types: numbers, strings, lists and string-keyed objects; NaN and infinity become null."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    raise TypeError(f"cannot write {type(value).__name__} as JSON: {value!r}")


def encode_line(record: Mapping[str, object]) -> bytes:
    """Encode a record as one JSON line with sorted keys, so that equal records give equal bytes."""
    text = json.dumps(to_json(record), sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8 form; written as \udxxx it is a valid JSON escape and is read back unchanged.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of `path`, without an unfinished last line.

    Raises:
        CheckpointError: any other line is not a JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise CheckpointError(f"{path}, line {number}: not JSON ({error}); fix or remove that line") from None
            if not isinstance(record, dict):
                raise CheckpointError(f"{path}, line {number}: expected an object, found {type(record).__name__}")
            yield record


class JsonlLogger:
    """Appends records to a file; with `position` and `truncate` a resumed run continues it as if never interrupted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)  # unbuffered: a line that failed must not be written later
        self._drop_unfinished_line()

    def log(self, record: Mapping[str, object]) -> None:
        """Append one line and hand it to the operating system, so that a crash of this process loses nothing.

        Raises:
            CheckpointError: it could not be written (a full disk, for example); a restart cuts off the partial line.
        """
        remaining = memoryview(encode_line(record))
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error}. Make room, or whatever else it lacks; "
                f"then {how_to_continue()} from the newest checkpoint"
            ) from error

    def position(self) -> int:
        """Flush the file to disk and return its length in bytes, for a checkpoint to store."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def truncate(self, position: int) -> None:
        """Cut off records after `position`, an earlier result of `position()`.

        Raises:
            CheckpointError: the file has been shortened or edited since.
        """
        length = self._file.seek(0, os.SEEK_END)
        if position > length:
            raise CheckpointError(
                f"{self.path} has {length} bytes but the checkpoint was taken at {position}: lines have been removed "
                "since; put the file back, or start again in another run.out_dir"
            )
        if position and self._byte_before(position) != b"\n":
            raise CheckpointError(
                f"{self.path}: byte {position}, where the checkpoint was taken, is inside a line: the file has been "
                "edited since; put it back, or start again in another run.out_dir"
            )
        self._file.truncate(position)
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> JsonlLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _byte_before(self, position: int) -> bytes:
        self._file.seek(position - 1)
        return self._file.read(1)

    def _drop_unfinished_line(self) -> None:
        """Cut off the text after the last newline: a line that a dying process did not finish."""
        end = self._file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)


class SilentLogger:
    """A JsonlLogger that writes nothing, for the ranks other than the main one."""

    def log(self, record: Mapping[str, object]) -> None:
        """Discard the record."""

    def position(self) -> int:
        """Return 0."""
        return 0

    def truncate(self, position: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Trackers:
    """The experiment trackers of a run (TensorBoard, Weights & Biases, MLflow, Trackio), written to together."""

    def __init__(self, trackers: Sequence[Any] = ()) -> None:
        self._trackers = tuple(trackers)

    def add(self, tracker: Any) -> None:
        """Add a tracker: an object with `log(metrics, step=...)` and `finish()`."""
        self._trackers = (*self._trackers, tracker)

    def warn_by(self, warn: Callable[[str], None]) -> None:
        """Let `warn` tell of a backend that fails while the run goes on."""
        for tracker in self._trackers:
            if isinstance(tracker, BackendTracker):
                tracker.warn = warn

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step to every tracker."""
        for tracker in self._trackers:
            tracker.log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_samples(self, step: int, records: Sequence[Mapping[str, object]]) -> None:
        """Send completions to every tracker that has tables or text."""
        for tracker in self._trackers:
            if isinstance(tracker, BackendTracker):
                tracker.log_samples(records, step=step)

    def close(self) -> None:
        """Finish every tracker."""
        for tracker in self._trackers:
            tracker.finish()


class BackendTracker:
    """accelerate's tracker of a backend, whose failures are told once and do not end the run."""

    def __init__(self, backend: str, tracker: Any) -> None:
        self.backend, self._tracker = backend, tracker
        self.warn: Callable[[str], None] = lambda _: None
        self._has_warned = False

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Send the metrics of a step; if that fails, the next step is sent all the same."""
        self._attempt(lambda: self._tracker.log(metrics, step=step), f"the metrics of step {step}")

    def log_samples(self, records: Sequence[Mapping[str, object]], *, step: int) -> None:
        """Send completions as a table: wandb's and Trackio's own, a Markdown text in TensorBoard, a file in MLflow."""
        rows = [[record.get(column) for column in SAMPLE_COLUMNS] for record in records]
        self._attempt(lambda: self._send_table(rows, step), f"the completions of step {step}")

    def _send_table(self, rows: list[list[object]], step: int) -> None:
        columns = list(SAMPLE_COLUMNS)
        match self.backend:
            case "wandb":
                self._tracker.log_table("completions", columns=columns, data=rows, step=step)
            case "trackio":
                trackio = importlib.import_module("trackio")
                frame = importlib.import_module("pandas").DataFrame(rows, columns=columns)
                self._tracker.log({"completions": trackio.Table(dataframe=frame)}, step=step)
            case "tensorboard":
                self._tracker.writer.add_text("completions", markdown_table(columns, rows), global_step=step)
            case "mlflow":
                table = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
                importlib.import_module("mlflow").log_table(table, artifact_file=f"completions/step-{step:06d}.json")
            case _:
                raise AssertionError(self.backend)

    def finish(self) -> None:
        """Finish the backend's run."""
        self._attempt(self._tracker.finish, "the end of the run")

    def _attempt(self, send: Callable[[], object], what: str) -> None:
        try:
            send()
        except Exception as error:  # the errors of the backends and of their HTTP clients have no other class in common
            if not self._has_warned:
                self.warn(
                    f"warning: logging.backends: {self.backend} did not take {what} "
                    f"({type(error).__name__}: {error}). The run goes on, and metrics.jsonl has all of its metrics"
                )
            self._has_warned = True


SAMPLE_COLUMNS = ("step", "split", "prompt", "completion", "score", "kl", "length", "finished")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write rows as a Markdown table, each in one line."""

    def line(cells: Sequence[object]) -> str:
        texts = (str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


class CallbackTracker:
    """A tracker that calls a function with each step and its metrics."""

    def __init__(self, callback: Callable[[int, Mapping[str, float]], None]) -> None:
        self.callback = callback

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Give the step and its metrics to the function."""
        self.callback(step, metrics)

    def finish(self) -> None:
        """Do nothing."""


def open_trackers(
    backends: Sequence[str], *, folder: Path, name: str, config: Mapping[str, object], first_step: int = 0
) -> Trackers:
    """Start the trackers named in `backends` through accelerate, which is imported only if there are any.

    Args:
        folder: the run folder; tracker files go beneath it.
        config: the resolved configuration, shown by the tracker as hyperparameters.
        first_step: the first step that the run will log; TensorBoard hides an earlier attempt's records from there on.
    """
    for backend in backends:
        if backend not in TRACKERS:
            raise UserError(f"logging.backends: {backend!r} is not one of {', '.join(sorted(TRACKERS))}")
        if importlib.util.find_spec(backend) is None:
            raise UserError(
                f"logging.backends names {backend}, which is not installed: {_how_to_install(backend)}, "
                "or take it out of logging.backends"
            )
    started = []
    for backend in backends:
        _set_environment(backend, folder)
        importlib.import_module("accelerate.state").PartialState()  # its trackers need this and do not create it
        tracking = importlib.import_module("accelerate.tracking")
        tracker = getattr(tracking, TRACKERS[backend])(**_arguments(backend, folder, name, first_step))
        tracker.start()
        tracker.store_init_configuration(_flat_strings(config))
        started.append(BackendTracker(backend, tracker))
    return Trackers(started)


def _how_to_install(backend: str) -> str:
    match backend:
        case "trackio":  # its bound on pillow is below the version in constraints.txt, so setup.sh cannot install it
            return "run `pip install trackio` in the environment of this project (it takes an older pillow)"
        case "mlflow":
            return install_hint("mlflow")
        case _:
            return install_hint("track")


def _set_environment(backend: str, folder: Path) -> None:
    """Set the variables that make a backend write into the run folder, unless the user has set them."""
    match backend:
        case "mlflow":
            os.environ.setdefault("MLFLOW_TRACKING_URI", (folder / "mlruns").resolve().as_uri())
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need the full package
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        case "trackio":
            os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").resolve()))
        case _:  # told by its arguments
            pass


def _arguments(backend: str, folder: Path, name: str, first_step: int) -> dict[str, object]:
    """Return the arguments of accelerate's tracker; a run that continues is another run to all but TensorBoard."""
    match backend:
        case "tensorboard":
            return {"run_name": "tensorboard", "logging_dir": str(folder), "purge_step": first_step}
        case "mlflow":
            return {"experiment_name": "rlhf", "run_name": name}
        case "trackio":
            return {"run_name": "rlhf", "name": name, "embed": False}
        case _:
            return {"run_name": "rlhf", "name": name, "dir": str(folder)}


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested mappings into one with dotted keys; lists stay whole."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _flat_strings(config: Mapping[str, object]) -> dict[str, object]:
    scalars = (bool, int, float, str)
    return {
        key: value if isinstance(value, scalars) else json.dumps(to_json(value))
        for key, value in flatten(config).items()
    }

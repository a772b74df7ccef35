"""Digests of the weights, rows and code that cells read: results are compared if the cells have read the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from rlhf.comparison.plan import Cell
from rlhf.comparison.trial import JUDGED, unmeasured_suites
from rlhf.config.compare import CellConfig
from rlhf.config.data import DatasetConfig
from rlhf.config.load import validate
from rlhf.data.files import read_files
from rlhf.data.paths import data_paths, model_paths, section_paths
from rlhf.errors import ConfigError, DataError, ModelError, command_or_call
from rlhf.models.folders import digest_of_calibration, digest_of_model
from rlhf.rewards.chat import ChatConfig
from rlhf.rewards.pair_judge import PairwiseJudge
from rlhf.rewards.source import Source, sources_in
from rlhf.section import Section, walk
from rlhf.suites.suite import Suite, find_suite
from rlhf.tracking.fingerprint import combine_digests, content_digest
from rlhf.tracking.run_folder import write_atomically
from rlhf.user_code import files_of, source_of

INPUTS = "inputs.json"
InputKind = Literal["weights", "data", "code"]
T = TypeVar("T")
InputDigests = Mapping[InputKind, Mapping[str, str]]  # digests by path

FIXED: Mapping[InputKind, str] = {"weights": "the weights in {}", "data": "the rows in {}"}
READ_BY_ALL = ("policy.", "data.eval_prompts", "reward.source", "reward.cost", "eval.", "environment")


class Digests:
    """Computes the digests of what cells read, of weights and rows once for each path."""

    def __init__(self) -> None:
        self._known: dict[tuple[InputKind, str], str | None] = {}

    def of(self, cell: CellConfig) -> InputDigests:
        """Return the digests of everything on this machine that a cell reads."""
        return {
            "weights": {
                **self._digests("weights", _model_paths(cell), digest_of_model),
                **self._digests("weights", map(_Calibration, _model_paths(cell)), _Calibration.digest),
            },
            "data": self._digests("data", _rows(cell), _digest_of_rows),
            "code": dict(_code(cell)),
        }

    def _digests(self, kind: InputKind, inputs: Iterable[T], compute: Callable[[T], str | None]) -> dict[str, str]:
        digests: dict[str, str] = {}
        for read in inputs:
            name = str(read)
            if (kind, name) not in self._known:
                with suppress(DataError, ModelError):  # missing: the cell that needs it reports it
                    self._known[kind, name] = compute(read)
            digest = self._known.get((kind, name))
            if digest is not None:
                digests[name] = digest
        return digests


def _reads(cell: CellConfig, key: str) -> bool:
    """Return whether a cell reads a setting. A cell without training reads only a few settings."""
    return cell.budget is not None or key.startswith(READ_BY_ALL)


def _suites(cell: CellConfig) -> Iterator[Suite]:
    yield from (validate(find_suite(name)[0], values) for name, values in cell.suites.items())


def _model_paths(cell: CellConfig) -> Iterator[str]:
    yield from (path for key, path in model_paths(cell.train) if _reads(cell, key))
    yield from (path for suite in _suites(cell) for _, path in suite.models())
    if cell.proxy is not None:
        yield from (path for _, source in sources_in(cell.proxy) for path in source.model_paths().values())


class _Calibration(NamedTuple):
    path: str

    def __str__(self) -> str:
        return f"{self.path} (calibration)"

    def digest(self) -> str | None:
        """Compute the digest; None if the model has no calibration."""
        return digest_of_calibration(self.path)


class _Rows(NamedTuple):
    path: str
    split: str

    def __str__(self) -> str:
        return f"{self.path}, split {self.split}" if Path(self.path).expanduser().is_dir() else self.path


def _rows(cell: CellConfig) -> Iterator[_Rows]:
    yield from (_Rows(path, split) for key, path, split in data_paths(cell.train) if _reads(cell, key))
    if cell.train.data.eval_prompts is not None:  # read by the judge, also if the run does not
        yield from (_Rows(path, split) for _, path, split in section_paths(cell.train.data.eval_prompts, ""))
    sections = (section for suite in _suites(cell) for _, section in walk(suite))
    yield from (_Rows(rows.path, rows.split) for rows in sections if isinstance(rows, DatasetConfig) and rows.path)


def _digest_of_rows(rows: _Rows) -> str | None:
    """Compute the digest of the files that rows are read from; None for the id of a data set on the hub."""
    files = read_files(Path(rows.path).expanduser(), rows.split)
    return combine_digests(map(content_digest, files)) if files else None


def _code(cell: CellConfig) -> Iterator[tuple[str, str]]:
    """Yield each file, or function given as an object, with the digest of its source."""
    proxy: Iterable[tuple[str, Section]] = () if cell.proxy is None else walk(cell.proxy, "reward.source")
    suites = chain.from_iterable(map(walk, _suites(cell)))
    read = (section for key, section in chain(walk(cell.train), proxy) if _reads(cell, key))
    yield from _code_of(chain(read, (section for _, section in suites)))
    plugins = [Path(plugin) for plugin in cell.train.plugins if plugin.endswith(".py")]
    yield from ((str(file), content_digest(file)) for file in plugins if file.is_file())


def _code_of(sections: Iterable[Section]) -> Iterator[tuple[str, str]]:
    for section in sections:
        target = str(getattr(section, "target", ""))
        own = section.code_files() if isinstance(section, ChatConfig | Source) else {}
        files = [*files_of(target).values(), *own.values()]
        yield from ((str(file), content_digest(file)) for file in files)
        if (source := source_of(target)) is not None:
            yield target, combine_digests([source])


def digest_of_judge(judge: PairwiseJudge) -> str | None:
    """Compute one digest of the models and the code that a judge of pairs reads; None if a model is gone."""
    with suppress(ConfigError, ModelError):
        models = [f"{digest_of_model(path)} {digest_of_calibration(path)}" for _, path in judge.models()]
        return combine_digests([*models, *(digest for _, digest in _code_of(section for _, section in walk(judge)))])
    return None


def record_inputs(cell: Cell, digests: Digests) -> None:
    """Write inputs.json when a cell begins. A cell that continues, or is judged already, keeps its file."""
    goes_on = (cell.folder / INPUTS).is_file() and (cell.folder / "checkpoints").is_dir()
    if not goes_on and not (cell.folder / JUDGED).is_file():
        _write_inputs(cell.folder, digests.of(cell.config))


def record_inputs_of_suites(cell: Cell, digests: Digests) -> None:
    """Add to inputs.json what the measured suites of a judged cell read: they may have been added later."""
    known = read_inputs(cell.folder)
    if not known or not (cell.folder / JUDGED).is_file():
        return
    unmeasured = unmeasured_suites(cell.config, cell.folder)
    suites = {name: settings for name, settings in cell.config.suites.items() if name not in unmeasured}
    read = digests.of(cell.config.model_copy(update={"suites": suites}))
    inputs = {kind: {**read[kind], **known.get(kind, {})} for kind in read}
    if inputs != known:
        _write_inputs(cell.folder, inputs)


def _write_inputs(folder: Path, inputs: InputDigests) -> None:
    write_atomically(folder / INPUTS, json.dumps(inputs, indent=1, ensure_ascii=False) + "\n")


def read_inputs(folder: Path) -> InputDigests:
    """Read inputs.json; empty for a cell of a version that wrote none."""
    path = folder / INPUTS
    if not path.is_file():
        return {}
    inputs: InputDigests = json.loads(path.read_text(encoding="utf-8"))
    return inputs


Readers = Mapping[
    tuple[InputKind, str], tuple[str, str]
]  # of each input the digest that the first cell read, and its label


def check_inputs(judged: Iterable[Cell], further: Iterable[Cell], digests: Digests) -> list[str]:
    """Check that the cells that are still to run read the same weights and rows as the judged ones.

    Returns:
        A warning for each piece of code that is another one.

    Raises:
        ConfigError: weights or rows have changed.
    """
    first = first_readers(judged)
    warnings: dict[str, None] = {}
    for cell in further:
        for kind, path, label in other_inputs(digests.of(cell.config), first):
            if kind != "code":
                raise ConfigError(
                    f"{FIXED[kind].format(path)} have changed since {label}, ran, and all cells of a comparison have "
                    f"to read the same: restore them, or choose another {command_or_call('out_dir', 'folder')}"
                )
            warnings[
                f"the code in {path} has changed since {label}, ran: the page names the cells that run with other code"
            ] = None
    return list(warnings)


def code_notes(judged: Iterable[Cell]) -> list[str]:
    """Return a note for each piece of code that was not the same for all cells."""
    judged = list(judged)
    first = first_readers(judged)
    others: dict[tuple[str, str], list[str]] = {}
    for cell in judged:
        for kind, path, label in other_inputs(read_inputs(cell.folder), first):
            if kind == "code":
                others.setdefault((path, label), []).append(cell.label)
    return [
        f"{'; '.join(labels)}: ran with other code in {path} than {label}. If that changes scores, they cannot be "
        "compared."
        for (path, label), labels in others.items()
    ]


def first_readers(cells: Iterable[Cell]) -> Readers:
    """Return the digest of each input that cells recorded, and the label of the first cell that read it."""
    first: dict[tuple[InputKind, str], tuple[str, str]] = {}
    for cell in cells:
        for kind, digests in read_inputs(cell.folder).items():
            for path, digest in digests.items():
                first.setdefault((kind, path), (digest, cell.label))
    return first


def other_inputs(inputs: InputDigests, first: Readers) -> Iterator[tuple[InputKind, str, str]]:
    """Yield kind and path of each input that differs from the first cell's, and the label of the first cell."""
    for kind, digests in inputs.items():
        for path, digest in digests.items():
            known, label = first.get((kind, path), (digest, ""))
            if known != digest:
                yield kind, path, label

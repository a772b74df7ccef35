"""Give a trained model to others: `rlhf push` uploads it to the model hub, `rlhf export` writes it as one GGUF file.

`rlhf push` adds a model card made from the run to the exported model.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of its HTTP client, which differs between versions
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from rich.console import Console
from rich.text import Text
from torch import Tensor

from rlhf.commands.notices import warn_of_rounding
from rlhf.config.data import DatasetConfig, TrainableDataConfig
from rlhf.config.load import load_run, unread_keys
from rlhf.config.sections import RewardModelConfig, TrainConfig
from rlhf.data.files import load_rows
from rlhf.data.paths import SUFFIXES, looks_local
from rlhf.data.rows import RowCounts
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import CheckpointError, DataError, UserError
from rlhf.factory.exported import change_lost_in
from rlhf.model_files import ADAPTER, CONFIG
from rlhf.models.backbone import load_causal_lm
from rlhf.models.folders import model_folder
from rlhf.report.model_card import CardInputs, DataUsed, model_card
from rlhf.report.record import read_record
from rlhf.tracking.exported import TOLERATED_LOSS, read_export

CARD = "README.md"
BEST = "best.json"  # in the folder of a best checkpoint: its step, and the metric it was chosen by


def run_push(
    path: str,
    repo_id: str,
    *,
    private: bool,
    dry_run: bool,
    console: Console,
    quotes: bool = False,
    endpoint: str | None = None,
) -> None:
    """Upload the model of the run in `path` to `repo_id` in one commit; with `dry_run`, print the card and stop.

    Args:
        path: the run folder, or the folder of the best checkpoint in it.
        repo_id: owner/name.
        private: whether the repository has to be private; if it does not exist, a private one is created.
        quotes: whether the card keeps the texts that notes of the run quote.
        endpoint: the address of the hub; None for HF_ENDPOINT, or huggingface.co.

    Raises:
        UserError: the run is not complete, the name is invalid, or the hub refuses.
    """
    model = model_of_run(path)
    card = card_of_run(path, quotes=quotes)
    warn_of_rounding(path)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is no name of a repository; write owner/name ({error})") from error
    if dry_run:
        console.print(Text(card), soft_wrap=True)
        return
    url = upload(model, card, repo_id, private=private, endpoint=endpoint)
    console.print(Text(f"model   {url}"), soft_wrap=True)


def model_of_run(path: str) -> Path:
    """Return the folder of the exported model.

    Raises:
        CheckpointError: there is none, because the run is not complete.
    """
    load_run(path)
    model = Path(path) / "model"
    if not any((model / name).is_file() for name in (CONFIG, ADAPTER)):
        raise CheckpointError(f"{path} has no model/ yet: it is written at the end of the run. Continue it first")
    return model


def card_of_run(path: str, *, quotes: bool = False) -> str:
    """Make the model card of the run in `path`, or of the best checkpoint there, from the measurements up to it."""
    config, folder = load_run(path), Path(path)
    best = _read_json(folder / BEST) if (folder / BEST).is_file() else None
    record = read_record(folder if best is None else folder.parents[1])
    if best is not None:
        record = replace(record.until(best["step"]), export=read_export(folder))
    base = config.model.model if isinstance(config, RewardModelConfig) else config.policy.model
    inputs = CardInputs(
        data=tuple(count_data(config)),
        comparison=_read_json(folder / "eval.json") if (folder / "eval.json").is_file() else None,
        suites=tuple(_read_json(file) for file in sorted((folder / "evals").glob("*.json"))),
        is_adapter=(folder / "model" / ADAPTER).is_file(),
        base_on_hub=_is_on_hub(base),
        best=best,
        quotes=quotes,
    )
    return model_card(record, inputs)


def count_data(config: TrainConfig | RewardModelConfig) -> Iterator[DataUsed]:
    """Count the rows of each data set that the run read; data sets of the hub are not downloaded."""
    unread = unread_keys(config)
    for name in type(config.data).model_fields:
        dataset, key = getattr(config.data, name), f"data.{name}"
        if not isinstance(dataset, DatasetConfig) or key in unread:
            continue
        if isinstance(dataset, TrainableDataConfig) and dataset.sources:
            parts = dataset.by_source(name)
            yield from (_data_used(f"{key}.sources.{source}", part) for source, part in parts.items())
        else:
            yield _data_used(key, dataset)


def _data_used(key: str, dataset: DatasetConfig) -> DataUsed:
    if _is_on_hub(dataset.path):
        return DataUsed(key, dataset.path, None, dataset.limit, "on the hub", on_hub=True)
    if isinstance(dataset, TrainableDataConfig) and dataset.stream:
        return DataUsed(key, dataset.path, None, dataset.limit, "not counted: it was streamed")
    try:
        rows = len(load_rows(dataset, RowCounts(dataset.path)))
    except DataError as error:
        return DataUsed(key, dataset.path, None, dataset.limit, f"not counted: {error}")
    part = dataset.part if isinstance(dataset, TrainableDataConfig) else None
    return DataUsed(
        key, dataset.path, rows, dataset.limit, part=None if part is None else (float(part[0]), float(part[1]))
    )


def _is_on_hub(path: str) -> bool:
    """Return whether a path is the id of a model or data set of the hub."""
    is_id = 1 <= len(path.split("/")) <= 2 and not looks_local(path, (*SUFFIXES, ".gguf"))
    return is_id and not path.startswith("runs/") and not Path(path).expanduser().exists()


def _read_json(path: Path) -> dict[str, Any]:
    """Read a file of results.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Remove it, or make it again by rlhf eval") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(loaded).__name__}")
    return loaded


def upload(model: Path, card: str, repo_id: str, *, private: bool, endpoint: str | None) -> str:
    """Create the repository if needed, add the files of `model` and the card in one commit, and return its address.

    Raises:
        UserError: the hub cannot be reached or refuses, or the repository has to be private and is public.
    """
    api = HfApi(endpoint=endpoint)
    files = [file for file in sorted(model.rglob("*")) if file.is_file() and file.name != CARD]
    operations = [CommitOperationAdd(file.relative_to(model).as_posix(), file) for file in files]
    operations.append(CommitOperationAdd(CARD, card.encode("utf-8")))
    try:
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)  # None: as the owner's account is set
        if private and not api.repo_info(repo_id).private:
            raise UserError(
                f"--private: {repo_id} exists already and is public, so nothing was uploaded. Make it private at "
                f"{url}/settings and run the same command again, or push to another name"
            )
        api.create_commit(repo_id, operations, commit_message="Upload the model and its card")
    except HfHubHTTPError as error:
        raise UserError(_refusal(error, repo_id, api.endpoint)) from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise UserError(f"the hub at {api.endpoint} cannot be reached: {error}") from error
    return str(url)


def _refusal(error: HfHubHTTPError, repo_id: str, endpoint: str) -> str:
    """Describe why the hub refused, and what to do."""
    status = error.response.status_code if error.response is not None else None
    if status in (401, 403):
        return (
            f"{endpoint} does not let you write to {repo_id}: log in with `hf auth login`, or set HF_TOKEN to a token "
            "that may write there"
        )
    return f"{endpoint} refused {repo_id}: {error.server_message or error}"


def run_export(path: str, out: Path, *, dtype: str, console: Console) -> None:
    """Write the model of a run, or in a model folder, as a GGUF file; an adapter is merged into its base.

    Raises:
        ModelError: the model cannot be loaded, or is of a kind that cannot be written.
    """
    gguf_export: Any = importlib.import_module("rlhf.models.gguf_export")  # it needs an extra
    folder = model_folder(path)
    tokenizer = load_tokenizer(folder)
    warn_of_rounding(path)
    model = load_causal_lm(folder, dtype="float32")
    gguf_export.write_gguf(model, tokenizer, out, dtype=dtype)
    lost = change_lost_in(
        path, model, {name: _gguf_dtype(weight, dtype) for name, weight in model.state_dict().items()}
    )
    if lost is not None and lost > TOLERATED_LOSS:
        text = (
            f"warning: {dtype} loses {lost:.1%} of the change that training made to the weights: --dtype f32 keeps it"
        )
        console.print(Text(text, style="yellow"), soft_wrap=True)
    console.print(Text(f"{out}: {out.stat().st_size / 2**20:,.1f} MiB, {dtype}"), soft_wrap=True)


def _gguf_dtype(weight: Tensor, dtype: str) -> torch.dtype:
    """Return the dtype of a weight in a GGUF file: vectors stay in float32."""
    return (
        {"f16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32) if weight.ndim > 1 else torch.float32
    )

"""The origin of a model, and its export in that form: the same files, names, shapes and dtypes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.tokenizer import TOKENIZER_FILES, ModelLocation, base_of_adapter, locate_model, locate_tokenizer
from rlhf.errors import ModelError
from rlhf.model_files import CONFIG
from rlhf.models.adapters import base_model, is_adapted, lora_scales
from rlhf.models.backbone import CausalLM, embedding_rows, published_config
from rlhf.models.folders import SCORE_SETTINGS
from rlhf.models.kernels.cast import HALF_DTYPES
from rlhf.models.rounding import are_uneven, lost_change, names_at_start, round_to
from rlhf.models.weight_files import INDEX, StoredTensor, WeightFiles, local_folder, read_headers, read_tensors
from rlhf.runtime.engine import Engine
from rlhf.tracking.exported import TOLERATED_LOSS

GENERATION = "generation_config.json"
TIE = "tie_word_embeddings"
CHAT_TEMPLATE = "chat_template.jinja"
GGUF_DTYPE = torch.bfloat16  # a quantized file has no dtype of its own


@dataclass(frozen=True)
class Origin:
    """The published model that a run started from, as far as an export repeats it."""

    dtype: torch.dtype
    """The dtype of weights that `weights` does not list."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json, parsed; empty if it is unknown."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files to repeat byte for byte: config.json, generation_config.json, code, licence."""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    """The tokenizer's files; empty if there are none: an export then saves the tokenizer."""
    weights: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    """The tensors of each safetensors file."""
    folder: Path | None = None
    """The folder of the weights that the run started from; None if no folder has just these weights: they come from a
    GGUF file, have an adapter merged into them, or are not on this machine."""
    chat_template: str | None = None
    """The Jinja source of the run's own template (data.chat_template), written beside the tokenizer."""
    turn_end: int | None = None
    """The token that ends a turn in the run's template: generation has to stop at it."""

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return every stored weight by its name."""
        return {name: tensor for stored in self.weights.values() for name, tensor in stored.items()}

    def start_weights(self) -> WeightFiles:
        """Return the published weights, without the files that have changed or gone since."""
        if self.folder is None:
            return WeightFiles(Path(), {})
        folder = self.folder
        unchanged = {
            file: tensors
            for file, tensors in self.weights.items()
            if (folder / file).is_file() and read_tensors(folder / file) == tensors
        }
        return WeightFiles(folder, unchanged)


def read_origin(
    model: str, tokenizer_path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> Origin:
    """Read the parts of the model at `model` that an export repeats; nothing is downloaded.

    Args:
        model: folder, GGUF file, adapter's folder (then its base is read) or hub id.
        tokenizer_path: the same for the tokenizer.
        tokenizer: the tokenizer, whose class names further files.
        trust_remote_code: run code that comes with the model to read its configuration.

    Raises:
        ModelError: the model cannot be found.
    """
    location = locate_model(model)
    is_changed = location.is_adapter  # the start is the base with this adapter
    while location.is_adapter:
        location = locate_model(base_of_adapter(Path(location.name)))
    tokenizer_files = _tokenizer_files(locate_tokenizer(tokenizer_path), tokenizer)
    if location.gguf is not None:
        config = json.loads(published_config(location).to_json_string())
        config.pop("_model_name_or_path", None)  # names a checkpoint that nobody can get
        return Origin(GGUF_DTYPE, config=config, tokenizer_files=tokenizer_files)
    folder = local_folder(location)
    if folder is None:
        config = json.loads(published_config(location, trust_remote_code=trust_remote_code).to_json_string())
        return Origin(_config_dtype(config), config=config, tokenizer_files=tokenizer_files)
    files = {name: (folder / name).read_bytes() for name in _repeated(folder)}
    try:
        config = json.loads(files[CONFIG])
    except (KeyError, ValueError) as error:
        raise ModelError(f"cannot load a model from {model!r}: {folder / CONFIG}: {error}") from error
    weights = read_headers(folder)
    return Origin(_config_dtype(config), config, files, tokenizer_files, weights, None if is_changed else folder)


def _repeated(folder: Path) -> list[str]:
    names = [CONFIG, GENERATION, INDEX]
    patterns = ("*.py", "LICENSE*", "LICENCE*", "NOTICE*")
    matching = {path.name for pattern in patterns for path in folder.glob(pattern)}
    return [name for name in (*names, *sorted(matching)) if (folder / name).is_file()]


def _tokenizer_files(location: ModelLocation, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    folder = local_folder(location, "tokenizer_config.json", "tokenizer.json") if location.gguf is None else None
    if folder is None:
        return {}
    names = dict.fromkeys((*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()))
    paths = [folder / name for name in names if isinstance(name, str)]
    paths += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def _config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


_NOT_ARITHMETIC = {"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"}


def weights_fingerprint(
    model: CausalLM, state: dict[str, Tensor] | None = None, *, adapter_is_off: bool = False
) -> str:
    """Compute a digest (SHA-256, hex) of the configuration and all weights, with the adapter unless it is off.

    `state` holds the whole weights if this process has only a part of them.
    """
    base = base_model(model)
    if state is not None:
        state = {name.removeprefix("base_model.model.") if base is not model else name: w for name, w in state.items()}
    settings = {name: value for name, value in base.config.to_dict().items() if name not in _NOT_ARITHMETIC}
    if is_adapted(model) and not adapter_is_off:
        settings["lora_scales"] = lora_scales(base)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted((base.state_dict() if state is None else state).items()):
        if adapter_is_off and "lora_" in name:
            continue
        digest.update(f"{name.replace('.base_layer', '')} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


ExportDtype = Literal["auto", "float32", "bfloat16", "float16"]
TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_MAP = "special_tokens_map.json"
_NEVER_IN_UTF8 = ("À", "Á", *(chr(code) for code in range(0xF5, 0x100)))  # bytes, as byte-level vocabularies write them


@dataclass(frozen=True)
class ClassifierPad:
    """The padding id of an exported classifier; `token` is its text, None if no token may have that role."""

    number: int
    token: str | None


@dataclass(frozen=True)
class Exported:
    """The dtype of exported weights, and its effect on the training; shares are None if they are not known."""

    dtype: torch.dtype
    """The dtype of most weights."""
    lost: float | None
    """The share of the change by training that is lost (see `lost_change`)."""
    avoided: torch.dtype | None = None
    """The origin's dtype, if it would have lost too much and "auto" chose float32 instead."""
    avoided_loss: float | None = None


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    origin: Origin,
    dtype: ExportDtype | None = "auto",
    state: Mapping[str, Tensor] | None = None,
    is_comparable: bool = True,
) -> Exported:
    """Write a model folder, the origin's except for the weights, and return the share of the training that it keeps.

    Args:
        model: a causal LM, or a classifier with one label.
        tokenizer: saved if the origin has no tokenizer files.
        folder: the folder to write.
        origin: the published model that it was loaded from.
        dtype: "auto" writes each weight in its origin's dtype, or all in float32 if that would lose more of the change
            by training than TOLERATED_LOSS; None as it is in memory, for checkpoints. For "bfloat16", weights that were
            trained in float32 from such numbers are rounded up or down by chance, which keeps the training.
        state: the whole weights, if this process has only a part of them.
        is_comparable: whether training began with the origin's weights. It did not over a quantized base, whose
            distance to them is no training: the share is then unknown, and "auto" keeps the dtypes, as such weights are
            spread evenly.
    """
    trained = dict(model.state_dict() if state is None else state)
    spreads = dtype == "bfloat16" and are_uneven(trained)
    targets, exported = _choose_dtypes(model, trained, origin, dtype, spreads=spreads, is_comparable=is_comparable)
    written = _cast(trained, targets, spreads=spreads)
    folder.mkdir(parents=True, exist_ok=True)
    if _same_names(model, written, origin):
        _write_weights(written, origin, folder)
    else:
        model.save_pretrained(folder, state_dict=dict(written))  # save_pretrained empties the mapping that it is given
    is_as_published = dtype == "auto" and exported.avoided is None and bool(origin.files)
    _write_config(model, origin, folder, dtype=None if is_as_published else exported.dtype)
    _write_other_files(model, origin, folder)
    write_tokenizer(tokenizer, folder, origin)
    if _is_classifier(model):
        _name_pad(folder, tokenizer, classifier_padding(model, tokenizer))
    return exported


def _choose_dtypes(
    model: PreTrainedModel,
    trained: Mapping[str, Tensor],
    origin: Origin,
    dtype: ExportDtype | None,
    *,
    spreads: bool,
    is_comparable: bool,
) -> tuple[dict[str, torch.dtype], Exported]:
    """Choose the dtype of each weight, and measure the share that it keeps."""
    targets = {name: _dtype(name, weight, origin, dtype) for name, weight in trained.items()}
    if not is_comparable:
        is_exact = all(targets[name] == weight.dtype for name, weight in trained.items())
        return targets, Exported(_main_dtype(trained, targets), lost=0.0 if is_exact else None)
    start = origin.start_weights()
    names = names_at_start(model, trained, start)
    lost = lost_change(start, trained, targets, names, spreads=spreads)
    chosen = Exported(_main_dtype(trained, targets), lost)
    wide = {name: torch.float32 if target in HALF_DTYPES else target for name, target in targets.items()}
    too_much = chosen.lost is None or chosen.lost > TOLERATED_LOSS
    if dtype != "auto" or not too_much or wide == targets:
        return targets, chosen
    lost = lost_change(start, trained, wide, names)
    return wide, Exported(torch.float32, lost, avoided=chosen.dtype, avoided_loss=chosen.lost)


def save_in_parts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, origin: Origin, engine: Engine
) -> None:
    """Write a model that is split over the ranks as an ordinary folder; every rank calls this and writes its own file.

    The folder has an index, as published models of several files have, and the weights in the dtype they are kept in.
    """
    write_parts(model, folder, engine)

    def write() -> None:
        _write_config(model, origin, folder, dtype=model.dtype)
        _write_other_files(model, origin, folder)
        write_tokenizer(tokenizer, folder, origin)

    engine.ranks.on_main(write)


def write_parts(model: PreTrainedModel, folder: Path, engine: Engine) -> None:
    """Write the weights of a model that is split over the ranks: a safetensors file by each rank, and an index.

    Every rank calls this; none ever has more than the weights it owns, which are about as many in all ranks.
    """
    ranks = engine.ranks
    weights = engine.owned_weights(model)
    if ranks.is_main:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        weights |= {name: value.cpu() for name, value in model.state_dict().items() if name not in parameters}
    file = f"model-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors"
    ranks.on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
    ranks.all_succeed(lambda: write_tensors(weights, folder / file))
    files = ranks.gather((file, {name: weight.nbytes for name, weight in weights.items()}))
    index = {
        "metadata": {"total_size": sum(size for _, sizes in files for size in sizes.values())},
        "weight_map": {name: file for file, sizes in files for name in sizes},
    }
    ranks.on_main(lambda: (folder / INDEX).write_text(_json(index), encoding="utf-8"))


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file and flush it to the disk, which another process than the writer may be unable to do."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with path.open("rb+") as opened:
        os.fsync(opened.fileno())


def _write_other_files(model: PreTrainedModel, origin: Origin, folder: Path) -> None:
    """Copy the origin's files besides weights and configuration; a classifier has no generation settings."""
    is_classifier = _is_classifier(model)
    if origin.files or is_classifier:
        (folder / GENERATION).unlink(missing_ok=True)
    for name, content in origin.files.items():
        if name not in (CONFIG, INDEX) and not (is_classifier and name == GENERATION):
            (folder / name).write_bytes(content)
    if origin.turn_end is not None and not is_classifier:
        _add_turn_end(folder, origin.turn_end)


def _add_turn_end(folder: Path, turn_end: int) -> None:
    """Add the token that ends a turn to the tokens that end generation, unless it is one of them."""
    path = folder / GENERATION
    generation = json.loads(path.read_bytes()) if path.is_file() else {}
    config = json.loads((folder / CONFIG).read_bytes())
    given = (settings.get("eos_token_id") for settings in (generation, config, config.get("text_config") or {}))
    ends: Any = next((end for end in given if end is not None), [])
    ends = ends if isinstance(ends, list) else [ends]
    if turn_end not in ends:
        path.write_text(_json({**generation, "eos_token_id": [*ends, turn_end]}), encoding="utf-8")


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, origin: Origin) -> None:
    """Copy the origin's tokenizer files byte for byte, or save the tokenizer if it has none; add the run's template."""
    if not origin.tokenizer_files:
        tokenizer.save_pretrained(folder)
    for name, content in origin.tokenizer_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    if origin.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(origin.chat_template, encoding="utf-8")


def classifier_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ClassifierPad:
    """Choose the pad token of a classifier's folder: one that no text ends with.

    transformers reads a classifier's score at the rightmost token that is not `config.pad_token_id`. Our texts end with
    EOS: if that were the pad token too, the score would be read one token early.
    """
    rows = embedding_rows(model)
    pad = tokenizer.pad_token_id
    if isinstance(pad, int) and pad < rows and pad != tokenizer.eos_token_id:
        return ClassifierPad(pad, tokenizer.pad_token)
    token = _spare_special_token(tokenizer, rows)
    if token is not None:
        return ClassifierPad(tokenizer.get_vocab()[token], token)
    return ClassifierPad(_spare_id(tokenizer, rows), None)


def _spare_special_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> str | None:
    """Find a special token that the tokenizer has and no text contains; adding one would change how it tokenizes."""
    spare = _unused_special_tokens(tokenizer, rows)
    preferred = [name for word in ("pad", "reserved", "unused") for name in spare if word in name.lower()]
    unknown = [name for name in spare if name == tokenizer.unk_token]
    return next(iter((*preferred, *unknown, *spare)), None)


def _unused_special_tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """List the special tokens with an embedding that neither end nor begin texts nor occur in the chat template."""
    taken = {tokenizer.eos_token_id, tokenizer.bos_token_id}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else str(tokenizer.chat_template)
    return [
        entry.content
        for token_id, entry in sorted(tokenizer.added_tokens_decoder.items())
        if entry.special and token_id < rows and token_id not in taken and entry.content not in template
    ]


def _spare_id(tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    """Find an id that text never ends with: one without a token, or a byte that UTF-8 never uses."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    known = set(vocabulary.values())
    candidates: tuple[int, ...] = (
        rows - 1,
        *(vocabulary[byte] for byte in _NEVER_IN_UTF8 if byte in vocabulary),
        *range(rows),
    )
    taken = (tokenizer.eos_token_id, tokenizer.bos_token_id)
    return next(n for n in candidates if n not in taken and (n != rows - 1 or n not in known))


def _name_pad(folder: Path, tokenizer: PreTrainedTokenizerBase, pad: ClassifierPad) -> None:
    """Set the classifier's pad token in the saved tokenizer, or remove it, so that padding by hand is refused."""
    if pad.number == tokenizer.pad_token_id or (pad.token is None and tokenizer.pad_token is None):
        return
    for name in (TOKENIZER_CONFIG, _SPECIAL_MAP):
        path = folder / name
        if path.is_file():
            settings = json.loads(path.read_text(encoding="utf-8"))
            settings.pop("pad_token", None)
            path.write_text(_json(settings | ({"pad_token": pad.token} if pad.token else {})), encoding="utf-8")


def _cast(trained: Mapping[str, Tensor], targets: Mapping[str, torch.dtype], *, spreads: bool) -> dict[str, Tensor]:
    """Convert the weights; tensors that share memory still do, by which transformers recognizes tied weights."""
    converted: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}
    written = {}
    for name, weight in trained.items():
        key = (weight.data_ptr(), tuple(weight.shape), targets[name])
        if key not in converted or not weight.numel():
            by_chance = spreads and weight.dtype == torch.float32
            flat = round_to(targets[name], weight.detach().reshape(-1), spreads=by_chance)
            converted[key] = flat.view_as(weight)
        written[name] = converted[key]
    return written


def _dtype(name: str, weight: Tensor, origin: Origin, dtype: ExportDtype | None) -> torch.dtype:
    if dtype is None or not weight.is_floating_point():
        return weight.dtype
    if dtype != "auto":
        chosen = getattr(torch, dtype)
        assert isinstance(chosen, torch.dtype)
        return chosen
    if name.startswith("score."):  # a reward model's new head is small, and its scores need more than 8 bits
        return origin.tensors[name].dtype if name in origin.tensors else torch.float32
    stored = origin.tensors.get(name)
    if stored is None:
        return origin.dtype
    return stored.dtype if stored.dtype.is_floating_point and stored.dtype.itemsize > 1 else origin.dtype


def _same_names(model: PreTrainedModel, written: Mapping[str, Tensor], origin: Origin) -> bool:
    """Check whether the origin's files list just the model's weights, except for those tied to a listed one."""
    stored = origin.tensors
    listed: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {} if _is_untied(model, origin) else listed
    left_out = written.keys() - stored.keys()
    return (
        bool(stored)
        and all(name in written and written[name].shape == tensor.shape for name, tensor in stored.items())
        and all(tied.get(name) in stored for name in left_out)
    )


def _is_untied(model: PreTrainedModel, origin: Origin) -> bool:
    """Tell whether a merged adapter, with an embedding or a head of its own, separated what the origin ties."""
    default = getattr(type(model.config), TIE, False)
    return bool(origin.config.get(TIE, default)) and not getattr(model.config, TIE, True)


def _write_weights(written: Mapping[str, Tensor], origin: Origin, folder: Path) -> None:
    size = 0
    for file, tensors in origin.weights.items():
        seen: set[int] = set()
        content = {}
        for name in tensors:
            weight = written[name].cpu().contiguous()
            content[name] = weight.clone() if weight.data_ptr() in seen else weight  # tied, and both stored
            seen.add(weight.data_ptr())
        size += sum(weight.nbytes for weight in content.values())
        save_file(content, folder / file, metadata={"format": "pt"})
    if INDEX in origin.files:
        index = json.loads(origin.files[INDEX])
        same = index.get("metadata", {}).get("total_size") == size
        index["metadata"] = {**index.get("metadata", {}), "total_size": size}
        (folder / INDEX).write_bytes(origin.files[INDEX] if same else _json(index).encode())


def _write_config(model: PreTrainedModel, origin: Origin, folder: Path, *, dtype: torch.dtype | None) -> None:
    changes: dict[str, Any] = {}
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in origin.config else "dtype"
        changes[key] = str(dtype).removeprefix("torch.")
    if _is_untied(model, origin):
        changes[TIE] = False
    if CONFIG not in origin.files:
        changes["architectures"] = [type(model).__name__]
    if _is_classifier(model):
        changes |= _classifier_settings(model)
    whole = {**origin.config, **changes}
    if CONFIG in origin.files and whole == origin.config:
        (folder / CONFIG).write_bytes(origin.files[CONFIG])
    else:
        (folder / CONFIG).write_text(_json(whole), encoding="utf-8")


def _classifier_settings(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    calibration = {name: getattr(config, name) for name in SCORE_SETTINGS if hasattr(config, name)}
    labels = {str(number): str(name) for number, name in (config.id2label or {}).items()}
    return {
        "architectures": [type(model).__name__],
        "id2label": labels,
        "label2id": {name: int(number) for number, name in labels.items()},
        "pad_token_id": config.pad_token_id,
        **calibration,
    }


def _is_classifier(model: PreTrainedModel) -> bool:
    return "SequenceClassification" in type(model).__name__


def _main_dtype(trained: Mapping[str, Tensor], targets: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the dtype that most parameters are written in."""
    sizes: dict[torch.dtype, int] = {}
    for name, weight in trained.items():
        if weight.is_floating_point():
            sizes[targets[name]] = sizes.get(targets[name], 0) + weight.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

"""The reference's log-probabilities of offline data: asked for once, and kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rlhf.config.sections import OfflineConfig
from rlhf.data.pairs import (
    AnnotatedLabelledSet,
    AnnotatedPairSet,
    CompletionRows,
    LabelledSet,
    PairSet,
    completion_labels,
    completion_rows,
)
from rlhf.models.backbone import body_of
from rlhf.models.export import weights_fingerprint
from rlhf.models.kernels.packing import packing_unsupported_reason
from rlhf.models.policy_models import Models
from rlhf.section import cache_folder
from rlhf.tracking.progress import announced_share
from rlhf.training.offline import completion_logprobs
from rlhf.training.online_run import NO_GRAD_BATCH_MULTIPLIER

CACHE_VERSION = 2  # of the file format and the meaning of the numbers; part of the key
_NAME = "logprobs"
RowsRead = Callable[[int], Sequence[int]]  # of a number of rows: the indices of those that the run reads


def no_grad_batch_size(config: OfflineConfig) -> int:
    """Return the rows of a forward pass without gradient; they affect memory only, no result."""
    return config.batch.micro_batch_size * NO_GRAD_BATCH_MULTIPLIER


class ReferenceAnnotator:
    """Annotates data sets with the reference's log-probability of each completion, from a cache if possible."""

    def __init__(
        self,
        config: OfflineConfig,
        models: Models,
        *,
        is_resumed: bool,
        note: Callable[[str], None],
        announce: Callable[[str], None],
    ) -> None:
        """Take the run's configuration and models.

        Args:
            models: the models; the policy may itself be the reference.
            is_resumed: the policy has trained already.
            note: reports a message when the run begins.
            announce: prints a message at once.
        """
        self.config, self.models = config, models
        self.is_resumed, self.note, self.announce = is_resumed, note, announce
        self.cache = ReferenceCache(cache_folder(config.run.cache_dir, os.environ) / "reference")
        self._weights: str | None = None

    def pairs(self, pairs: PairSet, read: RowsRead | None = None) -> AnnotatedPairSet:
        """Annotate pairs: both completions of each; of the pairs that are not `read` NaN."""
        rows = read(len(pairs)) if read else range(len(pairs))
        wanted = [*rows, *(len(pairs) + row for row in rows)]
        chosen, rejected = self._logprobs(completion_rows(pairs), wanted).chunk(2)
        return AnnotatedPairSet(pairs, chosen, rejected)

    def labelled(self, data: PairSet | LabelledSet, read: RowsRead | None = None) -> AnnotatedLabelledSet:
        """Annotate single labelled completions, NaN if they are not `read`; pairs are split into two rows."""
        rows = completion_rows(data)
        return AnnotatedLabelledSet(rows, completion_labels(data), self._logprobs(rows, read and read(len(rows))))

    def batch(self, pairs: PairSet) -> AnnotatedPairSet:
        """Annotate the pairs of one step, without the cache."""
        rows = completion_rows(pairs)
        needed = self.config.algorithm.loss.needs_reference
        values = self._forward(rows) if needed else torch.zeros(len(rows), dtype=torch.float64)
        return AnnotatedPairSet(pairs, *values.chunk(2))

    def labelled_batch(self, rows: LabelledSet) -> AnnotatedLabelledSet:
        """Annotate the labelled completions of one step, without the cache."""
        completions = completion_rows(rows)
        return AnnotatedLabelledSet(completions, completion_labels(rows), self._forward(completions))

    def _logprobs(self, rows: CompletionRows, wanted: Sequence[int] | None = None) -> Float[Tensor, " N"]:
        if not self.config.algorithm.loss.needs_reference:
            return torch.zeros(len(rows), dtype=torch.float64)
        if wanted is not None and len(wanted) < len(rows):
            read = torch.full((len(rows),), torch.nan, dtype=torch.float64)
            read[torch.tensor(wanted)] = self._logprobs(rows.at(wanted))
            return read
        key = cache_key(
            weights=self._fingerprint(),
            rows=rows_fingerprint(rows.prompts, rows.completions, rows.learned),
            dtype=_arithmetic(self.models),
            temperature=self.models.temperature,
        )
        ranks = self.models.engine.ranks
        values = ranks.on_main(lambda: self.cache.read(key, count=len(rows)))
        if values is None:
            values = computed = self._compute(rows)
            ranks.on_main(lambda: self.cache.write(key, computed))
        else:
            self.note(f"reference log-probs of {len(rows):,} completions: from {self.cache.path(key)}")
        for note in self.cache.notes:
            self.note(note)
        self.cache.notes.clear()
        return values

    def _compute(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        self.announce(  # a large data set takes time
            f"reference log-probs of {len(rows):,} completions: computed once, kept in {self.cache.folder}"
        )
        return self._forward(rows, announced_share(self.announce, "reference log-probs"))

    def _forward(
        self, rows: CompletionRows, progress: Callable[[float], None] = lambda share: None
    ) -> Float[Tensor, " N"]:
        models = self.models
        assert models.has_reference or not self.is_resumed, "the policy is its own reference at step 0 only"
        logprobs = (
            models.reference_logprobs if models.has_reference else lambda batch: models.policy_tokens(batch).logprobs
        )
        return completion_logprobs(
            rows,
            logprobs,
            rows_per_pass=no_grad_batch_size(self.config),
            device=models.device,
            ranks=models.engine.ranks,
            shares_prompts=models.packing == "auto" and not packing_unsupported_reason(body_of(models.policy)),
            progress=progress,
        )

    def _fingerprint(self) -> str:
        if self._weights is None:
            models, engine = self.models, self.models.engine
            model = models.reference or models.policy
            state, is_off = engine.full_state(model), models.adapter_off_is_reference
            self._weights = engine.ranks.on_main(lambda: weights_fingerprint(model, state, adapter_is_off=is_off))
        return self._weights


def _arithmetic(models: Models) -> str:
    """Describe the arithmetic of the numbers: the run's dtype, and the head's if that is not float32 or better.

    A head in bfloat16 rounds every logit to 8 bits, which moves the sum over a completion.
    """
    return "bfloat16, head too" if models.dtype == "bfloat16" and not models.float32_head else models.dtype


def rows_fingerprint(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], learned: Sequence[Sequence[bool]] = ()
) -> str:
    """Compute the SHA-256 digest of token ids, row by row.

    Other rows, another order, another tokenizer or another template give another digest. `learned` marks the tokens of
    each completion whose log-probabilities are summed, if not all are.
    """
    digest = hashlib.sha256()
    for prompt, completion in zip(prompts, completions, strict=True):
        digest.update(f"{len(prompt)} {len(completion)}:{[*prompt, *completion]}".encode())
    for flags in learned:
        digest.update(bytes(flags) + b".")
    return digest.hexdigest()


def cache_key(*, weights: str, rows: str, dtype: str, temperature: float) -> str:
    """Compute the cache key for the log-probabilities of these rows under these weights."""
    parts = {"version": CACHE_VERSION, "weights": weights, "rows": rows, "dtype": dtype, "temperature": temperature}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ReferenceCache:
    """A folder with one file per key, each with a checksum of its numbers; `notes` collects warnings about files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []

    def path(self, key: str) -> Path:
        """Return the path of the file for `key`."""
        return self.folder / f"{key}.safetensors"

    def read(self, key: str, *, count: int) -> Float[Tensor, " N"] | None:
        """Read the `count` numbers stored under `key`; return None if there are none or the file is damaged (noted)."""
        path = self.path(key)
        if not path.is_file():
            return None
        damage, values = _read_checked(path)
        if not damage and values.shape != (count,):
            damage = f"it holds {tuple(values.shape)} numbers instead of {count}"
        if damage:
            self.notes.append(f"{path} is damaged ({damage}): recomputing")
            return None
        return values

    def write(self, key: str, values: Float[Tensor, " N"]) -> None:
        """Store `values` under `key` atomically; a folder that cannot be written to is noted, not fatal."""
        values = values.detach().cpu().contiguous()
        content = save({_NAME: values}, metadata={"checksum": _checksum(values)})
        temporary = self.folder / f".{key}.{os.getpid()}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(self.path(key))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self.notes.append(
                f"reference log-probs could not be kept in {self.folder} ({error}): the next run computes them again; "
                "set run.cache_dir to a folder that can be written to"
            )


def _read_checked(path: Path) -> tuple[str, Tensor]:
    """Read a file's numbers; return the damage (empty if there is none), and the numbers."""
    try:
        with safe_open(path, framework="pt") as file:
            values, metadata = file.get_tensor(_NAME), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        return str(error).splitlines()[0], torch.empty(0)
    return "" if metadata.get("checksum") == _checksum(values) else "its checksum does not match", values


def _checksum(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

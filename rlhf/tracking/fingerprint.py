"""Digests of files: whether data and weights are as at the beginning of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

WHOLE = 64 * 2**20  # files up to this size are read whole
BLOCK = 2**20
BLOCKS = 64  # of a larger file as many blocks are read, evenly spaced, the first and the last among them
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def content_digest(path: Path) -> str:
    """Compute the SHA-256 digest of a file's size and content, or of all files directly in a folder.

    Of a file above 64 MiB, 64 blocks of 1 MiB are read: enough for weights, all of which change when a model is
    trained; a change of a few rows in a larger data file may be missed.
    """
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.is_file()):
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def weights_digest(path: Path) -> str | None:
    """Compute the digest of the weight files in a model's folder, or of a single file; None if there are none."""
    files = [path] if path.is_file() else sorted(file for pattern in WEIGHTS for file in path.glob(pattern))
    return combine_digests(content_digest(file) for file in files) if files else None


def combine_digests(digests: Iterable[str]) -> str:
    """Compute one digest of several."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    """Yield the size of a file and the parts of its content that are read."""
    size = file.stat().st_size
    yield b"%d:" % size
    with file.open("rb") as opened:
        if size <= WHOLE:
            while block := opened.read(BLOCK):
                yield block
            return
        for number in range(BLOCKS):
            opened.seek((size - BLOCK) * number // (BLOCKS - 1))
            yield opened.read(BLOCK)

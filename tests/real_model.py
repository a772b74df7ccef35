"""SmolLM2-135M-Instruct from `../shared`: real weights, read once a process."""

from __future__ import annotations

import struct
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import gguf
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

FOLDER = Path("models/smollm2-135m-instruct")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = {b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges"}
TEXT, ARRAY = 8, 9  # types of GGUF's values; the others have these numbers of bytes
BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ALIGNMENT = 32


@cache
def real_model(shared: Path) -> PreTrainedModel:
    """Load the model in float32, in evaluation mode; do not change it.

    It is loaded from a copy without its vocabulary, whose texts transformers parses one by one and several times over,
    and by one table of names, which it makes again for each module: both took longer than all the rest.
    """
    logging.disable_progress_bar()
    names_once = mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    with tempfile.TemporaryDirectory() as folder, names_once:
        (Path(folder) / FILE).write_bytes(without_vocabulary((shared / FOLDER / FILE).read_bytes()))
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    return model.eval()


def without_vocabulary(content: bytes) -> bytes:
    """Leave the texts of the vocabulary out of a GGUF file's header; its tensors stay unchanged."""
    magic, version, tensors, fields = struct.unpack_from("<4sIQQ", content)
    assert (magic, version) == (b"GGUF", 3)
    kept, at = list[bytes](), struct.calcsize("<4sIQQ")
    for _ in range(fields):
        start, name_ends = at, _end_of_value(content, at, TEXT)
        (kind,) = struct.unpack_from("<I", content, name_ends)
        at = _end_of_value(content, name_ends + 4, kind)
        if content[start + 8 : name_ends] not in VOCABULARY:
            kept.append(content[start:at])
    names_begin = at
    for _ in range(tensors):  # a name, its dimensions, a type and an offset from the start of the tensors
        at = _end_of_value(content, at, TEXT)
        at += 4 + 8 * struct.unpack_from("<I", content, at)[0] + 4 + 8
    header = struct.pack("<4sIQQ", magic, version, tensors, len(kept)) + b"".join(kept) + content[names_begin:at]
    return header + bytes(-len(header) % ALIGNMENT) + content[at + -at % ALIGNMENT :]


def _end_of_value(content: bytes, at: int, kind: int) -> int:
    """Return the end of the value that begins at `at`."""
    if kind == TEXT:
        return at + 8 + int(struct.unpack_from("<Q", content, at)[0])
    if kind != ARRAY:
        return at + BYTES[kind]
    kind, count = struct.unpack_from("<IQ", content, at)
    at += 12
    if kind != TEXT:
        return at + int(count) * BYTES[kind]
    for _ in range(count):
        at = _end_of_value(content, at, TEXT)
    return at

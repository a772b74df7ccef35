"""Distinguish missing files from hub ids, and suggest the names that the user may have meant."""

from __future__ import annotations

import difflib
from pathlib import Path

KINDS = ("jsonl", "json", "csv", "parquet")
SUFFIXES = tuple(f".{kind}{gz}" for kind in KINDS for gz in (("", ".gz") if kind != "parquet" else ("",)))
"""The suffixes of data files."""


def looks_local(path: str, suffixes: tuple[str, ...] = ()) -> bool:
    """Return whether the non-existent `path` was meant as a file or folder rather than a hub id `owner/name`."""
    if path.startswith(("/", ".", "~")) or path.endswith((*suffixes, "/")) or "\\" in path:
        return True
    first, *rest = path.split("/")
    return len(rest) > 1 or (bool(rest) and Path(first).is_dir())


def missing(path: str) -> str:
    """Return the message "no such file or folder: ...", with similar names from the deepest folder that exists."""
    wanted = Path(path).expanduser()
    known = wanted
    while not known.is_dir() and known != known.parent:
        wanted, known = known, known.parent
    message = f"no such file or folder: {path}"
    if not known.is_dir():
        return message
    names = [entry.name for entry in known.iterdir() if not entry.name.startswith(".")]
    near = difflib.get_close_matches(wanted.name, names, n=3, cutoff=0.5)
    if near:
        return f"{message} (in {known} there is {', '.join(near)})"
    return f"{message} ({known} has no {wanted.name})"

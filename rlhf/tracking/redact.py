"""Hide secrets in configurations and messages that are shown to others: the report, the model card, trackers.

A secret is recognized by the name of its key (api_key, password, Authorization), by its place in an address (the user
part and query parameters such as ?token=…), or by its form (the prefixes of well-known kinds of key).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_NAME = (
    r"(?:[\w-]*[_-])?(?:api[_-]?keys?|apikey|access[_-]?keys?|private[_-]?key|passw(?:or)?d|passphrase|secrets?|"
    r"authorization|credentials?|cookie|bearer|"
    r"(?:hf|hub|github|gitlab|wandb|vault|private|auth|access|refresh|bearer|session|api|security|user|bot|id)[_-]?token)"
)
_SECRET_KEY = re.compile(rf"(?:{_NAME}|token|auth|pat)", re.IGNORECASE)
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s/?#@'\"]*@)?", re.IGNORECASE)
_PARAMETER = re.compile(
    rf"([?&;](?:{_NAME}|token|auth|key|sig|signature|code|x-amz-[\w-]+)=)[^\s&#;'\"]+", re.IGNORECASE
)
_ASSIGNED = re.compile(
    rf"(?<![\w.?&;])(['\"]?{_NAME}['\"]?\s*[:=]\s*(?:(?:bearer|basic|token)\s+)?)('[^']*'|\"[^\"]*\"|[^\s,;}})'\"]+)",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"((?<![\w.?&;])token=|['\"]token['\"]\s*[:=]\s*)('[^']*'|\"[^\"]*\"|[^\s,;})'\"]+)", re.IGNORECASE)
_SCHEME = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_KNOWN = re.compile(
    r"\b(?:sk-[\w-]{8,}|hf_\w{8,}|gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abeoprs]-[\w-]{8,}|"
    r"AKIA[A-Z0-9]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def redact(value: Any) -> Any:
    """Return a copy of a tree of settings whose secrets are replaced by asterisks."""
    if isinstance(value, Mapping):
        return {key: _hide(entry) if _is_secret(key) else redact(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redact(entry) for entry in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return the text with the secrets in it replaced by asterisks: in addresses, after the name of a key, by form."""
    text = _ADDRESS.sub(lambda match: match[1] + (f"{HIDDEN}@" if match[2] else ""), text)
    text = _PARAMETER.sub(rf"\g<1>{HIDDEN}", text)
    for pattern in (_ASSIGNED, _TOKEN):
        text = pattern.sub(lambda match: f"{match[1]}{_hidden_value(match[2])}", text)
    return _KNOWN.sub(HIDDEN, _SCHEME.sub(rf"\g<1> {HIDDEN}", text))


def _is_secret(key: object) -> bool:
    """Return whether a key names a secret; `api_key_env` and the like name an environment variable."""
    return isinstance(key, str) and _SECRET_KEY.fullmatch(key) is not None


def _hide(value: Any) -> Any:
    """Hide every value below a secret key; an unset one and a switch stay visible."""
    if isinstance(value, Mapping):
        return {key: _hide(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(entry) for entry in value]
    return value if value is None or isinstance(value, bool) or value == "" else HIDDEN


def _hidden_value(value: str) -> str:
    """Hide a value in a text; one that is quoted keeps its quotes, and an unset one stays visible."""
    if value.lower() in ("null", "none", "true", "false", "''", '""', HIDDEN):
        return value
    return f"{value[0]}{HIDDEN}{value[0]}" if value[0] in "'\"" else HIDDEN

"""Reads the addresses of HTTP servers."""

from __future__ import annotations

import urllib.parse


def parse_address(url: str) -> urllib.parse.SplitResult:
    """Parse the address of an HTTP server.

    Raises:
        ValueError: it has another scheme, no host, or a host or port that cannot be one.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_http = parts.scheme in {"http", "https"} and bool((parts.hostname or "").encode("idna"))
        _ = parts.port  # raises if it is no number of a port
    except ValueError as error:
        raise ValueError(f"{error}; give an http:// or https:// address") from error
    if not is_http:
        raise ValueError("give an http:// or https:// address")
    return parts

"""JSON over HTTP to a sampling server: one try, a timeout for everything, two kinds of failure."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rlhf.address import parse_address
from rlhf.errors import ConfigError

CONNECT_S = 10.0  # to open a connection; a machine that is off the network does not answer at all
SHOWN = 500  # characters of an answer in an error
PASSING = frozenset({408, 429, 502, 503, 504})  # of a server that is busy or starts, or of the gateway before it


class ServerDown(Exception):
    """The server did not answer: broken connection, timeout, or a status of `PASSING`. Another try may succeed."""


class ServerRefused(Exception):
    """The server answered with an error: the same request will fail again."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class JsonHttp:
    """Requests to one server."""

    def __init__(self, url: str, *, timeout_s: float, secret: str | None = None) -> None:
        """Check the address.

        Args:
            url: the address, without a route.
            timeout_s: the most seconds of a request without data.
            secret: sent as bearer token, and never part of an error.

        Raises:
            ConfigError: the address is not an HTTP one.
        """
        try:
            parts = parse_address(url)
        except ValueError as error:
            raise ConfigError(f"sampling.server.urls: {url!r}: {error}") from error
        if parts.username is not None:
            raise ConfigError("sampling.server.urls: leave user and password out of the address; set token_env")
        self.url, self.timeout_s, self.secret = url.rstrip("/"), timeout_s, secret
        self._parts = parts

    def get(self, route: str, *, timeout_s: float | None = None) -> Any:
        """Return the JSON at a route; see `_ask` for the errors."""
        return _parsed(*self._ask("GET", route, None, timeout_s))

    def post(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """POST JSON to a route and return the JSON of the answer; None if it has no body."""
        return _parsed(*self._ask("POST", route, b"" if body is None else json.dumps(body).encode(), timeout_s))

    def tell(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> None:
        """POST JSON to a route of whose answer the status alone counts; it may have any text."""
        self._ask("POST", route, b"" if body is None else json.dumps(body).encode(), timeout_s)

    def _ask(self, method: str, route: str, body: bytes | None, timeout_s: float | None) -> tuple[int, str]:
        """Send a request once, and return the status and the text of the answer.

        Raises:
            ServerDown: there was no answer.
            ServerRefused: the answer is an error; or is not JSON, if it has to be.
        """
        import http.client

        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_S)
        headers = {"Content-Type": "application/json"}
        if self.secret is not None:
            headers["Authorization"] = f"Bearer {self.secret}"
        try:
            connection.connect()
            if connection.sock is not None:
                connection.sock.settimeout(self.timeout_s if timeout_s is None else timeout_s)
            connection.request(method, self._parts.path.rstrip("/") + route, body=body, headers=headers)
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerDown(f"{self.url}{route}: {str(error) or type(error).__name__}") from error
        finally:
            with contextlib.suppress(OSError):
                connection.close()
        text = content.decode(errors="replace")
        if status in PASSING:
            raise ServerDown(f"HTTP {status}: {text[:SHOWN]}")
        if status >= 400:
            raise ServerRefused(status, text[:SHOWN])
        return status, text


def _parsed(status: int, text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError:
        raise ServerRefused(status, f"the answer is not JSON: {text[:SHOWN]!r}") from None

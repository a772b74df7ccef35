"""POST JSON to a server, with retries."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf.address import parse_address
from rlhf.errors import ConfigError, RewardError
from rlhf.rewards.source import quoted

if TYPE_CHECKING:
    import urllib.error

MAX_BACKOFF_S = 30.0


def read_token(environment: Mapping[str, str], name: str, *, key: str) -> str:
    """Read a bearer token from an environment variable, which the setting `key` names.

    Raises:
        ConfigError: there is none, or it has a character that no header can hold.
    """
    token = environment.get(name)
    if not token:
        raise ConfigError(f"{key}: the environment variable {name} is not set: put the token in it")
    if not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{key}: the environment variable {name} holds a line break or another character that is not printable "
            "ASCII: put the token alone in it"
        )
    return token


class JsonPoster:
    """POSTs JSON and returns the body of the response, with retries and exponential back-off.

    A refused or broken connection, a timeout, status 429 (too many requests) and 5xx (server errors) are retried after
    backoff_s, 2 backoff_s, ... (at most 30 s apart; if the server sends Retry-After, at least that long, up to 30 s).
    Any other error is final. Each pause is randomly up to half shorter, so that many clients do not come back at once.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str,
        who: str,
        timeout_s: float,
        retries: int,
        backoff_s: float,
        secret: str | None = None,
    ) -> None:
        """Check the address and store the settings of the requests.

        Args:
            key: the setting the address comes from, for errors.
            who: a name for the server, for errors.
            timeout_s: the most seconds of a request without data.
            retries: the number of tries after the first.
            backoff_s: the first pause, in seconds.
            secret: sent as bearer token; not sent on to a redirection, and never part of an error.

        Raises:
            RewardError: the address is not an HTTP one, or contains a user name.
        """
        try:
            parts = parse_address(url)
        except ValueError as error:
            raise RewardError(f"{key} {url!r}: {error}") from error
        if parts.username is not None:
            raise RewardError(f"{key}: leave user and password out of the address; it is written to the run folder")
        self.url, self.who = url, who
        self.timeout_s, self.retries, self.backoff_s = timeout_s, retries, backoff_s
        self.secret = secret

    def post(self, body: bytes) -> bytes:
        """Send `body` and return the body of the response.

        Raises:
            RewardError: the server refuses, or does not answer in any of the tries.
        """
        import http.client
        import urllib.error

        started, asked_to_wait = time.monotonic(), 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                backoff = min(self.backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
                time.sleep(min(max(backoff, asked_to_wait), MAX_BACKOFF_S))
            try:
                return self._send(body)
            except urllib.error.HTTPError as error:
                last, asked_to_wait = f"HTTP {error.code} {error.reason}{self._error_text(error)}", _retry_after(error)
                if error.code != 429 and error.code < 500:
                    raise RewardError(f"{self.who} {self.url} refused: {last}") from None
            except (OSError, http.client.HTTPException) as error:
                last, asked_to_wait = str(getattr(error, "reason", error)) or type(error).__name__, 0.0
        raise RewardError(
            f"{self.who} {self.url} gave no answer in {self.retries + 1} tries over "
            f"{time.monotonic() - started:.1f} s (timeout {self.timeout_s:g} s each); the last: {last}"
        )

    def _send(self, body: bytes) -> bytes:
        import urllib.request

        request = urllib.request.Request(self.url, data=body, headers={"Content-Type": "application/json"})
        if self.secret is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.secret}")
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            content: bytes = response.read()
        return content

    def _error_text(self, error: urllib.error.HTTPError) -> str:
        """Return the readable text of an error response, without the secret, and close its connection."""
        import http.client

        with error, contextlib.suppress(OSError, http.client.HTTPException):
            text = error.read(1000).decode(errors="replace")
            return f": {quoted(text.replace(self.secret, '***') if self.secret else text)}"
        return ""


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Return the seconds that the server asks to wait; 0 if it does not ask or gives a date."""
    value = (error.headers.get("Retry-After") or "").strip()
    return float(value) if value.isdecimal() else 0.0

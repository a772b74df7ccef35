"""One POST to a server, tried again while that can help."""

from __future__ import annotations

import contextlib
import http.client
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from rlhf.errors import RewardError
from rlhf.rewards.texts import shown

MAX_BACKOFF_S = 30.0


def server_error(code: int) -> bool:
    """Whether the fault is the server's, and may pass."""
    return code >= 500


def busy_or_server_error(code: int) -> bool:
    """Those, and 429: too many requests."""
    return code == 429 or server_error(code)


class Poster:
    """POSTs JSON and gives back what the server says.

    A refused or broken connection, a timeout and a status that `passing` names are tried again after backoff_s,
    2 backoff_s, ... (at most 30 s apart; where the server says Retry-After, at least that, up to 30 s); any other
    answer is final. Each pause is up to half shorter by chance, so that many clients do not come back at once.
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
        passing: Callable[[int], bool] = server_error,
        secret: str | None = None,
    ) -> None:
        """`timeout_s` is the longest silence allowed on a request, `retries` the tries after the first.

        Args:
            url: the address.
            key: the setting it comes from, for errors.
            who: what the server is, for errors.
            timeout_s: see above.
            retries: see above.
            backoff_s: the first pause.
            passing: the statuses to try again.
            secret: sent as the bearer of the authorization; not with a redirection, and never part of an error.

        Raises:
            RewardError: the address is not an HTTP one, or has a user's name in it.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise RewardError(f"{key} {url!r}: give an http:// or https:// address")
        if parts.username is not None:
            raise RewardError(f"{key}: leave user and password out of the address; it is written to the run folder")
        self.url, self.who = url, who
        self.timeout_s, self.retries, self.backoff_s = timeout_s, retries, backoff_s
        self.passing, self.secret = passing, secret

    def post(self, body: bytes) -> bytes:
        """The body of the answer.

        Raises:
            RewardError: the server refuses, or gives no answer in all its tries.
        """
        started, asked_to_wait = time.monotonic(), 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                backoff = min(self.backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
                time.sleep(min(max(backoff, asked_to_wait), MAX_BACKOFF_S))
            try:
                return self._once(body)
            except urllib.error.HTTPError as error:
                last, asked_to_wait = f"HTTP {error.code} {error.reason}{self._said(error)}", _retry_after(error)
                if not self.passing(error.code):
                    raise RewardError(f"{self.who} {self.url} refused: {last}") from None
            except (OSError, http.client.HTTPException) as error:
                last, asked_to_wait = str(getattr(error, "reason", error)) or type(error).__name__, 0.0
        raise RewardError(
            f"{self.who} {self.url} gave no answer in {self.retries + 1} tries over "
            f"{time.monotonic() - started:.1f} s (timeout {self.timeout_s:g} s each); the last: {last}"
        )

    def _once(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, data=body, headers={"Content-Type": "application/json"})
        if self.secret is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.secret}")
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            answer: bytes = response.read()
        return answer

    def _said(self, error: urllib.error.HTTPError) -> str:
        """What an error answer says, as far as it can be read; its connection is closed."""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            said = error.read(1000).decode(errors="replace")
            return f": {shown(said.replace(self.secret, '***') if self.secret else said)}"
        return ""


def _retry_after(error: urllib.error.HTTPError) -> float:
    """The seconds that the server asks to wait; 0 where it does not, or names a date."""
    value = (error.headers.get("Retry-After") or "").strip()
    return float(value) if value.isdecimal() else 0.0

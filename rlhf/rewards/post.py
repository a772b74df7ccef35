"""One POST to a server, tried again while that can help."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Collection
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager, Retry, make_headers
from urllib3.exceptions import HTTPError, InvalidHeader, MaxRetryError
from urllib3.util import parse_url

from rlhf.errors import RewardError
from rlhf.rewards.texts import shown

MAX_BACKOFF_S = 30.0
SERVER_ERRORS = frozenset(range(500, 600))  # the fault is the server's, and may pass
BUSY_OR_SERVER_ERRORS = SERVER_ERRORS | {429}  # those, and too many requests


class _Backoff(Retry):
    """Pause before every new try, by chance up to half shorter, so that many clients do not come back at once."""

    RETRY_AFTER_STATUS_CODES = frozenset()  # status_forcelist alone says which statuses are tried again

    def get_backoff_time(self) -> float:
        """Draw the pause: backoff_factor after the first failure, then twice as long after each."""
        return random.uniform(0.5, 1.0) * min(self.backoff_factor * 2.0 ** (len(self.history) - 1), MAX_BACKOFF_S)

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        """Wait for that pause, or as long as the server asks where that is longer."""
        asked_for = None
        if response is not None:
            with contextlib.suppress(InvalidHeader, ValueError, OverflowError):
                asked_for = self.get_retry_after(response)
        time.sleep(min(max(self.get_backoff_time(), asked_for or 0.0), MAX_BACKOFF_S))


class Poster:
    """POSTs JSON and gives back what the server says.

    A refused or broken connection, a timeout and a status of `passing` are tried again after backoff_s, 2 backoff_s,
    ... (at most 30 s apart; where the server says Retry-After, at least that, up to 30 s); any other answer is final,
    a redirection too. Each pause is up to half shorter by chance.
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
        passing: Collection[int] = SERVER_ERRORS,
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
            secret: sent as the bearer of the authorization; never part of an error.

        Raises:
            RewardError: the address is not an HTTP one, or has a user's name in it.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise RewardError(f"{key} {url!r}: give an http:// or https:// address")
        if parts.username is not None:
            raise RewardError(f"{key}: leave user and password out of the address; it is written to the run folder")
        self.url, self.who, self.secret = url, who, secret
        self.timeout_s, self.tries, self.passing = timeout_s, retries + 1, passing
        self._retry = _Backoff(
            retries, allowed_methods=None, status_forcelist=passing, backoff_factor=backoff_s, raise_on_status=False
        )

    def post(self, body: bytes) -> bytes:
        """Send `body` and return the body of the answer.

        Raises:
            RewardError: the server refuses, or gives no answer in all its tries.
        """
        started = time.monotonic()
        headers = {"Content-Type": "application/json"}
        if self.secret is not None:
            headers["Authorization"] = f"Bearer {self.secret}"
        pool = _connections(self.url, timeout=self.timeout_s, retries=self._retry)
        try:
            with pool:
                response = pool.request("POST", self.url, body=body, headers=headers, redirect=False)
        except MaxRetryError as error:
            last = str(error.reason)
        except HTTPError as error:  # of the address or of the answer's encoding: nothing that passes
            raise RewardError(f"{self.who} {self.url}: {error}") from None
        else:
            if 200 <= response.status < 300:
                return response.data
            said = response.data[:1000].decode(errors="replace")
            said = said.replace(self.secret, "***") if self.secret else said
            last = f"HTTP {response.status} {response.reason}: {shown(said)}"
            if response.status not in self.passing:
                raise RewardError(f"{self.who} {self.url} refused: {last}")
        raise RewardError(
            f"{self.who} {self.url} gave no answer in {self.tries} tries over "
            f"{time.monotonic() - started:.1f} s (timeout {self.timeout_s:g} s each); the last: {last}"
        )


def _connections(url: str, *, timeout: float, retries: Retry) -> PoolManager:
    """Make a pool of connections: through the proxy that the environment names for the address, if any."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy is None or proxy_bypass(parts.netloc):
        return PoolManager(timeout=timeout, retries=retries)
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    login = parse_url(proxy).auth
    password = make_headers(proxy_basic_auth=unquote(login)) if login else None
    return ProxyManager(proxy, proxy_headers=password, timeout=timeout, retries=retries)

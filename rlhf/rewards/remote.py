"""A reward server over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict

from rlhf.errors import RewardError
from rlhf.rewards.texts import Decoder, checked_scores, decode, live_ids, shown
from rlhf.types import Completions, Scores

MAX_BACKOFF_S = 30.0


class RemoteReward:
    """POSTs {prompts, completions, references} as JSON; the answer is {"scores": [...]}, and "parts" if it likes.

    With a `vocabulary` also {finished, tokens: {vocabulary, prompts, completions}}: what rlhf serve-reward needs to
    give the very scores that the model gives in this process.

    A refused or broken connection, a timeout and a 5xx answer are tried again after backoff_s, 2 backoff_s, ...
    (at most 30 s apart), each up to half shorter by chance, so that many clients do not come back at once; any other
    answer is final.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Decoder,
        *,
        timeout_s: float = 60.0,
        retries: int = 8,
        backoff_s: float = 1.0,
        secret: str | None = None,
        vocabulary: str | None = None,
    ) -> None:
        """`timeout_s` is the longest silence allowed on a request, `retries` the tries after the first.

        `secret` is sent as the bearer of the authorization, and is never part of an error; `vocabulary` is the digest
        of the policy's (rlhf.data.chat.vocabulary_digest) where its token ids are to be sent too.

        Raises:
            RewardError: the address is not an HTTP one.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise RewardError(f"reward.source.url {url!r}: give an http:// or https:// address")
        self.url = url
        self.tokenizer = tokenizer
        self.timeout_s = timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self.secret = secret
        self.vocabulary = vocabulary

    def __call__(self, completions: Completions) -> Scores:
        """See RewardSource."""
        texts = decode(completions, self.tokenizer)
        try:
            body = json.dumps(asdict(texts) | self._ids(completions), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(f"the prompts' other columns cannot be sent to {self.url} as JSON: {error}") from error
        answer = self._parse(self._post(body))
        return checked_scores(answer["scores"], answer.get("parts") or {}, texts, who=f"the reward server {self.url}")

    def _ids(self, completions: Completions) -> dict[str, object]:
        if self.vocabulary is None:
            return {}
        prompts, own = live_ids(completions)
        tokens = {"vocabulary": self.vocabulary, "prompts": prompts, "completions": own}
        return {"finished": completions.finished.tolist(), "tokens": tokens}

    def _post(self, body: bytes) -> bytes:
        started = time.monotonic()
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(self.backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.0))
            try:
                return self._once(body)
            except urllib.error.HTTPError as error:
                last = f"HTTP {error.code} {error.reason}{_said(error)}"
                if error.code < 500:
                    raise RewardError(f"the reward server {self.url} refused: {last}") from error
            except (OSError, http.client.HTTPException) as error:
                last = str(getattr(error, "reason", error)) or type(error).__name__
        raise RewardError(
            f"the reward server {self.url} gave no answer in {self.retries + 1} tries over "
            f"{time.monotonic() - started:.1f} s (timeout {self.timeout_s:g} s each); the last: {last}"
        )

    def _once(self, body: bytes) -> bytes:
        request = urllib.request.Request(self.url, data=body, headers={"Content-Type": "application/json"})
        if self.secret is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.secret}")
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            answer: bytes = response.read()
        return answer

    def _parse(self, answer: bytes) -> dict[str, object]:
        try:
            parsed = json.loads(answer)
        except ValueError as error:
            raise RewardError(
                f"the reward server {self.url} answered with something that is not JSON ({error}): "
                f"{shown(answer.decode(errors='replace'))}"
            ) from error
        if not isinstance(parsed, dict) or "scores" not in parsed:
            raise RewardError(
                f'the reward server {self.url} must answer {{"scores": [...]}}; it said {shown(json.dumps(parsed))}'
            )
        return parsed


def _said(error: urllib.error.HTTPError) -> str:
    """What an error answer says, as far as it can be read; its connection is closed."""
    with error, contextlib.suppress(OSError, http.client.HTTPException):
        return f": {shown(error.read(1000).decode(errors='replace'))}"
    return ""

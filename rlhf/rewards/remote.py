"""A reward source that asks a reward server over HTTP."""

from __future__ import annotations

import json
from dataclasses import asdict

from rlhf.errors import RewardError
from rlhf.rewards.post import Poster
from rlhf.rewards.texts import Decoder, checked_scores, decode, live_ids, shown
from rlhf.types import Completions, Scores


class RemoteReward:
    """POSTs {prompts, completions, references} as JSON; the response is {"scores": [...]}, optionally with "parts".

    With a `vocabulary` it also sends {finished, tokens: {vocabulary, prompts, completions}}, which rlhf serve-reward
    needs to return exactly the scores that the model gives in this process.

    Retries are described at Poster.
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
        """Set up the requests to `url`; completions are decoded with `tokenizer`.

        `timeout_s` is how long a request may go without data, `retries` the number of tries after the first, and
        `backoff_s` the first pause between tries. `secret` is sent as bearer token and is never part of an error.
        `vocabulary` is the digest of the policy's vocabulary (rlhf.data.chat.vocabulary_digest); if given, the token
        ids are sent too.

        Raises:
            RewardError: the address is not an HTTP one.
        """
        self.url = url
        self.tokenizer = tokenizer
        self.poster = Poster(
            url,
            key="reward.source.url",
            who="the reward server",
            timeout_s=timeout_s,
            retries=retries,
            backoff_s=backoff_s,
            secret=secret,
        )
        self.vocabulary = vocabulary

    def __call__(self, completions: Completions) -> Scores:
        """Score the completions by asking the server.

        Raises:
            RewardError: the server fails or refuses, or does not return one finite number per completion.
        """
        texts = decode(completions, self.tokenizer)
        try:
            body = json.dumps(asdict(texts) | self._token_ids(completions), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(f"the prompts' other columns cannot be sent to {self.url} as JSON: {error}") from error
        response = self._parse(self.poster.post(body))
        return checked_scores(
            response["scores"], response.get("parts") or {}, texts, who=f"the reward server {self.url}"
        )

    def _token_ids(self, completions: Completions) -> dict[str, object]:
        if self.vocabulary is None:
            return {}
        prompts, completion_ids = live_ids(completions)
        tokens = {"vocabulary": self.vocabulary, "prompts": prompts, "completions": completion_ids}
        return {"finished": completions.finished.tolist(), "tokens": tokens}

    def _parse(self, response: bytes) -> dict[str, object]:
        try:
            parsed = json.loads(response)
        except ValueError as error:
            raise RewardError(
                f"the reward server {self.url} answered with something that is not JSON ({error}): "
                f"{shown(response.decode(errors='replace'))}"
            ) from error
        if not isinstance(parsed, dict) or "scores" not in parsed:
            raise RewardError(
                f'the reward server {self.url} must answer {{"scores": [...]}}; it said {shown(json.dumps(parsed))}'
            )
        return parsed

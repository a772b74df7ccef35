"""A reward server over HTTP."""

from __future__ import annotations

import json
from dataclasses import asdict

from rlhf.errors import RewardError
from rlhf.rewards.post import Poster
from rlhf.rewards.texts import Decoder, checked_scores, decode, live_ids, shown
from rlhf.types import Completions, Scores


class RemoteReward:
    """POSTs {prompts, completions, references} as JSON; the answer is {"scores": [...]}, and "parts" if it likes.

    With a `vocabulary` also {finished, tokens: {vocabulary, prompts, completions}}: what rlhf serve-reward needs to
    give the very scores that the model gives in this process.

    What is tried again, and when: see Poster.
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
        """See RewardSource."""
        texts = decode(completions, self.tokenizer)
        try:
            body = json.dumps(asdict(texts) | self._ids(completions), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(f"the prompts' other columns cannot be sent to {self.url} as JSON: {error}") from error
        answer = self._parse(self.poster.post(body))
        return checked_scores(answer["scores"], answer.get("parts") or {}, texts, who=f"the reward server {self.url}")

    def _ids(self, completions: Completions) -> dict[str, object]:
        if self.vocabulary is None:
            return {}
        prompts, own = live_ids(completions)
        tokens = {"vocabulary": self.vocabulary, "prompts": prompts, "completions": own}
        return {"finished": completions.finished.tolist(), "tokens": tokens}

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

"""A reward source that asks a reward server over HTTP."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from rlhf.errors import RewardError
from rlhf.rewards.http import JsonPoster, read_token
from rlhf.rewards.source import BatchDecoder, Source, SourceContext, checked_scores, decode, quoted, unpadded_ids

if TYPE_CHECKING:
    from rlhf.types import Completions, Scores


class RemoteSource(Source):
    """A reward server over HTTP."""

    is_learned: ClassVar[bool] = True  # a model may stand behind the server

    type: Literal["remote"] = "remote"
    url: str
    """Answers POST {prompts, completions, references} with {scores}."""
    timeout_s: Annotated[float, Gt(0)] = 60.0
    """Seconds without data after which a request times out; an answer that keeps coming may take longer."""
    retries: Annotated[int, Ge(0)] = 8
    """Retries 1 s, 2 s, 4 s ... 30 s apart (about two minutes in total); then the run saves and stops."""
    token_env: str | None = None
    """Environment variable with the token for Authorization: Bearer; null: no token is sent."""
    send_tokens: bool = False
    """Also send token ids: rlhf serve-reward then returns exactly the in-process scores."""

    def describe(self) -> str:
        """Return the address."""
        return self.url

    def build(self, context: SourceContext) -> RemoteReward:
        """Return the source that asks the server.

        Raises:
            ConfigError: the environment variable holds no token.
            RewardError: the address is invalid.
        """
        from rlhf.data.tokenizer import vocabulary_digest

        name = self.token_env
        return RemoteReward(
            self.url,
            context.tokenizer,
            timeout_s=self.timeout_s,
            retries=self.retries,
            secret=None if name is None else read_token(os.environ, name, key="reward.source.token_env"),
            vocabulary=vocabulary_digest(context.tokenizer) if self.send_tokens else None,
        )


class RemoteReward:
    """POSTs {prompts, completions, references} as JSON; the response is {"scores": [...]}, optionally with "parts".

    Parts become metrics: rlhf serve-reward sends "cut", which is 1 for a text beyond its model's context (score/cut).
    With a `vocabulary` it also sends {finished, tokens: {vocabulary, prompts, completions}}, which rlhf serve-reward
    needs to return exactly the scores that the model gives in this process.

    `JsonPoster` describes the retries.
    """

    def __init__(
        self,
        url: str,
        tokenizer: BatchDecoder,
        *,
        timeout_s: float = 60.0,
        retries: int = 8,
        backoff_s: float = 1.0,
        secret: str | None = None,
        vocabulary: str | None = None,
    ) -> None:
        """Set up the requests to `url`; completions are decoded with `tokenizer`.

        `timeout_s` is the most seconds of a request without data, `retries` the number of tries after the first, and
        `backoff_s` the first pause between tries. `secret` is sent as bearer token and is never part of an error.
        `vocabulary` is the digest of the policy's vocabulary; if given, the token ids are sent too.

        Raises:
            RewardError: the address is not an HTTP one.
        """
        self.url = url
        self.tokenizer = tokenizer
        self.poster = JsonPoster(
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
        prompts, completion_ids = unpadded_ids(completions)
        tokens = {"vocabulary": self.vocabulary, "prompts": prompts, "completions": completion_ids}
        return {"finished": completions.finished.tolist(), "tokens": tokens}

    def _parse(self, response: bytes) -> dict[str, object]:
        try:
            parsed = json.loads(response)
        except (ValueError, RecursionError) as error:
            raise RewardError(
                f"the reward server {self.url} answered with something that is not JSON ({error}): "
                f"{quoted(response.decode(errors='replace'))}"
            ) from error
        if not isinstance(parsed, dict) or "scores" not in parsed:
            raise RewardError(
                f'the reward server {self.url} must answer {{"scores": [...]}}; it said {quoted(json.dumps(parsed))}'
            )
        return parsed

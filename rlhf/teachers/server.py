"""A teacher behind vLLM's OpenAI-compatible server, asked for the log-probabilities of given tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt

from rlhf.errors import ConfigError, RewardError
from rlhf.rewards.http import JsonPoster, read_token
from rlhf.teachers.listed import ListedTokens, live_rows
from rlhf.teachers.teacher import Teacher, TeacherContext, TeacherSource

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rlhf.types import Completions, Demonstrations


class ServerTeacher(Teacher):
    """A server with vLLM's field `prompt_logprobs` in POST {url}/completions; the teacher is never in this memory."""

    type: Literal["server"] = "server"
    url: str
    """Address of the API, as in http://localhost:8000/v1."""
    model: str
    """Name of the model at the server."""
    top_k: Annotated[int, Ge(1)] = 20
    """The likeliest tokens to ask for; vLLM allows 20 unless it is started with a larger --max-logprobs."""
    timeout_s: Annotated[float, Gt(0)] = 60.0
    """Seconds without data after which a request times out; an answer that keeps coming may take longer."""
    retries: Annotated[int, Ge(0)] = 8
    """Retries 1 s, 2 s, 4 s ... 30 s apart; then the run saves and stops."""
    concurrency: Annotated[int, Ge(1)] = 8
    """Requests at the same time, one a completion."""
    token_env: str | None = None
    """Environment variable with the token for Authorization: Bearer; null: no token is sent."""

    def describe(self) -> str:
        """Return the model and its address."""
        return f"{self.model} at {self.url}"

    def build(self, context: TeacherContext) -> TeacherSource:
        """Return the source that asks the server.

        Raises:
            ConfigError: the token is not in the environment, samples are drawn at another temperature than 1, or the
                loss compares more tokens than are asked for.
            RewardError: the address is invalid.
        """
        if context.temperature != 1.0:
            raise ConfigError(
                f"teacher.type=server gives log-probabilities at temperature 1, but sampling.temperature is "
                f"{context.temperature:g}: set it to 1, or teacher.type=model"
            )
        if context.top_k is not None and context.top_k > self.top_k:
            raise ConfigError(
                f"the loss compares the {context.top_k} likeliest tokens (top_k), but teacher.top_k asks the server "
                f"for {self.top_k}: raise teacher.top_k to {context.top_k}, or lower the top_k of the loss"
            )
        return AskedTeacher(self, context.tokenizer, context.device)


class AskedTeacher:
    """Asks a server for the teacher's likeliest tokens; a `rlhf.teachers.teacher.TeacherSource`."""

    parameters = 0  # the server's cost is not known

    def __init__(
        self,
        config: ServerTeacher,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        *,
        backoff_s: float = 1.0,
    ) -> None:
        self.config, self.tokenizer, self.device = config, tokenizer, device
        name = config.token_env
        self.poster = JsonPoster(
            f"{config.url.rstrip('/')}/completions",
            key="teacher.url",
            who="the teacher's server",
            timeout_s=config.timeout_s,
            retries=config.retries,
            backoff_s=backoff_s,
            secret=None if name is None else read_token(os.environ, name, key="teacher.token_env"),
        )

    def __call__(self, batch: Completions | Demonstrations) -> ListedTokens:
        """Ask about every completion; requests run at the same time, and their order does not matter.

        Raises:
            RewardError: the server fails, refuses, or its ids mean other texts than the policy's.
        """
        import torch

        with ThreadPoolExecutor(self.config.concurrency) as pool:
            answers = list(pool.map(lambda row: self._ask(*row), live_rows(batch)))
        ids = [entry for answer in answers for entry in answer[0]]
        logprobs = [entry for answer in answers for entry in answer[1]]
        shape = (len(ids), self.config.top_k)
        return ListedTokens(
            torch.tensor(ids, dtype=torch.long, device=self.device).view(shape),
            torch.tensor(logprobs, dtype=torch.float32, device=self.device).view(shape),
        )

    def _ask(self, prompt: list[int], completion: list[int]) -> tuple[list[list[int]], list[list[float]]]:
        body = {
            "model": self.config.model,
            "prompt": [*prompt, *completion],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.config.top_k,
        }
        response = self.poster.post(json.dumps(body).encode())
        try:
            entries = json.loads(response)["choices"][0]["prompt_logprobs"]
            listed = [self._read(entry) for entry in entries[len(prompt) :]]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise RewardError(
                f"the teacher's server {self.poster.url} did not return prompt_logprobs of token ids as vLLM does "
                f"({type(error).__name__}: {error})"
            ) from error
        if len(listed) != len(completion):
            raise RewardError(
                f"the teacher's server {self.poster.url} returned log-probabilities of {len(listed)} tokens for a "
                f"completion of {len(completion)}"
            )
        return [ids for ids, _ in listed], [logprobs for _, logprobs in listed]

    def _read(self, entry: Mapping[str, Mapping[str, Any]]) -> tuple[list[int], list[float]]:
        """Read the likeliest tokens of one position; the given token stands there too if it is not one of them."""
        ranked = sorted(entry.items(), key=lambda item: -float(item[1]["logprob"]))[: self.config.top_k]
        if len(ranked) < self.config.top_k:
            raise RewardError(
                f"the teacher's server {self.poster.url} gives {len(ranked)} tokens where teacher.top_k asks for "
                f"{self.config.top_k}: start vLLM with --max-logprobs {self.config.top_k}, or lower teacher.top_k"
            )
        ids = [int(token) for token, _ in ranked]
        self._check_texts(ids, [item.get("decoded_token") for _, item in ranked])
        return ids, [float(item["logprob"]) for _, item in ranked]

    def _check_texts(self, ids: Sequence[int], texts: Sequence[object]) -> None:
        """Check that the server's ids mean the policy's texts, as far as the server gives their texts.

        A token of some bytes of a character has no text of its own; vLLM gives it the text that it completes.
        """
        for token, text in zip(ids, texts, strict=True):
            ours = str(self.tokenizer.decode([token]))
            if not isinstance(text, str) or not text.strip() or "\ufffd" in text + ours:
                continue
            if text.strip() != ours.strip():
                raise RewardError(
                    f"the teacher has another vocabulary than the policy: id {token} is {text!r} at the server "
                    f"{self.poster.url} and {ours!r} here. Distillation needs one vocabulary"
                )

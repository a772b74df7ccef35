"""A language model behind an OpenAI-compatible endpoint: its settings, questions from a template, cached answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from rlhf.errors import ConfigError, RewardError
from rlhf.rewards.http import JsonPoster, read_token
from rlhf.rewards.source import quoted
from rlhf.section import Section, cache_folder

VERSION = 1  # of the cached files; part of the key
MIN_ANSWERS_TO_CHECK = 4  # as many answers, none of them readable, are no accident


class ChatConfig(Section):
    """An OpenAI-compatible endpoint: POST base_url/chat/completions, at temperature 0."""

    type: Literal["openai"] = "openai"
    base_url: str
    """The address up to and including /v1, e.g. http://127.0.0.1:8000/v1."""
    model: str
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Environment variable with the key, which is never stored; null: no key is sent."""
    template: str | None = None
    """Text file with the question; null: the built-in question (docs/evaluation.md)."""
    max_tokens: Annotated[int, Ge(1)] = 512
    """Maximum answer tokens."""
    request: dict[str, Any] = {}
    """Additional keys for every request; null removes a default key, e.g. {temperature: null}."""
    timeout_s: Annotated[float, Gt(0)] = 60.0
    """Seconds without data after which a request times out."""
    retries: Annotated[int, Ge(0)] = 6
    """Retries with exponential backoff after no answer, or an answer with status 429 or 5xx."""
    concurrency: Annotated[int, Ge(1)] = 8
    """Concurrent requests."""
    cache_dir: str | None = None
    """Folder of cached answers, so that no question is asked twice; null: $XDG_CACHE_HOME/rlhf or ~/.cache/rlhf."""

    def code_files(self) -> Mapping[str, Path]:
        """Return the file of the question by its field, on which answers depend as on code; nothing without a file."""
        file = Path(self.template or "").expanduser()
        return {"template": file} if file.is_file() else {}


class ChatModel:
    """Asks a chat model at temperature 0, several questions at a time, each only once, also across runs."""

    def __init__(
        self, config: ChatConfig, environment: Mapping[str, str], *, section: str, backoff_s: float = 1.0
    ) -> None:
        """Read the key and the cache folder from `environment`; errors name the configuration `section`.

        Raises:
            ConfigError: the environment variable for the key holds none.
            RewardError: the address is not an HTTP one.
        """
        name = config.api_key_env
        self.config = config
        self.folder = cache_folder(config.cache_dir, environment) / "judgments"
        self.poster = JsonPoster(
            f"{config.base_url.rstrip('/')}/chat/completions",
            key=f"{section}.base_url",
            who="the judge",
            timeout_s=config.timeout_s,
            retries=config.retries,
            backoff_s=backoff_s,
            secret=None if name is None else read_token(environment, name, key=f"{section}.api_key_env"),
        )

    @property
    def who(self) -> str:
        """Return the model's name and address, for messages."""
        return f"the judge {self.config.model} at {self.config.base_url}"

    def ask(self, questions: Sequence[str]) -> list[str]:
        """Return an answer to each question, in order; an answer without text is empty, and is not cached.

        Answers received before an error or an interruption stay in the cache.

        Raises:
            RewardError: the endpoint refuses, times out, or does not answer in the OpenAI format, or the cache
                cannot be written.
        """
        from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

        bodies = {self._key(body): body for body in map(self._body, questions)}
        answers = {key: answer for key in bodies if (answer := self._read_cached(key)) is not None}
        pool = ThreadPoolExecutor(max_workers=self.config.concurrency)
        try:
            futures = {
                key: pool.submit(self._ask_and_cache, key, body) for key, body in bodies.items() if key not in answers
            }
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            answers |= {key: future.result() for key, future in futures.items()}
        finally:
            pool.shutdown(cancel_futures=True)
        return [answers[self._key(self._body(question))] for question in questions]

    def _body(self, question: str) -> bytes:
        defaults = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self.config.max_tokens,
        }
        request = {key: value for key, value in {**defaults, **self.config.request}.items() if value is not None}
        return json.dumps(request, sort_keys=True).encode()

    def _key(self, body: bytes) -> str:
        return hashlib.sha256(f"{VERSION} {self.poster.url} ".encode() + body).hexdigest()

    def _read_cached(self, key: str) -> str | None:
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            cached = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # a damaged file: ask again
            return None
        answer = cached.get("answer") if isinstance(cached, dict) else None
        return answer if isinstance(answer, str) else None

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def _ask_and_cache(self, key: str, body: bytes) -> str:
        from rlhf.tracking.run_folder import write_atomically

        answer = self._parse_content(self.poster.post(body))
        if not answer.strip():  # a server's mistake is not kept for good
            return answer
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"model": self.config.model, "answer": answer}) + "\n")
        except OSError as error:
            raise RewardError(
                f"{self.who} has answered, and the answer cannot be written into {self.folder} ({error}): make room "
                "there, or set cache_dir beside base_url to another folder"
            ) from error
        return answer

    def _parse_content(self, response: bytes) -> str:
        try:
            parsed: Any = json.loads(response)
            content = parsed["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            content = response
        if content is not None and not isinstance(content, str):
            raise RewardError(
                f"{self.who} did not answer as an OpenAI endpoint does (choices[0].message.content): "
                f"{quoted(response.decode(errors='replace'))}"
            )
        return content or ""


def read_template(path: str | None, shipped: str, fields: Sequence[str], *, section: str, hint: str = "") -> str:
    """Read the question template at `path`, or return `shipped` if there is none; every field must occur as {field}.

    Raises:
        ConfigError: there is no such file of UTF-8 text, or a field is missing (`hint` ends the message).
    """
    if path is None:
        return shipped
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{section}.template: no file {path}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.template: {path} cannot be read: {error}") from error
    missing = [f"{{{name}}}" for name in fields if f"{{{name}}}" not in text]
    if missing:
        raise ConfigError(f"{section}.template: {path} has no {' and no '.join(missing)}{hint}")
    return text


def fill_template(template: str, **values: str) -> str:
    """Replace each {name} in the template in one pass, so that braces inside the values stay as they are."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda match: values[match[1]], template)


def check_readable(readable: Sequence[bool], answers: Sequence[str], *, who: str, wanted: str) -> None:
    """Check that at least one of the judge's answers can be read, unless there are fewer than ENOUGH.

    Raises:
        RewardError: none of four or more answers can be read.
    """
    if len(answers) >= MIN_ANSWERS_TO_CHECK and not any(readable):
        raise RewardError(f"none of {len(answers)} answers of {who} is {wanted}; the first: {quoted(answers[0])}")

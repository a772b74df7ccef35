"""The requests and answers of vLLM's routes, as the trainer writes and reads them; `rlhf serve-policy` has them too.

POST /v1/completions       prompt (token ids), n, seed, temperature, max_tokens, stop_token_ids, logprobs,
                           prompt_logprobs, return_token_ids -> choices with token_ids and logprobs
POST /pause, /resume       no new completions in between
POST /collective_rpc       {"method": "reload_weights", "kwargs": {"weights_path": ...}}
POST /reset_prefix_cache   forget keys and values of the weights before
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.serving.http import JsonHttp, ServerRefused

EXACT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with every request: the folder of a model may have other defaults, and a server would use them."""

ROUNDING = 1e-3  # how far above 0 a log-probability may be


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Prompts to complete: the same fields give the same completions from every server."""

    prompts: Sequence[Sequence[int]]  # token ids, without padding
    rows: Sequence[int]  # the number of each prompt within the step, by which its draws are keyed
    width: int  # tokens of the longest prompt, with padding
    group_size: int
    key: int  # of the draws: runtime.seeding.derive_seed
    greedy: bool
    temperature: float
    max_new_tokens: int
    stop_ids: Sequence[int]
    pad_id: int
    batch_size: int  # rows decoded together
    frozen: bool = False  # whether the trainer's weights need no gradient: last bits depend on it
    adapted: bool = False  # whether the policy is an adapter that was pushed
    limits: Mapping[str, float] = field(default_factory=dict)  # top_k, top_p, min_p, if they leave tokens out


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The completions of an Ask, `group_size` for each prompt in a row."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    prompts: list[list[int]]  # the prompt of each completion as the server read it
    version: str | None  # of the weights; None if the server does not report it
    supports: list[str] | None = None  # which tokens could be drawn: sampling.support.to_text; None: all


def choices_of(answer: Any, count: int) -> list[Mapping[str, Any]]:
    """Return the choices of an answer in the order of the request.

    Raises:
        ServerRefused: there are not `count` of them.
    """
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    is_numbered = isinstance(choices, list) and all(isinstance(c, Mapping) and "index" in c for c in choices)
    if not isinstance(choices, list) or not is_numbered or len(choices) != count:
        raise ServerRefused(200, f"expected {count} choices, found {choices!r:.200}")
    return sorted(choices, key=lambda choice: int(choice["index"]))


def read_choice(choice: Mapping[str, Any]) -> tuple[list[int], list[float], list[int]]:
    """Return token ids, their log-probabilities, and the prompt's token ids.

    Raises:
        ServerRefused: one of them is missing, a token id is none, or a log-probability is no number or above 0.
    """
    ids, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if ids is None or logprobs is None or prompt is None or len(ids) != len(logprobs):
        raise ServerRefused(
            200, "a choice lacks token_ids, prompt_token_ids or logprobs: the server is too old for return_token_ids"
        )
    values = [math.nan if value is None else float(value) for value in logprobs]
    for place, (token, value) in enumerate(zip(ids, values, strict=True)):
        if not math.isfinite(value) or value > ROUNDING:
            raise ServerRefused(200, f"token {place + 1} of a completion has the log-probability {logprobs[place]}")
        if type(token) is not int or token < 0:
            raise ServerRefused(200, f"token {place + 1} of a completion has the id {token}")
    return list(ids), values, list(prompt)


def score(http: JsonHttp, ids: Sequence[int], *, model: str | None, timeout_s: float) -> list[float]:
    """Return the log-probability of each token after the first, at temperature 1, as the server computes it.

    A token that the server does not know has minus infinity.
    """
    body: dict[str, Any] = {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, **EXACT}
    if model is not None:
        body["model"] = model
    (choice,) = choices_of(http.post("/v1/completions", body, timeout_s=timeout_s), 1)
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise ServerRefused(200, "the server returns no prompt_logprobs")
    values = []
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        top = entry.get(str(token)) if isinstance(entry, Mapping) else None
        value = top.get("logprob") if isinstance(top, Mapping) else None
        values.append(float("-inf") if value is None else float(value))
    return values

"""Secrets are hidden wherever a configuration or a message is shown, and nothing else is hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.load import dump, load_any
from rlhf.tracking.redact import redact, redact_text


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "API-Key", "openai_api_key", "apikey", "token", "hf_token", "access_token", "password", "passwd"),
        *("secret", "client_secret", "Authorization", "X-Api-Key", "aws_secret_access_key", "credentials", "cookie"),
        *("hub_token", "github_token", "gitlab_token", "wandb_token", "Private-Token", "X-Vault-Token"),
    ],
)
@pytest.mark.parametrize("value", ["planted", 1234, ["planted"], {"inner": "planted"}])
def test_the_value_of_a_secret_key_is_hidden(key: str, value: Any) -> None:
    shown = redact({"reward": [{"kwargs": {key: value, "name": "kept"}}]})
    assert "planted" not in str(shown)
    assert "1234" not in str(shown)
    assert shown["reward"][0]["kwargs"]["name"] == "kept"


@pytest.mark.parametrize(
    "tree",
    [
        {"api_key_env": "OPENAI_API_KEY", "token_env": "REWARD_TOKEN"},
        {"max_tokens": 512, "micro_batch_tokens": 64, "send_tokens": True, "tokenizer": "a/b", "aggregate": "token"},
        {"eos_token": "</s>", "pad_token": None, "api_key": None, "password": "", "token": False},
        {"url": "http://127.0.0.1:8000/v1/score", "target": "secret/keys.py:token", "text": "me@you.org and 3 keys"},
    ],
)
def test_what_is_no_secret_is_shown(tree: dict[str, Any]) -> None:
    assert redact(tree) == tree


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:word@host/a", "https://***@host/a"),
        ("postgresql://me@host/a", "postgresql://***@host/a"),
        ("https://host/a?x=1&token=abc&y=2", "https://host/a?x=1&token=***&y=2"),
        ("https://host/a?X-Amz-Signature=abc", "https://host/a?X-Amz-Signature=***"),
        ("api_key=abc, n=3", "api_key=***, n=3"),
        ("password: 'a b', n: 3", "password: '***', n: 3"),
        ("{'hf_token': 'abc', 'n': 3}", "{'hf_token': '***', 'n': 3}"),
        ("{'token': 'abc'} token=abc", "{'token': '***'} token=***"),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("sent Bearer abcdefghijkl to it", "sent Bearer *** to it"),
        ("with sk-abcdefghijkl and hf_abcdefghijkl", "with *** and ***"),
    ],
)
def test_secrets_in_a_text_are_hidden(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact_text(shown) == shown


CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_no_setting_of_a_shipped_configuration_is_hidden(file: Path) -> None:
    settings = dump(load_any(file))
    assert redact(settings) == settings

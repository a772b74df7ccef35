"""The address of a server of ours, and the token that its clients have to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """The address and the authentication of a server."""

    host: str = "127.0.0.1"
    port: int
    token_env: str | None = None

    def read_token(self, environment: Mapping[str, str]) -> str | None:
        """Check the port, and return the token that requests have to have; None if they need none.

        Raises:
            ConfigError: the port is none, or the environment variable holds no token.
        """
        if not 0 <= self.port < 2**16:
            raise ConfigError("--port must be between 0 and 65535")
        if self.token_env is None:
            return None
        token = environment.get(self.token_env, "")
        if not token or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"--token-env: put a token (printable ASCII) into the environment variable {self.token_env}"
            )
        return token

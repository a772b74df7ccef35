"""`textarena:ID`: TextArena's games for one player (Guertler et al. 2025), such as textarena:GuessTheNumber-v0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

from rlhf.environments.load import Adapter, Make
from rlhf.errors import ConfigError, did_you_mean, install_hint

REPEATED = r"\A\n?(?:\[[^\]\n]*\] )?(?:\[{move}\]|{move})(?=\n|\Z)"
"""A move as games repeat it: `[Player] MOVE`, or with brackets that a wrapper has added."""


class TextArenaAdapter(Adapter):
    """Makes TextArena's games for one player; their reset seeds Python's global random generator."""

    name: ClassVar[str] = "textarena"
    extra: ClassVar[str] = "textarena"

    @classmethod
    def load(cls, target: str, kwargs: Mapping[str, Any]) -> Make:
        """Return the maker of the game of this ID.

        Raises:
            ConfigError: TextArena is not installed, or has no such game.
        """
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            hint = install_hint(cls.extra)
            raise ConfigError(f"environment.target textarena:{target} needs textarena: {hint}") from error
        if target not in ENV_REGISTRY:
            raise ConfigError(
                f"environment.target textarena:{target}: TextArena has no such game{did_you_mean(target, ENV_REGISTRY)}"
            )
        return lambda: Game(textarena.make(target, **deepcopy(kwargs)))


class Game:
    """A game for one player with Gymnasium's methods; the observation is the text that the player has not read yet."""

    def __init__(self, game: Any) -> None:
        """Take the game."""
        self.game = game
        self.read = ""  # what the player has read so far: wrappers give the whole of it again

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a game."""
        self.game.reset(num_players=1, seed=seed)
        self.read = ""
        return self._unread(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move; the game's reward comes at its end."""
        done, _ = self.game.step(action=action)
        if not done:
            return self._unread(action), 0.0, False, False, {}
        rewards, _ = self.game.close()
        reward = float((rewards or {}).get(0, 0.0))
        return "", reward, True, False, {}

    def _unread(self, move: str | None = None) -> str:
        """Return what the game has told the player since its last move; without an observation wrapper, its events.

        The move itself, which games repeat with a name before it and brackets around it, is left out.
        """
        _, observation = self.game.get_observation()
        text = observation if isinstance(observation, str) else "\n".join(str(event[1]) for event in observation)
        unread = text.removeprefix(self.read)
        self.read = text
        if move is not None:
            unread = re.sub(REPEATED.format(move=re.escape(move)), "", unread, count=1)
        return unread.strip()

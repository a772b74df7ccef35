"""Guess a number from 1 to 20 in five guesses. `python guess_number.py` writes games of random play to begin with."""

import json
import random
import re

RULES = "Guess my whole number from 1 to 20. You have five guesses. Answer with the number alone."


class GuessNumber:
    """Answers each guess with higher or lower; a right guess is worth 1, and each one before it costs a little."""

    def __init__(self, highest: int = 20, guesses: int = 5, price: float = 0.05) -> None:
        self.highest, self.guesses, self.price = highest, guesses, price

    def reset(self, *, seed=None, options=None):
        """Think of a number; the rules are the prompt of the data row."""
        self.number = random.Random(seed).randint(1, self.highest)
        self.used = 0
        return "", {}

    def step(self, action):
        """Answer a guess."""
        self.used += 1
        found = re.fullmatch(r"\s*(\d{1,3})\s*\.?\s*", action)
        over = self.used == self.guesses
        if found is None:
            return "Answer with one whole number.", 0.0, over, False, {"malformed": 1}
        guess = int(found[1])
        if guess == self.number:
            return "Right.", 1.0 - self.price * (self.used - 1), True, False, {}
        return ("Higher." if guess < self.number else "Lower."), 0.0, over, False, {}


def random_game(seed):
    """Play one game with five different numbers, whatever the answers are: about one game in four is won."""
    game, draw = GuessNumber(), random.Random(f"play {seed}")
    game.reset(seed=seed)
    messages = [{"role": "user", "content": RULES}]
    for guess in draw.sample(range(1, 21), 5):
        answer, _, over, _, _ = game.step(str(guess))
        messages.append({"role": "assistant", "content": str(guess)})
        if over:
            break
        messages.append({"role": "user", "content": answer})
    return messages


def write_games():
    """Write games of random play to imitate, and the rows that games are played from: each has the rules."""
    files = {
        "games.jsonl": [{"messages": random_game(seed)} for seed in range(400)],
        "rules.jsonl": [{"prompt": RULES}] * 256,
        "held_out.jsonl": [{"prompt": RULES}] * 100,
    }
    for name, rows in files.items():
        with open(name, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    write_games()

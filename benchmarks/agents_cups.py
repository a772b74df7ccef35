"""Why do agents learn cups in some seeds only? Looks at all 108 games of the task:   python benchmarks/agents_cups.py

Measures how near each start of agents_learn.py is to the play that it imitated, lets it imitate more such games, and
trains both by GRPO's loss in a plain loop, 60 steps of 16 games with 8 answers each. Writes a JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from agent_tasks import GOOD, TASKS
from agents_learn import make_start
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

RESULTS = Path(__file__).parent / "results" / "agents_cups.json"
CUPS = range(3)
STEPS, GROUPS, GROUP = 60, 16, 8  # of GRPO, as in agents_learn.py
RATE, KL, CLIP, WARMUP, MINIBATCHES, PART = 2e-3, 0.01, 0.2, 6, 4, 10
IMITATED, CHECKED = 32, 64  # games in a step of imitation; steps between two looks at the distance
SPREAD = 1e-4  # of rewards in a group, below which all are the same
KNOWN: dict[str, Callable[[Game], tuple[Any, ...]]] = {
    "start and first swap": lambda game: (game.start, game.first),
    "start and second swap": lambda game: (game.start, game.second),
    "both swaps": lambda game: (game.first, game.second),
    "all": tuple,
}


class Game(NamedTuple):
    """Where the ball starts, and the two swaps."""

    start: int
    first: tuple[int, int]
    second: tuple[int, int]

    @property
    def ball(self) -> int:
        """Follow the ball."""
        place = self.start
        for pair in (self.first, self.second):
            place = dict(zip(pair, reversed(pair), strict=True)).get(place, place)
        return place

    def imitated(self) -> list[float]:
        """Return the chance of each cup in the play to imitate: a wrong cup of the last swap, or the ball's."""
        wrong = next(cup for cup in self.second if cup != self.ball)
        return [GOOD * (cup == self.ball) + (1 - GOOD) * (cup == wrong) for cup in CUPS]


PAIRS = list(itertools.permutations(CUPS, 2))
GAMES = [Game(*parts) for parts in itertools.product(CUPS, PAIRS, PAIRS)]
BALL = torch.tensor([game.ball for game in GAMES])
DEMO = torch.tensor([game.imitated() for game in GAMES])


def best_share(known: Callable[[Game], tuple[Any, ...]]) -> float:
    """Return the share that the best policy wins which reads only a part of the game."""
    balls: dict[tuple[Any, ...], Counter[int]] = defaultdict(Counter)
    for game in GAMES:
        balls[known(game)][game.ball] += 1
    return sum(max(counts.values()) for counts in balls.values()) / len(GAMES)


def texts() -> list[str]:
    """Write what the policy reads in each game."""
    task = TASKS["cups"]
    read = str(task.games(1, 0)[0]["messages"][0]["content"])
    written = []
    for game in GAMES:
        line = " ".join("[X]" if cup == game.start else f"[{cup}]" for cup in CUPS)
        text = re.sub("(?<=Ball starts: ).*", line, read)
        for step, pair in enumerate((game.first, game.second), 1):
            text = re.sub(f"(?<=Shuffle {step}/2: swapped cups ).*", f"{pair[0]} and {pair[1]}.", text)
        written.append(text)
    return written


class Player:
    """A model with the tokens of every answer to every game."""

    def __init__(self, folder: Path) -> None:
        """Load the model."""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        rendered = tokenizer.apply_chat_template
        chats = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": f"[{cup}]"}]
            for text in texts()
            for cup in CUPS
        ]
        tokens = torch.tensor([rendered(chat, return_dict=False) for chat in chats])
        self.tokens = tokens.view(len(GAMES), len(CUPS), -1)
        self.read = len(rendered(chats[0][:1], return_dict=False))

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Return the log-probability of each answer."""
        answer = tokens[:, self.read :, None]
        kept = answer.shape[1] + 1
        logits = self.model(tokens, logits_to_keep=kept).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, answer)[..., 0].sum(1)

    def choices(self, games: Tensor) -> Tensor:
        """Return the log-probabilities of the three cups and, as the fourth, of any other text."""
        cups = self.log_probs(self.tokens[games].flatten(0, 1)).view(len(games), len(CUPS))
        other = (1 - cups.exp().sum(1, keepdim=True)).clamp_min(1e-5).log()
        return torch.cat([cups, other], dim=1)

    @torch.no_grad()
    def probabilities(self) -> Tensor:
        """Return the probability of each cup in each game."""
        return self.choices(torch.arange(len(GAMES)))[:, : len(CUPS)].exp()

    def won(self) -> float:
        """Return the share of games that it wins."""
        return round(float(self.probabilities().gather(1, BALL[:, None]).mean()), 4)

    def distance(self) -> float:
        """Return the total variation between its answers and the play that it imitated, a mean over the games."""
        return round(float((self.probabilities() - DEMO).abs().sum(1).mean() / 2), 4)

    def optimizer(self) -> torch.optim.Optimizer:
        """Make an optimizer of its weights."""
        return torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)

    def update(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Take a step against a loss."""
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()


def imitate_more(player: Player, seed: int, near: float, most: int) -> int:
    """Imitate new games until the distance is small; return their number."""
    draw, optimizer = torch.Generator().manual_seed(seed), player.optimizer()
    for step in range(1, most + 1):
        games = torch.randint(len(GAMES), (IMITATED,), generator=draw)
        cups = torch.multinomial(DEMO[games], 1, generator=draw)[:, 0]
        answers = player.tokens[games, cups]
        player.update(optimizer, -player.log_probs(answers).mean() / (answers.shape[1] - player.read))
        if step % CHECKED == 0 and player.distance() < near:
            break
    return step * IMITATED


def advantages(rewards: Tensor) -> Tensor:
    """Compare the answers of a group; a group without spread says nothing."""
    spread = rewards.std(1, keepdim=True)
    return (rewards - rewards.mean(1, keepdim=True)) / (spread + SPREAD)


def grpo(player: Player, seed: int) -> dict[str, Any]:
    """Train by GRPO; return the share won, and means over ten steps of the return, entropy and groups with a spread."""
    draw, optimizer = torch.Generator().manual_seed(seed), player.optimizer()
    with torch.no_grad():
        reference = player.choices(torch.arange(len(GAMES)))
    lines: list[tuple[float, float, float]] = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / WARMUP, 1) * (1 - step / STEPS)
        games = torch.randint(len(GAMES), (GROUPS,), generator=draw)
        with torch.no_grad():
            old = player.choices(games)
        answers = torch.multinomial(old.exp(), GROUP, replacement=True, generator=draw)
        wins = (answers == BALL[games][:, None]).float()
        mixed = wins.std(1) > 0
        gained = advantages(wins - KL * (old - reference[games]).gather(1, answers)) * mixed[:, None]
        lines.append((float(wins.mean()), float(-(old.exp() * old).sum(1).mean()), float(mixed.float().mean())))
        for part in torch.randperm(GROUPS, generator=draw).chunk(MINIBATCHES):
            ratio = (player.choices(games[part]) - old[part]).exp().gather(1, answers[part])
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            player.update(optimizer, -torch.minimum(ratio * gained[part], clipped * gained[part]).mean())
    parts = [lines[first : first + PART] for first in range(0, STEPS, PART)]
    means = [[round(statistics.mean(line), 3) for line in zip(*part, strict=True)] for part in parts]
    curves = zip(("return", "entropy", "mixed"), map(list, zip(*means, strict=True)), strict=True)
    return {"won": player.won(), **dict(curves)}


def measure(part: str, seed: int, work: Path, near: float, most: int) -> dict[str, Any]:
    """Measure a start of agents_learn.py and what GRPO makes of it; for the part `more`, after more imitation."""
    player = Player(make_start(TASKS["cups"], seed, work / f"cups-{seed}"))
    more = {"games": imitate_more(player, seed, near, most)} if part == "more" else {}
    return {**more, "won": player.won(), "distance": player.distance(), "grpo": grpo(player, seed)}


def main() -> None:
    """Measure what is missing and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--near", type=float, default=0.12, help="the distance at which imitation ends")
    parser.add_argument("--most", type=int, default=512, help="the most steps of imitation")
    parser.add_argument("--work", type=Path, default=Path("runs/agents-learn"), help="where the starts are")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    best = {name: round(best_share(known), 4) for name, known in KNOWN.items()}
    content: dict[str, Any] = {"best": best, "torch": version("torch"), "near": args.near, "seeds": {}}
    if args.out.is_file():
        content["seeds"] = json.loads(args.out.read_text(encoding="utf-8"))["seeds"]
    for part, seed in itertools.product(("start", "more"), map(str, args.seeds)):
        cell = content["seeds"].setdefault(seed, {})
        if part not in cell:
            cell[part] = measure(part, int(seed), args.work, args.near, args.most)
            args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            print(seed, part, cell[part], flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

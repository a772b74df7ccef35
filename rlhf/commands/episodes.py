"""rlhf chat --episodes: episodes of a run's model in its environment, printed turn by turn."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from rlhf.commands.notices import warn_of_rounding
from rlhf.config.load import load_run
from rlhf.config.sections import RewardModelConfig
from rlhf.errors import ConfigError, UserError
from rlhf.factory.data import load_prompts_of_run
from rlhf.factory.sampler import Completer
from rlhf.runtime.seeding import derive_seed
from rlhf.tracking.progress import printable
from rlhf.training.rollout import transcript
from rlhf.types import StopReason

STYLES = {"policy": "bold", "environment": "dim"}


def run_episodes(path: str, count: int, *, seed: int, greedy: bool, console: Console) -> None:
    """Play the run's held-out rows (without any, its training rows) and print the transcripts.

    Raises:
        UserError: the run has no environment, or its model cannot be loaded.
    """
    if count < 1:
        raise UserError(f"--episodes is {count}: it must be at least 1")
    config = load_run(path)
    if isinstance(config, RewardModelConfig) or config.environment is None:
        raise ConfigError(f"{path} was trained without an environment: leave --episodes out to talk with its model")
    rows = config.data.eval_prompts or config.data.prompts
    if rows is None:
        raise ConfigError(f"{path} has no prompts to begin episodes with: set data.eval_prompts.path")
    warn_of_rounding(path)
    completer = Completer(path, config.sampling, chat=config.data.chat_format)
    first = rows.model_copy(update={"limit": count})
    prompts = load_prompts_of_run(first, config, completer.tokenizer, completer.model)
    sampler = completer.player(config.environment, config.plugins)
    if len(prompts) < count:
        console.print(f"{len(prompts)} of {count} episodes, one for each row")
    played = sampler.sample(prompts.all(), key=derive_seed(seed, "episodes"), group_size=1, greedy=greedy)
    for row in range(len(played)):
        console.print(Text(printable(str(played.references[row]["prompt"]))), soft_wrap=True)
        for part in transcript(played, row, completer.decode_text):
            reward = f"  [{part['reward']:g}]" if part.get("reward") else ""
            text = f"{part['by']:>12} │ {printable(str(part['text']).strip())}{reward}"
            console.print(Text(text, style=STYLES[str(part["by"])]), soft_wrap=True)
        total = float(played.turn_rewards[row].sum())
        stop = StopReason(int(played.stops[row])).name.lower()
        console.print(Text(f"{'':>12} = return {total:g}, ended by {stop}\n"), soft_wrap=True)

"""rlhf <verb> <file-or-run> [key=value ...]: the command line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from rlhf.errors import UserError

OTHERS_WAIT_S = 3.0  # before another process than the first tells of an error
EPILOG = """\
rlhf quickstart                                   the whole pipeline on the lab, in minutes
rlhf train  configs/sft.yaml policy.model=… data.sft.path=…
rlhf rm     configs/reward_model.yaml data.preferences.path=…
rlhf train  configs/ppo.yaml reward.source.path=runs/rm
rlhf compare configs/lab/compare_quick.yaml       several algorithms, one budget, one judge, one page
rlhf eval   runs/ppo
rlhf sample runs/ppo --prompt "…"
rlhf report runs/ppo
rlhf config configs/ppo.yaml policy.lr=1e-6
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; 0 when done (or interrupted and saved), 2 for a mistake of the user's."""
    parsed = _parser().parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    console = Console(quiet=rank > 0)
    _quiet_libraries()
    try:
        _VERBS[parsed.verb](parsed, console)
    except UserError as error:
        _say(error, rank)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        return 130
    _part()
    return 0


def _part() -> None:
    """Part from the other processes of the run, where there are any."""
    distributed = sys.modules.get("rlhf.runtime.ranks")
    if distributed is not None:
        distributed.leave()


def _say(error: UserError, rank: int) -> None:
    """In one process of each host where all make the same mistake, in the first where it told the others of its own."""
    distributed = sys.modules.get("rlhf.runtime.ranks")
    if os.environ.get("LOCAL_RANK", "0") != "0" and not (distributed and distributed.met()):
        return
    if rank and getattr(error, "told_by_main", False):
        return
    if rank and distributed and distributed.met():
        time.sleep(OTHERS_WAIT_S)  # the launcher ends this process if the first has failed too
    where = f" (process {rank})" if rank else ""
    Console(stderr=True).print(Text(f"error{where}: {error}", style="red"), soft_wrap=True)


def _part() -> None:
    """Part from the other processes of the run, where there are any."""
    distributed = sys.modules.get("rlhf.runtime.ranks")
    if distributed is not None:
        distributed.leave()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf",
        description="Fine-tune language models from human preferences.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS
    )  # deepspeed's launcher says it
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")

    def verb(name: str, help_text: str, target: str | None) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help_text, description=help_text)
        if target is not None:
            sub.add_argument("target", metavar=target)
        return sub

    overrides = {"nargs": "*", "metavar": "key=value", "default": []}
    for name, text in (
        ("train", "run any algorithm, online or offline, from a configuration"),
        ("rm", "train a reward model on preference pairs"),
        ("compare", "several algorithms from one start, on one budget, under one judge"),
        ("config", "print the resolved configuration, run nothing"),
    ):
        verb(name, text, "file").add_argument("overrides", **overrides)  # type: ignore[arg-type]
    verb("eval", "a run against the model it started from", "run").add_argument("overrides", **overrides)  # type: ignore[arg-type]
    verb("report", "rebuild the page of a run, or of a comparison, from its folder", "run")
    sample = verb("sample", "talk to the model of a run, or in a model folder", "run")
    sample.add_argument("--prompt", action="append", required=True, help="may be given several times")
    sample.add_argument("--count", type=int, default=1, help="completions of each prompt")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--greedy", action="store_true", help="the most likely token each time")
    sample.add_argument("--max-new-tokens", type=int)
    sample.add_argument("--temperature", type=float)
    quickstart = verb("quickstart", "lab → SFT → preference pairs → reward model → PPO → report", None)
    quickstart.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    quickstart.add_argument("--seed", type=int, default=0)
    quickstart.add_argument("--out", default="runs/quickstart", help="folder for the runs")
    return parser


def _train(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.train import run_train
    from rlhf.config.load import load_train
    from rlhf.lab.build import with_lab

    run_train(with_lab(load_train(parsed.target, parsed.overrides)), console)


def _rm(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.train import run_reward_model
    from rlhf.config.load import load_reward_model
    from rlhf.lab.build import with_lab

    run_reward_model(with_lab(load_reward_model(parsed.target, parsed.overrides)), console)


def _compare(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.compare import run_compare
    from rlhf.config.load import load_compare

    run_compare(load_compare(parsed.target, parsed.overrides), beside=Path(parsed.target).parent, console=console)


def _config(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.config.load import dump, load_any, unread_sections

    config = load_any(parsed.target, parsed.overrides)
    print(yaml.safe_dump(dump(config), sort_keys=False, allow_unicode=True), end="")  # noqa: T201
    for text in unread_sections(config):
        Console(stderr=True).print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


def _eval(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.evaluate import run_eval

    run_eval(parsed.target, parsed.overrides, console)


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.compare import is_comparison, rebuild_comparison
    from rlhf.commands.train import run_report

    if is_comparison(parsed.target):
        rebuild_comparison(parsed.target, console)
    else:
        run_report(parsed.target, console)


def _sample(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.sample import run_sample, sampling_of

    run_sample(
        parsed.target,
        parsed.prompt,
        count=parsed.count,
        seed=parsed.seed,
        greedy=parsed.greedy,
        sampling=sampling_of(parsed.target, parsed.max_new_tokens, parsed.temperature),
        console=console,
    )


def _quickstart(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.quickstart import run_quickstart

    run_quickstart(parsed.out, seed=parsed.seed, overrides=parsed.overrides, console=console)


_VERBS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "train": _train,
    "rm": _rm,
    "compare": _compare,
    "config": _config,
    "eval": _eval,
    "report": _report,
    "sample": _sample,
    "quickstart": _quickstart,
}


def _quiet_libraries() -> None:
    """Our own lines are the display; the libraries' loading bars and advice are not. Read when they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())

"""The command line: rlhf <verb> <file-or-run> [key=value ...]."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from rlhf.errors import UserError, did_you_mean, install_hint
from rlhf.process import silence_libraries

Options = TypeVar("Options")  # a dataclass
OTHERS_WAIT_S = 3.0  # a rank other than 0 waits this long before it prints an error
SILENT_WAIT_S = 60.0  # a rank that prints nothing waits this long before it exits: then the launcher ends all ranks
EPILOG = """\
rlhf quickstart                                   the whole pipeline on the lab, in minutes
rlhf train  configs/sft.yaml policy.model=… data.sft.path=…
rlhf reward configs/reward_model.yaml data.preferences.path=…
rlhf train  configs/ppo.yaml data.prompts.path=… reward.source.path=runs/reward_model
rlhf compare configs/lab/compare_quick.yaml       several algorithms, one budget, one judge, one page
rlhf eval   runs/ppo
rlhf eval   runs/ppo --suite ifeval --data …       an alignment evaluation; rlhf eval --help lists them
rlhf chat   runs/ppo                              a conversation, if the model has a chat template
rlhf sample runs/ppo --prompt "…"
rlhf report runs/ppo
rlhf push   runs/ppo owner/name --dry-run         the model to the hub, with a card; --dry-run prints the card
rlhf export runs/ppo --gguf ppo.gguf              one file for llama.cpp
rlhf teach  configs/distill_sft.yaml --out teacher.safetensors      a teacher's probabilities, for offline distillation
rlhf label  completions.jsonl --judge runs/reward_model       preference pairs from a judge, compared with people's
rlhf serve-reward runs/reward_model --port 8000   for reward.source.type=remote
rlhf serve-policy models/smollm2-135m-instruct    another process that samples, for sampling.backend=server
rlhf config configs/ppo.yaml policy.lr=1e-6
rlhf lint   configs/ppo.yaml batch.epochs=20      unsafe settings, each with its reason, its source and the fix
rlhf plan   configs/ppo.yaml --memory 24GB        its memory and time, before anything is loaded
rlhf reward-check math --dataset prompts.jsonl    does a reward pay for right answers only? before a run
rlhf launch --slurm configs/ppo.yaml --nodes 2 --gpus 8      print the job script; also --torchrun, --skypilot

Completion in bash: eval "$(register-python-argcomplete rlhf)" (in zsh after autoload -U bashcompinit; bashcompinit)
"""


ALIASES = {"rm": "reward"}
SEE = "; rlhf {verb} --help lists what it takes"
ONE_PROCESS = ("eval", "chat", "sample", "teach", "label", "serve-reward", "serve-policy")
TARGETS = {
    "file": "a configuration (YAML), or the folder of a run or comparison to repeat or continue",
    "run": "a run folder or a model; RUN@best is the best checkpoint that a run has kept",
    "run-folder": "a run folder; RUN@best is the best checkpoint that the run has kept",
    "folder": "the folder of a run or of a comparison",
    "reward": "a verifier (math, json, my_file.py:grade), a reward function or model, or a configuration (YAML)",
    "completions": "rows with a prompt and completions, or one completion each, or preference pairs (docs/data.md)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 when done (or interrupted and saved), 1 if a part of a comparison
    failed or a reward pays for worthless answers, 2 for a user error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments and "_ARGCOMPLETE" not in os.environ:
        _parser().print_help()
        return 0
    parsed = parse(arguments)
    rank = int(os.environ.get("RANK", "0"))
    console = Console(quiet=rank > 0)
    silence_libraries()
    try:
        _check_launcher(parsed.verb)
        code = _VERBS[parsed.verb](parsed, console)
        sys.stdout.flush()
    except UserError as error:
        _report_error(error, rank)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            return 141  # as of a program that SIGPIPE ends
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        Console(stderr=True).print(Text(f"error: {error}: make room, then run it again", style="red"), soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        return 130
    _shut_down_distributed()
    return code or 0


def _check_launcher(verb: str) -> None:
    """Check that a verb of one process does not run in each process of a launcher: all would write the same file."""
    if verb in ONE_PROCESS and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"rlhf {verb} runs in one process, and a launcher started {os.environ['WORLD_SIZE']}: run it without "
            "torchrun, accelerate or deepspeed, or unset WORLD_SIZE"
        )


def _has_no_reader() -> bool:
    """Return whether nobody reads standard output any more (`rlhf config … | head`); the rest of it goes nowhere."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; key=value is also accepted after options, where argparse does not look for it."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    _check_verb(parser, arguments)
    parsed, rest = parser.parse_known_args(arguments)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in overrides]
    if unknown or (overrides and not hasattr(parsed, "overrides")):
        _refuse(parser, parsed.verb, unknown or overrides)
    if overrides:
        parsed.overrides = [*parsed.overrides, *overrides]
    return parsed


def _check_verb(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Exit with the nearest verb if the first word is none."""
    word = next((word for word in arguments if not word.startswith("-")), None)
    if word is not None and word not in _VERBS:
        near = did_you_mean(word, _VERBS) or f"; choose from {', '.join(_VERBS)}"
        parser.exit(2, f"error: rlhf {word}: no such verb{near}\n")


def _setting(verb: str, name: str) -> str | None:
    """Return the full key of an option such as --learning-rate, which is a setting here; None if it is not one."""
    from rlhf.config.load import full_key

    sections = {
        "train": ["policy"],
        "reward": ["model"],
        "rm": ["model"],
        "lint": ["policy"],
        "config": ["policy"],
        "plan": ["policy"],
    }
    return full_key(name.replace("-", "_"), sections[verb]) if verb in sections else None


def _refuse(parser: argparse.ArgumentParser, verb: str, words: Sequence[str]) -> None:
    """Exit with the way to write the first word that a verb does not take."""
    word = words[0]
    name, _, value = word.lstrip("-").partition("=")
    name = _setting(verb, name) or name
    if not word.startswith("-"):
        hint = f": rlhf {verb} takes no settings" if value else f"; settings are key=value, options begin with --{SEE}"
    elif "." in name:
        value = value or next((other for other in words[1:2] if not other.startswith("-")), "VALUE")
        hint = f": settings are written without dashes, {name}={value}"
    else:
        options = [option for action in _verbs(parser)[verb]._actions for option in action.option_strings]
        hint = (did_you_mean(word.partition("=")[0], options) or SEE).format(verb=verb)
    parser.exit(2, f"error: rlhf {verb}: unknown argument {word}{hint.format(verb=verb)}\n")


def _verbs(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    choices: Mapping[str, argparse.ArgumentParser] = next(actions).choices
    return choices


def _complete(parser: argparse.ArgumentParser) -> None:
    """Print the completions that the shell asks for, and exit."""
    import argcomplete

    for sub in _verbs(parser).values():
        for action in sub._actions:
            if action.dest == "overrides":
                action.completer = _setting_keys  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _setting_keys(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return the settings of the file on the command line that begin with the typed text."""
    from rlhf.config.load import dump, load_any
    from rlhf.tracking.trackers import flatten

    try:
        keys = flatten(dump(load_any(parsed_args.target)))
    except UserError:
        return []
    return [f"{key}=" for key in keys if key.startswith(prefix)]


def _report_error(error: UserError, rank: int) -> None:
    """Print an error once rather than from every rank.

    Before the process group exists all ranks fail alike, and local rank 0 of each host prints; an error that rank 0
    sent to the others is printed by rank 0 only. Ranks that stay silent wait before they exit: a launcher ends all
    ranks once one has exited, and would end the one about to print too.
    """
    distributed = sys.modules.get("rlhf.runtime.distributed")
    has_group = bool(distributed and distributed.is_initialized())
    is_duplicate = os.environ.get("LOCAL_RANK", "0") != "0" and not has_group
    if is_duplicate or (rank and getattr(error, "told_by_main", False)):
        time.sleep(SILENT_WAIT_S)
        return
    if rank and has_group:
        time.sleep(OTHERS_WAIT_S)  # if rank 0 has failed too, the launcher ends this process meanwhile
    where = f" (process {rank})" if rank else ""
    Console(stderr=True).print(Text(f"error{where}: {error}", style="red"), soft_wrap=True)


def _shut_down_distributed() -> None:
    distributed = sys.modules.get("rlhf.runtime.distributed")
    if distributed is not None:
        distributed.shutdown()


class _Version(argparse.Action):
    """Prints the versions that a report of an error needs; it reads them only when they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        from rlhf import __version__

        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        print(f"rlhf {__version__} (Python {sys.version.split()[0]}, {packages})")  # noqa: T201
        parser.exit()


class _SuiteNames(argparse.HelpFormatter):
    """Adds the names of the suites to the help of --suite; it imports them only when the help is asked for."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.dest != "suite":
            return action.help
        from rlhf.suites.suite import suite_names

        return f"{action.help}: {', '.join(suite_names())}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf",
        description="Fine-tune language models from human preferences.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS
    )  # passed by deepspeed's launcher
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    for name, (text, target, add) in _ARGUMENTS.items():
        description = f"{text[0].upper()}{text[1:]}."
        aliases = [alias for alias, verb in ALIASES.items() if verb == name]
        sub = verbs.add_parser(name, aliases=aliases, help=text, description=description)
        if target is not None:
            sub.add_argument("target", metavar=target, help=TARGETS[target])
        add(sub)
    return parser


def _add_overrides(
    verb: argparse.ArgumentParser, text: str = "settings that override the file's, e.g. policy.lr=1e-6"
) -> None:
    """Add the settings that a verb takes after its inputs."""
    verb.add_argument("overrides", nargs="*", metavar="key=value", default=[], help=text)


def _add_config(config: argparse.ArgumentParser) -> None:
    _add_overrides(config)
    config.add_argument("--explain", metavar="KEY", help="say what a key or a section means instead")


def _add_eval(evaluation: argparse.ArgumentParser) -> None:
    _add_overrides(evaluation)
    evaluation.add_argument(
        "--against",
        metavar="run-or-model",
        default="start",
        help="what to compare with: a run, a model folder, or start (the default), the model that the run began with",
    )
    evaluation.formatter_class = _SuiteNames
    evaluation.add_argument("--suite", help="run an alignment evaluation instead")
    evaluation.add_argument("--data", metavar="path", help="the data to run the suite on")
    evaluation.add_argument("--limit", type=int, help="use only the first so many rows of it")
    evaluation.add_argument(
        "--out", metavar="file", help="where to write the suite's results as JSON (default: evals/ in the run folder)"
    )


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument(
        "others", nargs="*", metavar="folder", help="further runs, whose curves are laid over the first's"
    )
    report.add_argument("--watch", action="store_true", help="rewrite the page while the run trains; it reloads itself")
    report.add_argument("--out", type=Path, metavar="file", help="of several runs: the page (default: overlay.html)")


def _add_push(push: argparse.ArgumentParser) -> None:
    push.add_argument("repo_id", metavar="owner/name", help="the repository on the hub; made if it does not exist")
    push.add_argument(
        "--private", action="store_true", help="upload to a private repository only: it is made so, or has to be so"
    )
    push.add_argument("--quotes", action="store_true", help="keep the completions that notes of the run quote")
    push.add_argument("--dry-run", action="store_true", help="print the card and upload nothing")


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("--gguf", metavar="file", type=Path, required=True, help="the file to write, OUT.gguf")
    export.add_argument(
        "--dtype", choices=("f32", "f16", "bf16"), default="f16", help="of the weight matrices (default: f16)"
    )


def _add_chat(chat: argparse.ArgumentParser) -> None:
    chat.add_argument("--system", help="the system prompt")
    published = "as in the model's generation_config.json, or else --greedy"
    chat.add_argument("--temperature", type=float, help=f"divides the logits (default: {published})")
    chat.add_argument(
        "--top-p", type=float, help=f"draw from the likeliest tokens of this probability (default: {published})"
    )
    chat.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        dest="max_tokens",
        type=int,
        help="longest answer, in tokens (default: 512)",
    )
    chat.add_argument(
        "--episodes", type=int, metavar="N", help="show N held-out episodes in the run's environment, and end"
    )
    chat.add_argument("--seed", type=int, help="draw the same answers again")
    chat.add_argument("--greedy", action="store_true", help="take the most likely token each time")


def _add_sample(sample: argparse.ArgumentParser) -> None:
    asked = sample.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", action="append", help="may be given several times")
    asked.add_argument("--data", help="prompts: a file, folder or hub id, as data.prompts.path; needs --out")
    sample.add_argument("--out", type=Path, help="with --data: the JSONL file to write, a completion in each line")
    sample.add_argument("--limit", type=int, help="with --data: only the first prompts")
    sample.add_argument("--count", type=int, default=1, help="completions per prompt (default: 1)")
    sample.add_argument("--seed", type=int, default=0, help="draw other completions (default: 0)")
    sample.add_argument("--greedy", action="store_true", help="take the most likely token each time")
    trained = "as the run was trained; a model folder"
    sample.add_argument("--max-new-tokens", type=int, help=f"longest completion, in tokens (default: {trained}: 128)")
    sample.add_argument("--temperature", type=float, help=f"divides the logits (default: {trained}: 1)")
    sample.add_argument(
        "--top-p", type=float, help=f"draw from the likeliest tokens of this probability (default: {trained}: 1)"
    )
    sample.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")


def _add_teach(teach: argparse.ArgumentParser) -> None:
    _add_overrides(teach)
    teach.add_argument("--out", type=Path, required=True, metavar="file", help="the file to write, OUT.safetensors")
    teach.add_argument("--top-k", type=int, default=64, help="likeliest tokens to keep at each token (default: 64)")


def _add_serve_reward(serve: argparse.ArgumentParser) -> None:
    _add_address(serve, port=8000, clients="clients")
    serve.add_argument("--max-request-bytes", type=int, default=16 * 2**20, help="refuse larger requests")
    serve.add_argument("--max-batch", type=int, default=64, help="completions to score in one batch (default: 64)")


def _add_serve_policy(policy: argparse.ArgumentParser) -> None:
    _add_address(policy, port=8001, clients="the trainer")
    policy.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="precision, as policy.dtype of the run (default: float32)",
    )
    policy.add_argument(
        "--weights",
        choices=("exact", "int8"),
        default="exact",
        help="int8: round matrices to 8 bits a weight in this server only, to try sampling.correction (default: exact)",
    )
    policy.add_argument("--device", default="auto", help="where the model runs, as run.device (default: auto)")
    policy.add_argument(
        "--no-tf32", dest="tf32", action="store_false", help="full float32 products on a GPU, as run.tf32=false"
    )
    policy.add_argument(
        "--threads", type=int, metavar="N", help="threads of the arithmetic on a CPU (default: torch's)"
    )


def _add_quickstart(quickstart: argparse.ArgumentParser) -> None:
    _add_overrides(quickstart, "settings of the PPO stage, e.g. algorithm.kl.coef=0.1")
    quickstart.add_argument("--seed", type=int, default=0, help="seed of every stage (default: 0)")
    quickstart.add_argument("--out", default="runs/quickstart", help="folder for the runs (default: runs/quickstart)")


def _add_address(server: argparse.ArgumentParser, *, port: int, clients: str) -> None:
    """Add the arguments for the address of a server, and for the token of its clients."""
    server.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    server.add_argument(
        "--port", type=int, default=port, help=f"port to listen on; 0 takes any that is free (default: {port})"
    )
    server.add_argument(
        "--token-env", metavar="VAR", help=f"environment variable that holds the token which {clients} must send"
    )


def _add_plan(plan: argparse.ArgumentParser) -> None:
    _add_overrides(plan)
    plan.add_argument(
        "--memory", metavar="SIZE", help="memory of one GPU, or of the machine with --device cpu: 24GB, 80GiB"
    )
    plan.add_argument("--gpus", type=int, help="processes, one for each GPU (default: 1)")
    plan.add_argument(
        "--device", choices=("cpu", "cuda"), help="where it runs (default: as run.device; auto: this machine's)"
    )
    plan.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="tokens of a prompt (default: the limit of the configuration)"
    )
    plan.add_argument("--completion-tokens", type=int, metavar="N", help="tokens of a completion (default: as above)")
    plan.add_argument("--probe", action="store_true", help="run three steps, and measure peak and seconds")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON; sizes are bytes")


def _add_reward_check(check: argparse.ArgumentParser) -> None:
    _add_overrides(check, "settings of the source, e.g. answer=solution; of a configuration, settings of the run")
    columns = "prompts, with the columns that the reward reads"
    check.add_argument("--dataset", metavar="path", required=True, help=columns)
    check.add_argument("--answer", metavar="column", help="right answers, as a model should write them")
    check.add_argument("--limit", type=int, default=200, help="use only the first so many rows (default: 200)")
    check.add_argument("--best", type=float, metavar="score", help="what a right answer has to earn (a verifier's: 1)")


def _add_label(label: argparse.ArgumentParser) -> None:
    _add_overrides(label)
    label.add_argument(
        "--judge",
        metavar="judge",
        help="a reward model, file.py:function, a reward server, or http://HOST/v1 with judge.chat.model=NAME",
    )
    label.add_argument("--out", metavar="file", help="the file to write (default: pairs.jsonl)")
    label.add_argument("--compare-with", metavar="file", help="pairs that people have labelled, for the agreement")
    label.add_argument("--again", action="store_true", help="ask about everything again, also what is labelled already")


def _add_launch(launch: argparse.ArgumentParser) -> None:
    _add_overrides(launch)
    launchers = launch.add_mutually_exclusive_group(required=True)
    for name, text in (
        ("slurm", "a batch script for sbatch"),
        ("torchrun", "a shell script to start on every node"),
        ("skypilot", "a task in YAML for sky jobs launch"),
    ):
        launchers.add_argument(f"--{name}", dest="launcher", action="store_const", const=name, help=text)
    launch.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    launch.add_argument("--gpus", type=int, help="GPUs of each node; one process runs on each")
    launch.add_argument("--gpu-type", metavar="KIND", help="the kind of GPU, e.g. H100 (SLURM; needed by --skypilot)")
    launch.add_argument("--processes", type=int, help="processes on each node, without GPUs: with run.device=cpu")
    launch.add_argument("--cpus", type=int, help="CPU cores of each process (SLURM, SkyPilot; default: 8)")
    launch.add_argument("--time", metavar="HH:MM:SS", help="time limit of the job (SLURM)")
    launch.add_argument("--partition", help="where the job is queued (SLURM)")
    launch.add_argument("--account", help="who pays (SLURM)")
    launch.add_argument(
        "--grace", type=int, metavar="SECONDS", help="stop so long before the time limit (SLURM, default: 300)"
    )
    launch.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="any other option of sbatch; may be repeated"
    )
    launch.add_argument("--bucket", help="storage that outlives the machines, for run.out_dir (SkyPilot)")


AddArguments = Callable[[argparse.ArgumentParser], None]
_ARGUMENTS: dict[str, tuple[str, str | None, AddArguments]] = {  # verb -> help, its inputs, its other arguments
    "train": (
        "train a model as a configuration file says: SFT, or any online or offline algorithm",
        "file",
        _add_overrides,
    ),
    "reward": ("train a reward model on preference pairs", "file", _add_overrides),
    "compare": ("train several algorithms from one model on one budget, and judge them alike", "file", _add_overrides),
    "config": ("print the configuration with every default filled in, and run nothing", "file", _add_config),
    "lint": ("check the settings against what papers report, and run nothing", "file", _add_overrides),
    "plan": ("say how much memory and time a run takes, before anything is loaded", "file", _add_plan),
    "launch": ("print the script that starts a training run on a cluster", "file", _add_launch),
    "eval": ("evaluate a run against the model it started from, or against another", "run", _add_eval),
    "report": ("write the HTML page of a run, of a comparison, or of several runs together", "folder", _add_report),
    "push": ("upload the model of a run to the model hub, with a card made from the run", "run-folder", _add_push),
    "export": ("write the model of a run as one file for llama.cpp", "run", _add_export),
    "chat": ("talk with the model of a run, or in a model folder", "run", _add_chat),
    "sample": ("complete prompts by the model of a run, or in a model folder", "run", _add_sample),
    "teach": ("store a teacher's likeliest tokens at the answers of a data set", "file", _add_teach),
    "reward-check": (
        "score right and worthless answers, to find what a policy would exploit",
        "reward",
        _add_reward_check,
    ),
    "serve-reward": ("serve a trained reward model over HTTP, for reward.source.type=remote", "run", _add_serve_reward),
    "label": ("write preference pairs or rankings from completions and a judge", "completions", _add_label),
    "serve-policy": ("sample for a trainer in another process, for sampling.backend=server", "run", _add_serve_policy),
    "quickstart": (
        "run the whole pipeline in the built-in lab: SFT, preference pairs, reward model, PPO, report",
        None,
        _add_quickstart,
    ),
}


# Each verb checks its configuration before importing its code (torch and transformers take seconds), so that a
# mistake is reported at once.


def _train(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.config.load import load_train

    config = _checked(load_train(parsed.target, parsed.overrides), console)
    if config is not None:
        from rlhf.api.training import run_train
        from rlhf.report.terminal import Terminal

        run_train(config, Terminal(console))


def _reward(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.config.load import load_reward_model

    config = _checked(load_reward_model(parsed.target, parsed.overrides), console)
    if config is not None:
        from rlhf.api.training import run_reward_model
        from rlhf.report.terminal import Terminal

        run_reward_model(config, Terminal(console))


def _checked(config: Any, console: Console) -> Any:  # of one class, which is too slow to import here
    """Check the folder, files and settings of a run; print that it is complete, and return None, if it is."""
    from rlhf.data.paths import check_files, check_targets
    from rlhf.guard.lint import check_settings
    from rlhf.lab.build import resolve_lab_paths
    from rlhf.tracking.same_run import already_complete, check_same_run, finished_step

    config = resolve_lab_paths(config)
    if (step := finished_step(config, check_same_run(config))) is not None:
        console.print(Text(already_complete(Path(config.run.out_dir), step)), soft_wrap=True)
        return None
    check_files(config)
    check_targets(config)
    check_settings(config)
    return config


def _options(kind: type[Options], parsed: argparse.Namespace) -> Options:
    """Return the options of a verb, whose arguments have the names of the fields."""
    return kind(**{field.name: getattr(parsed, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _check_moved(target: Path, out_dir: Path, overrides: Sequence[str]) -> None:
    """Check that the folder of a comparison is its out_dir, unless the user names another one.

    Raises:
        UserError: its settings name another folder, since it was copied or moved.
    """
    from rlhf.config.compare import START_FOLDER

    is_comparison = (target / START_FOLDER).is_dir()
    if is_comparison and target.resolve() != out_dir.resolve() and not any(o.startswith("out_dir=") for o in overrides):
        raise UserError(
            f"{target} is not the folder of its comparison, {out_dir}. Give {out_dir}, in the working folder that the "
            f"comparison was started in; move a moved folder back first. `rlhf report {target}` shows its results"
        )


def _compare(parsed: argparse.Namespace, console: Console) -> int:
    from rlhf.api.checks import check_arm_files
    from rlhf.comparison.plan import plan_cells
    from rlhf.config.files import locate_config
    from rlhf.config.load import load_compare
    from rlhf.data.paths import Lookups, check_targets
    from rlhf.lab.build import PREFIX

    config, folder = load_compare(parsed.target, parsed.overrides), locate_config(parsed.target).parent
    _check_moved(Path(parsed.target), Path(config.out_dir), parsed.overrides)
    plan = plan_cells(config, beside=folder, lab_files=False)  # making them takes torch
    lookups = Lookups(later=None if config.lab is None else Path(config.lab.folder), prefix=PREFIX)
    check_arm_files(plan, lookups, check_targets)

    from rlhf.api.comparing import failed_arms, run_compare
    from rlhf.comparison.terminal import ComparisonTerminal

    run_compare(config, beside=folder, view=ComparisonTerminal(console))
    failed = failed_arms(config.out_dir)
    if failed:
        message = f"failed: {', '.join(failed)} (the page has the reason); the same command tries them again"
        Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)
    return 1 if failed else 0


def _teach(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.api.checks import check_output_file
    from rlhf.config.load import load_train
    from rlhf.config.sections import OfflineConfig
    from rlhf.data.paths import check_files
    from rlhf.errors import ConfigError
    from rlhf.lab.build import resolve_lab_paths
    from rlhf.teachers.stored import is_answers

    config = resolve_lab_paths(load_train(parsed.target, parsed.overrides))
    if not isinstance(config, OfflineConfig) or not config.algorithm.reads_teacher:
        raise ConfigError("rlhf teach writes for offline distillation: set algorithm.preset=distill_sft")
    check_files(config)
    check_output_file("--out", parsed.out, is_ours=is_answers)

    from rlhf.commands.teach import run_teach

    run_teach(config, parsed.out, top_k=parsed.top_k, console=console)


def _config(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.config.files import format_yaml
    from rlhf.config.load import dump, load_any, unread_warnings

    config = load_any(parsed.target, parsed.overrides)
    if parsed.explain is not None:
        from rlhf.commands.explain import explain

        explain(config, parsed.explain, console)
        return
    print(format_yaml(dump(config)), end="")  # noqa: T201
    for warning in unread_warnings(config):
        Console(stderr=True).print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


def _lint(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.lint import run_lint

    run_lint(parsed.target, parsed.overrides, console)


def _plan(parsed: argparse.Namespace, console: Console) -> int:
    from rlhf.commands.plan import run_plan
    from rlhf.planning.options import PlanOptions

    options = _options(PlanOptions, parsed)
    if parsed.probe:
        from rlhf.commands.probe import run_probe

        return run_probe(parsed.target, parsed.overrides, options, console, as_json=parsed.json)
    return run_plan(parsed.target, parsed.overrides, options, console, as_json=parsed.json)


def _reward_check(parsed: argparse.Namespace, console: Console) -> int:
    from rlhf.api.reward_checking import reward_check_from_command_line

    options = {name: getattr(parsed, name) for name in ("answer", "limit", "best")}
    result = reward_check_from_command_line(parsed.target, parsed.dataset, parsed.overrides, **options)
    console.print(Text(str(result)), soft_wrap=True)
    return 0 if result.ok else 1


def _launch(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.commands.launch import LaunchOptions, launch_script

    del console  # the script goes to standard output as it is
    parsed.sbatch = tuple(parsed.sbatch)
    print(launch_script(parsed.target, parsed.overrides, _options(LaunchOptions, parsed)), end="")  # noqa: T201


def _eval(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.data.paths import resolve_best

    parsed.target, parsed.against = resolve_best(parsed.target), resolve_best(parsed.against)
    if parsed.suite is not None:
        from rlhf.api.checks import check_output_file, suite_settings
        from rlhf.suites.suite import is_result

        if parsed.out is not None:
            check_output_file("--out", Path(parsed.out).expanduser(), is_ours=is_result)
        options = {name: getattr(parsed, name) for name in ("data", "limit", "against", "overrides")}
        settings, task = suite_settings(parsed.suite, parsed.target, **options)

        from rlhf.commands.evaluate import run_suite

        run_suite(parsed.target, parsed.suite, settings, task=task, out=parsed.out, console=console)
        return
    if any(option is not None for option in (parsed.data, parsed.limit, parsed.out)):
        raise UserError("--data, --limit and --out are a suite's: name one, as in --suite persona")
    from rlhf.config.load import load_run

    load_run(parsed.target, parsed.overrides)

    from rlhf.commands.evaluate import run_eval

    run_eval(parsed.target, parsed.overrides, console, against=parsed.against)


def _report(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.api.comparing import is_comparison
    from rlhf.commands.report import run_comparison_report, run_overlay, run_report, watch_report

    if parsed.others and parsed.watch:
        raise UserError("--watch rewrites the page of one run: give one folder")
    if parsed.out is not None and not parsed.others:
        raise UserError("--out names the page of several runs; the page of one is report.html in its folder")
    if parsed.others:
        run_overlay([parsed.target, *parsed.others], parsed.out or Path("overlay.html"), console)
    elif parsed.watch and is_comparison(parsed.target):
        raise UserError(
            f"--watch rewrites the page of a run, and {parsed.target} is a comparison: give an arm's folder"
        )
    elif parsed.watch:
        watch_report(parsed.target, console)
    elif is_comparison(parsed.target):
        run_comparison_report(parsed.target, console)
    else:
        run_report(parsed.target, console)


def _push(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.data.paths import resolve_best

    target = resolve_best(parsed.target)

    from rlhf.commands.push import run_push

    options = {name: getattr(parsed, name) for name in ("private", "dry_run", "quotes")}
    run_push(target, parsed.repo_id, console=console, **options)


def _check_model(path: str) -> None:
    """Check that there is a model, before it takes long to import what loads it, or the hub is asked for a folder."""
    from rlhf.api.checks import check_model_path
    from rlhf.data.paths import resolve_best

    check_model_path(resolve_best(path))


def _export(parsed: argparse.Namespace, console: Console) -> None:
    _check_model(parsed.target)
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"writing a GGUF file needs the package gguf: {install_hint('gguf')}")
    from rlhf.api.checks import check_output_file

    check_output_file("--gguf", parsed.gguf)

    from rlhf.commands.push import run_export

    run_export(parsed.target, parsed.gguf, dtype=parsed.dtype, console=console)


def _chat(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.api.checks import ChatOptions, check_chat
    from rlhf.data.paths import resolve_best

    target = resolve_best(parsed.target)
    if parsed.episodes is not None:
        if any(getattr(parsed, name) is not None for name in ("system", "temperature", "top_p", "max_tokens")):
            raise UserError(
                "--system, --temperature, --top-p and --max-new-tokens are for a conversation: episodes are sampled "
                "as the run was trained, or with --greedy"
            )
        from rlhf.commands.episodes import run_episodes

        run_episodes(target, parsed.episodes, seed=parsed.seed or 0, greedy=parsed.greedy, console=console)
        return
    if parsed.max_tokens is None:
        parsed.max_tokens = ChatOptions.max_tokens
    options = _options(ChatOptions, parsed)
    sampling = check_chat(target, options)

    from rlhf.commands.sample import run_chat

    run_chat(target, options, sampling=sampling)


def _sample(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.api.checks import SampleOptions, check_sampled_file, check_sampling
    from rlhf.data.paths import resolve_best

    target = resolve_best(parsed.target)
    options = _options(SampleOptions, parsed)
    settings = {"max_new_tokens": parsed.max_new_tokens, "temperature": parsed.temperature}
    sampling = check_sampling(target, parsed.prompt, options, **settings)
    data = check_sampled_file(parsed.data, parsed.out, parsed.limit)

    from rlhf.commands.sample import run_sample, write_samples

    if data is not None:
        write_samples(target, data, parsed.out, options, sampling=sampling, console=console)
        return
    run_sample(target, parsed.prompt, options, sampling=sampling, console=console)


def _label(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.labelling.settings import label_settings

    names = ("judge", "out", "compare_with")
    config = label_settings(parsed.target, parsed.overrides, **{name: getattr(parsed, name) for name in names})

    from rlhf.labelling.label import label

    def note(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    for line in label(config, note=note, resume=not parsed.again).lines():
        note(line)


def _serve_reward(parsed: argparse.Namespace, console: Console) -> None:
    _check_model(parsed.target)
    try:
        from rlhf.factory.reward_service import ServiceOptions, serve_reward
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise UserError(f"rlhf serve-reward needs FastAPI and uvicorn: {install_hint('serve')}") from error
    serve_reward(parsed.target, _options(ServiceOptions, parsed), os.environ, console)


def _serve_policy(parsed: argparse.Namespace, console: Console) -> None:
    _check_model(parsed.target)
    from rlhf.commands.serve_policy import PolicyOptions, serve_policy

    serve_policy(parsed.target, _options(PolicyOptions, parsed), os.environ, console)


def _quickstart(parsed: argparse.Namespace, console: Console) -> None:
    from rlhf.config.load import load_train
    from rlhf.lab.build import lab_config

    load_train(lab_config("ppo"), parsed.overrides)

    from rlhf.commands.quickstart import run_quickstart

    run_quickstart(parsed.out, seed=parsed.seed, overrides=parsed.overrides, console=console)


_VERBS: dict[str, Callable[[argparse.Namespace, Console], int | None]] = {
    "train": _train,
    "reward": _reward,
    "rm": _reward,
    "compare": _compare,
    "config": _config,
    "lint": _lint,
    "plan": _plan,
    "reward-check": _reward_check,
    "launch": _launch,
    "eval": _eval,
    "report": _report,
    "push": _push,
    "export": _export,
    "chat": _chat,
    "sample": _sample,
    "teach": _teach,
    "label": _label,
    "serve-reward": _serve_reward,
    "serve-policy": _serve_policy,
    "quickstart": _quickstart,
}


if __name__ == "__main__":
    sys.exit(main())

"""Provoke failures on purpose in tiny runs: which alarm goes off after how many steps, and none in healthy runs.

    python benchmarks/alarms.py [--out benchmarks/results/alarms.json]

The world is the tests' world: a random Llama of two layers over ten words, prompts of one to four of them, and a
reward that counts words. A run takes seconds. Every failure is a mistake that people make; those that a configuration
refuses are made behind its back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from runs import golds, make_model, write_rows  # noqa: E402

from rlhf.config.files import merge  # noqa: E402
from rlhf.config.load import train_config  # noqa: E402
from rlhf.config.sections import OnlineConfig  # noqa: E402
from rlhf.errors import DivergenceError  # noqa: E402
from rlhf.experience import compute_advantages  # noqa: E402
from rlhf.factory.offline import build_offline  # noqa: E402
from rlhf.factory.online import build_online  # noqa: E402
from rlhf.sampling.generate import HFSampler  # noqa: E402
from rlhf.tracking.run_folder import RunFolder  # noqa: E402
from rlhf.training import online as online_loop  # noqa: E402
from rlhf.training.offline import train_offline  # noqa: E402
from rlhf.training.online_run import OnlineRun  # noqa: E402
from rlhf.types import Completions, Experience, Prompts  # noqa: E402

WORDS = ("red", "blue", "one", "two")
STEPS = 40
SHIFT = 5.0  # of the value targets, in units of score
Tree = dict[str, Any]
Sabotage = Callable[[OnlineRun], OnlineRun]


def gold(completions: list[str]) -> list[float]:
    """Score the share of the words that are `good` minus the share that are `bad`."""
    return golds(*completions)


def leaks_length(completions: list[str]) -> list[float]:
    """Score as the gold, plus something for every word."""
    return [score + 0.3 * len(text.split()) for score, text in zip(golds(*completions), completions, strict=True)]


def never_ends(completions: list[str]) -> list[float]:
    """Score the number of words, however many."""
    return [float(len(text.split())) for text in completions]


def constant(completions: list[str]) -> list[float]:
    """Score everything alike."""
    return [1.0] * len(completions)


_CALLS = itertools.count()


def sometimes_nan(completions: list[str]) -> list[float]:
    """Score as the gold, with a NaN in every call after the third."""
    scores = golds(*completions)
    return [float("nan"), *scores[1:]] if next(_CALLS) > 2 else scores


def likes_red(completions: list[str]) -> list[float]:
    """Score as the gold, but against `good`, which the other member of the ensemble likes."""
    return [-2.0 * text.split().count("good") for text in completions]


@dataclass(frozen=True)
class Case:
    """A run: its settings over a healthy one's, the changes behind the configuration's back, and the alarms."""

    settings: Mapping[str, Any]
    expected: tuple[str, ...] = ()  # one of them has to go off; none for a healthy run
    sabotage: Sabotage | None = None
    shifts_targets: bool = False


def source(function: Callable[..., Any]) -> Tree:
    """Return the reward source of a function of this file."""
    return {"type": "function", "target": f"{__file__}:{function.__name__}"}


def reward(function: Callable[..., Any]) -> Tree:
    """Return the reward section of a function of this file."""
    return {"reward": {"source": source(function)}}


def wrong_sign(run: OnlineRun) -> OnlineRun:
    """Turn the sign of the KL penalty."""
    run.session.state.kl_coef = -run.session.state.kl_coef
    return run


class StaleLogProbs:
    """A sampler with the log-probabilities of the policy before any training."""

    def __init__(self, run: OnlineRun) -> None:
        self.run = run

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Sample with the policy, and report the reference's log-probabilities."""
        completions = self.run.sampler.sample(prompts, key=key, group_size=group_size, greedy=greedy)
        stale = self.run.models.reference_logprobs(completions)
        return replace(completions, sampler_logprobs=stale.to(completions.sampler_logprobs))


def stale_logprobs(run: OnlineRun) -> OnlineRun:
    """Let the update use log-probabilities of the policy before any training."""
    return replace(run, sampler=StaleLogProbs(run))


def other_temperature(run: OnlineRun) -> OnlineRun:
    """Sample at temperature 0.5 while the trainer computes log-probabilities at 1."""
    models = run.models
    sampler = HFSampler(
        models.policy,
        run.config.sampling.model_copy(update={"temperature": 0.5}),
        eos_ids=(2,),
        pad_id=0,
        dtype=models.dtype,
        device=models.device,
    )
    return replace(run, sampler=sampler)


def shifted_targets(*args: Any, **kwargs: Any) -> Experience:
    """Compute advantages, and returns that are off by a constant."""
    experience = compute_advantages(*args, **kwargs)
    return replace(experience, returns=experience.returns + SHIFT * experience.loss_mask)


NO_KL = {"algorithm": {"kl": {"placement": "none", "coef": 0.0, "controller": {"type": "fixed"}}}}
# GRPO divides scores by a standard deviation of about 0.3, so its penalty is three times the others'.
HEALTHY: dict[str, Case] = {
    **{f"ppo, seed {seed}": Case({"run": {"seed": seed}}) for seed in (0, 1, 2)},
    **{
        f"grpo, seed {seed}": Case(
            {"run": {"seed": seed}, "algorithm": {"preset": "grpo", "kl": {"coef": 1.0}}, "policy": {"lr": 1e-3}}
        )
        for seed in (0, 1)
    },
    "rloo": Case({"algorithm": {"preset": "rloo", "kl": {"coef": 0.3}}, "policy": {"lr": 2e-3}}),
    "reinforce_pp": Case({"algorithm": {"preset": "reinforce_pp", "kl": {"coef": 0.3}}}),
    **{f"dpo, seed {seed}": Case({"run": {"seed": seed}, "algorithm": {"preset": "dpo"}}) for seed in (0, 1)},
    "sft": Case({"algorithm": {"preset": "sft"}}),
}
FAILURES: dict[str, Case] = {
    "learning rate x 100": Case({"policy": {"lr": 0.3}}, ("kl-jump", "kl-per-update")),
    "no KL penalty": Case(
        merge(NO_KL, {"policy": {"lr": 2e-2}}),
        ("kl-to-reference", "entropy-collapse", "diversity-falls", "repetition"),
    ),
    "wrong sign of the KL penalty": Case(
        {"algorithm": {"kl": {"controller": {"type": "fixed"}}}}, ("kl-to-reference", "score-falls"), wrong_sign
    ),
    "reward with a length leak": Case(
        merge(NO_KL, {**reward(leaks_length), "policy": {"lr": 2e-2}}),
        ("length-grows", "fewer-finish", "cut-off", "proxy-against-judge"),
    ),
    "constant reward": Case(reward(constant), ("score-constant",)),
    "critic frozen": Case(
        {"critic": {"lr": 0.0}, "guard": {"allow": ["critic-frozen"]}}, ("critic-explains-nothing", "value-offset")
    ),
    "stale log-probabilities": Case({"sampling": {"old_log_probs": "sampler"}}, ("first-ratio",), stale_logprobs),
    "temperature mismatch": Case(
        {"sampling": {"old_log_probs": "trainer"}}, ("sampler-mismatch", "kl-negative"), other_temperature
    ),
    "temperature mismatch in the ratio": Case(
        {"sampling": {"old_log_probs": "sampler"}}, ("first-ratio",), other_temperature
    ),
    "truncated everything": Case(
        merge(NO_KL, {**reward(never_ends), "policy": {"lr": 2e-2}, "sampling": {"max_new_tokens": 4}}),
        ("cut-off", "fewer-finish"),
    ),
    "duplicate prompts": Case({"data": {"prompts": {"path": "duplicates.jsonl"}}}, ("duplicate-prompts",)),
    "NaN reward": Case(reward(sometimes_nan), ("scores-not-finite",)),
    "value targets shifted": Case({"critic": {"lr": 1e-3}}, ("value-offset",), shifts_targets=True),
    "ensemble that disagrees": Case(
        merge(
            NO_KL,
            {
                "reward": {"source": {"type": "ensemble", "sources": [source(gold), source(likes_red)], "how": "mean",
                                      "weights": [8.0, 1.0]}},
                "policy": {"lr": 1e-2},
            },
        ),
        ("ensemble-disagrees",),
    ),
    "controller that cannot hold": Case(
        {
            "policy": {"lr": 2e-2},
            "algorithm": {"kl": {"coef": 1e-3, "controller": {"type": "adaptive", "target": 0.5, "horizon": 40}}},
        },
        ("kl-coefficient-runaway", "kl-above-target"),
    ),
    "DPO, learning rate x 100": Case(
        {"algorithm": {"preset": "dpo"}, "policy": {"lr": 0.3}}, ("held-out-preference-loss-rises", "loss-explodes")
    ),
    "SFT by heart": Case(
        {"algorithm": {"preset": "sft"}, "policy": {"lr": 3e-2}, "data": {"sft": {"limit": 8}},
         "schedule": {"steps": 120}},
        ("held-out-loss-rises",),
    ),
}  # fmt: skip


def write_data(folder: Path) -> None:
    """Write prompts, pairs, demonstrations and the start model into the folder."""
    every = [" ".join(words) for count in range(1, 5) for words in itertools.product(WORDS, repeat=count)]
    random.Random(0).shuffle(every)
    write_rows(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in every[:272]])
    write_rows(folder / "eval_prompts.jsonl", [{"prompt": prompt} for prompt in every[272:]])
    write_rows(folder / "duplicates.jsonl", [{"prompt": every[i % 2]} for i in range(272)])
    make_model(folder / "model")
    draw, vocabulary = random.Random(1), ("good", "bad", *WORDS)

    def text() -> str:
        return "".join(f" {draw.choice(vocabulary)}" for _ in range(draw.randint(1, 5)))

    for name, prompts in (("pairs", every[:272]), ("eval_pairs", every[272:])):
        rows = []
        for prompt in prompts:
            a, b = sorted((text(), text()), key=lambda completion: golds(completion)[0])
            if golds(a) != golds(b):
                rows.append({"prompt": prompt, "chosen": b, "rejected": a})
        write_rows(folder / f"{name}.jsonl", rows)
    for name, prompts in (("sft", every[:272]), ("eval_sft", every[272:])):
        write_rows(folder / f"{name}.jsonl", [{"prompt": prompt, "completion": text()} for prompt in prompts])


def tree_of(folder: Path, out: Path, settings: Mapping[str, Any]) -> Tree:
    """Return the settings of a run over the common ones."""
    preset = settings.get("algorithm", {}).get("preset", "ppo")
    is_online = preset not in ("dpo", "sft")
    data: Tree = {
        "ppo": {"prompts": {"path": "prompts.jsonl"}, "eval_prompts": {"path": "eval_prompts.jsonl"}},
        "dpo": {"preferences": {"path": "pairs.jsonl"}, "eval_preferences": {"path": "eval_pairs.jsonl"}},
        "sft": {"sft": {"path": "sft.jsonl"}, "eval_sft": {"path": "eval_sft.jsonl"}},
    }[preset if not is_online else "ppo"]
    base: Tree = {
        "run": {"out_dir": str(out), "device": "cpu", "cache_dir": str(folder / "cache")},
        "data": data,
        "policy": {"model": str(folder / "model"), "lr": 3e-3},
        "algorithm": {"preset": preset},
        "batch": {"prompts_per_step": 32, "micro_batch_size": 128},
        "schedule": {"steps": STEPS},
        "checkpoint": {"every": 0, "keep": 1},
        "eval": {"every": 5, "samples": 0},
        "logging": {"samples": 0},
    }
    if is_online:
        base |= reward(gold)
        base = merge(base, {"eval": {"source": source(gold)}, "sampling": {"max_new_tokens": 12}})
        base = merge(base, {"batch": {"epochs": 2, "minibatches": 2}, "algorithm": {"kl": {"coef": 0.3}}})
        if preset == "ppo":
            base = merge(base, {"critic": {"init": "policy", "lr": 1e-2}})
        else:
            base = merge(base, {"sampling": {"completions_per_prompt": 4}, "batch": {"prompts_per_step": 8}})
    tree = merge(base, settings)
    for section in tree["data"].values():
        section["path"] = str(folder / Path(section["path"]).name)
    return tree


def run_case(case: Case, folder: Path, out: Path) -> list[dict[str, Any]]:
    """Run a case and return the lines of its alarms.jsonl."""
    global _CALLS  # the NaN reward counts its calls
    _CALLS = itertools.count()
    config = train_config(tree_of(folder, out, case.settings))
    if isinstance(config, OnlineConfig):
        run = build_online(config)
        run = run if case.sabotage is None else case.sabotage(run)
        session, loop = run.session, partial(online_loop.train, run)
    else:
        offline = build_offline(config)
        session, loop = offline.session, partial(train_offline, offline)
    shift = mock.patch.object(online_loop, "compute_advantages", shifted_targets)
    try:
        if case.shifts_targets:
            with shift:
                loop()
        else:
            loop()
    except DivergenceError:  # the run ended by itself, as it should after so many bad steps
        pass
    finally:
        session.recorder.close()
    return RunFolder(out).read_alarms()


def run_all(folder: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Run the cases of these names, or all of them; return which alarms went off in each, and at which step."""
    write_data(folder)
    results: dict[str, Any] = {"steps": STEPS, "failures": {}, "healthy": {}}
    for kind, cases in (("failures", FAILURES), ("healthy", HEALTHY)):
        for number, (name, case) in enumerate(cases.items()):
            if names and name not in names:
                continue
            lines = run_case(case, folder, folder / kind / str(number))
            alarms = {}
            for line in lines:
                if line["event"] == "on":
                    alarms.setdefault(line["alarm"], line["step"])
            seen = [alarms[alarm] for alarm in case.expected if alarm in alarms]
            results[kind][name] = {"alarms": alarms}
            if case.expected:
                results[kind][name] |= {"expected": list(case.expected), "after_steps": min(seen, default=None)}
    return results


def main() -> None:
    """Run everything, print a line for each run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "alarms.json")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run_all(Path(folder), options.only)
    for kind in ("failures", "healthy"):
        for name, result in results[kind].items():
            after = str(result.get("after_steps", ""))
            print(f"{kind:9} {name:36} {after:>5} {result['alarms']}")  # noqa: T201
    if not options.only:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

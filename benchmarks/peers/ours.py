"""Our side of side_by_side.py:   python benchmarks/peers/ours.py JOB.json   prints one line of JSON."""

from __future__ import annotations

import io
import itertools
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from rich.console import Console

from peers.work import LR, Job
from rlhf.build.reference import Annotator
from rlhf.build.reward_model import build_reward_model
from rlhf.build.run import build_run
from rlhf.config.load import load_reward_model, merge, train_config
from rlhf.data.annotated import AnnotatedPairSet
from rlhf.data.pairs import PairSet
from rlhf.runtime.session import Session
from rlhf.trainers.offline import train_offline

Tree = dict[str, Any]
REWARD = f"{Path(__file__).with_name('work.py')}:score"


def tree_of(job: Job, out: Path) -> Tree:
    """The configuration of the run."""
    folder, sizes = Path(job.folder), job.sizes
    policy = {"model": str(folder / "policy"), "lr": LR, "dtype": job.dtype}
    tree: Tree = {
        "run": {"out_dir": str(out), "device": job.device, "cache_dir": str(out / "cache")},
        "schedule": {"steps": job.steps, "decay": "constant"},
        "checkpoint": {"every": 0},
        "eval": {"every": 0},
        "logging": {"samples": 0},
    }
    pairs = {"data": {"preferences": {"path": str(folder / "pairs.jsonl")}}}
    offline = {"batch": {"prompts_per_step": sizes.rows}}
    online = {
        "policy": policy,
        "data": {"prompts": {"path": str(folder / "prompts.jsonl")}},
        "sampling": {"max_new_tokens": sizes.new_tokens, "batch_size": 256},
        "reward": {"source": {"type": "function", "target": REWARD}},
    }
    groups = {
        "sampling": {"completions_per_prompt": sizes.group},
        "batch": {"prompts_per_step": sizes.prompts, "epochs": 1, "minibatches": 1},
    }
    ppo = {
        "batch": {
            "prompts_per_step": sizes.ppo_prompts,
            "epochs": sizes.ppo_epochs,
            "minibatches": sizes.ppo_minibatches,
        },
        "critic": {"init": "reward", "lr": LR, "dtype": job.dtype},
        "reward": {"source": {"type": "model", "path": str(folder / "reward"), "target": None}},
    }
    parts: dict[str, list[Tree]] = {
        "sft": [offline, {"policy": policy, "data": {"sft": {"path": str(folder / "sft.jsonl")}}}],
        "reward": [offline, pairs, {"model": policy, "calibration": {"limit": sizes.rows}}],
        "dpo": [offline, pairs, {"policy": policy}],
        "grpo": [online, groups, {"algorithm": {"kl": {"coef": 0.0}}, "reference": {"measure": False}}],
        "rloo": [online, groups],
        "ppo": [online, ppo],
    }
    name = job.trainer.removesuffix("_cached")
    for part in parts[name]:
        tree = merge(tree, part)
    if job.whole:
        rows = {"ppo": sizes.ppo_prompts // sizes.ppo_minibatches, "grpo": sizes.prompts * sizes.group}
        tree["batch"]["micro_batch_size"] = rows.get("grpo" if name == "rloo" else name, sizes.rows)
    if name == "ppo":
        tree["reward"]["source"] = {"type": "model", "path": str(folder / "reward"), "micro_batch_size": 64}
        tree["critic"].pop("dtype")
    if name != "reward":
        tree["algorithm"] = {"preset": name, **tree.get("algorithm", {})}
    return merge(tree, job.overrides)


def run(job: Job, out: Path) -> dict[str, Any]:
    """Build, train; the seconds of every step after the first, and of each phase."""
    tree, console = tree_of(job, out), Console(file=io.StringIO())
    began = time.perf_counter()
    if job.trainer == "reward":
        out.mkdir()
        (out / "job.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        built = build_reward_model(load_reward_model(out / "job.yaml", []), console)
        session, loop = built.run.session, lambda: train_offline(built.run)
    else:
        whole = build_run(train_config(tree), console)
        session, loop = whole.session, whole.loop
    before = time.perf_counter() - began
    reference = sum(_REFERENCE)
    marks = _marked(session, job.device)
    loop()
    session.recorder.close()
    lines = [json.loads(line) for line in (out / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens = [line["tokens_per_second"] * sum(line["seconds"].values()) for line in lines if line["step"] > 1]
    return {
        "steps": [b - a for a, b in itertools.pairwise(marks)],
        "phases": [line["seconds"] for line in lines if line["step"] > 1],
        "tokens": tokens,
        "before": before,
        "reference": reference,  # of every pair in the data
        "peak_rss_mb": [line["peak_memory_mb"] for line in lines][-1],
        "memory_by_phase": lines[-1]["peak_memory_mb_by_phase"],
    }


_REFERENCE: list[float] = []  # seconds that the reference's log-probabilities took


def _timed_reference() -> None:
    plain = Annotator.pairs

    def timed(self: Annotator, found: PairSet) -> AnnotatedPairSet:
        began = time.perf_counter()
        annotated = plain(self, found)
        _REFERENCE.append(time.perf_counter() - began)
        return annotated

    Annotator.pairs = timed  # type: ignore[method-assign]


def _marked(session: Session, device: str) -> list[float]:
    marks: list[float] = []
    report = session.report

    def marked(*args: Any, **kwargs: Any) -> None:
        report(*args, **kwargs)
        if device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    session.report = marked  # type: ignore[method-assign]
    return marks


def main() -> None:
    """One job."""
    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    _timed_reference()
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as out:
        found = run(job, Path(out) / "run")
    if job.device == "cuda":
        found["peak_gpu_mb"] = found["peak_rss_mb"]
        found["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

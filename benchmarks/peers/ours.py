"""Our side of side_by_side.py:   python benchmarks/peers/ours.py JOB.json   prints one line of JSON."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from peers.work import LR, MICRO_BATCH, Job, start_adapters
from rlhf.config.files import merge
from rlhf.config.load import load_reward_model, train_config
from rlhf.data import datasets as stream
from rlhf.data.pairs import AnnotatedPairSet
from rlhf.factory import online
from rlhf.factory.reward_model import build_reward_model
from rlhf.factory.run import build_run
from rlhf.models.policy_models import Models
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.report.terminal import Terminal
from rlhf.sampling.sampler import Sampler
from rlhf.tracking.metrics import Metrics
from rlhf.tracking.view import View
from rlhf.training import offline as offline_loop
from rlhf.training import online as online_loop
from rlhf.training.offline import train_offline
from rlhf.training.online_run import OnlineRun
from rlhf.training.reference import ReferenceAnnotator
from rlhf.training.session import Session
from rlhf.types import Completions, Prompts

Tree = dict[str, Any]
REWARD = f"{Path(__file__).with_name('work.py')}:score"


def tree_of(job: Job, out: Path) -> Tree:
    """Build the configuration of the run."""
    folder, sizes = Path(job.folder), job.sizes
    policy: Tree = {"model": str(folder / "policy"), "lr": LR, "dtype": job.dtype}
    if job.lora is not None:
        policy["lora"] = {"r": job.lora, "alpha": 2 * job.lora}
    tree: Tree = {
        "run": {"out_dir": str(out), "device": job.device, "cache_dir": str(out / "cache")},
        "schedule": {"steps": job.steps, "decay": "constant"},
        "checkpoint": {"every": 0},
        "eval": {"every": 0},
        "logging": {"samples": 0},
        "data": {"chat_template": "none"},  # the rows are written as the model reads them
    }
    pairs = {"data": {"preferences": {"path": str(folder / "pairs.jsonl")}}}
    offline = {"batch": {"prompts_per_step": sizes.rows}}
    online = {
        "policy": policy,
        "data": {"prompts": {"path": str(folder / "prompts.jsonl")}},
        "sampling": {"max_new_tokens": sizes.new_tokens, "batch_size": 256},
        "reward": {"source": {"type": "function", "target": REWARD}, "shaping": {"clip": None}},
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
        "reward": [
            offline,
            pairs,
            {"model": {**policy, "model": str(folder / "reward")}, "calibration": {"limit": sizes.rows}},
        ],
        "dpo": [offline, pairs, {"policy": policy}],
        "grpo": [
            online,
            groups,
            # centred scores: by the standard deviation the two sides divide differently (n, and n - 1 in TRL)
            {"algorithm": {"kl": {"coef": 0.0}, "advantage": {"type": "group", "baseline": "centered"}}},
            {"reference": {"measure": False}},
        ],
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
        source = {"type": "model", "path": str(folder / "reward"), "micro_batch_size": 64}
        tree["reward"] = {"source": source, "shaping": {"clip": None}}
        tree["critic"].pop("dtype")
    if name != "reward":
        tree["algorithm"] = {"preset": name, **tree.get("algorithm", {})}
    return merge(tree, job.overrides)


@dataclass
class Observations:
    """The observations of a run while it goes on."""

    updates: list[dict[str, float]] = field(default_factory=list)  # loss and gradient norm of every optimizer step
    generated: list[int] = field(default_factory=list)  # tokens of every rollout
    reference_seconds: float = 0.0  # of the reference's log-probabilities of every pair in the data


def run(job: Job, out: Path) -> dict[str, Any]:
    """Build, train; the seconds of every step after the first, and of each phase."""
    with observed(job) as observations:
        return _run(job, out, observations)


def _run(job: Job, out: Path, observations: Observations) -> dict[str, Any]:
    tree, screen = tree_of(job, out), io.StringIO()
    began = job.now()
    session, loop = _build(job, tree, out, Terminal(Console(file=screen)))
    before = job.now() - began
    marks = _marked(session, job)
    loop()
    session.recorder.close()
    lines = [json.loads(line) for line in (out / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens = [line["tokens_per_second"] * sum(line["seconds"].values()) for line in lines if line["step"] > 1]
    return {
        "steps": [b - a for a, b in itertools.pairwise(marks)],
        "phases": [line["seconds"] for line in lines if line["step"] > 1 and job.clock == "wall"],
        "tokens": tokens,
        "generated": observations.generated[1:],
        "first": observations.updates[0],
        "before": before,
        "reference": observations.reference_seconds,
        "peak_rss_mb": [line["peak_memory_mb"] for line in lines][-1],
        "memory_by_phase": lines[-1]["peak_memory_mb_by_phase"],
        "notes": [line.strip() for line in screen.getvalue().splitlines() if line.strip()],
    }


def _build(job: Job, tree: Tree, out: Path, view: View) -> tuple[Session, Callable[[], None]]:
    """Build the run of a job; return its session and its loop."""
    if job.trainer == "reward":
        out.mkdir()
        (out / "job.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        built = build_reward_model(load_reward_model(out / "job.yaml", []), view)
        _give_head(built.model, Path(job.folder) / "reward")
        start_adapters(built.model)
        return built.run.session, lambda: train_offline(built.run)
    whole = build_run(train_config(tree), view)
    models = whole.run.models if isinstance(whole.run, OnlineRun) else whole.run.loss.models
    start_adapters(models.policy)
    return whole.session, whole.loop


@contextlib.contextmanager
def observed(job: Job) -> Iterator[Observations]:
    """Observe a run inside; its rows and minibatches come in the order of the files, as on the peer's side."""
    seen = Observations()
    plain_step, plain_sampler, plain_reference = (
        online_loop.optimizer_step,
        online.build_sampler,
        ReferenceAnnotator.pairs,
    )

    def step(*args: Any, **kwargs: Any) -> Metrics:
        metrics = plain_step(*args, **kwargs)
        norms = [value for name, value in metrics.values().items() if name.endswith("/grad_norm")]
        seen.updates.append({"loss": metrics["loss/total"], "gradient": math.hypot(*norms)})
        return metrics

    def sampler(config: Any, models: Models, *rest: Any, **more: Any) -> Sampler:
        return WatchedSampler(plain_sampler(config, models, *rest, **more), models, job, seen.generated)

    def reference(annotator: ReferenceAnnotator, *args: Any) -> AnnotatedPairSet:
        began = job.now()
        annotated = plain_reference(annotator, *args)
        seen.reference_seconds += job.now() - began
        return annotated

    with contextlib.ExitStack() as patches:
        for target, name, replacement in (
            (online_loop, "optimizer_step", step),
            (offline_loop, "optimizer_step", step),
            (online, "build_sampler", sampler),
            (ReferenceAnnotator, "pairs", reference),
            (stream, "_permutation", lambda rows, seed, epoch: tuple(range(rows))),
            (torch, "randperm", lambda rows, **_: torch.arange(rows)),
        ):
            patches.enter_context(patch.object(target, name, replacement))
        yield seen


def _give_head(model: ScalarHeadModel, folder: Path) -> None:
    """Begin with the scalar head of the reward model in `folder`, like the peer, instead of a new one."""
    with torch.no_grad():
        model.head.weight.copy_(load_file(folder / "model.safetensors")["score.weight"])


class WatchedSampler:
    """A sampler that counts its tokens, and whose first completions give way to written ones, the same for a peer."""

    def __init__(self, sampler: Sampler, models: Models, job: Job, generated: list[int]) -> None:
        self.sampler, self.models, self.job, self.generated = sampler, models, job, generated

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """See Sampler."""
        completions = self.sampler.sample(prompts, key=key, group_size=group_size, greedy=greedy)
        if self.job.replay and not self.generated:
            completions = self._replayed(completions)
        self.generated.append(int(completions.completion_mask.sum()))
        return completions

    @torch.no_grad()
    def _replayed(self, completions: Completions) -> Completions:
        written = json.loads((Path(self.job.folder) / "replay.json").read_text(encoding="utf-8"))
        ids = torch.tensor(written[: len(completions)])
        device = completions.completion_ids.device
        rows = replace(
            completions,
            completion_ids=ids.to(device),
            completion_mask=torch.ones_like(ids, dtype=torch.bool).to(device),
            sampler_logprobs=torch.zeros(ids.shape, dtype=completions.sampler_logprobs.dtype, device=device),
            finished=torch.zeros_like(completions.finished),
        )
        passes = [self.models.policy_tokens(part.to(self.models.device)) for part in rows.split(MICRO_BATCH)]
        return replace(rows, sampler_logprobs=torch.cat([part.logprobs for part in passes]).to(device))


def _marked(session: Session, job: Job) -> list[float]:
    marks: list[float] = []
    report = session.report

    def marked(*args: Any, **kwargs: Any) -> None:
        report(*args, **kwargs)
        if job.device == "cuda":
            torch.cuda.synchronize()
        marks.append(job.now())

    session.report = marked  # type: ignore[method-assign]
    return marks


def main() -> None:
    """Run one job."""
    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as out:
        result = run(job, Path(out) / "run")
    if job.device == "cuda":
        result["peak_gpu_mb"] = result["peak_rss_mb"]
        result["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

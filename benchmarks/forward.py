"""Compare optimized forward and backward passes with plain ones, run alternately: seconds and peak memory.

    python benchmarks/forward.py --size tiny --rounds 5 --json benchmarks/results/forward_tiny.json

plain: all logits of a rectangle of rows (policy.log_probs=naive, policy.packing=off). chunked: log-probabilities in
chunks, rows padded. modules: without padding, through transformers' modules. quick: the default, the same with our own
implementation of the layers (rlhf/models/kernels/llama/forward.py).
A step is the passes and the optimizer step of one batch: SFT 32 rows; reward model 32 pairs; DPO 32 pairs, reference
included; PPO 64 rows, annotated, then 4 minibatches, critic and reference included; GRPO 8 prompts x 8, annotated,
one optimizer step. Prompts have 16 to 64 tokens, completions 16 to 96 (PPO, GRPO: up to 64), drawn uniformly; float32.
The peak is of resident memory, above its level before the first step, each way in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import transformers
from peers.work import SHAPES, llama_config
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from reward_model.model import BradleyTerryLoss
from rlhf.algo.kl import Coefs
from rlhf.algorithms.dpo import Dpo
from rlhf.algorithms.online import Online
from rlhf.algorithms.presets import PRESETS
from rlhf.algorithms.sft import Sft
from rlhf.batching import extend
from rlhf.config.reward import RewardModelLoss
from rlhf.config.sections import OptimizerConfig
from rlhf.experience import compute_advantages
from rlhf.models.kernels.llama import forward as written_out
from rlhf.models.policy_models import Models
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.objective import Objective
from rlhf.runtime.engine import LocalModel
from rlhf.runtime.memory import AdaptiveMicroBatch, keep_memory
from rlhf.training.losses import DemonstrationLoss, online_losses
from rlhf.training.offline import PairwiseLoss, stack_sides, sum_logprobs
from rlhf.training.rollout import compute_logprobs_and_values
from rlhf.training.step import Loss, LossBatch, optimizer_step
from rlhf.types import AnnotatedPairs, Completions, Demonstrations, PreferencePairs, Scores

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"log_probs": "naive", "packing": "off"},
    "quick": {"log_probs": "auto", "packing": "auto"},
    "chunked": {"log_probs": "auto", "packing": "off"},
    "modules": {"log_probs": "auto", "packing": "auto"},
}
WRITTEN_OUT = written_out.read_layers
CPU = torch.device("cpu")
MICRO = 16
Step = Callable[[], object]


def causal_lm(size: str) -> Any:
    """Build a causal language model with random weights, always the same ones."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(size), dtype=torch.float32)


def scalar_head(size: str, packing: str) -> ScalarHeadModel:
    """Build a critic or reward model with random weights."""
    config = llama_config(size)
    config.num_labels = 1
    torch.manual_seed(1)
    model = ScalarHeadModel(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))
    model.packing = packing  # type: ignore[assignment]
    return model


def ragged(rows: int, low: int, high: int, vocabulary: int, seed: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """Draw ids and mask of rows whose lengths are uniform from `low` to `high`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (rows,), generator=generator)
    lengths[0] = high
    mask = torch.arange(high) < lengths[:, None]
    ids = torch.randint(3, vocabulary, (rows, high), generator=generator)
    mask = mask.flip(1) if left else mask
    return torch.where(mask, ids, 0), mask


def completions(size: str, prompts: int, group: int) -> Completions:
    """Build the rows of a rollout, `group` per prompt."""
    vocabulary, rows = llama_config(size).vocab_size, prompts * group
    prompt_ids, prompt_mask = ragged(prompts, 16, 64, vocabulary, 1, left=True)
    ids, mask = ragged(rows, 16, 64, vocabulary, 2, left=False)
    return Completions(
        prompt_ids=prompt_ids.repeat_interleave(group, 0),
        prompt_mask=prompt_mask.repeat_interleave(group, 0),
        row_ids=torch.arange(rows),
        references=tuple({} for _ in range(rows)),
        completion_ids=ids,
        completion_mask=mask,
        sampler_logprobs=torch.zeros(ids.shape),
        finished=torch.ones(rows, dtype=torch.bool),
        group_size=group,
    )


def pairs(size: str) -> PreferencePairs:
    """Build a batch of 32 preference pairs."""
    vocabulary = llama_config(size).vocab_size
    prompt = ragged(32, 16, 64, vocabulary, 1, left=True)
    chosen, rejected = (ragged(32, 16, 96, vocabulary, seed, left=False) for seed in (2, 3))
    return PreferencePairs(
        prompt_ids=prompt[0],
        prompt_mask=prompt[1],
        chosen_ids=chosen[0],
        chosen_mask=chosen[1],
        rejected_ids=rejected[0],
        rejected_mask=rejected[1],
        chosen_learned=chosen[1],
        rejected_learned=rejected[1],
        margins=torch.zeros(32),
    )


def trained(name: str, module: Any, *terms: str) -> LocalModel:
    """Prepare a module for training with AdamW, at a learning rate that hardly changes it."""
    return LocalModel(name, module.train(), OptimizerConfig(lr=1e-8), terms=terms)


def descend(batch: Any, models: list[LocalModel], *losses: Loss) -> None:
    """Take one optimizer step."""
    optimizer_step([LossBatch(batch, loss) for loss in losses], models, micro_batch_size=MICRO, lr_factor=1.0)


def models_of(size: str, way: dict[str, Any], **more: Any) -> Models:
    """Build the policy and bundle it with the other models of the case."""
    return Models(policy=causal_lm(size), temperature=1.0, dtype="float32", device=CPU, **way, **more)


def sft(size: str, way: dict[str, Any]) -> Step:
    """Prepare a step of SFT on 32 demonstrations."""
    models, vocabulary = models_of(size, way), llama_config(size).vocab_size
    prompt = ragged(32, 16, 64, vocabulary, 1, left=True)
    ids, mask = ragged(32, 16, 96, vocabulary, 2, left=False)
    batch = Demonstrations(
        prompt_ids=prompt[0], prompt_mask=prompt[1], completion_ids=ids, completion_mask=mask, loss_mask=mask
    )
    policy, loss = trained("policy", models.policy, "sft"), DemonstrationLoss(models, Sft())
    return lambda: descend(batch, [policy], loss)


def rm(size: str, way: dict[str, Any]) -> Step:
    """Prepare a step of reward-model training on 32 pairs."""
    model, batch = scalar_head(size, way["packing"]), pairs(size)
    policy, loss = trained("policy", model, "rm"), BradleyTerryLoss(model, RewardModelLoss(), dtype="float32")
    return lambda: descend(batch, [policy], loss)


def dpo(size: str, way: dict[str, Any]) -> Step:
    """Prepare a step of DPO on 32 pairs, including the reference's log-probabilities."""
    models, batch = models_of(size, way, reference=causal_lm(size).eval()), pairs(size)
    policy, loss = trained("policy", models.policy, "preference"), PairwiseLoss(models, Dpo())

    def step() -> None:
        with torch.no_grad():
            parts = [stack_sides(part) for part in batch.split(2 * MICRO)]
            logprobs = [sum_logprobs(models.reference_logprobs(rows), rows.loss_mask).chunk(2) for rows in parts]
        chosen, rejected = (torch.cat(side) for side in zip(*logprobs, strict=True))
        annotated = extend(AnnotatedPairs, batch, chosen_ref_logprobs=chosen, rejected_ref_logprobs=rejected)
        descend(annotated, [policy], loss)

    return step


def online(preset: str, size: str, way: dict[str, Any], *, prompts: int, group: int, minibatches: int) -> Step:
    """Prepare a step that annotates a rollout and trains one epoch on it."""
    algorithm = Online.model_validate({"preset": preset, **PRESETS[preset]["algorithm"]})
    critic = scalar_head(size, way["packing"]) if algorithm.value_loss is not None else None
    reference = causal_lm(size).eval() if preset == "ppo" else None
    models = models_of(size, way, critic=critic, reference=reference)
    train = [trained("policy", models.policy, "policy")]
    train += [trained("critic", critic, "value")] if critic is not None else []
    batch = completions(size, prompts, group)
    scores = Scores(values=torch.randn(len(batch), generator=torch.Generator().manual_seed(3)), parts={})
    coefs, objective = Coefs(kl=0.05, penalty=0.0), Objective(algorithm, max_tokens=64)

    def step() -> None:
        rollout = compute_logprobs_and_values(batch, scores, models, cut=AdaptiveMicroBatch(4 * MICRO).cut)
        experience = compute_advantages(rollout, algorithm, coefs)
        losses = online_losses(models, objective, coefs)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
        for minibatch in experience.split(len(batch) // minibatches, order):
            descend(minibatch, train, *losses)

    return step


CASES: dict[str, Callable[[str, dict[str, Any]], Step]] = {
    "sft": sft,
    "rm": rm,
    "dpo": dpo,
    "ppo": lambda size, way: online("ppo", size, way, prompts=64, group=1, minibatches=4),
    "grpo": lambda size, way: online("grpo", size, way, prompts=8, group=8, minibatches=1),
}


def step_of(case: str, size: str, way: str) -> Step:
    """Prepare a step of the case, run the given way."""
    plain = CASES[case](size, WAYS[way])

    def step() -> None:
        written_out.read_layers = (lambda _: None) if way == "modules" else WRITTEN_OUT
        plain()

    return step


def seconds(step: Step) -> float:
    """Measure the CPU seconds of one step, including the system's time for page faults."""
    start = time.process_time()  # with one thread on a shared machine, other load then matters less
    step()
    return time.process_time() - start


def compare(case: str, size: str, ways: list[str], rounds: int) -> dict[str, Any]:
    """Time all ways alternately, after one uncounted step each, and compute the ratios to the first way per round."""
    steps = {way: step_of(case, size, way) for way in ways}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, step in steps.items():
            times[way].append(seconds(step))
    first = times[ways[0]]
    ratios = {way: sorted(a / b for a, b in zip(first, times[way], strict=True)) for way in ways[1:]}
    return {"case": case, "size": size, "seconds": times, "ratios": ratios}


def resident_mb(key: str) -> float:
    """Return VmRSS or VmHWM (its peak) of this process, in MB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def peak_mb(case: str, size: str, way: str, *, keep: bool) -> float:
    """Measure, in a new process, the peak resident memory of two steps above the level before the first, in MB."""
    command = [
        sys.executable,
        __file__,
        "--size",
        size,
        "--case",
        case,
        "--peak-of",
        way,
        *(["--keep"] if keep else []),
    ]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Print the table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--case", choices=CASES, action="append", help="may be given several times; all")
    parser.add_argument("--way", choices=WAYS, action="append", help="ways, compared with the first of them; all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="with run.keep_memory, the default of runs")
    parser.add_argument("--no-memory", action="store_true", help="seconds only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if options.keep:
        keep_memory()
    cases, ways = options.case or list(CASES), options.way or ["plain", "quick"]
    if options.peak_of:
        step = step_of(cases[0], options.size, options.peak_of)
        before = resident_mb("VmRSS")
        step()
        step()
        write_line(f"{resident_mb('VmHWM') - before:.1f}")
        return
    results = []
    for case in cases:
        result = compare(case, options.size, ways, options.rounds)
        if not options.no_memory:
            result["peak_mb"] = {way: peak_mb(case, options.size, way, keep=options.keep) for way in ways}
        results.append(result)
        write_line(line(result))
    if options.json:
        about = {
            "command": " ".join(sys.argv),
            "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n", encoding="utf-8")


def line(result: dict[str, Any]) -> str:
    """Format one case as a line of text."""
    parts = [f"{result['case']:5} {result['size']:6}"]
    for way, times in result["seconds"].items():
        text = f"{way} {statistics.median(times):.3f} s"
        if way in result["ratios"]:
            ratios = result["ratios"][way]
            text += f" ({statistics.median(ratios):.2f}x, {ratios[0]:.2f} to {ratios[-1]:.2f})"
        if "peak_mb" in result:
            text += f" {result['peak_mb'][way]:.0f} MB"
        parts.append(text)
    return "  ".join(parts)


def write_line(text: str) -> None:
    """Write a line to standard output and flush it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Memory of PPO and GRPO on SmolLM2-135M: all weights in float32, and adapters of every role over one nf4 base.

    python benchmarks/adapter_memory.py models/smollm2-135m-instruct

Each run is a process of its own with two steps of a few short completions, so that weights, gradients, moments and the
sampler's copy are most of its memory. The runs take turns. A run's peak is the largest of its phases' resident
memory, above what the process holds after its imports. glibc returns every freed tensor to the system at once
(RETURNED): otherwise memory freed by loading and quantizing stays resident, more of it in one arm than in another. The
bytes of weights and moments are counted, each storage once, and compared with the formula.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "adapter_memory.json"
LORA = {"r": 16}
NF4 = {"weights": "nf4", "lora": LORA}
PROMPTS = ["Name a color.", "What is two plus two?", "Write a short greeting.", "Name an animal that swims."]
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)


def reward_tree(model: str, folder: Path) -> dict[str, Any]:
    """Return the run of the reward model, whose adapter and merged model the others read."""
    pairs = folder / "pairs.jsonl"
    rows = [{"prompt": prompt, "chosen": " Of course: a fine answer.", "rejected": " No."} for prompt in PROMPTS]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows * 2), encoding="utf-8")
    return {
        "run": {"out_dir": str(folder / "reward"), "device": "cpu"},
        "data": {"preferences": {"path": str(pairs)}},
        "model": {"model": model, "export": "both", **NF4},
        "batch": {"prompts_per_step": 4, "micro_batch_size": 2},
        "schedule": {"steps": 1},
    }


def run_tree(model: str, folder: Path, preset: str, kind: str, steps: int) -> dict[str, Any]:
    """Return the run of an arm: `kind` is full or adapters."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    is_full = kind == "full"
    reward = folder / "reward" / ("model" if is_full else "adapter")
    source: dict[str, Any] = {"type": "model", "path": str(reward), "micro_batch_size": 2}
    role: dict[str, Any] = {} if is_full else NF4
    return {
        "run": {"out_dir": str(folder / f"{preset}-{kind}"), "device": "cpu", "keep_memory": False},
        "data": {"prompts": {"path": str(prompts)}},
        "policy": {"model": model, **role},
        **({"critic": {"init": "policy", **role}} if preset == "ppo" else {}),
        "reward": {"source": source if is_full else {**source, "weights": "nf4"}},
        "sampling": {"max_new_tokens": 16, "completions_per_prompt": 1 if preset == "ppo" else 2},
        "algorithm": {"preset": preset, **({"advantage": {"whiten": False}} if preset == "ppo" else {})},
        "batch": {
            "prompts_per_step": 4 if preset == "ppo" else 2,
            "micro_batch_size": 2,
            "epochs": 1,
            "minibatches": 1,
        },
        "schedule": {"steps": steps},
        "checkpoint": {"every": 0, "resume": "never"},
        "eval": {"every": 0},
        "guard": {"allow": []},
    }


def status(name: str) -> int:
    """Return a number of bytes from /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def phase_peaks(run: Path) -> dict[str, int]:
    """Return the largest resident memory of each phase of a run; every phase resets VmHWM."""
    peaks: dict[str, int] = {}
    for line in (run / "timings.jsonl").read_text(encoding="utf-8").splitlines():
        for phase, mb in json.loads(line)["peak_memory_mb_by_phase"].items():
            peaks[phase] = max(peaks.get(phase, 0), round(mb * 2**20))
    return peaks


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Sum the bytes of the tensors' storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def formula(policy: Any, *, roles: int, trained: int, is_full: bool) -> float:
    """Compute the bytes of weights and moments from the shapes of the policy alone.

    Full: 12 for each weight of a trained model (weight, two moments), 2 for each of a frozen one, whose numbers
    bfloat16 has exactly. Adapters: the
    base once, 4.127 bits for each weight of a linear layer and 16 for each of an embedding, and 12 bytes for each
    weight of an adapter, 4 if it is frozen.
    """
    from rlhf.models.kernels.quantized import QuantizedLinear

    if is_full:
        count = sum(p.numel() for p in policy.parameters())
        return 12.0 * count * trained + 2.0 * count * (roles - trained)
    linear = sum(m.in_features * m.out_features for m in policy.modules() if isinstance(m, QuantizedLinear))
    adapters = sum(p.numel() for n, p in policy.named_parameters() if "lora_" in n)
    others = sum(p.numel() for n, p in policy.named_parameters() if "lora_" not in n and p.ndim == 2)
    norms = sum(p.numel() for n, p in policy.named_parameters() if p.ndim == 1)
    return linear * NF4_BITS / 8 + 2.0 * others + 4.0 * norms + 12.0 * adapters * trained + 4.0 * adapters


def work(file: Path) -> None:
    """Run the configuration in `file` and print its memory."""
    import bitsandbytes  # noqa: F401 - part of what every run imports
    import peft  # noqa: F401 - the same
    import torch

    from rlhf.config.load import train_config
    from rlhf.factory.online import build_online
    from rlhf.training.online import train

    tree = json.loads(file.read_text(encoding="utf-8"))
    before = status("VmRSS")
    run = build_online(train_config(tree))
    loaded = status("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    train(run)
    phases = {name: size - before for name, size in phase_peaks(Path(tree["run"]["out_dir"])).items()}
    models: Any = run.models
    scorer: Any = run.reward.source.source.model  # type: ignore[attr-defined]
    modules = [m for m in (models.policy, models.reference, models.critic, scorer) if m is not None]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    moments: list[Any] = []
    optimizers: list[Any] = [t for t in (run.policy, run.critic) if t is not None]
    for trained in optimizers:
        moments += [v for s in trained.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    counted = storage_bytes([*tensors, *moments])
    is_full = tree["policy"].get("lora") is None
    expected = formula(models.policy, roles=len(modules), trained=len(optimizers), is_full=is_full)
    parameters = sum(p.numel() for n, p in models.policy.named_parameters() if "lora_" not in n)
    row = {"peak": max(phases.values()), "loading": loaded, "bytes": counted, "formula": expected, "named": parameters}
    print(json.dumps(row | {"phases": phases}))


def measure(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run an arm in a process of its own and return its memory."""
    file = folder / "run.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, __file__, "--worker", str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **RETURNED},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(model: str, repeats: int = 1, steps: int = 2) -> None:
    """Measure every arm in turn and write the result."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        from rlhf.cli import main as rlhf

        file = folder / "reward.json"
        file.write_text(json.dumps(reward_tree(model, folder)), encoding="utf-8")
        (folder / "reward.yaml").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
        if rlhf(["rm", str(folder / "reward.yaml")]):
            raise RuntimeError("the reward model was not trained")
        arms = [("ppo", "full"), ("ppo", "adapters"), ("grpo", "adapters")]
        rows: dict[str, list[dict[str, Any]]] = {f"{preset} {kind}": [] for preset, kind in arms}
        for _ in range(repeats):
            for preset, kind in arms:
                rows[f"{preset} {kind}"].append(measure(run_tree(model, folder, preset, kind, steps), folder))
    peaks = {name: max(row["peak"] for row in runs) for name, runs in rows.items()}
    result = {
        "model": Path(model).name,
        "machine": platform.processor() or platform.machine(),
        "steps": steps,
        "rows": rows,
        "bytes_over_formula": {name: runs[0]["bytes"] / runs[0]["formula"] for name, runs in rows.items()},
        "ppo_adapters_over_ppo_full": peaks["ppo adapters"] / peaks["ppo full"],
        "ppo_adapters_over_grpo_adapters": peaks["ppo adapters"] / peaks["grpo adapters"],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        work(Path(sys.argv[2]))
    else:
        main(sys.argv[1], *(int(number) for number in sys.argv[2:]))

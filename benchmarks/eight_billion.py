"""Take one PPO step of an 8B model on this machine: adapters of policy and critic over one nf4 base.

    python scripts/get_smollm2.py
    python benchmarks/eight_billion.py --folder /tmp/8b [--layers 32] --json benchmarks/results/eight_billion.json
    python benchmarks/eight_billion.py --folder /tmp/8b --device cuda --prompts 8 --completions 2 --prompt-tokens 896 \
      --new-tokens 128

The model has the shape of Llama-3.1-8B, random weights in bfloat16, and SmolLM2's tokenizer. It takes 16 GB of disk and
is kept in --folder, so that the command can be repeated. The reward is a function. The peak is beside the plan of the
same configuration. On a CPU it is the largest resident memory of a phase, above what the process has after its imports,
and glibc returns every freed tensor to the system at once (as in adapter_memory.py). On a GPU it is torch's
allocated memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from adapter_memory import NF4, PROMPTS, RETURNED, phase_peaks, status

ROOT = Path(__file__).resolve().parents[1]
MB = 2**20
SHAPE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def make_model(folder: Path, tokenizer: str, layers: int, device: str) -> None:
    """Write the model, a file for each layer, so that one layer at a time is in memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    config = LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", architectures=["LlamaForCausalLM"], **SHAPE)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = {}
    for name in shapes:
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{part}.safetensors", []).append(name)
    draw = torch.Generator(device).manual_seed(0)
    for file, names in files.items():
        tensors = {
            name: torch.ones(shapes[name], dtype=torch.bfloat16)
            if len(shapes[name]) == 1
            else torch.empty(shapes[name], dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=draw).cpu()
            for name in names
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {name: file for file, names in files.items() for name in names}
    size = sum(shape.numel() for shape in shapes.values()) * 2
    content = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    config.save_pretrained(folder)  # last: a folder with a configuration is complete


def score(completions: list[str]) -> list[float]:
    """Score a text by its share of vowels, so that completions differ in score."""
    return [sum(character in "aeiou" for character in text) / max(1, len(text)) for text in completions]


def tree(model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the step."""
    prompts, longer = folder / "prompts.jsonl", " Say more." * (options.prompt_tokens // 3)
    texts = [PROMPTS[number % len(PROMPTS)] + f" {number}." + longer for number in range(options.prompts)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    role = {**NF4, "gradient_checkpointing": True}
    return {
        "run": {"out_dir": str(folder / "run"), "device": options.device, "keep_memory": False},
        "data": {"prompts": {"path": str(prompts), "max_prompt_tokens": options.prompt_tokens + 64}},
        "policy": {"model": str(model), "export": "adapter", **role},
        "critic": {"init": "policy", **role},
        "reward": {"source": {"type": "function", "target": f"{Path(__file__).resolve()}:score"}},
        "sampling": {
            "max_new_tokens": options.new_tokens,
            "completions_per_prompt": options.completions,
            "batch_size": 16,
            "copy_weights": False,
        },
        "algorithm": {"preset": "ppo", "advantage": {"whiten": False}},
        "batch": {"prompts_per_step": options.prompts, "micro_batch_size": 1, "epochs": 1, "minibatches": 1},
        "schedule": {"steps": 1, "warmup_steps": 0},
        "checkpoint": {"every": 0, "resume": "never"},
        "eval": {"every": 0},
    }


def work(file: Path) -> None:
    """Run the step of the configuration in `file` and print its seconds and memory."""
    import bitsandbytes  # noqa: F401 - part of what every run imports
    import peft  # noqa: F401 - the same
    import torch

    from rlhf.config.load import train_config
    from rlhf.factory.online import build_online
    from rlhf.planning.layout import Lengths
    from rlhf.planning.plan import Machine, make_plan
    from rlhf.training.online import train

    settings = json.loads(file.read_text(encoding="utf-8"))
    device, new_tokens = settings["run"]["device"], settings["sampling"]["max_new_tokens"]
    on_cpu = device == "cpu"
    before, start = status("VmRSS") if on_cpu else 0, time.perf_counter()
    run = build_online(train_config(settings))
    loaded, built = (status("VmHWM") if on_cpu else torch.cuda.max_memory_allocated()) - before, time.perf_counter()
    models: Any = run.models
    adapters = {n: p for m in (models.policy, models.critic) for n, p in m.named_parameters() if p.requires_grad}
    old = {name: parameter.detach().cpu().clone() for name, parameter in adapters.items()}  # not on the GPU
    if on_cpu:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    train(run)
    out = Path(settings["run"]["out_dir"])
    phases = {name: size - before for name, size in phase_peaks(out).items()}
    prompt_tokens = longest_prompt(settings)
    plan = make_plan(
        train_config(settings), Machine(device=device), Lengths(prompt=prompt_tokens, completion=new_tokens)
    )
    row = {
        "device": "CPU" if on_cpu else torch.cuda.get_device_name(),
        "parameters": sum(p.numel() for n, p in models.policy.named_parameters() if "lora_" not in n),
        "trained": sum(parameter.numel() for parameter in adapters.values()),
        "tensors_changed": sum(not torch.equal(old[name], p.detach().cpu()) for name, p in adapters.items()),
        "tensors_trained": len(adapters),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "loading_mb": loaded / MB,
        "peak_mb": max(phases.values()) / MB,
        "phases_mb": {name: size / MB for name, size in phases.items()},
        "planned_mb": plan.peak / MB,
        "loading_s": round(built - start),
        "step_s": round(time.perf_counter() - built),
    }
    print(json.dumps(row))


def longest_prompt(settings: dict[str, Any]) -> int:
    """Count the tokens of the longest prompt, with the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings["policy"]["model"])
    texts = [json.loads(line)["prompt"] for line in Path(settings["data"]["prompts"]["path"]).read_text().splitlines()]
    turns = [[{"role": "user", "content": text}] for text in texts]
    return max(len(tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]) for turn in turns)


def main() -> None:
    """Make the model if it is missing, take the step in a process of its own, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder for the model and the run")
    parser.add_argument("--tokenizer", default="models/smollm2-135m-instruct")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--completions", type=int, default=1, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="about; 0: short prompts")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    folder = options.folder.resolve()
    model = folder / f"model-{options.layers}"
    if not (model / "config.json").is_file():
        make_model(model, options.tokenizer, options.layers, options.device)
    (folder / "step.json").write_text(json.dumps(tree(model, folder, options)), encoding="utf-8")
    command = [sys.executable, __file__, "--worker", str(folder / "step.json")]
    kept = RETURNED if options.device == "cpu" else {}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **kept})
    row = {"layers": options.layers, **json.loads(done.stdout.splitlines()[-1])}
    print(json.dumps(row, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]))
    else:
        main()

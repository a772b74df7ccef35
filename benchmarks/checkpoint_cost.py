"""Measure the cost of a checkpoint: its size, the seconds to write it, and a resumed run's time to its first step.

    python benchmarks/checkpoint_cost.py [--millions 1 10 50] [--repeat 3]

PPO with a critic on random Llamas of the given millions of parameters, in float32 with AdamW: a checkpoint holds both
models and the two moments of each. Writes benchmarks/results/checkpoint_cost.json and prints the table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
from runs import make_model, ppo_tree  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

from rlhf.config.load import train_config  # noqa: E402
from rlhf.factory.online import build_online  # noqa: E402
from rlhf.tracking.checkpoint import find_damage  # noqa: E402
from rlhf.training.online import train  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "checkpoint_cost.json"


def model_of(folder: Path, millions: float) -> int:
    """Save a random Llama of about this many million parameters to `folder` and return its exact parameter count."""
    make_model(folder)  # for its tokenizer
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    hidden = 64 * max(2, round((millions * 1e6 / (8 * 16)) ** 0.5 / 64))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(millions: float, repeat: int) -> dict[str, Any]:
    """Measure one model size and return its figures."""
    with tempfile.TemporaryDirectory(prefix="rlhf-checkpoint-cost-") as name:
        folder = Path(name)
        parameters = model_of(folder / "model", millions)
        tree = ppo_tree(
            folder,
            batch={"prompts_per_step": 2, "epochs": 1, "minibatches": 1},
            algorithm={"advantage": {"whiten": False}},
            schedule={"steps": 1},
            eval={"every": 0},
            data={"eval_prompts": None},
        )
        run = build_online(train_config(tree))
        train(run)
        session, seconds = run.session, []
        for _ in range(repeat):
            session._saved_at = None
            began = time.perf_counter()
            session._checkpoint()
            seconds.append(time.perf_counter() - began)
        session.recorder.close()
        newest = session.checkpoints.all()[-1]
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        began = time.perf_counter()
        assert find_damage(newest) is None
        verify = time.perf_counter() - began
        del run, session
        tree["schedule"]["steps"] = 2
        began = time.perf_counter()
        resumed = build_online(train_config(tree))
        next(resumed.session.steps())
        resume = time.perf_counter() - began
        resumed.session.recorder.close()
    return {
        "parameters_policy": parameters,
        "size_mb": size / 2**20,
        "bytes_per_parameter": size / (2 * parameters),
        "write_s": statistics.median(seconds),
        "write_s_all": seconds,
        "verify_s": verify,
        "resume_to_first_step_s": resume,
    }


def main() -> None:
    """Measure all sizes, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 10, 50])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(millions, options.repeat) for millions in options.millions]
    about = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "machine": platform.machine(),
        "threads": 1,
    }
    RESULT.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    lines = [
        "| policy (the critic is as large) | size | bytes a parameter | write | verify | resume to first step |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['parameters_policy'] / 1e6:.1f} M | {row['size_mb']:.0f} MB | {row['bytes_per_parameter']:.1f} | "
            f"{row['write_s']:.2f} s | {row['verify_s']:.2f} s | {row['resume_to_first_step_s']:.2f} s |"
            for row in rows
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

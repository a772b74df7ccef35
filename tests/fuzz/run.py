"""Many generated configurations and data files: each gives a valid object or our own error, in time.

    python tests/fuzz/run.py --count 10000 [--seed 0] [--only configurations | data-files]

Prints how many were valid and refused; exit code 1 with the smallest failing example if one gave anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "data"), str(HERE.parents[1])]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from fuzz_cases import CONFIGURATION, DATA_FILE, check_configuration, check_data_file  # noqa: E402
from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from made_tokenizers import CHATML, byte_tokenizer  # noqa: E402


def fuzz(strategy: Any, check: Callable[[Any], bool], count: int, start: int) -> Counter[bool]:
    """How many of `count` generated cases are valid, and how many are refused."""
    counts: Counter[bool] = Counter()

    @seed(start)
    @given(case=strategy)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def one(case: Any) -> None:
        counts[check(case)] += 1

    one()
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Generate, check, count."""
    parser = argparse.ArgumentParser(description="Fuzz configurations and data files.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["configurations", "data-files"])
    options = parser.parse_args(argv)
    tokenizer = byte_tokenizer(eos="<|im_end|>", pad="<|pad|>", extra=("<|im_start|>",))
    tokenizer.chat_template = CHATML
    with tempfile.TemporaryDirectory(prefix="rlhf-fuzz-") as name:
        folder = Path(name)
        jobs: dict[str, tuple[Any, Callable[[Any], bool]]] = {
            "configurations": (CONFIGURATION, lambda case: check_configuration(case, folder)),
            "data-files": (DATA_FILE, lambda case: check_data_file(case, folder, tokenizer)),
        }
        for what, (strategy, check) in jobs.items():
            if options.only in (None, what):
                began = time.monotonic()
                counts = fuzz(strategy, check, options.count, options.seed)
                seconds = time.monotonic() - began
                total = counts[True] + counts[False]
                sys.stdout.write(
                    f"{what}: {total} (seed {options.seed}): {counts[True]} valid, {counts[False]} refused, "
                    f"nothing else; {seconds:.0f} s\n"
                )
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

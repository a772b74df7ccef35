"""Say by how many MB an evaluation's comparison with the reference raises the peak, and the size of all logits."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_models import completions_of, tiny

from rlhf.models.logprobs import in_chunks
from rlhf.models.policy_models import Models, predictor_hidden_states

ROWS, TOKENS, VOCABULARY = 32, 64, 150_000


def peak_mb() -> float:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Compare two models of few parameters and a large vocabulary."""
    torch.set_num_threads(1)
    policy, reference = (tiny(vocab=VOCABULARY, dtype=torch.float32) for _ in range(2))
    models = Models(policy=policy, reference=reference, temperature=1.0, dtype="float32", device=torch.device("cpu"))
    batch = completions_of([[5 + row] for row in range(ROWS)], [[100 + row] * TOKENS for row in range(ROWS)])
    for model in (policy, reference):  # trials that a model has once
        in_chunks(model, "auto")
        with torch.no_grad():
            predictor_hidden_states(model, batch.rows(slice(0, 1)), "auto")
    before = peak_mb()
    models.compare_to_reference(batch)
    sys.stdout.write(f"{peak_mb() - before} {ROWS * TOKENS * VOCABULARY * 4 / 2**20}")


if __name__ == "__main__":
    main()

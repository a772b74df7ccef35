"""One process and two have the same weights to the bit if each of its passes has the rows of one of theirs.

The sum of two gradients does not depend on their order: of two passes in one process, or of two processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import Tree, at, case, final_weights, launch, metrics, needs, samples

from rlhf.config.files import merge

ROWS = 8  # of a step
SAMPLED = {"kl/sampler_mismatch", "kl/reference"}  # read the sampler's log-probabilities, which batches round
BRIEF: Tree = {"schedule": {"steps": 2}, "checkpoint": {"every": 2}, "eval": {"every": 2}}
OFFLINE: Tree = {"batch": {"prompts_per_step": ROWS, "micro_batch_size": ROWS // 2}}


def online(minibatches: int, group: int = 1, **changes: Any) -> Tree:
    """Settings of passes that have half of a minibatch."""
    batch = {
        "prompts_per_step": ROWS // group,
        "minibatches": minibatches,
        "micro_batch_size": ROWS // minibatches // 2,
    }
    sampling = {"completions_per_prompt": group, "old_log_probs": "trainer"}
    return {"batch": batch, "sampling": sampling, "data": {"eval_prompts": None}, "eval": {"every": 0}, **changes}


PLAYED: Tree = {"environment": {"workers": 2, "prefix_cache": True}}
SCORED: Tree = {"reward": {"source": {"micro_batch_size": 2}}}
MATCHED: dict[str, Tree] = {
    "ppo": online(1),
    "grpo": online(2, group=4),
    "ppo_episodes": online(2),
    "grpo_episodes": online(1, group=4, **PLAYED),
    "ppo_rm": online(1, **SCORED),
    "dpo": OFFLINE,
    "sft": OFFLINE,
}
CASES = ("ppo", "grpo", "ppo_episodes", "grpo_episodes", "dpo")
UNCLIPPED: Tree = {"policy": {"max_grad_norm": 1e6}, "critic": {"max_grad_norm": 1e6}}


def matched(name: str, folder: Path) -> Tree:
    return merge(merge(case(name, folder / "data" / name), BRIEF), MATCHED[name])


def same_bits(trees: dict[str, Tree], folder: Path, mode: str) -> None:
    one = [at(tree, folder / "one" / name, sharding=mode) for name, tree in trees.items()]
    two = [at(tree, folder / "two" / name, sharding=mode) for name, tree in trees.items()]
    launch(one, folder / "one", processes=1)
    launch(two, folder / "two", processes=2, launcher=False)
    for name in trees:
        left, right = folder / "one" / name, folder / "two" / name
        assert samples(left) == samples(right), name
        assert weights_that_differ(left, right) == [], name
        if mode == "none":  # DeepSpeed adds the parts of the gradient's norm, which is a metric, in another order
            assert numbers(left) == numbers(right), name


def weights_that_differ(left: Path, right: Path) -> list[str]:
    one, two = final_weights(left), final_weights(right)
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


def numbers(out: Path) -> list[str]:
    """The metrics as they are written; NaN equals NaN there."""
    rows = [{key: value for key, value in row.items() if key not in SAMPLED} for row in metrics(out)]
    return [json.dumps(row) for row in rows]


def test_passes_of_the_same_rows_give_the_same_bits_in_one_process_and_two(tmp_path: Path, warm_process: None) -> None:
    same_bits({name: matched(name, tmp_path) for name in CASES}, tmp_path, "none")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_sharded_runs_have_the_same_bits_while_no_gradient_is_clipped(
    tmp_path: Path, warm_process: None, mode: str
) -> None:
    needs(mode)
    names = ("ppo", "grpo", "ppo_episodes", "ppo_rm", "dpo", "sft")
    changes = {name: UNCLIPPED if name.startswith("ppo") else {"policy": UNCLIPPED["policy"]} for name in names}
    same_bits({name: merge(matched(name, tmp_path), changes[name]) for name in names}, tmp_path, mode)

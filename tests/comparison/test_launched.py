"""Cells in several processes: the whole path from the command to results.json, and the message of a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cases import compare_tree, failing_arm

from rlhf.cli import main


@pytest.mark.slow
def test_arms_in_two_processes_each(tmp_path: Path) -> None:
    """One arm fails in its processes and says why, the other finishes on its budget."""
    arms = {"grpo": None, "dpo": None, "best_of_n": None, "bad": failing_arm(tmp_path)}
    tree = compare_tree(tmp_path, seeds=[0], arms=arms, processes=2)
    tree["arms"] = {name: arm for name, arm in tree["arms"].items() if arm is not None}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    assert main(["compare", str(tmp_path / "c.yaml"), "budget.completions=32"]) == 1
    results = json.loads((tmp_path / "compare" / "results.json").read_text())
    assert results["arms"]["ppo"]["status"] == "done"
    assert results["arms"]["ppo"]["costs"]["completions"] == 32
    assert results["arms"]["bad"]["status"] == "failed"
    assert "no such thing" in results["arms"]["bad"]["seeds"][0]["error"]

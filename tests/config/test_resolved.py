"""Every preset and every shipped file, setting by setting: resolved.json has them, and nothing moves them.

A setting that is changed on purpose is written again: `python tests/config/test_resolved.py`, with the tests' folder
and the checkout on the path.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhf.config.files import merge
from rlhf.config.load import dump, load_any, train_config

ROOT = Path(__file__).parents[2]
RESOLVED = Path(__file__).parent / "resolved.json"
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
PRESETS = [
    *("sft", "dpo", "cdpo", "robust_dpo", "ipo", "ipo_per_token", "hinge", "slic", "simpo", "orpo", "kto"),
    *("ppo", "ppo_penalty", "trpo", "npg", "a2c", "reinforce", "remax", "reinforce_pp", "rloo", "grpo", "dr_grpo"),
    *("ppo_lag", "dapo", "cispo", "gspo", "online_dpo", "rejection_sampling"),
]
TREE: dict[str, Any] = {
    "policy": {"model": "m"},
    "data": {"prompts": {"path": "p"}, "sft": {"path": "s"}, "preferences": {"path": "d"}},
    "reward": {"source": {"type": "model", "path": "rm"}},
    "batch": {"prompts_per_step": 16},
}
NEEDED: dict[str, Any] = {
    "ppo_penalty": {"batch": {"epochs": 2}},  # the penalty needs a second update
    "ppo_lag": {"reward": {"cost": {"source": {"type": "model", "path": "cm"}}}},
}


def of_preset(name: str) -> dict[str, Any]:
    """The settings of a run with this preset and nothing else, in the order of its keys."""
    given = merge(TREE, {"algorithm": {"preset": name}, **NEEDED.get(name, {})})
    return dump(train_config(merge(TREE, given)))


def of_file(file: str) -> dict[str, Any]:
    """All settings of a shipped file; its paths relative to the checkout."""
    text = json.dumps(dump(load_any(ROOT / file))).replace(str(ROOT), "ROOT")
    settings: dict[str, Any] = json.loads(text)
    return settings


def text_of(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=1)  # the order of keys is part of the output of `rlhf config`


def test_a_preset_is_what_it_was() -> None:
    resolved = json.loads(RESOLVED.read_text())["presets"]
    assert {name: text_of(of_preset(name)) for name in PRESETS} == {name: text_of(resolved[name]) for name in PRESETS}


def test_a_shipped_file_is_what_it_was() -> None:
    resolved = json.loads(RESOLVED.read_text())["files"]
    assert {file: text_of(of_file(file)) for file in FILES} == {file: text_of(resolved[file]) for file in FILES}


if __name__ == "__main__":
    table = {"presets": {name: of_preset(name) for name in PRESETS}, "files": {file: of_file(file) for file in FILES}}
    RESOLVED.write_text(json.dumps(table, separators=(",", ":")) + "\n", encoding="utf-8")

"""scripts/sample_pairs.py: pairs from a model and a reward, which our own reader of pairs takes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from runs import golds, ppo_tree

from rlhf.config.data import PreferencesConfig
from rlhf.data.pairs import pair_pipeline
from rlhf.data.tokenizer import load_tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sample_pairs.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sample_pairs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ppo.yaml"
    path.write_text(yaml.safe_dump(ppo_tree(tmp_path)), encoding="utf-8")
    return path


def test_the_best_completion_is_chosen_and_the_worst_rejected(script, config, tmp_path, capsys):
    target = tmp_path / "made" / "pairs.jsonl"
    assert script.main([str(config), str(target), "--completions", "3"]) == 0
    rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert rows
    for row in rows:
        assert golds(row["chosen"], row["rejected"]) == pytest.approx([row["score_chosen"], row["score_rejected"]])
        assert row["score_chosen"] > row["score_rejected"]
    alike = 20 - len(rows)  # 20 prompts in the file
    assert f"{alike} prompts gave none" in capsys.readouterr().out
    pairs = pair_pipeline(
        PreferencesConfig(path=str(target)), load_tokenizer(str(tmp_path / "model")), chat_template="auto"
    ).load()
    assert len(pairs) == len(rows)
    assert [text.margin for text in pairs.texts] == [r["score_chosen"] - r["score_rejected"] for r in rows]


def test_the_same_seed_makes_the_same_pairs_and_fewer_prompts_their_beginning(script, config, tmp_path):
    texts = {}
    for name, *options in (("a",), ("b",), ("few", "--prompts", "5"), ("other", "run.seed=9")):
        script.main([str(config), str(tmp_path / name), *options])
        texts[name] = (tmp_path / name).read_text(encoding="utf-8")
    assert texts["a"] == texts["b"] != texts["other"]
    assert texts["a"].startswith(texts["few"])


def test_a_configuration_without_a_reward_is_refused(script, tmp_path, capsys):
    path = tmp_path / "sft.yaml"
    path.write_text("policy: {model: m}\ndata: {sft: {path: rows.jsonl}}\nalgorithm: {preset: sft}\n", encoding="utf-8")
    assert script.main([str(path), str(tmp_path / "pairs.jsonl")]) == 2
    assert "reward.source" in capsys.readouterr().err

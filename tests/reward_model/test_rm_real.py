"""Reward models of configs/real, and pairs that people judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fitting import TERMS, fit
from quick import quick
from runs import quiet
from transformers import AutoModelForSequenceClassification

from reward_model.evaluate import evaluate_reward_model
from reward_model.model import BradleyTerryLoss, calibrate
from rlhf.api.training import run_reward_model
from rlhf.config.load import load_reward_model
from rlhf.data.datasets import BatchStream
from rlhf.data.pairs import pair_pipeline
from rlhf.data.tokenizer import load_tokenizer
from rlhf.models.scalar_head import load_scalar_head
from rlhf.runtime.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "real").glob("rm_*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_load_and_keep_held_out_pairs_apart(path: Path) -> None:
    config = load_reward_model(path)
    train, held_out = config.data.preferences, config.data.eval_preferences
    assert train is not None
    assert held_out is not None
    assert train.path != held_out.path
    assert train.max_tokens == held_out.max_tokens


@pytest.mark.parametrize("name", quick(["hh_rlhf_harmless", "alpaca_eval_prefs"], ["hh_rlhf_harmless"]))
def test_human_judgments_go_all_the_way_to_a_report_card(name: str, shared: Path) -> None:
    """A few pairs and two steps of a real, pretrained backbone: the path, not the result."""
    folder, backbone = shared / "data" / name, str(shared / "models" / "stories260K" / "hf")
    files = {"preferences": "train.jsonl.gz", "eval_preferences": "test.jsonl.gz"}
    paths = [f"data.{key}.path={folder / file}" for key, file in files.items()]
    sizes = [f"data.{key}.{size}" for key in files for size in ("limit=12", "max_tokens=160", "too_long=truncate")]
    config = load_reward_model(
        ROOT / "configs" / "real" / "rm_smollm2_hh.yaml",
        [*paths, *sizes, f"model.model={backbone}"],
    )
    assert config.data.eval_preferences is not None
    tokenizer = load_tokenizer(config.model.model)
    train, held_out = (
        pair_pipeline(data, tokenizer, chat_template=config.data.chat_format, context=512).load()
        for data in (config.data.preferences, config.data.eval_preferences)
    )
    model = load_scalar_head(config.model.model, tokenizer, new_head="normal")
    trained = Engine(torch.device("cpu")).train("policy", model, config.model, terms=TERMS)
    loss, stream = BradleyTerryLoss(model, config.loss, dtype="float32"), BatchStream(train, 8, seed=0)
    steps = fit(trained, loss, stream, steps=2, micro_batch_size=8)
    assert all(0 < metrics["loss/rm"] < 3 for metrics in steps)
    calibrate(model, train, config.calibration, micro_batch_size=8, dtype="float32")
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    card = evaluate_reward_model(model, held_out, train=train, eos_ids=(eos,), micro_batch_size=8, dtype="float32")
    assert card.n == len(held_out) == 12
    assert set(card.baselines) == {"longer_wins", "bag_of_words"}
    assert abs(card.score_mean) < 3


@pytest.mark.slow
def test_an_ensemble_on_smollm2_as_published(tmp_path: Path, shared: Path) -> None:
    """Two heads on one backbone, three steps on human pairs: trained, calibrated, exported, and on a report card."""
    folders = [folder / "models" / "smollm2-135m-instruct" for folder in (ROOT, shared)]
    model = next(folder for folder in folders if folder.is_dir())
    pairs = shared / "data" / "human_pairs"
    overrides = [
        f"run.out_dir={tmp_path / 'rm'}",
        f"model.model={model}",
        f"data.preferences.path={pairs / 'train.jsonl.gz'}",
        f"data.eval_preferences.path={pairs / 'test.jsonl.gz'}",
        *(f"data.{side}.max_tokens=96" for side in ("preferences", "eval_preferences")),
        *(f"data.{side}.limit={limit}" for side, limit in (("preferences", 24), ("eval_preferences", 12))),
        "ensemble=2",
        "schedule={steps: 3, epochs: null, warmup_steps: 0}",
        "batch={prompts_per_step: 4, micro_batch_size: 2}",
        "calibration.limit=8",
    ]
    assert run_reward_model(load_reward_model(ROOT / "configs" / "real" / "rm_smollm2_hh.yaml", overrides), quiet())
    rows = [json.loads(line) for line in (tmp_path / "rm" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 3
    assert rows[-1]["rm/disagreement"] > 0
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm" / "model")
    assert exported.score.weight.shape == (2, 576)
    card = json.loads((tmp_path / "rm" / "report_card.json").read_text())["ensemble"]
    assert card["members"] == 2
    assert -1 <= card["gap_correlation"] <= 1

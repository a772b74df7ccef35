"""Ensembles trained in one run, on one backbone or on several; runs that start from reward models; PPO against them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import largest_difference, make_model, pairs_file, ppo_tree, quiet, trained, weights, write_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf.api.training import run_reward_model
from rlhf.comparison.costs import count_source_parameters
from rlhf.config.files import merge
from rlhf.config.load import validate
from rlhf.config.sections import RewardModelConfig
from rlhf.data.paths import missing_model
from rlhf.errors import ConfigError, ModelError
from rlhf.factory.reward_card import compute_report_card, score_gaps
from rlhf.factory.reward_model import build_reward_model
from rlhf.models.folders import member_folders, model_folder, scoring_folder
from rlhf.models.scalar_head import as_ensemble, load_scalar_head
from rlhf.models.step_model import save_step_model
from rlhf.rewards.model import ModelSource
from rlhf.training.offline import train_offline


def tree(folder: Path, name: str = "rm", **changes: Any) -> dict[str, Any]:
    if not (folder / "model").is_dir():
        make_model(folder / "model")
    settings: dict[str, Any] = {
        "run": {"out_dir": str(folder / name), "device": "cpu"},
        "data": {
            "preferences": {"path": str(pairs_file(folder, count=48))},
            "eval_preferences": {"path": str(pairs_file(folder, count=24, seed=1))},
        },
        "model": {"model": str(folder / "model"), "lr": 1e-2},
        "batch": {"prompts_per_step": 8, "micro_batch_size": 4},
        "schedule": {"steps": 6, "epochs": None},
        "checkpoint": {"every": 2},
        "ensemble": 2,
    }
    return merge(settings, changes)


def config(settings: dict[str, Any]) -> RewardModelConfig:
    return validate(RewardModelConfig, settings)


def fitted(folder: Path, name: str, *, until: int) -> dict[str, torch.Tensor]:
    built = build_reward_model(config(tree(folder, name, schedule={"steps": until})), quiet())
    train_offline(built.run)
    built.run.session.recorder.close()
    return weights(built.model)


def test_a_resumed_ensemble_is_the_uninterrupted_one_bitwise(tmp_path: Path) -> None:
    whole = fitted(tmp_path, "a", until=6)
    fitted(tmp_path, "b", until=4)
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-000004")
    assert largest_difference(whole, fitted(tmp_path, "b", until=6)) == 0.0
    last = [(tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1] for name in "ab"]
    assert last[0] == last[1]
    assert json.loads(last[0])["rm/disagreement"] > 0


def ppo_metrics(folder: Path, **source: Any) -> dict[str, Any]:
    """The last step of PPO against the reward model in folder/rm."""
    settings = ppo_tree(folder, schedule={"steps": 2}, checkpoint={"every": 0}, eval={"every": 0})
    settings["reward"] = {"source": {"type": "model", "path": str(folder / "rm"), **source}}
    trained(merge(settings, {"critic": {"init": "auto"}}))
    line: dict[str, Any] = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    return line


def test_heads_on_one_backbone_from_pairs_to_ppo(tmp_path: Path) -> None:
    assert run_reward_model(config(tree(tmp_path)), quiet())
    card = json.loads((tmp_path / "rm" / "report_card.json").read_text())
    assert card["ensemble"]["members"] == 2
    assert set(card["ensemble"]["member_accuracy"]) == {"member 0", "member 1"}
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm" / "model")
    assert exported.config.num_labels == 2
    line = ppo_metrics(tmp_path, how="mean_minus_std", std_coef=0.5)
    assert line["score/disagreement"] > 0
    mean = (line["part/member.0/mean"] + line["part/member.1/mean"]) / 2
    assert line["score/raw"] == pytest.approx(mean - 0.5 * line["score/disagreement"], abs=1e-5)


def test_separate_backbones_from_pairs_to_ppo(tmp_path: Path) -> None:
    settings = tree(tmp_path, ensemble={"size": 2, "backbone": "separate"}, schedule={"steps": 3})
    assert run_reward_model(config(settings), quiet())
    first, second = member_folders(str(tmp_path / "rm"))
    models = [AutoModelForSequenceClassification.from_pretrained(folder / "model") for folder in (first, second)]
    assert all(model.config.num_labels == 1 for model in models)
    assert not torch.equal(models[0].score.weight, models[1].score.weight)
    card = json.loads((tmp_path / "rm" / "report_card.json").read_text())
    assert card["ensemble"]["members"] == 2
    gaps = [score_gaps(config(settings), str(folder))[1] for folder in (first, second)]
    wins = [0.5 * ((a + b > 0) + (a + b >= 0)) for a, b in zip(*gaps, strict=True)]
    assert (card["accuracy"], card["n"]) == (pytest.approx(sum(wins) / len(wins)), len(wins))
    assert card["accuracy_low"] <= card["accuracy"] <= card["accuracy_high"]
    alone = merge(settings, {"run": {"out_dir": str(tmp_path / "alone")}, "ensemble": {"member": 1}})
    assert run_reward_model(config(alone), quiet())
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "alone" / "model")
    assert largest_difference(models[1].state_dict(), again.state_dict()) == 0.0
    line = ppo_metrics(tmp_path, how="minimum")
    members = [line["part/member.0/mean"], line["part/member.1/mean"]]
    assert line["score/disagreement"] > 0
    assert line["score/raw"] <= min(members) + 1e-6


def test_margins_that_no_pair_has_are_not_ignored(tmp_path: Path) -> None:
    wanted = {"loss": {"use_margin": True}, "ensemble": 1}
    with pytest.raises(ConfigError, match=r"no pair of data\.preferences has a margin"):
        build_reward_model(config(tree(tmp_path, **wanted)), quiet())
    rows = [{"prompt": f"t{i}", "chosen": " t1", "rejected": " t2", "margin": i % 2} for i in range(20)]
    data = {"preferences": {"path": str(write_rows(tmp_path / "margins.jsonl", rows))}}
    build_reward_model(config(tree(tmp_path, data=data, **wanted)), quiet())


def test_margins_that_no_source_has_are_not_ignored(tmp_path: Path) -> None:
    rows = [{"prompt": f"t{i}", "chosen": " t1", "rejected": " t2"} for i in range(20)]
    paths = {name: str(write_rows(tmp_path / f"{name}.jsonl", rows)) for name in "ab"}
    wanted = {"loss": {"use_margin": True}}

    def settings(name: str) -> RewardModelConfig:
        mixture = {"sources": {source: {"path": path} for source, path in paths.items()}, "path": ""}
        return config(tree(tmp_path, data={"preferences": mixture}, run={"out_dir": str(tmp_path / name)}, **wanted))

    with pytest.raises(ConfigError, match=r"no pair of data\.preferences has a margin"):
        build_reward_model(settings("none"), quiet())
    paths["b"] = str(write_rows(tmp_path / "margins.jsonl", [{**row, "margin": 1.0} for row in rows]))
    build_reward_model(settings("one"), quiet())


def test_how_needs_an_ensemble(tmp_path: Path) -> None:
    assert run_reward_model(config(tree(tmp_path, ensemble=1, schedule={"steps": 2})), quiet())
    with pytest.raises(ConfigError, match="is one reward model, not an ensemble"):
        ppo_metrics(tmp_path, how="minimum")


@pytest.mark.parametrize(
    "ensemble, message",
    [
        ({"size": 2, "vary": ["order"]}, "heads on one backbone see the same batches"),
        ({"size": 2, "vary": []}, "all members would be the same"),
        ({"size": 2, "member": 1}, "needs backbone=separate"),
        ({"size": 2, "backbone": "separate", "member": 2}, "needs backbone=separate and a size above it"),
        (0, "greater than or equal to 1"),
    ],
)
def test_ensembles_that_cannot_work_are_refused(ensemble: object, message: str) -> None:
    settings = {"data": {"preferences": {"path": "x"}}, "model": {"model": "m"}, "ensemble": ensemble}
    with pytest.raises(ConfigError, match=message):
        config(settings)


def test_several_rewards_and_a_watching_judge_in_one_run(tmp_path: Path) -> None:
    """GRPO on two functions and a rule by GDPO, and a judge that is never trained on."""
    settings = ppo_tree(
        tmp_path,
        schedule={"steps": 2},
        checkpoint={"every": 0},
        eval={"every": 0},
        batch={"prompts_per_step": 8, "epochs": 1, "minibatches": 1},
    )
    function = settings["reward"]["source"]
    judge = {"type": "function", "target": function["target"].replace("count_good", "count_words")}
    rules = {"type": "rules", "rules": [{"type": "repetition", "n": 1}]}
    settings["reward"] = {
        "source": {"type": "ensemble", "how": "gdpo", "names": ["good", "fresh"], "sources": [function, rules]},
        "watch": {"source": judge, "rows": 8},
    }
    settings["algorithm"] = {"preset": "grpo", "advantage": {"baseline": "centered"}}
    del settings["critic"]
    trained(merge(settings, {"sampling": {"completions_per_prompt": 4}}))
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["score/mean"] == pytest.approx(0.0, abs=1e-6)
    assert line["part/weighted_sum/mean"] == pytest.approx(line["part/good/mean"] + line["part/fresh/mean"], abs=1e-6)
    assert line["part/fresh/repetition/mean"] == pytest.approx(-line["part/fresh/mean"], abs=1e-6)
    assert line["part/good/applicable"] == 1.0
    assert 0 <= line["watch/score"] <= 6
    assert line["watch/failed"] == 0.0
    with pytest.raises(ConfigError, match="the advantage must only center"):
        trained(merge(settings, {"algorithm": {"advantage": {"baseline": "normalized"}}}))


def test_the_report_card_is_of_the_model_as_it_was_exported(tmp_path: Path) -> None:
    """Weights that are stored in bfloat16 lose most of a small step: the card must not include the lost part."""
    settings = tree(tmp_path, model={"lr": 1e-5, "export_dtype": "bfloat16"}, ensemble=1, schedule={"steps": 1})
    run = config(settings)
    assert run_reward_model(run, quiet())
    card = json.loads((tmp_path / "rm" / "report_card.json").read_text())
    exported = compute_report_card(run, str(tmp_path / "rm"))
    assert {name: card[name] for name in ("accuracy", "loss")} == {
        name: exported[name] for name in ("accuracy", "loss")
    }


def reward_model(folder: Path, name: str, *, mean: float, std: float) -> Path:
    """Save a reward model over folder/model, with a random head and this calibration."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = load_scalar_head(str(folder / "model"), tokenizer, new_head="normal", seed=1)
    model.calibrate(mean, std)
    model.save(tokenizer, folder / name)
    return folder / name


def loss_by_hand(model: Path, pairs: Path) -> float:
    """The mean of -log σ(gap) over a file of pairs, for the raw scores that transformers computes."""
    plain, tokenizer = AutoModelForSequenceClassification.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    losses = []
    for row in map(json.loads, pairs.read_text().splitlines()):
        raw = []
        for side in ("chosen", "rejected"):
            ids = tokenizer(row["prompt"]).input_ids + tokenizer(row[side]).input_ids + [tokenizer.eos_token_id]
            with torch.no_grad():
                raw.append(plain.score(plain.base_model(torch.tensor([ids])).last_hidden_state[0, -1]))
        losses.append(-torch.nn.functional.logsigmoid(raw[0] - raw[1]).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "changes",
    [
        {"ensemble": 1},
        {"ensemble": 1, "model": {"lora": {"r": 2}}},
        {"ensemble": 2},
        {"ensemble": {"size": 2, "backbone": "separate", "member": 1}},
    ],
    ids=["whole", "lora", "shared", "separate"],
)
def test_a_run_that_starts_from_a_calibrated_reward_model_trains_raw_scores(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    metrics, cards = [], []
    for name, mean, std in (("raw", 0.0, 1.0), ("calibrated", 0.5, 0.05)):
        settings = tree(tmp_path, f"rm-{name}", schedule={"steps": 2}, eval={"every": 1})
        start = reward_model(tmp_path, name, mean=mean, std=std)
        assert run_reward_model(config(merge(settings, {**changes, "model": {"model": str(start)}})), quiet())
        run = tmp_path / f"rm-{name}"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        metrics.append([{key: value for key, value in line.items() if "time" not in key} for line in lines])
        cards.append(json.loads((run / "report_card.json").read_text()))
    assert metrics[0] == metrics[1]
    assert cards[0]["loss"] == cards[1]["loss"]
    if changes == {"ensemble": 1}:
        expected = loss_by_hand(tmp_path / "calibrated", tmp_path / "pairs-1.jsonl")
        assert metrics[1][0]["eval/rm_loss"] == pytest.approx(expected, rel=1e-5)
        assert cards[1]["loss"] == pytest.approx(metrics[1][-1]["eval/rm_loss"], rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"model": {"lora": {"r": 2}}}], ids=["whole", "lora"])
def test_a_run_without_calibration_exports_raw_scores_and_resumes_bitwise(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """The calibration of the model that it starts from belongs to the weights before training."""
    settings = merge(tree(tmp_path, "whole", ensemble=1, calibration={"data": "none"}), changes)
    settings["model"]["model"] = str(reward_model(tmp_path, "start", mean=0.5, std=0.05))
    assert run_reward_model(config(settings), quiet())
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole" / "model").config
    assert (exported.score_mean, exported.score_std) == (0.0, 1.0)

    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "model")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000006")
    assert run_reward_model(config(merge(settings, {"run": {"out_dir": str(tmp_path / "parts")}})), quiet())
    for file in ("model.safetensors", "config.json"):
        whole, parts = ((tmp_path / name / "model" / file).read_bytes() for name in ("whole", "parts"))
        assert whole == parts


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("lora", [None, {"r": 2}])
@pytest.mark.parametrize("kind", ["ensemble", "process"])
def test_heads_that_are_not_trained_further_are_refused(
    kind: str, lora: dict[str, int] | None, size: int, tmp_path: Path
) -> None:
    settings = tree(tmp_path, ensemble=size, model={"lora": lora})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = load_scalar_head(str(tmp_path / "model"), tokenizer, new_head="normal")
    start = tmp_path / "start" / "model"
    (tmp_path / "start" / "checkpoints").mkdir(parents=True)  # a run, whose model must not be called damaged
    if kind == "process":
        save_step_model(model, tokenizer, start, separator=" red")
    else:
        as_ensemble(model, size=3, seed=0, same_head=False).save(tokenizer, start)
    settings["model"]["model"] = str(tmp_path / "start")
    with pytest.raises(ModelError, match=r"whose heads are not trained further: name") as error:
        build_reward_model(config(settings), quiet())
    assert "damaged" not in str(error.value)


def test_the_best_checkpoint_of_a_calibrated_model_is_no_judge(tmp_path: Path) -> None:
    """It has the scores before calibration; the run's own model has the best weights and is calibrated."""
    settings = tree(tmp_path) | {"ensemble": 1, "checkpoint": {"best": {}}, "eval": {"every": 2}}
    run_reward_model(config(settings), quiet())
    best = f"{tmp_path / 'rm'}@best"
    assert missing_model(best) is None
    assert Path(model_folder(best)).is_dir()
    with pytest.raises(ModelError, match=r"not calibrated\. Name .*rm, whose model is this checkpoint, calibrated"):
        scoring_folder(best)
    assert "has kept no best checkpoint" in str(missing_model(f"{tmp_path / 'other'}@best"))
    raw = settings | {"calibration": {"data": "none"}, "run": settings["run"] | {"out_dir": str(tmp_path / "raw")}}
    run_reward_model(config(raw), quiet())
    assert Path(scoring_folder(f"{tmp_path / 'raw'}@best")).is_dir()


def test_an_adapter_is_counted_with_its_base(tmp_path: Path) -> None:
    counts = []
    for kind in ("merged", "adapter"):
        settings = tree(tmp_path, kind) | {"ensemble": 1, "schedule": {"steps": 1, "epochs": None}}
        settings["model"] |= {"lora": {"r": 2}, "export": kind}
        run_reward_model(config(settings), quiet())
        counts.append(count_source_parameters(ModelSource(path=str(tmp_path / kind))))
    assert counts[0] <= counts[1] < 2 * counts[0]

"""The weights that a run folder stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhf.config.files import format_yaml
from rlhf.errors import ModelError
from rlhf.models.folders import model_folder
from rlhf.tracking.checkpoint import write_manifest
from rlhf.tracking.run_folder import RunFolder


def ended_run(folder: Path, best: dict[str, bool] | None) -> Path:
    """A run that ended at step 4, whose best checkpoint is of step 2, without its model."""
    for place in ("checkpoints/step-000002", "checkpoints/step-000004", "best/step-000002"):
        (folder / place / "model").mkdir(parents=True)
        (folder / place / "model" / "weights").write_text(place)
        write_manifest(folder / place)
    (folder / "config.yaml").write_text(format_yaml({"checkpoint": {"best": best}}))
    RunFolder(folder).write_complete(4)
    return folder


@pytest.mark.parametrize(
    "best, place",
    [
        ({"restore": True}, "best/step-000002"),
        ({"restore": False}, "checkpoints/step-000004"),
        (None, "checkpoints/step-000004"),
    ],
)
def test_an_ended_run_without_its_model_is_the_checkpoint_that_it_exported(
    tmp_path: Path, best: dict[str, bool] | None, place: str
) -> None:
    run = ended_run(tmp_path, best)
    assert model_folder(str(run)) == str(run / place / "model")
    (run / "model").mkdir()
    assert model_folder(str(run)) == str(run / "model")


@pytest.mark.parametrize("best, kept", [({"restore": True}, "best"), (None, "last")])
def test_no_other_checkpoint_takes_the_place_of_a_model_that_is_gone(
    tmp_path: Path, best: dict[str, bool] | None, kept: str
) -> None:
    run = ended_run(tmp_path, best)
    folder = run / "best" if best else run / "checkpoints" / "step-000004"
    for file in folder.rglob("weights"):
        file.write_text("damaged")
    message = f"has ended, but its model/ is gone, and the {kept} checkpoint is gone or damaged: put model/ back"
    with pytest.raises(ModelError, match=message):
        model_folder(str(run))
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "best")
    with pytest.raises(ModelError, match=message):
        model_folder(str(run))


def test_a_run_that_goes_on_is_its_newest_checkpoint(tmp_path: Path) -> None:
    run = ended_run(tmp_path, {"restore": True})
    (run / "complete.json").write_text(json.dumps({"step": 2}))  # it went on from there to step 4
    assert model_folder(str(run)) == str(run / "checkpoints" / "step-000004" / "model")
    (run / "complete.json").unlink()
    assert model_folder(str(run)) == str(run / "checkpoints" / "step-000004" / "model")


def test_the_last_checkpoint_is_not_taken_for_an_average_of_weights(tmp_path: Path) -> None:
    run = ended_run(tmp_path, None)
    config = run / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8") + "policy: {ema_decay: 0.9}\n", encoding="utf-8")
    with pytest.raises(ModelError, match="the last checkpoint does not have the averaged weights: put model/ back"):
        model_folder(str(run))


@pytest.mark.parametrize("best, kept", [({"restore": True}, "best"), (None, "last")])
def test_no_checkpoint_is_taken_for_a_calibrated_reward_model(
    tmp_path: Path, best: dict[str, bool] | None, kept: str
) -> None:
    run = ended_run(tmp_path, best)
    config = run / "config.yaml"
    before = config.read_text(encoding="utf-8")
    for none in ("calibration: {data: none}\n", "calibration: {data: both}\nprocess: {separator: ' '}\n"):
        config.write_text(before + none, encoding="utf-8")
        assert model_folder(str(run)).startswith(str(run))
    config.write_text(before + "calibration: {data: both}\nprocess: null\n", encoding="utf-8")
    with pytest.raises(ModelError, match=f"the {kept} checkpoint is not calibrated: put model/ back, or train"):
        model_folder(str(run))

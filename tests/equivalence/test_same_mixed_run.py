"""Runs on mixed and streamed data that must be the same run: killed and continued, in parts, measured or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    colored_prompts,
    labelled_file,
    largest_difference,
    make_model,
    offline,
    offline_tree,
    pairs_file,
    ppo_tree,
    trained,
    trained_offline,
    weights,
    write_rows,
    written,
)

from rlhf.api.inputs import Inputs
from rlhf.config.data import OnlineDataConfig
from rlhf.config.files import merge
from rlhf.config.load import load_train, validate
from rlhf.errors import ConfigError, DataError
from rlhf.training.offline import train_offline

BRIEF = {"data": {"eval_prompts": None}, "eval": {"source": None, "every": 0}}
STREAMED = {"stream": True, "shuffle_buffer": 6}


def mixture(folder: Path, section: str, *, stream: bool) -> dict[str, Any]:
    """Two sources, 3 to 1, the second of which ends several times in a run; one line of the first is not JSON."""
    match section:
        case "prompts":
            rows: list[Any] = [{"prompt": prompt} for prompt in colored_prompts()]
        case "sft":
            rows = [{"prompt": p, "completion": c} for p, c in written(5, 60)]
        case _:
            path = pairs_file(folder) if section == "pairs" else labelled_file(folder)
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    large, small = folder / f"{section}-large.jsonl", write_rows(folder / f"{section}-small.jsonl", rows[-5:])
    write_rows(large, rows[:-5])
    large.write_text("{broken\n" + large.read_text(encoding="utf-8"), encoding="utf-8")
    sources = {"large": {"path": str(large), "weight": 3}, "small": {"path": str(small)}}
    return {"sources": sources, **(STREAMED if stream else {})}


def tree_of(kind: str, folder: Path, *, stream: bool = True) -> dict[str, Any]:
    if kind == "ppo":
        tree = ppo_tree(folder, batch={"prompts_per_step": 8, "epochs": 1})
        tree["data"] = {"prompts": mixture(folder, "prompts", stream=stream)}
        return tree
    tree = offline_tree(folder, kind, **BRIEF, batch={"prompts_per_step": 8, "micro_batch_size": 3})
    section = {"sft": "sft", "kto": "labelled"}.get(kind, "pairs")
    tree["data"] = {"sft" if kind == "sft" else "preferences": mixture(folder, section, stream=stream)}
    return tree


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "ppo"])
def test_a_killed_run_on_a_mixed_stream_is_the_uninterrupted_one_bitwise(tmp_path: Path, kind: str) -> None:
    tree, run = tree_of(kind, tmp_path), trained if kind == "ppo" else trained_offline
    whole = run(tree)  # type: ignore[operator]
    folder = tmp_path / "run"
    files = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    last = folder / "checkpoints" / "step-000004"
    assert json.loads((last / "data.json").read_text())  # the positions of the streams
    shutil.rmtree(last)  # as after a kill in step 3: the newest checkpoint is of step 2
    resumed = run(tree)  # type: ignore[operator]
    before, after = (one.models.policy if kind == "ppo" else one.trained.module for one in (whole, resumed))
    assert resumed.session.resumed
    assert largest_difference(weights(before), weights(after)) == 0.0
    assert files == {name: (folder / name).read_bytes() for name in files}
    final = metrics(folder)[-1]
    assert (final["source/rows/large"], final["source/rows/small"]) == (24.0, 8.0)
    assert (final["source/skipped/large"], final["source/skipped/small"]) == (1.0, 0.0)
    measured = "source/score" if kind == "ppo" else "source/loss"
    mean, total = ("score/mean",) * 2 if kind == "ppo" else ("loss/sft", "loss/preference")
    wanted = final.get(mean, final.get(total))
    if kind != "sft":  # of SFT the mean is over tokens
        assert (3 * final[f"{measured}/large"] + final[f"{measured}/small"]) / 4 == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_measuring_each_source_and_the_micro_batch_do_not_change_the_update(tmp_path: Path, kind: str) -> None:
    make_model(tmp_path / "model", dtype=torch.float64)
    tree = merge(tree_of(kind, tmp_path, stream=False), {"policy": {"dtype": "float64", "optimizer": "sgd", "lr": 0.3}})
    final = []
    for micro, apart in ((3, True), (64, True), (64, False)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = offline(tree, f"batch.micro_batch_size={micro}", "schedule.steps=2", "checkpoint.every=0")
        if not apart:
            object.__setattr__(run, "sources", None)
        train_offline(run)
        run.session.recorder.close()
        final.append(weights(run.trained.module))
    assert largest_difference(final[0], final[1]) < 1e-10
    assert largest_difference(final[1], final[2]) < 1e-10


def test_a_run_ends_where_a_source_does(tmp_path: Path) -> None:
    tree = merge(tree_of("sft", tmp_path), {"data": {"sft": {"at_end": "stop"}}})
    run = trained_offline(tree)
    assert run.session.state.step == 2  # two rows of the small source a step, of five
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
    notes = (tmp_path / "run" / "notes.jsonl").read_text(encoding="utf-8")
    assert "data.sft: no more rows in small (at_end: stop)" in notes
    with pytest.raises(DataError, match=r"data\.sft: small has fewer rows than the first step needs"):
        offline(tree, "batch.prompts_per_step=24", f"run.out_dir={tmp_path / 'other'}")


def test_a_mixture_is_set_in_a_file_on_the_command_line_and_from_python(tmp_path: Path) -> None:
    keys = ["data.sft.sources.code.weight=0.5", "data.sft.sources.more.path=m.jsonl", "data.sft.shuffle_buffer=16"]
    data = load_train("configs/mixture.yaml", keys).data.sft
    assert data is not None
    assert {name: source.weight for name, source in data.sources.items()} == {"chat": 3.0, "code": 0.5, "more": 1.0}
    assert data.by_source("sft")["more"].path == "m.jsonl"
    assert (data.stream, data.shuffle_buffer) == (True, 16)
    (only,) = load_train("configs/mixture.yaml", ["data.sft.sources.chat=null"]).data.sft.sources  # type: ignore[union-attr]
    assert only == "code"
    alone = load_train("configs/mixture.yaml", ["data.sft.path=x.jsonl"]).data.sft
    assert alone is not None
    assert (alone.path, alone.sources) == ("x.jsonl", {})
    with pytest.raises(ConfigError, match=r"data\.sft\.sources\.code\.weight"):
        load_train("configs/mixture.yaml", ["data.sft.sources.code.weight=0"])
    with pytest.raises(ConfigError, match=r"data\.sft\.sources\.code\.wieght.*did you mean weight"):
        load_train("configs/mixture.yaml", ["data.sft.sources.code.wieght=2"])
    with pytest.raises(ConfigError, match=r"eval_sft.*set path"):
        load_train("configs/mixture.yaml", ["data.eval_sft.sources.a.path=x.jsonl"])
    inputs = Inputs(tmp_path)
    tree = inputs.rows(
        "prompts", {"a": (["red", "blue"], 3), "b": (({"prompt": p} for p in ("one", "two")), 1)}, text="prompt"
    )
    inputs.write()
    section = validate(OnlineDataConfig, {"prompts": tree}).prompts
    assert {name: (Path(s.path).name, s.weight) for name, s in section.sources.items()} == {
        "a": ("prompts-a.jsonl", 3.0),
        "b": ("prompts-b.jsonl", 1.0),
    }
    assert (tmp_path / "data" / "prompts-b.jsonl").read_text().splitlines() == [
        '{"prompt": "one"}',
        '{"prompt": "two"}',
    ]


def test_a_stream_has_no_epochs(tmp_path: Path) -> None:
    tree = merge(tree_of("sft", tmp_path), {"schedule": {"steps": None, "epochs": 1}})
    with pytest.raises(ConfigError, match=r"schedule\.steps"):
        offline(tree)


def test_other_rows_of_a_stream_are_counted_again(tmp_path: Path) -> None:
    """With other settings other rows are usable: none is left out for good, or asked for though it is not there."""
    long = {"prompt": "red blue good bad one", "completion": "good good good bad bad"}
    rows = [{"prompt": "red", "completion": "good"} if row % 3 else long for row in range(24)]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    tree = offline_tree(tmp_path, "sft", eval={"every": 0}, logging={"every": 1})
    tree["data"]["sft"] = {"path": path, "stream": True, "shuffle_buffer": 8}
    for name, first, then in (("more", 7, 64), ("fewer", 64, 7)):
        settings = merge(tree, {"run": {"out_dir": str(tmp_path / name)}})
        trained_offline(settings, f"data.sft.max_tokens={first}", "schedule.steps=4")
        changed = (f"data.sft.max_tokens={then}", "schedule.steps=12", "checkpoint.resume=always")
        run = trained_offline(settings, *changed)
        assert run.session.state.step == 12
        (checkpoint,) = (tmp_path / name / "checkpoints").glob("*12")
        state = json.loads((checkpoint / "data.json").read_text(encoding="utf-8"))
        assert state["sft"]["sft"]["length"] == {64: 24, 7: 16}[then]


def test_a_fatal_row_of_a_stream_saves_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": "red", "completion": "good"}] * 20
    path = write_rows(tmp_path / "rows.jsonl", rows)
    path.write_text(path.read_text(encoding="utf-8") + "{broken\n", encoding="utf-8")
    tree = offline_tree(tmp_path, "sft", eval={"every": 0}, checkpoint={"every": 0})
    tree["data"]["sft"] = {"path": str(path), "stream": True, "shuffle_buffer": 8, "bad_rows": "error"}
    with pytest.raises(DataError, match=r"not JSON.* without them\. The run is saved at step 2: .* from there"):
        trained_offline(tree, "batch.prompts_per_step=8", "schedule.steps=6")
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


def test_a_fatal_row_of_streamed_prompts_saves_the_run(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in colored_prompts()[:20]])
    path.write_text(path.read_text(encoding="utf-8") + "{broken\n", encoding="utf-8")
    tree = merge(ppo_tree(tmp_path, batch={"prompts_per_step": 8}), {**BRIEF, "checkpoint": {"every": 0}})
    tree["data"]["prompts"] = {"path": str(path), "stream": True, "shuffle_buffer": 8, "bad_rows": "error"}
    with pytest.raises(DataError, match=r"not JSON.* without them\. The run is saved at step 2: .* from there"):
        trained(tree, "schedule.steps=6")
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()

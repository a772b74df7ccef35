"""What cells read: changed weights and data are refused, changed code is a warning that stays on the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import Ended, compare_tree, plan_of
from datasets import Dataset
from runs import make_model, write_rows

from rlhf.api.comparing import rebuild_comparison, run_compare
from rlhf.comparison.aggregate import read_cells
from rlhf.comparison.inputs import INPUTS, Digests, check_inputs, read_inputs, record_inputs
from rlhf.comparison.plan import Cell
from rlhf.comparison.results import ComparisonResults
from rlhf.comparison.trial import JUDGED, Judgment, record_failure, suite_file
from rlhf.comparison.view import ComparisonView
from rlhf.config.load import compare_config
from rlhf.errors import ConfigError, UserError
from rlhf.models.folders import digest_of_model
from rlhf.tracking.fingerprint import combine_digests, content_digest
from rlhf.tracking.view import View

ROWS = [{"row": row, "prompt": f"red {row}", "completion": "good", "score": 1.0 + row, "length": 1} for row in range(3)]
JUDGE = "def judge(completions):\n    return [float(len(text)) for text in completions]\n"


class Listening(View):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def judged(cell: Cell, place: int) -> Ended:
    Judgment({"eval/score": 2.0}, ROWS).write(cell.folder)
    return Ended("done")


def run(tree: dict[str, Any], start: Callable[[Cell, int], Ended] = judged) -> list[str]:
    """Run the cells with made-up judgments; return the warnings."""
    view = Listening()
    assert run_compare(compare_config(tree), beside=Path(), view=ComparisonView(view), start=start)
    return view.warnings


def tree_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """grpo and dpo over one seed, with a judge in a file of its own and held-out prompts in another."""
    (folder / "judge.py").write_text(JUDGE)
    held_out = write_rows(folder / "held_out.jsonl", [{"prompt": f"red {row}"} for row in range(3)])
    tree = compare_tree(
        folder,
        seeds=[0],
        judge={"type": "function", "target": f"{folder / 'judge.py'}:judge"},
        shared={"data": {"eval_prompts": {"path": str(held_out)}}},
        **changes,
    )
    tree["arms"] = {name: tree["arms"][name] for name in ("grpo", "dpo")}
    return tree


def append_row(path: Path, row: dict[str, Any]) -> None:
    path.write_text(f"{path.read_text(encoding='utf-8')}{json.dumps(row)}\n", encoding="utf-8")


def results_of(folder: Path) -> ComparisonResults:
    return ComparisonResults.read(folder / "compare")


def test_each_cell_records_what_it_reads(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    run(tree)
    start, grpo, dpo = (read_inputs(cell.folder) for cell in plan_of(tree).cells)
    model, held_out = str(tmp_path / "model"), str(tmp_path / "held_out.jsonl")
    assert start["weights"] == grpo["weights"] == dpo["weights"] == {model: digest_of_model(model)}
    assert start["data"] == {held_out: combine_digests([content_digest(Path(held_out))])}
    assert {Path(path).name for path in grpo["data"]} == {"prompts.jsonl", "held_out.jsonl"}
    assert {Path(path).name for path in dpo["data"]} == {"pairs.jsonl", "held_out.jsonl"}
    for inputs in (start, grpo, dpo):
        assert {Path(path).name for path in inputs["code"]} == {"judge.py", "word_rewards.py"}


def test_another_start_model_at_the_same_path_is_refused(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    run(tree)
    make_model(tmp_path / "model", seed=1)
    before = (tmp_path / "compare" / "compare.yaml").read_bytes()
    told = rf"weights in {tmp_path / 'model'} have changed since start, seed 0, ran.* restore .* choose another out_dir"
    with pytest.raises(ConfigError, match=told):
        run({**tree, "seeds": [0, 1]})
    assert (tmp_path / "compare" / "compare.yaml").read_bytes() == before
    make_model(tmp_path / "model", seed=0)
    assert run({**tree, "seeds": [0, 1]}) == []


@pytest.mark.parametrize("name", ["prompts.jsonl", "held_out.jsonl", "pairs.jsonl"])
def test_other_rows_at_the_same_path_are_refused(tmp_path: Path, name: str) -> None:
    tree = tree_of(tmp_path)
    run(tree)
    append_row(tmp_path / name, {"prompt": "blue one", "chosen": " good", "rejected": " bad"})
    with pytest.raises(ConfigError, match=rf"rows in {tmp_path / name} have changed since (start|grpo|dpo), seed 0"):
        run({**tree, "seeds": [0, 1]})


def test_data_that_no_further_cell_reads_may_change(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    run(tree)
    append_row(tmp_path / "pairs.jsonl", {"prompt": "blue one", "chosen": " good", "rejected": " bad"})
    assert run({**tree, "arms": {**tree["arms"], "more": tree["arms"]["grpo"]}}) == []


def test_the_data_of_an_arm_that_failed_may_be_repaired(tmp_path: Path) -> None:
    def fail(cell: Cell, place: int) -> Ended:
        if cell.arm != "dpo":
            return judged(cell, place)
        record_failure(cell.folder, "pairs.jsonl: no usable row")
        return Ended("failed")

    tree = tree_of(tmp_path)
    run(tree, fail)
    append_row(tmp_path / "pairs.jsonl", {"prompt": "blue one", "chosen": " good", "rejected": " bad"})
    assert run(tree) == []
    assert results_of(tmp_path).arms["dpo"].status == "done"


def test_another_judge_in_the_same_file_is_a_warning_that_stays(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    assert run(tree) == []
    (tmp_path / "judge.py").write_text(JUDGE.replace("float(", "2.0 + float("))
    assert run(tree) == []  # nothing is left to judge
    more = dict.fromkeys(("more", "most"), tree["arms"]["grpo"])
    (warning,) = run({**tree, "arms": {**tree["arms"], **more}})
    assert warning.startswith(f"the code in {tmp_path / 'judge.py'} has changed since start, seed 0, ran")
    (note,) = results_of(tmp_path).notes
    assert note.startswith(
        f"more, seed 0; most, seed 0: ran with other code in {tmp_path / 'judge.py'} than start, seed 0"
    )
    rebuilt, page = rebuild_comparison(str(tmp_path / "compare"))
    assert rebuilt.notes == (note,)
    assert "ran with other code in" in page.read_text(encoding="utf-8")


def test_a_folder_without_digests_continues(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    run(tree)
    for path in (tmp_path / "compare").glob(f"*/*/{INPUTS}"):
        path.unlink()
    make_model(tmp_path / "model", seed=1)
    assert run({**tree, "seeds": [0, 1]}) == []
    assert results_of(tmp_path).notes == ()


def test_cells_of_other_weights_are_not_averaged(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    run(tree)
    cell = plan_of(tree).of("grpo")[0]
    path = cell.folder / INPUTS
    path.write_text(path.read_text().replace(str(digest_of_model(str(tmp_path / "model"))), "another"))
    (result,) = [result for result in read_cells(plan_of(tree)) if result.cell.arm == "grpo"]
    assert result.status == "failed"
    assert f"the weights in {tmp_path / 'model'} were not the same as for start, seed 0" in (result.error or "")


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, read = tree_of(tmp_path), list[str]()
    monkeypatch.setattr("rlhf.comparison.inputs.digest_of_model", lambda path: read.append(path) or "same")
    digests = Digests()
    for cell in plan_of({**tree, "seeds": [0, 1]}).cells:
        digests.of(cell.config)
    assert read == [str(tmp_path / "model")]


def test_a_folder_of_data_has_the_digest_of_the_files_that_are_read(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    nested = tmp_path / "rows" / "data"
    nested.mkdir(parents=True)
    (tmp_path / "held_out.jsonl").rename(nested / "train.jsonl")
    tree["shared"]["data"]["eval_prompts"] = {"path": str(tmp_path / "rows")}
    start = plan_of(tree).cells[0].config
    before = Digests().of(start)["data"]
    write_rows(nested / "test.jsonl", [{"prompt": "other"}])  # of another split, and outputs beside the rows
    write_rows(tmp_path / "rows" / "runs.txt", [{"a": 1}])
    assert Digests().of(start)["data"] == before
    append_row(nested / "train.jsonl", {"prompt": "blue one"})
    after = Digests().of(start)["data"]
    assert before.keys() == after.keys() == {f"{tmp_path / 'rows'}, split train"}
    assert before != after


def test_a_saved_data_set_has_the_digest_of_its_own_files(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    saved = tmp_path / "saved"
    Dataset.from_list([{"prompt": "red one"}]).save_to_disk(saved)
    tree["shared"]["data"]["eval_prompts"] = {"path": str(saved)}
    start = plan_of(tree).cells[0].config
    before = Digests().of(start)["data"]
    (saved / "cache-1.arrow").write_bytes(b"of a map")
    assert Digests().of(start)["data"] == before
    Dataset.from_list([{"prompt": "blue one"}]).save_to_disk(saved)
    assert Digests().of(start)["data"] != before


def test_a_cell_that_goes_on_keeps_its_digests_if_the_start_model_is_gone(tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    run(tree)
    cell = next(cell for cell in plan_of(tree).cells if cell.arm == "grpo")
    before = read_inputs(cell.folder)
    (cell.folder / JUDGED).unlink()
    (cell.folder / "checkpoints").mkdir()
    (tmp_path / "model" / "model.safetensors").unlink()
    run(tree)
    assert read_inputs(cell.folder) == before


def test_the_rows_of_a_suite_have_to_stay(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "problems.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    tree = tree_of(tmp_path, suites={"gsm8k": {"dataset": {"path": str(rows)}}})
    cells = plan_of(tree).cells
    assert str(rows) in Digests().of(cells[0].config)["data"]
    for cell in cells:
        cell.folder.mkdir(parents=True)
        record_inputs(cell, Digests())
    append_row(rows, {"question": "1 + 2?", "answer": "#### 3"})
    with pytest.raises(ConfigError, match=rf"rows in {rows} have changed since start, seed 0"):
        check_inputs(cells, plan_of({**tree, "seeds": [0, 1]}).cells, Digests())


def test_the_rows_of_a_suite_that_is_added_have_to_stay_too(tmp_path: Path) -> None:
    """The start model's answers are taken from its first seed, so other rows would be paired with them row by row."""

    def measured(cell: Cell, place: int) -> Ended:
        for name, settings in cell.config.suites.items():
            path = suite_file(cell.folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            figures = {"pass_at_1": {"value": 1.0}}
            path.write_text(json.dumps({"config": settings, "figures": figures, "rows": {}}), encoding="utf-8")
        return judged(cell, place)

    rows = write_rows(tmp_path / "problems.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    tree = tree_of(tmp_path)
    run(tree)
    before = read_inputs(plan_of(tree).cells[0].folder)
    tree["suites"] = {"gsm8k": {"dataset": {"path": str(rows)}}}
    run(tree, measured)
    after = read_inputs(plan_of(tree).cells[0].folder)
    assert after["data"] == {**before["data"], str(rows): combine_digests([content_digest(rows)])}
    append_row(rows, {"question": "1 + 2?", "answer": "#### 3"})
    with pytest.raises(ConfigError, match=rf"rows in {rows} have changed since start, seed 0"):
        run({**tree, "seeds": [0, 1]}, measured)


def test_rows_of_an_added_suite_that_fails_may_be_repaired(tmp_path: Path) -> None:
    def fail(cell: Cell, place: int) -> Ended:
        record_failure(cell.folder, "suites.gsm8k: no usable row")
        return Ended("failed")

    rows = write_rows(tmp_path / "problems.jsonl", [{"question": "1 + 1?"}])
    tree = tree_of(tmp_path)
    run(tree)
    tree["suites"] = {"gsm8k": {"dataset": {"path": str(rows)}}}
    with pytest.raises(UserError, match="no usable row"):
        run(tree, fail)
    append_row(rows, {"question": "1 + 2?", "answer": "#### 3"})
    assert run(tree) == []

"""All judged rows in the page of a comparison: which rows it has, that their text stays text, and choosing one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, after
from many import PROMPTS, many

from rlhf.comparison.aggregate import CellResult
from rlhf.comparison.page import comparison_charts, write_compare_page
from rlhf.comparison.rows import browser_data, divide_limit
from rlhf.comparison.trial import Judgment, SuiteScores
from rlhf.config.compare import START_FOLDER
from rlhf.tracking.progress import printable

NASTY = "</script><script>document.title='owned'</script> <img src=x onerror=alert(1)> <!-- & 'q' \x1b[31m \ud800"


def with_rows(result: CellResult, **changes: str) -> CellResult:
    """The cell with changed records, in which {cell} and {row} stand for the cell and the number of the row."""
    assert result.judged is not None
    rows = [
        {**record, **{key: _filled(text, result.cell.label, record["row"]) for key, text in changes.items()}}
        for record in result.judged.rows
    ]
    return replace(result, judged=Judgment(result.judged.metrics, rows))


def _filled(text: str, cell: str, row: int) -> str:
    return text.replace("{cell}", cell).replace("{row}", str(row))


def embedded(page: Path) -> list[dict[str, Any]]:
    """The sources of the page's block of rows."""
    (block,) = re.findall(r'<script type="application/json" id="rows-data">(.*?)</script>', page.read_text(), re.DOTALL)
    sources: list[dict[str, Any]] = json.loads(block)
    return sources


def texts_of(source: dict[str, Any], seed: int) -> dict[str, list[Any]]:
    """The texts of a seed by arm; None for a prompt that the arm lacks."""
    (of_seed,) = (entry for entry in source["seeds"] if entry["seed"] == seed)
    return {arm["arm"]: [row and row[0] for row in arm["rows"]] for arm in of_seed["arms"]}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan, results, cells = many(tmp_path_factory.mktemp("rows"), count=4, seeds=2)
    cells = [with_rows(result, completion="{cell} answers {row} " + NASTY) for result in cells]
    plan.folder.mkdir(parents=True, exist_ok=True)
    return write_compare_page(plan, results, comparison_charts(results), cells)


def test_the_page_has_every_row_of_every_seed(page: Path) -> None:
    (source,) = embedded(page)
    assert (source["name"], source["file"]) == ("held-out prompts", "ARM/seed-N/judged.json")
    assert len(source["prompts"]) == 1  # both seeds have the same ones
    assert source["prompts"][0] == [f"A review of the restaurant, number {row}:" for row in range(PROMPTS)]
    for entry in source["seeds"]:
        assert entry["total"] == PROMPTS
        texts = texts_of(source, entry["seed"])
        assert list(texts) == [START_FOLDER, "ppo", "grpo", "dpo", "best_of_n"]
        for arm, of_arm in texts.items():
            labels = [text.split(" answers ")[0] for text in of_arm]
            assert len(set(labels)) == 1
            assert str(entry["seed"]) in labels[0]
            assert arm in labels[0]
            assert [text.split(" answers ")[1].split()[0] for text in of_arm] == list(map(str, range(PROMPTS)))


def test_values_stand_below_a_completion_as_in_the_table_above(page: Path) -> None:
    arm = embedded(page)[0]["seeds"][0]["arms"][1]
    assert arm["names"] == ["score", "KL", "tokens"]
    above = re.findall(r"<span>score <b>([^<]+)</b>", page.read_text())
    assert above[1] == arm["rows"][0][1]  # the start model's comes first


def test_a_completion_cannot_leave_the_block_of_rows(page: Path) -> None:
    text = page.read_text()
    assert "document.title='owned'" not in text
    assert "<img" not in text
    assert "\x1b" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    shown = texts_of(embedded(page)[0], 1)["dpo"][3]
    assert shown.endswith(printable(NASTY))


def test_episodes_keep_who_wrote_what(tmp_path: Path) -> None:
    _, _, cells = many(tmp_path, count=4, seeds=1)
    turns = [{"by": "environment", "text": "guess"}, {"by": "policy", "text": "five", "turn": 1, "reward": 0.5}]
    judged = cells[0].judged
    assert judged is not None
    rows = [{**record, "turns": turns, "stop": "done"} for record in judged.rows]
    (source,) = browser_data([replace(cells[0], judged=Judgment(judged.metrics, rows))])
    (arm,) = source["seeds"][0]["arms"]
    assert arm["rows"][0][0] == [
        ["environment", "guess", "environment: not learned from"],
        ["policy", "five", "turn 1, reward 0.500"],
    ]
    assert "ended by" in arm["names"]


def test_rows_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    _, _, cells = many(tmp_path, count=4, seeds=2)
    (whole,) = browser_data(cells)
    assert browser_data(cells, limit=len(json.dumps(whole))) == [whole]
    (source,) = browser_data(cells, limit=len(json.dumps(whole)) // 2)
    kept = len(source["prompts"][0])
    assert PROMPTS // 3 < kept < PROMPTS
    for entry in source["seeds"]:
        assert entry["total"] == PROMPTS
        assert {len(arm["rows"]) for arm in entry["arms"]} == {kept}
    assert texts_of(source, 1)["ppo"] == texts_of(whole, 1)["ppo"][:kept]
    assert browser_data(cells, limit=0)[0]["prompts"] == [[]]


def test_a_limit_is_divided_so_that_short_texts_are_whole() -> None:
    assert divide_limit([10, 20, 30], 100) == [10, 20, 30]
    assert divide_limit([90, 10, 80], 100) == [45, 10, 45]
    assert divide_limit([5, 5], 0) == [0, 0]
    assert divide_limit([], 100) == []


def test_prompts_of_a_seed_are_paired_by_their_text(tmp_path: Path) -> None:
    _, _, cells = many(tmp_path, count=4, seeds=1)
    first, second = (with_rows(result, completion="{cell}", prompt="p{row}") for result in cells[:2])
    assert second.judged is not None
    second = replace(second, judged=Judgment({}, [row for row in second.judged.rows if row["row"] != 1]))
    (source,) = browser_data([first, second])
    assert source["prompts"] == [[f"p{row}" for row in range(PROMPTS)]]
    texts = list(texts_of(source, 0).values())
    assert None not in texts[0]
    assert [row for row, text in enumerate(texts[1]) if text is None] == [1]


def test_suites_that_keep_answers_are_sources_too(tmp_path: Path) -> None:
    _, _, cells = many(tmp_path, count=4, seeds=1)
    answers = [{"prompt": "how?", "completion": f"no {i}", "refused": i == 0, "length": None} for i in range(2)]
    pairs = [{"prompt": "p", "completion": "c", "against": "dpo", "other": "d"}]
    several = [{"prompt": "It was", "kind": "x", "completions": ["fine", "bad"], "toxicity": [0.25, 0.5]}]
    examples = {"xstest": answers, "pairs": pairs, "toxicity": several, "blimp": [{"good": "a b", "bad": "b a"}]}
    suites = {name: SuiteScores({}, {}, kept) for name, kept in examples.items()}
    judged, toxicity, xstest = browser_data([cells[0], replace(cells[1], suites=suites)])
    assert (judged["name"], judged["seeds"][0]["total"]) == ("held-out prompts", PROMPTS)
    assert (xstest["name"], xstest["file"]) == ("xstest", "ARM/seed-N/evals/xstest.json")
    assert xstest["prompts"] == [["how?", "how?"]]
    (arm,) = xstest["seeds"][0]["arms"]
    assert arm["arm"] == cells[1].cell.arm
    assert (arm["names"], arm["rows"]) == (["refused"], [["no 0", "yes"], ["no 1", "no"]])
    (arm,) = toxicity["seeds"][0]["arms"]
    assert arm["names"] == ["kind", "toxicity"]
    assert arm["rows"] == [[[["sample", "fine", ""], ["sample", "bad", ""]], "x", "0.250, 0.500"]]


def test_a_cell_that_is_not_finished_shows_no_answers(tmp_path: Path) -> None:
    _, _, cells = many(tmp_path, count=4, seeds=1)
    suites = {"xstest": SuiteScores({}, {}, [{"prompt": "how?", "completion": "no"}])}
    unfinished = replace(cells[1], judged=None, suites=suites)
    assert [source["name"] for source in browser_data([cells[0], unfinished])] == ["held-out prompts"]


SHOWN = """{
    numbers: [...page.querySelectorAll("#rows article")].map((card) => card.dataset.row),
    arms: [...page.querySelectorAll("#rows article:first-child .completion")].map((box) => box.dataset.arm),
    texts: [...page.querySelectorAll("#rows article:first-child .completion .text")].map((text) => text.textContent),
    scores: [...page.querySelectorAll("#rows article:first-child .measures")].map((box) => box.textContent),
    status: page.querySelector("[data-status]").textContent,
    number: page.querySelector("[name=number]").value,
    title: page.title,
    images: page.images.length,
    width: page.documentElement.scrollWidth,
}"""


def choose(name: str, value: object, event: str = "change") -> str:
    """JavaScript that gives a control of the browser a value, as a user does."""
    return (
        f"control = page.querySelector('[name={name}]'); control.value = {json.dumps(value)};"
        f"control.dispatchEvent(new Event('{event}'));"
    )


@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page with")
class TestInABrowser:
    def test_a_chosen_row_shows_the_completion_of_each_arm(self, page: Path, tmp_path: Path) -> None:
        script = f"let control; {choose('number', 17)} {choose('seed', 1)}"
        shown, console = after(page, tmp_path, script=script, expression=SHOWN)
        assert console == []
        assert shown["numbers"] == ["17", "18", "19", "20"]
        assert shown["arms"] == [START_FOLDER, "ppo", "grpo", "dpo", "best_of_n"]
        (source,) = embedded(page)
        assert shown["texts"] == [texts[17] for texts in texts_of(source, 1).values()]
        for arm, measures in zip(source["seeds"][1]["arms"], shown["scores"], strict=True):
            assert f"score {arm['rows'][17][1]}" in measures
        assert shown["status"] == "24 prompts; shown: 17, 18, 19, 20."
        assert shown["title"] == "tiny"
        assert shown["images"] == 0
        assert shown["width"] <= 390

    def test_a_text_is_searched_in_prompts_and_completions(self, page: Path, tmp_path: Path) -> None:
        script = (
            f"let control; {choose('search', 'NUMBER 2', 'input')} page.querySelector('[data-step=\"1\"]').click();"
        )
        shown, console = after(page, tmp_path, script=script, expression=SHOWN)
        assert console == []
        assert shown["numbers"] == ["23"]  # of 2, 20, 21, 22 and 23
        assert shown["status"] == "5 prompts with this text; shown: 23."

    def test_a_suite_can_be_chosen(self, tmp_path: Path) -> None:
        plan, results, cells = many(tmp_path, count=4, seeds=2)
        examples = [{"prompt": f"how {i}?", "completions": ["no", NASTY], "toxicity": [0.0, 0.5]} for i in range(2)]
        suites = {"toxicity": SuiteScores({}, {}, examples)}
        cells = [replace(result, suites=suites) if result.cell.arm != "dpo" else result for result in cells]
        page = write_compare_page(plan, results, comparison_charts(results), cells)
        script = f"let control; {choose('seed', 1)} {choose('source', 1)}"
        shown, console = after(page, tmp_path, script=script, expression=SHOWN)
        assert console == []
        assert shown["numbers"] == ["0", "1"]
        assert shown["arms"] == [START_FOLDER, "ppo", "grpo", "best_of_n"]
        assert shown["texts"] == ["no" + printable(NASTY)] * 4
        assert shown["scores"] == ["toxicity 0.00, 0.500"] * 4
        assert shown["images"] == 0

"""The charts of a comparison, and its page with many arms."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, after, browse
from many import ARMS, many

from rlhf.api.comparing import EXACT_FRONTIER, exact_frontier_of
from rlhf.comparison.page import (
    EXACT,
    GLYPHS,
    INITIALLY_SHOWN,
    MAX_ALL_SHOWN,
    chips,
    comparison_charts,
    drawing_order,
    frontier_chart,
    styles,
    write_compare_page,
)
from rlhf.comparison.results import FrontierPoint
from rlhf.comparison.summary import ranking
from rlhf.errors import ConfigError

CURVE = tuple(FrontierPoint(kl=kl, score=score) for kl, score in ((0.0, 0.0), (1.0, 1.5), (5.0, 3.0)))


def test_arms_differ_in_color_and_symbol() -> None:
    drawn = styles([f"a{i}" for i in range(25)])
    assert len({(style.role, style.symbol) for style in drawn.values()}) == 25
    first = list(drawn.values())[:8]
    assert len({style.role for style in first}) == len({style.symbol for style in first}) == 8
    assert {style.symbol for style in first} == set(GLYPHS)


def test_of_many_arms_the_best_are_shown_first(tmp_path: Path) -> None:
    _, results, _ = many(tmp_path, count=12, seeds=1)
    order = drawing_order(results)
    assert order[:-1] == ranking(results)
    assert order[-1] == ARMS[11]  # it failed
    shown = chips(results, styles(order))
    assert [chip.arm for chip in shown if chip.shown] == ranking(results)[:INITIALLY_SHOWN]
    assert len(shown) == 11  # nothing to show of the failed one
    few = replace(results, arms={arm: results.arms[arm] for arm in ARMS[:MAX_ALL_SHOWN]})
    assert drawing_order(few) == list(ARMS[:MAX_ALL_SHOWN])
    assert chips(few, styles(drawing_order(few))) == []


def test_the_exact_optimum_is_drawn_where_the_folder_has_it(tmp_path: Path) -> None:
    _, results, _ = many(tmp_path, count=4, seeds=1)
    assert exact_frontier_of(tmp_path) is None
    assert EXACT not in [series.name for series in frontier_chart(results, styles(list(ARMS))).series]
    (tmp_path / EXACT_FRONTIER).write_text(json.dumps([asdict(point) for point in CURVE[::-1]]))
    results = replace(results, exact_frontier=exact_frontier_of(tmp_path))
    assert results.exact_frontier == CURVE
    (exact,) = (series for series in frontier_chart(results, styles(list(ARMS))).series if series.name == EXACT)
    assert (exact.xs, exact.ys) == ([0.0, 1.0, 5.0], [0.0, 1.5, 3.0])
    (tmp_path / EXACT_FRONTIER).write_text('[{"kl": 1}]')
    with pytest.raises(ConfigError, match=r"exact_frontier\.json should be a list of points"):
        exact_frontier_of(tmp_path)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    plan, results, cells = many(folder)
    plan.folder.mkdir(parents=True, exist_ok=True)
    return write_compare_page(plan, results, comparison_charts(results), cells)


@pytest.mark.beside
@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page with")
class TestTwentyFiveArms:
    def test_the_table_of_final_models_fits_on_a_laptop(self, page: Path, tmp_path: Path) -> None:
        table = "page.querySelector('#tables .scroll')"
        widths, _ = after(
            page, tmp_path, script="", expression=f"[{table}.scrollWidth, {table}.clientWidth]", width=1280
        )
        assert 1000 < widths[0] <= widths[1]

    def test_the_best_are_shown_and_the_others_are_a_tap_away(self, page: Path, tmp_path: Path) -> None:
        dom, console = browse(page, tmp_path)
        assert console == []
        charts = dom.count('class="main-svg"') // 3
        assert dom.count('data-title="Download plot') == charts > 3
        pressed = re.findall(r'data-toggle="([^"]+)" aria-pressed="true"', dom)
        assert len(pressed) == INITIALLY_SHOWN
        assert len(re.findall(r'data-toggle="[^"]+" aria-pressed="false"', dom)) == 24 - INITIALLY_SHOWN
        legend = set(re.findall(r'class="legendtext"[^>]*>([^<]+)<', dom))
        assert legend <= {*pressed, "start", "judge", "trained-on reward", "reward up, judge down"}
        assert set(pressed) <= legend
        prompts = 8 + 4  # side by side, and on the first page of all rows
        completions = re.findall(r'<div class="completion" data-arm="[^"]+">', dom)
        assert len(completions) == prompts * (INITIALLY_SHOWN + 1)  # and the start's

    def test_on_a_phone_all_of_them(self, page: Path, tmp_path: Path) -> None:
        measured: dict[str, Any]
        measured, console = after(
            page,
            tmp_path,
            script='page.querySelector("[data-all=true]").click(); page.querySelector("[data-toggle=ppo]").click();',
            expression="""{
                width: page.documentElement.scrollWidth,
                legend: [...page.querySelectorAll("[data-figure=frontier] .legendtext")].map((t) => t.textContent),
                hidden: [...page.querySelectorAll("[data-arm]")].filter((p) => p.hidden).map((p) => p.dataset.arm),
                widest: Math.max(...[...page.querySelectorAll(".main-svg")].map((s) => s.getBoundingClientRect().width))
            }""",
        )
        assert console == []
        assert measured["width"] <= 390
        assert 200 < measured["widest"] <= 390
        assert set(measured["legend"]) == {"start", *ARMS[1:24]}
        assert set(measured["hidden"]) == {"ppo"}

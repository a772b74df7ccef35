"""The figures for print, and the page with many arms."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import BROWSER, after, browse
from many import ARMS, many
from PIL import Image

from rlhf.api.comparing import EXACT_FRONTIER, exact_frontier_of
from rlhf.comparison.figures import DRAWINGS, FIGURES, MARKERS, PALETTE, write_figures
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
from rlhf.report.page import _asset

CURVE = tuple(FrontierPoint(kl=kl, score=score) for kl, score in ((0.0, 0.0), (1.0, 1.5), (5.0, 3.0)))


def texts(path: Path) -> set[str]:
    return {"".join(node.itertext()).strip() for node in ElementTree.parse(path).iter() if node.tag.endswith("}text")}


def test_every_figure_is_there_twice_and_names_every_arm(tmp_path: Path) -> None:
    _, results, _ = many(tmp_path, count=5, seeds=2)  # the last one failed and has nothing to draw
    figures = write_figures(tmp_path, comparison_charts(replace(results, exact_frontier=CURVE)))
    assert [name for name, _ in figures] == [name for name, _, _ in DRAWINGS]
    assert sorted(path.name for path in (tmp_path / FIGURES).iterdir()) == sorted(
        f"{name}.{ending}" for name, _ in figures for ending in ("png", "svg")
    )
    for name, _ in figures:
        with Image.open(tmp_path / FIGURES / f"{name}.png") as image:
            image.load()
            assert image.getpixel((0, 0))[:3] == (255, 255, 255)
            assert 700 < image.width < 3000
            assert 200 < image.height < 3000
            assert len(image.convert("RGB").getcolors(maxcolors=10**6) or []) > 20  # something is drawn
    arms = set(ARMS[:4])
    labels = {name: texts(tmp_path / FIGURES / f"{name}.svg") for name, _ in figures}
    for name in ("frontier", "win_rates", "costs"):
        assert arms <= labels[name], name
    for name in ("learning_curves", "proxy_against_judge"):
        assert arms - {"best_of_n"} <= labels[name], name
    assert {EXACT, "start", "KL to the start model (nats per sequence)", "judge's score"} <= labels["frontier"]
    assert {"completions", "nats", "tokens"} <= labels["learning_curves"]
    assert "reward up, judge down" not in labels["frontier"]


def test_what_there_is_no_data_for_is_not_drawn(tmp_path: Path) -> None:
    _, results, _ = many(tmp_path, count=5, seeds=1)
    only = replace(results, arms={"rloo": results.arms["rloo"]}, win_rates=(), evaluations=(), best_of_n={})
    assert [name for name, _ in write_figures(tmp_path, comparison_charts(only))] == ["frontier"]


def test_figures_have_the_colors_and_symbols_of_the_page() -> None:
    css = _asset("style.css").split("@media")[0]
    assert all(f"--{role}: {color};" in css for role, color in PALETTE.items())
    drawn = styles([f"a{i}" for i in range(25)])
    assert len({(style.role, style.symbol) for style in drawn.values()}) == 25
    first = list(drawn.values())[:8]
    assert len({style.role for style in first}) == len({style.symbol for style in first}) == 8
    assert {style.symbol for style in first} == set(MARKERS) == set(GLYPHS)


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
    return write_compare_page(plan, results, comparison_charts(results), cells, [("frontier", "score against KL")])


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
        assert 'href="figures/frontier.png"' in dom
        pressed = re.findall(r'data-toggle="([^"]+)" aria-pressed="true"', dom)
        assert len(pressed) == INITIALLY_SHOWN
        assert len(re.findall(r'data-toggle="[^"]+" aria-pressed="false"', dom)) == 24 - INITIALLY_SHOWN
        legend = set(re.findall(r'class="legendtext"[^>]*>([^<]+)<', dom))
        assert legend <= {*pressed, "start", "judge", "trained-on reward", "reward up, judge down"}
        assert set(pressed) <= legend
        assert len(re.findall(r'<div class="completion" data-arm="[^"]+">', dom)) == 8 * (
            INITIALLY_SHOWN + 1
        )  # and the start's

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

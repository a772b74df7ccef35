"""The page in a real browser: nothing on the console, every section there, a phone's width, both themes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, browse, on_a_phone

from rlhf.report.page import write_report
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import JsonlLogger

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page with")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    kl = {"controller": {"type": "adaptive", "target": 6.0}}
    folder.write_config({"run": {"name": "browsed"}, "algorithm": {"kl": kl}, "schedule": {"steps": 60}})
    with JsonlLogger(folder.metrics) as metrics, JsonlLogger(folder.timings) as timings:
        metrics.log({"step": 0, "eval/score": 0.5, "eval/kl": 0.0, "eval/kl_se": 0.0})
        for step in range(1, 61):
            row: dict[str, Any] = {
                "step": step,
                "score/mean": math.sin(step),
                "kl/reference": 6.0,
                "own/metric": 1.0,
                "part/long" * 20: 1.0,
            }
            if step == 60:
                row |= {"eval/score": 0.9, "eval/kl": 6.1, "eval/kl_se": 0.1, "loss/policy": math.nan}
            metrics.log(row)
            timings.log({"step": step, "seconds": {"sample": 1.0, "update": 0.5}})
    with JsonlLogger(folder.samples) as samples:
        for step in (0, 60):
            completion = (
                f"</script><script>document.title='owned {step}'</script><img src=x onerror=alert(1)>" + "w" * 500
            )
            samples.log(
                {"step": step, "split": "eval", "row": 0, "prompt": "p", "completion": completion, "score": 0.5}
            )
    with JsonlLogger(folder.notes) as notes:
        notes.log({"step": 0, "text": "one row skipped"})
    bins = [{"predicted": 0.6, "observed": 0.6, "n": 3}]
    folder.write_report_card({"accuracy": 0.7, "calibration": {"bins": bins}})
    return write_report(folder.path)


def test_the_page_opens_without_a_word_on_the_console_and_draws_everything(report: Path, tmp_path: Path) -> None:
    dom, console = browse(report, tmp_path)
    assert console == []
    assert 'data-drawn="true"' in dom
    assert "<title>browsed</title>" in dom  # no completion changed it
    for section in ("verdict", "key-figures", "notes", "report-card", "completions", "timings", "glossary", "config"):
        assert f'id="{section}"' in dom
    for group in ("score", "kl", "other"):
        assert f'id="group-{group}"' in dom
    places = re.findall(r'<div class="chart[^"]*" data-figure="([^"]+)"', dom)
    assert {"curve:score/mean", "curve:kl/reference", "curve:own/metric", "timings", "calibration"} <= set(places)
    assert dom.count('<svg class="main-svg"') >= len(places)


def test_an_error_on_the_console_would_be_seen(report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    injected = "<img src=http://127.0.0.1:9/x.png><script>window.owned = 1</script></body>"
    broken.write_text(report.read_text(encoding="utf-8").replace("</body>", injected), encoding="utf-8")
    _, console = browse(broken, tmp_path / "profile")
    assert any("img-src" in line for line in console)  # the policy lets nothing be fetched
    assert any("script-src" in line for line in console)  # and no foreign script run


def test_on_a_phone_nothing_overflows_and_the_button_changes_page_and_curves(report: Path, tmp_path: Path) -> None:
    measured, console = on_a_phone(report, tmp_path)
    assert console == []
    assert measured["width"] <= 390
    assert 200 < measured["widest"] <= 390
    light, dark = measured["first"], measured["second"]
    assert (light["button"], dark["button"]) == ("☾ Dark", "☀ Light")
    assert (light["background"], dark["background"]) == ("rgb(246, 247, 249)", "rgb(18, 21, 27)")
    assert (light["line"], dark["line"]) == ("rgb(31, 102, 193)", "rgb(106, 169, 255)")

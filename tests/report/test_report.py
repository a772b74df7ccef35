"""The page of a run: its text, its charts, and that no text of a model can act on it."""

from __future__ import annotations

import html.parser
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config.run import UNKNOWN_LENGTH
from rlhf.errors import UserError
from rlhf.report.charts import (
    GROUPS,
    Series,
    card_tables,
    chart_groups,
    decimate,
    overlay_groups,
    panels,
    running_mean,
    timing_chart,
)
from rlhf.report.page import (
    comparison,
    distinct_names,
    pair_details,
    phase_table,
    run_verdict,
    tiles,
    write_overlay,
    write_report,
)
from rlhf.report.record import MetricSeries, Record, collect_series, match
from rlhf.tracking.metrics import METRICS, table_of
from rlhf.tracking.run_folder import RunFolder
from rlhf.tracking.trackers import JsonlLogger

ADAPTIVE = {"kl": {"placement": "reward", "controller": {"type": "adaptive", "target": 6.0}}}
NASTY = (
    "</script><script>document.title='owned'</script> <img src=x onerror=alert(1)> {{ 7*7 }} {% raw %} 🎉 & \x1b[31m"
)


def run_folder(
    path: Path,
    metrics: Sequence[Mapping[str, Any]],
    *,
    config: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    timings: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[Mapping[str, Any]] = (),
    card: Mapping[str, Any] | None = None,
) -> Path:
    folder = RunFolder(path)
    folder.write_config({"run": {"name": "tiny"}} if config is None else config)
    files = ((folder.metrics, metrics), (folder.samples, samples), (folder.timings, timings), (folder.notes, notes))
    for file, rows in files:
        with JsonlLogger(file) as log:
            for row in rows:
                log.log(row)
    if card is not None:
        folder.write_report_card(card)
    return path


def sample(step: int, row: int, completion: str, score: float, **more: Any) -> dict[str, Any]:
    fixed = {"parts": {"a": score, "b": 0.0}, "kl": 1.5, "length": 3, "finished": True}
    return {
        "step": step,
        "split": "eval",
        "row": row,
        "prompt": f"p{row}",
        "completion": completion,
        "score": score,
    } | (fixed | more)


def ppo_run(path: Path, steps: int = 4) -> Path:
    rows: list[dict[str, Any]] = [{"step": 0, "eval/score": 0.534, "eval/kl": 0.0, "eval/kl_se": 0.0}]
    for step in range(1, steps + 1):
        rows.append({"step": step, "score/mean": 0.5 + step / 100, "kl/reference": 1.0 * step, "mine/own": 7.0})
    rows[-1] |= {"eval/score": 0.912, "eval/kl": 6.1, "eval/kl_se": 0.2}
    seconds = {"sample": 3.0, "update": 1.0}
    return run_folder(
        path,
        rows,
        config={"run": {"name": "tiny ppo"}, "algorithm": ADAPTIVE, "schedule": {"steps": steps}},
        samples=[
            sample(0, 0, "sad", 0.1),
            sample(0, 1, NASTY, 0.5),
            sample(steps, 0, "glad", 0.9),
            sample(steps, 1, "", 0.4, finished=False),
        ],
        timings=[{"step": s, "seconds": seconds, "tokens_per_second": 10.0 * s} for s in range(1, steps + 1)],
        notes=[{"step": 0, "text": "3 rows <b>skipped</b>"}],
    )


def record(rows: Sequence[Mapping[str, Any]], **more: Any) -> Record:
    last = max((int(row["step"]) for row in rows), default=0)
    return Record(path=Path("run"), config=more.pop("config", {}), series=collect_series(rows), last_step=last, **more)


class Page(html.parser.HTMLParser):
    """The elements and texts of a page, scripts and styles apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.raw: dict[int, str] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.raw[len(self.tags) - 1] = self.raw.get(len(self.tags) - 1, "") + data
        elif data.strip():
            self.texts.append(data.strip())

    def ids(self) -> set[str | None]:
        return {attributes["id"] for _, attributes in self.tags if "id" in attributes}

    def figures(self) -> dict[str, Any]:
        places = [i for i, (tag, attributes) in enumerate(self.tags) if attributes.get("id") == "figures"]
        return json.loads(self.raw[places[0]])


def page_of(path: Path) -> Page:
    return Page(write_report(path).read_text(encoding="utf-8"))


def test_a_ppo_run_has_every_section(tmp_path: Path) -> None:
    page = page_of(ppo_run(tmp_path / "run"))
    assert {
        *("verdict", "key-figures", "notes", "group-score", "group-kl", "group-other", "completions", "timings"),
        *("glossary", "config"),
    } <= page.ids()
    assert "tiny ppo" in page.texts
    assert "3 rows <b>skipped</b>" in page.texts
    assert METRICS["kl/reference"].meaning in page.texts
    assert any("seed" not in text and "controller:" in text for text in page.texts)  # config.yaml is there


def test_every_figure_has_its_place_and_every_place_its_figure(tmp_path: Path) -> None:
    page = page_of(ppo_run(tmp_path / "run"))
    places = [attributes["data-figure"] for _, attributes in page.tags if "data-figure" in attributes]
    assert sorted(places) == sorted(page.figures())
    names = {trace["name"] for figure in page.figures().values() for trace in figure["data"]}
    assert {"score/mean", "eval/score", "kl/reference", "eval/kl", "target 6", "mine/own", "sample"} <= names
    assert "eval/kl_se" not in names  # drawn as error bars


def test_what_a_model_writes_is_text(tmp_path: Path) -> None:
    text = write_report(ppo_run(tmp_path / "run")).read_text(encoding="utf-8")
    page = Page(text)
    assert NASTY.replace("\x1b", "␛") in page.texts
    assert [tag for tag, _ in page.tags].count("script") == 4  # theme, data, plotly, page
    assert "img" not in [tag for tag, _ in page.tags]
    assert "\x1b" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_names_from_the_folder_are_text_too(tmp_path: Path) -> None:
    evil = "</script><marquee>x"
    rows = [{"step": 1, evil: 1.0}, {"step": 2, evil: 2.0}]
    timings = [{"step": 1, "seconds": {evil: 1.0}}]
    page = page_of(run_folder(tmp_path, rows, config={"run": {"name": evil}}, timings=timings, card={evil: {evil: 1}}))
    assert "marquee" not in [tag for tag, _ in page.tags]
    assert f"curve:{evil}" in page.figures()
    assert page.figures()["timings"]["data"][0]["name"] == evil


def test_the_page_fetches_nothing_and_allows_only_its_own_scripts(tmp_path: Path) -> None:
    page = page_of(ppo_run(tmp_path / "run"))
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith(("#", "data:")), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'; script-src 'sha256-")
    scripts = policies[0].split("script-src ")[1].split(";")[0]
    assert re.fullmatch(r"('sha256-[A-Za-z0-9+/=]{44}' ?){3}", scripts)


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    path = ppo_run(tmp_path / "run")
    assert write_report(path).read_bytes() == write_report(path).read_bytes()


def test_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    page = page_of(ppo_run(tmp_path / "run"))
    texts = page.texts
    start = texts.index("Prompt 0")
    shown = texts[start : texts.index("Prompt 1")]
    assert shown[1:4] == ["p0", "Before · step 0", "sad"]
    assert shown.index("sad") < shown.index("After · step 4") < shown.index("glad")
    assert "0.900" in shown
    assert "(empty)" in texts
    assert "at the length limit" in texts
    higher = "The score is higher after training on 1 of 2 prompts, lower on 1, equal on 0."
    assert any(higher in text for text in texts)


def test_verdict_of_a_finished_run() -> None:
    rows = [{"step": 0, "eval/score": 0.53}, {"step": 80, "eval/score": 0.91, "eval/kl": 6.1}]
    text = run_verdict(record(rows, config={"algorithm": ADAPTIVE, "schedule": {"steps": 80}}))
    assert text == (
        "Mean held-out score went from 0.53 (before) to 0.91 (after) over 80 steps. "
        "KL to the reference 6.10 nats per sequence (target 6)."
    )


def test_verdict_of_a_run_that_stopped_early_does_not_call_it_after() -> None:
    rows = [{"step": 0, "eval/score": 0.5}, {"step": 20, "eval/score": 0.7}, {"step": 33, "kl/reference": 2.0}]
    text = run_verdict(record(rows, config={"schedule": {"steps": 80}}))
    assert text == (
        "Mean held-out score went from 0.50 (before) to 0.70 (at step 20) over 33 of the 80 planned steps. "
        "KL to the reference 2.00 nats per sequence."
    )


STOP = {"event": "on", "alarm": "kl-jump", "action": "stop", "step": 3, "since": 3}


@pytest.mark.parametrize(
    "steps, alarms, stopped",
    [
        (80, [STOP], " It was stopped there by the alarm kl-jump."),
        (80, [STOP, {**STOP, "alarm": "cut-off"}], " It was stopped there by the alarms kl-jump, cut-off."),
        (None, [STOP], " It was stopped there by the alarm kl-jump."),  # schedule.epochs
        (80, [{**STOP, "step": 2}], ""),  # it was continued
        (80, [{**STOP, "action": "warn"}], ""),
        (3, [STOP], ""),  # the last step: nothing was left to stop
    ],
)
def test_verdict_names_the_alarm_that_stopped_the_run(
    steps: int | None, alarms: list[dict[str, Any]], stopped: str
) -> None:
    rows = [{"step": 0, "eval/score": 0.5}, {"step": 3, "kl/reference": 2.0}]
    assert run_verdict(record(rows, config={"schedule": {"steps": steps}}, alarms=alarms)) == (
        f"Mean held-out score is 0.50 at step 0; it was measured once.{stopped} "
        "KL to the reference 2.00 nats per sequence."
    )


@pytest.mark.parametrize(
    "restore, export",
    [
        (True, ", which is the model that the run exports"),
        (False, ""),
    ],
)
def test_verdict_names_the_best_checkpoint_where_it_is_not_the_last(restore: bool, export: str) -> None:
    rows = [
        {"step": 0, "eval/score": 0.5, "best/step": 0.0},
        {"step": 2, "eval/score": 0.9, "best/step": 2.0},
        {"step": 4, "eval/score": 0.1, "best/step": 2.0},
    ]
    config = {"checkpoint": {"best": {"restore": restore}}, "schedule": {"steps": 4}}
    assert run_verdict(record(rows, config=config)) == (
        "Mean held-out score went from 0.50 (before) to 0.10 (after) over 4 steps. "
        f"The best checkpoint is step 2 (mean held-out score 0.90){export}."
    )
    assert "best checkpoint" not in run_verdict(record(rows[:2], config=config))


def test_the_page_says_what_the_value_of_an_alarm_is(tmp_path: Path) -> None:
    seen = {"metric": "kl/reference", "reads": "kl/reference per token", "value": 2.0, "limit": 0.5}
    path = run_folder(tmp_path / "run", [{"step": 3, "kl/reference": 12.0}])
    with JsonlLogger(RunFolder(path).alarms) as log:
        log.log({**STOP, **seen})
    texts = page_of(path).texts
    assert "kl/reference per token 2.00 (limit 0.50)" in texts


def test_a_run_that_only_its_budget_ends_is_not_called_unfinished() -> None:
    rows = [{"step": 0, "eval/score": 0.5}, {"step": 33, "eval/score": 0.7}]
    text = run_verdict(record(rows, config={"schedule": {"steps": UNKNOWN_LENGTH}}))
    assert text == "Mean held-out score went from 0.50 (before) to 0.70 (after) over 33 steps."


def test_verdict_skips_what_was_not_finite_and_says_what_was_measured_once() -> None:
    rows = [{"step": 0, "eval/score": None}, {"step": 5, "eval/score": 0.7}]
    assert run_verdict(record(rows)) == "Mean held-out score is 0.70 at step 5; it was measured once."
    assert run_verdict(record([{"step": 5, "policy/lr": 0.1}])) == "5 steps logged; no score was measured yet."


def test_verdict_of_sft_is_its_held_out_loss() -> None:
    rows = [
        {"step": 0, "eval/loss": 6.2, "eval/score": 0.1},
        {"step": 9, "loss/sft": 2.0, "eval/loss": 1.4, "eval/score": 1.0},
    ]
    assert run_verdict(record(rows)).startswith("Held-out loss went from 6.20 (before) to 1.40 nats per token (after)")


def test_verdict_of_a_reward_model_names_its_baselines() -> None:
    rows = [{"step": 0, "eval/rm_accuracy": 0.5}, {"step": 60, "eval/rm_accuracy": 0.746}]
    card = {"baselines": {"longer_wins": {"accuracy": 0.55}, "bag_of_words": 0.66}}
    card |= {"accuracy_low": 0.7211, "accuracy_high": 0.7702, "n": 2000}
    assert run_verdict(record(rows, card=card)) == (
        "Accuracy on held-out pairs went from 0.50 (before) to 0.75 (after) over 60 steps. "
        "95 % interval of the final accuracy: 0.721 to 0.770, on 2,000 pairs. "
        "Baselines on the same pairs: longer wins 0.55, bag of words 0.66."
    )


def test_kl_without_evaluation_is_the_mean_of_the_last_fifth() -> None:
    rows = [{"step": step, "kl/reference": 100.0 if step <= 8 else float(step)} for step in range(1, 11)]
    assert run_verdict(record(rows)).endswith("KL to the reference 9.50 nats per sequence.")


def test_tiles_hold_the_key_figures() -> None:
    rows = [
        {"step": 0, "eval/score": 0.5},
        {"step": 1, "eval/score": 0.75, "completion/count": 64.0, "skipped/nonfinite": 0.0},
    ]
    timings = [{"step": 1, "seconds": {"a": 60.0, "b": 20.0}, "tokens_per_second": 1234.5, "peak_memory_mb": 100.0}]
    shown = {tile.label: (tile.value, tile.detail) for tile in tiles(record(rows, timings=timings))}
    assert shown == {
        "Mean held-out score": ("0.750", "from 0.500"),
        "Completions sampled": ("64", ""),
        "Time in logged phases": ("1m20s", ""),
        "Tokens per second": ("1,234", "median"),
        "Peak memory": ("100 MB", ""),
    }


def test_a_tile_holds_a_count_a_change_or_a_mean_at_the_end() -> None:
    rows: list[dict[str, Any]] = [{"step": step, "critic/explained_variance": step / 10} for step in range(1, 11)]
    rows[0] |= {"eval/length": 20.0, "skipped/nonfinite": 0.0}
    rows[9] |= {"eval/length": 31.5, "skipped/nonfinite": 2.0}
    assert [(tile.label, tile.value, tile.detail) for tile in tiles(record(rows))] == [
        ("Held-out length, tokens", "31.5", "from 20.0"),
        ("Explained variance", "0.950", "mean of the last fifth"),
        ("Optimizer steps skipped (NaN)", "2", ""),
    ]


def test_every_metric_of_the_table_is_drawn() -> None:
    drawn = {}
    for name in METRICS:
        rows = [{"step": 1, name: 1.0}, {"step": 2, name: 2.0}]
        charts = [chart for group in chart_groups(record(rows), METRICS) for chart in group.charts]
        drawn[name] = [(series.name, series.xs, series.ys) for chart in charts for series in chart.series]
    assert drawn == {name: [(name, (1, 2), (1.0, 2.0))] for name in METRICS}


def test_every_group_has_charts_and_every_chart_a_group() -> None:
    charts = {place.view for info in METRICS.values() for place in info.places if place.view.startswith("chart/")}
    assert charts == {f"chart/{key}" for key, _, _ in GROUPS}


def test_the_metric_with_the_title_leads_its_chart_and_the_table_orders_the_others() -> None:
    titles = dict(panels("completions", METRICS))
    assert titles["Distinct bigrams, tokens and trigrams"] == ["eval/distinct_2", "eval/distinct_1", "eval/distinct_3"]
    assert [title for title, _ in panels("score", METRICS)] == [
        "Score in training",
        "Held-out score",
        "Held-out score under the trained-on reward",
        "Spread of scores",
        "Disagreement of the ensemble",
        "Parts of the score",
        "The watching judge",
        "Agreement of the training reward and the watching judge",
        "Best checkpoint, step",
        "Gain over the best so far",
        "Gradings that failed or do not apply",
        "Seconds of a grading",
        "Rewards of steps",
        "Steps of a completion",
        "Running normalization",
    ]


def test_errors_are_drawn_on_their_metric() -> None:
    rows = [{"step": 0, "eval/kl": 1.0, "eval/kl_se": 0.25}, {"step": 9, "eval/kl": 2.0, "eval/kl_se": 0.5}]
    (group,) = chart_groups(record(rows), METRICS)
    (chart,) = group.charts
    assert chart.series[0].errors == [0.25, 0.5]


def test_the_kl_target_is_drawn_only_where_the_controller_has_one() -> None:
    rows = [{"step": 3, "kl/reference": 1.0}, {"step": 9, "kl/reference": 2.0}]
    fixed = {"algorithm": {"kl": {"controller": {"type": "fixed"}}}}
    for config, expected in (({"algorithm": ADAPTIVE}, [([3, 9], [6.0, 6.0])]), (fixed, [])):
        (group,) = chart_groups(record(rows, config=config), METRICS)
        targets = [series for series in group.charts[0].series if series.role == "target"]
        assert [(series.xs, series.ys) for series in targets] == expected


def test_a_long_curve_is_drawn_faintly_under_its_running_mean_and_a_set_one_as_it_is() -> None:
    rows = [{"step": step, "score/mean": float(step % 2), "policy/lr": 0.1} for step in range(100)]
    drawn = {c.key: c.series for g in chart_groups(record(rows), METRICS) for c in g.charts}
    raw, mean = drawn["curve:score/mean"]
    assert raw.opacity < 1 <= mean.opacity
    assert (raw.in_legend, mean.in_legend) == (False, True)
    assert all(0.4 < value < 0.6 for value in mean.ys[20:80])
    assert len(drawn["curve:policy/lr"]) == 1


def test_running_mean_is_centered_and_narrows_at_the_ends() -> None:
    series = MetricSeries("x", tuple(range(6)), (0.0, 3.0, 6.0, None, 9.0, 30.0))
    smooth = running_mean(series)
    assert smooth.steps == (0, 1, 2, 4, 5)
    assert smooth.values == pytest.approx((0.0, 3.0, 9.6, 15.0, 30.0))


VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(VALUES, st.integers(10, 60))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values: list[float | None], limit: int) -> None:
    series = MetricSeries("x", tuple(range(len(values))), tuple(values))
    thin = decimate(series, limit)
    assert len(thin.steps) <= limit or len(values) <= limit
    assert list(thin.steps) == sorted(set(thin.steps))
    assert all(values[step] == value for step, value in zip(thin.steps, thin.values, strict=True))
    assert (thin.steps[0], thin.steps[-1]) == (0, len(values) - 1)
    live = [value for value in values if value is not None]
    kept = [value for value in thin.values if value is not None]
    if live:
        assert (min(kept), max(kept)) == (min(live), max(live))


def test_a_long_run_is_thinned_in_the_page() -> None:
    rows = [{"step": step, "score/mean": math.sin(step)} for step in range(7001)]
    (group,) = chart_groups(record(rows), METRICS)
    assert [len(series.xs) <= 2000 for series in group.charts[0].series] == [True, True]


def test_phases_are_totaled_and_binned() -> None:
    timings = [{"step": step, "seconds": {"sample": 3.0, "update": float(step == 1)}} for step in range(1, 201)]
    assert phase_table(timings) == [
        {"phase": "sample", "total": 600.0, "share": 600 / 601, "mean": 3.0},
        {"phase": "update", "total": 1.0, "share": 1 / 601, "mean": 0.005},
    ]
    sample_bars, update_bars = timing_chart(timings, ["sample", "update"]).series
    assert len(sample_bars.xs) == 67
    assert sample_bars.ys == [3.0] * 67
    assert update_bars.ys[:2] == pytest.approx([1 / 3, 0.0])


def test_a_step_done_twice_is_drawn_once_and_paid_for_twice() -> None:
    timings = [{"step": step, "seconds": {"sample": seconds}} for step, seconds in ((1, 1.0), (2, 5.0), (2, 2.0))]
    (bars,) = timing_chart(timings, ["sample"]).series
    assert (bars.xs, bars.ys) == ([1, 2], [1.0, 2.0])
    assert phase_table(timings)[0]["total"] == 8.0


def test_a_note_that_a_resumed_run_repeats_is_shown_once(tmp_path: Path) -> None:
    notes = [
        {"step": 0, "text": "3 rows skipped"},
        {"step": 4, "text": "3 rows skipped"},
        {"step": 4, "text": "resumed"},
    ]
    texts = page_of(run_folder(tmp_path, [{"step": 1, "score/mean": 1.0}], notes=notes)).texts
    assert (texts.count("3 rows skipped"), texts.count("resumed")) == (1, 1)


def test_samples_pair_by_row_and_prompt() -> None:
    before = [sample(0, 2, "b2", 0.0), sample(0, 1, "b1", 0.0), sample(0, 3, "b3", 0.0, prompt="old")]
    after = [sample(9, 1, "a1", 0.0), sample(9, 3, "a3", 0.0, prompt="new"), sample(9, 4, "a4", 0.0)]
    texts = [
        (pair.row, pair.before and pair.before["completion"], pair.after and pair.after["completion"])
        for pair in match(before, after)
    ]
    assert texts == [(1, "b1", "a1"), (2, "b2", None), (3, None, "a3"), (3, "b3", None), (4, None, "a4")]


def test_comparison_counts_only_what_has_both_scores() -> None:
    before = [sample(0, row, "", score) for row, score in enumerate([0.1, 0.5, 0.9])] + [
        {"row": 3, "prompt": "p3", "score": None}
    ]
    after = [sample(9, row, "", 0.5) for row in range(5)]
    expected = "The score is higher after training on 1 of 3 prompts, lower on 1, equal on 1."
    assert comparison(match(before, after)) == expected
    assert comparison([]) == ""


def test_training_samples_are_shown_where_nothing_was_held_out(tmp_path: Path) -> None:
    rows = [sample(step, 0, f"c{step}", 0.5, split="train") for step in (1, 2)]
    page = page_of(run_folder(tmp_path, [{"step": 2, "score/mean": 0.5}], samples=rows))
    assert "c2" in page.texts
    assert "c1" not in page.texts
    assert any(text.startswith("Training prompts") for text in page.texts)


def test_a_single_score_part_is_not_repeated() -> None:
    assert pair_details(sample(0, 0, "", 0.5, parts={"score": 0.5})) == [("score", 0.5), ("KL", 1.5), ("tokens", 3)]
    assert pair_details({"completion": "x"}) == []


def test_a_reward_model_run_shows_its_card(tmp_path: Path) -> None:
    card = {
        "accuracy": 0.74,
        "baselines": {"longer_wins": {"accuracy": 0.55}, "bag_of_words": {"accuracy": 0.66}},
        "by_margin": [{"from": 1, "to": 2, "accuracy": 0.61}, {"from": 2, "to": None, "accuracy": 0.9}],
        "calibration": {"error": 0.02, "bins": [{"predicted": 0.9, "observed": 0.8, "n": 5}]},
        "length": {"correlation": 0.12},
    }
    page = page_of(run_folder(tmp_path, [{"step": 1, "rm/accuracy": 0.7, "eval/rm_accuracy": 0.6}], card=card))
    assert {"report-card", "group-reward-model"} <= page.ids()
    points = page.figures()["calibration"]["data"][1]
    assert (points["x"], points["y"]) == ([0.9], [0.8])
    for text in ("By margin", "longer wins", "0.610", "–", "correlation", "0.120"):
        assert text in page.texts


def test_a_card_without_metrics_is_a_report(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, [], card={"accuracy": 0.74}))
    assert "Accuracy 0.740." in page.texts


def test_card_tables_follow_the_nesting() -> None:
    card = {"n": 2, "by": {"a": {"x": 1}, "b": {"y": 2}}, "deep": {"k": 1, "rows": [{"x": 1}]}, "tags": ["s", "t"]}
    tables = {table.title: (list(table.columns), [list(row) for row in table.rows]) for table in card_tables(card)}
    assert tables == {
        "Figures": (["", "value"], [["pairs", 2], ["tags", ["s", "t"]]]),
        "By": (["", "x", "y"], [["a", 1, None], ["b", None, 2]]),
        "Deep": (["", "value"], [["k", 1]]),
        "Deep · rows": (["x"], [[1]]),
    }


def test_a_metric_that_was_nan_is_noted_and_leaves_a_gap(tmp_path: Path) -> None:
    rows = [{"step": step, "loss/policy": math.nan if step == 2 else 1.0} for step in (1, 2, 3)]
    page = page_of(run_folder(tmp_path, rows))
    assert "loss/policy was NaN or infinite at step 2" in page.texts
    assert page.figures()["curve:loss/policy"]["data"][0]["y"] == [1.0, None, 1.0]


def test_a_completion_that_is_no_utf8_does_not_stop_the_report(tmp_path: Path) -> None:
    rows = [sample(0, 0, "half \ud83d", 0.5)]
    assert "half ?" in page_of(run_folder(tmp_path, [{"step": 0, "eval/score": 0.5}], samples=rows)).texts


def test_a_missing_or_empty_folder_is_the_users_to_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_complete_html(tmp_path: Path) -> None:
    text = write_report(ppo_run(tmp_path / "run")).read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")
    assert "&lt;b&gt;skipped&lt;/b&gt;" in text


def test_metrics_that_stayed_zero_are_named_and_not_drawn(tmp_path: Path) -> None:
    rows = [{"step": step, "score/mean": 0.1 * step, "policy/early_stop": 0.0} for step in range(1, 6)]
    page = write_report(run_folder(tmp_path, rows)).read_text(encoding="utf-8")
    assert "curve:score/mean" in page
    assert "curve:policy/early_stop" not in page
    assert "stayed 0 for the whole run: policy/early_stop." in page


def test_two_points_are_no_curve() -> None:
    def drawn(count: int) -> Series:
        record = Record(
            Path(), {}, collect_series([{"step": step, "eval/score": step} for step in range(count)]), count
        )
        (chart,) = next(group.charts for group in chart_groups(record, METRICS) if group.key == "score")
        return chart.series[0]

    assert drawn(2).width == 0
    assert drawn(2).size
    assert drawn(3).width > 0


@pytest.mark.parametrize(
    "config, words",
    [
        ({"reward": {"source": {"type": "model", "path": "runs/rm"}}}, "that it was trained on: reward model runs/rm."),
        ({"eval": {"source": {"type": "function", "target": "a.py:b"}}}, "Its judge is eval.source: function a.py:b."),
        ({"eval": {"source": {"type": "rules", "rules": []}}}, "Its judge is eval.source: rules."),
    ],
)
def test_the_verdict_says_whose_score_it_is(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    rows = [{"step": 0, "eval/score": 0.5}, {"step": 4, "eval/score": 0.9}]
    record = Record(tmp_path, config, collect_series(rows), 4)
    assert words in run_verdict(record)
    assert "judge" not in run_verdict(Record(tmp_path, config, collect_series([{"step": 1, "score/mean": 0.5}]), 1))


def test_completions_between_the_first_and_the_last_evaluation_are_on_the_page(tmp_path: Path) -> None:
    samples = [
        {"step": step, "split": "eval", "row": 0, "prompt": "p", "completion": f"answer {step}", "score": 0.0}
        for step in (0, 5, 10)
    ]
    page = write_report(run_folder(tmp_path, [{"step": 10, "score/mean": 1.0}], samples=samples)).read_text()
    assert "1 in between" in page
    assert "answer 5" in page


def test_curves_of_two_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    for name, slope in (("ppo", 1.0), ("grpo", 2.0)):
        rows = [{"step": step, "score/mean": slope * step, "policy/early_stop": 0.0} for step in range(1, 5)]
        own = {"algorithm": {"preset": name}}
        run_folder(tmp_path / name, [{**row, f"own/{name}": 1.0} for row in rows], config=own)
    page = write_overlay([tmp_path / "ppo", tmp_path / "grpo"], tmp_path / "overlay.html").read_text(encoding="utf-8")
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    curves = {trace["name"]: trace for trace in figures["overlay:score/mean"]["data"]}
    assert curves["ppo"]["y"] == [1.0, 2.0, 3.0, 4.0]
    assert curves["grpo"]["y"] == [2.0, 4.0, 6.0, 8.0]
    assert curves["ppo"]["meta"] != curves["grpo"]["meta"]  # colors
    assert [trace["name"] for trace in figures["overlay:own/grpo"]["data"]] == ["grpo"]
    assert "overlay:policy/early_stop" not in figures


def test_many_runs_laid_over_each_other_look_different() -> None:
    rows = [{"step": step, "score/mean": 1.0 * step} for step in (1, 2, 3)]
    (group,) = overlay_groups({f"run {i}": record(rows) for i in range(25)}, table_of(["score/mean"]))
    assert len({(curve.role, curve.dash) for curve in group.charts[0].series}) == 25


def test_many_runs_are_counted_in_the_title(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / f"run-{i}", [{"step": 1, "score/mean": 1.0}]) for i in range(5)]
    assert "<title>5 runs</title>" in write_overlay(runs, tmp_path / "five.html").read_text(encoding="utf-8")
    assert "<title>run-0 and run-1</title>" in write_overlay(runs[:2], tmp_path / "two.html").read_text(
        encoding="utf-8"
    )


def test_a_completion_of_white_space_is_told(tmp_path: Path) -> None:
    samples = [sample(1, 0, " \n", 0.0), sample(1, 1, "", 0.0)]
    texts = page_of(run_folder(tmp_path, [{"step": 1, "score/mean": 1.0}], samples=samples)).texts
    assert [text for text in texts if text.startswith("(")] == ["(white space)", "(empty)"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    assert distinct_names([tmp_path / "a" / "ppo", tmp_path / "b" / "ppo"]) == ["a/ppo", "b/ppo"]
    with pytest.raises(UserError, match="given twice"):
        distinct_names([tmp_path / "a", tmp_path / "a"])


def test_a_watched_page_reloads_itself_and_the_final_one_does_not(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [{"step": 1, "score/mean": 1.0}])
    assert '<meta http-equiv="refresh" content="10">' in write_report(folder, refresh_s=10).read_text()
    assert "refresh" not in write_report(folder).read_text().split("<script>")[0]


def test_an_overlay_of_many_runs_reads_each_series_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = [f"own/{i}" for i in range(30)]
    rows = [{"step": step, **{name: float(i % 2 * step) for i, name in enumerate(metrics)}} for step in (1, 2)]
    records = {f"run {i}": record(rows) for i in range(4)}
    reads: list[str] = []
    finite = MetricSeries.finite
    monkeypatch.setattr(MetricSeries, "finite", lambda series: reads.append(series.name) or finite(series))
    groups = overlay_groups(records, table_of(metrics))
    assert [chart.title for group in groups for chart in group.charts] == metrics[1::2]
    assert len(reads) <= 8 * len(metrics) * len(records)

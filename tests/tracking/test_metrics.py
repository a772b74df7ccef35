"""The table of metrics: every view of it is complete and in order."""

from __future__ import annotations

from typing import get_args

import pytest

from rlhf.tracking.metrics import METRICS, MetricInfo, RunKind, progress_metrics, shown_in

TITLED = {"headline", "tile", "compare/curve", "compare/end"}
VIEWS = sorted({place.view for info in METRICS.values() for place in info.places})


def test_a_row_holds_its_fields_and_its_places() -> None:
    info = METRICS["loss/sft"]
    assert (info.unit, info.meaning) == ("nats", "negative log-likelihood per completion token")
    assert (info.label, info.better, info.held_out, info.curve) == ("loss", "lower", "eval/loss", "")
    assert {place.view: (place.position, place.title) for place in info.places} == {
        "chart/language-modeling": (1, "Negative log-likelihood"),
        "progress/sft": (1, ""),
        "headline": (6, "Training loss"),
    }


def test_the_views_are_those_that_are_read() -> None:
    kinds = {f"progress/{kind}" for kind in get_args(RunKind)}
    assert {view for view in VIEWS if not view.startswith("chart/")} == kinds | TITLED | {"summary"}


@pytest.mark.parametrize("view", VIEWS)
def test_the_positions_of_a_view_have_no_gaps(view: str) -> None:
    shown = shown_in(view)
    positions = [place.position for _, place in shown]
    assert sorted(set(positions)) == list(range(1, max(positions) + 1))
    if view.startswith("chart/"):  # metrics share a chart, and one of them gives it its title
        assert len([place for _, place in shown if place.title]) == len(set(positions))
    else:
        assert len(positions) == len(set(positions))
        assert all(bool(place.title) == (view in TITLED) for _, place in shown)


@pytest.mark.parametrize("info", METRICS.values(), ids=lambda info: info.name)
def test_no_metric_is_twice_in_a_view_and_every_field_is_known(info: MetricInfo) -> None:
    assert len({place.view for place in info.places}) == len(info.places)
    assert len([place for place in info.places if place.view.startswith("chart/")]) <= 1
    assert info.better in ("", "higher", "lower")
    assert info.curve in ("", "exact")
    assert not info.held_out or (info.held_out in METRICS and info.held_out.startswith("eval/"))
    assert not info.held_out or METRICS[info.held_out].unit == info.unit


@pytest.mark.parametrize(
    "kind, names",
    [
        ("online", "score/mean kl/reference kl/coef critic/explained_variance completion/length eval/score"),
        ("sft", "loss/sft loss/accuracy policy/grad_norm policy/lr eval/loss eval/score"),
        ("reward_model", "loss/rm rm/accuracy policy/grad_norm eval/rm_accuracy"),
        (
            "preference",
            "loss/preference preference/accuracy preference/margin eval/preference_accuracy eval/score "
            "preference/baseline",
        ),
    ],
)
def test_the_progress_line_of_a_run(kind: RunKind, names: str) -> None:
    assert progress_metrics(kind) == tuple(names.split())

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


def is_in_order(view: str) -> bool:
    """Positions have no gaps, and titles are in the views that show them."""
    shown = shown_in(view)
    positions = [place.position for _, place in shown]
    if sorted(set(positions)) != list(range(1, max(positions) + 1)):
        return False
    if view.startswith("chart/"):  # metrics share a chart, and one of them gives it its title
        return len([place for _, place in shown if place.title]) == len(set(positions))
    return len(positions) == len(set(positions)) and all(bool(place.title) == (view in TITLED) for _, place in shown)


def test_the_positions_of_a_view_have_no_gaps() -> None:
    assert [view for view in VIEWS if not is_in_order(view)] == []


def is_sound(info: MetricInfo) -> bool:
    """It is in a view once, in one chart at most, and its fields have known values."""
    views = [place.view for place in info.places]
    held_out = METRICS.get(info.held_out)
    return (
        len(set(views)) == len(views)
        and len([view for view in views if view.startswith("chart/")]) <= 1
        and info.better in ("", "higher", "lower")
        and info.curve in ("", "exact")
        and (
            not info.held_out
            or (held_out is not None and held_out.name.startswith("eval/") and held_out.unit == info.unit)
        )
    )


def test_no_metric_is_twice_in_a_view_and_every_field_is_known() -> None:
    assert [info.name for info in METRICS.values() if not is_sound(info)] == []


@pytest.mark.parametrize(
    "kind, names",
    [
        (
            "online",
            "score/mean kl/reference kl/coef critic/explained_variance completion/length eval/score "
            "cost/mean lagrange/multiplier kl/teacher",
        ),
        ("sft", "loss/sft loss/accuracy policy/grad_norm policy/lr eval/loss eval/score kl/teacher"),
        (
            "reward_model",
            "loss/rm rm/accuracy policy/grad_norm eval/rm_accuracy loss/process process/accuracy eval/process_accuracy",
        ),
        (
            "preference",
            "loss/preference preference/accuracy preference/margin eval/preference_accuracy eval/score "
            "preference/baseline",
        ),
    ],
)
def test_the_progress_line_of_a_run(kind: RunKind, names: str) -> None:
    assert progress_metrics(kind) == tuple(names.split())

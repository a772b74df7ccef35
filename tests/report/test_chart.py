"""A chart as drawn by plotly."""

from __future__ import annotations

from rlhf.report.charts import Axis, Chart, Series, plotly_figure


def chart(*series: Series, by_point: bool = False) -> Chart:
    x, y = Axis("KL to the start", "nats", short="KL"), Axis("score of the judge", "points", short="score")
    return Chart("a", "A", x, y, series, by_point=by_point)


def test_a_band_runs_along_its_upper_edge_and_back_along_the_lower_one() -> None:
    band, line = plotly_figure(chart(Series("ppo", "s3", [1, 2], [5, 7], band=[(4, 6), (5, 9)], group="arm")))["data"]
    assert (band["x"], band["y"]) == ([1, 2, 2, 1], [6, 9, 5, 4])
    assert (band["fill"], band["showlegend"], band["hoverinfo"]) == ("toself", False, "skip")
    assert (line["x"], line["y"], line["mode"]) == ([1, 2], [5, 7], "lines")
    for trace in (band, line):
        assert (trace["name"], trace["legendgroup"], trace["meta"]) == ("ppo", "arm", {"role": "s3"})


def test_lines_markers_and_bars() -> None:
    figure = plotly_figure(
        chart(
            Series("both", "s1", [1, 2], [1, None], size=[5, 11], dash="dot", errors=[0.1, None]),
            Series("start", "target", [0], [1], width=0, size=12, symbol="diamond", in_legend=False),
            Series("update", "s2", [1], [3], kind="bars"),
        )
    )
    both, start, bars = figure["data"]
    assert (both["mode"], both["line"]["dash"], both["marker"]["size"]) == ("lines+markers", "dot", [5, 11])
    assert (both["y"], both["error_y"]["array"]) == ([1, None], [0.1, None])
    assert (start["mode"], start["marker"]["symbol"], start["showlegend"]) == ("markers", "diamond", False)
    assert (bars["type"], bars["y"], figure["layout"]["barmode"]) == ("bar", [3], "stack")


def test_axes_and_what_pointing_at_a_point_shows() -> None:
    series = Series("ppo", "s1", [1], [1], texts=["step 4"])
    figure = plotly_figure(chart(series, by_point=True))
    assert figure["layout"]["xaxis"]["title"]["text"] == "KL to the start, nats"
    assert figure["layout"]["yaxis"]["title"]["text"] == "score of the judge"  # its unit is beside the chart's title
    assert figure["layout"]["hovermode"] == "closest"
    assert figure["data"][0]["hovertemplate"] == "%{text}<br>score %{y:.3f}<br>KL %{x:.2f}<extra></extra>"
    assert "hovertemplate" not in plotly_figure(chart(series))["data"][0]
    assert "template" not in figure["layout"]

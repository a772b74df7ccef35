"""Describe the results of a comparison in sentences and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.report.report_card import Table
from rlhf.tracking.progress import format_duration, format_number

Json = dict[str, Any]

UNITS = {
    "completions": "completions",
    "tokens": "tokens, generated and trained",
    "flops": "estimated FLOPs",
    "seconds": "seconds of training",
}


def verdict(results: Json) -> str:
    """Write two sentences: which trained arm is best and by how much, and how it compares with the next."""
    ranked = ranking(results)
    trained = [arm for arm in ranked if results["arms"][arm]["type"] == "train"]
    if not ranked:
        return "No arm was finished, so there is nothing to compare. What went wrong is in the notes below."
    best = (trained or ranked)[0]
    summary = results["arms"][best]
    gain, in_std = format_interval(summary["gain"], sign=True), format_interval(summary["gain_in_std"], sign=True)
    first = (
        f"{best} has the highest score of the judge, {format_number(summary['score'])}: {gain} over the start model, "
        f"or {in_std} of its standard deviations, {_kl(summary)} after {_budget(results)}."
    )
    return f"{first} {_second(results, best, [arm for arm in trained if arm != best])}"


def _second(results: Json, best: str, others: Sequence[str]) -> str:
    searched = [
        arm for arm, summary in results["arms"].items() if summary["type"] == "best_of_n" and summary.get("gain")
    ]
    search = "; ".join(
        f"the best of {results['arms'][arm]['n']} samples of the start model gains "
        f"{format_interval(results['arms'][arm]['gain'], sign=True)}"
        for arm in searched
        if arm != best
    )
    if not others:
        return f"There is no other trained arm to compare it with{'; ' + search if search else ''}."
    rate = next((row for row in results["win_rates"] if row["a"] == best and row["b"] == others[0]), None)
    if rate is None:
        return f"{others[0]}, the next, has no seed in common with it{'; ' + search if search else ''}."
    apart = rate["difference"]["low"] > 0 or rate["difference"]["high"] < 0
    judged = "the difference is clear of zero" if apart else "these data do not tell the two apart"
    return (
        f"Against {others[0]}, the next, it wins {format_percent(rate)} of the prompts and scores "
        f"{format_interval(rate['difference'], sign=True)} higher, so {judged}{'; ' + search if search else ''}."
    )


def ranking(results: Json) -> list[str]:
    """Return the arms that have a final score, the best first."""
    scored = {name: arm["score"] for name, arm in results["arms"].items() if arm.get("score") is not None}
    return sorted(scored, key=lambda name: -scored[name])


def format_interval(estimate: Mapping[str, Any] | None, *, sign: bool = False) -> str:
    """Format a value with its 95 % interval."""
    if estimate is None:
        return "–"
    texts = [f"{estimate[key]:{'+' if sign else ''}.2f}" for key in ("value", "low", "high")]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def format_percent(share: Mapping[str, Any]) -> str:
    """Format a share with its interval, in percent."""
    value, low, high = (round(100 * share[key]) for key in ("value", "low", "high"))
    return f"{value} % [{low}, {high}]"


def notes(results: Json) -> list[str]:
    """List the caveats for the reader: failed and unfinished cells, and limits of the comparison."""
    lines = [
        f"{name}, seed {cell['seed']}, failed: {cell['error']}"
        for name, arm in results["arms"].items()
        for cell in arm["seeds"]
        if cell["status"] == "failed"
    ]
    unfinished = [
        f"{name}, seed {cell['seed']}"
        for name, arm in results["arms"].items()
        for cell in arm["seeds"]
        if cell["status"] == "unfinished"
    ]
    if unfinished:
        lines.append(f"Not finished: {'; '.join(unfinished)}. The same command continues.")
    if results["judge_is_trained_on"]:
        lines.append("The judge is the reward that the arms are trained on: gaming it cannot be seen. Set judge.")
    if len(results["seeds"]) < 3:
        count = len(results["seeds"])
        lines.append(
            f"{count} seed{'s' if count > 1 else ''}: the intervals cover the variation between seeds only roughly."
        )
    if any(arm["kl_is_bound"] for arm in results["arms"].values()):
        lines.append("Best-of-n trains nothing and is no part of the budget: its cost is paid at every use.")
    return lines


def parallel_note(jobs: int) -> list[str]:
    """Return a note that seconds are not comparable, if several cells ran at once."""
    text = (
        f"{jobs} cells ran at once on shares of one machine: their seconds are not comparable with those of one alone."
    )
    return [text] if jobs > 1 else []


def end_table(results: Json) -> Table:
    """Build the table of the final models: the start model, then every arm, the best first."""
    rows: list[list[Any]] = [["start model", *_row(results["start_model"]), "–", "–", "–", "–"]]
    for name in ranking(results):
        arm = results["arms"][name]
        rate = arm["win_rate_over_start"]
        rows.append(
            [
                *(
                    name,
                    *_row(arm),
                    format_interval(arm["gain"], sign=True),
                    format_interval(arm["gain_in_std"], sign=True),
                ),
                *(format_percent(rate), format_percent(arm["length_controlled_win_rate_over_start"])),
            ]
        )
    columns = ["", "score", "proxy", "KL, nats", "exact KL", "length", "finished", "distinct-2", "repetition"]
    gains = ["gain over start", "in its standard deviations", "win rate over start", "at equal length"]
    return Table("At the end", [*columns, *gains], rows)


SUITE_FIGURES = 6  # the most figures of a suite that get a column


def suite_tables(results: Json) -> list[Table]:
    """Build a table for each suite: the start model, then every arm.

    Shares are in percent with intervals; the last column is the gain in the first figure.
    """
    start = results["start_model"].get("suites") or {}
    tables = []
    for suite, figures in start.items():
        names = list(figures)[:SUITE_FIGURES]
        rows: list[list[Any]] = [["start model", *(_suite_value(figures[name], name) for name in names), "–"]]
        for arm in ranking(results):
            figures_of_arm = results["arms"][arm].get("suites", {}).get(suite)
            if figures_of_arm is not None:
                gain = _suite_gain(figures_of_arm[names[0]]["gain"])
                rows.append(
                    [_with_n(results, arm), *(_suite_value(figures_of_arm[name], name) for name in names), gain]
                )
        columns = ["", *(name.replace("_", " ") for name in names), f"{names[0].replace('_', ' ')}, gain in points"]
        tables.append(Table(suite, columns, rows))
    return tables


def _with_n(results: Json, arm: str) -> str:
    n = results["arms"][arm]["n"]
    return arm if n is None else f"{arm}, n = {n}"


def _suite_value(figure: Json, name: str) -> str:
    if name == "length":
        return format_number(figure["value"])
    text = f"{100 * figure['value']:.1f}"
    return text if figure["low"] is None else f"{text} [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}]"


def _suite_gain(gain: Json | None) -> str:
    if gain is None:
        return "–"
    value, low, high = (f"{100 * gain[key]:+.1f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def equal_kl_table(results: Json) -> Table | None:
    """Build the table of every arm at the point where it first reached the common KL; None if there is none."""
    level, start = results["equal_kl"], results["start_model"]["score"]
    if level is None:
        return None
    rows = []
    for name in ranking(results):
        reached = results["arms"][name]["at_equal_kl"]
        if reached["score"] is None:
            rows.append([name, "not reached", None, None, 0])
        else:
            span = f"{reached['low']:.2f} to {reached['high']:.2f}"
            rows.append([name, reached["score"], reached["score"] - start, span, reached["seeds"]])
    rows.sort(key=lambda row: -row[1] if isinstance(row[1], float) else float("inf"))
    return Table(
        f"At a KL of {format_number(level)} nats",
        ["", "score", "gain over start", "lowest to highest seed", "seeds"],
        rows,
    )


def cost_table(results: Json) -> Table:
    """Build the table of what every arm spent, the mean over its seeds."""
    rows = []
    for name, arm in results["arms"].items():
        costs = arm.get("costs")
        if costs is not None:
            tokens = [round(costs[key]) for key in ("generated_tokens", "trained_tokens")]
            when = "at every use" if arm["type"] == "best_of_n" else "once"
            flops = f"{costs['flops']:.2e}"
            spent = [round(costs["completions"]), *tokens, flops, format_duration(costs["seconds"])]
            rows.append([name, *spent, _gigabytes(arm.get("peak_memory_mb")), when])
    columns = ["", "completions", "tokens generated", "tokens trained", "FLOPs, estimated", "seconds"]
    columns += ["peak memory, GB", "paid"]
    return Table("Mean over seeds", columns, rows)


def _gigabytes(megabytes: float | None) -> str:
    return "–" if megabytes is None else f"{megabytes / 1024:.1f}"


def _row(summary: Json) -> list[Any]:
    kl: Any = summary["kl"]
    if summary.get("kl_is_bound"):
        kl = f"≤ {summary['kl']:.2f}"
    texts = [summary["length"], summary["finished"], summary["distinct_2"], summary["repetition"]]
    return [summary["score"], summary["proxy"], kl, summary["kl_exact"], *texts]


def _kl(summary: Json) -> str:
    bound = "at most " if summary["kl_is_bound"] else ""
    return (
        f"at {bound}{format_number(summary['kl'])} nats of KL" if summary["kl"] is not None else "at a KL not measured"
    )


def _budget(results: Json) -> str:
    budget = results["budget"]
    limit = budget["limit"]
    return f"{f'{limit:,.0f}' if limit == int(limit) < 1e9 else format_number(limit)} {UNITS[budget['unit']]}"

"""Measure how a step's cost grows:   python benchmarks/scaling.py [--trainers grpo dpo] [--out benchmarks/results]

One quantity varies at a time around a base of the tiny shape: rows, new tokens, group size, vocabulary, model width.
Writes scaling.json and scaling.png (log-log), and prints the exponent of a fit: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter, NullLocator
from peers import work
from peers.runs import run_side
from peers.work import Job, Sizes, make_work

Point = tuple[float, float]
BASE = Sizes()
COLUMNS = 3


def cases(trainer: str) -> dict[str, list[tuple[float, str, Sizes]]]:
    """Return, for each quantity, the cases to measure: (value of the quantity, shape, sizes)."""
    layers, width, heads, vocabulary = work.SHAPES["tiny"]
    vocabularies, widths = (512, 2048, 8192, 32768), (64, 128, 256, 512)
    for size in vocabularies:
        work.SHAPES[f"v{size}"] = (layers, width, heads, size)
    for size in widths:
        work.SHAPES[f"w{size}"] = (layers, size, heads, vocabulary)
    common = {
        "vocabulary": [(float(v), f"v{v}", BASE) for v in vocabularies],
        "width": [(float(w), f"w{w}", BASE) for w in widths],
    }
    if trainer in ("grpo", "rloo"):
        return common | {
            "prompts a step": [(float(n), "tiny", replace(BASE, prompts=n)) for n in (2, 4, 8, 16, 32)],
            "new tokens": [(float(n), "tiny", replace(BASE, new_tokens=n)) for n in (16, 32, 64, 128)],
            "group size": [(float(n), "tiny", replace(BASE, group=n)) for n in (2, 4, 8, 16)],
        }
    return common | {"rows a step": [(float(n), "tiny", replace(BASE, rows=n)) for n in (8, 16, 32, 64)]}


def exponent(points: list[Point]) -> float:
    """Fit the slope of log seconds over log quantity by least squares."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    return statistics.linear_regression(xs, ys).slope


def main() -> None:
    """Run every case, print the exponents, write the JSON file and draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=["grpo", "dpo_cached"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    measured: dict[str, dict[str, list[Point]]] = {}
    for trainer in options.trainers:
        measured[trainer] = {}
        for quantity, values in cases(trainer).items():
            points = [(x, _seconds(trainer, shape, sizes, options)) for x, shape, sizes in values]
            measured[trainer][quantity] = points
            shown = ", ".join(f"{x:g}: {y:.3f} s" for x, y in points)
            sys.stdout.write(f"{trainer}, {quantity}: exponent {exponent(points):.2f}   ({shown})\n")
            sys.stdout.flush()
    (options.out / "scaling.json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    draw(measured).savefig(options.out / "scaling.png", dpi=140)


def _seconds(trainer: str, shape: str, sizes: Sizes, options: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        make_work(Path(name), shape, options.steps, sizes)
        job = Job(trainer, options.steps, name, threads=options.threads, sizes=sizes)
        return statistics.median(run_side(sys.executable, "ours.py", job, Path(name))["steps"])


def draw(measured: dict[str, dict[str, list[Point]]]) -> Figure:
    """Draw a panel for each quantity and a line for each trainer, with ticks at the measured values."""
    names = sorted({quantity for quantities in measured.values() for quantity in quantities})
    rows, colors = -(-len(names) // COLUMNS), {trainer: f"C{n}" for n, trainer in enumerate(sorted(measured))}
    figure = Figure(figsize=(3.4 * COLUMNS, 3.0 * rows), layout="constrained")
    for number, quantity in enumerate(names, start=1):
        axes = figure.add_subplot(rows, COLUMNS, number, xscale="log", yscale="log")
        lines = {trainer: quantities[quantity] for trainer, quantities in measured.items() if quantity in quantities}
        for trainer, points in lines.items():
            label = f"{trainer}, exponent {exponent(points):.2f}"
            axes.plot(*zip(*points, strict=True), marker="o", label=label, color=colors[trainer])
        _set_ticks(axes, sorted({x for points in lines.values() for x, _ in points}))
        axes.set(xlabel=quantity, ylabel="seconds a step")
        axes.legend(fontsize="small")
        axes.grid(visible=True, alpha=0.3)
    return figure


def _set_ticks(axes: Axes, values: list[float]) -> None:
    """Put the x ticks at `values`, and the y ticks at 1, 2 and 5 times powers of ten."""
    axes.set_xticks(values, [f"{x:g}" for x in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())


if __name__ == "__main__":
    main()

"""Rendering of a page: one self-contained HTML file with its scripts inline and all text escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from rlhf.evaluation.report_charts import Chart
from rlhf.runtime.progress import number, printable
from rlhf.runtime.run_folder import write_aside


def write_page(path: Path, template: str, charts: Sequence[Chart], **context: Any) -> Path:
    """Render `template`, which extends base.html.j2, with its charts into one self-contained file at `path`.

    Text is escaped by jinja2. In addition, the page's content security policy runs only the scripts with the hashes
    below and fetches nothing, so that a completion does no harm even if escaping fails.
    """
    scripts = {"theme_js": _asset("theme.js"), "plotly_js": _plotly(), "page_js": _asset("page.js")}
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts.values())
    page = (
        _environment()
        .get_template(template)
        .render(
            **context,
            **{name: Markup(script) for name, script in scripts.items()},
            style=Markup(_asset("style.css")),
            script_hashes=Markup(hashes),
            figures={chart.key: chart.figure for chart in charts},
        )
    )
    write_aside(path, page)
    return path


def show(value: object) -> str:
    """Format a value for a table or a tile: numbers are rounded, None is a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 1 else number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(show(entry) for entry in value)
    return str(value)


def _environment() -> Environment:
    """Create the jinja2 environment: autoescaping, strict about undefined names."""
    environment = Environment(
        loader=PackageLoader("rlhf.evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters["show"] = show
    return environment


def _printable(value: object) -> object:
    """Make control characters of a string printable: HTML does not allow them, and a model may write them."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _plotly() -> str:
    """Return the source of plotly.js."""
    script: str = get_plotlyjs()
    assert "</script" not in script.lower(), "this plotly.js cannot be embedded as it is"
    return script


def _asset(name: str) -> str:
    """Read a file of the templates folder."""
    return (files("rlhf.evaluation") / "templates" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash of a script in the form of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")

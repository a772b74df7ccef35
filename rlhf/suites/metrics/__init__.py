"""The metrics of the suites as modules of the `evaluate` library, one script each, loaded without network access.

The suites call `compute`; `evaluate.load(metric_path("pass_at_k"))` loads one in your own code.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def metric_names() -> list[str]:
    """Return the names of the metrics."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.py"))


def metric_path(name: str) -> str:
    """Return the script of a metric, for `evaluate.load`, as in `evaluate.load(metric_path("pass_at_k"))`.

    Raises:
        ValueError: there is no metric of that name.
    """
    if name not in metric_names():
        raise ValueError(f"no metric {name!r}; there are: {', '.join(metric_names())}")
    return str(FOLDER / f"{name}.py")


def compute(name: str, **inputs: Any) -> dict[str, Any]:
    """Compute a metric through the `evaluate` library, which is loaded at the first call."""
    results: dict[str, Any] = _load(name).compute(**inputs)
    return results


@cache
def _load(name: str) -> Any:
    import evaluate

    return evaluate.load(metric_path(name), keep_in_memory=True)

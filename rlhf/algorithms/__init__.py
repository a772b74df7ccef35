"""The algorithms: each file is one, with its settings, its equation, its usual ranges, its presets and its paper.

A file that is put beside them is found: all are imported with the package, so that their classes are registered. None
of them imports torch before it computes something, because a configuration is read without it.
"""

from __future__ import annotations

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

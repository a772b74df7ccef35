"""The base class of every section: frozen, closed to unknown keys, documented by its attribute docstrings."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the configuration; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


@dataclass(frozen=True)
class Needed:
    """Marks a field that has to be set; where it is not, the error says `<key> is missing: <reason>`."""

    reason: str

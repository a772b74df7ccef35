"""The base class of every section: frozen, closed to unknown keys, documented by its attribute docstrings."""

from __future__ import annotations

from collections.abc import Callable
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


def type_discriminator(default: str) -> Callable[[object], str]:
    """Build a discriminator for a union of sections: it returns a section's `type`, or `default` if that is not set."""

    def tag(value: object) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return str(kind)

    return tag

"""Render the equations of the site as MathML when it is built, so that a page runs no script and fetches nothing.

pymdownx.arithmatex marks `$…$` and `$$…$$`; browsers draw MathML themselves, and GitHub draws the same source.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Replace every marked equation of a page by MathML."""
    return MARKED.sub(lambda match: to_mathml(match[3], is_block=match[2] == "["), content)


def to_mathml(latex: str, *, is_block: bool) -> str:
    """Convert LaTeX, as it stands in HTML, to MathML; a long equation scrolls instead of being cut off."""
    mathml: str = convert(html.unescape(latex).strip(), display="block" if is_block else "inline")
    mathml = re.sub(r"(<mi>log</mi>)(?=<mi>|<msub>)", r'\1<mspace width="0.17em"/>', mathml)
    return f'<div class="equation">{mathml}</div>' if is_block else mathml

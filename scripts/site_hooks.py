"""Bring files that pages link to outside docs/ (configurations, figures) into the site, as mkdocs.yml asks."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")
INTERVAL = re.compile(r"<code.*?</code>|(\[[−\d.]+), (?=[−\d.]+\])", re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?:\.\./)+[^)\s#]+")
AS_THEY_ARE = (".png", ".svg", ".ipynb")
BOOSTS = (
    ("api/", 0.2),
    ("architecture", 0.2),
    ("decisions/", 0.2),
    ("experiments/", 0.3),
    ("", 2.0),
)  # a user asks for a guide


def outside(link: str, page: str) -> str | None:
    """Resolve a link of a page; return the path from the repository's root if it leads out of docs/ to a file."""
    target = (ROOT / "docs" / page).parent / link
    path = target.resolve()
    inside = path.is_relative_to(ROOT / "docs")
    return None if inside or not path.is_file() else path.relative_to(ROOT).as_posix()


def place(path: str) -> str:
    """Return where a file of the repository is in the site: as it is if an image or a notebook, else as plain text."""
    return f"repository/{path}" if path.endswith(AS_THEY_ARE) else f"repository/{path}.txt"


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page links to."""
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            path = outside(link, page.src_uri)
            if path is not None and files.get_file_from_path(place(path)) is None:
                files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace those links by links to the copies, and weigh the page for the search."""
    page.meta.setdefault("search", {"boost": next(b for folder, b in BOOSTS if page.file.src_uri.startswith(folder))})
    here = PurePosixPath(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        path = outside(match[0], str(here))
        return match[0] if path is None else get_relative_url(place(path), str(here))

    return LINK.sub(rewrite, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Write the code in tables without the backslashes before its bars, and keep both ends of an interval on a line."""
    content = CELL.sub(lambda cell: CODE.sub(lambda code: code[0].replace("\\|", "|"), cell[0]), content)
    return INTERVAL.sub(lambda part: f"{part[1]},\N{NO-BREAK SPACE}" if part[1] else part[0], content)

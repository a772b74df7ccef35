"""A page in a headless browser: its DOM after the scripts ran, their lines on the console, and a phone's view."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"),
    *("--virtual-time-budget=10000", "--window-size=1280,1000", "--allow-file-access-from-files", "--dump-dom"),
)

FRAME = """<!DOCTYPE html><body><iframe src="{page}" style="width:390px;height:2000px;border:0"></iframe>
<pre id="found"></pre><script>
document.querySelector("iframe").addEventListener("load", (event) => {{
  const page = event.target.contentDocument, view = event.target.contentWindow;
  const look = () => ({{
    background: view.getComputedStyle(page.body).backgroundColor,
    line: view.getComputedStyle(page.querySelector(".js-line")).stroke,
    button: page.getElementById("theme").textContent,
  }});
  setTimeout(() => {{
    const found = {{
      width: page.documentElement.scrollWidth,
      widest: Math.max(...[...page.querySelectorAll(".main-svg")].map((svg) => svg.getBoundingClientRect().width)),
      first: look(),
    }};
    page.getElementById("theme").click();
    setTimeout(() => {{
      found.second = look();
      document.getElementById("found").textContent = JSON.stringify(found);
    }}, 500);
  }}, 1000);
}});
</script></body>"""


AFTER = """<!DOCTYPE html><body><iframe src="{page}" style="width:{width}px;height:2000px;border:0"></iframe>
<pre id="found"></pre><script>
document.querySelector("iframe").addEventListener("load", (event) => {{
  const page = event.target.contentDocument;
  setTimeout(() => {{
    {script}
    setTimeout(() => {{ document.getElementById("found").textContent = JSON.stringify({expression}); }}, 1000);
  }}, 1000);
}});
</script></body>"""


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The DOM after the page's scripts ran, and the lines they left on the console."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def after(page: Path, folder: Path, *, script: str, expression: str, width: int = 390) -> tuple[Any, list[str]]:
    """The value of the JavaScript `expression` after `script` ran, and the console's lines; both see `page`."""
    frame = folder / "after.html"
    frame.write_text(
        AFTER.format(page=page.as_uri(), width=width, script=script, expression=expression), encoding="utf-8"
    )
    dom, console = browse(frame, folder / "profile")
    return json.loads(html.unescape(re.findall(r'<pre id="found">(.*?)</pre>', dom)[0])), console


def on_a_phone(page: Path, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Widths at 390 pixels, its look before and after the theme button, and the console's lines."""
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(page=page.as_uri()), encoding="utf-8")
    dom, console = browse(frame, folder / "profile")
    return json.loads(re.findall(r'<pre id="found">(.*?)</pre>', dom)[0]), console

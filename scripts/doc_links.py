"""Fill in and mark up generated pages: citations become links to arXiv, settings and metrics code spans."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent / "templates"


def fill_template(name: str, **values: Iterable[str]) -> str:
    """Return the template of a page with lines in the places of their names, as in {{rows}}."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    for key, lines in values.items():
        text = text.replace(f"{{{{{key}}}}}", "\n".join(lines).strip("\n"))
    return text


PAPERS = {
    "Ahmadian et al. 2024": "2402.14740",
    "Andrychowicz et al. 2021": "2006.05990",
    "Azar et al. 2024": "2310.12036",
    "Chowdhury et al. 2024": "2403.00409",
    "Cobbe et al. 2020": "2009.04416",
    "Coste et al. 2024": "2310.02743",
    "Cui et al. 2025": "2505.22617",
    "Dong et al. 2023": "2304.06767",
    "Eisenstein et al. 2023": "2312.09244",
    "Espeholt et al. 2018": "1802.01561",
    "Ethayarajh et al. 2024": "2402.01306",
    "Gao et al. 2023": "2210.10760",
    "Guo et al. 2024": "2402.04792",
    "Holtzman et al. 2020": "1904.09751",
    "Hong et al. 2024": "2403.07691",
    "Hu et al. 2021": "2106.09685",
    "Hu et al. 2025 (Open Reasoner Zero)": "2503.24290",
    "Huang et al. 2024": "2403.17031",
    "Khatri et al. 2025": "2510.13786",
    "Kirk et al. 2024": "2310.06452",
    "Lee et al. 2022": "2107.06499",
    "Li et al. 2024": "2310.10505",
    "Liu et al. 2024": "2309.06657",
    "Liu et al. 2026": "2601.05242",
    "Meng et al. 2024": "2405.14734",
    "MiniMax 2025": "2506.13585",
    "Nath et al. 2025": "2506.13923",
    "Ouyang et al. 2022": "2203.02155",
    "Pang et al. 2024": "2404.19733",
    "Rafailov et al. 2023": "2305.18290",
    "Rafailov et al. 2024": "2406.02900",
    "Schulman et al. 2015": "1502.05477",
    "Schulman et al. 2016": "1506.02438",
    "Schulman et al. 2017": "1707.06347",
    "Shao et al. 2024": "2402.03300",
    "Singhal et al. 2023": "2310.03716",
    "Stiennon et al. 2020": "2009.01325",
    "Touvron et al. 2023": "2307.09288",
    "Xu et al. 2024": "2404.10719",
    "Yan et al. 2025": "2504.14945",
    "Ye et al. 2020": "1912.09729",
    "Yu et al. 2025": "2503.14476",
    "Yuan et al. 2025": "2503.01491",
    "Zhao et al. 2023": "2305.10425",
    "Zheng et al. 2023 (Secrets of RLHF)": "2307.04964",
    "Zheng et al. 2025": "2507.18071",
    "Ziegler et al. 2019": "1909.08593",
}
"""Citation -> number on arXiv, of the papers that settings, rules and alarms cite."""

_CITATION = re.compile("|".join(re.escape(citation) for citation in PAPERS))


def link_papers(text: str) -> str:
    """Link every citation of a known paper."""
    return _CITATION.sub(lambda match: f"[{match[0]}](https://arxiv.org/abs/{PAPERS[match[0]]})", text)


_VALUE = r"(?:=(?:[\w.+-]*\w|\[[^\]]*\]))?"
_CODE = re.compile(
    rf"(?<![\w`/.])(?:[a-z_]+(?:\.[a-z_]+)+{_VALUE}|[a-z]+/[a-z]+(?:_[a-z0-9]+)*|[a-z]+_[a-z_]+{_VALUE}|{{}})(?![\w`/])"
)


def code_spans(text: str) -> str:
    """Put setting keys, `key=value` and metric names into code spans."""
    return _CODE.sub(lambda match: f"`{match[0]}`", text)


def link_pages(text: str, folder: str = "") -> str:
    """Link the pages that a text names as docs/NAME.md; `folder` leads from the generated page to docs/."""
    return re.sub(r"`?docs/(\w+)`?\.md", rf"[\1]({folder}\1.md)", text)

"""Links of the documentation lead to files and headings, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .sources import PACKAGE, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]*))?\)")
SOURCE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|h|cpp|sh|json))`")


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {name}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {name}#{anchor}, a heading that does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    for name in SOURCE.findall(page.read_text(encoding="utf-8")):
        exists = (ROOT / name).exists() or (page.parent / name).exists() or any(PACKAGE.rglob(name))
        assert exists, f"{page.name} names {name}, which does not exist"

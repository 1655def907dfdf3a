"""Pages of the documentation: their Python blocks, and what they link to.

Terms: a *file* block has a title and is saved under it, as the page says; other blocks of a page are one script.

    PAGES                                  every page, as paths from docs/
    script(page) -> Script                 the blocks of a page
    links(page) -> [(target, anchor)]      links within the documentation
    anchors(page) -> {anchor}              what links may lead to
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```python(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)```", re.S
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Script:
    """files: by name. code: the other blocks, joined; blank lines in between make its lines those of the page."""

    files: dict[str, str]
    code: str


def script(page: str) -> Script:
    """The blocks of a page. A block under `<!-- not run: reason -->` is left out."""
    text = (DOCS / page).read_text()
    files: dict[str, str] = {}
    lines: list[str] = []
    for block in BLOCK.finditer(text):
        if block["why"]:
            continue
        if block["title"]:
            files[block["title"]] = block["code"]
            continue
        start = text.count("\n", 0, block.start("code"))
        lines += [""] * (start - len(lines)) + block["code"].splitlines()
    return Script(files, "\n".join(lines) + "\n")


def links(page: str) -> list[tuple[str, str]]:
    """(path from docs/, anchor) of every link to this site; the path is the page's own for `#anchor`."""
    found = []
    for target in LINK.findall(_without_code((DOCS / page).read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        where = (DOCS / page).parent / path if path else DOCS / page
        found.append((str(where.resolve().relative_to(ROOT)), anchor))
    return found


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as Python-Markdown and GitHub make them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", _without_code(path.read_text()), re.M):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)

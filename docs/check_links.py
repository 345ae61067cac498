"""A hook of mkdocs: every link of the built site leads to a file of the site, and every anchor to an element.

mkdocs itself checks links in Markdown only. This check reads the HTML, so it also covers notebooks and generated pages.
"""

from __future__ import annotations

import logging
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

log = logging.getLogger("mkdocs.hooks.check_links")  # --strict fails at a warning below `mkdocs`
LINKS = {"a": "href", "link": "href", "img": "src", "script": "src"}
SCRIPTED = ("__",)  # anchors that the theme's scripts make, such as `__tabbed_1_1`


class Page(HTMLParser):
    """The links and the anchors of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if link := values.get(LINKS.get(tag, "")):
            self.links.append(link)


def broken(site: Path) -> list[str]:
    """`PAGE: LINK` for each internal link of the HTML pages under `site` that leads nowhere."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in sorted(pages.items()):
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else None
            if not target.is_file() or (anchor and known is not None and not _known(anchor, known)):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


def _known(anchor: str, anchors: set[str]) -> bool:
    return anchor in anchors or anchor.startswith(SCRIPTED)


def on_post_build(config: Any) -> None:
    """Warn of each broken link; `mkdocs build --strict` then fails."""
    for link in broken(Path(config.site_dir)):
        log.warning("This link of the built site leads nowhere: %s", link)

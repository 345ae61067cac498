"""A hook of mkdocs: links from docs/ to Python files of the repository lead to pages of the site with their source.

A link's title names a definition in the file: `[Source](../qattn_hf/patcher.py "patch")`. On the site the link leads to
the definition's line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[\w/]+\.py)(?: \"(?P<name>\w+)\")?\)")
FENCE = "~" * 8  # longer than any fence inside a docstring


def page_of(path: str) -> str:
    """The page of the site that shows the file `path` of the repository."""
    return f"source/{path.removesuffix('.py')}.md"


def line_of(path: str, name: str) -> int:
    """The line where a file defines a function, class or value."""
    pattern = re.compile(rf"(?:async def|def|class) {name}\b|{name}\b.*=")
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 1)


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each Python file that a page links to."""
    texts = [file.content_string for file in files.documentation_pages() if file.src_uri.endswith(".md")]
    for path in sorted({link["path"] for text in texts for link in LINK.finditer(text)}):
        code = (ROOT / path).read_text(encoding="utf-8")
        text = f'# {path}\n\n{FENCE}python linenums="1"\n{code}{FENCE}\n'
        files.append(File.generated(config, page_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links at these pages."""
    up = "../" * page.file.src_uri.count("/")
    return LINK.sub(
        lambda link: f"]({up}{page_of(link['path'])}" + (f' "{link["name"]}")' if link["name"] else ")"), markdown
    )


def on_page_content(html: str, **_: Any) -> str:
    """Point a link with a name at the name's line. mkdocs refuses anchors of lines, so this runs after its check."""

    def at_line(link: re.Match[str]) -> str:
        return f'{link["page"]}#__codelineno-0-{line_of(link["path"] + ".py", link["name"])}"'

    return re.sub(r'(?P<page>href="(?:\.\./)*source/(?P<path>[\w/]+)/)" title="(?P<name>\w+)"', at_line, html)

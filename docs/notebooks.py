"""A hook of mkdocs: the notebooks of examples/, a folder next to docs/, as pages of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\((?:\.\./)*)\.\./(examples/\w+\.ipynb\))")
BETWEEN = re.compile(r'(?<=href=")(\w+)\.ipynb(?=[#"])')
PAGES = re.compile(r'(?<=href=")\.\./docs/([\w-]+)\.md(?=[#"])')


@event_priority(100)  # ahead of mkdocs-jupyter, which looks for notebooks among the files
def on_files(files: Files, config: Any) -> Files:
    """Add every notebook, under `examples/` of the site."""
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks, which leave docs/ in the repository, stay inside the site."""
    return LINK.sub(r"\1\2", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links of a notebook to other notebooks and to docs/ lead to their pages."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return PAGES.sub(r"../../\1/", BETWEEN.sub(r"../\1/", html))

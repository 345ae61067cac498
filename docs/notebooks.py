"""A hook of mkdocs: the notebooks of examples/, which lie beside docs/, as pages of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\((?:\.\./)*)\.\./(examples/\w+\.ipynb\))")


@event_priority(100)  # before mkdocs-jupyter, which looks for notebooks among the files
def on_files(files: Files, config: Any) -> Files:
    """Add every notebook, under `examples/` of the site."""
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks, which leave docs/ in the repository, stay inside the site."""
    return LINK.sub(r"\1\2", markdown)

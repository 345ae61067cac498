"""Prepare a checkout for a release: links of README.md become absolute, pyproject.toml gets the addresses.

Usage: python .ci/package_page.py https://HOST/OWNER/NAME

A package page shows README.md outside the repository, where relative links lead nowhere. The address is known where a
release is built, so it is an argument and no file of the repository names it. The two files are changed in place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)")


def version_of(root: Path) -> str:
    """The version in `qattn_hf/_version.py`, without an import of the package."""
    text = (root / "qattn_hf" / "_version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)[0]


def absolute_links(text: str, address: str, tag: str) -> str:
    """`text` with each relative link leading to the file of that tag; links to headings and other sites stay."""

    def absolute(link: re.Match[str]) -> str:
        target = link["target"]
        if re.match(r"\w+:|#", target):
            return link[0]
        return f"{link['image']}{link['text']}({address}/{'raw' if link['image'] else 'blob'}/{tag}/{target})"

    return LINK.sub(absolute, text)


def project_urls(address: str, tag: str) -> str:
    """The table `[project.urls]` of pyproject.toml."""
    pages = {"Homepage": "", "Documentation": f"/blob/{tag}/docs/index.md", "Changelog": f"/blob/{tag}/CHANGELOG.md"}
    pages |= {"Issues": "/issues", "Source": f"/tree/{tag}"}
    return "[project.urls]\n" + "".join(f'{name} = "{address}{path}"\n' for name, path in pages.items())


def prepare(root: Path, address: str) -> None:
    """Change README.md and pyproject.toml below `root`.

    Raises:
        SystemExit: the address is no https address, or the checkout has been prepared before.
    """
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", address):
        raise SystemExit(f"{address!r} is not an address such as https://HOST/OWNER/NAME. Fix: pass one")
    readme, project = root / "README.md", root / "pyproject.toml"
    settings = project.read_text(encoding="utf-8")
    if "\n[project.urls]\n" in settings:
        raise SystemExit("pyproject.toml already has [project.urls]. Fix: git checkout README.md pyproject.toml")
    tag = f"v{version_of(root)}"
    readme.write_text(absolute_links(readme.read_text(encoding="utf-8"), address, tag), encoding="utf-8")
    table = f"{project_urls(address, tag)}\n[project.optional-dependencies]"
    project.write_text(settings.replace("[project.optional-dependencies]", table, 1), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    prepare(ROOT, sys.argv[1])

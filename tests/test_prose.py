"""Worn phrases in what people read: pages, docstrings, comments, help texts and messages, each with the better word."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a phrase is replaced by. `start` is where a sentence, a cell or a docstring begins.
START = r"(?:^|(?<=[.:;] )|(?<=\| ))"
WORDS = {
    r"\bof which\b": "a second sentence, or `and ... of them`",
    r"\bby which\b": "`that`, or say what it does",
    r"\bbeside\b": "`next to`, `with`, `and`, `compared with`",
    r"\bstands?\b(?! out\b| alone\b|-in\b)": "`is`",
    r"\bcomes? along\b": "`bundled`, `of the package`",
    r"\bno longer\b": "what is true now",
    r"\bused to\b": "what is true now",
    r"\bfor want of\b": "`without`, or what fails",
    r"\bthe very\b": "`the`",
    r"\bof one's own\b": "`custom`, `your own`",
    r"\b(?:thereby|hereby|wherein|whereof|thereof)\b": "a plain sentence",
    rf"{START}(?:Those|That) of\b": "the thing's name",
}
RULES = {re.compile(pattern, re.MULTILINE): better for pattern, better in WORDS.items()}
# Not rewritten yet: nothing is asked of these. Take an entry out when its text is done.
PENDING = {
    "CHANGELOG.md": "history is what it tells",
    "docs/methods": "descriptions of settings, which `eval/tables.py` copies from qattn_hf/methods",
    "docs/add-a-method.md": "not rewritten",
    "docs/api.md": "made of docstrings",
    "docs/architecture.md": "not rewritten",
    "docs/kernels.md": "not rewritten",
    "docs/measure-and-record.md": "not rewritten",
    "docs/models.md": "reasons of refusals and of families, copied from code and configs",
    "qattn_hf": "not rewritten but for the folders in DONE",
}
DONE = ("qattn_hf/cli", "qattn_hf/server", "qattn_hf/generate/cuda_graph")
FICTION = "qattn_hf/cli/_prompts.py"  # a prompt written as a story
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs")


def below(name: str, folders: tuple[str, ...]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def asked() -> Iterator[Path]:
    """The files that the list holds for."""
    pages = [p for name in PAGES for p in ([ROOT / name] if name.endswith(".md") else (ROOT / name).rglob("*.md"))]
    for path in sorted([*pages, *(ROOT / "qattn_hf").rglob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        if name != FICTION and (below(name, DONE) or not below(name, tuple(PENDING))):
            yield path


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Pieces of text with their first line: a page without code, or the strings and comments of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blank = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
        yield 1, re.sub(r"`[^`\n]*`", "``", blank)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def found_in(line: int, text: str, name: str) -> Iterator[str]:
    for rule, better in RULES.items():
        for hit in rule.finditer(text):
            yield f"{name}:{line + text.count(chr(10), 0, hit.start())}: {hit[0]!r}. Better: {better}"


def test_no_worn_phrase():
    assert [
        hit
        for path in asked()
        for line, text in prose(path)
        for hit in found_in(line, text, path.relative_to(ROOT).as_posix())
    ] == []


def test_a_phrase_is_found_with_its_place_and_the_better_word(tmp_path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("# Page\n\n```\nbeside\n```\n\nA cache stands `beside` it.\n", encoding="utf-8")
    module.write_text('x = 1  # blocks, of which one is open\n"""Those of a row."""\n', encoding="utf-8")
    hits = [hit for path in (page, module) for line, text in prose(path) for hit in found_in(line, text, path.name)]
    assert hits[0] == "page.md:7: 'stands'. Better: `is`"
    assert sorted(hit.split(":")[1] for hit in hits[1:]) == ["1", "2"] and len(hits) == 3


def test_what_is_pending_exists():
    assert [name for name in (*PENDING, *DONE) if not (ROOT / name).exists()] == []

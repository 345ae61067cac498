"""Worn phrases in what people read: pages, notebooks, docstrings, comments, help texts and messages.

Each phrase has the better word. Generated parts of pages are left out: their words are those of code and records.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a phrase is replaced by. `START` is where a sentence, a cell or a docstring begins.
START = r"(?:^|(?<=[.:;] )|(?<=\| ))"
WORDS = {
    r"\bof which\b": "a second sentence, or `and ... of them`",
    r"\bby which\b": "`that`, or say what it does",
    r"\bbeside\b(?!: )": "`next to`, `with`, `and`, `compared with`",
    r"\bstands?\b(?! out\b| alone\b|-in\b)": "`is`",
    r"\bcomes? along\b": "`bundled`, `of the package`",
    r"\bno longer\b": "what is true now",
    r"\bused to\b": "what is true now",
    r"\bfor want of\b": "`without`, or what fails",
    r"\bthe very\b": "`the`",
    r"\bof one's own\b": "`custom`, `your own`",
    r"\b(?:thereby|hereby|wherein|whereof|thereof)\b": "a plain sentence",
    rf"{START}(?:Those|That) of\b": "the thing's name",
    r"\bbehind\b(?! a (?:proxy|firewall)\b)": "`after`, or the reason in words",
    r"\bof (?:its|their|your|our|his) own\b": "`its own ...`, `custom`, `separate`",
    r"\bthe model's own\b": "`unpacked`, `Transformers' own`",
    r"\bin (?:the model's|model) precision\b": "`in bf16 or fp16`, `in full precision`, `unquantized`",
    r"(?<!twice )(?<!half )\b(?:so|as) many\b(?! \w+ as\b)": "the number, or its name",
    r"\bwhat of\b": "the thing's name",
    r"\b(?:moreover|likewise|whatsoever|for lack of|in place of what)\b": "a plain sentence",
    r"\bone's\b": "`your`, or the thing's name",
}
RULES = {re.compile(pattern, re.MULTILINE): better for pattern, better in WORDS.items()}
ANY = re.compile("|".join(WORDS), re.MULTILINE)  # one pass over text without a phrase, which most is
MADE = re.compile(r"<!-- table:.*?<!-- /table -->", re.DOTALL)
CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
LONGEST = 40  # words of a sentence on a page; lists of names need about that many
# This list, and texts that models read: stories and prompts.
LEFT = {"tests/test_prose.py", "qattn_hf/cli/_prompts.py", "qattn_hf/assets/prose.py", "qattn_hf/assets/demo_tasks.py"}
FOLDERS = ("qattn_hf", "kernels", "eval", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")


def asked() -> Iterator[Path]:
    """The files that the list holds for."""
    pages = [*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.ipynb")]
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return (path for path in sorted(pages + modules) if path.relative_to(ROOT).as_posix() not in LEFT)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Pieces of text with their first line: a page or the cells of a notebook without code, or a module's strings and
    comments. The first line of a cell is the cell's number."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, without_code(text)
        return
    if path.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(text)["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                yield number, without_code(source)
            else:
                yield number, "\n".join(re.findall(r"# (.*)$", source, re.MULTILINE))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for number, line in enumerate(text.splitlines(), 1):  # a string with this sign is asked twice
        if "#" in line:
            yield number, line.partition("#")[2].lstrip("# ")


def without_code(text: str) -> str:
    """Markdown without generated parts, blocks of code and code spans; lines stay where they are."""
    for part in (MADE, CODE):
        text = part.sub(lambda match: "\n" * match[0].count("\n"), text)
    return re.sub(r"`[^`\n]*`", "``", text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of Markdown: a row of a table or an entry of a list ends one, too."""
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)| \| |(?<=[.:;?!])[\s*]+(?=[A-Z`\[*])", text):
        yield " ".join(part.split())


def found_in(line: int, text: str, name: str) -> Iterator[str]:
    for rule, better in RULES.items() if ANY.search(text) else ():
        for hit in rule.finditer(text):
            yield f"{name}:{line + text.count(chr(10), 0, hit.start())}: {hit[0]!r}. Better: {better}"


def test_no_worn_phrase():
    assert [
        hit
        for path in asked()
        for line, text in prose(path)
        for hit in found_in(line, text, path.relative_to(ROOT).as_posix())
    ] == []


def test_no_sentence_of_a_page_is_too_long():
    pages = [path for path in asked() if path.suffix != ".py"]
    assert [
        f"{path.relative_to(ROOT).as_posix()}: {sentence}"
        for path in pages
        for _, text in prose(path)
        for sentence in sentences(text)
        if len(re.findall(r"[\w`'-]+", re.sub(r"\]\([^)]*\)", "]", sentence))) > LONGEST
    ] == []


def test_a_phrase_is_found_with_its_place_and_the_better_word(tmp_path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("# Page\n\n```\nbeside\n```\n\nA cache stands `beside` it.\n", encoding="utf-8")
    module.write_text('x = 1  # blocks, of which one is open\n"""Those of a row."""\n', encoding="utf-8")
    hits = [hit for path in (page, module) for line, text in prose(path) for hit in found_in(line, text, path.name)]
    assert hits[0] == "page.md:7: 'stands'. Better: `is`"
    assert sorted(hit.split(":")[1] for hit in hits[1:]) == ["1", "2"] and len(hits) == 3


def test_what_is_left_exists():
    assert [name for name in LEFT if not (ROOT / name).exists()] == []

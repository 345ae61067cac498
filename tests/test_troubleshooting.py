"""docs/troubleshooting.md quotes messages that the code gives."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = [" ".join(quote.split()) for quote in re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)]
GAP = "\0"  # where a message of the code has a value, and a quote has `...`


@functools.cache
def messages() -> set[str]:
    """Every string of the packages, `GAP` in place of the values of an f-string."""
    found = set()
    for folder in (ROOT / "qattn_hf", ROOT / "kernels" / "qattn_kernels"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else GAP for p in node.values]
                    found.add(" ".join("".join(map(str, parts)).split()))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(" ".join(node.value.split()))
    return found


def given(quote: str) -> bool:
    """Whether one message has the text of the quote, with a value at each `...` inside it."""
    parts = [re.escape(part.strip()) for part in quote.split("...") if part.strip()]
    pattern = re.compile(rf"\s*[^{GAP}]?{GAP}[^{GAP}]?\s*".join(parts))
    return any(pattern.search(message) for message in messages())


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_of_the_code(quote: str):
    assert given(quote)


def test_a_message_that_the_code_does_not_give_is_found():
    assert not given("the cache holds ... tokens a row and generate may want ...")
    assert len(QUOTES) > 12


def test_every_symptom_has_a_fix():
    """A section without a subsection has one; others have one in each subsection."""
    sections = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]
    lacking = [s.splitlines()[0] for s in sections if "**Fix:**" not in s and s.count("\n") > 2]
    assert lacking == []
